"""Tickets and what is submitted under them. One ticket, one update, accepted by one statement, counted at most once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from atoll.errors import AtollError, BadRequest, Conflict, Gone, StoreError, TicketClosed, UpdateRefused
from atoll.runtime import failpoint
from atoll.store import audit_log
from atoll.store.file_slots import JOURNAL, SPOOL, WRITER, Slot
from atoll.store.journal_tables import PartRow, TicketRow, TicketState
from atoll.store.run_log import Members
from atoll.store.update_spool import PartWriter, Spool

COLUMNS = (
    "ticket, site, fragment, base_version, state, reason, slot, digest, weight, steps, metrics_json, norm, version, "
    "bytes, accepted_order"
)
_PART = "ticket, part, digest, sumsq"
_NAMES = tuple(COLUMNS.split(", "))


class Tickets(Members):
    """Part of `Store`."""

    def issue_ticket(self, ticket: int, site: str, fragment: int, base_version: int) -> TicketRow:
        """Give `site` the right to one update.

        Raises:
            StoreError: the number is taken, or the site has a ticket of that round that is neither refused nor expired.
        """
        with self.transaction():
            self.journal.execute(
                "INSERT INTO tickets (ticket, site, fragment, base_version, state) VALUES (?, ?, ?, ?, 'open')",
                ticket,
                site,
                fragment,
                base_version,
            )
            row = self._known_tickets()[ticket] = TicketRow(ticket, site, fragment, base_version, "open")
        return row

    def ticket(self, ticket: int) -> TicketRow:
        """A ticket, whatever became of it.

        Raises:
            Gone: no such ticket was ever issued by this run.
        """
        with self.lock:
            tickets = self._known_tickets()
            if (known := tickets.get(ticket)) is not None:
                return known
            found = self.journal.row(f"SELECT {COLUMNS} FROM tickets WHERE ticket = ?", ticket)
            if found is None:
                raise Gone(f"The run has no ticket {ticket}.", "Ask for a new one.")
            row = to_ticket(found)
            if row.is_live:
                tickets[ticket] = row
            return row

    def _known_tickets(self) -> dict[int, TicketRow]:
        """Those that are live, as the journal has them; under the lock."""
        if self.live_as_of != self.journal.undone:
            self.live_tickets.clear()
            self.live_as_of = self.journal.undone
        return self.live_tickets

    def change_tickets(self, sql: str, tickets: Sequence[int], *values: Any) -> None:
        """Change rows of the journal's table inside a transaction: the `?`s of `sql` are `values`, then the ticket."""
        for ticket in tickets:
            self.live_tickets.pop(ticket, None)
        self.journal.execute_many(sql, [(*values, ticket) for ticket in tickets])

    def newest_bases(self, fragment: int = 0) -> dict[str, int]:
        """Site → the version that its newest ticket is for."""
        return dict(
            self.journal.rows(
                "SELECT site, base_version FROM tickets WHERE ticket IN "
                "(SELECT max(ticket) FROM tickets WHERE fragment = ? GROUP BY site)",
                fragment,
            )
        )

    def last_ticket(self, site: str, fragment: int = 0) -> TicketRow | None:
        """The newest ticket of a site."""
        row = self.journal.row(
            f"SELECT {COLUMNS} FROM tickets WHERE site = ? AND fragment = ? ORDER BY ticket DESC LIMIT 1",
            site,
            fragment,
        )
        return to_ticket(row) if row else None

    def last_counted(self, site: str) -> TicketRow | None:
        """The newest ticket of a site whose update counts; of a run of one fragment."""
        row = self.journal.row(
            f"SELECT {COLUMNS} FROM tickets WHERE site = ? AND fragment = 0 AND state = 'counted' "
            "ORDER BY ticket DESC LIMIT 1",
            site,
        )
        return to_ticket(row) if row else None

    def tickets(self, fragment: int, base_version: int) -> tuple[TicketRow, ...]:
        """Every ticket of a round, by number."""
        found = self.journal.rows(
            f"SELECT {COLUMNS} FROM tickets WHERE fragment = ? AND base_version = ? ORDER BY ticket",
            fragment,
            base_version,
        )
        return tuple(to_ticket(row) for row in found)

    def spool(self, ticket: int) -> Spool:
        """The spool of an open or accepted ticket; a slot is found for it when it is first asked for.

        Raises:
            Gone: there is no such ticket.
            TicketClosed: it is counted or expired. UpdateRefused: it is refused.
            DiskFull: no space for its slot.
        """
        with self.lock:
            if ticket in self.spools:
                return self.spools[ticket]
            row = self.require_live(ticket)
            if row.slot is not None:
                return self._open_spool(row, self.pool(SPOOL, row.fragment)[row.slot])
        pool = self.pool(SPOOL, row.fragment)
        slot = pool.take(WRITER)  # a new file may take its time, so without the lock
        try:
            with self.transaction():
                row = self.require_live(ticket)
                if row.slot is None:
                    self.change_tickets("UPDATE tickets SET slot = ? WHERE ticket = ?", [ticket], slot.number)
                    row = self._known_tickets()[ticket] = replace(row, slot=slot.number)
                    pool.hold(slot, JOURNAL)
                    self.journal.after_rollback(lambda: self._forget_spool(ticket, slot))
                    return self._open_spool(row, slot)
                return self.spools[ticket]
        finally:
            pool.drop(slot, WRITER)

    def _open_spool(self, row: TicketRow, slot: Slot) -> Spool:
        spool = Spool(
            row.ticket,
            self.pool(SPOOL, row.fragment),
            slot,
            self.shapes_of(row.fragment).update_parts,
            forget=self._forget_part,
            recorded=self.parts,
            sync=(lambda: self.sync(slot.fd, str(slot.path))) if self.durability == "power" else None,
        )
        if row.state == "accepted":
            spool.close(why_closed(row))
        self.spools[row.ticket] = spool
        return spool

    def _forget_spool(self, ticket: int, slot: Slot) -> None:
        spool = self.spools.pop(ticket, None)
        if spool:
            spool.close(TicketClosed(f"Ticket {ticket} was undone."))
            spool.pool.drop(slot, JOURNAL)

    def _forget_part(self, ticket: int, part: int) -> None:
        if self.journal.row("SELECT 1 FROM parts WHERE ticket = ? AND part = ?", ticket, part):
            with self.transaction():
                self.journal.execute("DELETE FROM parts WHERE ticket = ? AND part = ?", ticket, part)

    def parts(self, ticket: int) -> dict[int, PartRow]:
        """The recorded parts of a ticket, by number."""
        found = self.journal.rows(f"SELECT {_PART} FROM parts WHERE ticket = ? ORDER BY part", ticket)
        return {row[1]: PartRow(*row) for row in found}

    def record_part(
        self, ticket: int, part: int, digest: bytes, sumsq: float, writer: PartWriter | None = None
    ) -> None:
        """A part is on disk with these bytes.

        Args:
            digest: BLAKE3 of the bytes that `writer` wrote, 32 bytes.
            sumsq: sum of squares of what it holds; finite.
            writer: who wrote them; nothing is recorded where another has begun the part since.

        Raises:
            TicketClosed, UpdateRefused: the ticket is no longer open.
            WriterCancelled: the bytes are being written again.
        """
        with self.transaction():
            row = self.require_live(ticket)
            if row.state != "open":
                raise why_closed(row)
            if ticket in self.spools:
                self.spools[ticket].require_written(part, writer)
            self.journal.execute(
                f"INSERT OR REPLACE INTO parts ({_PART}) VALUES (?, ?, ?, ?)", ticket, part, digest, sumsq
            )
            self.journal.after_commit(lambda: failpoint("part.recorded"))

    def accept(
        self, ticket: int, digest: str, weight: float, steps: int, metrics: Mapping[str, float], norm: float
    ) -> TicketRow:
        """Take the update: from here on it counts. The same digest again gives the same row.

        Raises:
            Conflict: an update of other bytes was accepted under this ticket.
            TicketClosed, UpdateRefused: the ticket has expired, or was refused; the reason is in the message.
            BadRequest: parts are missing; they are named.
            SyncFailed: fsync failed; the server must end.
        """
        if self.durability == "power" and (row := self.ticket(ticket)).state == "open":
            self._require_parts(row)
            spool = self.spool(ticket)
            self.sync(spool.fd, str(spool.slot.path))
            self.sync_folder(spool.slot.path.parent)  # the file may be new
        with self.transaction():
            row = self.ticket(ticket)
            if row.is_in and row.digest == digest:
                return row
            if row.is_in:
                raise Conflict(
                    f"Ticket {ticket} of {row.site} holds the update {str(row.digest)[:12]}, not {digest[:12]}.",
                    "One ticket takes one update; ask for the next ticket.",
                )
            if row.state != "open":
                raise why_closed(row)
            self._require_parts(row)
            spool = self.spool(ticket)  # in a swarm it has none yet
            failpoint("accept.before")
            self.change_tickets(
                "UPDATE tickets SET state = 'accepted', digest = ?, weight = ?, steps = ?, metrics_json = ?, norm = ?, "
                "bytes = ?, accepted_order = 1 + (SELECT coalesce(max(accepted_order), 0) FROM tickets "
                "WHERE accepted_order > 0) WHERE state = 'open' AND ticket = ?",
                [ticket],
                digest,
                weight,
                steps,
                json.dumps(dict(metrics)),
                norm,
                self.shapes_of(row.fragment).update_bytes,
            )
            self.journal.count("bytes", self.shapes_of(row.fragment).update_bytes)
            audit_log.append(
                self.journal,
                "accepted",
                ticket=ticket,
                site=row.site,
                fragment=row.fragment,
                base_version=row.base_version,
                digest=digest,
                weight=weight,
                steps=steps,
                norm=norm,
            )
            accepted = self.ticket(ticket)
            self.journal.after_commit(lambda: spool.close(why_closed(accepted)))
            self.journal.after_commit(lambda: failpoint("accept.after"))
        return accepted

    def _require_parts(self, row: TicketRow) -> None:
        recorded = self.parts(row.ticket)
        missing = [part for part in range(len(self.shapes_of(row.fragment).update_parts)) if part not in recorded]
        if missing:
            raise BadRequest(
                f"Ticket {row.ticket} of {row.site} lacks the parts {missing}.", "Send them, then complete again."
            )

    def refuse(self, ticket: int, reason: str) -> TicketRow:
        """The update of an open ticket cannot count. Again, or after the end of the ticket, changes nothing.

        Raises:
            StoreError: it was accepted before.
        """
        self._end([ticket], "refused", reason)
        return self.ticket(ticket)

    def expire(self, tickets: Sequence[int], reason: str) -> None:
        """Open tickets can no longer be used; those that ended before stay as they are.

        Raises:
            StoreError: one was accepted: what was acknowledged stays in its round.
        """
        self._end(tickets, "expired", reason)

    def reopen(self, fragment: int, base_version: int, tickets: Sequence[int], reason: str) -> None:
        """What was accepted of a round is lost with the worker that had collected it: its updates may come again.

        Accepted tickets become open ones; the round, frozen or not, is open. The same again changes nothing.
        """
        with self.transaction():
            for row in (self.ticket(ticket) for ticket in tickets):
                if row.state == "accepted":
                    self.change_tickets(
                        "UPDATE tickets SET state = 'open', digest = NULL, weight = 0, norm = 0, accepted_order = 0, "
                        "slot = NULL WHERE ticket = ?",
                        [row.ticket],
                    )
                    self.journal.count("bytes", -row.bytes)
                    self._after_reopening(row)
            self.journal.execute(
                "UPDATE rounds SET state = 'open', tickets_json = '[]' WHERE fragment = ? AND base_version = ? "
                "AND state = 'frozen'",
                fragment,
                base_version,
            )
            audit_log.append(
                self.journal,
                "reopened",
                fragment=fragment,
                base_version=base_version,
                tickets=list(tickets),
                reason=reason,
            )

    def _after_reopening(self, row: TicketRow) -> None:
        self.journal.after_commit(lambda: self._drop_spools([row], "open", "it is collected again"))

    def _end(self, tickets: Sequence[int], state: TicketState, reason: str) -> None:
        with self.transaction():
            rows = [self.ticket(ticket) for ticket in tickets]
            for row in rows:
                if row.is_in:
                    raise StoreError(f"Ticket {row.ticket} of {row.site} is {row.state}; it cannot be {state}.")
            ended = [row for row in rows if row.state == "open"]
            self.end_tickets(ended, state, reason)
            for row in ended:
                audit_log.append(self.journal, state, ticket=row.ticket, site=row.site, reason=reason)

    def end_tickets(
        self, rows: Sequence[TicketRow], state: TicketState, reason: str, version: int | None = None
    ) -> None:
        """Give tickets their last state, inside a transaction; their spools are free once it is committed and nobody
        writes them."""
        assert state in get_args(TicketState)
        tickets = [row.ticket for row in rows]
        self.change_tickets(
            "UPDATE tickets SET state = ?, reason = ?, version = ?, slot = NULL WHERE ticket = ?",
            tickets,
            state,
            reason,
            version,
        )
        self.journal.execute_many("DELETE FROM parts WHERE ticket = ?", [(ticket,) for ticket in tickets])
        if tickets:
            self.journal.count(state, len(tickets))
        self.journal.after_commit(lambda: self._drop_spools(rows, state, reason))

    def _drop_spools(self, rows: Sequence[TicketRow], state: str, reason: str) -> None:
        for row in rows:
            spool = self.spools.pop(row.ticket, None)
            if spool:
                spool.close(closed(row.ticket, row.site, state, reason))
            if row.slot is not None:
                pool = self.pool(SPOOL, row.fragment)
                pool.drop(pool[row.slot], JOURNAL)

    def require_live(self, ticket: int) -> TicketRow:
        """An open or accepted ticket.

        Raises:
            Gone, TicketClosed, UpdateRefused: as `spool`.
        """
        row = self.ticket(ticket)
        if not row.is_live:
            raise why_closed(row)
        return row


def to_ticket(row: tuple[Any, ...]) -> TicketRow:
    """A row of `COLUMNS`."""
    values = dict(zip(_NAMES, row, strict=True))
    return TicketRow(metrics=json.loads(values.pop("metrics_json")), **values)


def closed(ticket: int, site: str, state: str, reason: str) -> AtollError:
    """Why nothing more can be sent under a ticket.

    Of one whose update was refused each of its parts says so, whichever of them it was for, and so does the word that
    completes it: several are on their way at once, from several ranks, too, and the first answer decides.
    """
    if state == "refused":
        return UpdateRefused(
            f"The update of {site} is refused: {reason}.", "Mend what the reason names, and ask for the next ticket."
        )
    what = {"accepted": "holds an update already", "counted": "has been counted"}.get(state, f"is {state}")
    return TicketClosed(
        f"Ticket {ticket} of {site} {what}{': ' + reason if reason else ''}.", "Ask for the next ticket."
    )


def why_closed(row: TicketRow) -> AtollError:
    """As `closed`."""
    return closed(row.ticket, row.site, row.state, row.reason)
