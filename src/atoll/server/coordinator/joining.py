"""What happens when a site joins a run: the message that describes the run, and the checks of the site's message."""

from __future__ import annotations

import logging
from typing import Literal

from pydantic import ValidationError

from atoll import registry
from atoll.aggregation.plan import Plan
from atoll.config.bounds import MAX_WEIGHT
from atoll.errors import ConfigError, SchemaMismatch, ServerLost
from atoll.format_text import number_of, size
from atoll.protocol import messages, routes
from atoll.protocol.served_versions import skew
from atoll.store.journal_tables import TicketRow
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

# -- Description of a run. A worker reads it before it joins, and compares it with its own settings.


_SETTINGS = {
    "codec_options": "aggregation.upload_codec",
    "downlink_codec_options": "aggregation.download_codec",
    "local": "algorithm",
    "name": "run.name",
}
"""Field of `RunInfo` that the user sets → the setting."""


def run_info(plan: Plan, run_id: str, receipt_key: str = "") -> messages.RunInfo:
    """Return the message that describes a run with this plan.

    Raises:
        ConfigError: a setting, such as an option of the codec, is too long for the message.
    """
    settings, algorithm = plan.settings, plan.algorithm
    codec, downlink_codec = plan.sent_codecs
    try:
        return messages.RunInfo(
            protocol=routes.PROTOCOL,
            oldest_protocol=routes.OLDEST_PROTOCOL,
            run=run_id,
            receipt_key=receipt_key,
            name=settings.run.name,
            algorithm=registry.ReceivedName(algorithm.name),
            local=algorithm.local,
            local_package=registry.package_of("algorithms", algorithm.name) if algorithm.local is not None else "",
            on_missed=algorithm.algorithm.on_missed,
            rounds=settings.rounds.total,
            sync_every=algorithm.sync_every,
            mode="async" if settings.async_.enabled else "sync",
            placement="swarm" if settings.swarm.enabled else "server",
            sync_rounds_first=settings.async_.sync_rounds_first,
            barrier=not settings.async_.enabled and not settings.rounds.quorum,
            schema_digest=plan.schema.digest,
            fragments=len(plan.fragments),
            tau=settings.diloco.fragment_sync_delay,
            alpha=settings.diloco.fragment_update_alpha,
            needs_steps=plan.needs_steps,
            max_weight=min(settings.aggregation.max_weight, MAX_WEIGHT),  # a run of an earlier version
            max_steps=settings.aggregation.max_steps,
            max_inflight=settings.diloco.max_inflight,
            codec=codec,
            codec_options=algorithm.codec_options,
            downlink_codec=downlink_codec,
            downlink_codec_options=settings.aggregation.download_codec.options,
            part_bytes=settings.network.part_bytes,
            ranks=settings.model.ranks,
            connections=settings.network.connections,
            heartbeat_interval_s=messages.bounded_s(settings.network.heartbeat_interval_s),
            heartbeat_timeout_s=messages.bounded_s(settings.network.heartbeat_timeout_s),
            idle_timeout_s=messages.bounded_s(settings.network.idle_timeout_s),
        )
    except ValidationError as error:
        raise ConfigError(
            messages.unsendable(error, _SETTINGS),
            "The options of a codec are numbers, short texts and short lists of these.",
        ) from None


def require_fit(message: messages.Join, plan: Plan, store: Store) -> None:
    """Raise an error if a site that wants to join does not fit the run.

    Raises:
        VersionSkew: the server does not serve the protocol of the site.
        ServerLost: the site takes part in another run.
        SchemaMismatch: the site has another model.
        ConfigError: the site has another number of local steps H or of fragments; or it has lost its algorithm's local
            state, or has a state that does not fit its updates in the run.
    """
    if not routes.OLDEST_PROTOCOL <= message.protocol <= routes.PROTOCOL:
        raise skew(f"Worker {message.site}", message.protocol, f"worker {message.site}")
    run = store.run_log.run_id
    if message.run not in ("", run):
        raise ServerLost(
            f"The server now has another run: {plan.settings.run.name} ({run}). Worker {message.site} takes "
            f"part in {message.run}, which has ended or was started again from the beginning.",
            "To take part in the new run, start the script again. To continue the old run, start its server "
            "with the old disk.state_dir.",
        )
    model = plan.schema.model  # a worker that joins knows the model's tensors, not the algorithm's
    if message.schema_digest not in (None, plan.schema.digest, model.digest):
        raise SchemaMismatch(
            f"The model of worker {message.site} (schema {str(message.schema_digest)[:12]}) differs from the "
            f"run's model (schema {model.digest[:12]}; it has {number_of(len(model.tensors), 'tensor')} with "
            f"{size(model.nbytes)}, and the first tensor is {model.tensors[0]}).",
            f"Build the same architecture with the same dtype on both sides. The run's schema is at {routes.SCHEMA}.",
        )
    sync_every = plan.algorithm.sync_every
    if sync_every and message.sync_every not in (None, sync_every):
        raise ConfigError(
            f"Worker {message.site} synchronises every {message.sync_every} steps, but the run every {sync_every}.",
            f"Set sync_every={sync_every} at the worker, or leave it out.",
        )
    fragments = len(plan.fragments)
    if message.num_fragments not in (None, fragments):
        raise ConfigError(
            f"Worker {message.site} has {number_of(message.num_fragments, 'fragment')}, but the run has {fragments}.",
            f"Set num_fragments={fragments} at the worker, or leave it out.",
        )
    if message.local_state:
        _require_state(message, store)


def _require_state(message: messages.Join, store: Store) -> None:
    """Raise an error if a site has lost its algorithm's local state, or has a state from before its last update.

    If the user lets the state start from zero, only log a warning. A state from after its last update is no error of
    the site: the server has gone back. See `why_anew`.
    """
    site = message.site
    if _fit(message, site, store) != "behind":
        return
    last = store.tickets.last_of(site)
    counted = next((member.rounds_counted for member in store.run_log.members() if member.site == site), 0)
    count = counted + (last is not None and last.state == "accepted")  # an accepted update is going to count
    loss = f"This run has accepted {number_of(count, 'update')} of {site}"
    if message.local_state == "new" or message.new_local_state:
        LOG.warning("%s, but the site has lost its algorithm's state, which starts from zero again", loss)
        return
    host = message.host or "its machine"
    raise ConfigError(
        (
            f"{loss}, but on {host} the site does not have the algorithm's state after that: the folder or "
            "machine is a different one, or the files were removed."
        )
        if message.local_state == "missing"
        else (
            f"{loss}, but the algorithm's state that the site has on {host} is from before the last of them: the "
            "site's folder was restored from an older copy."
        ),
        f"Set ATOLL_DIR to the folder that the site had before, or copy {site}/{store.run_log.run_id} from "
        "there. Without that folder, start a new run from the exported model, or set ATOLL_NEW_STATE=1 to "
        "start from zero.",
    )


# -- The state that the algorithm keeps at sites: docs/decisions/0035


def why_anew(message: messages.SiteState, site: str, store: Store, algorithm: str) -> str:
    """Return why the algorithm's state has to begin at zero again, everywhere, as a sentence; empty if it has not.

    The state of a site has to include exactly the site's updates that the newest version contains. A site cannot return
    to an earlier state if the server has gone back by more than one of its updates. So both begin anew.

    Args:
        message: what the site says of its state.
        site: the site's name.
        store: the store of the run.
        algorithm: name of the algorithm, for the text.
    """
    fit, version = _fit(message, site, store), store.versions.head().version
    if fit == "ahead":
        return (
            f"The server has gone back to version {version}: it was restored from a backup, or newer versions were "
            f"damaged; {site} has a later state of {algorithm}"
        )
    if fit == "behind" and (message.local_state == "new" or message.new_local_state):
        return f"{site} has lost its state of {algorithm}, and ATOLL_NEW_STATE lets it start from zero"
    return ""


def _fit(message: messages.SiteState, site: str, store: Store) -> Literal["current", "ahead", "behind"]:
    """Return how a site's local state fits to its last aggregated update and, if there is one, its accepted update.

    current: the state includes both, or it can be made so. It is always current if the run has no such update in the
    present generation: then the state has to be zero, and every state can be made zero.
    ahead: it includes later updates, so the server has gone back. The site cannot.
    behind: the site has no state, or one from before these updates.
    """
    required, last = [counted_of(site, store)], store.tickets.last_of(site)
    if last is not None and last.state == "accepted":
        required.append(_named(last, required[0].generation))
    offered = message.local_state_of if message.local_state == "kept" else []
    lacking = [
        each.position
        for each in required
        if each.base_version is not None and not any(mine.names(each) for mine in offered)
    ]
    if not lacking:
        return "current"
    return "ahead" if max([each.position for each in offered], default=(-1, -1)) >= max(lacking) else "behind"


def counted_of(site: str, store: Store) -> messages.Counted:
    """Return the base version and the digest of the site's last aggregated update; without one, neither.

    The site's local state must include this update. Only updates of the present generation matter.
    """
    generation = store.run_log.generation
    row = store.tickets.last_counted(site, since=generation.version)
    return messages.Counted(generation=generation.number) if row is None else _named(row, generation.number)


def _named(row: TicketRow, generation: int) -> messages.Counted:
    return messages.Counted(base_version=row.base_version, digest=row.digest or "", generation=generation)
