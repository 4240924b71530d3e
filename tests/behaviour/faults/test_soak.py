"""Everything is killed again and again, the server and both workers, wherever chance has it: the same bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from fault_world import Result, ServerProcess, SiteProcess, left_undisturbed
from harness.processes import Kept, Nursery
from kit import SITES

ROUNDS = 8
SERVER_PLACES = {
    "spool.write": 12,
    "part.received": 8,
    "part.recorded": 8,
    "accept.before": 2,
    "accept.after": 2,
    "journal.commit": 12,
    "pass.chunk": 2,
    "pass.write": 3,
    "head.before": 1,
    "head.after": 1,
    "recover.midway": 2,
}
"""Failpoint → how often every life that leads a whole round reaches it at least."""
WORKER_PLACES = {
    "worker.write": 6,
    "pull.part": 4,
    "pull.done": 1,
    "outbox.seal": 1,
    "push.part": 2,
    "worker.acknowledged": 1,
}


def lives(chance: random.Random, places: dict[str, int], count: int) -> tuple[str, ...]:
    chosen = chance.choices(sorted(places), k=count)
    return tuple(f"{place}=kill@{chance.randint(1, places[place])}" for place in chosen)


def end_of(workers: Sequence[Kept]) -> list[int]:
    return [worker.wait() for worker in workers]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return left_undisturbed(tmp_path_factory.mktemp("undisturbed"), **{"rounds.total": ROUNDS})


@pytest.mark.slow
@pytest.mark.covers("F44")
@pytest.mark.parametrize("seed", [0, *(pytest.param(each, marks=pytest.mark.long) for each in (1, 2))])
def test_whatever_is_killed_no_acknowledged_update_is_lost(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, seed: int
) -> None:
    chance = random.Random(seed)
    with ServerProcess(nursery, tmp_path, lives(chance, SERVER_PLACES, 5), **{"rounds.total": ROUNDS}) as server:
        sites = [SiteProcess(nursery, tmp_path, server.url, site) for site in SITES]
        workers = [Kept(site.start, lives(chance, WORKER_PLACES, 3)) for site in sites]
        try:
            assert end_of(workers) == [0, 0]
            assert server.kept.wait() == 0
        finally:
            for worker in workers:
                worker.close()
        assert server.kept.deaths + sum(worker.deaths for worker in workers) >= 8, "hardly anything was killed"
    result = Result(tmp_path)
    assert result.bits == undisturbed.bits
    assert result.counted() == [(site, number) for site in SITES for number in range(1, ROUNDS + 1)]
