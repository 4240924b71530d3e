"""Reads and writes the journal's rows about the run, its sites, rounds, history of versions, and ended workflows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from atoll.errors import StoreError
from atoll.protocol.status_messages import Recorded
from atoll.store.audit_log import AuditLog
from atoll.store.journal import Journal, placeholders
from atoll.store.journal_tables import (
    CONFIGS,
    GENERATIONS,
    HISTORY,
    MEMBERS,
    ROUNDS,
    RUNS,
    SAT_OUT,
    TICKETS,
    ConfigRow,
    Controls,
    GenerationRow,
    HistoryRow,
    MemberRow,
    RoundRow,
    RunRow,
    SatOutRow,
    Totals,
    controls,
    utc_text,
)
from atoll.store.round_summaries import Summary, ended_rounds, first_values, summaries, with_sites


def restored_counter(fragment: int) -> str:
    """Return the name of the counter with the newest version of a fragment that came from a saved state."""
    return f"restored version of fragment {fragment}"


def shapes_counter(fragment: int) -> str:
    """Return the name of the counter that is 1 once a fragment has the shapes of the first update."""
    return f"first shapes of fragment {fragment}"


class RunLog:
    """Reads and writes the journal's rows of a run, except the rows of tickets and of stored versions."""

    def __init__(self, journal: Journal, audit: AuditLog) -> None:
        self._journal, self._audit = journal, audit

    # -- the run

    @property
    def epoch(self) -> int:
        """The journal's epoch: a number that rises at each server start, and at each return to an older version."""
        return int(self._journal.value("SELECT epoch FROM meta"))

    @property
    def run(self) -> RunRow | None:
        """The row of this directory's run; None before `create_run`."""
        return self._journal.first(RUNS)

    @property
    def run_id(self) -> str:
        """The id of this directory's run; empty before `create_run`."""
        return str(self._journal.value("SELECT run_id FROM run") or "")

    def create_run(self, row: RunRow) -> None:
        """Insert the row of this directory's run.

        Raises:
            StoreError: the directory has a run already.
        """
        if self.run:
            raise StoreError(
                f"{self._journal.path.parent} already contains a run.",
                "Continue that run, or set another disk.state_dir.",
            )
        with self._journal.transaction(synced=True):  # otherwise a power loss could leave exports without their run
            self._journal.insert(RUNS, row)

    @property
    def finished(self) -> bool:
        """Whether the run is over."""
        return bool(self._journal.value("SELECT finished FROM meta"))

    def finish(self, finished: bool = True) -> None:
        """Record that the run is finished; with `finished=False`, that it continues."""
        with self._journal.transaction():
            if self.finished != finished:
                self._journal.execute("UPDATE meta SET finished = ?", int(finished))
                self._audit.append("finished" if finished else "continued")

    @property
    def failed(self) -> str:
        """Why the run has failed for good; empty if it has not, or if a later start of the server succeeded."""
        return str(self._journal.value("SELECT failed FROM meta"))

    def fail(self, why: str) -> None:
        """Record why the run has failed for good, so that a next start that fails, too, can tell its sites.

        Args:
            why: message of the error; empty after a start that succeeded.
        """
        if why != self.failed:
            with self._journal.transaction():
                self._journal.execute("UPDATE meta SET failed = ?", why)

    @property
    def controls(self) -> Controls:
        """What the admin has asked of the run."""
        return controls(self._journal.rows)

    def control(self, *, paused: bool, stopping: bool) -> None:
        """Record whether the run is paused, and whether it is being stopped."""
        with self._journal.transaction():
            self._journal.execute("UPDATE meta SET paused = ?, stopping = ?", int(paused), int(stopping))
            self._audit.append("controlled", paused=paused, stopping=stopping)

    def ask_back_to(self, version: int | None) -> None:
        """Record from which version the next start lets the run go on; None: from the newest."""
        with self._journal.transaction():
            self._journal.execute("UPDATE meta SET back_to = ?", -1 if version is None else version)

    def totals(self) -> Totals:
        """Return the numbers of versions, updates, deaths and bytes that the run has had so far."""
        values = dict(self._journal.rows("SELECT name, value FROM counters"))
        return Totals(**{name: values.get(name, 0) for name in Totals.__slots__})

    # -- members

    def put_member(self, site: str, lease: int, *, process: str = "", host: str = "", labels_json: str = "{}") -> None:
        """Record that a site is alive under a new lease, which replaces its earlier lease.

        Args:
            site: name of the site.
            lease: number of the lease, the right of one worker process to act for the site.
            process: two values in one text: the id of the worker process, and the hash of its lease's secret.
            host: host of the worker.
            labels_json: labels of the site.
        """
        with self._journal.transaction():
            self._journal.insert(
                MEMBERS,
                MemberRow(site, lease, "alive", utc_text(), host, labels_json, "", 0, process),
                "ON CONFLICT (site) DO UPDATE SET lease = excluded.lease, state = 'alive', "
                "joined_at = excluded.joined_at, host = excluded.host, labels_json = excluded.labels_json, "
                "detail = '', process = excluded.process",
            )

    def end_member(self, site: str, lease: int, why: str, detail: str = "") -> None:
        """Record that a site no longer takes part. If the site has a newer lease or is not alive, change nothing.

        Args:
            site: name of the site.
            lease: number of the lease that ends.
            why: the new state: "dead", "left" or "failed".
            detail: reason that `atoll status` shows.
        """
        with self._journal.transaction():
            ended = self._journal.execute(
                "UPDATE members SET state = ?, detail = ? WHERE site = ? AND lease = ? AND state = 'alive'",
                why,
                detail,
                site,
                lease,
            )
            if ended and why == "dead":
                self._journal.count("deaths")

    def forget_members(self, sites: Iterable[str]) -> None:
        """Remove the rows of sites. Call it in a transaction."""
        self._journal.execute_many("DELETE FROM members WHERE site = ?", [(site,) for site in sites])

    def member(self, site: str) -> MemberRow:
        """Return the row of a site.

        Raises:
            StoreError: no site of this name has ever joined.
        """
        row = self._journal.first(MEMBERS, "WHERE site = ?", site)
        if row is None:
            raise StoreError(f"No site with the name {site!r} has joined this run.")
        return row

    def members(self) -> tuple[MemberRow, ...]:
        """Return the rows of all sites that ever joined, sorted by name."""
        return tuple(self._journal.select(MEMBERS, "ORDER BY site"))

    def next_lease(self) -> int:
        """Return the number for the next lease: one above the highest so far."""
        return int(self._journal.value("SELECT coalesce(max(lease), 0) + 1 FROM members"))

    def kept_weight(self, site: str) -> float:
        """Return the weight of the site's first aggregated update.

        Return 0 if none was aggregated yet, or if the run's reducers do not need the weights of absent sites.
        """
        found = self._journal.value("SELECT weight FROM members WHERE site = ? AND rounds_counted > 0", site)
        return float(found or 0.0)

    # -- rounds

    def open_round(self, fragment: int, base_version: int, expected: Sequence[str]) -> None:
        """Record that a round is open. If it is open already, replace the sites that it waits for.

        Args:
            fragment: the fragment.
            base_version: the version that the round starts from.
            expected: sites that the round waits for.

        Raises:
            StoreError: the round is closed.
        """
        with self._journal.transaction():
            changed = self._journal.insert(
                ROUNDS,
                RoundRow(fragment, base_version, "open", tuple(expected), (), utc_text()),
                "ON CONFLICT (fragment, base_version) DO UPDATE SET expected = excluded.expected WHERE state = 'open'",
            )
            if not changed:
                raise self._not_open(fragment, base_version)

    def freeze(self, fragment: int, base_version: int, tickets: Sequence[int], *, keep_weights: bool = False) -> None:
        """Close a round. If it is closed with the same tickets already, change nothing.

        Args:
            fragment: the fragment.
            base_version: the version that the round starts from.
            tickets: the tickets of the updates to aggregate, in this order.
            keep_weights: also record the weights of the sites of these tickets that had no counted update before, and
                an estimate of the total weight of all sites.

        Raises:
            StoreError: the round is not open, there are no tickets, a ticket is not accepted, or an update starts from
                a later version.
        """
        with self._journal.transaction():
            row = self.round(fragment, base_version)
            if row and row.state == "frozen" and row.tickets == tuple(tickets):
                return
            fit = self._journal.value(
                f"SELECT count(*) FROM tickets WHERE ticket IN ({placeholders(tickets)}) "
                "AND fragment = ? AND base_version <= ? AND state = 'accepted'",
                *tickets,
                fragment,
                base_version,
            )
            if not tickets or fit != len(tickets):
                raise StoreError(
                    f"The round from version {base_version}{self._journal.of(fragment)} cannot close with the "
                    f"tickets {list(tickets)}: only {fit} of them have an accepted update for this round."
                )
            changed = self._journal.execute(
                "UPDATE rounds SET state = 'frozen', tickets = ?, population = (SELECT count(*) FROM members) "
                "WHERE fragment = ? AND base_version = ? AND state = 'open'",
                json.dumps(list(tickets)),
                fragment,
                base_version,
            )
            if not changed:
                raise self._not_open(fragment, base_version)
            if keep_weights:
                self._weigh(fragment, base_version, tickets)

    def _weigh(self, fragment: int, base_version: int, tickets: Sequence[int]) -> None:
        """Store the weights of the round's sites that had no counted update before, and estimate that of all sites.

        Estimate: sum of the known weights × number of sites / number of sites with a known weight. A site that has only
        sat out rounds so far has no samples, so it is not among the sites.
        """
        marks = placeholders(tickets)
        first = self._journal.select(
            TICKETS,
            f"WHERE ticket IN ({marks}) AND site IN (SELECT site FROM members WHERE rounds_counted = 0)",
            *tickets,
        )
        self._journal.execute_many(
            "UPDATE members SET weight = ? WHERE site = ?", [(row.report.weight, row.site) for row in first]
        )
        rows = self._journal.rows(
            "SELECT weight FROM members WHERE rounds_counted > 0 "
            f"OR site IN (SELECT site FROM tickets WHERE ticket IN ({marks}))",
            *tickets,
        )
        heard = [weight for (weight,) in rows]
        without_samples = self._journal.value(
            "SELECT count(*) FROM members WHERE rounds_counted = 0 "
            f"AND site NOT IN (SELECT site FROM tickets WHERE ticket IN ({marks})) "
            "AND EXISTS (SELECT 1 FROM tickets WHERE tickets.site = members.site AND tickets.state = 'sat out')",
            *tickets,
        )
        self._journal.execute(
            "UPDATE rounds SET total_weight = ? * (population - ?) / ? WHERE fragment = ? AND base_version = ?",
            math.fsum(heard),
            without_samples,
            len(heard),
            fragment,
            base_version,
        )

    def change_settings(self, settings_json: str, changes: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Record other settings of the run: which values change from which rounds on."""
        with self._journal.transaction():
            self._journal.execute("UPDATE run SET settings_json = ?", settings_json)
            self._audit.append("changes", changes=[list(each) for each in changes])

    def config_of(self, site: str, number: int) -> dict[str, Any] | None:
        """Return what the user's function has told a site for a round; None if it was not asked, or long ago."""
        row = self._journal.first(CONFIGS, "WHERE site = ? AND round = ?", site, number)
        found: dict[str, Any] | None = json.loads(row.config_json) if row is not None else None
        return found

    def keep_config(self, site: str, number: int, config: Mapping[str, Any], *, since: int) -> None:
        """Record what the user's function tells a site for a round, and forget the rounds before `since`."""
        self._journal.execute("DELETE FROM configs WHERE site = ? AND round < ?", site, since)
        self._journal.insert(CONFIGS, ConfigRow(site, number, json.dumps(config)))

    def round(self, fragment: int, base_version: int) -> RoundRow | None:
        """Return the row of the round that starts from `base_version`; None if there is no row.

        The row is added when the round opens, and deleted when the next round's version is committed.
        """
        return self._journal.first(ROUNDS, "WHERE fragment = ? AND base_version = ?", fragment, base_version)

    def rounds(self) -> tuple[RoundRow, ...]:
        """Return all rounds that are open, or are closed but have no new version yet, sorted by fragment."""
        return tuple(self._journal.select(ROUNDS, "WHERE state IN ('open', 'frozen') ORDER BY fragment"))

    def has_begun(self, fragment: int) -> bool:
        """Return whether a round was ever opened for a fragment in this state directory."""
        restored = "coalesce((SELECT value FROM counters WHERE name = ?2), 0)"
        sql = (
            "SELECT 1 FROM rounds WHERE fragment = ?1 "
            "UNION SELECT 1 FROM sat_out_rounds WHERE fragment = ?1 AND in_a_row > 0 "
            f"UNION SELECT 1 FROM history WHERE fragment = ?1 AND version > {restored}"
        )
        return self._journal.row(sql, fragment, restored_counter(fragment)) is not None

    def has_first_shapes(self, fragment: int) -> bool:
        """Return whether a fragment's buffers with the rule `first` have the shapes of the first update already."""
        return bool(self._journal.value("SELECT value FROM counters WHERE name = ?", shapes_counter(fragment)))

    def take_over_shapes(self, fragment: int, digest: str, schema_json: str, schema_digest: str) -> None:
        """Record that version 0 of a fragment was written again with other shapes. Call it inside a transaction.

        Args:
            fragment: the fragment.
            digest: digest of the new version 0.
            schema_json: the run's new schema.
            schema_digest: its digest.
        """
        self._journal.execute("UPDATE run SET schema_json = ?, schema_digest = ?", schema_json, schema_digest)
        self._journal.insert(HISTORY, HistoryRow(fragment, 0, digest, "", utc_text()))
        self._journal.count(shapes_counter(fragment))
        self._audit.append("reshaped", fragment=fragment, version=0, digest=digest, tickets=[])

    def end_sat_out(self, fragment: int, base_version: int, in_a_row: int, next_ticket: int, summary_json: str) -> None:
        """Record that a round has ended without a version, because all sites sat out.

        Args:
            fragment: the fragment.
            base_version: the version that the round started from.
            in_a_row: number of rounds, this one included, that ended so since this version was committed.
            next_ticket: number of the next ticket, which belongs to the next round.
            summary_json: summary of the round.

        Raises:
            StoreError: the round is not open.
        """
        with self._journal.transaction():
            ended = self._journal.execute(
                "DELETE FROM rounds WHERE fragment = ? AND base_version = ? AND state = 'open'", fragment, base_version
            )
            if not ended:
                raise self._not_open(fragment, base_version)
            total = self.last_sat_out_round(fragment).total + 1
            self._journal.insert(
                SAT_OUT,
                SatOutRow(fragment, base_version, in_a_row, total, next_ticket, summary_json, utc_text()),
            )
            self._audit.append("sat out by all", fragment=fragment, base_version=base_version, total=total)

    def drop_open_round(self, fragment: int, base_version: int) -> None:
        """Record that an open round has ended without a version, because the run was stopped."""
        with self._journal.transaction():
            sql = "DELETE FROM rounds WHERE fragment = ? AND base_version = ? AND state = 'open'"
            self._journal.execute(sql, fragment, base_version)

    def last_sat_out_round(self, fragment: int) -> SatOutRow:
        """Return the record of a fragment's last round that ended without a version; all zero if there was none."""
        where = "WHERE fragment = ? ORDER BY total DESC LIMIT 1"
        return self._journal.first(SAT_OUT, where, fragment) or SatOutRow(fragment, 0, 0, 0, 0)

    def ended_rounds(self, limit: int | None, fragment: int | None = None) -> list[Summary]:
        """Return the last `limit` rounds that have ended, with or without a version, oldest first, without their sites.

        Args:
            limit: number of rounds; None returns all.
            fragment: only rounds of this fragment; None returns those of all fragments.
        """
        return ended_rounds(self._journal.rows, limit, fragment)

    def summaries(self, limit: int) -> list[Summary]:
        """Return the last `limit` rounds that have ended, oldest first, with their sites."""
        return summaries(self._journal.rows, limit)

    def first_values(self) -> dict[str, Recorded]:
        """Return the first recorded value of each metric, in rounds of fragment 0."""
        return first_values(self._journal.rows)

    def with_sites(self, fragment: int, summary_json: str) -> str:
        """Return the summary of a round as JSON, with its sites.

        Args:
            fragment: fragment of the round.
            summary_json: the summary without its sites.
        """
        return with_sites(self._journal.rows, fragment, summary_json)

    def summary(self, fragment: int, summary_json: str) -> dict[str, Any]:
        """Return the summary of a version's round with its sites; empty for version 0.

        Args:
            fragment: fragment of the version.
            summary_json: the summary in the version's row.
        """
        return json.loads(self.with_sites(fragment, summary_json)) if summary_json else {}

    # -- history

    def history(self, limit: int | None = 100, fragment: int | None = None) -> list[HistoryRow]:
        """Return the last `limit` committed versions, oldest first. Their files may be gone.

        Args:
            limit: number of versions; None returns all.
            fragment: only versions of this fragment; None returns those of all fragments.
        """
        where = "WHERE NOT lost AND (?1 IS NULL OR fragment = ?1) ORDER BY seq DESC LIMIT ?2"
        return self._journal.select(HISTORY, where, fragment, -1 if limit is None else limit)[::-1]

    def set_summary(self, fragment: int, version: int, summary_json: str) -> None:
        """Replace the summary of the round that made a version. Call it inside a transaction.

        Args:
            fragment: fragment of the version.
            version: the version.
            summary_json: the summary without its sites.
        """
        self._journal.execute(
            "UPDATE history SET summary_json = ? WHERE fragment = ? AND version = ? AND NOT lost",
            summary_json,
            fragment,
            version,
        )

    def version_digest(self, fragment: int, version: int) -> str | None:
        """Return the digest of a committed version, even if its file is gone; None if the run has no such version."""
        found: str | None = self._journal.value(
            "SELECT digest FROM history WHERE fragment = ? AND version = ? AND NOT lost", fragment, version
        )
        return found

    def lost_versions(self, fragment: int = 0) -> tuple[int, ...]:
        """Return the numbers of a fragment's lost versions that are below its newest version.

        If the newest versions are damaged, the run continues from an older one, and the damaged versions are lost.
        Their numbers are not used again.
        """
        found = self._journal.rows(
            "SELECT version FROM history WHERE lost AND fragment = ?1 "
            "AND version < (SELECT heads.version FROM heads WHERE heads.fragment = ?1) ORDER BY version",
            fragment,
        )
        return tuple(version for (version,) in found)

    # -- generations of the algorithm's state

    @property
    def generation(self) -> GenerationRow:
        """The current generation of the algorithm's state."""
        newest = self._journal.first(GENERATIONS, "ORDER BY number DESC LIMIT 1")
        return newest or GenerationRow(0, 0, "", "")

    def begin_generation(self, version: int, why: str) -> str:
        """Record that the algorithm's state begins at zero again, from a version on. Call it inside a transaction.

        Args:
            version: the version.
            why: why, as a sentence without its period.

        Returns:
            A text for the log: why, and what it costs.
        """
        number = self.generation.number + 1
        reason = (
            f"{why}. So the state of the run's algorithm begins at zero again from version {version} on, at the server "
            "and at all sites. The model stays as it is, and nothing has to be done. Training may progress more slowly "
            "until all sites have taken part again."
        )
        self._journal.insert(GENERATIONS, GenerationRow(number, version, reason, utc_text()))
        self._audit.append("generation", number=number, version=version, reason=reason)
        return reason

    # -- workflows

    def ended_workflows(self) -> dict[int, str]:
        """Return the workflows that have ended: position in the run's list of workflows → name of the workflow."""
        return dict(self._journal.rows("SELECT place, name FROM workflows ORDER BY place"))

    def end_workflow(self, index: int, name: str) -> None:
        """Record the end of a workflow.

        Args:
            index: position in the run's list of workflows.
            name: name of the workflow.

        Raises:
            DiskFull: nothing was recorded; try again.
        """
        with self._journal.transaction():
            self._journal.execute(
                "INSERT OR REPLACE INTO workflows (place, name, ended_at) VALUES (?, ?, ?)", index, name, utc_text()
            )
            self._audit.append("workflow", place=index, name=name)

    def forget_workflows_from(self, index: int) -> None:
        """Delete what the journal has of the workflows at position `index` and later, so that they run again."""
        with self._journal.transaction():
            self._journal.execute("DELETE FROM workflow_facts WHERE place >= ?", index)
            self._journal.execute("DELETE FROM workflows WHERE place >= ?", index)

    def _not_open(self, fragment: int, base_version: int) -> StoreError:
        return StoreError(f"The round from version {base_version}{self._journal.of(fragment)} is not open.")
