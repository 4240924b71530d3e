"""The summaries of the rounds that have ended, and what each site did in them: rows of their own, kept for all rounds.

The rows of sites are checked here, when they are read: no start reads all of them.
"""

from __future__ import annotations

import csv
import heapq
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from atoll.errors import BadRequest
from atoll.format_text import number_of
from atoll.protocol.messages import NUMBER_BELOW
from atoll.protocol.routes import ANSWER_BYTES, SITE_CURVES
from atoll.protocol.site_curves import NUMBERS, OF_METRIC, SiteCurve, SiteCurves, SiteCurvesQuery
from atoll.protocol.status_messages import GLOBAL, Recorded, RoundSummary, SiteRound
from atoll.store.journal import require_row
from atoll.store.journal_tables import SiteRoundRow

Query = Callable[..., list[tuple[Any, ...]]]
"""Function (SQL, *values) → rows of the journal."""


class Summary(NamedTuple):
    """The summary of a round that has ended. `summary_json` lacks the sites, unless `with_sites` has added them."""

    fragment: int
    round: int
    summary_json: str
    created_at: str


def ended_rounds(query: Query, limit: int | None, fragment: int | None = None) -> list[Summary]:
    """Return the last `limit` rounds that have ended, with or without a version, oldest first, without their sites.

    Args:
        query: reads the journal.
        limit: number of rounds; None returns all.
        fragment: only rounds of this fragment; None returns those of all fragments.
    """
    found = [
        [
            Summary(of, json.loads(text)["round"], text, at)
            for of, text, at in query(
                f"SELECT fragment, summary_json, created_at FROM {rounds} AND summary_json != '' "
                "AND (?1 IS NULL OR fragment = ?1) ORDER BY rowid DESC LIMIT ?2",
                fragment,
                -1 if limit is None else limit,
            )
        ][::-1]
        for rounds in ("history WHERE NOT lost", "sat_out_rounds WHERE total > 0")
    ]
    merged = list(heapq.merge(*found, key=lambda each: (each.created_at, each.round)))
    return merged if limit is None else merged[max(len(merged) - limit, 0) :]


def summaries(query: Query, limit: int) -> list[Summary]:
    """Return the last `limit` rounds that have ended, oldest first, with their sites."""
    return [
        each._replace(summary_json=with_sites(query, each.fragment, each.summary_json))
        for each in ended_rounds(query, limit)
    ]


def first_values(query: Query) -> dict[str, Recorded]:
    """Return the first recorded value of each metric, in rounds of fragment 0.

    Metrics of the server's evaluation have the prefix `GLOBAL`.
    """
    found: dict[str, Recorded] = {}
    for key, prefix in (("metrics", ""), ("global_metrics", GLOBAL)):
        rows = query(
            "SELECT each.key, each.value, json_extract(summary_json, '$.round'), min(version) "  # of the same row
            "FROM history, json_each(summary_json, ?) AS each WHERE NOT lost AND fragment = 0 AND summary_json != '' "
            "AND each.value IS NOT NULL GROUP BY each.key",
            f"$.{key}",
        )
        found |= {prefix + name: Recorded(round=number, value=value) for name, value, number, _ in rows}
    return found


def with_sites(query: Query, fragment: int, summary_json: str) -> str:
    """Return the summary of a round as JSON, with its sites, which the journal keeps in rows of their own.

    Args:
        query: reads the journal.
        fragment: fragment of the round.
        summary_json: the summary without its sites.
    """
    summary = json.loads(summary_json)
    sites = sites_of_round(query, fragment, summary.get("version"))
    return json.dumps({**summary, "sites": list(map(json.loads, sites))})


def sites_of_round(query: Query, fragment: int, version: int | None) -> list[str]:
    """Return what each site did in the round that led to a version, as JSON, ordered by site.

    Args:
        query: reads the journal.
        fragment: fragment of the version.
        version: number of the version; None: the round led to none, so no site did anything.
    """
    found = site_rounds(query, "WHERE fragment = ? AND version = ?", fragment, version)
    return [each.summary_json for each in found]


def site_rounds(query: Query, where: str = "", *values: Any) -> list[SiteRoundRow]:
    """Return what sites did in rounds, ordered by fragment, version and site.

    Args:
        query: reads the journal.
        where: an SQL clause with a `?` for each of `values`; empty for all rows.
        values: values for the clause.

    Raises:
        StateCorrupt: a row is damaged.
    """
    columns = "fragment, version, site, summary_json, row_check"
    found = []
    for fragment, version, site, summary_json, check in query(
        f"SELECT {columns} FROM site_rounds {where} ORDER BY fragment, version, site", *values
    ):
        require_row("site_rounds", ("fragment", "version", "site"), fragment, version, site, summary_json, check=check)
        found.append(SiteRoundRow(fragment, version, site, summary_json))
    return found


# -- all updates as a table


BATCH = 2000
"""About so many rows of sites are read at a time."""


def table_rows(connect: Callable[[], AbstractContextManager[Query]]) -> Iterator[str]:
    """Yield the lines of a CSV file with all rounds that led to a version: one row a site, and one of the round.

    In the row of a round, `site` is empty; metrics are means over the sites, `norm` is that of the reduced update, and
    `nbytes` the sum. All rows of some rounds are read at a time, so that no long transaction holds up the journal.

    Args:
        connect: opens the journal for reading; called once for each piece that is yielded.
    """
    with connect() as query:
        names = {
            key: [
                name
                for (name,) in query(
                    "SELECT DISTINCT each.key FROM history, json_each(summary_json, ?) AS each "
                    "WHERE NOT lost AND summary_json != '' ORDER BY each.key",
                    f"$.{key}",
                )
            ]
            for key in ("metrics", "global_metrics")
        }
        ((fragments,),), ((sites,),) = query("SELECT count(*) FROM heads"), query("SELECT count(*) FROM members")
    metrics, evaluated = names["metrics"], names["global_metrics"]
    yield _csv(
        [
            ["fragment", "version", "round", "ended_at", "site", *NUMBERS]
            + [OF_METRIC + name for name in metrics]
            + [GLOBAL + name for name in evaluated]
        ]
    )
    for fragment in range(fragments):
        version = -1
        while True:
            lines: list[list[object]] = []
            with connect() as query:
                rounds = query(
                    "SELECT version, summary_json, created_at FROM history WHERE NOT lost AND summary_json != '' AND "
                    "fragment = ? AND version > ? ORDER BY version LIMIT ?",
                    fragment,
                    version,
                    max(BATCH // (sites + 1), 1),
                )
                for version, text, at in rounds:
                    summary = RoundSummary.model_validate_json(text)
                    about = [fragment, version, summary.round, at]
                    of_round = {"nbytes": summary.bytes_up, "norm": summary.grad_norm}
                    lines.append(
                        [*about, "", *(of_round.get(name) for name in NUMBERS)]
                        + [summary.metrics.get(name) for name in metrics]
                        + [summary.global_metrics.get(name) for name in evaluated]
                    )
                    for row in map(SiteRound.model_validate_json, sites_of_round(query, fragment, version)):
                        lines.append(
                            [*about, row.site, *(getattr(row, name) for name in NUMBERS)]
                            + [row.metrics.get(name) for name in metrics]
                            + [None] * len(evaluated)
                        )
            if not lines:
                break
            yield _csv(lines)


def _csv(lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    return text.getvalue()


# -- one number of each site's updates over the rounds


CURVE_BYTES, VALUE_BYTES = 96, 25
"""Maximum bytes of a curve in an answer without its values, and of one value."""
REST_BYTES = 2**16
"""Maximum bytes of an answer without its curves."""


def site_curves(query: Query, asked: SiteCurvesQuery) -> SiteCurves:
    """Return one number of the sites' updates over the rounds, of as many sites as fit into an answer.

    Only rows of the chosen rounds and of these sites are read, so the time does not depend on the length of the run.

    Raises:
        BadRequest: there is no such fragment, site or range.
        StateCorrupt: a row is damaged.
    """
    versions = _chosen(_versions(query, asked), asked.points)
    if asked.value.startswith(GLOBAL):
        evaluated = [RoundSummary.model_validate(_summary(query, asked.fragment, version)) for version in versions]
        mean = [each.values.get(asked.value) for each in evaluated]
        return SiteCurves(versions=versions, rounds=[each.round for each in evaluated], mean=mean, curves=[])
    most = (ANSWER_BYTES[SITE_CURVES] - REST_BYTES) // (CURVE_BYTES + VALUE_BYTES * len(versions))
    found = query(
        "SELECT site FROM members WHERE site > ? AND ? IN ('', site) ORDER BY site LIMIT ?",
        asked.after,
        asked.site,
        most + 1,
    )
    sites = [site for (site,) in found[:most]]
    curves: dict[str, list[float | None]] = {site: [None] * len(versions) for site in sites}
    for place, version in enumerate(versions if sites else ()):
        of_page = "WHERE fragment = ? AND version = ? AND site BETWEEN ? AND ?"
        for row in site_rounds(query, of_page, asked.fragment, version, sites[0], sites[-1]):
            curves[row.site][place] = _value(json.loads(row.summary_json), asked.value)
    rounds = [_summary(query, asked.fragment, version) for version in versions]
    metric = asked.value.removeprefix(OF_METRIC)
    return SiteCurves(
        versions=versions,
        rounds=[each["round"] for each in rounds],
        mean=[each.get("metrics", {}).get(metric) for each in rounds] if metric != asked.value else [],
        curves=[
            SiteCurve(site=site, values=values)
            for site, values in curves.items()
            if any(value is not None for value in values)
        ],
        after=sites[-1] if len(found) > most else "",
    )


def _versions(query: Query, asked: SiteCurvesQuery) -> list[int]:
    """Return the versions of the range that a round led to, in order."""
    ((fragments,),) = query("SELECT count(*) FROM heads")
    if asked.fragment >= fragments:
        raise BadRequest(f"There is no fragment {asked.fragment}: the run has {number_of(fragments, 'fragment')}.")
    last = NUMBER_BELOW if asked.last is None else asked.last
    if asked.first > last:
        raise BadRequest(f"first = {asked.first} is above last = {last}.", "Ask for a range of versions.")
    if asked.site and not query("SELECT 1 FROM members WHERE site = ?", asked.site):
        raise BadRequest(f"No site with the name {asked.site!r} has joined this run.")
    found = query(
        "SELECT version FROM history WHERE NOT lost AND fragment = ?1 AND version BETWEEN ?2 AND ?3 AND (?4 = '' OR "
        "EXISTS (SELECT 1 FROM site_rounds AS s WHERE s.fragment = ?1 AND s.version = history.version AND s.site = ?4)"
        ") AND (?5 = '' OR summary_json != '' AND "
        "EXISTS (SELECT 1 FROM json_each(summary_json, '$.global_metrics') WHERE key = ?5)) ORDER BY version",
        asked.fragment,
        max(asked.first, 1),  # no round led to version 0
        last,
        asked.site,
        asked.value.removeprefix(GLOBAL) if asked.value.startswith(GLOBAL) else "",
    )
    return [version for (version,) in found]


def _chosen(versions: list[int], most: int) -> list[int]:
    """Return at most `most` of the versions, evenly chosen, with the first and the last."""
    if len(versions) <= most:
        return versions
    return [versions[place * (len(versions) - 1) // (most - 1)] for place in range(most)]


def _summary(query: Query, fragment: int, version: int) -> dict[str, Any]:
    ((summary_json,),) = query(
        "SELECT summary_json FROM history WHERE NOT lost AND fragment = ? AND version = ?", fragment, version
    )
    found: dict[str, Any] = json.loads(summary_json)
    return found


def _value(row: dict[str, Any], name: str) -> float | None:
    """Return a number of a `SiteRound`; None if it has no such metric."""
    of = row["metrics"] if name.startswith(OF_METRIC) else row
    value: float | None = of.get(name.removeprefix(OF_METRIC))
    return value
