"""One number of each site's updates over the rounds: which rounds and sites an answer has."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from atoll.errors import StateCorrupt
from atoll.protocol.site_curves import SiteCurves, SiteCurvesQuery
from atoll.protocol.status_messages import Recorded, RoundSummary, SiteRound
from atoll.store.journal_tables import HISTORY, SITE_ROUNDS, HistoryRow, SiteRoundRow
from atoll.store.round_summaries import first_values, site_curves, table_rows
from atoll.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Two fragments, and no version."""
    with Store(tmp_path) as store:
        with store.journal.transaction():
            store.journal.execute("INSERT INTO heads (fragment) VALUES (0), (1)")
        yield store


def put(store: Store, version: int, *updates: SiteRound, fragment: int = 0) -> None:
    """The round one above the version has led to it, with these updates."""
    with store.journal.transaction():
        summary = f'{{"round": {version + 1}, "version": {version}}}'
        store.journal.insert(HISTORY, HistoryRow(fragment, version, "", summary, ""))
        for each in updates:
            known = store.journal.value("SELECT 1 FROM members WHERE site = ?", each.site)
            if not known:
                store.run_log.put_member(each.site, store.run_log.next_lease())
            store.journal.insert(SITE_ROUNDS, SiteRoundRow(fragment, version, each.site, each.model_dump_json()))


def loss(site: str, value: float) -> SiteRound:
    return SiteRound(site=site, weight=2.0, nbytes=7, metrics={"loss": value})


def curves(store: Store, **asked: object) -> SiteCurves:
    return site_curves(store.journal.rows, SiteCurvesQuery.model_validate(asked))


def values(found: SiteCurves) -> dict[str, list[float | None]]:
    return {each.site: each.values for each in found.curves}


@pytest.mark.parametrize(
    ("points", "versions"),
    [
        (10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (7, [1, 2, 4, 5, 7, 8, 10]),  # the places 9 k / 6, rounded down: 0, 1, 3, 4, 6, 7, 9
        (4, [1, 4, 7, 10]),
        (2, [1, 10]),
    ],
)
def test_points_of_curves_are_chosen_evenly(store: Store, points: int, versions: list[int]) -> None:
    """If there are more rounds than requested points, the points of a curve are chosen evenly, with the first and the
    last round.
    """
    put(store, 0)
    for version in range(1, 11):
        put(store, version, loss("a", version / 8))
    found = curves(store, points=points)
    assert found.versions == versions
    assert found.rounds == [version + 1 for version in versions]
    assert values(found) == {"a": [version / 8 for version in versions]}
    assert found.after == ""
    assert curves(store, points=points, last=10).versions == versions


def test_a_curve_has_null_for_missing_numbers(store: Store) -> None:
    """A curve has a site's number for each round, and null for a round without one. A site without any number has no
    curve.
    """
    put(store, 1, loss("a", 1.0), loss("b", 2.0))
    put(store, 2, loss("b", 3.0), SiteRound(site="c", steps=4))
    put(store, 3, loss("a", 4.0))
    put(store, 9, loss("a", 5.0), fragment=1)
    assert values(curves(store)) == {"a": [1.0, None, 4.0], "b": [2.0, 3.0, None]}  # c has no loss
    assert values(curves(store, value="nbytes")) == {"a": [7, None, 7], "b": [7, 7, None], "c": [None, 0, None]}
    assert values(curves(store, value="steps", first=2, last=2)) == {"b": [0], "c": [4]}
    assert values(curves(store, value="metrics.absent")) == {}
    assert values(curves(store, fragment=1)) == {"a": [5.0]}


def test_one_sites_curve_has_only_its_rounds(store: Store) -> None:
    """The curve of one requested site has points only for rounds with an update of this site.

    In an asynchronous run, few versions have an update of one site.
    """
    for version in range(1, 11):
        put(store, version, loss("a" if version % 3 else "b", float(version)))
    found = curves(store, site="b", points=2)
    assert (found.versions, values(found)) == ([3, 9], {"b": [3.0, 9.0]})


def test_lost_versions_have_no_point(store: Store) -> None:
    """A curve has no point for a version that was lost."""
    for version in (1, 2, 3):
        put(store, version, loss("a", float(version)))
    with store.journal.transaction():
        store.journal.execute("UPDATE history SET lost = 1 WHERE version = 2")
    assert values(curves(store)) == {"a": [1.0, 3.0]}


def test_many_curves_are_sent_in_pages(store: Store) -> None:
    """If the curves of all sites are too many for one answer, they are sent in pages."""
    # 7,000 sites have 2 rounds. A page of 983,040 bytes has 6,733 curves of 96 + 2 × 25 bytes.
    names = [f"{number:064}" for number in range(7000)]
    put(store, 1)
    put(store, 2)
    with store.journal.transaction():
        store.journal.execute_many(
            "INSERT INTO members (site, lease, state, joined_at, host, labels_json, detail, rounds_counted, process) "
            "VALUES (?, ?, 'alive', '', '', '{}', '', 0, '')",
            [(name, lease) for lease, name in enumerate(names)],
        )
        store.journal.execute_many(
            "INSERT INTO site_rounds (fragment, version, site, summary_json) VALUES (0, ?, ?, ?)",
            [
                (version, name, loss(name, -1.2345678901234567e-300).model_dump_json())
                for version in (1, 2)
                for name in names
            ],
        )
    first = curves(store)
    second = curves(store, after=first.after, last=first.versions[-1])
    assert [len(page.curves) for page in (first, second)] == [6733, 267]
    assert [each.site for page in (first, second) for each in page.curves] == names
    assert (first.after, second.after) == (names[6732], "")
    assert 900_000 < len(first.model_dump_json()) <= 2**20


def test_a_damaged_row_of_a_curve_is_reported(store: Store) -> None:
    """If a row of a curve is damaged in the journal, the error names the row."""
    put(store, 1, loss("a", 1.0))
    with store.journal.transaction():
        store.journal.execute("UPDATE site_rounds SET row_check = row_check + 1")
    with pytest.raises(StateCorrupt, match=r"site_rounds \(fragment = 0, version = 1, site = 'a'\) does not match"):
        curves(store)


def end(store: Store, version: int, metrics: dict[str, float], evaluated: dict[str, float], *sites: SiteRound) -> None:
    """The round one above the version has led to it, with these values."""
    summary = RoundSummary(
        fragment=0,
        round=version + 1,
        version=version,
        metrics=metrics,
        counts={},
        global_metrics=evaluated,
        seconds=0.1,
        grad_norm=0.5,
        bytes_up=14,
    )
    put(store, version, *sites)
    with store.journal.transaction():
        store.journal.execute(
            "UPDATE history SET summary_json = ? WHERE version = ?", summary.model_dump_json(exclude={"sites"}), version
        )


def test_the_servers_evaluation_has_a_curve_of_its_rounds(store: Store) -> None:
    """Every third version was evaluated: only those rounds are in the curve, and points are chosen among them."""
    for version in range(1, 10):
        end(store, version, {"loss": 1.0}, {"odd $.[name]": version / 8} if version % 3 == 0 else {})
    found = curves(store, value="global.odd $.[name]")
    assert (found.versions, found.rounds, found.mean) == ([3, 6, 9], [4, 7, 10], [3 / 8, 6 / 8, 9 / 8])
    assert found.curves == []
    assert curves(store, value="global.odd $.[name]", points=2).versions == [3, 9]
    assert curves(store, value="global.other").versions == []


def test_the_first_value_of_a_metric_is_the_oldest(store: Store) -> None:
    """Each metric has its own first round; the server's evaluation has a prefix."""
    for version in range(1, 130):
        end(store, version, {"loss": 9.0 / version}, {"loss": 0.5} if version > 110 else {})
    found = first_values(store.journal.rows)
    assert found == {"loss": Recorded(round=2, value=9.0), "global.loss": Recorded(round=112, value=0.5)}


def test_the_table_has_all_rounds_and_sites(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of updates has one row a site and round and one a round, with every metric of any round."""
    monkeypatch.setattr("atoll.store.round_summaries.BATCH", 9)  # of 2 sites and the round
    for version in range(1, 8):
        evaluated = {"auc": 0.75} if version == 7 else {}
        sites = loss("a", float(version)), SiteRound(site="b", steps=3, norm=2.0, metrics={"late": 1.0})
        end(store, version, {"loss": float(version), "late": 1.0}, evaluated, *sites)
    pieces = list(table_rows(lambda: nullcontext(store.journal.rows)))
    assert len(pieces) == 1 + 3  # the head, and 3 + 3 + 1 rounds
    rows = list(csv.DictReader("".join(pieces).splitlines()))
    assert [(row["version"], row["site"]) for row in rows] == [
        (str(version), site) for version in range(1, 8) for site in ("", "a", "b")
    ]
    whole, a, b = rows[-3:]
    assert (whole["metrics.loss"], whole["global.auc"], whole["norm"], whole["nbytes"]) == ("7.0", "0.75", "0.5", "14")
    assert (a["round"], a["weight"], a["metrics.loss"], a["metrics.late"], a["global.auc"]) == (
        "8",
        "2.0",
        "7.0",
        "",
        "",
    )
    assert (b["steps"], b["norm"], b["metrics.late"]) == ("3", "2.0", "1.0")
