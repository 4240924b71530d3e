"""The rounds that have ended, and what the log and the status say of them: missing sites, staleness, remaining time."""

from __future__ import annotations

import logging
import math
from collections import deque

from atoll.format_text import time_left
from atoll.protocol import status_messages
from atoll.rounds import events
from atoll.rounds.early_stopping import Measurement, MetricProgress, Tracking
from atoll.server.coordinator.attendance import Attendance
from atoll.server.coordinator.round_times import TicketTimes, TimeLeft
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.staleness_counter import StalenessCounter
from atoll.store.journal_tables import HistoryRow

LOG = logging.getLogger("atoll.server")


class RoundHistory:
    """What the log and the status say of the rounds of a run.

    Args:
        run: the run.
        simulated: whether its sites are those of a simulation, which cannot be started one by one.

    Attributes:
        summaries: summaries of the last rounds.
        attendance: which sites are missing.
        first: first recorded value of each metric; see `Status.first`.
        stale: staleness of the updates.
        time_left: estimate of the remaining time.
        ticket_times: for how long sites have their tickets.
    """

    def __init__(self, run: RunCore, *, simulated: bool = False) -> None:
        run_log = run.store.run_log
        asked = {row.fragment: row.expected for row in run_log.rounds()}
        self._run, self._tracking = run, run.ledger.rules.tracking
        self.attendance = Attendance(run.roster, run_log.totals().deaths, asked, simulated=simulated)
        self.stale = StalenessCounter(run.plan)
        self.time_left = TimeLeft(run.settings.rounds.total, len(run.plan.fragments))
        self.ticket_times = TicketTimes(run.clock)
        run.events.subscribe("the times of tickets", self.ticket_times.on_event)
        summaries = [each.summary_json for each in run_log.summaries(status_messages.HISTORY)]
        self.summaries = deque(
            map(status_messages.RoundSummary.model_validate_json, summaries), status_messages.HISTORY
        )
        self.first = run_log.first_values()
        self._said_missing = False

    def progress(self) -> MetricProgress:
        """Return the progress of the run by the metric that `rounds.best_metric` names, from the journal."""
        metric = self._tracking.metric
        rows = self._run.store.run_log.history(None, 0) if metric else []
        return self._tracking.follow_all(measured_of(rows, metric))

    def act(self, effect: events.Effect) -> None:
        """Follow an effect of an event: which sites a round waits for, and which have ended."""
        match effect:
            case events.LeaseEnded():
                self.attendance.ended(effect, self._run.state)
            case events.SitesForgotten(sites):
                for site in sites:
                    self._run.roster.pop(site, None)
            case events.RoundOpened() | events.ExpectedChanged():
                self.attendance.expects(effect, self._run.state)
            case events.RoundSatOut():
                self.attendance.all_sat_out(effect, self._run.state)
            case events.ControlsChanged():
                self.time_left.begin_again()

    def newest(self, summary: status_messages.RoundSummary) -> status_messages.RoundSummary:
        """Return a round's summary as it is now, with the result of an evaluation that came later."""
        same = (each for each in self.summaries if (each.fragment, each.round) == (summary.fragment, summary.round))
        return next(same, summary)

    def replace(self, summary: status_messages.RoundSummary) -> None:
        """Replace the summary of a round by one with the result of an evaluation."""
        for place, each in enumerate(self.summaries):
            if (each.fragment, each.round) == (summary.fragment, summary.round):
                self.summaries[place] = summary
                self._note_first(summary)

    def _note_first(self, summary: status_messages.RoundSummary) -> None:
        """Record the values of metrics that no earlier round has."""
        if summary.fragment == 0:
            for name, value in summary.values.items():
                self.first.setdefault(name, status_messages.Recorded(round=summary.round, value=value))

    def value(self, summary: status_messages.RoundSummary) -> float | None:
        """Return the sites' value of the metric that `rounds.best_metric` names in a round; None if there is none."""
        return value_of(summary, self._tracking.metric) if self._is_of_sites else None

    @property
    def _is_of_sites(self) -> bool:
        return bool(self._tracking.metric) and not self._tracking.metric.startswith(status_messages.GLOBAL)

    def ended(self, summary: status_messages.RoundSummary) -> None:
        """Follow the end of a round. If it has a version, update the counters, and log the summary."""
        self.summaries.append(summary)
        self._note_first(summary)
        if summary.version is None:
            return
        run = self._run
        for each in summary.sites:
            if each.site in run.roster:
                run.roster[each.site].rounds += 1
        self.stale.note_round(summary)
        self.attendance.closed(summary)
        if self._is_of_sites and self.value(summary) is None and not self._said_missing:
            self._said_missing = True
            LOG.warning("%s", missing(summary, self._tracking))
        self.time_left.committed(run.clock())
        left = f"; {told}" if (told := time_left(self.time_left.of(run.state, run.clock()))) else ""
        LOG.info("%s%s", summary.line(has_fragments=run.plan.has_fragments), left)
        done = min(round_.done for round_ in run.state.rounds)
        if summary.round == done == run.settings.async_.sync_rounds_first and not run.state.finished:
            LOG.info("round %d was the last synchronous round: from now on, no site waits for another", done)

    def warnings(self) -> list[str]:
        """Return the warnings for the status."""
        return [*self.attendance.warnings(self._run.state), *self.stale.warnings]


def measured_of(history: list[HistoryRow], metric: str) -> list[Measurement]:
    """Return the metric's value in each round, together with the version that the value belongs to.

    This is the version that the round starts from, because workers measure the model that they download. The server's
    evaluation measures the version that the round makes.

    Args:
        history: the journal's rows about the versions of one fragment, oldest first.
        metric: name of the metric.
    """
    found, base = [], 0
    for row in history:
        if row.summary_json:
            summary = status_messages.RoundSummary.model_validate_json(row.summary_json)
            if (value := value_of(summary, metric)) is not None:
                version = row.version if metric.startswith(status_messages.GLOBAL) else base
                found.append(Measurement(version, summary.round, value))
        base = row.version
    return found


def value_of(summary: status_messages.RoundSummary, metric: str) -> float | None:
    """Return the value of a metric in a round; None if no site reported it, or if the mean is not finite.

    If its name begins with `GLOBAL`, it is a metric of the server's evaluation.
    """
    name = metric.removeprefix(status_messages.GLOBAL)
    value = summary.metrics.get(metric) if name == metric else summary.global_metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def missing(summary: status_messages.RoundSummary, tracking: Tracking) -> str:
    """Return the warning for a round without a finite value of the metric that `rounds.best_metric` names."""
    has = ", ".join(sorted(summary.metrics)) or "none"
    return (
        f"round {summary.round} has no finite value of {tracking.metric!r} (its metrics: {has}), so the round is "
        "ignored for the best version and for rounds.early_stop_after. Report the metric: submit(model, "
        f"metrics={{{tracking.metric!r}: …}})"
    )
