"""Checks what a request states: a valid lease, and a ticket under which its site may submit an update."""

from __future__ import annotations

from atoll.errors import LeaseLost, Superseded, TicketClosed
from atoll.rounds import events
from atoll.server.coordinator.first_shapes import FirstShapes
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.run_core import RunCore
from atoll.store.tickets import why_closed


class LeaseChecks:
    """Checks leases and tickets.

    Args:
        run: the run.
        shapes: the shapes that the run may take over; while it does, no update is taken.
    """

    def __init__(self, run: RunCore, shapes: FirstShapes) -> None:
        self._run, self._shapes = run, shapes

    def require_lease(self, lease: Lease) -> Lease:
        """Return the lease of a request if it is valid, and record that the site is alive.

        Raises:
            LeaseLost: the process has to join again.
            Superseded: another process has joined under the site's name.
        """
        presence, member = self._run.roster.get(lease.site), self._run.state.members.get(lease.site)
        # after a crash of the server's host, leases of two processes may have the same number, but not the same secret
        if member is not None and lease.number == member.lease and not (presence and lease.opens(presence)):
            reason = f"lease {lease.number} of {lease.site!r} is unknown to this server"
            self.refuse(lease, events.LeaseRefused(lease.site, reason, superseded=True))
        for effect in self._run.ledger.record(events.WorkerSeen(lease.site, lease.number)):
            if isinstance(effect, events.LeaseRefused):
                self.refuse(lease, effect)
        if presence is not None:
            presence.heard, presence.heard_s = True, self._run.clock()
        return lease

    def refuse(self, lease: Lease, effect: events.LeaseRefused) -> None:
        """Raise the error of a lease that is not valid.

        Raises:
            LeaseLost, Superseded: always.
        """
        holder = self._run.roster.get(lease.site)
        if effect.superseded and holder is not None and holder.process and holder.process != lease.process:
            holder.meets(lease.process)
            raise Superseded(
                f"Another process on {holder.host or 'an unnamed host'} has joined as {lease.site!r}, so this "
                "process no longer takes part.",
                "Use a different site name for each worker.",
            )
        reason = f"{effect.reason[:1].upper()}{effect.reason[1:]}."
        raise LeaseLost(reason, "Join again. The site then gets its open ticket again.")

    def require_open(self, lease: Lease, ticket: int) -> None:
        """Raise an error unless a site may still submit an update under this ticket.

        Raises:
            LeaseLost, Superseded: the lease is not valid.
            TicketClosed, UpdateRefused: the ticket is no longer open.
            Busy: the run takes over other shapes, and its tickets are about to end.
        """
        self._shapes.require_settled()
        refusal = self._run.state.may_submit(lease.site, lease.number, ticket)
        if isinstance(refusal, events.LeaseRefused):
            self.refuse(lease, refusal)
        elif refusal is not None:
            row = self._run.store.tickets.get(
                ticket
            )  # from the journal, because the round machine forgets ended tickets
            if row.state == "refused":
                raise why_closed(row)
            text = refusal if row.reason in refusal else f"Ticket {ticket} is over: {row.reason}."
            raise TicketClosed(text, "Ask for the next ticket.")
