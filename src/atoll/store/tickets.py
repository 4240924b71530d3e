"""Tickets and their updates. A ticket permits a site to submit one update, which is aggregated at most once."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from atoll.errors import AtollError, Conflict, Gone, StoreError, TicketClosed, UpdateRefused
from atoll.format_text import number_of
from atoll.posix import file_error, own_folder
from atoll.protocol.messages import Report
from atoll.runtime import failpoint
from atoll.store.audit_log import AuditLog
from atoll.store.file_slots import JOURNAL, SPOOL, WRITER, Slot, Slots
from atoll.store.journal import Journal, KeptValue, placeholders
from atoll.store.journal_tables import PARTS, TICKETS, PartRow, TicketRow, TicketState
from atoll.store.update_spool import PartWriter, Spool

LOG = logging.getLogger("atoll.server")

NUMBERS_OF_BLOCK = 10**9
"""Size of a block of ticket numbers. A run uses the first block, until `Tickets.skip_numbers` begins the next one."""
_SKIPPED = "skipped ticket numbers"
"""Name of the counter with the last number that was skipped."""


class Tickets:
    """The tickets of a run, and the files (spools) of their updates.

    A ticket is open until its update is accepted or refused, its site sits out the round, or it expires. An accepted
    ticket becomes counted when the version made from its update is committed. Open and accepted tickets are called
    live.
    """

    def __init__(self, journal: Journal, audit: AuditLog, slots: Slots) -> None:
        self._journal, self._audit, self._slots = journal, audit, slots
        self._spools: dict[int, Spool] = {}
        newest_order = "SELECT coalesce(max(accepted_order), 0) FROM tickets WHERE accepted_order > 0"
        self._newest_order = KeptValue(journal, lambda: int(journal.value(newest_order)))

    # -- rows

    def issue(self, ticket: int, site: str, fragment: int, base_version: int) -> None:
        """Record a new open ticket.

        Args:
            ticket: number of the ticket.
            site: name of the site.
            fragment: the fragment.
            base_version: version that the site trains from.

        Raises:
            StoreError: the number is taken, or the site has an open, accepted or counted ticket of this round already.
        """
        with self._journal.transaction():
            self._journal.insert(TICKETS, TicketRow(ticket, site, fragment, base_version, "open"))

    def get(self, ticket: int) -> TicketRow:
        """Return the row of a ticket, whatever its state.

        Raises:
            Gone: this run has never issued the ticket.
        """
        row = self._journal.first(TICKETS, "WHERE ticket = ?", ticket)
        if row is None:
            raise Gone(f"The run does not have ticket {ticket}.", "Ask for a new ticket.")
        return row

    def get_all(self, tickets: Sequence[int]) -> list[TicketRow]:
        """Return the rows of tickets, in the given order. One query for all is much quicker than one for each.

        Raises:
            Gone: this run has never issued one of them.
        """
        found = {row.ticket: row for row in self.select(f"ticket IN ({placeholders(tickets)})", *tickets)}
        return [found[ticket] if ticket in found else self.get(ticket) for ticket in tickets]

    def change(self, columns: str, tickets: Iterable[int], *values: Any) -> None:
        """Set columns of tickets, each to the same values. Call it in a transaction.

        Args:
            columns: SQL after SET, with one `?` for each of `values`.
            tickets: numbers of the tickets.
            values: the values.
        """
        self._journal.execute_many(
            f"UPDATE tickets SET {columns} WHERE ticket = ?", [(*values, ticket) for ticket in tickets]
        )

    def select(self, where: str, *values: Any) -> tuple[TicketRow, ...]:
        """Return the tickets that match an SQL condition, sorted by number."""
        return tuple(self._journal.select(TICKETS, f"WHERE {where} ORDER BY ticket", *values))

    def live(self) -> tuple[TicketRow, ...]:
        """Return all open and accepted tickets, sorted by number."""
        return self.select("state IN ('open', 'accepted')")

    def to_go_on(self) -> tuple[TicketRow, ...]:
        """Return the tickets that a restarted server needs, sorted by number.

        These are all open and accepted tickets, and all tickets of rounds that start from a fragment's newest version.
        """
        return self.select(
            "state IN ('open', 'accepted') OR (fragment, base_version) IN (SELECT fragment, version FROM heads)"
        )

    def next_number(self) -> int:
        """Return the number for the next ticket: one above the highest so far, and above all skipped ones."""
        return int(
            self._journal.value(
                "SELECT 1 + max(coalesce((SELECT max(ticket) FROM tickets), 0), "
                "coalesce((SELECT value FROM counters WHERE name = ?), 0))",
                _SKIPPED,
            )
        )

    def skip_numbers(self) -> None:
        """Begin the next block of ticket numbers. Call it inside a transaction, if sites may know later tickets.

        The journal lacks such tickets after a power loss, and in a run that goes on from a saved state. Without this, a
        later ticket would get the number of one that a site still uses: perhaps another site's, or of another fragment.
        """
        block = (self.next_number() - 1) // NUMBERS_OF_BLOCK + 1
        self._journal.execute(
            "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value",
            _SKIPPED,
            block * NUMBERS_OF_BLOCK,
        )

    def next_order(self) -> int:
        """Return the position of the update that is accepted next: one above the highest so far."""
        return self._newest_order.get() + 1

    def newest_bases(self, fragment: int = 0) -> dict[str, int]:
        """Return site → base version of the site's newest ticket for a fragment."""
        return dict(
            self._journal.rows(
                "SELECT site, base_version FROM tickets WHERE ticket IN "
                "(SELECT max(ticket) FROM tickets WHERE fragment = ? GROUP BY site)",
                fragment,
            )
        )

    def last_of(self, site: str, fragment: int = 0) -> TicketRow | None:
        """Return the newest ticket of a site for a fragment; None if there is none."""
        return self._journal.first(
            TICKETS, "WHERE site = ? AND fragment = ? ORDER BY ticket DESC LIMIT 1", site, fragment
        )

    def last_counted(self, site: str, since: int = 0) -> TicketRow | None:
        """Return a site's newest counted ticket for fragment 0; None if there is none.

        Args:
            site: name of the site.
            since: the oldest base version to look at.
        """
        return self._journal.first(
            TICKETS,
            "WHERE site = ? AND fragment = 0 AND state = 'counted' AND base_version >= ? ORDER BY ticket DESC LIMIT 1",
            site,
            since,
        )

    # -- spools and parts

    def spool(self, ticket: int) -> Spool:
        """Return the spool (the file of the update) of an open or accepted ticket. The first call assigns the file.

        The journal names the file from the first recorded part on, or after `name_spool`.

        Raises:
            Gone: this run has never issued the ticket.
            TicketClosed, UpdateRefused: the ticket is neither open nor accepted.
            DiskFull: the disk has no space for the file.
        """
        with self._journal.lock:
            if ticket in self._spools:
                return self._spools[ticket]
            row = self._require_live(ticket)
            if row.slot is not None:
                return self._open_spool(row, self._slots.pool(SPOOL, row.fragment)[row.slot])
        pool = self._slots.pool(SPOOL, row.fragment)
        slot = pool.take(WRITER)  # without the lock, because creating a file may be slow
        try:
            with self._journal.lock:
                row = self._require_live(ticket)  # it may have ended while the file was created
                if ticket not in self._spools:
                    pool.hold(slot, JOURNAL)
                    if self._journal.in_transaction:
                        self._journal.after_rollback(lambda: self._undo_spool(ticket, slot))
                    self._open_spool(row, slot)
                return self._spools[ticket]
        finally:
            pool.drop(slot, WRITER)

    def _require_live(self, ticket: int) -> TicketRow:
        row = self.get(ticket)
        if not row.is_live:
            raise why_closed(row)
        return row

    def name_spool(self, spool: Spool) -> None:
        """Let the journal name a spool: only then may another process write to it, which outlives a kill of this one.

        The next start gives a file that the journal does not name to another ticket.
        """
        if not spool.is_named:
            with self._journal.transaction():
                self.change("slot = ?", [spool.ticket], spool.slot.number)
                spool.is_named = True
                self._journal.after_rollback(lambda: setattr(spool, "is_named", False))

    def _open_spool(self, row: TicketRow, slot: Slot) -> Spool:
        power = self._journal.durability == "power"
        spool = Spool(
            row.ticket,
            self._slots.pool(SPOOL, row.fragment),
            slot,
            self._slots.shapes_of(row.fragment).update_parts,
            forget=self._forget_part,
            sync=(lambda: self._journal.sync(slot.fd, str(slot.path))) if power else None,
            is_named=row.slot is not None,
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
        if part in self.parts(ticket):
            with self._journal.transaction():
                self.drop_part(ticket, part)

    def drop_part(self, ticket: int, part: int) -> None:
        """Delete the record of a part, which then must be sent again. Call it inside a transaction."""
        self._journal.execute("DELETE FROM parts WHERE ticket = ? AND part = ?", ticket, part)

    def parts(self, ticket: int) -> dict[int, PartRow]:
        """Return the parts of a ticket's update that are on disk and checked: part number → row."""
        return {row.part: row for row in self._journal.select(PARTS, "WHERE ticket = ? ORDER BY part", ticket)}

    def whole(self, row: TicketRow, last: PartRow | None = None) -> dict[int, PartRow]:
        """Return all parts of a ticket's update, if all are on disk and checked: part number → row.

        Args:
            row: the ticket.
            last: one of the parts, if it is not recorded yet.

        Raises:
            Conflict: parts are missing. The message says how many, and which is the first.
        """
        parts, count = self.parts(row.ticket), len(self._slots.shapes_of(row.fragment).update_parts)
        if last is not None:
            parts[last.part] = last
        missing = [part for part in range(count) if part not in parts]
        if missing:
            raise Conflict(
                f"The update for ticket {row.ticket} lacks {len(missing)} of {number_of(count, 'part')} "
                f"(first: part {missing[0]}).",
                "Send the missing parts, then complete the update again.",
            )
        return parts

    def record_part(self, row: PartRow, writer: PartWriter | None = None) -> None:
        """Record that a part of an open ticket's update is on disk and passed its check.

        Args:
            row: the part.
            writer: writer of the part's bytes. If a newer writer has begun the part, raise `WriterCancelled`.

        Raises:
            WriterCancelled: another request is writing the part again.
        """
        with self._journal.transaction():
            if row.ticket in self._spools:
                self._spools[row.ticket].require_written(row.part, writer)
            self._put_part(row)

    def _put_part(self, row: PartRow) -> None:
        if row.ticket in self._spools:
            self.name_spool(self._spools[row.ticket])
        self._journal.insert(
            PARTS, row, "ON CONFLICT (ticket, part) DO UPDATE SET digest = excluded.digest, sumsq = excluded.sumsq"
        )
        self._journal.after_commit(lambda: failpoint("part.recorded"))

    def close_spools(self) -> None:
        """Close the files of all arriving updates, so that later writes fail. Call it when the server stops."""
        for spool in self._spools.values():
            spool.close(StoreError("The server is stopping.", "Send the part again after its restart."))
        self._spools.clear()

    # -- accept, refuse, expire

    def make_durable(self, row: TicketRow) -> None:
        """With durability `power`, fsync the file of an update before it is accepted.

        Raises:
            SyncFailed: fsync failed; the server must end.
        """
        if self._journal.durability == "power":
            spool = self.spool(row.ticket)
            self._journal.sync(spool.fd, str(spool.slot.path))
            self._journal.sync_folder(spool.slot.path.parent)  # the file may be new

    def accept(self, row: TicketRow, last: PartRow | None = None) -> None:
        """Accept the update of an open ticket. Call it inside a transaction, after `whole` and `make_durable`.

        Args:
            row: the ticket as it is to be: accepted, with the values of its update except `bytes`.
            last: one of its parts, which is recorded now; None: all are recorded.
        """
        if last is not None:
            self._put_part(last)
        spool = self.spool(row.ticket)  # in a swarm no part was written, so this creates the spool
        self.name_spool(spool)
        failpoint("accept.before")
        nbytes = self._slots.shapes_of(row.fragment).update_bytes
        self.change(
            "state = 'accepted', digest = ?, report = ?, norm = ?, bytes = ?, accepted_order = ?",
            [row.ticket],
            row.digest,
            row.report.model_dump_json(),
            row.norm,
            nbytes,
            row.accepted_order,
        )
        self._newest_order.set(row.accepted_order)
        self._journal.count("bytes", nbytes)
        self._audit.append(
            "accepted",
            ticket=row.ticket,
            site=row.site,
            fragment=row.fragment,
            base_version=row.base_version,
            digest=row.digest,
            norm=row.norm,
            **row.report.model_dump(),
        )
        self._journal.after_commit(lambda: spool.close(why_closed(row)))
        self._journal.after_commit(lambda: failpoint("accept.after"))

    def refuse(self, ticket: int, reason: str) -> None:
        """Refuse the update of an open ticket. A ticket that has ended stays unchanged.

        Raises:
            StoreError: the update was accepted.
        """
        self._end_open([ticket], "refused", reason)

    def sit_out(self, ticket: int, metrics: Mapping[str, float]) -> None:
        """Record that the site of an open ticket sits out the round. Call it inside a transaction.

        Args:
            ticket: number of the ticket.
            metrics: metrics of the worker. They are kept, but are in no mean.
        """
        failpoint("sit_out.before")
        self.change("report = ?", [ticket], Report(weight=0, metrics=dict(metrics)).model_dump_json())
        self._end_open([ticket], "sat out", "")
        self._journal.after_commit(lambda: failpoint("sit_out.after"))

    def sitting_out(self, fragment: int) -> tuple[TicketRow, ...]:
        """Return the tickets with which sites sit out a fragment's present round, sorted by number.

        A site's newest ticket of the fragment decides. The audit log tells to which round a ticket belongs: in an
        asynchronous run, a site may sit out a round with a ticket that was issued in an earlier one.
        """
        since = self._journal.value(
            "SELECT seq FROM audit WHERE what IN ('committed', 'sat out by all', 'reshaped', 'fell back') "
            "AND json_extract(detail_json, '$.fragment') = ? ORDER BY seq DESC LIMIT 1",
            fragment,
        )
        return self.select(
            "state = 'sat out' AND fragment = ? AND ticket IN "
            "(SELECT json_extract(detail_json, '$.ticket') FROM audit WHERE what = 'sat out' AND seq > ?) "
            "AND NOT EXISTS (SELECT 1 FROM tickets AS newer WHERE newer.site = tickets.site "
            "AND newer.fragment = tickets.fragment AND newer.ticket > tickets.ticket)",
            fragment,
            since or 0,
        )

    def expire(self, tickets: Sequence[int], reason: str) -> None:
        """Expire open tickets. Refused and expired tickets stay unchanged.

        Raises:
            StoreError: the update of a ticket was accepted. No ticket was changed.
        """
        self._end_open(tickets, "expired", reason)

    def reopen(self, fragment: int, base_version: int, tickets: Sequence[int], reason: str) -> None:
        """Open a round again, because its accepted updates were lost, or do not fit any more.

        Accepted tickets become open, because their updates have to be sent again. If the round was closed, it becomes
        open. If there is nothing to change, no entry is added to the audit log.

        Args:
            fragment: the fragment.
            base_version: the version that the round starts from.
            tickets: tickets of the round.
            reason: the reason, for the audit log.
        """
        with self._journal.transaction():
            rows = [row for row in map(self.get, tickets) if row.state == "accepted"]
            self.change(
                "state = 'open', digest = NULL, report = '{}', norm = 0, accepted_order = 0, slot = NULL",
                [row.ticket for row in rows],
            )
            self._newest_order.forget()
            self._journal.count("bytes", -sum(row.bytes for row in rows))
            self._drop_spools(rows, "open", "its update is collected again")
            thawed = self._journal.execute(
                "UPDATE rounds SET state = 'open', tickets = '[]' WHERE fragment = ? AND base_version = ? "
                "AND state = 'frozen'",
                fragment,
                base_version,
            )
            if rows or thawed:
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

    def end(
        self,
        rows: Sequence[TicketRow],
        state: TicketState,
        reason: str,
        version: int | None = None,
        *,
        keep: bool = False,
    ) -> None:
        """Set the final state of tickets, and delete the records of their parts. Call it inside a transaction.

        After the commit, the files of the updates may be reused as soon as nothing writes to these files.

        Args:
            rows: the tickets.
            state: the final state.
            reason: the reason, for messages.
            version: the version that was made from the updates, for state "counted".
            keep: keep the files of the updates and the records of their parts, until `drop_kept`.

        Raises:
            StoreError: a file cannot be kept.
        """
        assert state in get_args(TicketState)
        tickets = [row.ticket for row in rows]
        self.change("state = ?, reason = ?, version = ?, slot = NULL", tickets, state, reason, version)
        if keep:
            self._keep(rows)
        else:
            self._journal.execute_many("DELETE FROM parts WHERE ticket = ?", [(ticket,) for ticket in tickets])
        if tickets:
            self._journal.count(state, len(tickets))
        self._drop_spools(rows, state, reason)

    # -- updates that are kept after their round

    def _keep(self, rows: Sequence[TicketRow]) -> None:
        folder = kept_updates(self._slots.folder.parent)
        try:
            own_folder(folder, folder.parent)
        except OSError as error:
            raise file_error(error, folder) from error
        for row in rows:
            if row.slot is not None:
                pool = self._slots.pool(SPOOL, row.fragment)
                pool.keep(pool[row.slot], folder / kept_name(row))
        if self._journal.durability == "power":
            self._journal.sync_folder(folder)

    def drop_kept(self, fragment: int, since: int | None = None) -> None:
        """Drop a fragment's kept updates; with `since`, only those of earlier versions. Call it in a transaction."""
        rows = self.select(f"{_KEPT} AND fragment = ?1 AND (?2 IS NULL OR version < ?2)", fragment, since)
        self._journal.execute_many("DELETE FROM parts WHERE ticket = ?", [(row.ticket,) for row in rows])
        paths = [kept_updates(self._slots.folder.parent) / kept_name(row) for row in rows]

        def remove() -> None:
            for path in paths:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:  # the commit stands; the next start tries again
                    LOG.warning("%s, which is no longer needed, could not be removed: %s", path, error.strerror)

        self._journal.after_commit(remove)

    def remove_unkept(self) -> None:
        """At a start, remove the files of updates that the journal does not keep, such as those of an open round."""
        known = {kept_name(row) for row in self.select(_KEPT)}
        for path in kept_updates(self._slots.folder.parent).glob("*"):
            if path.name not in known:
                path.unlink()

    def _drop_spools(self, rows: Sequence[TicketRow], state: TicketState, reason: str) -> None:
        """After the commit, close the files of updates, and let them be reused."""
        # look the pools up now: by the commit, a fragment with other shapes has other pools
        pools = {row.fragment: self._slots.pool(SPOOL, row.fragment) for row in rows if row.slot is not None}

        def drop() -> None:
            for row in rows:
                spool = self._spools.pop(row.ticket, None)
                if spool:
                    spool.close(why_closed(replace(row, state=state, reason=reason)))
                    spool.pool.drop(spool.slot, JOURNAL)
                elif row.slot is not None:
                    pool = pools[row.fragment]
                    pool.drop(pool[row.slot], JOURNAL)

        self._journal.after_commit(drop)


_KEPT = "state = 'counted' AND ticket IN (SELECT ticket FROM parts)"
"""SQL condition: the ticket's update is kept after its round."""


def kept_updates(state_dir: Path) -> Path:
    """Return the folder of a state directory with the updates that are kept after their rounds."""
    return state_dir / "updates"


def require_links(state_dir: Path) -> None:
    """Check that updates can be kept: a kept update is another name of its file.

    Raises:
        StoreError: the file system has no hard links, or the folder cannot be used.
    """
    folder = kept_updates(state_dir)
    probe, other = folder / "probe", folder / "probe-link"
    try:
        own_folder(folder, state_dir)
        probe.touch(0o600)
        other.unlink(missing_ok=True)
        os.link(probe, other)
    except OSError as error:
        raise StoreError(
            f"disk.keep_updates needs hard links, but {folder} cannot have any: {error.strerror}.",
            "Set disk.keep_updates to 0, or put disk.state_dir on another file system.",
        ) from error
    finally:
        for path in (probe, other):
            with contextlib.suppress(OSError):
                path.unlink()


def kept_name(row: TicketRow) -> str:
    """Return the name of the file of a kept update."""
    return f"update-{row.fragment}-{row.ticket}.bin"


def why_closed(row: TicketRow) -> AtollError:
    """Return the error for a request (send a part, or complete the update) under a ticket that is not open.

    It is `UpdateRefused` if the ticket was refused, else `TicketClosed`. It is the same error for every request,
    because a worker may send several requests at once, also from several ranks, and acts on the first answer.
    """
    if row.state == "refused":
        return UpdateRefused(
            f"The update of {row.site} was refused: {row.reason}.",
            "Correct the cause, then ask for the next ticket.",
        )
    what = {"accepted": "has an update already", "counted": "has been counted", "sat out": "was sat out"}.get(
        row.state, f"is {row.state}"
    )
    return TicketClosed(
        f"Ticket {row.ticket} of {row.site} {what}{': ' + row.reason if row.reason else ''}.",
        "Ask for the next ticket.",
    )
