"""Checks that a journal is intact: that it has not lost its last entries, and that its rows agree with the audit log.

A starting server checks the rows that it is going to use. `atoll audit` checks all rows. Both read the audit log from
its last entry backwards, and check the hash chain on the way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.errors import StateCorrupt
from atoll.format_text import number_of, of_fragment
from atoll.json_files import NoteDamaged, chain_hash
from atoll.protocol.messages import Report
from atoll.store.audit_log import (
    NAME,
    START,
    AuditHead,
    Query,
    boot_id,
    read_head,
    require_same_log,
    tip,
)
from atoll.store.journal import placeholders
from atoll.store.journal_tables import AuditRow

OF_UPDATE = ("site", "fragment", "base_version", "digest", "norm")
"""Values of an accepted update that are both in the ticket's row and in the audit entry, besides its report."""
_PAGE = 1000
_REMEDY = (
    "Check the disk and memory of this machine. Restore the whole directory from a backup, or start a new "
    "run with another disk.state_dir and model.source = an exported file."
)


@dataclass
class Start:
    """Result of the check of the journal at a server's start.

    Attributes:
        lost: content of `audit.head` if a power loss has removed the journal's last entries; else None.
        lost_entries: number of audit entries that are lost.
        may_lack_tickets: whether a power loss may have removed new tickets from the journal. No audit entry names them.
        warnings: sentences for the server's log.
    """

    lost: AuditHead | None = None
    lost_entries: int = 0
    may_lack_tickets: bool = False
    warnings: list[str] = field(default_factory=list)


def at_start(rows: Query, directory: Path) -> Start:
    """Check the rows of the journal that a starting server is going to use.

    Args:
        rows: function that runs an SQL query on the journal.
        directory: the state directory.

    Raises:
        StateCorrupt: the journal has lost its last entries, and a power loss cannot be the cause. Or a row and the
            audit log differ.
    """
    start, head = Start(), None
    try:
        head = read_head(directory)
        if head is None and tip(rows)[0]:
            start.warnings.append(f"{directory / NAME} is missing, so a loss of new entries cannot be noticed.")
    except NoteDamaged as error:
        start.warnings.append(
            f"{directory / NAME} is damaged ({error}), so a loss of new entries cannot be noticed. Check the disk."
        )
    if head is not None:
        _find_lost(start, head, rows, directory)
        start.may_lack_tickets = _may_lose_power(head)
    else:
        start.may_lack_tickets = tip(rows)[0] > 0
    since = head.entries if head is not None else 0
    _compare(rows, directory, since=since, everything=False)
    return start


def everything(rows: Query, directory: Path, head: AuditHead | None) -> tuple[int, str]:
    """Compare the whole audit log with the rows of the journal.

    Args:
        rows: function that runs an SQL query on the journal.
        directory: the state directory.
        head: content of `audit.head`, read before the journal, because a running server may write both. None: there is
            no such file, so a loss of the log's end cannot be noticed.

    Returns:
        The number of entries in the audit log, and the last entry's hash.

    Raises:
        StateCorrupt: a row and the log differ (the message names the first difference), or the log has lost its end.
    """
    if head is not None and (missing := require_same_log(head, rows, directory)[1]):
        raise StateCorrupt(
            f"The audit log of {directory} has lost its last {number_of(missing, 'entry')}: {NAME} counts "
            f"{head.entries}.",
            "Start the server. If a power loss explains the missing entries, it continues without them; else "
            "it prints what to do.",
        )
    _compare(rows, directory, since=0, everything=True)
    return tip(rows)


def _find_lost(start: Start, head: AuditHead, rows: Query, directory: Path) -> None:
    entries, missing = require_same_log(head, rows, directory)
    epoch = int(rows("SELECT epoch FROM meta")[0][0])
    if not missing and head.epoch <= epoch:
        return
    lost = (
        f"The journal in {directory} has lost its end: its audit log has {number_of(entries, 'entry')} "
        f"(epoch {epoch}), but {NAME} says that it had {head.entries} (epoch {head.epoch}). "
    )
    if not _may_lose_power(head):
        raise StateCorrupt(
            lost
            + (
                "The machine has not rebooted since then, so a power loss cannot be the cause."
                if head.durability == "process"
                else f"With durability = {head.durability!r}, a power loss cannot be the cause."
            ),
            "Check the disk, and restore the whole directory from a backup. To continue without the lost entries "
            f"instead, remove {NAME}: the workers then send again the updates that they still have.",
        )
    start.lost, start.lost_entries = head, missing
    start.warnings.append(
        f"{lost}With disk.durability = 'process', a power loss can do this. The run continues from entry {entries}; "
        "workers submit their later updates again."
    )


def _may_lose_power(head: AuditHead) -> bool:
    """Return whether a power loss may have removed the end of the journal since `audit.head` was written."""
    boot = boot_id()
    return head.durability == "process" and not (boot and boot == head.boot)


def _compare(rows: Query, directory: Path, *, since: int, everything: bool) -> None:
    problem = _Comparison(rows, since, everything).problem()
    if problem:
        raise StateCorrupt(f"The journal in {directory} is damaged or was changed: {problem}.", _REMEDY)


class _Comparison:
    """Compares the entries of the audit log with the journal's rows, from the last entry backwards.

    Args:
        rows: function that runs an SQL query on the journal.
        since: number of an entry. This entry and all entries with higher numbers are always read.
        everything: True: read back to the first entry. False: read back to `since`, then on until the entries of all
            needed rows are found.
    """

    def __init__(self, rows: Query, since: int, everything: bool) -> None:
        self._rows, self._since, self._everything = rows, since, everything
        self._latest: dict[int, tuple[str, int | None]] = {}  # ticket → state and version of its newest decision
        self._reshaped = set[int]()  # fragments with a version 0 that was written again
        self._accepted_tickets = set[int]()  # tickets with an accepted entry
        self._sat_out_fragments = set[int]()  # fragments: the rounds that all sites sat out were compared
        states = ("accepted", "counted") if everything else ("accepted",)
        accepted = rows(f"SELECT ticket FROM tickets WHERE state IN ({placeholders(states)}) ORDER BY ticket", *states)
        versions = rows("SELECT fragment, version, digest FROM versions ORDER BY fragment, version")
        heads = rows("SELECT fragment, version FROM heads WHERE version IS NOT NULL ORDER BY fragment")
        self._count = rows("SELECT count(*) FROM heads")[0][0]
        # text that names a row without an entry so far → the digest or version that the entry must have
        self._open: dict[str, Any] = {f"the accepted ticket {ticket}": None for (ticket,) in accepted}
        self._open |= {f"version {version}{self._of(fragment)}": digest for fragment, version, digest in versions}
        self._open |= {f"the head{self._of(fragment)}": version for fragment, version in heads}
        self._history: Iterator[tuple[Any, ...]] = _paged(
            rows, "SELECT seq, fragment, version, digest FROM history WHERE seq < ? ORDER BY seq DESC"
        )

    def _of(self, fragment: int) -> str:
        return of_fragment(fragment if self._count > 1 else None)

    def problem(self) -> str:
        """Compare entries and rows. Return a text about the first difference; empty if there is none."""
        ((above,),) = self._rows(
            "SELECT min(versions.version) FROM versions LEFT JOIN heads USING (fragment) "
            "WHERE versions.version > coalesce(heads.version, -1)"
        )
        if above is not None:
            return f"version {above} is above the head of its fragment"
        last = None
        for last in self._entries():
            found = self._check_entry(last)
            if found:
                return found
            if not self._everything and last.seq <= self._since and not self._open:
                return self._end_problem()
        if last is not None and (last.seq, last.prev_hash) != (1, START):
            return f"the audit log begins at entry {last.seq}"
        for what in self._open:
            return f"the audit log has no entry for {what}"
        if next(self._history, None) is not None:
            return "the history has versions that the audit log does not have"
        return self._end_problem()

    def _entries(self) -> Iterator[AuditRow]:
        """Yield the entries from the last to the first, and check that they form a hash chain.

        Raises:
            StateCorrupt: an entry does not match its hash, or the entry after it does not contain this hash.
        """
        later: AuditRow | None = None
        for values in _paged(self._rows, "SELECT * FROM audit WHERE seq < ? ORDER BY seq DESC"):
            row = AuditRow(*values)
            follows = later is None or (later.seq, later.prev_hash) == (row.seq + 1, row.hash)
            if not follows or chain_hash(*values[:-1]) != row.hash:
                number = row.seq if follows or later is None else later.seq - 1
                raise StateCorrupt(
                    f"The audit log is broken at entry {number}: this entry was changed or removed.",
                    "Restore the whole state directory from a backup.",
                )
            yield row
            later = row

    def _check_entry(self, entry: AuditRow) -> str:
        detail = json.loads(entry.detail_json)
        match entry.what:
            case "accepted":
                return self._accepted_entry(entry.seq, detail)
            case "refused" | "expired":
                self._decided([detail["ticket"]], entry.what)
            case "sat out":
                return self._sat_out(entry.seq, detail["ticket"])
            case "sat out by all":
                return self._sat_out_by_all(entry.seq, detail["fragment"], detail["total"])
            case "reopened":
                self._decided(detail["tickets"], "reopened")
            case "fell back":
                self._decided(detail["tickets"], "expired")
                found = self._head(detail, entry.seq)
                if not found and "sat_out_by_all" in detail:
                    found = self._sat_out_by_all(entry.seq, detail["fragment"], detail["sat_out_by_all"])
                return found
            case "reshaped":
                self._reshaped.add(detail["fragment"])
                return self._head(detail, entry.seq) or self._committed(detail, entry.seq)
            case "committed" if detail["fragment"] in self._reshaped and detail["version"] == 0:
                return ""  # version 0 before it got other shapes
            case "committed":
                self._decided(detail["tickets"], "counted", detail["version"])
                return self._head(detail, entry.seq) or self._committed(detail, entry.seq)
        return ""

    def _decided(self, tickets: list[int], state: str, version: int | None = None) -> None:
        for ticket in tickets:
            self._latest.setdefault(ticket, (state, version))

    def _sat_out(self, seq: int, ticket: int) -> str:
        """Compare a ticket with the entry that its site sat out the round, unless a later entry decided otherwise."""
        self._decided([ticket], "sat out")
        found = self._rows("SELECT state FROM tickets WHERE ticket = ?", ticket)
        if self._latest[ticket][0] != "sat out" or (found and found[0][0] == "sat out"):
            return ""
        return f"ticket {ticket} is not marked as sat out, but entry {seq} of the audit log records it"

    def _sat_out_by_all(self, seq: int, fragment: int, total: int) -> str:
        """Compare the number of a fragment's rounds that all sites sat out with the newest entry about it."""
        if fragment in self._sat_out_fragments:
            return ""
        self._sat_out_fragments.add(fragment)
        found = self._rows("SELECT max(total) FROM sat_out_rounds WHERE fragment = ?", fragment)
        recorded = found[0][0] or 0
        if recorded == total:
            return ""
        return (
            f"{number_of(recorded, 'round')}{self._of(fragment)} recorded as sat out by all sites, but entry {seq} of "
            f"the audit log has {total}"
        )

    def _accepted_entry(self, seq: int, detail: Mapping[str, Any]) -> str:
        ticket = detail["ticket"]
        if ticket in self._accepted_tickets:  # a later entry accepted this ticket again
            return ""
        self._accepted_tickets.add(ticket)
        self._open.pop(f"the accepted ticket {ticket}", None)
        state, version = self._latest.pop(ticket, ("accepted", None))
        columns = ("state", "version", *OF_UPDATE)
        found = self._rows(f"SELECT {', '.join(columns)}, report FROM tickets WHERE ticket = ?", ticket)
        if not found:
            return f"ticket {ticket} is missing, but entry {seq} of the audit log records it"
        if state == "reopened":
            return ""
        expected = {"state": state, "version": version}
        if state in ("accepted", "counted"):
            expected |= {name: detail[name] for name in (*OF_UPDATE, *Report.model_fields)}
        *values, report = found[0]
        row = dict(zip(columns, values, strict=True)) | Report.model_validate_json(report).model_dump()
        return next(
            (
                f"ticket {ticket} has the {name} {row[name]!r}, but entry {seq} of the audit log has {value!r}"
                for name, value in expected.items()
                if row[name] != value
            ),
            "",
        )

    def _head(self, detail: Mapping[str, Any], seq: int) -> str:
        """Compare a fragment's newest version (head) in the journal with the newest audit entry about this fragment.

        The first call for a fragment, with the newest entry, does this. Later calls return "".

        Args:
            detail: values of the audit entry.
            seq: number of the audit entry.

        Returns:
            A text about the difference; empty if there is none.
        """
        fragment, version = detail["fragment"], detail["version"]
        head = self._open.pop(f"the head{self._of(fragment)}", version)
        return (
            ""
            if head == version
            else f"the head{self._of(fragment)} is version {head}, but entry {seq} of the audit log has {version}"
        )

    def _committed(self, detail: Mapping[str, Any], seq: int) -> str:
        key = detail["fragment"], detail["version"]
        _, *history = next(self._history, (0, None, None, None))
        for table, digest in (
            ("version", self._open.pop(f"version {key[1]}{self._of(key[0])}", detail["digest"])),
            ("row of the history of version", history[2] if (history[0], history[1]) == key else None),
        ):
            if digest != detail["digest"]:
                return (
                    f"the {table} {key[1]}{self._of(key[0])} has the digest {digest!r}, but entry {seq} of "
                    f"the audit log has {detail['digest']!r}"
                )
        return ""

    def _end_problem(self) -> str:
        """Check that journal and audit log agree on whether the run is finished.

        Return a text about the difference; empty if they agree.
        """
        newest = self._rows(
            "SELECT what FROM audit WHERE what IN ('finished', 'continued', 'fell back') ORDER BY seq DESC LIMIT 1"
        )
        finished = bool(newest and newest[0][0] == "finished")
        ((found,),) = self._rows("SELECT finished FROM meta")
        if bool(found) == finished:
            return ""
        return f"the run is {'' if found else 'not '}finished, but the audit log says the opposite"


def _paged(rows: Query, sql: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a query. At most `_PAGE` rows are in memory at a time.

    Args:
        rows: function that runs an SQL query on the journal.
        sql: query with a condition `< ?` on its first column, in descending order of that column.
    """
    below = 2**62
    while page := rows(f"{sql} LIMIT {_PAGE}", below):
        yield from page
        below = page[-1][0]
