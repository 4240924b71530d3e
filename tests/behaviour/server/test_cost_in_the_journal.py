"""What a round costs in the journal: its transactions, its statements, and its questions outside of transactions."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from kit.models import build_model
from kit.servers import new_simulation
from kit.world import World

SITES = 4
COUNTS = Counter[str]()


class Counted(sqlite3.Connection):
    """A connection that counts what it is asked."""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        self._count(sql)
        return super().execute(sql, *values)

    def executemany(self, sql: str, values: Iterable[Any]) -> sqlite3.Cursor:
        self._count(sql)
        return super().executemany(sql, values)

    def _count(self, sql: str) -> None:
        COUNTS["statements"] += 1
        COUNTS["transactions"] += sql.startswith("BEGIN")
        COUNTS["questions"] += sql.startswith("SELECT") and not self.in_transaction


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *given, **more: connect(*given, **{"factory": Counted} | more))
    COUNTS.clear()
    return COUNTS


def train(worker: Any) -> None:
    model = build_model()
    for fl_round in worker:
        fl_round.load_into(model)
        fl_round.submit(model)


def per_round(counts: Counter[str], few: Counter[str], rounds: int) -> dict[str, float]:
    """What each of the further `rounds` has cost."""
    return {what: (counts[what] - few[what]) / rounds for what in counts}


def test_questions_and_transactions_of_a_round(tmp_path: Path, counts: Counter[str]) -> None:
    """A round of four sites takes four transactions a site (the ticket, its file, the part, the update), and two for
    the version: it becomes the newest, and durable. What the server asks beside them does not grow unnoticed."""

    def run(name: str, rounds: int) -> Counter[str]:
        counts.clear()
        World(tmp_path / name, build_model(), "abcd", **{"rounds.total": rounds}).run()
        return Counter(counts)

    few = run("few", 5)
    cost = per_round(run("many", 15), few, 10)
    assert cost["transactions"] <= 4 * SITES + 2.5
    assert cost["questions"] <= 13 * SITES + 4


def test_statements_of_a_simulated_worker_round(tmp_path: Path, counts: Counter[str]) -> None:
    """Each simulated site adds at most 12.6 SQL statements to a round."""

    def run(name: str, sites: int) -> Counter[str]:
        counts.clear()
        rules = {"algorithm.name": "fedavg", "rounds.total": 4, "disk.state_dir": tmp_path / name}
        new_simulation(build_model(), script=train, sites=sites, processes=1, **rules).run()
        return Counter(counts)

    few = run("few", 10)
    cost = per_round(run("many", 30), few, 4 * 20)
    assert cost["statements"] - 2 * cost["transactions"] <= 12.6  # how many share a BEGIN and COMMIT depends on time
