"""The run, its members, rounds and workflows in the journal: what the round machine decided, as rows.

The table is made when the first one ends, so that journals of runs without workflows stay as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from atoll.errors import StoreError
from atoll.store import audit_log
from atoll.store.core import Core
from atoll.store.journal import Journal, placeholders
from atoll.store.journal_tables import AuditRow, HistoryRow, MemberRow, RoundRow, RunRow, Totals, now

_RUN = "run_id, settings_json, schema_json, schema_digest, torch_build, cpu_capability, created_at"
_MEMBER = "site, lease, state, joined_at, host, labels_json, detail, rounds_counted, process, weight"
_ROUND = "fragment, base_version, state, expected_json, tickets_json, opened_at, population, total_weight"


class Members(Core):
    """Part of `Store`."""

    @property
    def epoch(self) -> int:
        """Raised by every start and every fall back; shown in status."""
        return int(self.journal.value("SELECT epoch FROM meta"))

    @property
    def run(self) -> RunRow | None:
        """The run of this directory; None before `create_run`."""
        row = self.journal.row(f"SELECT {_RUN} FROM run")
        return RunRow(*row) if row else None

    def create_run(self, row: RunRow) -> None:
        """Begin the run of this directory.

        Raises:
            StoreError: it has one already.
        """
        if self.run:
            raise StoreError(f"{self.directory} already holds a run.", "Go on with it, or give another state_dir.")
        with self.transaction():
            self.journal.execute(
                f"INSERT INTO run (id, {_RUN}) VALUES (1, ?, ?, ?, ?, ?, ?, ?)",
                row.run_id,
                row.settings_json,
                row.schema_json,
                row.schema_digest,
                row.torch_build,
                row.cpu_capability,
                row.created_at,
            )

    def put_member(
        self, site: str, lease: int, *, process: str = "", host: str = "", labels_json: str = "{}", joined_at: str = ""
    ) -> MemberRow:
        """`site` takes part under `lease`; earlier leases of it are void. `joined_at` is by default this moment."""
        with self.transaction():
            self.journal.execute(
                f"INSERT INTO members ({_MEMBER}) VALUES (?, ?, 'alive', ?, ?, ?, '', 0, ?, 0) ON CONFLICT (site) "
                "DO UPDATE SET "
                "lease = excluded.lease, state = 'alive', joined_at = excluded.joined_at, host = excluded.host, "
                "labels_json = excluded.labels_json, detail = '', process = excluded.process",
                site,
                lease,
                joined_at or now(),
                host,
                labels_json,
                process,
            )
        return self.member(site)

    def end_member(self, site: str, lease: int, why: str, detail: str = "") -> None:
        """`site` no longer takes part; `why` is dead, left or failed.

        Nothing happens where it has a newer lease, or this one has ended before.
        """
        with self.transaction():
            ended = self.journal.execute(
                "UPDATE members SET state = ?, detail = ? WHERE site = ? AND lease = ? AND state = 'alive'",
                why,
                detail,
                site,
                lease,
            )
            if ended and why == "dead":
                self.journal.count("deaths")

    def member(self, site: str) -> MemberRow:
        """One member.

        Raises:
            StoreError: nobody of that name ever joined.
        """
        row = self.journal.row(f"SELECT {_MEMBER} FROM members WHERE site = ?", site)
        if row is None:
            raise StoreError(f"{site!r} never joined.")
        return MemberRow(*row)

    def members(self) -> tuple[MemberRow, ...]:
        """Everybody who ever joined, by name."""
        return tuple(MemberRow(*row) for row in self.journal.rows(f"SELECT {_MEMBER} FROM members ORDER BY site"))

    def open_round(self, fragment: int, base_version: int, expected: Sequence[str]) -> None:
        """The round from `base_version` waits for `expected`. The same round again changes whom."""
        with self.transaction():
            self.journal.execute(
                f"INSERT INTO rounds ({_ROUND}) VALUES (?, ?, 'open', ?, '[]', ?, 0, 0) "
                "ON CONFLICT (fragment, base_version) "
                "DO UPDATE SET expected_json = excluded.expected_json WHERE state = 'open'",
                fragment,
                base_version,
                json.dumps(list(expected)),
                now(),
            )

    def set_expected(self, fragment: int, base_version: int, expected: Sequence[str]) -> None:
        """Whom an open round waits for has changed.

        Raises:
            StoreError: that round is not open.
        """
        with self.transaction():
            changed = self.journal.execute(
                "UPDATE rounds SET expected_json = ? WHERE fragment = ? AND base_version = ? AND state = 'open'",
                json.dumps(list(expected)),
                fragment,
                base_version,
            )
            if not changed:
                raise StoreError(f"No round from version {base_version} of fragment {fragment} is open.")

    def freeze(self, fragment: int, base_version: int, tickets: Sequence[int], *, keep_weights: bool = False) -> None:
        """Close a round with exactly these tickets, in this order. The same again changes nothing.

        Args:
            keep_weights: note the first weight of each site, and the total weight of all sites.

        Raises:
            StoreError: the round is not open, or a ticket is not an accepted one of its version or an earlier one.
        """
        with self.transaction():
            row = self.round(fragment, base_version)
            if row and row.state == "frozen" and row.tickets == tuple(tickets):
                return
            fit = self.journal.value(
                f"SELECT count(*) FROM tickets WHERE ticket IN ({placeholders(tickets)}) "
                "AND fragment = ? AND base_version <= ? AND state = 'accepted'",
                *tickets,
                fragment,
                base_version,
            )
            if not tickets or fit != len(tickets):
                raise StoreError(
                    f"The round from version {base_version} of fragment {fragment} cannot close with the tickets "
                    f"{list(tickets)}: {fit} of them are accepted updates of it."
                )
            changed = self.journal.execute(
                "UPDATE rounds SET state = 'frozen', tickets_json = ?, population = (SELECT count(*) FROM members) "
                "WHERE fragment = ? AND base_version = ? AND state = 'open'",
                json.dumps(list(tickets)),
                fragment,
                base_version,
            )
            if not changed:
                raise StoreError(f"No round from version {base_version} of fragment {fragment} is open.")
            if keep_weights:
                self._weigh(fragment, base_version, tickets)

    def _weigh(self, fragment: int, base_version: int, tickets: Sequence[int]) -> None:
        """W = the sum of the weights of the sites heard × (registered sites / sites heard)."""
        marks = placeholders(tickets)
        self.journal.execute(
            "UPDATE members SET weight = (SELECT tickets.weight FROM tickets WHERE tickets.site = members.site "
            f"AND ticket IN ({marks})) WHERE rounds_counted = 0 "
            f"AND site IN (SELECT site FROM tickets WHERE ticket IN ({marks}))",
            *tickets,
            *tickets,
        )
        rows = self.journal.rows(
            "SELECT weight FROM members WHERE rounds_counted > 0 "
            f"OR site IN (SELECT site FROM tickets WHERE ticket IN ({marks}))",
            *tickets,
        )
        heard = [weight for (weight,) in rows]
        self.journal.execute(
            "UPDATE rounds SET total_weight = ? * population / ? WHERE fragment = ? AND base_version = ?",
            math.fsum(heard),
            len(heard),
            fragment,
            base_version,
        )

    def kept_weight(self, site: str) -> float:
        """The first weight of a site of which an update counts; 0 where none does, or where weights are not kept."""
        found = self.journal.value("SELECT weight FROM members WHERE site = ? AND rounds_counted > 0", site)
        return float(found or 0.0)

    def round(self, fragment: int, base_version: int) -> RoundRow | None:
        """The round from a version; None where it never opened, or was over long ago."""
        row = self.journal.row(
            f"SELECT {_ROUND} FROM rounds WHERE fragment = ? AND base_version = ?", fragment, base_version
        )
        return _round(row) if row else None

    def rounds(self) -> tuple[RoundRow, ...]:
        """Open and frozen rounds."""
        found = self.journal.rows(f"SELECT {_ROUND} FROM rounds WHERE state IN ('open', 'frozen') ORDER BY fragment")
        return tuple(_round(row) for row in found)

    @property
    def finished(self) -> bool:
        """Whether the last round is committed."""
        return bool(self.journal.value("SELECT finished FROM meta"))

    def finish(self, finished: bool = True) -> None:
        """The run is over; or, with False, goes on after all, because it was given more rounds."""
        with self.transaction():
            if self.finished != finished:
                self.journal.execute("UPDATE meta SET finished = ?", int(finished))
                audit_log.append(self.journal, "finished" if finished else "continued")

    def history(self, limit: int | None = 100, fragment: int | None = None) -> list[HistoryRow]:
        """The last `limit` versions that were committed (None: all), oldest first, kept or not."""
        found = self.journal.rows(
            "SELECT fragment, version, digest, summary_json, created_at FROM history "
            "WHERE NOT lost AND (?1 IS NULL OR fragment = ?1) ORDER BY seq DESC LIMIT ?2",
            fragment,
            -1 if limit is None else limit,
        )
        return [HistoryRow(*row) for row in reversed(found)]

    def version_digest(self, fragment: int, version: int) -> str | None:
        """What the digest of a version was, kept or not; None where the run has no such version."""
        found: str | None = self.journal.value(
            "SELECT digest FROM history WHERE fragment = ? AND version = ? AND NOT lost", fragment, version
        )
        return found

    def lost_versions(self, fragment: int = 0) -> tuple[int, ...]:
        """Numbers below the head that stand for no version of the run: it fell back behind them."""
        found = self.journal.rows(
            "SELECT version FROM history WHERE lost AND fragment = ?1 "
            "AND version < (SELECT heads.version FROM heads WHERE heads.fragment = ?1) ORDER BY version",
            fragment,
        )
        return tuple(version for (version,) in found)

    def totals(self) -> Totals:
        """Counts over the whole run."""
        values = dict(self.journal.rows("SELECT name, value FROM counters"))
        return Totals(**{name: values.get(name, 0) for name in Totals.__slots__})

    def audit_entries(self, limit: int = 100) -> list[AuditRow]:
        """The last entries of the audit log, oldest first."""
        return audit_log.entries(self.journal, limit)

    def verify_audit(self) -> tuple[int, str]:
        """Number of entries and last hash of the audit log.

        Raises:
            StateCorrupt: it was tampered with; the first broken entry is named.
        """
        return audit_log.verify(self.journal)


def _round(row: tuple[Any, ...]) -> RoundRow:
    fragment, base_version, state, expected, tickets, opened_at, population, total_weight = row
    asked, frozen = tuple(json.loads(expected)), tuple(json.loads(tickets))
    return RoundRow(fragment, base_version, state, asked, frozen, opened_at, population, total_weight)


_TABLE = """
CREATE TABLE IF NOT EXISTS workflows (
    place INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    ended_at TEXT NOT NULL
) STRICT
"""


def finished(journal: Journal) -> dict[int, str]:
    """Place in the run's list → name, of those that have ended."""
    if journal.value("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'workflows'") is None:
        return {}
    return dict(journal.rows("SELECT place, name FROM workflows ORDER BY place"))


def finish(journal: Journal, place: int, name: str) -> None:
    """Record the end of one.

    Raises:
        DiskFull: nothing was recorded; may be tried again.
    """
    with journal.transaction():
        journal.execute(_TABLE)
        journal.execute("INSERT OR REPLACE INTO workflows VALUES (?, ?, ?)", place, name, now())
        audit_log.append(journal, "workflow", place=place, name=name)


def forget_from(journal: Journal, place: int) -> None:
    """Run this one again, and those behind it."""
    if finished(journal):
        with journal.transaction():
            journal.execute("DELETE FROM workflows WHERE place >= ?", place)
