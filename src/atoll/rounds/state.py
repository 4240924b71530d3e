"""The state of the round machine as frozen values, and the snapshot from which a restarted server restores it.

Mappings are replaced, never changed in place. All times are seconds of the same monotonic clock. Snapshots have no
times, because the values of this clock mean nothing after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from atoll.config import Settings
from atoll.rounds.closing_policy import Async, Barrier, Policy, QuorumDeadline, RoundView
from atoll.rounds.early_stopping import Progress, Tracking
from atoll.rounds.events import Effect, Woken
from atoll.rounds.leases import Member
from atoll.rounds.sampling import Sampling
from atoll.rounds.transitions import IllegalTransition, Ticket


@dataclass(frozen=True)
class Rules:
    """The rules of a run's rounds, derived from its settings.

    Args:
        sites: number of sites that must be alive before the first round opens.
        min_sites: fewest updates with which a round may close.
        heartbeat_timeout_s: seconds of silence after which a worker is declared dead; 0 for never.
        rounds: number of rounds of each fragment after which the run is finished; 0 for no end.
        policy: closing policy.
        sampling: rule by which the sites of a round are drawn.
        fragments: number of fragments.
        tracking: settings of best version tracking and early stopping.
        max_staleness: most versions between the base of an update and the version that the update is applied to; None
            for no limit.
        max_inflight: number of fragments for which one worker may have unfinished updates at a time.
        held: whether the first round must wait for the event `TrainingBegins`.
    """

    sites: int
    min_sites: int = 1
    heartbeat_timeout_s: float = 120.0
    rounds: int = 0
    policy: Policy = field(default_factory=Barrier)
    sampling: Sampling = field(default_factory=Sampling)
    fragments: int = 1
    tracking: Tracking = field(default_factory=Tracking)
    max_staleness: int | None = None
    max_inflight: int = 1
    held: bool = False

    @classmethod
    def from_settings(
        cls, settings: Settings, fragments: int = 1, *, held: bool = False, needs_all: bool = False
    ) -> Rules:
        """Return the rules that the settings of a run determine.

        Args:
            settings: settings of the run.
            fragments: number of fragments.
            held: whether the first round must wait for the event `TrainingBegins`.
            needs_all: whether a synchronous round without a quorum needs the updates of all drawn sites, unless
                `rounds.min_sites` is set.
        """
        policy: Policy = Barrier()
        if settings.async_.enabled:
            policy = Async(settings.async_.buffer_size, settings.async_.grace_s, settings.async_.sync_rounds_first)
        elif settings.rounds.quorum and settings.rounds.deadline_s:
            policy = QuorumDeadline(settings.rounds.quorum, settings.rounds.deadline_s)
        sampling = Sampling(settings.rounds.sample_fraction, settings.rounds.sample_min, settings.rounds.sample_seed)
        needs_all = needs_all and not settings.async_.enabled and not settings.rounds.quorum
        return cls(
            sites=settings.rounds.sites,
            min_sites=settings.rounds.min_sites or (sampling.size(settings.rounds.sites) if needs_all else 1),
            heartbeat_timeout_s=settings.network.heartbeat_timeout_s,
            rounds=settings.rounds.total,
            policy=policy,
            sampling=sampling,
            fragments=fragments,
            tracking=Tracking(
                settings.rounds.best_metric or "",
                settings.rounds.best_mode,
                settings.rounds.early_stop_after,
                settings.rounds.early_stop_min_delta,
            ),
            max_staleness=settings.async_.max_staleness,
            max_inflight=settings.diloco.max_inflight,
            held=held,
        )

    @property
    def floor(self) -> int:
        """Fewest updates with which a round may close; at least 1."""
        return max(1, self.min_sites, self.policy.quorum)

    @property
    def floor_name(self) -> str:
        """Name of the setting that determines `floor`, for messages."""
        return "rounds.quorum" if self.policy.quorum > self.min_sites else "rounds.min_sites"


@dataclass(frozen=True, slots=True)
class Round:
    """The current round of one fragment.

    Args:
        phase: state in the table of transitions `ROUND`: `gathering`, `open`, `closing` or `finished`.
        head: newest version of the fragment, from which the round starts.
        opened_s: time when the round opened.
        expected: expected site → time since which the round waits for it. Each site is alive or has an accepted update.
        tickets: site → its ticket of this round. In asynchronous rounds, the ticket may be from an earlier round.
        frozen: while the round is closing, the tickets with the updates that are being reduced, in order.
        until_s: time at which the policy may close the round without an event; None if there is no such time.
        lost: number of versions up to `head` that the server has lost; a power loss may destroy the newest versions.
        first_s: time since which the oldest accepted update waits to be reduced; None if no update waits.
    """

    phase: str
    head: int
    opened_s: float = 0.0
    expected: Mapping[str, float] = field(default_factory=dict)
    tickets: Mapping[str, Ticket] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()
    until_s: float | None = None
    lost: int = 0
    first_s: float | None = None

    @property
    def done(self) -> int:
        """Number of committed rounds. Rounds with versions that were lost do not count."""
        return self.head - self.lost

    @property
    def number(self) -> int:
        """Number of the round that starts from `head`; the first is 1."""
        return self.done + 1


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run between two events.

    Args:
        rules: rules of the rounds.
        members: site → member.
        seen_s: live site → time of its last sign of life.
        rounds: the current round of each fragment.
        next_ticket: number of the next ticket.
        next_lease: number of the next lease.
        progress: summary of the tracked metric.
        ending: live sites that submit no more updates. Snapshots do not contain them: they announce it again.
    """

    rules: Rules
    members: Mapping[str, Member]
    seen_s: Mapping[str, float]
    rounds: tuple[Round, ...]
    next_ticket: int = 1
    next_lease: int = 1
    progress: Progress = field(default_factory=Progress)
    ending: frozenset[str] = frozenset()

    @property
    def active_s(self) -> Mapping[str, float]:
        """Site → time of its last sign of life, for the live sites that may still submit updates."""
        if not self.ending:
            return self.seen_s
        return {site: last_s for site, last_s in self.seen_s.items() if site not in self.ending}

    @property
    def finished(self) -> bool:
        """Whether every fragment has finished its rounds."""
        return all(round_.phase == "finished" for round_ in self.rounds)

    def is_async(self, fragment: int) -> bool:
        """Return whether the current round is asynchronous: it accepts updates that were trained from old versions."""
        return self.rules.policy.is_async(self.rounds[fragment].number)


@dataclass(frozen=True, slots=True)
class FragmentSnapshot:
    """The current round of one fragment, as the journal has recorded it.

    Args:
        head: newest version of the fragment.
        expected: expected sites of the open round; None if no round is open.
        frozen: if the round was closed, the numbers of the tickets with the updates to reduce, in order.
        started: whether a round of the fragment was ever opened. Read only if `expected` and `frozen` are not set.
        lost: number of lost versions up to `head`.
    """

    head: int
    expected: tuple[str, ...] | None = None
    frozen: tuple[int, ...] = ()
    started: bool = False
    lost: int = 0

    @property
    def done(self) -> int:
        """Number of committed rounds. Rounds with versions that were lost do not count."""
        return self.head - self.lost


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The contents of the journal, from which a restarted server restores the state.

    Args:
        fragments: the current round of each fragment.
        members: all members.
        tickets: tickets of the current rounds and, in an asynchronous run, all open and accepted tickets. Others are
            ignored.
        next_ticket: number of the next ticket.
        next_lease: number of the next lease.
        finished: whether `RunFinished` is in the journal.
        progress: summary of the tracked metric over all versions in the journal.
    """

    fragments: tuple[FragmentSnapshot, ...]
    members: tuple[Member, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    next_ticket: int = 1
    next_lease: int = 1
    finished: bool = False
    progress: Progress = field(default_factory=Progress)


def view(state: State, fragment: int) -> RoundView:
    """Return the facts about the current round of `fragment` from which the closing policy decides."""
    round_, elsewhere = state.rounds[fragment], Counter[str]()
    if len(state.rounds) > 1:
        elsewhere.update(
            ticket.site
            for index, other in enumerate(state.rounds)
            if index != fragment and other.phase == "open"
            for ticket in other.tickets.values()
            if ticket.state == "accepted"
        )
    accepted = [
        ticket for ticket in round_.tickets.values() if ticket.state == "accepted" and ticket.id not in round_.frozen
    ]
    accepted.sort(key=attrgetter("site"))
    return RoundView(
        fragment=fragment,
        head_version=round_.head,
        opened_s=round_.opened_s,
        expected=tuple(sorted(round_.expected)),
        accepted=tuple(accepted),
        floor=state.rules.floor,
        floor_name=state.rules.floor_name,
        number=round_.number,
        first_s=round_.first_s,
        elsewhere=tuple(sorted(site for site, count in elsewhere.items() if count >= state.rules.max_inflight)),
    )


def ticket_by_id(state: State, number: int) -> Ticket | None:
    """Return the ticket with this number if it is in a current round; else None."""
    if not 0 < number < state.next_ticket:
        return None
    for round_ in state.rounds:
        for ticket in round_.tickets.values():
            if ticket.id == number:
                return ticket
    return None


Result = tuple[State, tuple[Effect, ...]]


class Draft:
    """The new state that one step of the round machine builds up, with the effects of the step.

    Attributes:
        state: the state so far. Each change replaces it; it is never changed in place.
        now_s: time of the step in seconds.
        effects: the effects so far.
        wake: the fragments that have changed; requests that wait for them should check the state again.
    """

    __slots__ = ("effects", "now_s", "state", "wake")

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []
        self.wake: set[int] = set()

    def result(self) -> Result:
        """Return the new state and the effects, followed by a `Woken` for each fragment in `wake`."""
        return self.state, (*self.effects, *(Woken(fragment) for fragment in sorted(self.wake)))

    def change(self, **fields: Any) -> None:
        """Replace the given fields of the state."""
        self.state = replace(self.state, **fields)

    def round(self, fragment: int) -> Round:
        """Return the current round of a fragment.

        Raises:
            IllegalTransition: there is no such fragment.
        """
        if not 0 <= fragment < len(self.state.rounds):
            raise IllegalTransition(f"There is no fragment {fragment}: there are only {len(self.state.rounds)}.")
        return self.state.rounds[fragment]

    def change_round(self, fragment: int, **fields: Any) -> None:
        """Replace the given fields of a fragment's current round.

        Raises:
            IllegalTransition: there is no such fragment.
        """
        rounds, changed = self.state.rounds, replace(self.round(fragment), **fields)
        self.change(rounds=(*rounds[:fragment], changed, *rounds[fragment + 1 :]))

    def put(self, ticket: Ticket) -> None:
        """Put a ticket into the current round of its fragment. It replaces an earlier ticket of its site."""
        tickets = self.round(ticket.fragment).tickets
        self.change_round(ticket.fragment, tickets={**tickets, ticket.site: ticket})

    def see(self, site: str) -> None:
        """Record a sign of life of a site, at the time of this step."""
        self.change(seen_s={**self.state.seen_s, site: self.now_s})
