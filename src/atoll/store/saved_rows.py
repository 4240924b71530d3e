"""The rows of a journal from which a run can go on in another state directory, as values for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from atoll.store.journal_tables import (
    GENERATIONS,
    HISTORY,
    MEMBERS,
    RUNS,
    SAT_OUT,
    SITE_ROUNDS,
    TICKETS,
    RunRow,
    SatOutRow,
    TicketRow,
)
from atoll.store.round_summaries import site_rounds
from atoll.store.run_log import restored_counter
from atoll.store.store import Store
from atoll.store.verify_journal import OF_UPDATE

Rows = dict[str, Any]
"""Table → its rows, each a list of SQL values in the order of the table's columns."""

_COUNTED = "ticket IN (SELECT max(ticket) FROM tickets WHERE state = 'counted' GROUP BY site, fragment)"
_SAT_OUT = "ticket IN (SELECT max(ticket) FROM tickets WHERE state = 'sat out' GROUP BY site, fragment)"
_NEWEST = "ticket = (SELECT max(ticket) FROM tickets)"


def saved_rows(store: Store) -> Rows:
    """Return the rows of a run that a saved state needs. Call it with the journal's lock.

    These are: the run; its sites, with the weight and the last counted update of each; the history of its versions, and
    what each site did for them; its counters and ended workflows; the generations of the algorithm's state. The newest
    ticket is there because ticket numbers must not be used again. The open round and its updates are left out. Whether
    the run is finished follows from its settings and its history.
    """
    journal = store.journal
    run = store.run_log.run
    assert run is not None
    members = [
        # `process` has a hash of the lease's secret
        replace(row, process="", state="left" if row.state == "alive" else row.state)
        for row in store.run_log.members()
    ]
    tickets = {row.ticket: row for where in (_COUNTED, _SAT_OUT, _NEWEST) for row in store.tickets.select(where)}
    return {
        "run": RUNS.write(run),
        "members": [MEMBERS.write(row) for row in members],
        "tickets": [TICKETS.write(_without_update(tickets[number])) for number in sorted(tickets)],
        "history": [
            [*values, lost]
            for lost, *values in journal.rows(
                "SELECT lost, fragment, version, digest, summary_json, created_at FROM history ORDER BY seq"
            )
        ],
        "site_rounds": [SITE_ROUNDS.write(row) for row in site_rounds(journal.rows)],
        "workflows": journal.rows("SELECT place, name, ended_at FROM workflows"),
        "generations": [GENERATIONS.write(row) for row in journal.select(GENERATIONS)],
        "sat_out_rounds": [SAT_OUT.write(row) for row in journal.select(SAT_OUT)],
        "counters": dict(journal.rows("SELECT name, value FROM counters")),
    }


def _without_update(row: TicketRow) -> TicketRow:
    """Return the row of a ticket without an update that the server has, but that is in no version yet."""
    if not row.is_live:
        return row
    reason = "the run went on from a state that was saved before this update was in a version"
    return TicketRow(row.ticket, row.site, row.fragment, row.base_version, "expired", reason)


def saved_run(rows: Rows) -> RunRow:
    """Return the row about the run itself."""
    return RUNS.read(tuple(rows["run"]))


def restore_rows(store: Store, rows: Rows, heads: Sequence[int], state: str) -> None:
    """Put the rows of a saved state into the journal of a new state directory. Call it inside a transaction.

    The audit log gets an entry for each row that is compared with it, as if the run had always been here.

    Args:
        store: the store of the new state directory.
        rows: the rows.
        heads: number of the newest version of each fragment.
        state: id of the saved state, for the audit log.
    """
    journal, audit = store.journal, store.audit
    run = saved_run(rows)
    journal.insert(RUNS, run)
    audit.append("restored", run=run.run_id, state=state, versions=list(heads))
    for member in rows["members"]:
        journal.insert(MEMBERS, MEMBERS.read(tuple(member)))
    counted: dict[tuple[int, int | None], list[int]] = {}
    for ticket in (TICKETS.read(tuple(values)) for values in rows["tickets"]):
        journal.insert(TICKETS, ticket)
        if ticket.state == "counted":
            counted.setdefault((ticket.fragment, ticket.version), []).append(ticket.ticket)
            facts = {name: getattr(ticket, name) for name in OF_UPDATE} | ticket.report.model_dump()
            audit.append("accepted", ticket=ticket.ticket, **facts)
    newest: dict[int, int] = {}
    for *values, lost in rows["history"]:
        row = HISTORY.read(tuple(values))
        journal.insert(HISTORY, row)
        journal.execute("UPDATE history SET lost = ? WHERE seq = (SELECT max(seq) FROM history)", lost)
        newest[row.fragment] = row.version
        tickets = counted.get((row.fragment, row.version), [])
        audit.append("committed", fragment=row.fragment, version=row.version, digest=row.digest, tickets=tickets)
    for name in rows["counters"].keys() - {restored_counter(fragment) for fragment in range(len(heads))}:
        journal.count(name, rows["counters"][name])
    store.tickets.skip_numbers()
    for fragment, head in enumerate(heads):
        journal.count(restored_counter(fragment), newest[fragment])
        if newest[fragment] != head:
            audit.append("fell back", fragment=fragment, lost=newest[fragment], version=head, tickets=[])
    for values in rows["site_rounds"]:
        journal.insert(SITE_ROUNDS, SITE_ROUNDS.read(tuple(values)))
    for values in rows["generations"]:
        journal.insert(GENERATIONS, GENERATIONS.read(tuple(values)))
    _restore_sat_out(store, rows, heads)
    for place, name, ended_at in rows["workflows"]:
        journal.execute("INSERT INTO workflows (place, name, ended_at) VALUES (?, ?, ?)", place, name, ended_at)


def restored_state(store: Store) -> str:
    """Return the id of the saved state with which the run in this state directory began; empty if with a model."""
    found = store.journal.value("SELECT json_extract(detail_json, '$.state') FROM audit WHERE what = 'restored'")
    return str(found or "")


def _restore_sat_out(store: Store, rows: Rows, heads: Sequence[int]) -> None:
    """Restore the rounds that all sites sat out. No round has begun here, so all tickets belong to earlier rounds."""
    journal, total = store.journal, [0] * len(heads)
    for row in (SAT_OUT.read(tuple(values)) for values in rows["sat_out_rounds"]):
        journal.insert(SAT_OUT, row)
        total[row.fragment] = max(row.total, total[row.fragment])
    first_ticket = 1 + max((TICKETS.read(tuple(values)).ticket for values in rows["tickets"]), default=0)
    for fragment, head in enumerate(heads):
        journal.insert(
            SAT_OUT,
            SatOutRow(fragment, head, 0, total[fragment], first_ticket),
            "ON CONFLICT (fragment, total) DO UPDATE SET base_version = excluded.base_version, "
            "in_a_row = excluded.in_a_row, first_ticket = excluded.first_ticket",
        )
