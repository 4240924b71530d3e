"""A swarm seen from its server: who holds which version, who aggregates, and what each worker is to have and to do.

The server sees no tensor. Workers report all that they have; from that, the journal and `rounds/sampling.py` follows
what each of them is told, so a server that was killed needs nothing but their next reports. What an aggregating worker
had collected is lost with it: its round is opened again, and the updates come from their outboxes once more.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from atoll.aggregation.check_arriving_parts import Overflow
from atoll.aggregation.plan import Plan
from atoll.blobs.manifest import state_id
from atoll.errors import UpdateRefused
from atoll.protocol import messages, status_messages
from atoll.protocol.swarm_messages import Closed, Collect, Held, Hold, PeerReport, PeerWork, digests_in
from atoll.protocol.values import FrozenRound
from atoll.rounds import events as ev
from atoll.rounds.sampling import appointed, to_hold, turn
from atoll.runtime import failpoint
from atoll.server.coordinator.accept_update import UpdateAdmission
from atoll.server.coordinator.aggregate_round import Committed, frozen_round, summary_of
from atoll.server.coordinator.ledger import Ledger
from atoll.server.coordinator.roster import Lease
from atoll.server.swarm.peer_reachability import Peer, Peers
from atoll.store.journal_tables import VersionRow
from atoll.store.store import Store

# -- Where the fragments of a swarm are aggregated, and what follows for each worker: what it is to have and to do.


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
    closing: FrozenRound | None = None
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

    def __init__(self, plan: Plan, store: Store, ledger: Ledger) -> None:
        self._plan, self._store, self._ledger, self._settings = plan, store, ledger, plan.settings
        self.peers = Peers(lambda: ledger.state.members)
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
            finished=self._ledger.state.finished,
            stay=self._is_needed(site) or self._is_awaited(site) or self._lacks_the_result(site),
        )
        return work.model_copy(update={"stamp": 1 + zlib.crc32(work.model_dump_json().encode())})

    def _holds(self, site: str, fragment: int) -> list[Hold]:
        """The versions of a fragment that a site is to have: the newest where it is its turn, older ones it has."""
        place, peer = self.places[fragment], self.peers[site]
        wanted = [
            self._hold(fragment, row)
            for row in self._store.versions.kept(fragment)
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
            state_digest=state_id(row.state_digests),
            sources=[each.source for each in holders],
        )

    def _candidate(self, place: Place, closed: Closed) -> Hold:
        held = self.peers[place.aggregator].held.get((closed.fragment, closed.version))
        assert closed.digest is not None
        return Hold(
            fragment=closed.fragment,
            version=closed.version,
            digest=closed.digest,
            state_digest=state_id(digests_in(closed.state_digests)),
            sources=[held.source] if held and held.digest == closed.digest else [],
        )

    def _is_needed(self, site: str) -> bool:
        """Whether others have nobody else to pull something from; at the end until all of them have the result."""
        members = self._ledger.state.members  # of whom some may not have reported since the server was started again
        others = [other for other, member in members.items() if member.alive and other != site]
        for fragment, place in enumerate(self.places):
            holding = self._holding(fragment, place.version)
            if site not in holding or not others:
                continue
            if not any(other in holding for other in others):
                return True
            if self._ledger.state.finished and not all(other in holding for other in others):
                return True
        return False

    def _is_awaited(self, site: str) -> bool:
        """Whether an update that the site offers has yet to come to another worker, who aggregates it."""
        for fragment, place in enumerate(self.places):
            over = self._ledger.state.rounds[fragment].phase == "finished"  # what an asynchronous run leaves behind
            mine = [ticket for ticket in self._wanted(fragment) if self.offers[ticket].site == site]
            if mine and not over and place.aggregator != site:
                there = self.peers[place.aggregator].collected if place.aggregator else {}
                if any(ticket not in there or there[ticket].failed for ticket in mine):
                    return True
        return False

    def _lacks_the_result(self, site: str) -> bool:
        """Whether the run is finished, and a site is still getting what came of it."""
        finished = self._ledger.state.finished
        return finished and any(
            holding and site not in holding
            for holding in (self._holding(fragment, place.version) for fragment, place in enumerate(self.places))
        )

    # -- who is where

    def _holding(self, fragment: int, version: int) -> dict[str, Held]:
        return self.peers.holding(fragment, version, self._store.run_log.version_digest(fragment, version))

    def _order(self, fragment: int, version: int) -> list[str]:
        heard = [site for site in self.peers.alive if self.peers.is_heard(site)]
        staying = [site for site in heard if not self.peers[site].leaving] or heard
        return turn(
            staying, seed=self._settings.seed, fragment=fragment, version=version, named=self._settings.aggregators
        )

    def _holders_to_be(self, fragment: int) -> set[str]:
        place = self.places[fragment]
        if self._ledger.state.rounds[fragment].phase == "gathering":
            return set()
        if self._ledger.state.finished:  # the result is for everybody
            return set(self.peers.alive)
        holders, order = self._holding(fragment, place.version), self._order(fragment, place.version)
        if not holders:  # one worker gets it from the server, the others from that one
            place.first = place.first if place.first in order else next(iter(order), "")
            return {place.first}
        return {*holders, *to_hold(order, holders.keys() & set(order))}

    def _wanted(self, fragment: int) -> list[int]:
        """Tickets whose updates are to be collected, or were."""
        tickets = self._ledger.state.rounds[fragment].tickets.values()
        return sorted(ticket.id for ticket in tickets if ticket.is_live and ticket.id in self.offers)

    def _has(self, site: str, closed: Closed) -> bool:
        held = self.peers[site].held.get((closed.fragment, closed.version))
        return (
            held is not None
            and held.digest == closed.digest
            and held.state_digest == state_id(digests_in(closed.state_digests))
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
        return len(parts) == len(layout.parts) and layout.blob_id(parts) == closed.digest

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
    def _is_of(closing: FrozenRound, closed: Closed) -> bool:
        return (closed.fragment, closed.version, closed.tickets) == (closing.fragment, closing.version, closing.tickets)

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


LOG = logging.getLogger("atoll.server")

LOOK_S = 1.0
"""Between two looks at a round that is reduced, where nothing is reported."""
PULLS = 3
"""Of one update by one worker, after which another one tries."""
SLOWER = 10
"""Times as long as in any round before, after which another worker tries, once in a round: is it the worker?"""
WARY = 10
"""Rounds in which a worker that could not aggregate one is asked after the others."""


class Swarm(Places):
    """Decides on the server's loop; nothing here waits for a disk or for a peer."""

    def __init__(
        self, plan: Plan, store: Store, ledger: Ledger, admission: UpdateAdmission, wake: Callable[[], None]
    ) -> None:
        super().__init__(plan, store, ledger)
        self._admission, self._wake = admission, wake
        self._news = asyncio.Event()
        self._longest_s: dict[int, float] = {}  # fragment → that a round before has had its aggregator busy
        self._lost_at: dict[tuple[int, str], int] = {}  # fragment and site → the version from which it could not
        self._reopened = [0] * len(self.places)  # fragment → how often its round lost who aggregated it; rises only
        self._answers, self._since_ms = 0, int(1e3 * time.time())

    # -- what workers say

    async def report(self, lease: Lease, message: PeerReport) -> PeerWork:
        """Take what a worker says, and tell it what it is to have and to do; waits until that is something else."""
        site = lease.site
        peer = self.peers.known(site, message.address, lease.process)
        peer.require_own(site, *(text for held in message.held for text in (held.source.version, held.source.state)))
        if peer.take(message, self._settings.idle_timeout_s):
            self.look()
        until_s = time.monotonic() + message.wait_s
        while True:
            work = self.work(site)
            left_s = until_s - time.monotonic()
            goes = message.leaving and not work.stay
            if work.stamp != message.seen or left_s <= 0 or goes or message.number < peer.number:
                self._answers += 1
                peer.answered(work)
                return work.model_copy(update={"server": self._since_ms, "order": self._answers})
            await self.news(left_s)

    def offer(self, site: str, ticket: int, fragment: int, said: messages.Complete) -> None:
        """A worker has formed an update, and keeps it until it counts."""
        if (peer := self.peers.get(site)) is not None:
            peer.require_own(site, said.source)
        offer = Offer(site, fragment, said)
        if self.offers.get(ticket) != offer:
            self.offers[ticket] = offer
            self.look()

    async def news(self, timeout_s: float) -> None:
        """Return when something has changed, or after the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -- what workers are told

    def waits(self, site: str, fragment: int) -> str:
        """Why a site gets no ticket yet; empty where it does."""
        if self._ledger.state.rounds[fragment].phase in ("finished", "gathering") or not self.peers.is_alive(site):
            return ""
        if strangers := self.peers.strangers_of(site):
            return f"{site} and {', '.join(strangers)} are finding out whether they reach each other"
        return "" if self.places[fragment].aggregator else self._why_nobody(fragment)

    def trouble(self, fragment: int) -> str:
        """What keeps a fragment from its next version that its round knows nothing of; empty where nothing does."""
        place, phase = self.places[fragment], self._ledger.state.rounds[fragment].phase
        if phase in ("open", "closing") and not place.aggregator and self.peers.alive:
            return f"waits: {self._why_nobody(fragment)}"
        if phase == "closing" and self._closed(place) is not None and not place.checker:
            return f"waits for a second worker: version {place.version + 1} is there, and nobody is to check it"
        if phase in ("open", "closing") and place.losses > 1:
            return f"{place.losses} workers in turn could not aggregate it; the last was {place.lost}"
        return ""

    # -- what follows

    def look(self) -> None:
        """Bring every fragment to where the reports have it."""
        state = self._ledger.state
        for fragment, round_ in enumerate(state.rounds):
            place = self.places[fragment]
            if place.version != round_.head:
                self._longest_s[fragment] = max(self._longest_s.get(fragment, 0.0), place.busy_s)
                self.places[fragment] = place = Place(round_.head, before=place.aggregator)
            if round_.phase == "finished":
                place.aggregator, place.closing = "", None
            elif round_.phase != "gathering":  # by then all are there who could be asked
                self._look_at(fragment, place)
        live = {
            ticket.id for round_ in self._ledger.state.rounds for ticket in round_.tickets.values() if ticket.is_live
        }
        self.offers = {ticket: offer for ticket, offer in self.offers.items() if ticket in live}
        if (apart := self.peers.apart()) is not None:
            self._ledger.apply(ev.WorkerLeft(*apart))
        self._tell()

    def _look_at(self, fragment: int, place: Place) -> None:
        if place.aggregator and (reason := self._why_lost(fragment, place)):
            self._lose(fragment, place, reason)
        if not place.aggregator:
            holders = self._holding(fragment, place.version)
            order = self._order(fragment, place.version)
            wary = {site for site in order if self._is_wary_of(site, fragment, place.version)}
            named = self._settings.aggregators
            chosen = appointed(order, holders, place.excluded, {place.before, *wary}, named) or ""
            place.aggregator = "" if chosen in place.excluded and self._pause_s(place) > 0 else chosen
            place.since_s = None
            if place.aggregator:
                self._wake()
        if place.aggregator:
            self._take_in(fragment, place)
            self._watch(fragment, place)

    def _take_in(self, fragment: int, place: Place) -> None:
        """Accept or refuse what the aggregating worker has collected."""
        collected = self.peers[place.aggregator].collected
        for ticket in self._wanted(fragment):
            offer, found = self.offers[ticket], collected.get(ticket)
            if found is None or found.digest != offer.said.digest:
                continue
            if found.failed:
                if found.source == offer.said.source:
                    self._could_not(fragment, place, ticket, offer, found.failed)
            elif self._store.tickets.get(ticket).state == "open":
                self._judge(ticket, offer, found.norm, found.bad)
            if self.places[fragment] is not place or not place.aggregator:  # that closed the round, or cost it
                return

    def _could_not(self, fragment: int, place: Place, ticket: int, offer: Offer, why: str) -> None:
        """An update could not be pulled: whoever still is there offers it anew; if that is no help, others try."""
        site = place.aggregator
        place.failures[ticket, site] += 1
        if place.failures[ticket, site] < PULLS or self._store.tickets.get(ticket).state != "open":
            LOG.info("%s could not pull the update of %s: %s", site, offer.site, why)
            del self.offers[ticket]
            return
        tried = {each for each, count in place.failures.items() if count >= PULLS and each[0] == ticket}
        others = set(self._holding(fragment, place.version)) & set(self._order(fragment, place.version))
        if others - {each for _, each in tried} - {offer.site}:
            self._lose(fragment, place, f"it could not pull the update of {offer.site}: {why}")
        else:
            self._judge(ticket, offer, 0.0, f"{site} could not pull it: {why}")

    def _judge(self, ticket: int, offer: Offer, norm: float, bad: str) -> None:
        try:
            if bad:
                self._admission.refuse(offer.site, ticket, bad)
            self._admission.accept(offer.site, ticket, offer.said, norm)
        except UpdateRefused:  # the journal has it; its worker is told when it asks
            del self.offers[ticket]

    def _watch(self, fragment: int, place: Place) -> None:
        """Since when the aggregating worker has had something to do."""
        collected = self.peers[place.aggregator].collected
        todo = place.closing is not None and self._closed(place) is None
        todo = todo or any(ticket not in collected for ticket in self._wanted(fragment))
        if place.since_s is not None:
            place.busy_s = max(place.busy_s, time.monotonic() - place.since_s)
        if not todo:
            place.since_s = None
        elif place.since_s is None:
            place.since_s = time.monotonic()

    def _why_lost(self, fragment: int, place: Place) -> str:
        """Why the aggregating worker can do it no more; empty where it can."""
        site = place.aggregator
        if not self.peers.is_alive(site):
            return "it has gone"
        peer, others = self.peers[site], set(self._holding(fragment, place.version)) - {site}
        if peer.leaving and others:
            return "it leaves"
        if place.closing is not None and (failed := self._why_not_closed(place)):
            return failed
        if (fragment, place.version) not in peer.held:
            return f"it has not got version {place.version} any more"
        tickets = self._ledger.state.rounds[fragment].tickets.values()
        accepted = [ticket for ticket in tickets if ticket.state == "accepted"]
        if gone := next((ticket.site for ticket in accepted if self._is_nowhere(peer, ticket.id)), ""):
            return f"the update of {gone} is nowhere any more"
        at_work = place.since_s is not None or place.closing is not None
        if at_work and not self.peers.is_heard(site) and any(map(self.peers.is_heard, others)):
            return "it does not report any more"
        still_s = time.monotonic() - max(peer.bytes_s, place.since_s or time.monotonic())
        if place.since_s is not None and still_s > self._settings.idle_timeout_s and others:
            return f"it has moved no byte for {still_s:.0f} s"
        longest_s = self._longest_s.get(fragment, 0.0)
        patience_s = max(SLOWER * longest_s, self._settings.idle_timeout_s)
        if others and longest_s and not place.excluded and place.busy_s > patience_s:
            return f"it has been at it for {place.busy_s:.1f} s, and no round before took longer than {longest_s:.1f} s"
        return ""

    def _is_wary_of(self, site: str, fragment: int, version: int) -> bool:
        lost_at = self._lost_at.get((fragment, site))
        return lost_at is not None and version - lost_at <= WARY

    def _is_nowhere(self, peer: Peer, ticket: int) -> bool:
        found = peer.collected.get(ticket)
        return (found is None or bool(found.failed)) and ticket not in self.offers

    def _lose(self, fragment: int, place: Place, reason: str) -> None:
        LOG.warning(
            "%s no longer aggregates round %d: %s; another worker does, and collects the updates again",
            place.aggregator,
            self._ledger.state.rounds[fragment].number,
            reason,
        )
        place.lost = f"{place.aggregator}: {reason}"
        place.excluded.pop(place.aggregator, None)  # behind those that have failed longer ago
        place.excluded[place.aggregator] = None
        self._lost_at[fragment, place.aggregator] = place.version
        place.aggregator, place.closing, place.checker, place.since_s, place.busy_s = "", None, "", None, 0.0
        place.unable.clear()
        place.losses += 1
        place.lost_s = time.monotonic()
        self._reopened[fragment] += 1
        self._ledger.apply(ev.AggregatorLost(fragment, reason))
        self._tell()

    def _pause_s(self, place: Place) -> float:
        """How long nobody is asked where all have failed: longer each time, up to the idle timeout."""
        times = min(place.losses - len(place.excluded), 16)  # a power of any size is no number
        pause_s = min(2.0 ** max(0, times), self._settings.idle_timeout_s)
        return place.lost_s + pause_s - time.monotonic()

    def _why_nobody(self, fragment: int) -> str:
        place = self.places[fragment]
        if place.losses and self._holding(fragment, place.version):
            return f"no worker could aggregate it, and they are asked again in turn; the last was {place.lost}"
        if place.version < 1:  # -1 before anybody has looked
            return "the first worker pulls the initial model"
        summary = json.loads(self._store.versions.get(fragment, place.version).summary_json or "{}")
        had = [summary[who] for who in ("aggregator", "checker") if summary.get(who)]
        away = [site for site in (*had, *self._ledger.state.members) if not self.peers.is_alive(site)]
        looking = [site for site in had if self.peers.is_alive(site) and self.peers[site].number < 0]
        told = f"no worker that is here has version {place.version}"
        if looking:
            return f"{told} yet: {' and '.join(looking)} still look through their files"
        if away:  # others may have come to hold it, too
            return f"{told}; start {' or '.join(dict.fromkeys(away))} again, with its folder"
        lost = f"{' and '.join(had)} have lost it"
        return f"{told}, and {lost}: export a version before it, and begin a new run from that"

    # -- closing a round

    async def close(self, fragment: int, base_version: int, tickets: Sequence[int], number: int) -> Committed | None:
        """Have a frozen round reduced by its worker and checked by another, then move the head.

        Returns:
            The version and the summary of its round; None if the worker was lost, and the round is open again.

        Raises:
            Overflow: of every worker that could reduce the round, the result overflows.
            DiskFull: the journal could not be written; the same call may be made again.
        """
        losses = self._reopened[fragment]  # not the place's: that of the round before may still be there

        def is_frozen() -> bool:  # the same tickets may be frozen once more, with other updates
            as_then = self._ledger.state.rounds[fragment].frozen == tuple(tickets)
            return as_then and self._reopened[fragment] == losses

        if not is_frozen():  # that came before this was begun
            return None
        frozen = frozen_round(self._plan, self._store, fragment, base_version, tickets, number)
        self.look()
        while is_frozen():
            place = self.places[fragment]
            if place.closing != frozen:
                place.closing = frozen
                failpoint("swarm.asked")
                self._tell()
            closed = self._closed(place)
            if closed is not None:
                self._choose_checker(fragment, place)
                if place.checker and self._has(place.checker, closed):
                    return self._commit(frozen, place, closed)
            await self.news(LOOK_S)
        place = self.places[fragment]
        if place.overflowed and place.overflowed.issuperset(self._holding(fragment, base_version)):
            raise Overflow(place.lost)  # every worker that could reduce the round has found the same
        return None

    def _choose_checker(self, fragment: int, place: Place) -> None:
        """Have somebody check the version that is made; somebody else, where no byte comes to who was chosen."""
        order = [site for site in self._order(fragment, place.version + 1) if site != place.aggregator]
        if place.checker in order and len(order) > 1:
            still_s = time.monotonic() - max(place.checks_s, self.peers[place.checker].bytes_s)
            if still_s > self._settings.idle_timeout_s:
                LOG.warning("%s does not come to have version %d; another checks it", place.checker, place.version + 1)
                place.unable.add(place.checker)
        able = [site for site in order if site not in place.unable]
        if order and not able:
            self._lose(fragment, place, f"nobody could pull version {place.version + 1} from it")
        elif place.checker not in able and (place.checker or able):
            place.checker, place.checks_s = next(iter(able), ""), time.monotonic()
            self._tell()

    def _commit(self, frozen: FrozenRound, place: Place, closed: Closed) -> Committed:
        grad_norm = math.inf if closed.grad_norm is None else closed.grad_norm
        summary = summary_of(frozen, closed.seconds, grad_norm)
        summary = summary.model_copy(update={"aggregator": place.aggregator, "checker": place.checker})
        draft = self._store.versions.begin(closed.fragment, closed.version)
        try:
            assert closed.digest is not None
            row = self._store.versions.commit(
                draft,
                digest=closed.digest,
                part_digests=digests_in(closed.part_digests),
                state_digests=digests_in(closed.state_digests),
                summary_json=summary.model_dump_json(),
                tickets=frozen.tickets,
            )
        except BaseException:
            draft.abandon()
            raise
        return row, summary
