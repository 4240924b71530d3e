"""Accept a complete update and record it in the journal, or refuse it with a reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from atoll.errors import UpdateRefused
from atoll.format_text import numbers
from atoll.protocol import messages, run_events
from atoll.rounds import events
from atoll.server.coordinator.reported_numbers import ReportedNumbers
from atoll.server.coordinator.roster import Presence
from atoll.server.coordinator.run_core import RunCore
from atoll.store.journal_tables import PartRow, TicketRow
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

REFUSALS = 5
"""Number of refused updates in a row after which the server ends the site's lease, so that the site stops training."""
LOOK = "check the learning rate, the data and the loss at this site."
STEPS = "report the number of steps: submit(model, steps=…), or fl_round.correct(model, optimizer), which counts them."
OPTIMIZER_STEPS = (
    "report the number of optimizer steps, not samples or tokens; if it is right, raise aggregation.max_steps."
)


Reporting = TypeVar("Reporting", messages.Complete, messages.SitOut)


class UpdateAdmission:
    """Checks the complete updates of a run, and accepts or refuses each.

    Args:
        run: the run. Its ledger gets an event for each accepted or refused update.

    Attributes:
        refused: number of updates refused in the whole run.
        reports: the weights and numbers of steps that sites report, with warnings about unusual ones.
    """

    def __init__(self, run: RunCore) -> None:
        self._plan, self._store, self._ledger, self._roster = run.plan, run.store, run.ledger, run.roster
        self.refused = run.store.run_log.totals().refused
        share = run.settings.limits.weight_share
        self.reports = ReportedNumbers(run.roster, needs_steps=run.plan.needs_steps, weight_share=share)
        self._sending: dict[tuple[str, int], tuple[int, float]] = {}  # site, fragment → ticket, when it began
        self._other_weight: set[str] = set()  # sites that were warned about a changed weight

    def begins(self, site: str, ticket: int, fragment: int) -> None:
        """Note when the first part of an update begins to arrive."""
        place = site, fragment
        if self._sending.get(place, (0, 0.0))[0] != ticket:
            self._sending[place] = ticket, time.monotonic()

    def accept(self, row: TicketRow, message: messages.Complete, norm: float, last: PartRow | None = None) -> TicketRow:
        """Accept an update that is completely on disk. Call `require_plausible` first.

        Args:
            row: its ticket, which is open.
            message: the worker's message about the update.
            norm: L2 norm of the update's `params`.
            last: a part of it that is to be recorded in the same transaction; None: all are recorded.

        Returns:
            The ticket, now accepted, with the values of its update.

        Raises:
            DiskFull: the disk is full; nothing has changed.
            StoreError: the store failed. The server ends, unless the cause is temporary.
        """
        tickets, site, order = self._store.tickets, row.site, self._store.tickets.next_order()
        accepted = replace(
            row, state="accepted", digest=message.digest, report=message.report, norm=norm, accepted_order=order
        )
        tickets.make_durable(row)
        self.reports.note(site, message.weight, message.steps)  # before the round closes with this update
        sent, begun_s = self._sending.pop((site, row.fragment), (0, 0.0))
        send_s = time.monotonic() - begun_s if sent == row.ticket else 0.0
        self._ledger.record(
            events.UpdateAccepted(row.ticket, order),
            lambda: tickets.accept(accepted, last),
            run_events.UpdateAccepted(**self._about(row), send_seconds=send_s),
        )
        self._note_metrics(site, message.metrics)
        if site in self._roster:
            presence = self._roster[site]
            presence.refused_in_a_row, presence.refused = 0, ""
            steps = message.steps if self._plan.algorithm.sync_every else 0  # federated runs are compared with nothing
            trained = steps * self._plan.fragments[row.fragment].schema.model.nbytes
            waited_s = presence.waited_s.get(row.fragment, 0.0) + message.wait_seconds
            presence.waited_s[row.fragment] = min(waited_s, messages.LONGEST_ESTIMATE_S)
            presence.gradient_bytes = min(presence.gradient_bytes + trained, messages.NUMBER_BELOW - 1)
        return accepted

    def sit_out(self, site: str, ticket: int, metrics: Mapping[str, float]) -> None:
        """Record that a site sits out the round of its ticket.

        Args:
            site: name of the site.
            ticket: number of the ticket.
            metrics: metrics of the worker.

        Raises:
            DiskFull: the disk is full; nothing has changed.
            StoreError: the store failed. The server ends, unless the cause is temporary.
        """
        told = f" ({numbers(metrics)})" if metrics else ""
        self.reports.heard.add(site)
        happened = run_events.SiteSatOut(**self._about(self._store.tickets.get(ticket)))
        self._ledger.record(events.SatOut(ticket), lambda: self._store.tickets.sit_out(ticket, metrics), happened)
        self._note_metrics(site, metrics)
        LOG.info("%s sat out round %d%s: it has no samples, or its weight is 0", site, happened.round, told)

    def _about(self, row: TicketRow) -> dict[str, Any]:
        """Return the fields of an event about a ticket."""
        number = self._ledger.state.rounds[row.fragment].number
        return {"fragment": row.fragment, "round": number, "site": row.site, "ticket": row.ticket}

    def with_kept_weight(self, site: str, message: messages.Complete) -> messages.Complete:
        """Return a site's message with the weight of the site's first update, if the run needs constant weights.

        A run needs them if one of its reducers uses the total weight of all sites: earlier versions were computed with
        the first weights. In other runs, return the message unchanged.
        """
        kept_weight = self._store.run_log.kept_weight(site) if self._plan.needs_population else 0.0
        if not kept_weight or message.weight == kept_weight:
            return message
        if site not in self._other_weight:
            self._other_weight.add(site)
            LOG.warning(
                "%s submits with the weight %g. Its first weight, %g, is used instead, because this run's control "
                "variates depend on it. Submit with the same weight in every round. For another weight, start a new "
                "run.",
                site,
                message.weight,
                kept_weight,
            )
        return message.model_copy(update={"weight": kept_weight})

    @property
    def metric_warnings(self) -> list[str]:
        """Warnings about sites that report too many different metrics."""
        return [each.many_metrics for each in self._roster.values() if each.many_metrics]

    def with_known_metrics(self, site: str, message: Reporting) -> Reporting:
        """Return a message without those metrics that have too many different names for one site in a run.

        Each name is a curve, which the status, the page and trackers keep.
        """
        presence = self._roster.setdefault(site, Presence(site))
        names = presence.metric_names
        left_out: list[str] = [name for name in message.metrics if name not in names][messages.METRICS - len(names) :]
        if not left_out:
            return message
        if not presence.many_metrics:
            presence.many_metrics = (
                f"{site} reports more than {messages.METRICS} different metrics; further names, such as "
                f"{left_out[0]!r}, are left out. Give a metric the same name in each round"
            )
            LOG.warning("%s", presence.many_metrics)
        return message.model_copy(update={"metrics": {k: v for k, v in message.metrics.items() if k not in left_out}})

    def _note_metrics(self, site: str, metrics: Mapping[str, float]) -> None:
        self._roster.setdefault(site, Presence(site)).metric_names.update(metrics)

    def require_plausible(self, site: str, ticket: int, message: messages.Complete, norm: float) -> None:
        """Refuse an update with a weight, norm or number of steps above its limit, or without steps that the run needs.

        Raises:
            UpdateRefused: the update was refused; the message says why.
        """
        settings, weight = self._plan.settings, message.weight
        if self._plan.needs_steps and not message.steps:
            self.refuse(site, ticket, "it reports no number of local steps, which this run needs", STEPS)
        if weight > settings.aggregation.max_weight:
            self.refuse(
                site,
                ticket,
                f"its weight is {weight:g}, above aggregation.max_weight {settings.aggregation.max_weight:g}",
            )
        if self._plan.needs_steps and message.steps > settings.aggregation.max_steps:
            self.refuse(
                site,
                ticket,
                f"it reports {message.steps} local steps, above aggregation.max_steps {settings.aggregation.max_steps}",
                OPTIMIZER_STEPS,
            )
        if settings.aggregation.max_update_norm and norm > settings.aggregation.max_update_norm:
            self.refuse(
                site,
                ticket,
                f"its norm is {norm:.4g}, above aggregation.max_update_norm {settings.aggregation.max_update_norm:g}",
            )

    def refuse(self, site: str, ticket: int, reason: str, remedy: str = LOOK) -> None:
        """Refuse an update and record why. After `REFUSALS` refusals in a row, end the site's lease.

        Raises:
            UpdateRefused: always.
        """
        row = self._store.tickets.get(ticket)
        self._ledger.record(
            events.RefusedUpdate(ticket, reason),
            lambda: self._store.tickets.refuse(ticket, reason),
            run_events.UpdateRefused(**self._about(row), reason=reason),
        )
        self.refused += 1
        presence = self._roster.setdefault(site, Presence(site))
        presence.refused_in_a_row, presence.refused = presence.refused_in_a_row + 1, reason
        LOG.warning("%s: update refused: %s", site, reason)
        state, then = self._ledger.state, "The round continues with the other updates"
        member, fragment = state.members.get(site), row.fragment
        if presence.refused_in_a_row >= REFUSALS and member is not None:
            then = f"{presence.refused_in_a_row} updates in a row were refused"
            self._ledger.record(events.WorkerLeft(site, member.lease, f"{then}, the last because {reason}"))
        elif state.rounds[fragment].phase == "open" and state.lacks_sites(fragment):
            floor = state.rules.floor_without(len(state.rounds[fragment].sat_out))
            needed = f"{floor} update{'' if floor == 1 else 's'}"
            then = f"The round waits: it needs {needed} ({state.rules.floor_name})"
        raise UpdateRefused(f"The update of {site} was refused: {reason}.", f"{then}; {remedy}")


def staleness(head: int, version: int, lost: Sequence[int]) -> int:
    """Return how many versions were committed after `version`. Lost versions do not count.

    Args:
        head: number of the newest version.
        version: number of an older version.
        lost: numbers of lost versions.
    """
    return max(0, head - version - sum(version < number <= head for number in lost))


def outcome_of(store: Store, row: TicketRow) -> messages.Outcome:
    """Return the state of a ticket as a message for its worker."""
    versions_behind = 0
    if row.version is not None and row.version > row.base_version + 1:
        versions_behind = staleness(row.version - 1, row.base_version, store.run_log.lost_versions(row.fragment))
    return messages.Outcome(
        ticket=row.ticket,
        state=row.state,
        base_version=row.base_version,
        version=row.version,
        digest=row.digest or "",
        staleness=versions_behind,
        reason=row.reason or "",
        receipt=store.receipt_key.receipt_of(store.run_log.run_id, row) if row.is_in else None,
    )
