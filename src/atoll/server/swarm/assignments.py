"""The server's decisions in a swarm: which workers keep a version, which one aggregates a round, which one checks it.

The server of a swarm has no tensors. It computes the work of each worker from the reports of all workers and from the
journal, so after a restart it needs only the next reports. If the worker that aggregates is lost, the updates that it
has collected are lost, too. Then the round is opened again, and the sites send their updates again from their outboxes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.aggregation.check_arriving_parts import Overflow
from atoll.aggregation.plan import Plan
from atoll.blobs.manifest import state_id
from atoll.errors import UpdateRefused
from atoll.protocol import messages, status_messages
from atoll.protocol.swarm_messages import Collect, Held, Hold, PeerReport, PeerWork, ReducedRound, digests_in
from atoll.protocol.values import FrozenRound
from atoll.rounds import events
from atoll.rounds.sampling import aggregator_of, choose_holders, ranking
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
"""Seconds between two checks of a round that is being reduced, while no report arrives."""
PULLS = 3
"""Number of times that the aggregator tries to pull one update before another worker aggregates."""
SLOWER = 10
"""An aggregator that takes this many times longer than the longest earlier round is replaced, once in a round."""
WARY = 10
"""Number of rounds in which a worker that failed to aggregate is chosen only if no other worker can be."""


@dataclass
class Assignment:
    """The workers that aggregate and check the current round of a fragment. Times are by `time.monotonic`.

    Attributes:
        version: version that the round starts from.
        aggregator: site that aggregates the round; empty if no site can.
        before: aggregator of the previous round.
        excluded: sites that failed to aggregate this round, oldest failure first.
        losses: number of aggregators lost in this round.
        lost_s: time at which an aggregator was last lost.
        lost: text with the site of this aggregator, and why it was lost.
        failures: (ticket, site) → number of times that the site's worker could not download the update.
        since_s: time since which the aggregator has had work; None if it has none.
        busy_s: longest uninterrupted time for which the aggregator has had work, in seconds.
        closing: closed round that the aggregator has to aggregate; None before the round closes.
        checker: site that checks the new version. It aggregates the next round, unless the user named others.
        checks_s: time at which `checker` was chosen.
        unable: sites that could not check the new version.
        overflowed: sites that computed a result with values that are not finite.
        first: site that downloads the initial model from the server.
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
        """Record that the aggregator failed, and remove it, so that another one can be chosen."""
        self.lost = f"{self.aggregator}: {reason}"
        self.excluded.pop(self.aggregator, None)  # move it to the end, as the newest failure
        self.excluded[self.aggregator] = None
        self.aggregator, self.closing, self.checker, self.since_s, self.busy_s = "", None, "", None, 0.0
        self.unable.clear()
        self.losses += 1
        self.lost_s = time.monotonic()

    def pause_s(self, most_s: float) -> float:
        """Return how many seconds to wait before a failed worker may aggregate again; 0 or less if the wait is over.

        The wait doubles with each repeated failure, up to `most_s` seconds.
        """
        times = min(self.losses - len(self.excluded), 16)  # a much larger power would overflow
        return self.lost_s + min(2.0 ** max(0, times), most_s) - time.monotonic()


@dataclass(frozen=True)
class Offer:
    """An update that other workers of a swarm can download from the worker that made it.

    Attributes:
        site: site of the worker.
        fragment: index of the fragment.
        said: the request that submits the update. Its `source` is the reference to the update.
    """

    site: str
    fragment: int
    said: messages.Complete


class SwarmView:
    """What the server knows about a swarm. `work` computes from it what a worker has to do.

    Attributes:
        peers: site → record of its worker.
        assignments: for each fragment, the workers that aggregate and check its round.
        offers: ticket → offered update.
    """

    def __init__(self, plan: Plan, store: Store, ledger: Ledger) -> None:
        self._plan, self._store, self._ledger, self._settings = plan, store, ledger, plan.settings
        self.peers = Peers(lambda: ledger.state.members)
        self.assignments = [Assignment() for _ in plan.fragments]
        self.offers: dict[int, Offer] = {}

    def sources(self, fragment: int, version: int, digest: str) -> list[str]:
        """Return references from which a version can be downloaded, one for each worker that has it."""
        return [held.source.version for held in self.peers.holding(fragment, version, digest).values()]

    def work(self, site: str) -> PeerWork:
        """Return everything that a site's worker has to do now.

        That is: workers to try to connect to, versions to keep, updates to download, rounds to aggregate, and whether
        to stay. The `stamp` of the result is a checksum of its content.
        """
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
        """Return the versions of a fragment that a site has to keep, or to download if it lacks them.

        These are: versions that the site has and the run still needs; the newest version, if the site is chosen to have
        it; and the new version of a closed round, if the site aggregates or checks that round.
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
        """Return whether a site must stay because of the versions that it has.

        During the run, it must stay if it has a newest version that no other live worker has. After the end of the run,
        it must stay until it and all other live workers have the result.
        """
        members = self._ledger.state.members  # includes members that have not reported since a restart of the server
        others = [other for other, member in members.items() if member.alive and other != site]
        for fragment, at in enumerate(self.assignments):
            holding, finished = self.holding(fragment, at.version), self._ledger.state.finished
            if finished and holding and site not in holding:
                return True  # the site does not have the whole result yet
            if site in holding and others:
                if not any(other in holding for other in others):
                    return True
                if finished and not all(other in holding for other in others):
                    return True
        return False

    def _is_awaited(self, site: str) -> bool:
        """Return whether a site must stay because an aggregator has not yet downloaded its update."""
        for fragment, at in enumerate(self.assignments):
            over = self._ledger.state.rounds[fragment].phase == "finished"  # an asynchronous run may leave offers
            mine = [ticket for ticket in self.wanted(fragment) if self.offers[ticket].site == site]
            if mine and not over and at.aggregator != site:
                there = self.peers[at.aggregator].collected if at.aggregator else {}
                if any(ticket not in there or there[ticket].failed for ticket in mine):
                    return True
        return False

    # -- which worker holds which version

    def holding(self, fragment: int, version: int) -> dict[str, Held]:
        """Return site → its report about a version, for the live workers that have this version."""
        return self.peers.holding(fragment, version, self._store.run_log.version_digest(fragment, version))

    def order(self, fragment: int, version: int) -> list[str]:
        """Return the live sites, sorted by preference as aggregator of the round that starts from `version`."""
        heard = [site for site in self.peers.alive if self.peers.is_heard(site)]
        staying = [site for site in heard if not self.peers[site].leaving] or heard
        return ranking(
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
        if not holders:  # one worker pulls the version from the server; the others pull it from this worker
            at.first = at.first if at.first in order else next(iter(order), "")
            return {at.first}
        return {*holders, *choose_holders(order, holders.keys() & set(order))}

    def wanted(self, fragment: int) -> list[int]:
        """Return the open and accepted tickets with an update that the aggregator can download, sorted.

        Updates that the aggregator has already are included.
        """
        tickets = self._ledger.state.rounds[fragment].tickets.values()
        return sorted(ticket.id for ticket in tickets if ticket.is_live and ticket.id in self.offers)

    def has(self, site: str, closed: ReducedRound) -> bool:
        """Return whether a site's worker has a new version and the outer optimizer's state that belongs to it."""
        held = self.peers[site].held.get((closed.fragment, closed.version))
        return (
            held is not None
            and held.digest == closed.digest
            and held.state_digest == state_id(digests_in(closed.state_digests))
        )

    # -- the aggregating worker's results

    def closed(self, at: Assignment) -> ReducedRound | None:
        """Return the aggregator's report about the new version that it made; None if there is no valid report yet."""
        return next((each for each in self._reported(at) if self._is_sound(each)), None)

    def why_not_closed(self, at: Assignment) -> str:
        """Return why the aggregator could not make the new version, or why its report is invalid.

        Return an empty text if it has not reported, or if its report is valid.
        """
        for closed in self._reported(at):
            if not self._is_sound(closed):
                if closed.overflows:
                    at.overflowed.add(at.aggregator)
                return closed.failed or "the digests of its report do not belong to a version"
        return ""

    def _reported(self, at: Assignment) -> list[ReducedRound]:
        """Return the aggregator's reports about the version and the tickets that it has to aggregate now."""
        closing = at.closing
        if closing is None or not self.peers.is_alive(at.aggregator):
            return []
        key = (closing.fragment, closing.version, closing.tickets)
        return [each for each in self.peers[at.aggregator].closed if (each.fragment, each.version, each.tickets) == key]

    def _is_sound(self, closed: ReducedRound) -> bool:
        """Return whether a report has one digest for each part, and its digest of the version follows from these."""
        layout = self._plan.fragments[closed.fragment].version
        try:
            parts, _ = digests_in(closed.part_digests), digests_in(closed.state_digests)
        except ValueError:
            return False
        return len(parts) == len(layout.parts) and layout.blob_id(parts) == closed.digest


class Swarm:
    """Chooses the workers that aggregate and check the rounds of a swarm, and commits their results.

    Call methods on the server's event loop. No method connects to a worker.

    Args:
        plan: plan of the run.
        store: store of the run.
        ledger: state of the run.
        admission: object that accepts and refuses updates.
        wake: callback that wakes the requests of workers that wait for a ticket.

    Attributes:
        view: what the server knows about the swarm.
    """

    def __init__(
        self, plan: Plan, store: Store, ledger: Ledger, admission: UpdateAdmission, wake: Callable[[], None]
    ) -> None:
        self._plan, self._store, self._ledger, self._settings = plan, store, ledger, plan.settings
        self._admission, self._wake = admission, wake
        self.view = SwarmView(plan, store, ledger)
        self._news = asyncio.Event()
        self._longest_s: dict[int, float] = {}  # fragment → longest `busy_s` of an earlier round
        self._lost_at: dict[tuple[int, str], int] = {}  # (fragment, site) → base version of the last failed round
        self._reopened = [0] * len(self.view.assignments)  # by fragment: number of lost aggregators so far
        self._answers, self._since_ms = 0, int(1e3 * time.time())

    # -- reports and offers of workers

    async def report(self, lease: Lease, message: PeerReport) -> PeerWork:
        """Record the report of a worker. Wait until the worker has something else to do, and return its work.

        The wait also ends after `message.wait_s` seconds, when the worker's next report comes, or when the worker wants
        to leave and may go.
        """
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
        """Record that other workers can download an update.

        Args:
            site: site that offers the update.
            ticket: ticket of the update.
            fragment: index of the fragment.
            said: the request that submits the update.

        Raises:
            BadRequest: the reference to the update does not have the address of the site's worker.
        """
        if (peer := self.view.peers.get(site)) is not None:
            peer.require_own(site, said.source)
        offer = Offer(site, fragment, said)
        if self.view.offers.get(ticket) != offer:
            self.view.offers[ticket] = offer
            self.look()

    async def news(self, timeout_s: float) -> None:
        """Wait until the state of the swarm changes, at most `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            pass

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -- status, and reasons why a round waits

    def waits(self, site: str, fragment: int) -> str:
        """Return why the swarm cannot give a site a ticket yet; empty if it can."""
        peers = self.view.peers
        if self._ledger.state.rounds[fragment].phase in ("finished", "gathering") or not peers.is_alive(site):
            return ""
        if strangers := peers.strangers_of(site):
            return f"{site} and {', '.join(strangers)} are testing whether they can connect to each other"
        return "" if self.view.assignments[fragment].aggregator else self._why_no_aggregator(fragment)

    def trouble(self, fragment: int) -> str:
        """Return why the workers of the swarm do not make a fragment's next version; empty if there is no problem."""
        at, phase = self.view.assignments[fragment], self._ledger.state.rounds[fragment].phase
        if phase in ("open", "closing") and not at.aggregator and self.view.peers.alive:
            return f"waits: {self._why_no_aggregator(fragment)}"
        if phase == "closing" and self.view.closed(at) is not None and not at.checker:
            return f"waits for a second worker: version {at.version + 1} is complete, but no other worker can check it"
        if phase in ("open", "closing") and at.losses > 1:
            return f"{at.losses} workers in a row could not aggregate the round; the last was {at.lost}"
        return ""

    def status(self, fragment: int) -> status_messages.PlaceStatus:
        """Return a fragment's status: aggregator, checker, sites with the newest version, collected updates."""
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
            return f"no worker could aggregate the round; they are asked again in turn, the last was {at.lost}"
        if at.version < 1:  # -1 before the first `look`
            return "the first worker downloads the initial model"
        summary = json.loads(self._store.versions.get(fragment, at.version).summary_json or "{}")
        had = [summary[role] for role in ("aggregator", "checker") if summary.get(role)]
        away = [site for site in (*had, *self._ledger.state.members) if not peers.is_alive(site)]
        looking = [site for site in had if peers.is_alive(site) and peers[site].number < 0]
        lacking = f"no connected worker has version {at.version}"
        if looking:
            return f"{lacking} yet: {' and '.join(looking)} still check their files"
        if away:  # any absent member may hold the version
            return f"{lacking}; start {' or '.join(dict.fromkeys(away))} again, with its old folder"
        lost = f"{' and '.join(had)} have lost it"
        return f"{lacking}, and {lost}: export an older version, and start a new run from that"

    # -- decisions

    def look(self) -> None:
        """Replace aggregators and checkers if new reports require it. Evict a worker that others cannot reach."""
        view, rounds = self.view, self._ledger.state.rounds
        for fragment, round_ in enumerate(rounds):
            at = view.assignments[fragment]
            if at.version != round_.head:
                self._longest_s[fragment] = max(self._longest_s.get(fragment, 0.0), at.busy_s)
                view.assignments[fragment] = at = Assignment(round_.head, before=at.aggregator)
            if round_.phase == "finished":
                at.aggregator, at.closing = "", None
            elif round_.phase != "gathering":  # choose only after all expected sites have joined
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
            at.aggregator, at.since_s = self._aggregator_of(fragment, at), None
            if at.aggregator:
                self._wake()
        if at.aggregator:
            self._take_in(fragment, at)
            self._watch(fragment, at)

    def _aggregator_of(self, fragment: int, at: Assignment) -> str:
        holders, order = self.view.holding(fragment, at.version), self.view.order(fragment, at.version)
        wary = {
            site
            for site in order
            if (lost_at := self._lost_at.get((fragment, site))) is not None and at.version - lost_at <= WARY
        }
        chosen = aggregator_of(order, holders, at.excluded, {at.before, *wary}, self._settings.swarm.aggregators) or ""
        return "" if chosen in at.excluded and at.pause_s(self._settings.network.idle_timeout_s) > 0 else chosen

    def _take_in(self, fragment: int, at: Assignment) -> None:
        """Accept or refuse the updates that the aggregator has collected."""
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
            if view.assignments[fragment] is not at or not at.aggregator:  # the round closed, or lost its aggregator
                return

    def _could_not_pull(self, fragment: int, at: Assignment, ticket: int, offer: Offer, why: str) -> None:
        """Handle the failure of the aggregator to download an update.

        The site has to offer the update again. After `PULLS` failures, another worker aggregates. If every worker that
        has the round's base version has failed to download the update, the update is refused.
        """
        site = at.aggregator
        at.failures[ticket, site] += 1
        if at.failures[ticket, site] < PULLS or self._store.tickets.get(ticket).state != "open":
            LOG.info("%s could not download the update of %s: %s", site, offer.site, why)
            del self.view.offers[ticket]
            return
        tried = {worker for (of, worker), count in at.failures.items() if count >= PULLS and of == ticket}
        others = set(self.view.holding(fragment, at.version)) & set(self.view.order(fragment, at.version))
        if others - tried - {offer.site}:
            self._lose(fragment, at, f"it could not download the update of {offer.site}: {why}")
        else:
            self._judge(ticket, offer, 0.0, f"{site} could not download it: {why}")

    def _judge(self, ticket: int, offer: Offer, norm: float, bad: str) -> None:
        try:
            if bad:
                self._admission.refuse(offer.site, ticket, bad)
            self._admission.require_plausible(offer.site, ticket, offer.said, norm)
            self._admission.accept(offer.site, ticket, offer.said, norm)
        except UpdateRefused:  # the journal has the refusal; the worker gets it with its next request
            del self.view.offers[ticket]

    def _watch(self, fragment: int, at: Assignment) -> None:
        """Measure for how long the aggregator has been busy without a pause."""
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
        """Return why the aggregator has to be replaced; empty if it can go on."""
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
            return f"it no longer has version {at.version}"
        tickets = self._ledger.state.rounds[fragment].tickets.values()
        accepted = [ticket for ticket in tickets if ticket.state == "accepted"]
        for ticket in accepted:  # an update is lost if the aggregator does not have it, and its site does not offer it
            found = peer.collected.get(ticket.id)
            if (found is None or found.failed) and ticket.id not in self.view.offers:
                return f"the update of {ticket.site} is lost"
        at_work = at.since_s is not None or at.closing is not None
        if at_work and not peers.is_heard(site) and any(map(peers.is_heard, others)):
            return "it sends no more reports"
        if at.since_s is not None and others and (still_s := now_s - max(peer.bytes_s, at.since_s)) > idle_s:
            return f"it has moved no byte for {still_s:.0f} s"
        longest_s = self._longest_s.get(fragment, 0.0)
        if others and longest_s and not at.excluded and at.busy_s > max(SLOWER * longest_s, idle_s):
            return f"it has been working for {at.busy_s:.1f} s, but no round before took longer than {longest_s:.1f} s"
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

    async def aggregate(self, round_: events.RoundClosed, number: int) -> Committed | None:
        """Let one worker aggregate a closed round and another one check the result, then commit the new version.

        Args:
            round_: the closed round.
            number: number of the round.

        Returns:
            The new version; None if the aggregator was lost and the round is open again.

        Raises:
            Overflow: the result overflows at every worker that could aggregate the round.
            DiskFull: the journal could not be written. Call this method again.
        """
        view, fragment = self.view, round_.fragment
        losses = self._reopened[fragment]  # not `losses` of the assignment, which may be an old one

        def is_frozen() -> bool:  # if the round was opened again, the same tickets may have other updates
            frozen = self._ledger.state.rounds[fragment].frozen == round_.tickets
            return frozen and self._reopened[fragment] == losses

        if not is_frozen():
            return None
        frozen = frozen_round(self._plan, self._store, round_, number)
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
        if at.overflowed and at.overflowed.issuperset(view.holding(fragment, round_.base_version)):
            raise Overflow(at.lost)
        return None

    def _choose_checker(self, fragment: int, at: Assignment) -> None:
        """Choose the worker that checks the new version.

        Replace a checker that has sent or received no byte for `network.idle_timeout_s`. If every possible checker has
        failed, replace the aggregator.
        """
        order = [site for site in self.view.order(fragment, at.version + 1) if site != at.aggregator]
        if at.checker in order and len(order) > 1:
            still_s = time.monotonic() - max(at.checks_s, self.view.peers[at.checker].bytes_s)
            if still_s > self._settings.network.idle_timeout_s:
                LOG.warning("%s did not get version %d in time; another worker checks it", at.checker, at.version + 1)
                at.unable.add(at.checker)
        able = [site for site in order if site not in at.unable]
        if order and not able:
            self._lose(fragment, at, f"no other worker could download version {at.version + 1} from it")
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
