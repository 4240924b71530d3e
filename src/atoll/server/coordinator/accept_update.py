"""What becomes of an update that is complete: it counts from here on, or is refused with its reason."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from atoll.errors import DiskFull, StoreError, UpdateRefused
from atoll.protocol import messages
from atoll.rounds import events as ev
from atoll.server.coordinator.roster import Presence
from atoll.store.journal_tables import TicketRow

if TYPE_CHECKING:
    from atoll.server.coordinator.run import Run

LOG = logging.getLogger("atoll.server")

REFUSALS = 5
"""In a row, after which a site is sent away: it would train and be refused for ever."""
LOOK = "look at the learning rate, the data and the loss at this site."
STEPS = "report them: submit(model, steps=…), or fl_round.correct(model, optimizer), which counts them."


class Judge:
    """Takes updates of one run into its journal."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._other_weight: set[str] = set()  # sites of which it was reported that their weight changed

    def accept(self, site: str, ticket: int, said: messages.Complete, norm: float) -> TicketRow:
        """Take an update whose bytes are where they belong.

        Raises:
            UpdateRefused: it is not plausible; that is in the journal, too.
            DiskFull: nothing has changed. StoreError: the server ends.
        """
        self.require_plausible(site, ticket, said, norm)
        run = self._run
        try:
            row = run.store.tickets.accept(ticket, said.digest, said.weight, said.steps, dict(said.metrics), norm)
        except DiskFull:
            raise
        except StoreError as error:
            run.fail(error)
            raise
        run.offer(row)
        run.apply(ev.UpdateAccepted(ticket, row.accepted_order))
        if site in run.roster:
            presence = run.roster[site]
            presence.refused_in_a_row = 0
            trained = said.steps * run.plan.fragments[row.fragment].schema.model.nbytes
            presence.gradient_bytes = min(presence.gradient_bytes + trained, messages.NUMBER_BELOW - 1)
        return row

    def with_kept_weight(self, site: str, said: messages.Complete) -> messages.Complete:
        """Where a reducer needs the weight of all sites, have each keep its first one, which earlier versions hold."""
        kept = self._run.store.run_log.kept_weight(site) if self._run.plan.needs_population else 0.0
        if not kept or said.weight == kept:
            return said
        if site not in self._other_weight:
            self._other_weight.add(site)
            LOG.warning(
                "%s submits with weight %g and keeps its first weight, %g, which this run's versions already hold. "
                "Submit with the same weight in every round; another weight needs a new run.",
                site,
                said.weight,
                kept,
            )
        return said.model_copy(update={"weight": kept})

    def require_plausible(self, site: str, ticket: int, said: messages.Complete, norm: float) -> None:
        """Refuse what no training gives.

        Raises:
            UpdateRefused: what is wrong with it.
        """
        settings, weight = self._run.settings, said.weight
        if self._run.plan.needs_steps and not said.steps:
            self.refuse(site, ticket, "it reports no local steps, by which this run divides", STEPS)
        if weight > settings.max_weight:
            self.refuse(site, ticket, f"its weight is {weight:g}, above max_weight {settings.max_weight:g}")
        if settings.max_update_norm and norm > settings.max_update_norm:
            self.refuse(site, ticket, f"its norm is {norm:.4g}, above max_update_norm {settings.max_update_norm:g}")

    def refuse(self, site: str, ticket: int, reason: str, remedy: str = LOOK) -> None:
        """Quarantine an update with its reason; the round goes on with the others, or waits for another try.

        Raises:
            UpdateRefused: always.
        """
        run = self._run
        run.store.tickets.refuse(ticket, reason)
        run.refused += 1
        run.apply(ev.UpdateRefused(ticket, reason))
        presence = run.roster.setdefault(site, Presence(site))
        presence.refused_in_a_row += 1
        LOG.warning("%s: update refused: %s", site, reason)
        if presence.refused_in_a_row >= REFUSALS and (member := run.state.members.get(site)) is not None:
            told = f"{presence.refused_in_a_row} updates in a row were refused, the last because {reason}"
            run.apply(ev.WorkerLeft(site, member.lease, told))
        raise UpdateRefused(f"The update of {site} is refused: {reason}.", f"{self._next(ticket)}; {remedy}")

    def _next(self, ticket: int) -> str:
        """What becomes of the round whose update was refused, as the begin of a sentence."""
        state = self._run.state
        round_ = state.rounds[self._run.store.tickets.get(ticket).fragment]
        if round_.phase == "open" and len(round_.expected) < state.rules.floor:
            return f"The round waits: it needs {state.rules.floor} updates ({state.rules.floor_name})"
        return "The round goes on with the others"
