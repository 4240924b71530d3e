"""What a start does: find the newest version that verifies, drop what does not, remove what nothing refers to.

Each step is one transaction that leads from a journal that can be recovered to one that can; files go last. So a kill
at any instruction leaves something from which the same recovery gives the same run.
"""

from __future__ import annotations

from atoll.errors import StateCorrupt
from atoll.runtime import failpoint
from atoll.store import audit_log
from atoll.store.file_slots import DELTA, SPOOL, STATE, VERSION, Slot, is_slot_name, region_digest, verify
from atoll.store.journal import NEW_RUN
from atoll.store.journal_tables import PartRow, Recovered, TicketRow, VersionRow
from atoll.store.model_copies import remove_half_written
from atoll.store.tickets import COLUMNS as TICKET_COLUMNS
from atoll.store.tickets import to_ticket
from atoll.store.versions import Versions


def recover(store: Versions) -> Recovered:
    """See `Store.recover`."""
    fell_back = []
    for fragment in _fragments(store):
        with store.lock:
            fell_back += _recover_head(store, fragment)
            store.recover_deltas(fragment)
        failpoint("recover.midway")
    warnings = [warning for ticket in _live(store) for warning in _recover_spool(store, ticket)]
    failpoint("recover.midway")
    for fragment in _fragments(store):
        if store.journal.value("SELECT version FROM heads WHERE fragment = ?", fragment) is not None:
            with store.transaction():
                store.drop_old(fragment)
    remove_half_written(store)
    _remove_files(store)
    return _found(store, " ".join(fell_back), tuple(warnings))


def _fragments(store: Versions) -> list[int]:
    return [fragment for kind, fragment in store.pools if kind == VERSION]


def _recover_head(store: Versions, fragment: int) -> list[str]:
    """Make the newest version that verifies the head; returns what is to be said about it."""
    head = store.journal.value("SELECT version FROM heads WHERE fragment = ?", fragment)
    if head is None:
        return []
    rows = [row for row in reversed(store.versions(fragment)) if row.version <= head]
    good = next((row for row in rows if _verifies(store, row)), None)
    if good is None:
        raise StateCorrupt(
            f"No version of fragment {fragment} in {store.directory} is what its digests say: "
            f"{', '.join(str(row.version) for row in rows)}.",
            NEW_RUN,
        )
    for row in rows:
        if row.version < good.version:
            _adopt_older(store, row)
    return [_fall_back(store, fragment, head, good.version)] if good.version < head else []


def _adopt_older(store: Versions, row: VersionRow) -> None:
    """Keep an older version as far as its files are there; whoever pulls it checks its bytes."""
    with store.transaction():
        if store.pool(VERSION, row.fragment).adopt(row.slot) is None:
            store.journal.execute("DELETE FROM versions WHERE fragment = ? AND version = ?", row.fragment, row.version)
        elif row.state_slot is not None and store.pool(STATE, row.fragment).adopt(row.state_slot) is None:
            store.journal.execute(
                "UPDATE versions SET state_slot = NULL WHERE fragment = ? AND version = ?", row.fragment, row.version
            )


def _verifies(store: Versions, row: VersionRow) -> bool:
    shapes = store.shapes_of(row.fragment)
    version = store.pool(VERSION, row.fragment).adopt(row.slot)
    if version is None or not verify(version.fd, shapes.version, row.part_digests):
        return False
    if not row.state_digests:  # the first one, before any outer step
        return True
    if row.state_slot is None or shapes.state is None:
        return False
    state = store.pool(STATE, row.fragment).adopt(row.state_slot)
    return state is not None and verify(state.fd, shapes.state, row.state_digests)


def _fall_back(store: Versions, fragment: int, head: int, version: int) -> str:
    """Forget what came after `version`, in one transaction."""
    reason = f"version {head} of fragment {fragment} was lost, the run goes on from version {version}"
    with store.transaction():
        found = store.journal.rows(
            f"SELECT {TICKET_COLUMNS} FROM tickets WHERE fragment = ?1 AND (base_version >= ?2 OR version > ?2) "
            "AND state IN ('open', 'accepted', 'counted')",
            fragment,
            version,
        )
        lost = [to_ticket(row) for row in found]
        for ticket in lost:
            if ticket.state == "counted":
                store.journal.count("counted", -1)
                store.journal.execute(
                    "UPDATE members SET rounds_counted = rounds_counted - 1 WHERE site = ?", ticket.site
                )
            _expire(store, ticket, reason)
        store.journal.execute("DELETE FROM rounds WHERE fragment = ? AND base_version >= ?", fragment, version)
        store.journal.execute("DELETE FROM versions WHERE fragment = ? AND version > ?", fragment, version)
        store.journal.execute("DELETE FROM deltas WHERE fragment = ? AND version > ?", fragment, version)
        store.journal.execute("UPDATE history SET lost = 1 WHERE fragment = ? AND version > ?", fragment, version)
        store.journal.execute(
            "UPDATE heads SET version = ?, durable_version = min(durable_version, ?) WHERE fragment = ?",
            version,
            version,
            fragment,
        )
        store.journal.execute("UPDATE meta SET epoch = epoch + 1, finished = 0")
        audit_log.append(
            store.journal, "fell back", fragment=fragment, lost=head, version=version, tickets=[t.ticket for t in lost]
        )
    return f"{reason[0].upper()}{reason[1:]}: {len(lost)} updates have to be submitted again."


def _expire(store: Versions, ticket: TicketRow, reason: str) -> None:
    """End a ticket whose slot no pool has adopted; its file is removed as one that nothing refers to."""
    store.end_tickets(
        [TicketRow(ticket.ticket, ticket.site, ticket.fragment, ticket.base_version, ticket.state)], "expired", reason
    )
    audit_log.append(store.journal, "expired", ticket=ticket.ticket, site=ticket.site, reason=reason)


def _live(store: Versions) -> list[TicketRow]:
    found = store.journal.rows(
        f"SELECT {TICKET_COLUMNS} FROM tickets WHERE state IN ('open', 'accepted') ORDER BY ticket"
    )
    return [to_ticket(row) for row in found]


def _recover_spool(store: Versions, ticket: TicketRow) -> list[str]:
    """Check what was received under a live ticket; returns what is to be said about it."""
    if ticket.slot is None:
        return []
    slot = store.pool(SPOOL, ticket.fragment).adopt(ticket.slot)
    bad = _bad_parts(store, ticket, slot)
    if not bad and slot is not None:
        return []
    with store.transaction():
        if ticket.state == "open":
            for part in bad:
                store.journal.execute("DELETE FROM parts WHERE ticket = ? AND part = ?", ticket.ticket, part)
            if slot is None:
                store.change_tickets("UPDATE tickets SET slot = NULL WHERE ticket = ?", [ticket.ticket])
            if not bad:
                return []
            return [f"Parts {bad} of ticket {ticket.ticket} of {ticket.site} were damaged; they are sent again."]
        reason = "its update was damaged on the server's disk"
        _expire(store, ticket, reason)
        store.journal.execute(
            "UPDATE rounds SET state = 'open', tickets_json = '[]' WHERE fragment = ?1 AND state = 'frozen' "
            "AND EXISTS (SELECT 1 FROM json_each(tickets_json) WHERE value = ?2)",
            ticket.fragment,
            ticket.ticket,
        )
    return [f"Ticket {ticket.ticket} of {ticket.site} has expired: {reason}; it is submitted again."]


def _bad_parts(store: Versions, ticket: TicketRow, slot: Slot | None) -> list[int]:
    """Numbers of the recorded parts that are not what their digests say, and of those an accepted update lacks."""
    ranges = store.shapes_of(ticket.fragment).update_parts
    recorded = store.parts(ticket.ticket)

    def good(row: PartRow) -> bool:
        return slot is not None and row.part < len(ranges) and region_digest(slot.fd, (ranges[row.part],)) == row.digest

    missing = [part for part in range(len(ranges)) if part not in recorded] if ticket.state == "accepted" else []
    return sorted([part for part, row in recorded.items() if not good(row)] + missing)


def _remove_files(store: Versions) -> None:
    """Remove every slot that no row refers to."""
    columns = {
        VERSION: ("slot", "versions"),
        STATE: ("state_slot", "versions"),
        DELTA: ("slot", "deltas"),
        SPOOL: ("slot", "tickets"),
    }
    for (kind, fragment), pool in store.pools.items():
        column, table = columns[kind]
        rows = store.journal.rows(f"SELECT {column} FROM {table} WHERE fragment = ? AND {column} IS NOT NULL", fragment)
        pool.retain({row[0] for row in rows})
        pool.trim()
    known = store.holds().keys()
    for path in store.slots_directory.iterdir():
        if is_slot_name(path.name) and path.name not in known:
            path.unlink()


def _found(store: Versions, fell_back: str, warnings: tuple[str, ...]) -> Recovered:
    at = store.journal.rows("SELECT fragment, version FROM heads WHERE version IS NOT NULL ORDER BY fragment")
    heads = {fragment: store.version(fragment, version) for fragment, version in at}
    tickets = {ticket.ticket: ticket for ticket in _live(store)}
    for head in heads.values():
        tickets |= {ticket.ticket: ticket for ticket in store.tickets(head.fragment, head.version)}
    lost = {fragment: len(numbers) for fragment in heads if (numbers := store.lost_versions(fragment))}
    started = store.journal.rows("SELECT fragment FROM rounds UNION SELECT fragment FROM history WHERE version > 0")
    return Recovered(
        members=store.members(),
        rounds=store.rounds(),
        tickets=tuple(ticket for _, ticket in sorted(tickets.items())),
        heads=heads,
        started=frozenset(row[0] for row in started),
        next_ticket=store.journal.value("SELECT coalesce(max(ticket), 0) + 1 FROM tickets"),
        next_lease=store.journal.value("SELECT coalesce(max(lease), 0) + 1 FROM members"),
        finished=store.finished,
        lost=lost,
        fell_back=fell_back,
        warnings=warnings,
    )
