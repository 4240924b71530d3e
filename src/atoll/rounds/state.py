"""What the round machine knows: frozen values, and the snapshot from which a restarted server makes them.

Mappings are replaced, never changed. Times are seconds on one monotonic clock; they are not part of a
snapshot, since no clock survives a restart.

`Draft` is the state that one step is making, with its effects so far.
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
    """What a run's settings mean for its rounds.

    Args:
        sites: how many must have joined before round one opens.
        min_sites: a round never closes with fewer updates.
        heartbeat_timeout_s: silence after which a worker is declared dead; 0: never.
        rounds: the run is finished when every fragment has had so many; 0: endless.
        policy: when a round closes.
        sampling: which sites it asks for.
        fragments: how many parts of the model have rounds of their own.
        tracking: which version is the best, and when that ends the run.
        max_staleness: versions between the base of an update and the one that it is applied to; None: no limit.
        max_inflight: fragments of one worker that may be under way at a time.
        held: training has not begun: no first round opens, whichever sites join.
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
        """The rules of a run: a barrier, quorum and deadline where both are set, or asynchronous steps.

        Args:
            needs_all: whether a round waits for all sites where the settings do not say otherwise.
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
        """The fewest updates with which a round may close."""
        return max(1, self.min_sites, self.policy.quorum)

    @property
    def floor_name(self) -> str:
        """The setting that `floor` comes from, for messages."""
        return "rounds.quorum" if self.policy.quorum > self.min_sites else "rounds.min_sites"


@dataclass(frozen=True, slots=True)
class Round:
    """Where one fragment is. `phase` is a row of the table `ROUND`.

    Args:
        head: the fragment's version now, which the open round starts from.
        expected: site → since when (seconds) the round waits for it. Each is alive or has an accepted update.
        tickets: site → its ticket of this round; in asynchronous ones of an earlier round, too.
        frozen: while closing, the tickets that are being reduced, in order.
        until_s: when time alone may close the round.
        lost: how many numbers below `head` no version of this run has: the server fell back behind them.
        first_s: since when an accepted update waits to be reduced, where one does.
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
        """Rounds that led to `head`."""
        return self.head - self.lost

    @property
    def number(self) -> int:
        """Of the round from `head`; the first is 1."""
        return self.done + 1


@dataclass(frozen=True, slots=True)
class State:
    """A run between two events.

    Args:
        seen_s: site → when it last gave a sign of life; of members alive only.
        rounds: one per fragment.
        progress: of the metric that is tracked.
        ending: sites that are alive, and submit nothing more. A restart does not know them; they say it again.
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
        """As `seen_s`, of members that may submit something."""
        if not self.ending:
            return self.seen_s
        return {site: last_s for site, last_s in self.seen_s.items() if site not in self.ending}

    @property
    def finished(self) -> bool:
        """Whether no fragment has another round."""
        return all(round_.phase == "finished" for round_ in self.rounds)

    def is_async(self, fragment: int) -> bool:
        """Whether the round from the head of `fragment` takes updates against earlier versions."""
        return self.rules.policy.is_async(self.rounds[fragment].number)


@dataclass(frozen=True, slots=True)
class FragmentSnapshot:
    """A fragment in the journal: the round from its head.

    Args:
        expected: the sites that the open round waits for; None: none is open.
        frozen: the tickets that are to be reduced.
        started: whether any round of it has ever been opened; implied by `expected` and `frozen`.
        lost: as in `Round`.
    """

    head: int
    expected: tuple[str, ...] | None = None
    frozen: tuple[int, ...] = ()
    started: bool = False
    lost: int = 0

    @property
    def done(self) -> int:
        """As in `Round`."""
        return self.head - self.lost


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the journal holds.

    Args:
        tickets: at least those of the rounds from the heads, and all that are open or accepted in an asynchronous run;
            others are ignored.
        finished: whether `RunFinished` is in the journal.
        progress: after the metrics of every version that the journal has.
    """

    fragments: tuple[FragmentSnapshot, ...]
    members: tuple[Member, ...] = ()
    tickets: tuple[Ticket, ...] = ()
    next_ticket: int = 1
    next_lease: int = 1
    finished: bool = False
    progress: Progress = field(default_factory=Progress)


def view(state: State, fragment: int) -> RoundView:
    """The open round of `fragment` as a policy sees it."""
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
    """The ticket, where it belongs to a round that is not over."""
    if not 0 < number < state.next_ticket:
        return None
    for round_ in state.rounds:
        for ticket in round_.tickets.values():
            if ticket.id == number:
                return ticket
    return None


Result = tuple[State, tuple[Effect, ...]]


class Draft:
    """Lives for one step. Nothing that `state` holds is ever changed in place."""

    __slots__ = ("effects", "now_s", "state", "wake")

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []
        self.wake: set[int] = set()

    def result(self) -> Result:
        """Return the new state and the effects; last comes a `Woken` for each fragment in `wake`."""
        return self.state, (*self.effects, *(Woken(fragment) for fragment in sorted(self.wake)))

    def change(self, **fields: Any) -> None:
        """Replace `state` by one with these fields."""
        self.state = replace(self.state, **fields)

    def round(self, fragment: int) -> Round:
        """Return where a fragment is now.

        Raises:
            IllegalTransition: there is no such fragment.
        """
        if not 0 <= fragment < len(self.state.rounds):
            raise IllegalTransition(f"There is no fragment {fragment}; there are {len(self.state.rounds)}.")
        return self.state.rounds[fragment]

    def change_round(self, fragment: int, **fields: Any) -> None:
        """Replace these fields of a fragment's round.

        Raises:
            IllegalTransition: there is no such fragment.
        """
        rounds, changed = self.state.rounds, replace(self.round(fragment), **fields)
        self.change(rounds=(*rounds[:fragment], changed, *rounds[fragment + 1 :]))

    def put(self, ticket: Ticket) -> None:
        """Enter a ticket into the round of its fragment, in place of an earlier one of its site."""
        tickets = self.round(ticket.fragment).tickets
        self.change_round(ticket.fragment, tickets={**tickets, ticket.site: ticket})

    def see(self, site: str) -> None:
        """Note a sign of life of a site, at the time of this step."""
        self.change(seen_s={**self.state.seen_s, site: self.now_s})
