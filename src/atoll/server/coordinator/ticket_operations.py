"""Gives sites their tickets: a ticket is the right to submit one update to a fragment's open round."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any, Literal

from atoll.algorithms.diloco import dynamic_local_steps
from atoll.errors import Gone
from atoll.format_text import number_of
from atoll.protocol import messages
from atoll.rounds import events
from atoll.server.coordinator.accept_update import outcome_of
from atoll.server.coordinator.attendance import SAT_OUT_ROUNDS, why_silent
from atoll.server.coordinator.first_shapes import FirstShapes
from atoll.server.coordinator.joining import counted_of, why_anew
from atoll.server.coordinator.lease_checks import LeaseChecks
from atoll.server.coordinator.ports import RoundPlace, Tasks
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.round_configs import RoundConfigs
from atoll.server.coordinator.round_times import TimeLeft
from atoll.server.coordinator.run_core import RunCore
from atoll.store.journal_tables import TicketRow, VersionRow

FIRST_REST_S, LONGEST_REST_S = 0.1, 10.0
"""Pause before a round if all sites have sat out the last `SAT_OUT_ROUNDS` rounds. It doubles with each further one."""


class TicketOperations:
    """Carries out the operations of `protocol/openapi.py` on tickets.

    Args:
        run: the run.
        leases: checks of leases.
        shapes: the shapes that the run may take over from a site.
        place: where the versions are made.
        tasks: the tasks that sites do beside the rounds.
        time_left: estimate of the run's remaining time.
        configs: what sites are told for a round.
    """

    def __init__(
        self,
        run: RunCore,
        leases: LeaseChecks,
        shapes: FirstShapes,
        place: RoundPlace,
        tasks: Tasks,
        time_left: TimeLeft,
        configs: RoundConfigs,
    ) -> None:
        self._run, self._leases, self._shapes = run, leases, shapes
        self._place, self._tasks, self._time_left, self._configs = place, tasks, time_left, configs
        self._idle: dict[int, tuple[int, float]] = {}  # fragment → its round after a pause, when it began
        self._steps: dict[int, tuple[int, int]] = {}  # fragment → a version, and the steps that it has behind it
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
            self._shapes.require_settled()
            if message.tasks and self._tasks.rounds == "to come":
                return self._wait_reply(lease.site, message.fragment, "tasks come before the rounds", previous)
            reason, pause_s = self._held_back(lease.site, message.fragment)
            if reason:
                if self._run.clock() >= until_s:
                    return self._wait_reply(lease.site, message.fragment, reason, previous)
                await self._run.changed(min(pause_s, until_s - self._run.clock()))
                continue
            if await self._configures(lease.site, message.fragment):
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
                            return self._wait_reply(lease.site, fragment, reason, previous, ended=ended)
            await self._run.changed(until_s - self._run.clock())

    def _held_back(self, site: str, fragment: int) -> tuple[str, float]:
        """Return why a site gets no ticket although a round may be open, and in how many seconds to look again."""
        if reason := self._place.why_withheld(site, fragment):
            return reason, 1.0
        rest_s = self._rest_s(fragment)
        return "all sites sat out the last rounds: a pause" if rest_s else "", rest_s

    async def _configures(self, site: str, fragment: int) -> bool:
        """Find out what to tell a site in a fragment's round. Return whether this took time.

        The user's function is asked for all sites that the round waits for at once.
        """
        round_ = self._run.state.rounds[fragment]
        if round_.phase == "finished" or self._configs.are_ready(site, round_.number):
            return False
        missing = [each for each, _ in self._run.state.missing(fragment)]
        await self._configs.prepare([site, *missing], round_.number)
        return True

    def _rest_s(self, fragment: int) -> float:
        """Return the seconds until a fragment's open round gives tickets, if all sites sat out several rounds in a row.

        Without this pause, sites without data would go through rounds as fast as the network allows.
        """
        round_, now_s = self._run.state.rounds[fragment], self._run.clock()
        further = round_.sat_out_in_a_row - SAT_OUT_ROUNDS
        if further < 0 or round_.phase != "open":
            return 0.0
        if self._idle.get(fragment, (0, 0.0))[0] != round_.number:
            self._idle[fragment] = round_.number, now_s
        rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2.0 ** min(further, 10))
        return max(0.0, self._idle[fragment][1] + rest_s - now_s)

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
            global_step=self._global_step(head.fragment, head.version),
            round=self._run.state.rounds[head.fragment].number,
            **more,
        )

    def _global_step(self, fragment: int, version: int) -> int:
        """Return the number of local steps that a version has behind it, along one site."""
        if self._steps.get(fragment, (-1, 0))[0] != version:
            summary = json.loads(self._run.store.versions.get(fragment, version).summary_json or "{}")
            self._steps[fragment] = version, round(summary.get("global_step", 0.0))
        return self._steps[fragment][1]

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
            local_steps=self.local_steps([site], self._run.state.rounds[fragment].number)[site],
            generation=generation.number,
            from_zero=generation.begins_at(base_version),
            global_step=self._global_step(fragment, base_version),
            config=self._configs.of(site, self._run.state.rounds[fragment].number),
        )

    def local_steps(self, sites: Iterable[str], number: int) -> dict[str, int]:
        """Return site → number of local steps between two synchronisations in a round, from the site's speed (DyLU).

        If dynamic local steps are off, it is the same for each site; 0 if it never changes, so that the run's applies.
        """
        plan = self._run.plan.of_round(number)
        diloco = plan.settings.diloco
        if not diloco.dynamic_local_steps or not plan.algorithm.sync_every:
            return dict.fromkeys(sites, plan.algorithm.sync_every if self._run.plan.changes_steps else 0)
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
        self, site: str, fragment: int, reason: str, previous: TicketRow | None, *, ended: bool = False
    ) -> messages.TicketReply:
        head = self._run.store.versions.head(fragment)
        state, queue, number = self._run.state, self._tasks, self._run.state.rounds[fragment].number
        if reason == events.FINISHED:
            text = state.why_ended or reason
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
            local_steps=self.local_steps([site], number)[site],
            config=self._configs.of(site, number) if self._configs.are_ready(site, number) else {},
            left_s=self._time_left.of(state, self._run.clock()),
        )

    def why(self, fragment: int, now_s: float) -> str:
        """Describe what a fragment's round waits for, and the known problems of the missing sites."""
        return "; ".join(filter(None, [self._run.state.why(fragment, now_s), self.trouble(fragment, now_s)]))

    def trouble(self, fragment: int, now_s: float) -> str:
        """Describe the known problems of the aggregator of a fragment's round and of its missing sites."""
        sites = [site for site, _ in self._run.state.missing(fragment)]
        silent = why_silent(
            sites, self._run.roster, self._run.state, self._run.settings.network, now_s, self._run.moved_from
        )
        return "; ".join(filter(None, [self._place.trouble(fragment), *silent]))

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
