"""What the server knows about a swarm's workers: their addresses, the peers that they reach, the versions they have."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from atoll.errors import BadRequest, ConfigError, UsageError
from atoll.protocol import messages
from atoll.protocol.swarm_messages import MOST_PEERS, CollectedUpdate, Held, PeerReport, PeerWork, ReducedRound
from atoll.rounds.leases import Member
from atoll.tensors.reference import TensorRef

_WHERE = (
    "Set ATOLL_PEER_HOST, ATOLL_PEER_PORT and ATOLL_PEER_NAME at this worker, and with TLS ATOLL_TLS_CA at the server, "
    "too; see docs/swarm.md."
)
CHECKS = 4
"""Number of addresses that are checked at the same time."""
EVICT_AFTER_S = 10.0
"""Seconds after which the server evicts one of two workers, if one cannot reach the other.

If the unreached worker is restarted, the time starts again.
"""


@dataclass
class Peer:
    """The server's record of one worker, from the worker's newest report. Times are those of `time.monotonic`.

    Attributes:
        address: address for other workers.
        process: id of the worker's process.
        number: number of the newest report; -1 before the first.
        sent_stamp: checksum of the work that the server gave to the worker last; None if it gave none yet.
        moved: number of bytes that the worker has sent and received for the swarm.
        bytes_s: time when `moved` last changed.
        heard_s: time of the newest report.
        until_s: time after which the next report is overdue.
        leaving: whether the worker wants to leave the run.
        held: the versions that the worker has: (fragment, version) → the worker's report about the version.
        collected: ticket → result of the attempt to download its update.
        closed: results of rounds that the worker has aggregated.
        reached: addresses of other workers to which this worker has connected.
        unreached: address of another worker → reason why this worker could not connect to it.
        tried_s: unreached address → time when the failure was first reported.
    """

    address: str
    process: str
    number: int = -1
    sent_stamp: int | None = None
    moved: int = 0
    bytes_s: float = 0.0
    heard_s: float = -math.inf
    until_s: float = math.inf
    leaving: bool = False
    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    collected: dict[int, CollectedUpdate] = field(default_factory=dict)
    closed: list[ReducedRound] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    unreached: dict[str, str] = field(default_factory=dict)
    tried_s: dict[str, float] = field(default_factory=dict)

    def require_own(self, site: str, *sources: str | None) -> None:
        """Raise an error unless all references have this worker's own address, which other workers use.

        Args:
            site: site of this worker, for the message.
            sources: references as text; None values are skipped.

        Raises:
            BadRequest: a reference is invalid or has another address.
        """
        for text in sources:
            try:
                elsewhere = text is not None and TensorRef.parse(text).server != self.address
            except UsageError:
                elsewhere = True
            if elsewhere:
                raise BadRequest(
                    f"A reference that {site} sent does not point to {self.address}, which is {site}'s own address.",
                    f"Use the same Atoll version at {site} and at the server.",
                )

    def take(self, report: PeerReport, idle_timeout_s: float) -> bool:
        """Update the record from a report. If a newer report has come before, change nothing and return False.

        Args:
            report: the report.
            idle_timeout_s: the next report is overdue after `report.wait_s + idle_timeout_s` seconds.
        """
        if report.number <= self.number:
            return False
        now_s = time.monotonic()
        self.heard_s = now_s
        self.until_s = now_s + report.wait_s + idle_timeout_s
        if report.moved != self.moved:  # reports alone are no progress: a worker with a full disk sends them, too
            self.moved, self.bytes_s = report.moved, now_s
        self.number, self.leaving = report.number, report.leaving
        before_held, before_closed = self.held, self.closed
        self.held = {(each.fragment, each.version): each for each in report.held}
        self.closed = list(report.closed)
        if self.sent_stamp is not None and report.seen != self.sent_stamp:  # sent before the worker got the newest work
            self.held = {key: each for key, each in self.held.items() if before_held.get(key) == each}
            self.closed = [each for each in self.closed if each in before_closed]
        self.collected = {each.ticket: each for each in report.collected}
        self.reached = set(report.reached)
        self.unreached = {each.address: each.why for each in report.unreached}
        self.tried_s = {address: self.tried_s.get(address, now_s) for address in self.unreached}
        return True

    def answered(self, work: PeerWork) -> None:
        """Record the work that is sent to the worker.

        The worker drops versions and results that the work does not list, so remove them from the record.
        """
        self.sent_stamp = work.stamp
        rounds = {(each.fragment, each.version, *(share.ticket for share in each.updates)) for each in work.close}
        self.closed = [each for each in self.closed if (each.fragment, each.version, *each.tickets) in rounds]
        still_held = {(hold.fragment, hold.version, hold.digest) for hold in work.hold}
        still_held |= {(each.fragment, each.version, each.digest or "") for each in self.closed}
        self.held = {key: each for key, each in self.held.items() if (*key, each.digest) in still_held}


class Peers(dict[str, Peer]):
    """A mapping site → record of its worker, with methods about all workers of a swarm.

    Args:
        members: function that returns the members of the run.
        why_unreachable: function that connects to the address in a reference of a site, and returns why the process
            that made the reference does not answer there; an empty text if it does.
    """

    def __init__(
        self, members: Callable[[], Mapping[str, Member]], why_unreachable: Callable[[TensorRef, str], str]
    ) -> None:
        super().__init__()
        self._members, self._why_unreachable = members, why_unreachable
        self._checks = ThreadPoolExecutor(CHECKS, thread_name_prefix="atoll-peer-check")
        self._evicted: dict[str, tuple[str, str]] = {}  # evicted site → its process, and the reason

    async def join(self, message: messages.Join) -> None:
        """Register a worker that joins, after a check of its address.

        Raises:
            ConfigError: the worker gives no address or does not answer there, or this process was evicted as
                unreachable.
        """
        if message.peer is None:
            raise ConfigError(
                f"The run is a swarm, but worker {message.site} sends no address at which other workers can reach it.",
                "Use the same Atoll version on both sides.",
            )
        process, why = self._evicted.get(message.site, ("", ""))
        if why and process == message.process:
            raise ConfigError(why, _WHERE)
        await self.known(message.site, message.peer, message.process)
        self._evicted.pop(message.site, None)

    async def known(self, site: str, proof: str, process: str) -> Peer:
        """Return the record of a site's worker. For a new process, check its address and begin a new record.

        The other workers get the address only after the process that joins has answered there.

        Args:
            site: the site.
            proof: reference to an object that the worker serves at its address.
            process: id of the worker's process.

        Raises:
            BadRequest: `proof` is not a reference.
            ConfigError: the worker does not answer at its address.
        """
        peer = self.get(site)
        if peer is not None and peer.process == process:
            return peer
        try:
            ref = TensorRef.parse(proof)
        except UsageError:
            raise BadRequest(
                f"Worker {site} names no address at which other workers can reach it.",
                f"Use the same Atoll version at {site} and at the server.",
            ) from None
        if why := await asyncio.get_running_loop().run_in_executor(self._checks, self._why_unreachable, ref, site):
            raise ConfigError(
                f"The server cannot reach {site} at {ref.server} ({why}), but in a swarm the server checks the address "
                f"of each worker before it tells the others. {site} cannot take part.",
                _WHERE,
            )
        return self.add(site, ref.server, process)

    def add(self, site: str, address: str, process: str) -> Peer:
        """Begin a new record of a site's worker, at an address that was checked."""
        peer = self[site] = Peer(address, process)
        for other in self.values():
            other.reached.discard(address)
            other.tried_s.pop(address, None)
        return peer

    def others(self, site: str) -> list[str]:
        """Return all other sites with a live worker."""
        return [other for other in self.alive if other != site][:MOST_PEERS]

    @property
    def alive(self) -> list[str]:
        """Sites of the workers that take part, sorted."""
        members = self._members()
        return sorted(site for site in self if site in members and members[site].alive)

    def is_alive(self, site: str) -> bool:
        """Return whether a site takes part and has a record here."""
        member = self._members().get(site)
        return member is not None and member.alive and site in self

    def is_heard(self, site: str) -> bool:
        """Return whether a site takes part and its worker's next report is not overdue."""
        return self.is_alive(site) and time.monotonic() <= self[site].until_s

    def strangers_of(self, site: str) -> list[str]:
        """Return the live sites that this site has not reached yet, or that have not reached this site.

        If this site has no record here, return all live sites.
        """
        if site not in self:
            return self.alive
        own = self[site]
        return [
            other
            for other in self.alive
            if other != site and not (self[other].address in own.reached and own.address in self[other].reached)
        ]

    def to_probe(self, site: str) -> list[str]:
        """Return the addresses of live workers that a site has not reached yet."""
        return [
            self[other].address
            for other in self.alive
            if other != site and self[other].address not in self[site].reached
        ][:MOST_PEERS]

    def holding(self, fragment: int, version: int, digest: str | None) -> dict[str, Held]:
        """Return site → its report about a version, for the live workers that have this version.

        The order is: first workers that stay, then workers that want to leave, last workers with an overdue report.

        Args:
            fragment: index of the fragment.
            version: number of the version.
            digest: digest of the version. A version with the same number and another digest is another version.
        """
        alive = sorted(self.alive, key=lambda site: (not self.is_heard(site), self[site].leaving, site))
        found = {site: self[site].held.get((fragment, version)) for site in alive}
        return {site: held for site, held in found.items() if held is not None and held.digest == digest}

    def unreachable(self) -> tuple[str, int, str] | None:
        """Return the worker to evict because some workers cannot reach each other.

        Among the pairs of workers that cannot reach each other, this is the worker that is in the most pairs; in a tie,
        the one that joined last. A pair counts only if the failure is older than `EVICT_AFTER_S` seconds, and if the
        unreached worker has reported since then: if it has not, it may be dead, which missing heartbeats will show.

        Returns:
            The site, the number of its lease, and the reason; None if no pair counts.
        """
        site_at, now_s = {self[site].address: site for site in self.alive}, time.monotonic()
        pairs = [
            (site, site_at[address], why)
            for site in site_at.values()
            for address, why in self[site].unreached.items()
            if address in site_at
            and self[site_at[address]].heard_s > (tried_s := self[site].tried_s.get(address, math.inf))
            and now_s - tried_s >= EVICT_AFTER_S
        ]
        if not pairs:
            return None
        members = self._members()
        worst = max(site_at.values(), key=lambda each: (sum(each in pair[:2] for pair in pairs), members[each].lease))
        one, other, why = next(pair for pair in pairs if worst in pair[:2])
        reason = (
            f"{one} cannot reach {other} at {self[other].address} ({why}), but in a swarm all workers must "
            f"reach each other. {worst} cannot take part"
        )
        self._evicted[worst] = (self[worst].process, f"{reason}.")
        return worst, members[worst].lease, reason
