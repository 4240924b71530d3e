"""Where the fragments of a swarm are aggregated, and what follows for each worker: what it is to have and to do."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from atoll.aggregation.plan import Plan
from atoll.aggregation.version_digests import digest_of, digests_in
from atoll.protocol import messages, status_messages
from atoll.protocol.swarm_messages import Close, Closed, Collect, Held, Hold, PeerWork
from atoll.rounds import events as ev
from atoll.rounds import events as fx
from atoll.rounds.sampling import to_hold, turn
from atoll.rounds.state import State
from atoll.server.coordinator.accept_update import Judge
from atoll.server.swarm.peer_reachability import Peers
from atoll.store.rows import VersionRow
from atoll.store.store import Store


class Floor(Protocol):
    """The run, as far as a swarm needs it."""

    @property
    def state(self) -> State: ...

    def apply(self, event: ev.Event) -> tuple[fx.Effect, ...]: ...

    def wake(self) -> None: ...

    @property
    def judge(self) -> Judge: ...


@dataclass
class Place:
    """Where a fragment is aggregated.

    Attributes:
        version: that the open round starts from.
        aggregator: who does it; empty where nobody can.
        before: who did it in the round before.
        excluded: who has failed at it in this round, who has failed longest ago first.
        losses: how often that was.
        lost_s: when that was the last time.
        lost: who it was the last time, and why.
        failures: (ticket, who) → how often that worker could not pull its update.
        since_s: since when the aggregator has had something to do without a pause.
        busy_s: the longest that it has had without one.
        closing: the frozen round that it is to reduce.
        checker: who is to check what came of it; aggregates the next round, where the user has not named others.
        checks_s: since when.
        unable: who could not.
        overflowed: the sites whose result of this round overflows.
        first: who pulls the initial model from the server.
    """

    version: int = -1
    aggregator: str = ""
    before: str = ""
    excluded: dict[str, None] = field(default_factory=dict)
    losses: int = 0
    lost_s: float = 0.0
    lost: str = ""
    failures: Counter[tuple[int, str]] = field(default_factory=Counter)
    since_s: float | None = None
    busy_s: float = 0.0
    closing: Close | None = None
    checker: str = ""
    checks_s: float = 0.0
    unable: set[str] = field(default_factory=set)
    overflowed: set[str] = field(default_factory=set)
    first: str = ""


@dataclass(frozen=True)
class Offer:
    """An update that a worker has formed, and says is complete."""

    site: str
    fragment: int
    said: messages.Complete


class Places:
    """Part of `Swarm`: what is known, and what is told."""

    def __init__(self, plan: Plan, store: Store, floor: Floor) -> None:
        self._plan, self._store, self._floor, self._settings = plan, store, floor, plan.settings
        self.peers = Peers(lambda: floor.state.members)
        self.places = [Place() for _ in plan.fragments]
        self.offers: dict[int, Offer] = {}

    def sources(self, fragment: int, version: int, digest: str) -> list[str]:
        """References to a version at the workers who have it."""
        return [held.source.version for held in self.peers.holding(fragment, version, digest).values()]

    def work(self, site: str) -> PeerWork:
        """All that a worker is to have and to do."""
        work = PeerWork(
            stamp=0,
            probe=self.peers.to_probe(site),
            hold=[hold for fragment in range(len(self.places)) for hold in self._holds(site, fragment)],
            collect=[
                Collect(ticket=ticket, fragment=fragment, site=offer.site, digest=offer.said.digest, source=source)
                for fragment, place in enumerate(self.places)
                if place.aggregator == site
                for ticket in self._wanted(fragment)
                if (offer := self.offers[ticket]) and (source := offer.said.source)
            ],
            close=[place.closing for place in self.places if place.closing and place.aggregator == site],
            finished=self._floor.state.finished,
            stay=self._is_needed(site) or self._is_awaited(site) or self._lacks_the_result(site),
        )
        return work.model_copy(update={"stamp": 1 + zlib.crc32(work.model_dump_json().encode())})

    def _holds(self, site: str, fragment: int) -> list[Hold]:
        """The versions of a fragment that a site is to have: the newest where it is its turn, older ones it has."""
        place, peer = self.places[fragment], self.peers[site]
        wanted = [
            self._hold(fragment, row)
            for row in self._store.versions(fragment)
            if (fragment, row.version) in peer.held
            or (row.version == place.version and site in self._holders_to_be(fragment))
        ]
        if (closed := self._closed(place)) is not None and site in (place.aggregator, place.checker):
            wanted.append(self._candidate(place, closed))
        return wanted

    def _hold(self, fragment: int, row: VersionRow) -> Hold:
        holders = self._holding(fragment, row.version).values()
        return Hold(
            fragment=fragment,
            version=row.version,
            digest=row.digest,
            state_digest=digest_of(row.state_digests),
            sources=[each.source for each in holders],
        )

    def _candidate(self, place: Place, closed: Closed) -> Hold:
        held = self.peers[place.aggregator].held.get((closed.fragment, closed.version))
        assert closed.digest is not None
        return Hold(
            fragment=closed.fragment,
            version=closed.version,
            digest=closed.digest,
            state_digest=digest_of(digests_in(closed.state_digests)),
            sources=[held.source] if held and held.digest == closed.digest else [],
        )

    def _is_needed(self, site: str) -> bool:
        """Whether others have nobody else to pull something from; at the end until all of them have the result."""
        members = self._floor.state.members  # of whom some may not have reported since the server was started again
        others = [other for other, member in members.items() if member.alive and other != site]
        for fragment, place in enumerate(self.places):
            holding = self._holding(fragment, place.version)
            if site not in holding or not others:
                continue
            if not any(other in holding for other in others):
                return True
            if self._floor.state.finished and not all(other in holding for other in others):
                return True
        return False

    def _is_awaited(self, site: str) -> bool:
        """Whether an update that the site offers has yet to come to another worker, who aggregates it."""
        for fragment, place in enumerate(self.places):
            over = self._floor.state.rounds[fragment].phase == "finished"  # what an asynchronous run leaves behind
            mine = [ticket for ticket in self._wanted(fragment) if self.offers[ticket].site == site]
            if mine and not over and place.aggregator != site:
                there = self.peers[place.aggregator].collected if place.aggregator else {}
                if any(ticket not in there or there[ticket].failed for ticket in mine):
                    return True
        return False

    def _lacks_the_result(self, site: str) -> bool:
        """Whether the run is finished, and a site is still getting what came of it."""
        finished = self._floor.state.finished
        return finished and any(
            holding and site not in holding
            for holding in (self._holding(fragment, place.version) for fragment, place in enumerate(self.places))
        )

    # -- who is where

    def _holding(self, fragment: int, version: int) -> dict[str, Held]:
        return self.peers.holding(fragment, version, self._store.version_digest(fragment, version))

    def _order(self, fragment: int, version: int) -> list[str]:
        heard = [site for site in self.peers.alive if self.peers.is_heard(site)]
        staying = [site for site in heard if not self.peers[site].leaving] or heard
        return turn(
            staying, seed=self._settings.seed, fragment=fragment, version=version, named=self._settings.aggregators
        )

    def _holders_to_be(self, fragment: int) -> set[str]:
        place = self.places[fragment]
        if self._floor.state.rounds[fragment].phase == "gathering":
            return set()
        if self._floor.state.finished:  # the result is for everybody
            return set(self.peers.alive)
        holders, order = self._holding(fragment, place.version), self._order(fragment, place.version)
        if not holders:  # one worker gets it from the server, the others from that one
            place.first = place.first if place.first in order else next(iter(order), "")
            return {place.first}
        return {*holders, *to_hold(order, holders.keys() & set(order))}

    def _wanted(self, fragment: int) -> list[int]:
        """Tickets whose updates are to be collected, or were."""
        tickets = self._floor.state.rounds[fragment].tickets.values()
        return sorted(ticket.id for ticket in tickets if ticket.is_live and ticket.id in self.offers)

    def _has(self, site: str, closed: Closed) -> bool:
        held = self.peers[site].held.get((closed.fragment, closed.version))
        return (
            held is not None
            and held.digest == closed.digest
            and held.state_digest == digest_of(digests_in(closed.state_digests))
        )

    def _closed(self, place: Place) -> Closed | None:
        """What the aggregating worker says came of the round; None where it is not done."""
        if place.closing is None or not self.peers.is_alive(place.aggregator):
            return None
        found = self.peers[place.aggregator].closed
        return next((each for each in found if self._is_of(place.closing, each) and self._is_sound(each)), None)

    def _is_sound(self, closed: Closed) -> bool:
        """Whether what is said makes up a version: it goes into the journal, and workers pull by it."""
        layout = self._plan.fragments[closed.fragment].version
        try:
            parts, _ = digests_in(closed.part_digests), digests_in(closed.state_digests)
        except ValueError:
            return False
        return len(parts) == len(layout.parts) and layout.update_digest(parts) == closed.digest

    def _why_not_closed(self, place: Place) -> str:
        """What the aggregating worker says why it could not reduce the round, or what is wrong with what it made."""
        assert place.closing is not None
        for closed in self.peers[place.aggregator].closed:
            if self._is_of(place.closing, closed) and not self._is_sound(closed):
                if closed.overflows:
                    place.overflowed.add(place.aggregator)
                return closed.failed or "its digests make up no version"
        return ""

    @staticmethod
    def _is_of(closing: Close, closed: Closed) -> bool:
        return (closed.fragment, closed.version, closed.tickets) == (
            closing.fragment,
            closing.version,
            [share.ticket for share in closing.updates],
        )

    # -- to be shown

    def status(self, fragment: int) -> status_messages.PlaceStatus:
        """Where a fragment is aggregated, and who has its newest version."""
        place = self.places[fragment]
        return status_messages.PlaceStatus(
            aggregator=place.aggregator,
            checker=place.checker,
            holders=sorted(self._holding(fragment, place.version)),
            collected=self._collected(fragment, place),
        )

    def _collected(self, fragment: int, place: Place) -> list[str]:
        if not place.aggregator:
            return []
        there = self.peers[place.aggregator].collected
        return [self.offers[ticket].site for ticket in self._wanted(fragment) if ticket in there]
