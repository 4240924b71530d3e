"""A swarm as its server sees it: which worker holds, aggregates and checks what, and what each is told to do.

The server sees no tensor. What each worker is told follows from the reports of all workers, the journal and
`rounds/sampling`, so a server that was killed needs their next reports and nothing else. What an aggregating worker had
collected is lost with it: its round is opened again, and the updates come from their outboxes once more.
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
from atoll.protocol.swarm_messages import Collect, Held, Hold, PeerReport, PeerWork, ReducedRound, digests_in
from atoll.protocol.values import FrozenRound
from atoll.rounds import events
from atoll.rounds.sampling import appointed, to_hold, turn
from atoll.runtime import failpoint
from atoll.server.coordinator.accept_update import UpdateAdmission
from atoll.server.coordinator.aggregate_round import Committed, frozen_round, summary_of
from atoll.server.coordinator.ledger import Ledger
from atoll.server.coordinator.roster import Lease
from atoll.server.swarm.peer_reachability import Peers
from atoll.store.store import Store
from atoll.store.versions import VersionDigests

LOG = logging.getLogger("atoll.server")

LOOK_S = 1.0
"""Between two looks at a round that is reduced, while no report comes."""
PULLS = 3
"""Attempts of one worker to pull one update, after which another worker tries."""
SLOWER = 10
"""How many times longer than any round before an aggregator may take, once in a round, before another one tries."""
WARY = 10
"""Rounds in which a worker that could not aggregate one is asked after the others."""


@dataclass
class Assignment:
    """Where the open round of a fragment is aggregated.

    Attributes:
        version: that the round starts from.
        aggregator: the worker that aggregates; empty if none can.
        before: the aggregator of the round before.
        excluded: workers that failed to aggregate this round, oldest failure first.
        losses: how often an aggregator was lost in this round.
        lost_s: when the last one was lost.
        lost: the last one, and why.
        failures: (ticket, worker) → how often that worker could not pull the update.
        since_s: since when the aggregator has had work without a pause.
        busy_s: the longest time that it has had work without a pause.
        closing: the frozen round that it is to reduce.
        checker: the worker that checks the new version; it aggregates the next round, unless the user named others.
        checks_s: since when.
        unable: workers that could not check it.
        overflowed: workers with a result of this round that overflows.
        first: the worker that pulls the initial model from the server.
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

    def lose(self, reason: str) -> None:
        """Exclude the aggregator, and forget what it was doing."""
        self.lost = f"{self.aggregator}: {reason}"
        self.excluded.pop(self.aggregator, None)  # it goes behind those that failed longer ago
        self.excluded[self.aggregator] = None
        self.aggregator, self.closing, self.checker, self.since_s, self.busy_s = "", None, "", None, 0.0
        self.unable.clear()
        self.losses += 1
        self.lost_s = time.monotonic()

    def pause_s(self, most_s: float) -> float:
        """Seconds to wait before workers that have all failed are asked again; longer each time, up to `most_s`."""
        times = min(self.losses - len(self.excluded), 16)  # a larger power overflows
        return self.lost_s + min(2.0 ** max(0, times), most_s) - time.monotonic()


@dataclass(frozen=True)
class Offer:
    """An update that a worker has formed, and keeps until it counts."""

    site: str
    fragment: int
    said: messages.Complete


class SwarmView:
    """What the server knows of a swarm, and what follows for each worker."""

    def __init__(self, plan: Plan, store: Store, ledger: Ledger) -> None:
        self._plan, self._store, self._ledger, self._settings = plan, store, ledger, plan.settings
        self.peers = Peers(lambda: ledger.state.members)
        self.assignments = [Assignment() for _ in plan.fragments]
        self.offers: dict[int, Offer] = {}

    def sources(self, fragment: int, version: int, digest: str) -> list[str]:
        """Return references to a version at the workers that have it."""
        return [held.source.version for held in self.peers.holding(fragment, version, digest).values()]

    def work(self, site: str) -> PeerWork:
        """Return all that a worker is to have and to do."""
        work = PeerWork(
            stamp=0,
            probe=self.peers.to_probe(site),
            hold=[hold for fragment in range(len(self.assignments)) for hold in self._holds(site, fragment)],
            collect=[
                Collect(ticket=ticket, fragment=fragment, site=offer.site, digest=offer.said.digest, source=source)
                for fragment, at in enumerate(self.assignments)
                if at.aggregator == site
                for ticket in self.wanted(fragment)
                if (offer := self.offers[ticket]) and (source := offer.said.source)
            ],
            close=[at.closing for at in self.assignments if at.closing and at.aggregator == site],
            finished=self._ledger.state.finished,
            stay=self._is_needed(site) or self._is_awaited(site),
        )
        return work.model_copy(update={"stamp": 1 + zlib.crc32(work.model_dump_json().encode())})

    def _holds(self, site: str, fragment: int) -> list[Hold]:
        """Return the versions of a fragment that a site is to have.

        These are the newest if it is to hold it, older ones that it has, and the next one if it aggregates or checks.
        """
        at, peer = self.assignments[fragment], self.peers[site]
        wanted = [
            Hold(
                fragment=fragment,
                version=row.version,
                digest=row.digest,
                state_digest=state_id(row.state_digests),
                sources=[each.source for each in self.holding(fragment, row.version).values()],
            )
            for row in self._store.versions.kept(fragment)
            if (fragment, row.version) in peer.held
            or (row.version == at.version and site in self._holders_to_be(fragment))
        ]
        if (closed := self.closed(at)) is not None and site in (at.aggregator, at.checker):
            held = self.peers[at.aggregator].held.get((closed.fragment, closed.version))
            assert closed.digest is not None
            candidate = Hold(
                fragment=closed.fragment,
                version=closed.version,
                digest=closed.digest,
                state_digest=state_id(digests_in(closed.state_digests)),
                sources=[held.source] if held and held.digest == closed.digest else [],
            )
            wanted.append(candidate)
        return wanted

    def _is_needed(self, site: str) -> bool:
        """Whether the others can pull something from this site alone; at the end until it and all others have it."""
        members = self._ledger.state.members  # some may not have reported since the server was started again
        others = [other for other, member in members.items() if member.alive and other != site]
        for fragment, at in enumerate(self.assignments):
            holding, finished = self.holding(fragment, at.version), self._ledger.state.finished
            if finished and holding and site not in holding:
                return True  # it does not have all of the result yet
            if site in holding and others:
                if not any(other in holding for other in others):
                    return True
                if finished and not all(other in holding for other in others):
                    return True
        return False

    def _is_awaited(self, site: str) -> bool:
        """Whether an update that the site offers has not come yet to the worker that aggregates it."""
        for fragment, at in enumerate(self.assignments):
            over = self._ledger.state.rounds[fragment].phase == "finished"  # what an asynchronous run leaves behind
            mine = [ticket for ticket in self.wanted(fragment) if self.offers[ticket].site == site]
            if mine and not over and at.aggregator != site:
                there = self.peers[at.aggregator].collected if at.aggregator else {}
                if any(ticket not in there or there[ticket].failed for ticket in mine):
                    return True
        return False

    # -- which worker has what

    def holding(self, fragment: int, version: int) -> dict[str, Held]:
        """Return the workers that have a version of the run."""
        return self.peers.holding(fragment, version, self._store.run_log.version_digest(fragment, version))

    def order(self, fragment: int, version: int) -> list[str]:
        """Return the workers in the order in which they are asked to aggregate."""
        heard = [site for site in self.peers.alive if self.peers.is_heard(site)]
        staying = [site for site in heard if not self.peers[site].leaving] or heard
        return turn(
            staying,
            seed=self._settings.run.seed,
            fragment=fragment,
            version=version,
            named=self._settings.swarm.aggregators,
        )

    def _holders_to_be(self, fragment: int) -> set[str]:
        at = self.assignments[fragment]
        if self._ledger.state.rounds[fragment].phase == "gathering":
            return set()
        if self._ledger.state.finished:  # every worker gets the result
            return set(self.peers.alive)
        holders, order = self.holding(fragment, at.version), self.order(fragment, at.version)
        if not holders:  # one worker gets it from the server, the others from that one
            at.first = at.first if at.first in order else next(iter(order), "")
            return {at.first}
        return {*holders, *to_hold(order, holders.keys() & set(order))}

    def wanted(self, fragment: int) -> list[int]:
        """Return the tickets of updates that are to be collected, or were."""
        tickets = self._ledger.state.rounds[fragment].tickets.values()
        return sorted(ticket.id for ticket in tickets if ticket.is_live and ticket.id in self.offers)

    def has(self, site: str, closed: ReducedRound) -> bool:
        """Whether a worker has a new version, with its outer state."""
        held = self.peers[site].held.get((closed.fragment, closed.version))
        return (
            held is not None
            and held.digest == closed.digest
            and held.state_digest == state_id(digests_in(closed.state_digests))
        )

    # -- what the aggregating worker says of its round

    def closed(self, at: Assignment) -> ReducedRound | None:
        """Return the new version as the aggregator reports it; None if it is not done."""
        return next((each for each in self._reported(at) if self._is_sound(each)), None)

    def why_not_closed(self, at: Assignment) -> str:
        """Return why the aggregator could not reduce the round, or what is wrong with its result."""
        for closed in self._reported(at):
            if not self._is_sound(closed):
                if closed.overflows:
                    at.overflowed.add(at.aggregator)
                return closed.failed or "its digests make up no version"
        return ""

    def _reported(self, at: Assignment) -> list[ReducedRound]:
        """Return what the aggregator says of this very round."""
        closing = at.closing
        if closing is None or not self.peers.is_alive(at.aggregator):
            return []
        key = (closing.fragment, closing.version, closing.tickets)
        return [each for each in self.peers[at.aggregator].closed if (each.fragment, each.version, each.tickets) == key]

    def _is_sound(self, closed: ReducedRound) -> bool:
        """Whether the digests make up a version: they go into the journal, and workers pull by them."""
        layout = self._plan.fragments[closed.fragment].version
        try:
            parts, _ = digests_in(closed.part_digests), digests_in(closed.state_digests)
        except ValueError:
            return False
        return len(parts) == len(layout.parts) and layout.blob_id(parts) == closed.digest


class Swarm:
    """Decides which worker does what; on the server's loop, without waiting for a disk or for a peer.

    Args:
        admission: accepts and refuses updates.
        wake: wakes the workers that wait for a ticket.
    """

    def __init__(
        self, plan: Plan, store: Store, ledger: Ledger, admission: UpdateAdmission, wake: Callable[[], None]
    ) -> None:
        self._plan, self._store, self._ledger, self._settings = plan, store, ledger, plan.settings
        self._admission, self._wake = admission, wake
        self.view = SwarmView(plan, store, ledger)
        self._news = asyncio.Event()
        self._longest_s: dict[int, float] = {}  # fragment → the longest busy_s of an earlier round
        self._lost_at: dict[tuple[int, str], int] = {}  # (fragment, site) → the version from which it could not
        self._reopened = [0] * len(self.view.assignments)  # fragment → lost aggregators of all rounds
        self._answers, self._since_ms = 0, int(1e3 * time.time())

    # -- what workers report

    async def report(self, lease: Lease, message: PeerReport) -> PeerWork:
        """Take the report of a worker. Return what it is to have and to do, once that differs from what it knows."""
        site, view = lease.site, self.view
        peer = view.peers.known(site, message.address, lease.process)
        peer.require_own(site, *(text for held in message.held for text in (held.source.version, held.source.state)))
        if peer.take(message, self._settings.network.idle_timeout_s):
            self.look()
        until_s = time.monotonic() + message.wait_s
        while True:
            work = view.work(site)
            left_s = until_s - time.monotonic()
            goes = message.leaving and not work.stay
            if work.stamp != message.seen or left_s <= 0 or goes or message.number < peer.number:
                self._answers += 1
                peer.answered(work)
                return work.model_copy(update={"server": self._since_ms, "order": self._answers})
            await self.news(left_s)

    def offer(self, site: str, ticket: int, fragment: int, said: messages.Complete) -> None:
        """Take the offer of an update that a worker keeps until it counts."""
        if (peer := self.view.peers.get(site)) is not None:
            peer.require_own(site, said.source)
        offer = Offer(site, fragment, said)
        if self.view.offers.get(ticket) != offer:
            self.view.offers[ticket] = offer
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

    # -- what is shown, and what keeps a round waiting

    def waits(self, site: str, fragment: int) -> str:
        """Return why a site gets no ticket yet; empty if it does."""
        peers = self.view.peers
        if self._ledger.state.rounds[fragment].phase in ("finished", "gathering") or not peers.is_alive(site):
            return ""
        if strangers := peers.strangers_of(site):
            return f"{site} and {', '.join(strangers)} are finding out whether they reach each other"
        return "" if self.view.assignments[fragment].aggregator else self._why_no_aggregator(fragment)

    def trouble(self, fragment: int) -> str:
        """Return what keeps a fragment from its next version, beyond what its round says; empty if nothing does."""
        at, phase = self.view.assignments[fragment], self._ledger.state.rounds[fragment].phase
        if phase in ("open", "closing") and not at.aggregator and self.view.peers.alive:
            return f"waits: {self._why_no_aggregator(fragment)}"
        if phase == "closing" and self.view.closed(at) is not None and not at.checker:
            return f"waits for a second worker: version {at.version + 1} is there, and no other worker can check it"
        if phase in ("open", "closing") and at.losses > 1:
            return f"{at.losses} workers in turn could not aggregate it; the last was {at.lost}"
        return ""

    def status(self, fragment: int) -> status_messages.PlaceStatus:
        """Return where a fragment is aggregated, and which workers have its newest version."""
        view = self.view
        at = view.assignments[fragment]
        there = view.peers[at.aggregator].collected if at.aggregator else {}
        return status_messages.PlaceStatus(
            aggregator=at.aggregator,
            checker=at.checker,
            holders=sorted(view.holding(fragment, at.version)),
            collected=[view.offers[ticket].site for ticket in view.wanted(fragment) if ticket in there],
        )

    def _why_no_aggregator(self, fragment: int) -> str:
        at, peers = self.view.assignments[fragment], self.view.peers
        if at.losses and self.view.holding(fragment, at.version):
            return f"no worker could aggregate it, and they are asked again in turn; the last was {at.lost}"
        if at.version < 1:  # -1 before the first look
            return "the first worker pulls the initial model"
        summary = json.loads(self._store.versions.get(fragment, at.version).summary_json or "{}")
        had = [summary[role] for role in ("aggregator", "checker") if summary.get(role)]
        away = [site for site in (*had, *self._ledger.state.members) if not peers.is_alive(site)]
        looking = [site for site in had if peers.is_alive(site) and peers[site].number < 0]
        lacking = f"no worker that is here has version {at.version}"
        if looking:
            return f"{lacking} yet: {' and '.join(looking)} still look through their files"
        if away:  # others may have come to hold it, too
            return f"{lacking}; start {' or '.join(dict.fromkeys(away))} again, with its folder"
        lost = f"{' and '.join(had)} have lost it"
        return f"{lacking}, and {lost}: export a version before it, and begin a new run from that"

    # -- decisions

    def look(self) -> None:
        """Bring every fragment to where the reports have it."""
        view, rounds = self.view, self._ledger.state.rounds
        for fragment, round_ in enumerate(rounds):
            at = view.assignments[fragment]
            if at.version != round_.head:
                self._longest_s[fragment] = max(self._longest_s.get(fragment, 0.0), at.busy_s)
                view.assignments[fragment] = at = Assignment(round_.head, before=at.aggregator)
            if round_.phase == "finished":
                at.aggregator, at.closing = "", None
            elif round_.phase != "gathering":  # once it is over, all workers are there that could be asked
                self._look_at(fragment, at)
        rounds = self._ledger.state.rounds
        live = {ticket.id for round_ in rounds for ticket in round_.tickets.values() if ticket.is_live}
        view.offers = {ticket: offer for ticket, offer in view.offers.items() if ticket in live}
        if (apart := view.peers.apart()) is not None:
            self._ledger.apply(events.WorkerLeft(*apart))
        self._tell()

    def _look_at(self, fragment: int, at: Assignment) -> None:
        if at.aggregator and (reason := self._why_lost(fragment, at)):
            self._lose(fragment, at, reason)
        if not at.aggregator:
            at.aggregator, at.since_s = self._choose_aggregator(fragment, at), None
            if at.aggregator:
                self._wake()
        if at.aggregator:
            self._take_in(fragment, at)
            self._watch(fragment, at)

    def _choose_aggregator(self, fragment: int, at: Assignment) -> str:
        holders, order = self.view.holding(fragment, at.version), self.view.order(fragment, at.version)
        wary = {
            site
            for site in order
            if (lost_at := self._lost_at.get((fragment, site))) is not None and at.version - lost_at <= WARY
        }
        chosen = appointed(order, holders, at.excluded, {at.before, *wary}, self._settings.swarm.aggregators) or ""
        return "" if chosen in at.excluded and at.pause_s(self._settings.network.idle_timeout_s) > 0 else chosen

    def _take_in(self, fragment: int, at: Assignment) -> None:
        """Accept or refuse what the aggregating worker has collected."""
        view = self.view
        collected = view.peers[at.aggregator].collected
        for ticket in view.wanted(fragment):
            offer, found = view.offers[ticket], collected.get(ticket)
            if found is None or found.digest != offer.said.digest:
                continue
            if found.failed:
                if found.source == offer.said.source:
                    self._could_not_pull(fragment, at, ticket, offer, found.failed)
            elif self._store.tickets.get(ticket).state == "open":
                self._judge(ticket, offer, found.norm, found.bad)
            if view.assignments[fragment] is not at or not at.aggregator:  # that closed the round, or cost it
                return

    def _could_not_pull(self, fragment: int, at: Assignment, ticket: int, offer: Offer, why: str) -> None:
        """Have an update offered anew that could not be pulled; if that does not help, let other workers try."""
        site = at.aggregator
        at.failures[ticket, site] += 1
        if at.failures[ticket, site] < PULLS or self._store.tickets.get(ticket).state != "open":
            LOG.info("%s could not pull the update of %s: %s", site, offer.site, why)
            del self.view.offers[ticket]
            return
        tried = {worker for (of, worker), count in at.failures.items() if count >= PULLS and of == ticket}
        others = set(self.view.holding(fragment, at.version)) & set(self.view.order(fragment, at.version))
        if others - tried - {offer.site}:
            self._lose(fragment, at, f"it could not pull the update of {offer.site}: {why}")
        else:
            self._judge(ticket, offer, 0.0, f"{site} could not pull it: {why}")

    def _judge(self, ticket: int, offer: Offer, norm: float, bad: str) -> None:
        try:
            if bad:
                self._admission.refuse(offer.site, ticket, bad)
            self._admission.accept(offer.site, ticket, offer.said, norm)
        except UpdateRefused:  # the journal has it; its worker is told when it asks
            del self.view.offers[ticket]

    def _watch(self, fragment: int, at: Assignment) -> None:
        """Measure how long the aggregating worker has had work."""
        collected = self.view.peers[at.aggregator].collected
        todo = at.closing is not None and self.view.closed(at) is None
        todo = todo or any(ticket not in collected for ticket in self.view.wanted(fragment))
        if at.since_s is not None:
            at.busy_s = max(at.busy_s, time.monotonic() - at.since_s)
        if not todo:
            at.since_s = None
        elif at.since_s is None:
            at.since_s = time.monotonic()

    def _why_lost(self, fragment: int, at: Assignment) -> str:
        """Return why the aggregating worker can no longer do it; empty if it can."""
        site, peers, now_s = at.aggregator, self.view.peers, time.monotonic()
        idle_s = self._settings.network.idle_timeout_s
        if not peers.is_alive(site):
            return "it has gone"
        peer, others = peers[site], set(self.view.holding(fragment, at.version)) - {site}
        if peer.leaving and others:
            return "it leaves"
        if failed := self.view.why_not_closed(at):
            return failed
        if (fragment, at.version) not in peer.held:
            return f"it has not got version {at.version} any more"
        tickets = self._ledger.state.rounds[fragment].tickets.values()
        accepted = [ticket for ticket in tickets if ticket.state == "accepted"]
        for ticket in accepted:  # neither here, nor offered by its worker
            found = peer.collected.get(ticket.id)
            if (found is None or found.failed) and ticket.id not in self.view.offers:
                return f"the update of {ticket.site} is lost"
        at_work = at.since_s is not None or at.closing is not None
        if at_work and not peers.is_heard(site) and any(map(peers.is_heard, others)):
            return "it does not report any more"
        if at.since_s is not None and others and (still_s := now_s - max(peer.bytes_s, at.since_s)) > idle_s:
            return f"it has moved no byte for {still_s:.0f} s"
        longest_s = self._longest_s.get(fragment, 0.0)
        if others and longest_s and not at.excluded and at.busy_s > max(SLOWER * longest_s, idle_s):
            return f"it has been at it for {at.busy_s:.1f} s, and no round before took longer than {longest_s:.1f} s"
        return ""

    def _lose(self, fragment: int, at: Assignment, reason: str) -> None:
        LOG.warning(
            "%s no longer aggregates round %d: %s; another worker does, and collects the updates again",
            at.aggregator,
            self._ledger.state.rounds[fragment].number,
            reason,
        )
        self._lost_at[fragment, at.aggregator] = at.version
        at.lose(reason)
        self._reopened[fragment] += 1
        self._ledger.apply(events.AggregatorLost(fragment, reason))
        self._tell()

    # -- closing a round

    async def aggregate(
        self, fragment: int, base_version: int, tickets: Sequence[int], number: int
    ) -> Committed | None:
        """Have a frozen round reduced by one worker and checked by another, then move the head.

        Returns:
            The new version; None if the worker was lost, and the round is open again.

        Raises:
            Overflow: the result overflows at every worker that could reduce the round.
            DiskFull: the journal could not be written; the same call may be made again.
        """
        view, losses = self.view, self._reopened[fragment]  # an assignment may still be that of the round before

        def is_frozen() -> bool:  # the same tickets may be frozen once more, with other updates
            frozen = self._ledger.state.rounds[fragment].frozen == tuple(tickets)
            return frozen and self._reopened[fragment] == losses

        if not is_frozen():
            return None
        frozen = frozen_round(self._plan, self._store, fragment, base_version, tickets, number)
        self.look()
        while is_frozen():
            at = view.assignments[fragment]
            if at.closing != frozen:
                at.closing = frozen
                failpoint("swarm.asked")
                self._tell()
            closed = view.closed(at)
            if closed is not None:
                self._choose_checker(fragment, at)
                if at.checker and view.has(at.checker, closed):
                    return self._commit(frozen, at, closed)
            await self.news(LOOK_S)
        at = view.assignments[fragment]
        if at.overflowed and at.overflowed.issuperset(view.holding(fragment, base_version)):
            raise Overflow(at.lost)
        return None

    def _choose_checker(self, fragment: int, at: Assignment) -> None:
        """Choose the worker that checks the new version; another one if no byte comes to it."""
        order = [site for site in self.view.order(fragment, at.version + 1) if site != at.aggregator]
        if at.checker in order and len(order) > 1:
            still_s = time.monotonic() - max(at.checks_s, self.view.peers[at.checker].bytes_s)
            if still_s > self._settings.network.idle_timeout_s:
                LOG.warning("%s does not come to have version %d; another checks it", at.checker, at.version + 1)
                at.unable.add(at.checker)
        able = [site for site in order if site not in at.unable]
        if order and not able:
            self._lose(fragment, at, f"no other worker could pull version {at.version + 1} from it")
        elif at.checker not in able and (at.checker or able):
            at.checker, at.checks_s = next(iter(able), ""), time.monotonic()
            self._tell()

    def _commit(self, frozen: FrozenRound, at: Assignment, closed: ReducedRound) -> Committed:
        grad_norm = math.inf if closed.grad_norm is None else closed.grad_norm
        summary = summary_of(frozen, closed.seconds, grad_norm)
        summary = summary.model_copy(update={"aggregator": at.aggregator, "checker": at.checker})
        draft = self._store.versions.begin(closed.fragment, closed.version)
        try:
            assert closed.digest is not None
            parts, state = digests_in(closed.part_digests), digests_in(closed.state_digests)
            written = VersionDigests(digest=closed.digest, part_digests=parts, state_digests=state)
            row = self._store.versions.commit(
                draft, written, summary_json=summary.model_dump_json(), tickets=frozen.tickets
            )
        except BaseException:
            draft.abandon()
            raise
        return row, summary
