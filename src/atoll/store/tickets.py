"""Tickets and their updates. One ticket, one update, accepted by one statement, counted at most once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from atoll.errors import AtollError, BadRequest, Conflict, Gone, StoreError, TicketClosed, UpdateRefused
from atoll.runtime import failpoint
from atoll.store.audit_log import AuditLog
from atoll.store.file_slots import JOURNAL, SPOOL, WRITER, Slot, Slots
from atoll.store.journal import Journal
from atoll.store.journal_tables import PARTS, TICKETS, PartRow, TicketRow, TicketState
from atoll.store.update_spool import PartWriter, Spool


class Tickets:
    """The tickets of a run, and the spools of their updates."""

    def __init__(self, journal: Journal, audit: AuditLog, slots: Slots) -> None:
        self._journal, self._audit, self._slots = journal, audit, slots
        self._spools: dict[int, Spool] = {}
        self._live: dict[int, TicketRow] = {}  # as the journal has them: each is read several times
        self._live_as_of = journal.undone

    # -- rows

    def issue(self, ticket: int, site: str, fragment: int, base_version: int) -> TicketRow:
        """Give a site the right to one update.

        Raises:
            StoreError: the number is taken, or the site has a ticket of that round that is neither refused nor expired.
        """
        row = TicketRow(ticket, site, fragment, base_version, "open")
        with self._journal.transaction():
            self._journal.insert(TICKETS, row)
            self._known()[ticket] = row
        return row

    def get(self, ticket: int) -> TicketRow:
        """Return a ticket, whatever became of it.

        Raises:
            Gone: this run has never issued it.
        """
        with self._journal.lock:
            tickets = self._known()
            if (known := tickets.get(ticket)) is not None:
                return known
            row = self._journal.first(TICKETS, "WHERE ticket = ?", ticket)
            if row is None:
                raise Gone(f"The run has no ticket {ticket}.", "Ask for a new one.")
            if row.is_live:
                tickets[ticket] = row
            return row

    def require_live(self, ticket: int) -> TicketRow:
        """Return an open or accepted ticket.

        Raises:
            Gone: there is no such ticket.
            TicketClosed: it is counted or expired. UpdateRefused: it is refused.
        """
        row = self.get(ticket)
        if not row.is_live:
            raise why_closed(row)
        return row

    def _known(self) -> dict[int, TicketRow]:
        """Return the live tickets that were read, as the journal has them; under the lock."""
        if self._live_as_of != self._journal.undone:
            self._live.clear()
            self._live_as_of = self._journal.undone
        return self._live

    def change(self, sql: str, tickets: Sequence[int], *values: Any) -> None:
        """Change rows inside a transaction: the `?`s of `sql` are `values`, then the ticket."""
        for ticket in tickets:
            self._live.pop(ticket, None)
        self._journal.execute_many(sql, [(*values, ticket) for ticket in tickets])

    def select(self, where: str, *values: Any) -> tuple[TicketRow, ...]:
        """Return the tickets that a clause selects, by number."""
        return tuple(self._journal.select(TICKETS, f"WHERE {where} ORDER BY ticket", *values))

    def live(self) -> tuple[TicketRow, ...]:
        """Return every open and accepted ticket, by number."""
        return self.select("state IN ('open', 'accepted')")

    def to_go_on(self) -> tuple[TicketRow, ...]:
        """Return open and accepted tickets, and every ticket of a round from a head, by number."""
        return self.select(
            "state IN ('open', 'accepted') OR (fragment, base_version) IN (SELECT fragment, version FROM heads)"
        )

    def next_number(self) -> int:
        """Return the number of the next ticket: above every one that was ever issued."""
        return int(self._journal.value("SELECT coalesce(max(ticket), 0) + 1 FROM tickets"))

    def newest_bases(self, fragment: int = 0) -> dict[str, int]:
        """Return site → the version that its newest ticket is for."""
        return dict(
            self._journal.rows(
                "SELECT site, base_version FROM tickets WHERE ticket IN "
                "(SELECT max(ticket) FROM tickets WHERE fragment = ? GROUP BY site)",
                fragment,
            )
        )

    def last_of(self, site: str, fragment: int = 0) -> TicketRow | None:
        """Return the newest ticket of a site."""
        return self._journal.first(
            TICKETS, "WHERE site = ? AND fragment = ? ORDER BY ticket DESC LIMIT 1", site, fragment
        )

    def last_counted(self, site: str) -> TicketRow | None:
        """Return a site's newest ticket with an update that counts; of a run of one fragment."""
        return self._journal.first(
            TICKETS, "WHERE site = ? AND fragment = 0 AND state = 'counted' ORDER BY ticket DESC LIMIT 1", site
        )

    # -- spools and parts

    def spool(self, ticket: int) -> Spool:
        """Return the spool of an open or accepted ticket; the first call finds a slot for it.

        Raises:
            Gone, TicketClosed, UpdateRefused: as `require_live`.
            DiskFull: no space for its slot.
        """
        with self._journal.lock:
            if ticket in self._spools:
                return self._spools[ticket]
            row = self.require_live(ticket)
            if row.slot is not None:
                return self._open_spool(row, self._slots.pool(SPOOL, row.fragment)[row.slot])
        pool = self._slots.pool(SPOOL, row.fragment)
        slot = pool.take(WRITER)  # a new file may take its time, so without the lock
        try:
            with self._journal.transaction():
                row = self.require_live(ticket)
                if row.slot is None:
                    self.change("UPDATE tickets SET slot = ? WHERE ticket = ?", [ticket], slot.number)
                    row = self._known()[ticket] = replace(row, slot=slot.number)
                    pool.hold(slot, JOURNAL)
                    self._journal.after_rollback(lambda: self._undo_spool(ticket, slot))
                    return self._open_spool(row, slot)
                return self._spools[ticket]
        finally:
            pool.drop(slot, WRITER)

    def _open_spool(self, row: TicketRow, slot: Slot) -> Spool:
        power = self._journal.durability == "power"
        spool = Spool(
            row.ticket,
            self._slots.pool(SPOOL, row.fragment),
            slot,
            self._slots.shapes_of(row.fragment).update_parts,
            forget=self._forget_part,
            sync=(lambda: self._journal.sync(slot.fd, str(slot.path))) if power else None,
        )
        if row.state == "accepted":
            spool.close(why_closed(row))
        self._spools[row.ticket] = spool
        return spool

    def _undo_spool(self, ticket: int, slot: Slot) -> None:
        spool = self._spools.pop(ticket, None)
        if spool:
            spool.close(TicketClosed(f"Ticket {ticket} was undone."))
            spool.pool.drop(slot, JOURNAL)

    def _forget_part(self, ticket: int, part: int) -> None:
        if self._journal.row("SELECT 1 FROM parts WHERE ticket = ? AND part = ?", ticket, part):
            with self._journal.transaction():
                self.drop_part(ticket, part)

    def drop_part(self, ticket: int, part: int) -> None:
        """Forget a recorded part, inside a transaction."""
        self._journal.execute("DELETE FROM parts WHERE ticket = ? AND part = ?", ticket, part)

    def parts(self, ticket: int) -> dict[int, PartRow]:
        """Return the recorded parts of a ticket, by number."""
        return {row.part: row for row in self._journal.select(PARTS, "WHERE ticket = ? ORDER BY part", ticket)}

    def record_part(
        self, ticket: int, part: int, digest: bytes, sumsq: float, writer: PartWriter | None = None
    ) -> None:
        """Record that a part is on disk with these bytes.

        Args:
            digest: BLAKE3 of the bytes that `writer` wrote, 32 bytes.
            sumsq: sum of squares of its values; finite.
            writer: of these bytes; nothing is recorded if another writer has begun the part since.

        Raises:
            TicketClosed, UpdateRefused: the ticket is no longer open.
            WriterCancelled: the bytes are being written again.
        """
        with self._journal.transaction():
            row = self.require_live(ticket)
            if row.state != "open":
                raise why_closed(row)
            if ticket in self._spools:
                self._spools[ticket].require_written(part, writer)
            self._journal.insert(
                PARTS,
                PartRow(ticket, part, digest, sumsq),
                "ON CONFLICT (ticket, part) DO UPDATE SET digest = excluded.digest, sumsq = excluded.sumsq",
            )
            self._journal.after_commit(lambda: failpoint("part.recorded"))

    def close_spools(self) -> None:
        """Take no further byte of any update: the server stops."""
        for spool in self._spools.values():
            spool.close(StoreError("The server is stopping.", "Send it again when it is back."))
        self._spools.clear()
        self._live.clear()

    # -- what becomes of an update

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
        if self._journal.durability == "power" and (row := self.get(ticket)).state == "open":
            self._require_parts(row)
            spool = self.spool(ticket)
            self._journal.sync(spool.fd, str(spool.slot.path))
            self._journal.sync_folder(spool.slot.path.parent)  # the file may be new
        with self._journal.transaction():
            row = self.get(ticket)
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
            nbytes = self._slots.shapes_of(row.fragment).update_bytes
            self.change(
                "UPDATE tickets SET state = 'accepted', digest = ?, weight = ?, steps = ?, metrics = ?, norm = ?, "
                "bytes = ?, accepted_order = 1 + (SELECT coalesce(max(accepted_order), 0) FROM tickets "
                "WHERE accepted_order > 0) WHERE state = 'open' AND ticket = ?",
                [ticket],
                digest,
                weight,
                steps,
                json.dumps(dict(metrics)),
                norm,
                nbytes,
            )
            self._journal.count("bytes", nbytes)
            self._audit.append(
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
            accepted = self.get(ticket)
            self._journal.after_commit(lambda: spool.close(why_closed(accepted)))
            self._journal.after_commit(lambda: failpoint("accept.after"))
        return accepted

    def _require_parts(self, row: TicketRow) -> None:
        recorded, wanted = self.parts(row.ticket), self._slots.shapes_of(row.fragment).update_parts
        missing = [part for part in range(len(wanted)) if part not in recorded]
        if missing:
            raise BadRequest(
                f"Ticket {row.ticket} of {row.site} lacks the parts {missing}.", "Send them, then complete again."
            )

    def refuse(self, ticket: int, reason: str) -> TicketRow:
        """Refuse the update of an open ticket. Again, or after the end of the ticket, it changes nothing.

        Raises:
            StoreError: it was accepted before.
        """
        self._end_open([ticket], "refused", reason)
        return self.get(ticket)

    def expire(self, tickets: Sequence[int], reason: str) -> None:
        """End open tickets; those that ended before stay as they are.

        Raises:
            StoreError: one was accepted: an acknowledged update stays in its round.
        """
        self._end_open(tickets, "expired", reason)

    def reopen(self, fragment: int, base_version: int, tickets: Sequence[int], reason: str) -> None:
        """Open a round again after its accepted updates were lost with the worker that had collected them.

        Accepted tickets become open ones; the round, frozen or not, is open. The same again changes nothing.
        """
        with self._journal.transaction():
            rows = [row for row in map(self.get, tickets) if row.state == "accepted"]
            self.change(
                "UPDATE tickets SET state = 'open', digest = NULL, weight = 0, norm = 0, accepted_order = 0, "
                "slot = NULL WHERE ticket = ?",
                [row.ticket for row in rows],
            )
            self._journal.count("bytes", -sum(row.bytes for row in rows))
            self._journal.after_commit(lambda: self._drop_spools(rows, "open", "it is collected again"))
            self._journal.execute(
                "UPDATE rounds SET state = 'open', tickets = '[]' WHERE fragment = ? AND base_version = ? "
                "AND state = 'frozen'",
                fragment,
                base_version,
            )
            self._audit.append(
                "reopened", fragment=fragment, base_version=base_version, tickets=list(tickets), reason=reason
            )

    def _end_open(self, tickets: Sequence[int], state: TicketState, reason: str) -> None:
        with self._journal.transaction():
            rows = [self.get(ticket) for ticket in tickets]
            for row in rows:
                if row.is_in:
                    raise StoreError(f"Ticket {row.ticket} of {row.site} is {row.state}; it cannot be {state}.")
            ended = [row for row in rows if row.state == "open"]
            self.end(ended, state, reason)
            for row in ended:
                self._audit.append(state, ticket=row.ticket, site=row.site, reason=reason)

    def end(self, rows: Sequence[TicketRow], state: TicketState, reason: str, version: int | None = None) -> None:
        """Give tickets their last state, inside a transaction.

        Their spools are free once it is committed and nothing writes them.
        """
        assert state in get_args(TicketState)
        tickets = [row.ticket for row in rows]
        self.change(
            "UPDATE tickets SET state = ?, reason = ?, version = ?, slot = NULL WHERE ticket = ?",
            tickets,
            state,
            reason,
            version,
        )
        self._journal.execute_many("DELETE FROM parts WHERE ticket = ?", [(ticket,) for ticket in tickets])
        if tickets:
            self._journal.count(state, len(tickets))
        self._journal.after_commit(lambda: self._drop_spools(rows, state, reason))

    def _drop_spools(self, rows: Sequence[TicketRow], state: TicketState, reason: str) -> None:
        for row in rows:
            spool = self._spools.pop(row.ticket, None)
            if spool:
                spool.close(why_closed(replace(row, state=state, reason=reason)))
            if row.slot is not None:
                pool = self._slots.pool(SPOOL, row.fragment)
                pool.drop(pool[row.slot], JOURNAL)


def why_closed(row: TicketRow) -> AtollError:
    """Return why nothing more can be sent under a ticket.

    A refused update is refused to every part of it and to the message that completes it: several are on their way at
    once, also from several ranks, and the first answer decides.
    """
    if row.state == "refused":
        return UpdateRefused(
            f"The update of {row.site} is refused: {row.reason}.",
            "Mend what the reason names, and ask for the next ticket.",
        )
    what = {"accepted": "holds an update already", "counted": "has been counted"}.get(row.state, f"is {row.state}")
    return TicketClosed(
        f"Ticket {row.ticket} of {row.site} {what}{': ' + row.reason if row.reason else ''}.",
        "Ask for the next ticket.",
    )
