"""Takes in the updates of sites: their parts, the message that an update is complete, and rounds that are sat out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from atoll.aggregation.check_arriving_parts import PartStats
from atoll.errors import Conflict, TicketClosed
from atoll.protocol import messages
from atoll.runtime import failpoint
from atoll.server.coordinator.accept_update import UpdateAdmission
from atoll.server.coordinator.lease_checks import LeaseChecks
from atoll.server.coordinator.ports import RoundPlace
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.update_filters import Filtering
from atoll.store.journal_tables import PartRow, TicketRow
from atoll.store.update_spool import PartWriter
from atoll.tensors.layout import Layout


class UpdateOperations:
    """Carries out the operations of `protocol/openapi.py` on updates. `PartReceiver` receives the bytes of their parts.

    Args:
        run: the run.
        leases: checks of leases and tickets.
        place: where the versions are made.
        admission: accepts or refuses complete updates.
        filtering: the server's filters of updates.

    Attributes:
        filters: the filters of each site.
    """

    def __init__(
        self,
        run: RunCore,
        leases: LeaseChecks,
        place: RoundPlace,
        admission: UpdateAdmission,
        filtering: Filtering,
    ) -> None:
        self._run, self._leases, self._place = run, leases, place
        self._admission, self._filtering, self.filters = admission, filtering, filtering.filters

    def begins(self, site: str, ticket: int, fragment: int) -> None:
        """Note when the first part of an update begins to arrive."""
        self._admission.begins(site, ticket, fragment)

    def record_part(
        self,
        lease: Lease,
        ticket: int,
        part: int,
        stats: PartStats,
        writer: PartWriter | None = None,
        *,
        completes: bool = False,
    ) -> PartRow | None:
        """Record that a part of an update was checked and written to disk. If the check failed, refuse the update.

        Args:
            lease: lease of the site.
            ticket: number of the ticket.
            part: number of the part.
            stats: result of the check.
            writer: writer of the part's bytes.
            completes: whether `submit` follows at once. It then records the part, in the transaction that accepts the
                update; but not if the site has filters, which may take long before.

        Returns:
            The part that `submit` is to record; None: it is recorded.

        Raises:
            WriterCancelled: another request has begun to write the same part in the meantime.
            UpdateRefused: the check failed.
            LeaseLost, Superseded, TicketClosed: as for `LeaseChecks.require_open`.
        """
        self._leases.require_open(lease, ticket)
        if stats.bad is not None:
            self._admission.refuse(lease.site, ticket, stats.bad)
        failpoint("part.received")
        tickets, row = self._run.store.tickets, PartRow(ticket, part, stats.digest, stats.sumsq)
        if completes and not self._filtering.has(lease.site):
            tickets.spool(ticket).require_written(part, writer)
            return row
        tickets.record_part(row, writer)
        return None

    def _ticket_of(self, lease: Lease, ticket: int) -> TicketRow:
        """Return the row of a site's ticket, whatever its state.

        Raises:
            Gone: this run has never issued the ticket.
            TicketClosed: it belongs to another site.
        """
        row = self._run.store.tickets.get(ticket)
        if row.site != lease.site:
            raise TicketClosed(f"Ticket {ticket} was not issued to {lease.site!r}.", "Ask for a ticket.")
        return row

    async def complete(
        self, lease: Lease, ticket: int, message: messages.Complete, last: PartRow | None = None
    ) -> messages.Receipt:
        """Accept an update as `submit` does, and sign its receipt.

        Raises:
            Exception: an error of `submit`.
        """
        receipt, row = await self.submit(lease, ticket, message, last)
        if not receipt.accepted or not row.is_in:
            return receipt
        store = self._run.store
        return receipt.model_copy(update={"receipt": store.receipt_key.receipt_of(store.run_log.run_id, row)})

    async def submit(
        self, lease: Lease, ticket: int, message: messages.Complete, last: PartRow | None = None
    ) -> tuple[messages.Receipt, TicketRow]:
        """Accept an update after all its parts arrived. A repeated request with the same digest gets the same receipt.

        In a swarm, wait until another worker has downloaded the update, for at most `routes.LONG_POLL_S` seconds.

        Args:
            lease: lease of the site.
            ticket: number of the ticket.
            message: what the site says of the update.
            last: the part that `record_part` has left to be recorded; None: all are recorded.

        Returns:
            The receipt, which is not signed, and the ticket with its new state.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            BadRequest: in a swarm, the message lacks the address from which other workers can download the update.
            TicketClosed: the ticket is over or belongs to another site. Or the update was trained from a version that
                differs from the run's version with this number.
            Conflict: parts are missing, or do not match the digest.
            UpdateRefused: the weight, the norm or the number of steps is implausible, a filter failed, or an earlier
                update for this ticket was refused.
        """
        row = self._ticket_of(lease, ticket)
        if row.is_in:
            return receipt_again(row, message.digest), row
        self._leases.require_open(lease, ticket)
        if message.generation != self._run.store.run_log.generation.number:
            raise TicketClosed(
                f"The update for ticket {ticket} was formed with another generation of the algorithm's state.",
                "The server's state was probably restored from a backup. Ask for the next ticket.",
            )
        if message.base_digest not in (None, self._run.store.run_log.version_digest(row.fragment, row.base_version)):
            raise TicketClosed(
                f"The update for ticket {ticket} was trained from a version {row.base_version} that differs "
                f"from the run's version {row.base_version}.",
                "The server's state was probably restored from a backup. Ask for the next ticket.",
            )
        message = self._admission.with_kept_weight(lease.site, message)
        message = self._admission.with_known_metrics(lease.site, message)
        if (receipt := await self._place.deliver(lease, row, message)) is not None:
            return receipt, self._run.store.tickets.get(ticket)
        parts, layout = self._run.store.tickets.whole(row, last), self._run.plan.fragments[row.fragment].update
        digest = _digest(layout, parts)
        if digest != message.digest:
            raise Conflict(
                f"The digest of the update for ticket {ticket} does not match its parts.",
                "Send all parts again.",
            )
        norm = math.sqrt(sum(part.sumsq for part in parts.values()))
        self._admission.require_plausible(lease.site, ticket, message, norm)
        if self._filtering.has(lease.site):
            filtered = replace(row, digest=digest, report=message.report)
            reason = await self._filtering.refusal(filtered, self._run.state.rounds[row.fragment].number)
            if self._run.store.tickets.get(ticket).is_in:  # a repeated request was accepted meanwhile
                return await self.submit(lease, ticket, message)
            self._leases.require_open(lease, ticket)
            if _digest(layout, self._run.store.tickets.whole(row)) != digest:
                raise Conflict(f"A part of the update for ticket {ticket} was replaced.", "Submit the update again.")
            if reason:
                self._admission.refuse(lease.site, ticket, reason, "check the filter at the server.")
        return messages.Receipt(digest=digest), self._admission.accept(row, message, norm, last)

    async def sit_out(self, lease: Lease, ticket: int, message: messages.SitOut) -> None:
        """Record that a site sits out the round of its ticket, so that the round does not wait for it.

        A repeated request changes nothing.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            TicketClosed, UpdateRefused: the ticket is over, has an update, or belongs to another site.
        """
        row = self._ticket_of(lease, ticket)
        if row.state == "sat out":
            return
        self._leases.require_open(lease, ticket)
        message = self._admission.with_known_metrics(lease.site, message)
        self._admission.sit_out(lease.site, ticket, message.metrics)


def receipt_again(row: TicketRow, digest: str) -> messages.Receipt:
    """Return the receipt of an accepted update to a request that is repeated.

    Raises:
        Conflict: the request is for an update with another digest.
    """
    if row.digest != digest:
        raise Conflict(
            f"Ticket {row.ticket} of {row.site} already has the update with digest {str(row.digest)[:12]}, so an "
            f"update with digest {digest[:12]} is not accepted.",
            "Ask for the next ticket: each ticket is for one update.",
        )
    return messages.Receipt(digest=digest)


def _digest(layout: Layout, parts: Mapping[int, PartRow]) -> str:
    return layout.blob_id([parts[part.index].digest for part in layout.parts])
