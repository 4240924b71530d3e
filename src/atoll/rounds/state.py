"""The state of the round machine as frozen values, and the snapshot from which a restarted server restores it.

The methods of `State` tell why a round waits and for which sites, which site may submit, and when the next deadline is.

Mappings are replaced, never changed in place. All times are seconds of the same monotonic clock. Snapshots have no
times, because the values of this clock mean nothing after a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from atoll.config import Settings
from atoll.format_text import listed, number_of
from atoll.rounds import leases
from atoll.rounds.closing_policy import AsyncBuffer, Barrier, Policy, QuorumDeadline, RoundView, StayOpen
from atoll.rounds.early_stopping import MetricProgress, Tracking
from atoll.rounds.events import Effect, LeaseRefused, Woken
from atoll.rounds.leases import Member
from atoll.rounds.sampling import Sampling
from atoll.rounds.transitions import IllegalTransition, IssuedTicket

IN_VAIN_SHARE = 0.2
"""Share of the time for which rounds may wait for sites that never contribute, beyond the time that each has."""

PAUSED = "the run is paused, so no site gets a ticket until its admin resumes it"


@dataclass(frozen=True)
class Rules:
    """The rules of a run's rounds, derived from its settings.

    Args:
        sites: number of sites that must be alive before the first round opens.
        min_sites: minimum number of updates with which a round may close.
        heartbeat_timeout_s: seconds of silence after which a worker is declared dead; 0 for never.
        rounds: number of rounds of each fragment after which the run is finished; 0 for no end.
        policy: closing policy.
        sampling: rule by which the sites of a round are drawn.
        fragments: number of fragments.
        tracking: settings of best version tracking and early stopping.
        max_staleness: maximum number of versions between the base of an update and the version that the update is
            applied to; None for no limit.
        max_inflight: number of fragments for which one worker may have unfinished updates at a time.
        held: whether the first round must wait for the event `TrainingBegins`.
        all_drawn: whether `min_sites` stands for all sites of a round. Then those that sit out are not needed.
        first_update_s: seconds for which a round waits for a site that has never contributed, after the round's first
            update; 0 for no limit.
        most_sites: number of members from which on a new one replaces those that have never contributed.
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
    all_drawn: bool = False
    first_update_s: float = 3600.0
    most_sites: int = 1000

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
            policy = AsyncBuffer(
                settings.async_.buffer_size, settings.async_.grace_s, settings.async_.sync_rounds_first
            )
        elif settings.rounds.quorum and settings.rounds.deadline_s:
            policy = QuorumDeadline(settings.rounds.quorum, settings.rounds.deadline_s)
        sampling = Sampling(settings.rounds.sample_fraction, settings.rounds.sample_min, settings.rounds.sample_seed)
        is_set = settings.rounds.min_sites or settings.async_.enabled or settings.rounds.quorum
        all_drawn = needs_all and not is_set
        return cls(
            sites=settings.rounds.sites,
            min_sites=settings.rounds.min_sites or (sampling.size(settings.rounds.sites) if all_drawn else 1),
            heartbeat_timeout_s=settings.network.heartbeat_timeout_s,
            rounds=settings.rounds.total,
            policy=policy,
            sampling=sampling,
            fragments=fragments,
            tracking=Tracking(
                settings.rounds.best_metric or "",
                settings.rounds.best_mode_in_effect,
                settings.rounds.early_stop_after,
                settings.rounds.early_stop_min_delta,
            ),
            max_staleness=settings.async_.max_staleness,
            max_inflight=settings.diloco.max_inflight,
            held=held,
            all_drawn=all_drawn,
            first_update_s=settings.limits.first_update_s,
            most_sites=settings.limits.sites,
        )

    @property
    def floor(self) -> int:
        """Minimum number of updates with which a round may close if no site sits out; at least 1."""
        return max(1, self.min_sites, self.policy.quorum)

    def floor_without(self, sites: int) -> int:
        """Return the minimum number of updates with which a round may close that this number of sites sit out."""
        return max(1, self.floor - sites) if self.all_drawn else self.floor

    @property
    def floor_name(self) -> str:
        """Name of the setting that determines `floor`, for messages."""
        return "rounds.quorum" if self.policy.quorum > self.min_sites else "rounds.min_sites"


@dataclass(frozen=True, slots=True)
class CurrentRound:
    """The current round of one fragment.

    Args:
        phase: state in the table of transitions `ROUND`: `gathering`, `open`, `closing`, `paused` or `finished`.
        head: newest version of the fragment, from which the round starts.
        opened_s: time when the round opened.
        expected: expected site → time when the round began to wait for it. Each site is alive or has an accepted
            update.
        tickets: site → its ticket of this round. In asynchronous rounds, the ticket may be from an earlier round.
        frozen: while the round is closing, the ticket numbers of the updates that are being aggregated, in order.
        until_s: time at which the policy may close the round without an event; None if there is no such time.
        lost: number of versions up to `head` that the server has lost; a power loss may destroy the newest versions.
        first_s: time when the round first had an accepted update: the start of the grace time; None if it has none.
        last_s: time when it last had one, or last gave up waiting for a site; None if neither has happened.
        in_vain_s: seconds that rounds have waited for sites that did not contribute, less `IN_VAIN_SHARE` of the time
            since.
        sat_out_rounds: number of rounds of the fragment that ended without a version, because all sites sat out.
        sat_out_in_a_row: number of these rounds that started from `head`.
    """

    phase: str
    head: int
    opened_s: float = 0.0
    expected: Mapping[str, float] = field(default_factory=dict)
    tickets: Mapping[str, IssuedTicket] = field(default_factory=dict)
    frozen: tuple[int, ...] = ()
    until_s: float | None = None
    lost: int = 0
    first_s: float | None = None
    last_s: float | None = None
    in_vain_s: float = 0.0
    sat_out_rounds: int = 0
    sat_out_in_a_row: int = 0

    @property
    def done(self) -> int:
        """Number of rounds that have ended, with or without a version, except those with a lost version."""
        return self.head - self.lost + self.sat_out_rounds

    @property
    def number(self) -> int:
        """Number of the current round; the first is 1."""
        return self.done + 1

    @property
    def sat_out(self) -> tuple[str, ...]:
        """The sites that sit out this round, sorted."""
        return tuple(sorted(site for site, ticket in self.tickets.items() if ticket.state == "sat out"))


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
        ending: live sites that submit no more updates. Snapshots do not contain them: after a restart of the server,
            the sites announce their end again.
        paused: whether the admin has paused the run. A round that was open then is still open.
        stopping: whether the admin has ended the run. Rounds that are open or closing are its last ones.
        proven: sites that have contributed: an update of theirs was accepted.
        late: sites that have not, and that no round waits for any more. Each round gives them a ticket all the same.
    """

    rules: Rules
    members: Mapping[str, Member]
    seen_s: Mapping[str, float]
    rounds: tuple[CurrentRound, ...]
    next_ticket: int = 1
    next_lease: int = 1
    progress: MetricProgress = field(default_factory=MetricProgress)
    ending: frozenset[str] = frozenset()
    paused: bool = False
    stopping: bool = False
    proven: frozenset[str] = frozenset()
    late: frozenset[str] = frozenset()

    @property
    def why_ended(self) -> str:
        """Why the run has ended before its last round, as text; empty if it has not."""
        by_admin = "stopped by its admin" if self.stopping and self.finished else ""
        return self.rules.tracking.why(self.progress) or by_admin

    @property
    def active_s(self) -> Mapping[str, float]:
        """Site → time of its last sign of life, for the live sites that may still submit updates."""
        if not self.ending:
            return self.seen_s
        return {site: last_s for site, last_s in self.seen_s.items() if site not in self.ending}

    @property
    def awaited(self) -> Set[str]:
        """The live sites that may still submit updates, and that rounds wait for."""
        return self.active_s.keys() - self.late if self.late else self.active_s.keys()

    def newcomers(self, fragment: int) -> dict[str, float]:
        """Return the sites that have never contributed → time until which an open round waits for them.

        It waits for `rules.first_update_s` after its first update, or for as long again as that update took if this is
        longer. If sites sat out and none has submitted, the time counts from the round's beginning. It also waits for
        `rules.first_update_s` after it began to wait for the site. Without an end, the site is left out.

        Strangers could hold each round under a new name. So rounds wait in vain for twice this time, and then for
        `IN_VAIN_SHARE` of the time that passes.
        """
        round_, limit_s = self.rounds[fragment], self.rules.first_update_s
        if round_.phase != "open" or self.paused or not limit_s or self.proven.issuperset(round_.expected):
            return {}
        if round_.first_s is not None:
            from_s, longest_s = round_.first_s, max(limit_s, round_.first_s - round_.opened_s)
        elif round_.sat_out:
            from_s, longest_s = round_.opened_s, limit_s
        else:
            return {}
        left_s = max(0.0, 2 * longest_s - round_.in_vain_s)
        until_s, wait_s, since_s = from_s + min(longest_s, left_s), min(limit_s, left_s), round_.expected
        return {site: max(until_s, since_s[site] + wait_s) for site in since_s if site not in self.proven}

    @property
    def finished(self) -> bool:
        """Whether every fragment has finished its rounds."""
        return all(round_.phase == "finished" for round_ in self.rounds)

    @property
    def stopped(self) -> str:
        """Why the run has ended before its last round; empty if it has not."""
        is_early = self.finished and not (self.rules.rounds and all(r.done >= self.rules.rounds for r in self.rounds))
        return self.rules.tracking.why(self.progress) if is_early else ""

    def is_async(self, fragment: int) -> bool:
        """Return whether the current round is asynchronous: it accepts updates that were trained from old versions."""
        return self.rules.policy.is_async(self.rounds[fragment].number)

    def view(self, fragment: int) -> RoundView:
        """Return the facts about the current round of `fragment` for the closing policy."""
        round_, elsewhere = self.rounds[fragment], Counter[str]()
        if len(self.rounds) > 1:
            elsewhere.update(
                ticket.site
                for index, other in enumerate(self.rounds)
                if index != fragment and other.phase == "open"
                for ticket in other.tickets.values()
                if ticket.state in ("accepted", "sat out")
            )
        accepted = [
            ticket
            for ticket in round_.tickets.values()
            if ticket.state == "accepted" and ticket.id not in round_.frozen
        ]
        accepted.sort(key=attrgetter("site"))
        return RoundView(
            fragment=fragment,
            head_version=round_.head,
            opened_s=round_.opened_s,
            expected=tuple(sorted(round_.expected)),
            accepted=tuple(accepted),
            floor=self.rules.floor_without(len(round_.sat_out)),
            floor_name=self.rules.floor_name,
            number=round_.number,
            first_s=round_.first_s,
            elsewhere=tuple(sorted(site for site, count in elsewhere.items() if count >= self.rules.max_inflight)),
        )

    def lacks_sites(self, fragment: int) -> bool:
        """Return whether the open round expects too few updates to close, so that other sites have to be asked."""
        round_ = self.rounds[fragment]
        return len(round_.expected) < self.rules.floor_without(len(round_.sat_out))

    def all_sat_out(self, fragment: int) -> bool:
        """Return whether the open round gets no update, because all sites that could submit one sit it out.

        If these are fewer sites than the round needs, return False: then it waits for another site.
        """
        round_ = self.rounds[fragment]
        sites = round_.sat_out
        enough = bool(sites) and len(sites) >= self.rules.floor_without(len(sites)) and not round_.frozen
        return enough and not round_.expected and self.awaited <= {*sites} and bool(self.active_s)

    def ticket_by_id(self, number: int) -> IssuedTicket | None:
        """Return the ticket with this number if it is in a current round; else None."""
        if not 0 < number < self.next_ticket:
            return None
        for round_ in self.rounds:
            for ticket in round_.tickets.values():
                if ticket.id == number:
                    return ticket
        return None

    def missing(self, fragment: int) -> tuple[tuple[str, float], ...]:
        """Return the sites that the open round waits for, each with the time at which the waiting began.

        The sites are sorted by name. If no round is open, the result is empty.
        """
        round_ = self.rounds[fragment]
        if round_.phase != "open":
            return ()
        return tuple((site, round_.expected[site]) for site in self.rules.policy.awaited(self.view(fragment)))

    def why(self, fragment: int, now_s: float) -> str:
        """Return what a fragment does or waits for, as a sentence without its subject, such as "waits for clinic-a"."""
        round_ = self.rounds[fragment]
        if round_.phase == "paused" or (round_.phase == "gathering" and self.paused):
            return "is paused, until its admin resumes the run"
        if round_.phase == "gathering" and self.rules.held:
            return "does not train at present: the sites work on tasks of a workflow"
        if round_.phase == "gathering":
            joined = len(leases.alive(self.members))
            return f"waits for {number_of(self.rules.sites, 'site')} to join; {joined} joined so far"
        if round_.phase == "closing":
            return f"aggregates {number_of(len(round_.frozen), 'update')} of round {round_.number}"
        if round_.phase == "finished":
            return "; ".join(filter(None, ["is finished", self.why_ended]))
        decision = self.rules.policy.decide(self.view(fragment), now_s)
        if not isinstance(decision, StayOpen):
            return "is about to close"
        last = "this is the last round, because the admin has stopped the run" if self.stopping else ""
        sat_out = f"{listed(round_.sat_out)} sat out" if round_.sat_out else ""
        return "; ".join(filter(None, [decision.reason, sat_out, PAUSED if self.paused else last]))

    def may_submit(self, site: str, lease: int, ticket: int) -> LeaseRefused | str | None:
        """Return None if the process that holds `lease` may submit an update for `ticket` now.

        Otherwise return a `LeaseRefused`, or a sentence that says what is wrong with the ticket. After such a sentence,
        check in the journal whether the request repeats an update that was already accepted.
        """
        refused = leases.refusal(self.members, site, lease)
        if refused:
            return refused
        if not 0 < ticket < self.next_ticket:
            return f"Ticket {ticket} was never issued."
        issued = self.ticket_by_id(ticket)
        if issued is None:
            return f"Ticket {ticket} is over: its round has closed, or a newer ticket has replaced it."
        if issued.site != site:
            return f"Ticket {ticket} was not issued to {site!r}."
        if issued.state != "open":
            return f"Ticket {ticket} is {issued.state}{': ' if issued.reason else ''}{issued.reason}."
        limit = self.rules.max_staleness  # called for every part, so skip the calculation if there is no limit
        if limit is not None and (lag := self.staleness(issued)) > limit:
            behind = number_of(lag, "version")
            return f"Ticket {ticket} is too late: its update would be {behind} behind; async.max_staleness is {limit}."
        return None

    def staleness(self, ticket: IssuedTicket) -> int:
        """Return how many versions lie between a ticket's base and the version that its update would be applied to now.

        Lost versions count, too, so an update may be treated as older than it is. In a synchronous round, return 0.
        """
        round_ = self.rounds[ticket.fragment]
        if not self.is_async(ticket.fragment):
            return 0
        steps = self.rules.policy.steps_before(len(self.view(ticket.fragment).accepted))
        return round_.head + (round_.phase == "closing") + steps - ticket.base_version

    def due(self, site: str) -> int:
        """Return the fragment that a site should synchronise first: the one with the fewest rounds that have ended.

        If the site has already submitted its update for a fragment's current round, or sits out this round, that
        fragment comes last.
        """
        answered = [
            (ticket := round_.tickets.get(site)) is not None and ticket.state in ("accepted", "sat out")
            for round_ in self.rounds
        ]
        return min(range(len(self.rounds)), key=lambda f: (answered[f], self.rounds[f].done, f))

    @property
    def next_deadline_s(self) -> float | None:
        """Time at which a `TimePassed` event is due next; None if no event is due.

        A sign of life of a worker can move this time. So read this property again when a timer fires.
        """
        times = [round_.until_s for round_ in self.rounds if round_.phase == "open" and round_.until_s is not None]
        times += [until_s for f in range(len(self.rounds)) for until_s in self.newcomers(f).values()]
        timeout_s = self.rules.heartbeat_timeout_s
        if timeout_s and self.seen_s:
            times.append(min(self.seen_s.values()) + timeout_s)
        return min(times, default=None)


@dataclass(frozen=True, slots=True)
class FragmentSnapshot:
    """The current round of one fragment, as the journal has recorded it.

    Args:
        head: newest version of the fragment.
        expected: expected sites of the open round; None if no round is open.
        frozen: if the round is closed but not committed, the ticket numbers of the updates to aggregate, in order.
        started: whether a round of the fragment was ever opened. It has a meaning only if neither `expected` nor
            `frozen` is set.
        lost: number of lost versions up to `head`. It is lower, and may be below 0, if versions were lost before a
            round that all sites sat out: their rounds have ended all the same.
        sat_out_rounds: number of rounds that ended without a version, because all sites sat out.
        sat_out_in_a_row: number of these rounds that started from `head`.
        first_ticket: earlier tickets belong to earlier rounds, also if they have the same base version.
        sitting_out: numbers of the tickets with which sites sit out the current round. In an asynchronous run, they may
            start from earlier versions.
    """

    head: int
    expected: tuple[str, ...] | None = None
    frozen: tuple[int, ...] = ()
    started: bool = False
    lost: int = 0
    sat_out_rounds: int = 0
    sat_out_in_a_row: int = 0
    first_ticket: int = 0
    sitting_out: frozenset[int] = frozenset()

    @property
    def done(self) -> int:
        """Number of rounds that have ended, with or without a version, except those with a lost version."""
        return self.head - self.lost + self.sat_out_rounds


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
        paused, stopping, proven: as in `State`.
    """

    fragments: tuple[FragmentSnapshot, ...]
    members: tuple[Member, ...] = ()
    tickets: tuple[IssuedTicket, ...] = ()
    next_ticket: int = 1
    next_lease: int = 1
    finished: bool = False
    progress: MetricProgress = field(default_factory=MetricProgress)
    paused: bool = False
    stopping: bool = False
    proven: frozenset[str] = frozenset()


StepResult = tuple[State, tuple[Effect, ...]]


class StateDraft:
    """The new state that one step of the round machine builds up, with the effects of the step.

    Attributes:
        state: the state so far. Each change replaces it; it is never changed in place.
        now_s: time of the step in seconds.
        effects: the effects so far.
        wake: whether requests that wait for a change should check the state again.
    """

    __slots__ = ("effects", "now_s", "state", "wake")

    def __init__(self, state: State, now_s: float) -> None:
        self.state = state
        self.now_s = now_s
        self.effects: list[Effect] = []
        self.wake = False

    def result(self) -> StepResult:
        """Return the new state and the effects, with `Woken` as the last one if `wake` is set."""
        return self.state, (*self.effects, *([Woken()] if self.wake else []))

    def change(self, **fields: Any) -> None:
        """Replace the given fields of the state."""
        self.state = replace(self.state, **fields)

    def round(self, fragment: int) -> CurrentRound:
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

    def put(self, ticket: IssuedTicket) -> None:
        """Put a ticket into the current round of its fragment. It replaces an earlier ticket of its site."""
        tickets = self.round(ticket.fragment).tickets
        self.change_round(ticket.fragment, tickets={**tickets, ticket.site: ticket})

    def see(self, site: str) -> None:
        """Record a sign of life of a site, with the time `now_s`."""
        self.change(seen_s={**self.state.seen_s, site: self.now_s})
