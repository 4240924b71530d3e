"""Recovery at a server's start: find the newest intact version, drop damaged data, remove files that nothing refers to.

Each step is one transaction, and files are removed last. So if the server is killed during recovery, the next recovery
gives the same result.
"""

from __future__ import annotations

from pathlib import Path

from atoll.errors import StateCorrupt
from atoll.format_text import number_of
from atoll.protocol.run_events import WentBack
from atoll.runtime import failpoint
from atoll.store.audit_log import AuditLog
from atoll.store.file_slots import DELTA, SPOOL, STATE, VERSION, Slot, Slots, region_digest, verify
from atoll.store.journal import NEW_RUN, Journal
from atoll.store.journal_tables import DELTAS, PartRow, TicketRow, VersionRow, utc_text
from atoll.store.kept_events import EventRows, newest_event
from atoll.store.run_log import RunLog
from atoll.store.tickets import Tickets
from atoll.store.versions import Versions


class Recovery:
    """Checks the files of a run at a server's start, and drops damaged ones. `Store.recover` describes the details."""

    def __init__(
        self,
        journal: Journal,
        audit: AuditLog,
        slots: Slots,
        run_log: RunLog,
        tickets: Tickets,
        versions: Versions,
        events: EventRows,
    ) -> None:
        self._journal, self._audit, self._slots = journal, audit, slots
        self._run_log, self._tickets, self._versions, self._events = run_log, tickets, versions, events

    def run(self) -> tuple[str, ...]:
        """Check the newest versions and all updates against their digests, drop damaged ones, and remove unused files.

        Returns:
            One sentence for each loss.

        Raises:
            StateCorrupt: all versions of a fragment are damaged. This fragment's files and rows stay unchanged.
        """
        self._tickets.remove_unkept()
        fell_back = self._go_back()
        for fragment in self._slots.fragments:
            with self._journal.lock:
                fell_back += self._recover_head(fragment)
                self._recover_deltas(fragment)
            failpoint("recover.midway")
        warnings = [warning for ticket in self._tickets.live() for warning in self._recover_spool(ticket)]
        failpoint("recover.midway")
        for fragment in self._slots.fragments:
            with self._journal.transaction():
                if not self._versions.keep_updates:
                    self._tickets.drop_kept(fragment)
                self._versions.drop_old(fragment)
        with self._journal.transaction():
            for (path,) in self._journal.rows("SELECT path FROM exports_under_way"):
                Path(path).unlink(missing_ok=True)  # the partial file of an export in a killed server
            self._journal.execute("DELETE FROM exports_under_way")
        self._slots.remove_unreferenced()
        return (*fell_back, *warnings)

    # -- versions

    def _go_back(self) -> list[str]:
        """If the admin has asked so, go back to an earlier version, in one transaction. Return sentences about it.

        With the run, the algorithm's state begins again: what sites have is of later versions. So no site sends an
        update again that it formed before (docs/decisions/0050). If the version is damaged, the run does not go back.
        """
        back_to = self._run_log.controls.back_to
        if back_to is None:
            return []
        with self._journal.lock:
            heads = self._versions.heads()
            later = {fragment: head for fragment, head in enumerate(heads) if head > back_to}
            rows = [row for fragment in later for row in self._versions.kept(fragment) if row.version == back_to]
            is_whole = len(rows) == len(later) and all(map(self._verifies, rows))
            with self._journal.transaction(synced=True):
                self._run_log.ask_back_to(None)
                if not is_whole:
                    return [f"Version {back_to} is damaged or missing, so the run does not go back to it."]
                said = [self._fall_back(fragment, head, back_to, asked=True) for fragment, head in later.items()]
                for fragment in range(len(heads) if later else 0):
                    if heads[fragment] == back_to:  # its rounds since then no longer count, either
                        self._fall_back(fragment, back_to, back_to, asked=True)
                if said:
                    self._run_log.begin_generation(
                        back_to, f"The run went back to version {back_to}, as its admin asked"
                    )
                for fragment, head in later.items():
                    event = WentBack(fragment=fragment, version=back_to, lost=head, at=utc_text())
                    number = newest_event(self._journal.rows) + 1
                    self._events.append(number, event.model_dump_json(exclude={"number"}), of_site=False)
        failpoint("recover.midway")
        return said

    def _recover_head(self, fragment: int) -> list[str]:
        """Find a fragment's newest intact version. If newer ones are damaged, make the run continue from this version.

        Returns:
            A list with one sentence if the run continues from an older version; else an empty list.

        Raises:
            StateCorrupt: no version of the fragment matches its digests.
        """
        head = self._journal.value("SELECT version FROM heads WHERE fragment = ?", fragment)
        if head is None:
            return []
        rows = [row for row in reversed(self._versions.kept(fragment)) if row.version <= head]
        good = next((row for row in rows if self._verifies(row)), None)
        if good is None:
            raise StateCorrupt(
                f"All versions{self._journal.of(fragment)} in {self._slots.folder.parent} are damaged (their "
                f"digests differ): {', '.join(str(row.version) for row in rows)}.",
                NEW_RUN,
            )
        pool = self._slots.pool
        with self._journal.transaction():  # older versions are not hashed here: workers that pull one check its bytes
            for row in rows[rows.index(good) + 1 :]:
                if pool(VERSION, fragment).adopt(row.slot) is None:
                    self._versions.forget(row)
                elif row.state_slot is not None and pool(STATE, fragment).adopt(row.state_slot) is None:
                    self._versions.forget_state(row)
        return [self._fall_back(fragment, head, good.version)] if good.version < head else []

    def _verifies(self, row: VersionRow) -> bool:
        shapes = self._slots.shapes_of(row.fragment)
        version = self._slots.pool(VERSION, row.fragment).adopt(row.slot)
        if version is None or not verify(version.fd, shapes.version, row.part_digests):
            return False
        if not row.state_digests:  # the version has no outer state, such as version 0
            return True
        if row.state_slot is None or shapes.state is None:
            return False
        state = self._slots.pool(STATE, row.fragment).adopt(row.state_slot)
        return state is not None and verify(state.fd, shapes.state, row.state_digests)

    def _recover_deltas(self, fragment: int) -> None:
        """Remove a delta's row if the delta (a difference between versions) is damaged, or if its version is gone."""
        shape = self._slots.shapes_of(fragment).delta
        existing = {row.version for row in self._versions.kept(fragment)}
        with self._journal.transaction():
            for row in self._journal.select(DELTAS, "WHERE fragment = ?", fragment):
                slot = self._slots.pool(DELTA, fragment).adopt(row.slot) if shape and row.version in existing else None
                if slot is None or shape is None or not verify(slot.fd, shape, row.part_digests):
                    self._journal.execute(
                        "DELETE FROM deltas WHERE fragment = ? AND version = ?", fragment, row.version
                    )

    def _fall_back(self, fragment: int, head: int, version: int, *, asked: bool = False) -> str:
        """Return to an older version in one transaction: expire later updates, delete later rounds and versions.

        Rounds that all sites sat out have ended all the same if a version was lost; if the admin goes back, those
        after the version no longer count.

        Args:
            fragment: the fragment.
            head: number of the lost newest version.
            version: number of the version to continue from.
            asked: whether the admin has asked for it; else version `head` was lost.

        Returns:
            A sentence about the loss.
        """
        of = self._journal.of(fragment)
        reason = f"version {head}{of} was lost; the run continues from version {version}"
        if asked:
            reason = f"the run went back from version {head}{of} to version {version}, as its admin asked"
        with self._journal.transaction():
            # in a round that is trained again, also sites that sat out or were refused get new tickets
            again = 0 if asked else self._run_log.last_sat_out_round(fragment).first_ticket
            later = self._tickets.select(
                "fragment = ?1 AND (base_version >= ?2 OR version > ?2) AND (state IN ('open', 'accepted', 'counted') "
                "OR (state IN ('refused', 'sat out') AND ticket >= ?3))",
                fragment,
                version,
                again,
            )
            lost = [ticket for ticket in later if ticket.is_live or ticket.is_in]
            for ticket in later:
                if ticket.state == "counted":
                    self._journal.count("counted", -1)
                    self._journal.execute(
                        "UPDATE members SET rounds_counted = rounds_counted - 1 WHERE site = ?", ticket.site
                    )
                self._expire(ticket, reason)
            for sql in (
                "DELETE FROM rounds WHERE fragment = ?1 AND base_version >= ?2",
                "DELETE FROM versions WHERE fragment = ?1 AND version > ?2",
                "DELETE FROM deltas WHERE fragment = ?1 AND version > ?2",
                "UPDATE history SET lost = 1 WHERE fragment = ?1 AND version > ?2",
                "UPDATE heads SET version = ?2, durable_version = min(durable_version, ?2) WHERE fragment = ?1",
            ):
                self._journal.execute(sql, fragment, version)
            if asked:
                self._journal.execute("DELETE FROM configs")  # they may be why the run goes back: sites are told anew
                self._journal.execute(
                    "DELETE FROM sat_out_rounds WHERE fragment = ? AND base_version >= ?", fragment, version
                )
            generation = self._run_log.generation
            anew = ""
            if generation.version > version and not asked:  # sites have no state of earlier generations any more
                why = f"The algorithm's state had begun at zero from version {generation.version} on"
                anew = f" {self._run_log.begin_generation(version, why)}"
            self._journal.execute("UPDATE meta SET epoch = epoch + 1, finished = 0")
            self._audit.append(
                "fell back",
                fragment=fragment,
                lost=head,
                version=version,
                tickets=[ticket.ticket for ticket in later],
                sat_out_by_all=self._run_log.last_sat_out_round(fragment).total,
            )
        then = f"{number_of(len(lost), 'update')} must be submitted again"
        if asked:
            then = f"{number_of(sum(ticket.is_in for ticket in lost), 'update')} no longer counted"
        return f"{reason[0].upper()}{reason[1:]}: {then}.{anew}"

    # -- updates

    def _expire(self, ticket: TicketRow, reason: str) -> None:
        """Expire a ticket without touching the file of its update, which may be missing.

        `Slots.remove_unreferenced` removes the file later, because no row refers to it any more.
        """
        without_slot = TicketRow(ticket.ticket, ticket.site, ticket.fragment, ticket.base_version, ticket.state)
        self._tickets.end([without_slot], "expired", reason)
        self._audit.append("expired", ticket=ticket.ticket, site=ticket.site, reason=reason)

    def _recover_spool(self, ticket: TicketRow) -> list[str]:
        """Check the received parts of a ticket's update.

        If the ticket is open, drop damaged parts: the site sends them again. If it is accepted and parts are damaged or
        missing, it expires.

        Returns:
            A list with one sentence about the loss; an empty list if nothing was lost.
        """
        if ticket.slot is None:
            return []
        slot = self._slots.pool(SPOOL, ticket.fragment).adopt(ticket.slot)
        bad = self._bad_parts(ticket, slot)
        if not bad and slot is not None:
            return []
        with self._journal.transaction():
            if ticket.state == "open":
                for part in bad:
                    self._tickets.drop_part(ticket.ticket, part)
                if slot is None:
                    self._tickets.change("slot = NULL", [ticket.ticket])
                if not bad:
                    return []
                return [f"Parts {bad} of ticket {ticket.ticket} of {ticket.site} were damaged; they are sent again."]
        reason = "its update was damaged on the server's disk"
        return [self._expire_accepted(ticket, reason, "the site submits its update again")]

    def _expire_accepted(self, ticket: TicketRow, reason: str, remedy: str) -> str:
        """Expire the ticket of an accepted update, and open its round again. Return a sentence about the loss."""
        with self._journal.transaction():
            self._expire(ticket, reason)
            self._journal.execute(
                "UPDATE rounds SET state = 'open', tickets = '[]' WHERE fragment = ?1 AND state = 'frozen' "
                "AND EXISTS (SELECT 1 FROM json_each(rounds.tickets) WHERE value = ?2)",
                ticket.fragment,
                ticket.ticket,
            )
        return f"Ticket {ticket.ticket} of {ticket.site} has expired: {reason}; {remedy}."

    def _bad_parts(self, ticket: TicketRow, slot: Slot | None) -> list[int]:
        """Return the numbers of an update's damaged parts and, if it was accepted, of parts without a journal row."""
        ranges = self._slots.shapes_of(ticket.fragment).update_parts
        recorded = self._tickets.parts(ticket.ticket)

        def good(row: PartRow) -> bool:
            return (
                slot is not None
                and row.part < len(ranges)
                and region_digest(slot.fd, (ranges[row.part],)) == row.digest
            )

        missing = [part for part in range(len(ranges)) if part not in recorded] if ticket.state == "accepted" else []
        return sorted([part for part, row in recorded.items() if not good(row)] + missing)
