"""Take part in a run as a worker: open the site's folder and the files of each fragment, then join."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from atoll.algorithms.resolve import local_rule
from atoll.errors import ConfigError
from atoll.filters.base import Filter, require_filters
from atoll.filters.site_filters import site_filters
from atoll.format_text import number_of
from atoll.protocol import routes
from atoll.protocol.messages import RunInfo
from atoll.protocol.swarm_messages import SwarmPlan
from atoll.tensors.fsdp_shards import Shard, Shards
from atoll.tensors.schema import Schema
from atoll.transport.http_client import Http, http_to
from atoll.transport.part_transfer import HttpTransfer
from atoll.worker.arguments import require_labels, takes_part_in_swarms
from atoll.worker.exchange.base_and_outbox import DiskFiles, folder_of, locked, remove_earlier
from atoll.worker.exchange.carrier import Carrier
from atoll.worker.exchange.encode_update import Layouts, LocalFragment, UpdateWarnings
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.exchange.server_carrier import ServerCarrier
from atoll.worker.exchange.worker_processes import OneProcess, ShardedRanks, WorkerProcesses
from atoll.worker.log_lines import LOG
from atoll.worker.session.leave_at_exit import LEASES, last_words
from atoll.worker.session.ranks import ALONE, RankGroup
from atoll.worker.session.session import Session


@dataclass(frozen=True)
class Participation:
    """A worker that has joined a run: its session, and an `Exchange` with the server for each fragment of the model.

    Attributes:
        session: the worker's session, which sends heartbeats and makes calls to the server.
        exchanges: one `Exchange` for each fragment.
        folder: the folder of the site's files in this run.
    """

    session: Session
    exchanges: tuple[Exchange, ...]
    folder: Path

    @property
    def site(self) -> str:
        """The site's name."""
        return self.session.site

    @property
    def exchange(self) -> Exchange:
        """The `Exchange` of the first fragment. Without fragments, it exchanges the whole model."""
        return self.exchanges[0]

    def leave(self, error: str | None = None) -> None:
        """Leave the run and close the files, which are kept on disk. A second call does nothing.

        Args:
            error: the error that ended training, as a text for the server; None: training ended well.
        """
        self.session.leave(error)


@dataclass(frozen=True)
class LoopTerms:
    """What a training loop that counts local steps (DiLoCo) requires of a run. Only such a loop can use fragments.

    Attributes:
        schema: the names, shapes and dtypes of the loop's tensors, which must equal the run's; None: not compared.
        sync_every: the loop's own number of local steps between synchronisations; None: the run's number. The server
            refuses a value that differs from the run's.
        num_fragments: the loop's own number of fragments; None: the run's number. The server refuses a value that
            differs from the run's.
        ranks: the ranks of the worker, as in `torch.distributed`.
        shards: returns this rank's shards of the model; None: the model is not sharded.
        by_rounds: whether it trains whole models round by round instead, and each round counts as `sync_every` steps.
    """

    schema: Schema | None = None
    sync_every: int | None = None
    num_fragments: int | None = None
    ranks: RankGroup = ALONE
    shards: Callable[[], Shards] | None = None
    by_rounds: bool = False


def take_part(
    server: str,
    site: str,
    *,
    folder: Path | None = None,
    labels: dict[str, str] | None = None,
    filters: Sequence[Filter] = (),
    loop: LoopTerms | None = None,
    swarm: bool = False,
) -> Participation:
    """Open a site's files, and join the run of a server.

    Args:
        server: address of the server.
        site: the site's name.
        folder: folder of the sites' files; None: `ATOLL_DIR`, else `.atoll` in the current folder.
        labels: labels of the worker, shown in the status.
        filters: the filters that are applied to the site's updates before they are sent.
        loop: what a loop that counts local steps requires of the run; None: the worker trains round by round.
        swarm: whether the site may take part in a swarm; if False, `ATOLL_SWARM` or `ATOLL_PEER_*` can allow it.

    Raises:
        ConfigError: the run synchronises the model in fragments or with a delay, but the worker trains round by round.
            Or the run has another number of ranks. Or the run is a swarm, and the site does not take part in swarms. Or
            something that the run names, such as its algorithm, is neither registered nor installed at this site.
    """
    may_swarm = takes_part_in_swarms(swarm)
    filters, http, terms = require_filters(filters), http_to(server, site=site), loop or LoopTerms()
    if terms.ranks.is_first:
        warn_of_overruled(server, site)
        say_proxy(http, site)
    session = Session(http, site, labels=require_labels(labels), ranks=terms.ranks)
    info, opened = session.info, session.cleanup
    try:
        if info.placement == "swarm" and not may_swarm:
            raise _no_swarm(session)
        _check(session, loop)
        policy = session.way_out.policy
        if policy is not None and terms.shards is not None and policy.tensors.max_norm is not None:
            raise policy.refusal(
                "tensors.max_norm",
                "it needs the norm of a whole update, and each rank of this sharded model has only its own part",
            )
        share = (terms.ranks.rank, terms.ranks.size) if terms.shards is not None else None
        dry_run = session.way_out.dry_run
        named = (
            dry_run / "files"
            if dry_run is not None
            else (folder or Path(os.environ.get("ATOLL_DIR", ".atoll"))).absolute()
        )  # a script may change folders
        where = folder_of(named / site, info.run, share)
        opened.enter_context(locked(where, site, named))
        processes = OneProcess(session) if terms.shards is None else ShardedRanks(session, terms.shards)
        carrier, start_carrier = _open_carrier(session, processes, where)
        parts = session.split.schemas if session.split.count > 1 else (session.schema,)
        exchanges = tuple(
            _open(session, carrier, processes, where, index if len(parts) > 1 else None, each)
            for index, each in enumerate(parts)
        )
        if info.trains and info.rounds:
            nbytes = info.rounds * sum(each.outbox.layout.own_nbytes for each in exchanges)
            session.way_out.require_bytes(info.run, nbytes, in_all=True)
        session.join(sync_every=terms.sync_every, num_fragments=terms.num_fragments)
        for each in exchanges:
            each.local.filters = (*filters, *site_filters(session.way_out.policy))
            each.local.measures = session.way_out.policy is not None
            if each.local.algorithm_state is not None:
                each.local.algorithm_state.begin_at_zero()
        remove_earlier(where, site, share)
        start_carrier()
        return Participation(session, exchanges, where)
    except BaseException as error:
        if http.lease:  # the worker has joined, and a round would wait for it
            session.leave(last_words(error))
        opened.close()
        http.close()
        raise


def warn_of_overruled(server: str, site: str) -> None:
    """Warn if the script uses another server or site than the command `atoll worker` has set for it."""
    for what, used in (("server", server), ("site", site)):
        variable = f"ATOLL_{what.upper()}"
        of_command = os.environ.get(variable) if LEASES in os.environ else None
        if of_command and of_command.rstrip("/") != used.rstrip("/"):
            LOG.warning("the script's %s %r is used, not %r (%s)", what, used, of_command, variable)


def say_proxy(http: Http, site: str) -> None:
    """Log the proxy between the site and the server, if there is one."""
    if http.proxy is not None:
        LOG.info("%s: reaches %s", site, http.where)


def _no_swarm(session: Session) -> ConfigError:
    return ConfigError(
        f"The run {session.info.name!r} at {session.http.server} is a swarm: other sites connect to this one and this "
        f"site connects to them, and it aggregates their updates. Site {session.site} has not said that it takes part "
        "in swarms.",
        "If you want that, pass swarm=True (atoll.join, atoll.DiLoCo, a callback), or set ATOLL_SWARM=1 or the "
        "ATOLL_PEER_* variables, while ATOLL_SWARM is not 0; see docs/swarm.md. Otherwise ask for a run with "
        "swarm.enabled = false.",
    )


def _check(session: Session, loop: LoopTerms | None) -> None:
    info, site, size = session.info, session.site, session.ranks.size
    if info.streams and (loop is None or loop.by_rounds):
        raise ConfigError(
            f"The run {info.name!r} uses streaming (it has {number_of(info.fragments, 'fragment')}, sync delay "
            f"{info.tau} and alpha {info.alpha:g}), but this worker trains whole models round by round.",
            "Use atoll.DiLoCo(model, optimizer), or start the run without diloco.num_fragments, "
            "diloco.fragment_sync_delay and diloco.fragment_update_alpha.",
        )
    if loop is None:
        if info.sync_every and not info.sends_tasks:
            raise federated_in_diloco(info)
        return
    if loop.shards is not None and size != info.ranks:
        raise ConfigError(
            f"The model of site {site} is sharded over {size} ranks, but the run {info.name!r} has ranks = "
            f"{info.ranks}.",
            f"Start the server with --set model.ranks={size}, or this worker with torchrun --nproc-per-node "
            f"{info.ranks}.",
        )
    if loop.shards is not None:
        sharded = next((name for name in session.schema.kept if isinstance(loop.shards()[name], Shard)), None)
        if sharded is not None:
            raise ConfigError(
                f"model.buffers of the run {info.name!r} keeps {sharded!r} at each site, but it is sharded over ranks.",
                "Keep only tensors that every rank has whole, such as buffers.",
            )
    if loop.schema is not None:
        loop.schema.require_equal(session.schema.model, mine=f"worker {site}", theirs="the run")


def federated_in_diloco(info: RunInfo) -> ConfigError:
    """Return the error of a script that trains round by round in a run that counts local steps."""
    return ConfigError(
        f"The run {info.name!r} uses {info.algorithm}, in which each worker synchronises every {info.sync_every} local "
        "steps, but this script trains round by round (atoll.join). Their updates and weights do not fit together.",
        "Use atoll.DiLoCo(model, optimizer) in the script, or start the server with another algorithm, such as "
        "--set algorithm.name=fedavg.",
    )


def _open(
    session: Session, carrier: Carrier, processes: WorkerProcesses, folder: Path, fragment: int | None, schema: Schema
) -> Exchange:
    """Open the files of a fragment, and return its `Exchange` with the server.

    Args:
        session: the worker's session.
        carrier: moves the bytes of versions and updates.
        processes: the processes of this worker that exchange the fragment together.
        folder: the site's folder in the run; locked by the caller.
        fragment: the fragment's number; None: the run has one fragment.
        schema: the names, shapes and dtypes of the fragment's tensors.
    """
    info, sharded, opened = session.info, not processes.has_whole_model, session.cleanup
    layouts = Layouts.of(info, schema, session.ranks.rank if sharded else None)
    files = DiskFiles(folder, layouts.version, layouts.update, fragment, session.site)
    opened.callback(files.close)
    local = LocalFragment(
        session.site,
        info,
        layouts,
        files.base,
        session.require_outcome,
        UpdateWarnings(session.site, layouts.codec, layouts.schema),
        local_rule(info.algorithm, info.local, info.local_package),
        fragment,
        [] if fragment is None else [spec.name for spec in session.schema.model.tensors],
    )
    local.open_state(folder, opened, sparse=sharded)
    if local.algorithm_state is not None:
        local.algorithm_state.begin_anew_if_allowed(session.site)
        session.state_fields = partial(getattr, local.algorithm_state, "join_fields")
    return Exchange(session, carrier, processes, files, local)


def _open_carrier(session: Session, processes: WorkerProcesses, folder: Path) -> tuple[Carrier, Callable[[], None]]:
    """Return what moves the bytes of this run's versions and updates, and a function that starts it after joining.

    Args:
        session: the worker's session.
        processes: the processes of this worker that exchange together.
        folder: the site's folder in the run; locked by the caller.
    """
    http, info = session.http, session.info
    if info.placement != "swarm":
        transfer = HttpTransfer(http, info.connections, info.idle_timeout_s, routes.CALL_TIMEOUT_S)
        session.cleanup.callback(transfer.close)
        return ServerCarrier(session, transfer, processes), lambda: None
    from atoll.worker.exchange.peer_carrier import PeerCarrier
    from atoll.worker.peer.agent import SwarmPeer, plan_of
    from atoll.worker.peer.peer_transfers import PeerServer, open_host

    plan_message = session.patiently(partial(http.get, routes.SWARM_PLAN, SwarmPlan), None, "read the plan")
    plan = plan_of(plan_message, session.split)
    host = open_host(session.site, http.host, info.idle_timeout_s, http.peer_credential)
    peer_server = PeerServer(host, session.counters, os.environ.get("ATOLL_TLS_CA"), http.peer_credential)
    session.peer_proof = str(peer_server.prove())
    session.cleanup.callback(peer_server.close)
    peer = SwarmPeer(session, peer_server, plan, folder)
    session.cleanup.callback(peer.close)
    session.before_leave = peer.leave
    return PeerCarrier(session, peer_server), peer.start
