"""What has to hold in every schedule, judged from outside: from what workers made and what the journal was told.

`Checks` keeps its own account and shares no code with the machine; a planted bug is found when the two disagree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from atoll.rounds import events
from harness.sim_journal import SimJournal


class Violation(AssertionError):
    """An invariant does not hold; the message says which one, when, and with what."""


@dataclass(frozen=True)
class MadeUpdate:
    """An update as its worker made it. `value` None: one that has to be refused."""

    site: str
    value: Fraction | None
    weight: int


@dataclass
class Checks:
    """The invariants of one simulated run.

    Args:
        floor: the fewest updates of any version.
        deadline_s: None for a barrier, which never closes without a site that it awaits.
        timeout_s: silence that makes a worker dead.
        async_after: number of synchronous rounds, before the run is asynchronous; None: a synchronous run.
        max_staleness: versions between an update's base and what it is applied to; None: no limit.
    """

    floor: int
    deadline_s: float | None
    timeout_s: float
    fragments: int
    async_after: int | None = None
    max_staleness: int | None = None
    now_s: float = 0.0
    up_since_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    made: dict[int, MadeUpdate] = field(default_factory=dict)
    acknowledged: set[int] = field(default_factory=set)
    reopened: set[int] = field(default_factory=set)
    versions: list[list[tuple[int, ...]]] = field(init=False)
    model: list[Fraction] = field(init=False)
    paused: bool = False
    stopping: bool = False
    _lease: dict[str, int] = field(default_factory=dict)
    _heard_s: dict[str, float] = field(default_factory=dict)
    _awaited: dict[int, set[str]] = field(default_factory=dict)
    _opened_s: dict[int, float] = field(default_factory=dict)
    _closed: set[tuple[int, int]] = field(default_factory=set)
    _base: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.versions = [[] for _ in range(self.fragments)]
        self.model = [Fraction(0)] * self.fragments

    def require(self, holds: bool, message: str) -> None:
        if not holds:
            raise Violation(f"at {self.now_s:g} s: {message}")

    def heard(self, site: str, lease: int) -> None:
        """The server got a message of `site`; it is a sign of life where the lease is the newest."""
        if self._lease.get(site) == lease:
            self._heard_s[site] = self.now_s

    def journalled(self, effect: events.Effect) -> None:
        """`effect` is in the journal from now on."""
        self.counts[type(effect).__name__] += 1
        match effect:
            case events.LeaseGranted(site, lease):
                self.require(lease > max(self._lease.values(), default=0), f"lease {lease} was given before")
                self._lease[site] = lease
                self._heard_s[site] = self.now_s
            case events.LeaseEnded(site, _, why):
                silent_s = self.now_s - max(self._heard_s[site], self.up_since_s)
                alive = why == "dead" and silent_s < self.timeout_s
                self.require(not alive, f"{site} was declared dead, but was heard of {silent_s:g} s ago")
                self._lease.pop(site)
                for awaited in self._awaited.values():
                    awaited.discard(site)
            case events.RoundOpened(fragment, base, expected):
                self.require(base == len(self.versions[fragment]), f"a round opened from version {base}")
                self.require(not self.paused and not self.stopping, "a round opened in a run that is paused or stopped")
                self._awaited[fragment] = set(expected)
                self._opened_s[fragment] = self.now_s
            case events.RoundReopened(fragment, base, tickets):  # its workers still have what they sent
                self.acknowledged -= set(tickets)
                self.reopened |= set(tickets)
                self._closed.discard((fragment, base))
            case events.ExpectedChanged(fragment, _, expected):
                self._awaited[fragment] |= {site for site in expected if site in self._lease}
            case events.ControlsChanged(paused, stopping):
                self.paused, self.stopping = paused, stopping
            case events.TicketIssued(_, ticket, _, base, new=True):
                self.require(not self.paused, f"ticket {ticket} was issued while the run was paused")
                self._base[ticket] = base
            case events.RoundClosed(fragment, base, tickets):
                self._closes(fragment, base, tickets)

    def _closes(self, fragment: int, base: int, tickets: tuple[int, ...]) -> None:
        sites = [self.made[ticket].site for ticket in tickets]
        self.require((fragment, base) not in self._closed, f"the round from version {base} closed twice")
        self._closed.add((fragment, base))
        self.require(len(sites) >= self.floor, f"a round closed with {len(sites)} of {self.floor} updates")
        self.require(len(set(sites)) == len(sites), f"a worker counts twice: {sites}")
        self.require(sites == sorted(sites), f"updates are frozen out of order: {sites}")
        if self.async_after is not None and base >= self.async_after:
            behind = max(base - self._base[ticket] for ticket in tickets)
            self.counts["stale"] += behind > 0
            limit = behind if self.max_staleness is None else self.max_staleness
            self.require(behind <= limit, f"an update {behind} versions behind counts; the limit is {limit}")
            return
        stale = [ticket for ticket in tickets if self._base[ticket] != base]
        self.require(not stale, f"the tickets {stale} are of another version than {base}")
        since_s = max(self._opened_s[fragment], self.up_since_s)
        if self.deadline_s is None or self.now_s < since_s + self.deadline_s:
            left_out = self._awaited[fragment] - set(sites)
            self.require(not left_out, f"the round from version {base} closed without awaited {left_out}")

    def accepts(self, ticket: int, site: str, lease: int) -> None:
        """The journal is about to hold the update of `ticket`, sent under `lease`."""
        self.require(self._lease.get(site) == lease, f"ticket {ticket} of {site} accepted under stale lease {lease}")
        self.counts["accepted"] += 1

    def refuses(self, site: str, fragment: int) -> None:
        self._awaited[fragment].discard(site)
        self.counts["refused"] += 1

    def ends(self, site: str) -> None:
        """It has said that it submits nothing more."""
        for awaited in self._awaited.values():
            awaited.discard(site)

    def trains(self, ticket: int) -> None:
        self.require(ticket not in self.acknowledged, f"ticket {ticket} is trained again after its acknowledgement")

    def commits(self, fragment: int, version: int, tickets: tuple[int, ...], value: Fraction) -> None:
        """The head has moved to `version`, whose one parameter is `value`."""
        self.require(version == len(self.versions[fragment]) + 1, f"version {version} is not the next")
        updates = [self.made[ticket] for ticket in tickets]
        total = sum(update.weight for update in updates)
        self.model[fragment] += sum((Fraction(u.weight, total) * (u.value or 0) for u in updates), Fraction(0))
        self.require(
            all(update.value is not None for update in updates), f"version {version} has a refused update in it"
        )
        self.require(
            value == self.model[fragment],
            f"version {version} is {value}, not {self.model[fragment]}, the mean of its updates",
        )
        self.versions[fragment].append(tickets)

    def nothing_lost(self, journal: SimJournal) -> None:
        """Every acknowledged update is in exactly one version, or accepted in the round that is open now."""
        times = Counter(ticket for versions in self.versions for tickets in versions for ticket in tickets)
        for ticket in sorted(self.acknowledged):
            row = journal.tickets[ticket]
            head = journal.fragments[row.fragment].head
            waits = row.base_version == head or (self.async_after is not None and head >= self.async_after)
            current = row.state == "accepted" and waits
            kept = (times[ticket], current) in ((1, False), (0, True))
            self.require(
                kept,
                f"acknowledged ticket {ticket} from version {row.base_version} is {row.state} and in "
                f"{times[ticket]} versions; the head is {head}",
            )
