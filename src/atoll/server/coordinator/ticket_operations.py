"""Gives sites their tickets: a ticket is the right to submit one update to a fragment's open round."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Literal

from atoll.algorithms.diloco import dynamic_local_steps
from atoll.errors import Gone
from atoll.format_text import number_of
from atoll.protocol import messages
from atoll.rounds import events
from atoll.server.coordinator.accept_update import outcome_of
from atoll.server.coordinator.first_shapes import FirstShapes
from atoll.server.coordinator.joining import counted_of, why_anew
from atoll.server.coordinator.lease_checks import LeaseChecks
from atoll.server.coordinator.ports import RoundPlace, Tasks
from atoll.server.coordinator.roster import Lease, TimeLeft, why_silent
from atoll.server.coordinator.run_core import RunCore
from atoll.store.journal_tables import TicketRow, VersionRow


class TicketOperations:
    """Carries out the operations of `protocol/openapi.py` on tickets.

    Args:
        run: the run.
        leases: checks of leases.
        shapes: the shapes that the run may take over from a site.
        place: where the versions are made.
        tasks: the tasks that sites do beside the rounds.
        time_left: estimate of the run's remaining time.
    """

    def __init__(
        self,
        run: RunCore,
        leases: LeaseChecks,
        shapes: FirstShapes,
        place: RoundPlace,
        tasks: Tasks,
        time_left: TimeLeft,
    ) -> None:
        self._run, self._leases, self._shapes = run, leases, shapes
        self._place, self._tasks, self._time_left = place, tasks, time_left
        run.store.versions.wanted = self._unpulled

    async def request_ticket(self, lease: Lease, message: messages.TicketRequest) -> messages.TicketReply:
        """Return the site's ticket for a fragment's open round. Wait up to `wait_s` seconds for a round to open.

        If there is no ticket by then, or the run is finished, the reply says why.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            Gone: there is no such fragment.
            Busy: the server is stopping.
            ConfigError: the run has no rounds.
            SchemaMismatch: the site's buffers have shapes that the run cannot have.
        """
        if message.fragment >= len(self._run.state.rounds):
            raise Gone(
                f"Fragment {message.fragment} does not exist.",
                f"The run has {number_of(len(self._run.plan.fragments), 'fragment')}, numbered from 0.",
            )
        self._tasks.require_rounds()
        self._shapes.require(lease.site, message)
        until_s = self._run.clock() + message.wait_s
        previous = self._run.store.tickets.last_of(lease.site, message.fragment)
        while True:
            if message.tasks and self._tasks.rounds == "to come":
                return self._wait_reply(message.fragment, "tasks come before the rounds", previous)
            if reason := self._place.why_withheld(lease.site, message.fragment):
                if self._run.clock() >= until_s:
                    return self._wait_reply(message.fragment, reason, previous)
                await self._run.changed(min(1.0, until_s - self._run.clock()))
                continue
            self.begin_anew_if_needed(lease, message)
            effects = self._run.ledger.record(events.TicketRequested(lease.site, lease.number, message.fragment))
            for effect in effects:
                match effect:
                    case events.LeaseRefused():
                        self._leases.refuse(lease, effect)
                    case events.TicketIssued(_, ticket, fragment, base_version, _):
                        head = self._run.store.versions.head(fragment)
                        return self._reply(
                            "ticket",
                            head,
                            None if previous is None or previous.ticket == ticket else previous,
                            ticket=self.ticket_message(lease.site, ticket, fragment, base_version, head.digest),
                            counted=counted_of(lease.site, self._run.store)
                            if self._run.plan.algorithm.state_groups
                            else None,
                        )
                    case events.TicketWithheld(_, fragment, reason):
                        # Answer at once if the run is finished. If the site submits no more, answer once there is a
                        # newer head, or if the site sat out the last round: such a round may close without a version.
                        moved = (
                            previous is None or self._run.store.versions.head(fragment).version > previous.base_version
                        )
                        moved = moved or (previous is not None and previous.state == "sat out")
                        ended = reason == events.ENDS and moved
                        if reason == events.FINISHED or ended or self._run.clock() >= until_s:
                            return self._wait_reply(fragment, reason, previous, ended=ended)
            await self._run.changed(until_s - self._run.clock())

    def _reply(
        self,
        status: Literal["ticket", "wait", "finished", "ended"],
        head: VersionRow,
        previous: TicketRow | None,
        **more: Any,
    ) -> messages.TicketReply:
        return messages.TicketReply(
            status=status,
            previous=outcome_of(self._run.store, self._run.store.tickets.get(previous.ticket)) if previous else None,
            head_version=head.version,
            head_digest=head.digest,
            durable_version=self._run.store.versions.durable(head.fragment),
            round=self._run.state.rounds[head.fragment].number,
            **more,
        )

    def begin_anew_if_needed(self, lease: Lease, message: messages.SiteState) -> None:
        """Let the algorithm's state begin at zero, in the open round and at all sites, if a site's state requires it.

        Args:
            lease: the site's lease.
            message: what the site says of the state that the algorithm keeps at it.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
        """
        algorithm = self._run.plan.algorithm
        if algorithm.state_groups and (why := why_anew(message, lease.site, self._run.store, algorithm.name)):
            self._leases.require_lease(lease)
            self._run.ledger.record(events.StateLost(why))

    def ticket_message(self, site: str, ticket: int, fragment: int, base_version: int, digest: str) -> messages.Ticket:
        """Return an issued ticket as a message for its site. For the status, record the ticket's base version."""
        presence = self._run.roster.get(site)
        if presence is not None:
            presence.bases[fragment] = base_version
        generation = self._run.store.run_log.generation
        return messages.Ticket(
            id=ticket,
            fragment=fragment,
            round=self._run.state.rounds[fragment].number,
            base_version=base_version,
            base_digest=digest,
            layout_digest=self._run.plan.fragments[fragment].update.digest,
            local_steps=self.local_steps([site])[site],
            generation=generation.number,
            from_zero=generation.begins_at(base_version),
        )

    def local_steps(self, sites: Iterable[str]) -> dict[str, int]:
        """Return site → number of local steps between two synchronisations, computed from the site's speed (DyLU).

        If dynamic local steps are off, the number is 0 for each site, and the number in the settings applies.
        """
        diloco = self._run.settings.diloco
        if not diloco.dynamic_local_steps or not self._run.plan.algorithm.sync_every:
            return dict.fromkeys(sites, 0)
        speeds = {
            site: self._run.roster[site].beat.steps_per_s for site in self._run.alive() if site in self._run.roster
        }
        fastest = max(speeds.values(), default=0.0)
        return {
            site: dynamic_local_steps(speeds.get(site, 0.0), fastest, diloco.sync_every, diloco.num_fragments)
            for site in sites
        }

    def _unpulled(self, fragment: int) -> Collection[int]:
        """Return the versions that open tickets start from and that their sites have probably not downloaded yet.

        For a synchronous fragment, the result is empty: its tickets start from the newest version, which is kept.
        """
        if not self._run.state.is_async(fragment):
            return ()
        tickets = [ticket for ticket in self._run.state.rounds[fragment].tickets.values() if ticket.state == "open"]
        # site → version that it trains from; a heartbeat reports one version, so only for runs with one fragment
        has = (
            {site: each.beat.version for site, each in self._run.roster.items()}
            if len(self._run.state.rounds) == 1
            else {}
        )
        return {
            ticket.base_version
            for ticket in tickets
            if ticket.site in self._run.state.seen_s and not has.get(ticket.site, 0) >= ticket.base_version > 0
        }

    def _wait_reply(
        self, fragment: int, reason: str, previous: TicketRow | None, *, ended: bool = False
    ) -> messages.TicketReply:
        head = self._run.store.versions.head(fragment)
        state, queue = self._run.state, self._tasks
        if reason == events.FINISHED:
            text = state.stopped or reason
        else:
            now_s = self._run.clock()
            rest, known = self.why(fragment, now_s), state.why(fragment, now_s)
            if reason.endswith(known):  # the reason already ends with this text
                text = reason + rest.removeprefix(known)
            else:
                text = rest if rest.startswith(reason) else f"{reason}; the round {rest}"
        return self._reply(
            "finished" if reason == events.FINISHED else "ended" if ended else "wait",
            head,
            previous,
            waiting_for=[site for site, _ in state.missing(fragment)],
            reason=text,
            tasks=queue.follows and not queue.finished if reason == events.FINISHED else queue.rounds == "to come",
            left_s=self._time_left.of(state, self._run.clock()),
        )

    def why(self, fragment: int, now_s: float) -> str:
        """Describe what a fragment's round waits for, and the known problems of the missing sites."""
        sites = [site for site, _ in self._run.state.missing(fragment)]
        trouble = self._place.trouble(fragment)
        silent = why_silent(
            sites, self._run.roster, self._run.state, self._run.settings.network, now_s, self._run.moved_from
        )
        return "; ".join(filter(None, [self._run.state.why(fragment, now_s), trouble, *silent]))

    async def get_ticket(self, ticket: int) -> messages.TicketState:
        """Return the state of a ticket. While the ticket is open or accepted, also return its parts on disk.

        Raises:
            Gone: this run has never issued the ticket.
        """
        row = self._run.store.tickets.get(ticket)
        parts = self._run.store.tickets.parts(ticket) if row.is_live else {}
        return messages.TicketState(
            outcome=outcome_of(self._run.store, row),
            parts=list(parts),
            part_digests=[part.digest.hex() for part in parts.values()],
        )
