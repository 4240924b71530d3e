"""The server's decisions in a swarm: which workers keep a version, which one aggregates a round, which one checks it.

The server of a swarm has no tensors. It computes the work of each worker from the reports of all workers and from the
journal, so after a restart it needs only the next reports. If the worker that aggregates is lost, the updates that it
has collected are lost, too. Then the round is opened again, and the sites send their updates again from their outboxes.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from atoll.aggregation.check_arriving_parts import Overflow
from atoll.aggregation.plan import Plan
from atoll.blobs.manifest import state_id
from atoll.errors import AtollError, BadRequest, RunFailed, StoreError, UpdateRefused
from atoll.format_text import listed
from atoll.protocol import messages, routes, status_messages
from atoll.protocol.run_events import Happened
from atoll.protocol.swarm_messages import (
    MOST_PEERS,
    MOST_SOURCES,
    Collect,
    CollectedUpdate,
    Held,
    Hold,
    PeerReport,
    PeerWork,
    ReducedRound,
    Source,
    SwarmPlan,
    digests_in,
)
from atoll.protocol.values import FrozenRound
from atoll.rounds import events
from atoll.rounds.sampling import HOLDERS, aggregator_of, choose_holders, ranking
from atoll.runtime import OWN_RANDOM, failpoint
from atoll.server.coordinator.accept_update import UpdateAdmission
from atoll.server.coordinator.aggregate_round import MadeVersion, frozen_round, summary_of
from atoll.server.coordinator.lease_checks import LeaseChecks
from atoll.server.coordinator.ledger import Ledger
from atoll.server.coordinator.long_polls import FairEvent
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.update_operations import receipt_again
from atoll.server.swarm.peer_reachability import Peers
from atoll.store.journal_tables import TicketRow
from atoll.store.store import Store
from atoll.store.tickets import why_closed
from atoll.store.versions import VersionDigests
from atoll.tensors.reference import TensorRef
from atoll.transport.authority_files import context_to_worker
from atoll.transport.peer_address import why_unreachable

LOG = logging.getLogger("atoll.server")

LOOK_S = 1.0
"""Seconds between two checks of a round that is being aggregated, while no report arrives."""
PULLS = 3
"""Number of times that the aggregator tries to pull one update before another worker aggregates."""
SLOWER = 10
"""An aggregator that takes this many times longer than any earlier round is replaced, but only once per round."""
MOST_RAISED = 5
"""If the code of the run, such as its reducer, raises an error so many times in a round, the run has failed."""
LACKING_S = 10.0
"""Seconds after which the log says that all workers lack the version of a round, and what to do."""
WARY = 10
"""For this many rounds, a worker that failed to aggregate is chosen only if no other worker is available."""


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
        lost: name of this aggregator and why it was lost, as text.
        failures: (ticket, site) → number of times that the site's worker could not download the update.
        since_s: time at which the aggregator's present work began; None if it has no work.
        busy_s: longest time that the aggregator has had work without a pause, in seconds.
        closing: closed round that the aggregator has to aggregate; None before the round closes.
        checker: site that checks the new version. It aggregates the next round, unless the user named others.
        checks_s: time at which `checker` was chosen.
        unable: sites that could not check the new version.
        raised: errors that other workers would probably get, too: the site, and whether its result contained values
            that are not finite; else the code of the run raised.
        undecoded: errors of the codec before any update could be decoded: the aggregator, and the site of the update.
        first: site that downloads the initial model from the server.
        lacking_s: time since which all workers lack `version`; None if one has it, or may have it.
        said: what the log has said of this.
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
    raised: list[tuple[str, bool]] = field(default_factory=list)
    undecoded: set[tuple[str, str]] = field(default_factory=set)
    first: str = ""
    lacking_s: float | None = None
    said: str = ""

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
        complete: the request that submits the update. Its `source` is the reference to the update.
    """

    site: str
    fragment: int
    complete: messages.Complete


class SwarmView:
    """What the server knows about a swarm. `work` uses this to compute what a worker has to do.

    Attributes:
        peers: site → record of its worker.
        assignments: for each fragment, the workers that aggregate and check its round.
        offers: ticket → offered update.
    """

    def __init__(self, plan: Plan, store: Store, ledger: Ledger) -> None:
        self._plan, self._store, self._ledger, self._settings = plan, store, ledger, plan.settings
        self.peers = Peers(lambda: ledger.state.members, self._why_unreachable)
        self.assignments = [Assignment() for _ in plan.fragments]
        self.offers: dict[int, Offer] = {}

    def sources(self, fragment: int, version: int, digest: str) -> list[str]:
        """Return references to a version at up to `MOST_SOURCES` workers that have it. A download needs only one."""
        found = [held.source.version for held in self.peers.holding(fragment, version, digest).values()]
        return found if len(found) <= MOST_SOURCES else OWN_RANDOM.sample(found, MOST_SOURCES)

    def _why_unreachable(self, proof: TensorRef, site: str) -> str:
        """Return why a site's worker does not answer at the address in a reference; empty if it does."""
        return why_unreachable(proof, context_to_worker(self._store.directory, site) if proof.secure else None)

    def work(self, site: str) -> PeerWork:
        """Return everything that a site's worker has to do now.

        That is: the workers to try to connect to, the versions to keep, the updates to download, the rounds to
        aggregate, and whether it must stay in the run. The `stamp` of the result is a checksum of its content.
        """
        work = PeerWork(
            stamp=0,
            peers=[self.peers[other].address for other in self.peers.others(site)],
            sites=self.peers.others(site),
            ended=self._store.identities.known.ended(MOST_PEERS),
            probe=self.peers.to_probe(site),
            hold=[hold for fragment in range(len(self.assignments)) for hold in self._holds(site, fragment)],
            collect=[
                Collect(ticket=ticket, fragment=fragment, site=offer.site, digest=offer.complete.digest, source=source)
                for fragment, job in enumerate(self.assignments)
                if job.aggregator == site
                for ticket in self.available(fragment)
                if (offer := self.offers[ticket]) and (source := offer.complete.source)
            ],
            close=[job.closing for job in self.assignments if job.closing and job.aggregator == site],
            finished=self._ledger.state.finished,
            stay=self._is_needed(site) or self._is_awaited(site),
        )
        return work.model_copy(update={"stamp": 1 + zlib.crc32(work.model_dump_json().encode())})

    def _holds(self, site: str, fragment: int) -> list[Hold]:
        """Return the versions of a fragment that a site has to keep. It first downloads those that it lacks.

        They are: versions that the site has and the run still needs; the newest version, if the site is chosen to have
        it; and the new version of a closed round, if the site aggregates or checks that round.
        """
        job, peer = self.assignments[fragment], self.peers[site]
        wanted = [
            Hold(
                fragment=fragment,
                version=row.version,
                digest=row.digest,
                state_digest=state_id(row.state_digests),
                sources=self._some_sources(site, fragment, row.version),
            )
            for row in self._store.versions.kept(fragment)
            if (fragment, row.version) in peer.held
            or (row.version == job.version and site in self._holders_to_be(fragment))
        ]
        if (closed := self.closed(job)) is not None and site in (job.aggregator, job.checker):
            held = self.peers[job.aggregator].held.get((closed.fragment, closed.version))
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

    def _some_sources(self, site: str, fragment: int, version: int) -> list[Source]:
        """Return where a site can download a version: several workers, and other ones for each site."""
        held = [each.source for each in self.holding(fragment, version).values()]
        first = zlib.crc32(site.encode()) % len(held) if len(held) > MOST_SOURCES else 0
        return [*held[first:], *held[:first]][:MOST_SOURCES]

    def _is_needed(self, site: str) -> bool:
        """Return whether a site must stay in the run because of the versions that it has.

        During the run, it must stay if only its worker has the newest version of a fragment. After the end of the run,
        it must stay until it and all other live workers have the result.
        """
        members = self._ledger.state.members  # includes members that have not reported since a restart of the server
        others = [other for other, member in members.items() if member.alive and other != site]
        for fragment, job in enumerate(self.assignments):
            holding, finished = self.holding(fragment, job.version), self._ledger.state.finished
            if finished and holding and site not in holding:
                return True  # the site does not have the whole result yet
            if site in holding and others:
                if not any(other in holding for other in others):
                    return True
                if finished and not all(other in holding for other in others):
                    return True
        return False

    def _is_awaited(self, site: str) -> bool:
        """Return whether a site must stay in the run until an aggregator has downloaded the site's update."""
        for fragment, job in enumerate(self.assignments):
            ended = self._ledger.state.rounds[fragment].phase == "finished"  # an asynchronous run may leave offers
            own = [ticket for ticket in self.available(fragment) if self.offers[ticket].site == site]
            if own and not ended and job.aggregator != site:
                collected = self.peers[job.aggregator].collected if job.aggregator else {}
                if any(ticket not in collected or collected[ticket].failed for ticket in own):
                    return True
        return False

    # -- which worker holds which version

    def holding(self, fragment: int, version: int) -> dict[str, Held]:
        """Return site → its report about a version, for the live workers that have this version."""
        return self.peers.holding(fragment, version, self._store.run_log.version_digest(fragment, version))

    def order(self, fragment: int, version: int) -> list[str]:
        """Return the sites that may aggregate the round that starts from `version`, the preferred one first.

        These are the live sites with workers that are not overdue with a report. A worker that is about to leave
        counts only if all of them are.
        """
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
        job = self.assignments[fragment]
        if self._ledger.state.rounds[fragment].phase == "gathering":
            return set()
        if self._ledger.state.finished:  # every worker gets the result
            return set(self.peers.alive)
        holders, order = self.holding(fragment, job.version), self.order(fragment, job.version)
        if not holders:  # one worker pulls the version from the server; the others pull it from this worker
            job.first = job.first if job.first in order else next(iter(order), "")
            return {job.first}
        return {*holders, *choose_holders(order, holders.keys() & set(order))}

    def available(self, fragment: int) -> list[int]:
        """Return the tickets, open or accepted, with an update that other workers can download. The list is sorted.

        It includes updates that the aggregator has downloaded already.
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

    def closed(self, job: Assignment) -> ReducedRound | None:
        """Return the aggregator's report about the new version that it made; None if there is no valid report yet."""
        return next((each for each in self._reported(job) if self._is_sound(each)), None)

    def why_not_closed(self, job: Assignment) -> str:
        """Return why the aggregator could not make the new version, or why its report is invalid.

        Return an empty text if the aggregator has not reported, or if its report is valid.
        """
        for closed in self._reported(job):
            if not self._is_sound(closed):
                if closed.overflows or closed.raised:
                    job.raised.append((job.aggregator, closed.overflows))
                return closed.failed or "the digests of its report do not belong to a version"
        return ""

    def _reported(self, job: Assignment) -> list[ReducedRound]:
        """Return the aggregator's reports about the version and the tickets that it has to aggregate now."""
        closing = job.closing
        if closing is None or not self.peers.is_alive(job.aggregator):
            return []
        key = (closing.fragment, closing.version, closing.tickets)
        return [row for row in self.peers[job.aggregator].closed if (row.fragment, row.version, row.tickets) == key]

    def _is_sound(self, closed: ReducedRound) -> bool:
        """Return whether a report has one digest for each part, and these digests give the digest of the version."""
        layout = self._plan.fragments[closed.fragment].version
        try:
            parts, _ = digests_in(closed.part_digests), digests_in(closed.state_digests)
        except ValueError:
            return False
        return len(parts) == len(layout.parts) and layout.blob_id(parts) == closed.digest


class SwarmRounds:
    """Chooses the workers that aggregate and check the rounds of a swarm. It is the `RoundPlace` of a swarm.

    Call methods on the server's event loop. No method connects to a worker.

    Args:
        run: the run.
        admission: object that accepts and refuses updates.
        leases: checks of leases and tickets.

    Attributes:
        plan_message: the values that a worker needs to aggregate.
        view: what the server knows about the swarm.
        news: event that is set when the state of the swarm changes.
    """

    def __init__(self, run: RunCore, admission: UpdateAdmission, leases: LeaseChecks) -> None:
        self._plan, self._store, self._ledger, self._settings = run.plan, run.store, run.ledger, run.settings
        self._run, self._admission, self._leases = run, admission, leases
        self._fail: Callable[[AtollError], None] = lambda error: None
        self._decodes = False  # whether a worker has decoded an update since the start of the server
        self.plan_message = run.plan.values.message()
        self.view = SwarmView(run.plan, run.store, run.ledger)
        self.news = FairEvent()
        self._longest_s: dict[int, float] = {}  # fragment → longest `busy_s` of an earlier round
        self._lost_at: dict[tuple[int, str], int] = {}  # (fragment, site) → base version of the last failed round
        self._reopened = [0] * len(self.view.assignments)  # by fragment: number of lost aggregators so far
        self._answers, self._since_ms = 0, int(1e3 * time.time())

    is_here = False

    def start(self, fail: Callable[[AtollError], None]) -> None:
        """Begin. `fail` is called if no worker can decode updates."""
        self._fail = fail

    async def admit(self, message: messages.Join) -> None:
        """Let a worker join the swarm.

        Raises:
            ConfigError: the server or other workers cannot reach it.
        """
        await self.view.peers.join(message)

    # -- reports and offers of workers

    async def get_swarm_plan(self) -> SwarmPlan:
        """Return the values that a worker needs to aggregate updates and step the outer optimizer."""
        return self.plan_message

    async def work_in_swarm(self, lease: Lease, message: PeerReport) -> PeerWork:
        """Record a worker's report. Wait until the worker's work changes, and return the work.

        The wait also ends after `message.wait_s` seconds, when the worker's next report arrives, or when the worker
        wants to leave and may do so.
        """
        site, view = lease.site, self.view
        peer = await view.peers.known(site, message.peer, lease.process)
        peer.require_own(site, *(text for held in message.held for text in (held.source.version, held.source.state)))
        if peer.take(message, self._settings.network.idle_timeout_s):
            self.reassign()
        until_s = time.monotonic() + message.wait_s
        while True:
            work = view.work(site)
            left_s = until_s - time.monotonic()
            goes = message.leaving and not work.stay
            if work.stamp != message.seen or left_s <= 0 or goes or message.number < peer.number:
                self._answers += 1
                peer.answered(work)
                return work.model_copy(update={"server": self._since_ms, "order": self._answers})
            await self.news.wait(left_s)

    async def deliver(self, lease: Lease, row: TicketRow, message: messages.Complete) -> messages.Receipt:
        """Let other workers download an update. Wait until it is accepted, at most `LONG_POLL_S` seconds.

        Raises:
            BadRequest: the message lacks the address from which other workers can download the update.
            TicketClosed, UpdateRefused: the update is not accepted.
        """
        if message.source is None:
            raise BadRequest(
                f"The update of {lease.site} lacks the address from which other workers of the swarm can download it.",
                "Use the same Atoll version on both sides.",
            )
        until_s = time.monotonic() + routes.LONG_POLL_S
        self.offer(lease.site, row.ticket, row.fragment, message)
        while True:
            row = self._store.tickets.get(row.ticket)
            if row.state == "refused":
                raise why_closed(row)
            if row.is_in:
                return receipt_again(row, message.digest)
            self._leases.require_open(lease, row.ticket)
            unpulled = row.ticket not in self.view.offers
            if unpulled or time.monotonic() >= until_s:
                return messages.Receipt(digest=message.digest, accepted=False, unpulled=unpulled)
            await self.news.wait(until_s - time.monotonic())

    def on_event(self, event: Happened) -> None:
        """Do nothing: the aggregating worker has each accepted update already."""

    def offer(self, site: str, ticket: int, fragment: int, complete: messages.Complete) -> None:
        """Record that other workers can download an update.

        Args:
            site: site that offers the update.
            ticket: ticket of the update.
            fragment: index of the fragment.
            complete: the request that submits the update.

        Raises:
            BadRequest: the reference to the update does not have the address of the site's worker.
        """
        if (peer := self.view.peers.get(site)) is not None:
            peer.require_own(site, complete.source)
        offer = Offer(site, fragment, complete)
        if self.view.offers.get(ticket) != offer:
            self.view.offers[ticket] = offer
            self.reassign()

    # -- status, and reasons why a round waits

    def why_withheld(self, site: str, fragment: int) -> str:
        """Return why the swarm cannot give a site a ticket yet; empty if it can."""
        peers = self.view.peers
        if self._ledger.state.rounds[fragment].phase in ("finished", "gathering") or not peers.is_alive(site):
            return ""
        if strangers := peers.strangers_of(site):
            return f"{site} and {', '.join(strangers)} are testing whether they can connect to each other"
        return "" if self.view.assignments[fragment].aggregator else self._why_no_aggregator(fragment)

    def trouble(self, fragment: int) -> str:
        """Return why the workers of the swarm do not make a fragment's next version; empty if there is no problem."""
        job, phase = self.view.assignments[fragment], self._ledger.state.rounds[fragment].phase
        if phase in ("open", "closing") and not job.aggregator and self.view.peers.alive:
            return f"waits: {self._why_no_aggregator(fragment)}"
        if phase == "closing" and self.view.closed(job) is not None and not job.checker:
            return f"waits for a second worker: version {job.version + 1} is complete, but no other worker can check it"
        if phase in ("open", "closing") and job.losses > 1:
            return f"{job.losses} workers in a row could not aggregate the round; the last was {job.lost}"
        return ""

    def status(self, fragment: int) -> status_messages.PlaceStatus:
        """Return a fragment's status: aggregator, checker, sites with the newest version or a collected update."""
        view = self.view
        job = view.assignments[fragment]
        collected = view.peers[job.aggregator].collected if job.aggregator else {}
        return status_messages.PlaceStatus(
            aggregator=job.aggregator,
            checker=job.checker,
            holders=sorted(view.holding(fragment, job.version)),
            collected=[view.offers[ticket].site for ticket in view.available(fragment) if ticket in collected],
        )

    def sources(self, fragment: int, version: int, digest: str) -> list[str]:
        """Return references to a version at workers that have it."""
        return self.view.sources(fragment, version, digest)

    def _why_no_aggregator(self, fragment: int) -> str:
        job, peers = self.view.assignments[fragment], self.view.peers
        if job.losses and self.view.holding(fragment, job.version):
            return f"no worker could aggregate the round, so each is asked again in turn; the last was {job.lost}"
        if job.version < 1:  # -1 before the first `reassign`
            return "the first worker downloads the initial model"
        summary = json.loads(self._store.versions.get(fragment, job.version).summary_json or "{}")
        had = [summary[role] for role in ("aggregator", "checker") if summary.get(role)]
        absent = [site for site in (*had, *self._ledger.state.members) if not peers.is_alive(site)]
        looking = [site for site in had if peers.is_alive(site) and peers[site].number < 0]
        lacking = f"no connected worker has version {job.version}"
        if looking:
            return f"{lacking} yet: {' and '.join(looking)} still check their files"
        if absent:  # any absent member may hold the version
            return f"{lacking}; start {' or '.join(dict.fromkeys(absent))} again, with its old folder"
        holders, kept = " and ".join(had), self._store.versions.kept(fragment)
        older = [str(row.version) for row in kept if self.view.holding(fragment, row.version)]
        exportable = f" ({listed(older)} can be exported)" if older else ""
        return (
            f"{lacking}, and {holders} have lost it: export an older version{exportable}, and start a new run from "
            f"that. Or, if the server's state was restored from a backup, restore the folders of {holders} from a "
            f"backup of the same time, and start these sites again. {listed(peers.alive)} said what they have"
        )

    def _say_lacking(self, fragment: int, job: Assignment) -> None:
        """Log why no worker can aggregate a round, if all have said that they lack its version for `LACKING_S`."""
        peers, now_s = self.view.peers, time.monotonic()
        has_hope = job.aggregator or job.version < 1 or any(peers[site].number < 0 for site in peers.alive)
        if has_hope or not peers.alive or self.view.holding(fragment, job.version):
            job.lacking_s = None
            return
        job.lacking_s = now_s if job.lacking_s is None else job.lacking_s
        why = self._why_no_aggregator(fragment)
        if now_s - job.lacking_s >= LACKING_S and why != job.said:
            job.said = why
            LOG.warning("round %d waits: %s", self._ledger.state.rounds[fragment].number, why)

    # -- decisions

    def tick(self) -> None:
        """Replace aggregators and checkers if it is due."""
        self.reassign()

    def cancel(self) -> None:
        """Do nothing: the workers keep what they have."""

    close = cancel

    def reassign(self) -> None:
        """Replace aggregators and checkers if new reports require it. Evict a worker that others cannot reach."""
        view, rounds = self.view, self._ledger.state.rounds
        for fragment, round_ in enumerate(rounds):
            job = view.assignments[fragment]
            if job.version != round_.head:
                self._longest_s[fragment] = max(self._longest_s.get(fragment, 0.0), job.busy_s)
                view.assignments[fragment] = job = Assignment(round_.head, before=job.aggregator)
            if round_.phase == "finished":
                job.aggregator, job.closing = "", None
            elif round_.phase != "gathering":  # choose only after all expected sites have joined
                self._reassign_fragment(fragment, job)
                self._say_lacking(fragment, job)
        rounds = self._ledger.state.rounds
        live = {ticket.id for round_ in rounds for ticket in round_.tickets.values() if ticket.is_live}
        view.offers = {ticket: offer for ticket, offer in view.offers.items() if ticket in live}
        if (unreachable := view.peers.unreachable()) is not None:
            self._ledger.record(events.WorkerLeft(*unreachable))
        self.news.set()

    def _reassign_fragment(self, fragment: int, job: Assignment) -> None:
        counted = len(job.raised)
        if job.aggregator and (reason := self._why_lost(fragment, job)):
            try:
                self._lose(fragment, job, reason)
            except StoreError:
                del job.raised[counted:]  # the next check finds these errors again
                raise
        while job.aggregator or self._choose_aggregator(fragment, job):
            self._take_in(fragment, job)
            if job.aggregator:  # else it could not download an update: choose another one
                self._watch(fragment, job)
                return

    def _choose_aggregator(self, fragment: int, job: Assignment) -> bool:
        """Choose an aggregator for a round that has none. Return whether a worker could be chosen."""
        job.aggregator, job.since_s = self._aggregator_of(fragment, job), None
        if job.aggregator:
            self._run.wake()
        return bool(job.aggregator)

    def _aggregator_of(self, fragment: int, job: Assignment) -> str:
        holders, order = self.view.holding(fragment, job.version), self.view.order(fragment, job.version)
        wary = {
            site
            for site in order
            if (lost_at := self._lost_at.get((fragment, site))) is not None and job.version - lost_at <= WARY
        }
        best = aggregator_of(order, holders, job.excluded, {job.before, *wary}, self._settings.swarm.aggregators) or ""
        return "" if best in job.excluded and job.pause_s(self._settings.network.idle_timeout_s) > 0 else best

    def _take_in(self, fragment: int, job: Assignment) -> None:
        """Accept or refuse the updates that the aggregator has collected."""
        view = self.view
        collected = view.peers[job.aggregator].collected
        for ticket in view.available(fragment):
            offer, found = view.offers[ticket], collected.get(ticket)
            if found is None or found.digest != offer.complete.digest:
                continue
            if found.failed:
                if found.source == offer.complete.source:
                    self._could_not_collect(fragment, job, offer, found)
            elif self._store.tickets.get(ticket).state == "open":
                self._decodes = True
                self._judge(ticket, offer, found.norm, found.bad)
            if view.assignments[fragment] is not job or not job.aggregator:  # the round closed, or lost its aggregator
                return

    def _could_not_collect(self, fragment: int, job: Assignment, offer: Offer, found: CollectedUpdate) -> None:
        """Handle a failed attempt of the aggregator to collect an update.

        If the download failed, the site of the update has to offer it again. After `PULLS` failures of this aggregator,
        or one error of the codec, another worker aggregates. If every worker that could aggregate has failed like that,
        the update is refused. But if no update could be decoded yet, the codec is probably wrong: then the run fails
        as soon as it raised an error at enough workers, and for the updates of two sites or of all missing ones.
        """
        site, ticket, state = job.aggregator, found.ticket, self._ledger.state
        job.failures[ticket, site] = PULLS if found.raised else job.failures[ticket, site] + 1
        if job.failures[ticket, site] < PULLS or self._store.tickets.get(ticket).state != "open":
            LOG.info("aggregator %s could not download the update of %s: %s", site, offer.site, found.failed)
            del self.view.offers[ticket]
            return
        tried = {worker for (of, worker), count in job.failures.items() if count >= PULLS and of == ticket}
        others = set(self.view.holding(fragment, job.version)) & set(self.view.order(fragment, job.version))
        if found.raised and not self._decodes:
            job.undecoded.add((site, offer.site))
        workers, sites = {worker for worker, _ in job.undecoded}, {each for _, each in job.undecoded}
        could_not = f"could not {'decode' if found.raised else 'download'}"
        reason = f"it {could_not} the update of {offer.site}: {found.failed}"
        is_codec = found.raised and not self._decodes and len(workers) >= self._enough
        if is_codec and (len(sites) > 1 or {each for each, _ in state.missing(fragment)} <= sites):
            self._fail(_failed_everywhere(state.rounds[fragment].number, workers, f"{site}: {reason}"))
        elif others - tried - {offer.site} or (found.raised and len(tried) < self._enough):
            self._lose(fragment, job, reason)
        elif not found.raised or self._decodes:
            self._judge(ticket, offer, 0.0, f"{site} {could_not} it: {found.failed}")

    def _judge(self, ticket: int, offer: Offer, norm: float, bad: str) -> None:
        try:
            if bad:
                self._admission.refuse(offer.site, ticket, bad)
            self._admission.require_plausible(offer.site, ticket, offer.complete, norm)
            self._admission.accept(self._store.tickets.get(ticket), offer.complete, norm)
        except UpdateRefused:  # the journal has the refusal; the worker gets it with its next request
            del self.view.offers[ticket]

    def _watch(self, fragment: int, job: Assignment) -> None:
        """Measure for how long the aggregator has been busy without a pause."""
        collected = self.view.peers[job.aggregator].collected
        todo = job.closing is not None and self.view.closed(job) is None
        todo = todo or any(ticket not in collected for ticket in self.view.available(fragment))
        if job.since_s is not None:
            job.busy_s = max(job.busy_s, time.monotonic() - job.since_s)
        if not todo:
            job.since_s = None
        elif job.since_s is None:
            job.since_s = time.monotonic()

    def _why_lost(self, fragment: int, job: Assignment) -> str:
        """Return why the aggregator has to be replaced; empty if it can go on."""
        site, peers, now_s = job.aggregator, self.view.peers, time.monotonic()
        idle_s = self._settings.network.idle_timeout_s
        if not peers.is_alive(site):
            return "it no longer takes part"
        peer, others = peers[site], set(self.view.holding(fragment, job.version)) - {site}
        if peer.leaving and others:
            return "it is leaving"
        if failed := self.view.why_not_closed(job):
            return failed
        if (fragment, job.version) not in peer.held:
            return f"it no longer has version {job.version}"
        tickets = self._ledger.state.rounds[fragment].tickets.values()
        accepted = [ticket for ticket in tickets if ticket.state == "accepted"]
        for ticket in accepted:  # an update is lost if the aggregator does not have it, and its site does not offer it
            found = peer.collected.get(ticket.id)
            if (found is None or found.failed) and ticket.id not in self.view.offers:
                return f"the update of {ticket.site} is lost"
        at_work = job.since_s is not None or job.closing is not None
        if at_work and not peers.is_heard(site) and any(map(peers.is_heard, others)):
            return "it sends no more reports"
        if job.since_s is not None and others and (still_s := now_s - max(peer.bytes_s, job.since_s)) > idle_s:
            return f"it neither sent nor received a byte for {still_s:.0f} s"
        longest_s = self._longest_s.get(fragment, 0.0)
        if others and longest_s and not job.excluded and job.busy_s > max(SLOWER * longest_s, idle_s):
            return f"it has been working for {job.busy_s:.1f} s, but no round before took longer than {longest_s:.1f} s"
        return ""

    def _lose(self, fragment: int, job: Assignment, reason: str) -> None:
        # first in the journal: if its disk is full, the aggregator stays, and the next check replaces it
        self._ledger.record(events.AggregatorLost(fragment, reason))
        LOG.warning(
            "%s no longer aggregates round %d: %s. Another worker takes over, and collects the updates again",
            job.aggregator,
            self._ledger.state.rounds[fragment].number,
            reason,
        )
        self._lost_at[fragment, job.aggregator] = job.version
        job.lose(reason)
        self._reopened[fragment] += 1
        self.news.set()

    # -- closing a round

    async def aggregate(self, round_: events.RoundClosed, number: int) -> MadeVersion | None:
        """Let one worker aggregate a closed round and another one check the result. Then return the new version.

        Args:
            round_: the closed round.
            number: number of the round.

        Returns:
            The new version; None if the aggregator was lost and the round is open again.

        Raises:
            Overflow: the result overflows at every worker that could aggregate the round, or `MOST_RAISED` times.
            RunFailed: the code of the run raised an error as often.
            DiskFull: the journal could not be written. Call this method again.
        """
        view, fragment = self.view, round_.fragment
        losses = self._reopened[fragment]  # not `losses` of the assignment, which may be an old one

        def is_frozen() -> bool:  # if the round was opened again, the same tickets may have other updates
            frozen = self._ledger.state.rounds[fragment].frozen == round_.tickets
            return frozen and self._reopened[fragment] == losses

        if not is_frozen():
            return None
        rows = self._store.tickets.get_all(round_.tickets)
        frozen = frozen_round(self._plan, self._store, round_, rows, number)
        self.reassign()
        while is_frozen():
            job = view.assignments[fragment]
            if job.closing != frozen:
                job.closing = frozen
                failpoint("swarm.asked")
                self.news.set()
            closed = view.closed(job)
            if closed is not None:
                self._choose_checker(fragment, job)
                if job.checker and view.has(job.checker, closed):
                    return self._made(frozen, job, closed)
            await self.news.wait(LOOK_S)
        job = view.assignments[fragment]
        if self._has_failed_everywhere(fragment, job):
            overflows = all(is_overflow for _, is_overflow in job.raised)
            raise Overflow(job.lost) if overflows else _failed_everywhere(number, dict(job.raised), job.lost)
        return None

    def _has_failed_everywhere(self, fragment: int, job: Assignment) -> bool:
        """Return whether a round fails at every worker that could aggregate it, or has failed `MOST_RAISED` times.

        While only one of several workers has the base version, a second one is about to get it, and to try.
        """
        raised, could = {site for site, _ in job.raised}, self.view.holding(fragment, job.version)
        is_everywhere = len(raised) >= self._enough and raised.issuperset(could)
        return is_everywhere or len(job.raised) >= MOST_RAISED

    @property
    def _enough(self) -> int:
        """Number of workers at which the code of the run has to raise an error before the run fails."""
        return max(1, min(HOLDERS, len(self.view.peers.alive)))

    def _choose_checker(self, fragment: int, job: Assignment) -> None:
        """Choose the worker that checks the new version.

        Replace a checker that has neither sent nor received a byte for `network.idle_timeout_s`. If every possible
        checker has failed, replace the aggregator.
        """
        order = [site for site in self.view.order(fragment, job.version + 1) if site != job.aggregator]
        if job.checker in order and len(order) > 1:
            still_s = time.monotonic() - max(job.checks_s, self.view.peers[job.checker].bytes_s)
            if still_s > self._settings.network.idle_timeout_s:
                LOG.warning("%s did not get version %d in time; another worker checks it", job.checker, job.version + 1)
                job.unable.add(job.checker)
        able = [site for site in order if site not in job.unable]
        if order and not able:
            self._lose(fragment, job, f"no other worker could download version {job.version + 1} from it")
        elif job.checker not in able and (job.checker or able):
            job.checker, job.checks_s = next(iter(able), ""), time.monotonic()
            self.news.set()

    def _made(self, frozen: FrozenRound, job: Assignment, closed: ReducedRound) -> MadeVersion:
        grad_norm = math.inf if closed.grad_norm is None else closed.grad_norm
        summary = summary_of(frozen, closed.seconds, grad_norm)
        summary = summary.model_copy(update={"aggregator": job.aggregator, "checker": job.checker})
        draft = self._store.versions.begin(closed.fragment, closed.version)
        try:
            assert closed.digest is not None
            parts, state = digests_in(closed.part_digests), digests_in(closed.state_digests)
            written = VersionDigests(digest=closed.digest, part_digests=parts, state_digests=state)
            return MadeVersion.of(self._store, draft, written, frozen, summary)
        except BaseException:
            draft.abandon()
            raise


def _failed_everywhere(number: int, sites: Iterable[str], last: str) -> RunFailed:
    return RunFailed(
        f"Round {number} failed at {', '.join(sorted(sites))}, so no worker can aggregate it; the last was {last}.",
        "Correct this code at the sites, and start the server and the sites again: the run continues with the same "
        "updates.",
    )
