"""The status of a run: one message, for `atoll status` and other programs."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from atoll.aggregation.plan import Plan
from atoll.algorithms.resolve import ResolvedAlgorithm
from atoll.config import Settings
from atoll.protocol import routes, status_messages
from atoll.protocol.task_messages import Evaluation
from atoll.rounds import machine
from atoll.rounds.state import State
from atoll.server.coordinator.accept_update import UpdateAdmission, staleness
from atoll.server.coordinator.background_writes import Behind
from atoll.server.coordinator.roster import Attendance, Presence, Stale
from atoll.server.tasks.task_queue import TaskQueue
from atoll.store.store import Store


class Shown(Protocol):
    """What the status reads of a run."""

    plan: Plan
    store: Store
    settings: Settings
    roster: dict[str, Presence]
    task_queue: TaskQueue
    behind: Behind
    admission: UpdateAdmission
    attendance: Attendance
    stale: Stale
    left: TimeLeft
    trouble: dict[int, str]
    advice: list[str]
    address: str
    started_s: float
    bytes_up: int
    bytes_down: int

    @property
    def state(self) -> State: ...

    @property
    def workflows(self) -> Workflows | None: ...

    @property
    def swarm(self) -> ShownSwarm | None: ...

    def local_steps(self, site: str) -> int:
        """Return the local steps of a site; 0: as many as the run's."""


class Workflows(Protocol):
    """The workflows of a run.

    Attributes:
        evaluated: returns the last matrix of a cross-site evaluation, as far as it is filled; None if there is none.
    """

    evaluated: Callable[[], Evaluation] | None

    @property
    def keeps_local(self) -> bool:
        """Whether sites are asked later for what they have submitted."""

    def will_evaluate(self, site: str) -> bool:
        """Whether a cross-site evaluation that is still to come asks a site for measurements."""

    def status(self) -> list[status_messages.WorkflowStatus]:
        """Return all of them, in their order."""


class ShownSwarm(Protocol):
    """Where the fragments of a swarm are aggregated."""

    def status(self, fragment: int) -> status_messages.PlaceStatus:
        """Return the place of a fragment."""

    def trouble(self, fragment: int) -> str:
        """Return why no worker aggregates a fragment; empty if one does."""


# -- How long a run will still take, judged by its last rounds.


ROUNDS = 20
"""Rounds of each fragment that the estimate uses: older ones say little about the workers of now."""


def left_s(commits_s: Sequence[float], commits_left: int, now_s: float) -> float | None:
    """Return the seconds that further commits take, by the mean distance of those measured; None if none was.

    The time since the last commit counts as spent, up to one distance: a round that takes longer than the others does
    not make the next ones shorter.

    Args:
        commits_s: when the first of these rounds was opened, then when versions were committed, in order.
    """
    if len(commits_s) < 2:
        return None
    each_s = (commits_s[-1] - commits_s[0]) / (len(commits_s) - 1)
    return max(0.0, commits_left * each_s - min(max(0.0, now_s - commits_s[-1]), each_s))


class TimeLeft:
    """Estimates the time left of a run, from the rounds since this server started.

    Args:
        rounds: of the run, as it was set; 0: until it is stopped.
    """

    def __init__(self, rounds: int, fragments: int) -> None:
        self._rounds = rounds
        self._commits_s: deque[float] = deque(maxlen=ROUNDS * fragments + 1)

    def committed(self, opened_s: float, now_s: float) -> None:
        """Note that a version was committed, of a round that was opened at `opened_s`."""
        if not self._commits_s:
            self._commits_s.append(opened_s)
        self._commits_s.append(now_s)

    def of(self, state: State, now_s: float) -> float | None:
        """Return seconds; None if the run has no end, is over, has had no round yet, or waits for a site."""
        stands_still = len(state.active_s) < state.rules.floor and any(each.phase == "open" for each in state.rounds)
        if not self._rounds or state.finished or stands_still:
            return None
        return left_s(self._commits_s, sum(max(0, self._rounds - each.done) for each in state.rounds), now_s)


LOG = logging.getLogger("atoll.server")

HISTORY = 20
"""Rounds that a status shows; `metrics.jsonl` has all of them."""
QUIET_BEATS = 2.5
"""Missing heartbeats from which on a site counts as silent."""


@functools.lru_cache(maxsize=4 * HISTORY)
def _summary(text: str) -> status_messages.RoundSummary:
    """Read the summary of a round; with hundreds of workers it is long, and the same ones are read again and again."""
    return status_messages.RoundSummary.model_validate_json(text)


def status_of(run: Shown) -> status_messages.Status:
    """Return the status of a run."""
    now_s = time.monotonic()
    settings, algorithm = run.settings, run.plan.algorithm
    lost = [run.store.run_log.lost_versions(f) if each.lost else () for f, each in enumerate(run.state.rounds)]
    history = [_summary(row.summary_json) for row in run.store.run_log.history(HISTORY) if row.summary_json]
    return status_messages.Status(
        run=run.store.run_log.run_id,
        name=settings.run.name,
        algorithm=algorithm.name,
        policy=str(run.state.rules.policy),
        protocol=routes.PROTOCOL,
        epoch=run.store.run_log.epoch,
        rounds=settings.rounds.total,
        finished=run.state.finished if run.workflows is None else run.task_queue.finished,
        stopped=run.state.rules.tracking.why(run.state.progress),
        address=run.address,
        best=_best(run),
        uptime_s=now_s - run.started_s,
        left_s=run.left.of(run.state, now_s),
        model_bytes=0 if run.plan.schema.is_nothing else run.plan.schema.model.nbytes,
        codec=algorithm.codec,
        outer=outer_in_words(algorithm, settings.algorithm.outer_lr_of),
        tau=settings.diloco.fragment_sync_delay,
        alpha=settings.diloco.fragment_update_alpha,
        dylu=settings.diloco.dynamic_local_steps,
        downlink_codec=settings.aggregation.download_codec.target or "none",
        sync_every=algorithm.sync_every,
        fragments=[_fragment(run, index, now_s) for index in range(len(run.state.rounds))],
        workers=[_worker(run, presence, now_s, lost) for _, presence in sorted(run.roster.items())],
        history=history,
        bytes_up=run.bytes_up,
        bytes_down=run.bytes_down,
        deaths=run.attendance.deaths,
        refused=run.admission.refused,
        staleness={str(behind): count for behind, count in sorted(run.stale.counts.items())},
        tasks=run.task_queue.counts if run.task_queue.active else {},
        workflows=run.workflows.status() if run.workflows is not None else [],
        sent=run.task_queue.status(),
        durability=settings.disk.durability,
        durable_version=min(durable) if (durable := _durable(run)) else None,
        warnings=[
            *run.trouble.values(),
            *run.advice,
            *run.attendance.warnings(run.state),
            *run.stale.warnings,
            *run.task_queue.warnings.values(),
            *(presence.rival for _, presence in sorted(run.roster.items()) if presence.rival),
            *(
                f"{presence.site}: {text}"
                for _, presence in sorted(run.roster.items())
                for text in presence.beat.warnings
            ),
        ],
    )


def keep_status(run: Shown) -> status_messages.Status:
    """Return the status of a run, and keep it for `atoll status` when no server runs; a full disk does not fail it."""
    status = status_of(run)
    path = run.settings.disk.state_dir / status_messages.KEPT
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(status.model_dump_json(), encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        LOG.info("%s cannot be written: %s", path, error.strerror)
    return status


def outer_in_words(algorithm: ResolvedAlgorithm, lrs: Mapping[str, float]) -> str:
    """Return `sgd(lr=0.7, momentum=0.9)`; delayed Nesterov's N by that name, without the first steps of the policy."""
    names, shown = {"delay": "N"}, algorithm.outer_options
    if algorithm.outer_name == "delayed_nesterov":
        shown = {key: value for key, value in shown.items() if key != "undelayed"}
    options = [f"{names.get(key, key)}={value}" for key, value in shown.items()]
    options += [f"lr of {pattern}={lr:g}" for pattern, lr in lrs.items()]
    return f"{algorithm.outer_name}({', '.join(options)})"


def _best(run: Shown) -> status_messages.BestStatus | None:
    tracking, progress = run.state.rules.tracking, run.state.progress
    if not tracking.metric:
        return None
    status = status_messages.BestStatus(metric=tracking.metric, mode=tracking.mode, stale=progress.stale)
    if progress.best is None:
        return status
    is_there = run.behind.best.saved == progress.best
    return status.model_copy(
        update={
            "version": progress.best.version,
            "round": progress.best.round,
            "value": progress.best.value,
            "file": str(run.behind.best.path.absolute()) if is_there else "",
        }
    )


def _fragment(run: Shown, index: int, now_s: float) -> status_messages.FragmentStatus:
    round_ = run.state.rounds[index]
    waiting = [
        status_messages.Missing(site=site, for_s=max(0.0, now_s - since))
        for site, since in machine.missing(run.state, index)
    ]
    return status_messages.FragmentStatus(
        fragment=index,
        version=round_.head,
        phase=round_.phase,
        waiting_for=waiting,
        reason=run.trouble.get(index) or why(run, index, now_s),
        place=run.swarm.status(index) if run.swarm is not None else None,
    )


def why(run: Shown, index: int, now_s: float) -> str:
    """Return what the fragment waits for; also which sites may not know that the server is back, or may be dead."""
    missing = [site for site, _ in machine.missing(run.state, index)]
    unheard = [site for site in missing if site in run.roster and not run.roster[site].heard]
    silent = f"not heard since the server restarted: {', '.join(unheard)}" if unheard else ""
    place = run.swarm.trouble(index) if run.swarm is not None else ""
    quiet = _quiet(run, [site for site in missing if site not in unheard], now_s)
    hangs = _hanging(run, missing)
    return "; ".join(filter(None, [machine.why(run.state, index, now_s), place, silent, quiet, hangs]))


def _hanging(run: Shown, sites: Sequence[str]) -> str:
    """Return which of these sites train no further although their heartbeats come."""
    patience_s = 2 * (run.settings.network.heartbeat_timeout_s or HANGS_S)
    still = {site: run.roster[site].hangs_s(patience_s) for site in sites if site in run.roster}
    return "; ".join(
        f"{site} answers, but its training has not moved for {still_s:.0f} s: look at its process"
        for site, still_s in still.items()
        if still_s
    )


HANGS_S = 120.0
"""Twice this time without a step is reported if `heartbeat_timeout_s` is 0."""


def _quiet(run: Shown, sites: Sequence[str], now_s: float) -> str:
    """Return which of these sites miss heartbeats, and what follows; the same words until it does."""
    interval_s, timeout_s = run.settings.network.heartbeat_interval_s, run.settings.network.heartbeat_timeout_s
    seen_s = run.state.seen_s
    quiet = [site for site in sites if interval_s and now_s - seen_s.get(site, now_s) >= QUIET_BEATS * interval_s]
    if not quiet:
        return ""
    then = f" (declared dead after {timeout_s:g} s of silence)" if timeout_s else ""
    return f"no sign of life from {', '.join(quiet)}{then}"


def _durable(run: Shown) -> list[int]:
    """Return the durable version of each fragment; nothing if one has none yet."""
    found = [run.store.versions.durable(fragment) for fragment in range(len(run.state.rounds))]
    return [version for version in found if version is not None] if None not in found else []


def _worker(
    run: Shown, presence: Presence, now_s: float, lost: Sequence[Sequence[int]]
) -> status_messages.WorkerStatus:
    beat = presence.beat
    bases = [presence.bases.get(fragment, 0) for fragment in range(len(run.state.rounds))]
    version = max(beat.version, min(bases))
    behind = (
        staleness(round_.head, max(version, base), gone)
        for round_, base, gone in zip(run.state.rounds, bases, lost, strict=True)
    )
    return status_messages.WorkerStatus(
        site=presence.site,
        host=presence.host,
        state=presence.state,
        doing=beat.state,
        joined_at=presence.joined_at,
        last_heartbeat_s=max(0.0, now_s - presence.heard_s),
        heard=presence.heard,
        step=beat.step,
        steps_per_s=beat.steps_per_s,
        rounds=presence.rounds,
        version=version,
        staleness=max(behind),
        bytes_up=presence.bytes_up,
        bytes_down=presence.bytes_down,
        gradient_bytes=presence.gradient_bytes,
        retries=beat.retries,
        reconnections=beat.reconnections,
        metrics=dict(beat.metrics),
        labels=presence.labels,
        local_steps=run.local_steps(presence.site),
        error=presence.error,
    )
