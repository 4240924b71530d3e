"""A journal in memory: what the store keeps of a run, as plain rows, each method one atomic write.

`snapshot` gives what `machine.restore` starts from. The store's journal answers to the same tests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from atoll.rounds import events
from atoll.rounds.early_stopping import Measurement, Tracking
from atoll.rounds.leases import Member
from atoll.rounds.machine import restore
from atoll.rounds.state import FragmentSnapshot, Rules, Snapshot, State
from atoll.rounds.transitions import IssuedTicket


def initial(rules: Rules) -> State:
    """A run that has version 0 and no members."""
    return restore(rules, Snapshot((FragmentSnapshot(0),) * rules.fragments), 0.0)[0]


def snapshot(state: State) -> Snapshot:
    """What a journal holds when every effect up to `state` is in it; times are left out."""
    fragments = tuple(
        FragmentSnapshot(
            head=round_.head,
            expected=tuple(sorted(round_.expected)) if round_.phase == "open" else None,
            frozen=round_.frozen if round_.phase == "closing" else (),
            started=round_.phase != "gathering",
            lost=round_.lost,
            sat_out_rounds=round_.sat_out_rounds,
            sat_out_in_a_row=round_.sat_out_in_a_row,
            sitting_out=frozenset(each.id for each in round_.tickets.values() if each.state == "sat out"),
        )
        for round_ in state.rounds
    )
    tickets = (ticket for round_ in state.rounds for ticket in round_.tickets.values())
    return Snapshot(
        fragments=fragments,
        members=tuple(sorted(state.members.values(), key=lambda member: member.site)),
        tickets=tuple(sorted(tickets, key=lambda ticket: ticket.id)),
        next_ticket=state.next_ticket,
        next_lease=state.next_lease,
        finished=state.finished,
        progress=state.progress,
        paused=state.paused,
        stopping=state.stopping,
    )


@dataclass
class SimJournal:
    """Rows of one run; `fragments` by number, `tickets` by id, `members` by site."""

    fragments: list[FragmentSnapshot]
    tickets: dict[int, IssuedTicket] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    finished: bool = False
    paused: bool = False
    stopping: bool = False
    tracking: Tracking = field(default_factory=Tracking)
    measured: list[Measurement] = field(default_factory=list)

    @classmethod
    def of(cls, state: State) -> SimJournal:
        """The journal of a state that no site has joined."""
        return cls(list(snapshot(state).fragments), tracking=state.rules.tracking)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            fragments=tuple(self.fragments),
            members=tuple(self.members[site] for site in sorted(self.members)),
            tickets=tuple(self.tickets[number] for number in sorted(self.tickets)),
            finished=self.finished,
            progress=self.tracking.follow_all(self.measured),
            paused=self.paused,
            stopping=self.stopping,
        )

    def accept(self, number: int, order: int) -> None:
        ticket = self.tickets[number]
        self.tickets[number] = replace(ticket, state="accepted", order=ticket.order or order)

    @property
    def next_order(self) -> int:
        """Of the update that is accepted next."""
        return 1 + max((ticket.order for ticket in self.tickets.values()), default=0)

    def refuse(self, number: int, reason: str) -> None:
        self.tickets[number] = replace(self.tickets[number], state="refused", reason=reason)

    def sit_out(self, number: int) -> None:
        ticket = self.tickets[number] = replace(self.tickets[number], state="sat out")
        row = self.fragments[ticket.fragment]
        self.fragments[ticket.fragment] = replace(row, sitting_out=row.sitting_out | {number})

    def move_head(self, fragment: int, version: int, value: float | None = None) -> None:
        """The commit: the head moves, and the updates of the frozen round count, with the mean of their metric."""
        row = self.fragments[fragment]
        if value is not None:
            self.measured.append(Measurement(row.head, row.done + 1, value))
        for number in row.frozen:
            self.tickets[number] = replace(self.tickets[number], state="counted")
        lost = row.lost + version - row.head - 1
        self.fragments[fragment] = FragmentSnapshot(
            version, started=True, lost=lost, sat_out_rounds=row.sat_out_rounds, first_ticket=row.first_ticket
        )

    def apply(self, effect: events.Effect) -> bool:  # noqa: C901
        """Write what `effect` asks for; False where it is not one for the journal."""
        match effect:
            case events.LeaseGranted(site, lease):
                self.members[site] = Member(site, lease, alive=True)
            case events.LeaseEnded(site, lease, why):
                self.members[site] = Member(site, lease, alive=False, why=why)
            case events.SitesForgotten(sites):
                for site in sites:
                    del self.members[site]
            case events.RoundOpened(fragment, _, expected) | events.ExpectedChanged(fragment, _, expected):
                row = self.fragments[fragment]
                self.fragments[fragment] = replace(row, expected=expected, started=True)
            case events.RoundClosed(fragment, _, tickets):
                row = self.fragments[fragment]
                self.fragments[fragment] = replace(row, frozen=tickets)
            case events.RoundSatOut(fragment, head, in_a_row, next_ticket):
                total = self.fragments[fragment].sat_out_rounds + 1
                self.fragments[fragment] = FragmentSnapshot(
                    head,
                    started=True,
                    lost=self.fragments[fragment].lost,
                    sat_out_rounds=total,
                    sat_out_in_a_row=in_a_row,
                    first_ticket=next_ticket,
                )
            case events.TicketIssued(site, ticket, fragment, base, new=True):
                self.tickets[ticket] = IssuedTicket(ticket, site, fragment, base, "open")
            case events.TicketsExpired(numbers, reason):
                for number in numbers:
                    self.tickets[number] = replace(self.tickets[number], state="expired", reason=reason)
            case events.RoundReopened(fragment, _, numbers):
                self.fragments[fragment] = replace(self.fragments[fragment], frozen=())
                for number in numbers:
                    self.tickets[number] = replace(self.tickets[number], state="open", order=0)
            case events.RunFinished():
                self.finished = True
            case _:
                return self._control(effect)
        return True

    def _control(self, effect: events.Effect) -> bool:
        """Write what the admin's event has led to; False where `effect` is none of these."""
        match effect:
            case events.ControlsChanged(paused, stopping):
                self.paused, self.stopping = paused, stopping
            case events.RoundStopped(fragment):
                row = self.fragments[fragment]
                begun = row.head > 0 or row.sat_out_rounds > 0
                self.fragments[fragment] = replace(row, expected=None, frozen=(), started=begun)
            case _:
                return False
        return True
