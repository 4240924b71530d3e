"""Builds the status of a run: the message that `atoll status` and other programs show."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from atoll.algorithms.resolve import ResolvedAlgorithm
from atoll.posix import no_sync, replace_file
from atoll.protocol import messages, routes, status_messages
from atoll.protocol.status_headline import Trouble, headline_of
from atoll.server.coordinator.accept_update import staleness
from atoll.server.coordinator.attendance import short_of
from atoll.server.coordinator.exports import BestVersion
from atoll.server.coordinator.roster import Presence
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.served_run import ServedRun
from atoll.store.reader import saved_status

MOST_METRICS, LEAST_METRICS = 8192, 4
"""Number of values in the heartbeats of all sites together that the status shows, and at least of each site."""

LOG = logging.getLogger("atoll.server")


def status_of(served: ServedRun) -> status_messages.Status:
    """Return the status of a run: its settings, rounds, workers, last metrics and warnings."""
    run, tasks, history = served.run, served.tasks, served.history
    now_s = run.clock()
    settings, number = run.settings, max(each.number for each in run.state.rounds)
    algorithm = run.plan.of_round(number).algorithm
    lost = [run.store.run_log.lost_versions(f) if each.lost else () for f, each in enumerate(run.state.rounds)]
    found = [run.store.versions.durable(fragment) for fragment in range(len(run.state.rounds))]
    durable = [version for version in found if version is not None]
    roster, local_steps = sorted(run.roster.items()), served.tickets.local_steps(run.roster, number)
    metrics = max(LEAST_METRICS, MOST_METRICS // max(1, len(roster)))
    last = {each.site: each for summary in history.summaries for each in summary.sites}
    tickets_s = history.ticket_times.of(run.state, now_s)
    status = status_messages.Status(
        run=run.store.run_log.run_id,
        name=settings.run.name,
        algorithm=algorithm.name,
        policy=str(run.state.rules.policy),
        protocol=routes.PROTOCOL,
        epoch=run.store.run_log.epoch,
        rounds=settings.rounds.total,
        finished=tasks.finished if run.has_workflows else run.state.finished,
        has_result=run.finished.is_set(),
        stopped=run.state.why_ended,
        paused=run.state.paused,
        stopping=run.state.stopping,
        failed=run.failed.message if run.failed is not None else "",
        address=run.address,
        public_address=run.settings.trust.address or "",
        state_dir=str(settings.disk.state_dir),
        mode="swarm" if settings.swarm.enabled else "asynchronous" if settings.async_.enabled else "rounds",
        best=_best(run, served.background.best),
        evaluation=served.evaluation.status(),
        uptime_s=now_s - run.started_s,
        left_s=history.time_left.of(run.state, now_s),
        model_bytes=0 if run.plan.schema.is_nothing else run.plan.schema.model.nbytes,
        codec=str(algorithm.codec),
        outer=outer_in_words(algorithm, settings.algorithm.outer_lr_of),
        tau=settings.diloco.fragment_sync_delay,
        alpha=settings.diloco.fragment_update_alpha,
        dylu=settings.diloco.dynamic_local_steps,
        downlink_codec=str(settings.aggregation.download_codec) or "none",
        sync_every=algorithm.sync_every,
        fragments=[_fragment(served, index, now_s) for index in range(len(run.state.rounds))],
        workers=[
            _worker(run, presence, now_s, lost, local_steps[site], last.get(site), metrics).model_copy(
                update={"ticket_s": tickets_s.get(site, 0.0), "usual_s": history.ticket_times.usual_s(site)}
            )
            for site, presence in roster
        ],
        history=list(history.summaries),
        first=history.first,
        kept_versions=_kept_versions(served),
        bytes_up=run.bytes_up,
        bytes_down=run.bytes_down,
        deaths=history.attendance.deaths,
        refused=served.admission.refused,
        staleness={str(behind): count for behind, count in sorted(history.stale.counts.items())},
        tasks=tasks.counts if tasks.active else {},
        workflows=tasks.workflows_status(),
        sent=tasks.tasks_status(),
        durability=settings.disk.durability,
        durable_version=min(durable) if len(durable) == len(found) else None,
        warnings=served.warnings.now(),
        extensions=served.extensions.status(),
    )
    blocked = run.no_space or next(iter(run.trouble.values()), "")
    trouble = Trouble(disk=blocked, sites="" if blocked else short_of(run.state, run.roster))
    headline = headline_of(status, trouble)
    return status.model_copy(update={"headline": headline, "left_s": None if headline.held_up else status.left_s})


def keep_status(served: ServedRun) -> status_messages.Status:
    """Return the status of a run. Also save it to disk."""
    status = status_of(served)
    write_status(served.run.settings.disk.state_dir, status)
    return status


def write_status(state_dir: Path, status: status_messages.Status) -> None:
    """Save a status to disk, for `atoll status` while the server does not run. If the disk fails, log the error."""
    path = state_dir / status_messages.KEPT
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        replace_file(path, [status.model_dump_json().encode()], temporary=temporary, sync=no_sync)
    except OSError as error:
        LOG.info("%s cannot be written: %s", path, error.strerror)


def address_before(state_dir: Path) -> str:
    """Return the address at which the unfinished run of a state directory was served last; empty if there is none."""
    status = status_before(state_dir)
    try:
        return status.address if urlsplit(status.address).port and not status.finished else ""
    except ValueError:  # the file is damaged
        return ""


def status_before(state_dir: Path) -> status_messages.Status:
    """Return the status that was saved last; an empty one if there is no run yet, or if the file is damaged."""
    saved = saved_status(state_dir)
    return saved[0] if saved else status_messages.Status(run="", protocol=routes.PROTOCOL)


def outer_in_words(algorithm: ResolvedAlgorithm, lrs: Mapping[str, float]) -> str:
    """Return the outer optimizer as text, such as `sgd(lr=0.7, momentum=0.9)`.

    For delayed Nesterov, the option `delay` is shown as N, and the option `undelayed` is left out.

    Args:
        algorithm: the run's algorithm.
        lrs: pattern → learning rate of the tensors with a name that matches the pattern.
    """
    names, shown = {"delay": "N"}, algorithm.outer_options
    if algorithm.outer_name == "delayed_nesterov":
        shown = {key: value for key, value in shown.items() if key != "undelayed"}
    options = [f"{names.get(key, key)}={value}" for key, value in shown.items()]
    options += [f"lr of {pattern}={lr:g}" for pattern, lr in lrs.items()]
    return f"{algorithm.outer_name}({', '.join(options)})"


def _best(run: RunCore, saved: BestVersion) -> status_messages.BestStatus | None:
    tracking, progress = run.state.rules.tracking, run.state.progress
    if not tracking.metric:
        return None
    best = progress.best
    return status_messages.BestStatus(
        metric=tracking.metric,
        mode=tracking.mode,
        version=best.version if best else None,
        round=best.round if best else None,
        value=best.value if best else None,
        stale=progress.stale,
        file=str(saved.path.absolute()) if best and saved.saved == best else "",
    )


def _fragment(served: ServedRun, index: int, now_s: float) -> status_messages.FragmentStatus:
    run = served.run
    round_ = run.state.rounds[index]
    awaited = [
        status_messages.Missing(site=site, for_s=max(0.0, now_s - since)) for site, since in run.state.missing(index)
    ]
    evaluation = served.evaluation.status()
    evaluated = evaluation.running if evaluation is not None and round_.phase == "closing" else None
    awaits = (
        served.tickets.why(index, now_s) if evaluated is None else f"waits for the evaluation of version {evaluated}"
    )
    return status_messages.FragmentStatus(
        fragment=index,
        version=round_.head,
        round=round_.done if round_.phase == "finished" else round_.number,
        phase=round_.phase,
        open_s=max(0.0, now_s - round_.opened_s) if round_.phase == "open" else 0.0,
        waiting_for=awaited,
        sat_out=list(round_.sat_out) if round_.phase == "open" else [],
        reason=run.trouble.get(index) or awaits,
        trouble=served.tickets.trouble(index, now_s),
        place=served.place.status(index),
    )


SUBMITTING = re.compile(r"submitting to round ([0-9]+)")


def _doing(run: RunCore, site: str, said: str) -> str:
    """Return what a site does. What it said last of a ticket is replaced if the ticket has come, or its update has."""
    ticket = run.state.rounds[0].tickets.get(site) if len(run.state.rounds) == 1 else None
    if said == messages.WAITING and ticket is not None and ticket.state == "open":
        return "about to train"  # until its script loads the version
    submitting = SUBMITTING.fullmatch(said)
    if submitting is None:
        return said
    awaited = [
        round_.number
        for fragment, round_ in enumerate(run.state.rounds)
        if any(site == missing for missing, _ in run.state.missing(fragment))
    ]
    if not awaited:
        return "waiting for the others" if any(each.phase == "open" for each in run.state.rounds) else ""
    return said if int(submitting[1]) in awaited else ""


def _kept_versions(served: ServedRun) -> list[int]:
    """Return the versions of the whole model that a reader can download from here."""
    versions = served.run.store.versions
    if not served.place.is_here or served.run.plan.schema.is_nothing:
        return []
    has_masters = served.run.plan.has_masters
    kept = [
        {row.version for row in versions.kept(fragment) if not has_masters or row.has_state}
        for fragment in range(len(served.run.state.rounds))
    ]
    return sorted(set.intersection(*kept))


def _worker(
    run: RunCore,
    presence: Presence,
    now_s: float,
    lost: Sequence[Sequence[int]],
    local_steps: int,
    last: status_messages.SiteRound | None,
    metrics: int,
) -> status_messages.WorkerStatus:
    beat = presence.beat
    bases = [presence.bases.get(fragment, 0) for fragment in range(len(run.state.rounds))]
    version = max(beat.version, min(bases))
    staleness_of = (
        staleness(round_.head, max(version, base), gone)
        for round_, base, gone in zip(run.state.rounds, bases, lost, strict=True)
    )
    return status_messages.WorkerStatus(
        site=presence.site,
        host=presence.host,
        state=presence.state,
        doing=_doing(run, presence.site, beat.state),
        joined_at=presence.joined_at,
        last_heartbeat_s=max(0.0, now_s - presence.heard_s),
        heard=presence.heard,
        step=beat.step,
        steps_per_s=beat.steps_per_s,
        rounds=presence.rounds,
        version=version,
        staleness=max(staleness_of),
        bytes_up=presence.bytes_up,
        bytes_down=presence.bytes_down,
        gradient_bytes=presence.gradient_bytes,
        waited_s=max(presence.waited_s.values(), default=0.0),
        retries=beat.retries,
        reconnections=beat.reconnections,
        metrics=dict(itertools.islice(beat.metrics.items(), metrics)),
        labels=presence.labels,
        local_steps=local_steps,
        error=presence.error,
        refused=presence.refused,
        last=last,
    )
