"""A site in the process of its server: it joins, gets tickets, and submits updates by calls, without a network.

A simulation has one such site for each simulated site. All methods run on the server's event loop. A site reads its
version of the global model from the server's own file, and writes its update into the file in which the server stores
it (spool).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from atoll.aggregation.check_arriving_parts import Inspection, PartChecker, PartStats
from atoll.config.round_changes import CODEC
from atoll.errors import Busy, ConfigError, LeaseLost, PartCorrupt, ServerFailed, Superseded, UsageError
from atoll.protocol import messages, routes
from atoll.protocol.values import Next, next_of
from atoll.rounds import events
from atoll.server.coordinator.accept_update import outcome_of
from atoll.server.coordinator.joining import counted_of
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.served_run import ServedRun
from atoll.store.file_slots import WRITER
from atoll.store.journal_tables import VersionRow
from atoll.store.update_spool import Spool
from atoll.store.versions import Pin, Versions
from atoll.system_calls import read_into

T = TypeVar("T")
HOST = "in the server's process"


class VersionsInUse:
    """The versions of the global model that local sites train from. The store may not delete a version in use.

    Args:
        versions: the store of the server's versions.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._users: dict[Pin[VersionRow], int] = {}

    def take(self, fragment: int, version: int) -> Pin[VersionRow]:
        """Protect a version for one more site, and return the version.

        If no site has used this version so far, first release the versions that no site uses any more.

        Raises:
            Gone: the server no longer has the version.
        """
        named = (fragment, version)
        base = next((pin for pin in self._users if (pin.row.fragment, pin.row.version) == named), None)
        if base is None:
            for idle in [pin for pin, count in self._users.items() if not count]:
                del self._users[idle]
                idle.release()
            base = self._versions.pin(fragment, version)
            self._users[base] = 0
        self._users[base] += 1
        return base

    def give_back(self, base: Pin[VersionRow]) -> None:
        """Record that a site no longer trains from the version."""
        self._users[base] -= 1

    def release(self) -> None:
        """Release all versions, so that the store may delete them. Call this when no site trains any more."""
        for base in self._users:
            base.release()
        self._users.clear()


@dataclass(eq=False)
class LocalRound:
    """A site's part in one round of one fragment: its ticket, and the files to read from and to write to.

    Attributes:
        ticket: the site's ticket.
        base: the version to train from, protected from deletion. `base.fd` is the descriptor of its file.
        spool: the file for the update. `spool.fd` is its descriptor, which the server's store closes.
        release: lets the store delete the version and reuse the spool. Call it once, when nothing uses them any more.
    """

    ticket: messages.Ticket
    base: Pin[VersionRow]
    spool: Spool
    release: Callable[[], None]


class LocalSite:
    """A site in the process of its server. It takes part in the run from `join` to `leave`.

    It stays alive by what it calls: with a heartbeat timeout, call `seen` while it trains.

    Args:
        served: the run; not a swarm, where sites need a network.
        site: name of the site.
        versions: the versions that the local sites of this run train from.
        host: what the status shows as the site's host.
    """

    def __init__(self, served: ServedRun, site: str, versions: VersionsInUse, host: str) -> None:
        self.site, self._served, self._run, self._versions, self._host = site, served, served.run, versions, host
        self._joined: Lease | None = None

    @property
    def lease(self) -> Lease:
        """The lease with which the site has joined.

        Raises:
            UsageError: the site has not joined.
        """
        if self._joined is None:
            raise UsageError(f"Site {self.site} has not joined the run.", "Call join() first.")
        return self._joined

    async def join(self, process: str) -> messages.Joined:
        """Take part in the run. An earlier lease of the site ends.

        Args:
            process: an identifier of this participation, which differs from those of the site's earlier ones.

        Raises:
            VersionSkew, ServerLost, SchemaMismatch, ConfigError: as for `SiteOperations.join`.
        """
        message = messages.Join(protocol=routes.PROTOCOL, site=self.site, host=self._host, process=process)
        joined = await self._served.sites.join(message)
        self._joined = Lease.parse(joined.lease)
        return joined

    @property
    def has_joined(self) -> bool:
        """Whether `join` was called."""
        return self._joined is not None

    def seen(self) -> None:
        """Record that the site is alive.

        Raises:
            LeaseLost: the site has to join again.
            Superseded: the site has joined once more meanwhile.
        """
        self._served.leases.require_lease(self.lease)

    async def stay_alive(self, every_s: float) -> None:
        """Call `seen` every `every_s` seconds until the lease has ended; 0: return at once."""
        with contextlib.suppress(LeaseLost, Superseded):
            while every_s:
                self.seen()
                await asyncio.sleep(every_s)

    # -- tickets

    def open_round(self, state: messages.SiteState | None = None, fragment: int = 0) -> LocalRound | None:
        """Return the site's part in a fragment's open round; None if there is no ticket for this site now.

        Args:
            state: what the site says of the state that the algorithm keeps at it; None: it keeps none.
            fragment: the fragment.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            Gone: there is no such fragment.
        """
        if state is not None:
            self._served.tickets.begin_anew_if_needed(self.lease, state)
        for effect in self._run.ledger.record(events.TicketRequested(self.site, self.lease.number, fragment)):
            if isinstance(effect, events.LeaseRefused):
                self.seen()  # raises
            if isinstance(effect, events.TicketIssued):
                base = self._versions.take(fragment, effect.base_version)
                ticket = self._served.tickets.ticket_message(
                    self.site, effect.ticket, fragment, effect.base_version, base.row.digest
                )
                return self._with_files(ticket, base)
        return None

    async def next_ticket(self, wait_s: float, state: messages.SiteState | None = None, fragment: int = 0) -> Next:
        """Wait for a ticket, for at most `wait_s` seconds, and return it, or why there is none.

        Args:
            wait_s: seconds to wait, at most 20.
            state: as for `open_round`.
            fragment: the fragment.

        Raises:
            LeaseLost, Superseded, Gone, Busy, ConfigError: as for `TicketOperations.request_ticket`.
        """
        told = {} if state is None else dict(state)
        request = messages.TicketRequest(**told, fragment=fragment, wait_s=wait_s)
        self.seen()
        return next_of(await self._served.tickets.request_ticket(self.lease, request), fragment)

    def files_of(self, ticket: messages.Ticket) -> LocalRound:
        """Return the site's part in the round of a ticket that `next_ticket` returned.

        Raises:
            Gone: the server no longer has the version.
            DiskFull: the disk has too little space for an update.
            TicketClosed, UpdateRefused: the ticket is over.
        """
        self._run.require_space()
        return self._with_files(ticket, self._versions.take(ticket.fragment, ticket.base_version))

    def newest(self, fragment: int = 0) -> Pin[VersionRow]:
        """Protect the newest version of a fragment, and return it. Release it after reading."""
        return self._run.store.versions.pin(fragment, self._run.store.versions.head(fragment).version)

    def _with_files(self, ticket: messages.Ticket, base: Pin[VersionRow]) -> LocalRound:
        try:
            spool = self._run.store.tickets.spool(ticket.id)
            self._run.store.tickets.name_spool(spool)
        except BaseException:
            self._versions.give_back(base)
            raise
        spool.pool.hold(spool.slot, WRITER)

        def release() -> None:
            spool.pool.drop(spool.slot, WRITER)
            self._versions.give_back(base)

        return LocalRound(ticket, base, spool, release)

    # -- what the run knows of the site's earlier updates

    @property
    def has_counted(self) -> bool:
        """Whether an earlier update of this site has been accepted in the run."""
        known, ticket = self._run.roster.get(self.site), self._run.store.tickets.last_of(self.site)
        return (known is not None and known.rounds > 0) or (ticket is not None and ticket.state == "accepted")

    def counted(self) -> messages.Counted:
        """Return the site's last counted update, which the state that the algorithm keeps at it must include."""
        return counted_of(self.site, self._run.store)

    def outcomes(self, tickets: Iterable[int]) -> tuple[messages.Outcome, ...]:
        """Return the states of tickets, in order of their numbers.

        A ticket that the run does not know is left out. This happens if the state directory was restored from a backup,
        and the site's folder was not.
        """
        store = self._run.store
        rows = (row for ticket in sorted(tickets) for row in store.tickets.select("ticket = ?", ticket))
        return tuple(outcome_of(store, row) for row in rows)

    # -- updates

    async def submit(
        self, ticket: messages.Ticket, message: messages.Complete, stats: Sequence[PartStats]
    ) -> messages.Receipt:
        """Submit the update that is in the spool. The receipt is not signed: it does not leave the server's process.

        Args:
            ticket: its ticket.
            message: what the site reports of the update, with the update's digest.
            stats: the checks of all its parts, in order.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            TicketClosed: the ticket is over, or the version that the update was trained from is not the run's.
            Conflict: the digest is not that of the parts.
            UpdateRefused: the update contains NaN or Inf, or is refused for another reason.
        """
        last = None
        for part, each in enumerate(stats):
            completes = part == len(stats) - 1
            last = self._served.updates.record_part(self.lease, ticket.id, part, each, completes=completes)
        receipt, _ = await self._served.updates.submit(self.lease, ticket.id, message, last)
        return receipt

    async def submit_file(self, ticket: messages.Ticket, report: messages.Report, fd: int) -> messages.Receipt:
        """Submit an update that is in another file: copy it into the spool, and check it.

        Args:
            ticket: its ticket.
            report: what the site reports of the update.
            fd: descriptor of the file, which has the bytes of the update from its beginning.

        Raises:
            PartCorrupt: the file is too short.
            Exception: an error of `submit`, or `DiskFull`.
        """
        run, loop = self._run, asyncio.get_running_loop()
        self._served.leases.require_lease(self.lease)
        self._served.leases.require_open(self.lease, ticket.id)
        run.require_space()
        spool, layout = run.store.tickets.spool(ticket.id), run.plan.fragments[ticket.fragment].update
        digests = []
        for part in layout.parts:
            writer = spool.begin_part(part.index)
            try:
                arriving = PartChecker(self._inspections[ticket.fragment], part, writer.write, spool.fd)
                await loop.run_in_executor(run.io, arriving.take, _Reader(fd, part.start).fill)
                if not arriving.complete:
                    raise PartCorrupt(
                        f"The file with the update of {self.site} has fewer than {layout.nbytes} bytes.",
                        "Write the whole update before you submit it.",
                    )
                self._served.updates.record_part(self.lease, ticket.id, part.index, arriving.stats, writer)
                digests.append(arriving.digest)
            finally:
                writer.abandon()
        message = messages.Complete(
            **dict(report.report),
            digest=layout.blob_id(digests),
            base_digest=ticket.base.digest,
            generation=ticket.generation,
        )
        receipt, _ = await self._served.updates.submit(self.lease, ticket.id, message)
        return receipt

    @cached_property
    def _inspections(self) -> list[Inspection]:
        return [Inspection(fragment.update, self._run.plan.codecs) for fragment in self._run.plan.fragments]

    async def sit_out(self, ticket: messages.Ticket, message: messages.SitOut) -> None:
        """Sit out the round of a ticket.

        Raises:
            LeaseLost, Superseded, TicketClosed, UpdateRefused: as for `UpdateOperations.sit_out`.
        """
        await self._served.updates.sit_out(self.lease, ticket.id, message)

    async def leave(self, error: str | None = None) -> None:
        """End the participation. `error` says why training failed; None: it ended well."""
        await self._served.sites.leave(self.lease, messages.Leave(error=error))


class SiteCalls:
    """Calls of a local site from other threads than the server's.

    Args:
        served: the run.
        site: the site; it has not joined yet.
        wait_for: runs a coroutine on the server's event loop, and returns its result.
        ended: the error of calls after the end of the server.
    """

    def __init__(
        self,
        served: ServedRun,
        site: LocalSite,
        wait_for: Callable[[Callable[[], Coroutine[Any, Any, Any]], UsageError], Any],
        ended: UsageError,
    ) -> None:
        self.site = site.site
        self._served, self._on_loop, self._wait_for, self._ended = served, site, wait_for, ended
        self._staying: asyncio.Task[None] | None = None

    def __call__(self, work: Callable[[LocalSite], Coroutine[Any, Any, T]]) -> T:
        """Run `work(site)` on the server's event loop, and return its result.

        Raises:
            UsageError: the server has ended, or serves this run no more.
            ServerFailed: the run has failed for good.
            Exception: an error of `work`.
        """

        async def answer() -> T:
            self._require_run()
            try:
                return await work(self._on_loop)
            except Busy:  # the server may be ending, or have found an error that ends the run
                self._require_run()
                raise

        found: T = self._wait_for(answer, self._ended)
        return found

    def _require_run(self) -> None:
        lease = self._on_loop.lease if self._on_loop.has_joined else None
        if (failed := self._served.failure.failure_for(lease)) is not None:
            raise failed
        if self._served.run.is_ending:
            raise self._ended

    def describe(self) -> tuple[messages.RunInfo, messages.SchemaMessage]:
        """Return the description of the run and of its model, as real workers get them.

        Raises:
            ConfigError: a site in the server's process cannot take part in such a run.
        """

        async def answer(_: LocalSite) -> tuple[messages.RunInfo, messages.SchemaMessage]:
            return await self._served.sites.get_run(), await self._served.sites.get_schema()

        info, schema = self(answer)
        whole = not (info.streams or info.sync_every or info.ranks > 1 or info.placement == "swarm")
        changes = any(CODEC in each.values for each in self._served.run.settings.changes)
        if not whole or info.sends_tasks or changes:
            raise ConfigError(
                f"Site {self.site} cannot take part in the run {info.name!r} inside the server's process: only "
                "synchronous and asynchronous rounds of whole models with one codec can, without tasks, ranks and "
                "swarms.",
                "Join by the server's address: atoll.join(server.url, site=...).",
            )
        return info, schema

    def join(self, process: str) -> None:
        """Join, and stay alive until `leave`: the site lives as long as the server's process.

        Raises:
            Exception: an error of `LocalSite.join`.
        """

        async def answer(site: LocalSite) -> None:
            await site.join(process)
            run = self._served.run
            self._staying = run.spawn(site.stay_alive(run.settings.network.heartbeat_interval_s))

        self(answer)

    def leave(self, error: str | None = None) -> None:
        """Leave the run. `error` says why training failed; None: it ended well. Without effect after the server's end.

        Args:
            error: as for `LocalSite.leave`.
        """

        async def answer(site: LocalSite) -> None:
            if self._staying is not None:
                self._staying.cancel()
            await site.leave(error)

        with contextlib.suppress(UsageError, ServerFailed, LeaseLost):
            self(answer)


class _Reader:
    """Reads a file from an offset on.

    Args:
        fd: descriptor of the file.
        offset: where to begin.
    """

    def __init__(self, fd: int, offset: int) -> None:
        self._fd, self._offset = fd, offset

    def fill(self, memory: memoryview) -> int:
        """Copy the next bytes to the start of `memory`, and return their number; 0 at the end of the file."""
        count = read_into(self._fd, [memory], self._offset)
        self._offset += count
        return count
