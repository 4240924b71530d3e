"""The server is killed while a user's aggregator works: same bits as with the built-in mean, and nobody retrains."""

from __future__ import annotations

from pathlib import Path

import pytest
from fault_world import Result, ServerProcess, Sites
from harness.processes import Nursery, wait_until

SLOW_MEAN = """
import os, time
from pathlib import Path

HERE = Path(__file__).parent


def mean(updates):
    total = sum(update.weight for update in updates)
    for index, name in enumerate(updates[0].tensors):
        result = updates[0].tensors[name].mul_(updates[0].weight / total)
        for update in updates[1:]:
            result.add_(update.tensors[name], alpha=update.weight / total)
        yield name, result
        if updates[0].round == 2 and index == 1:  # half of the result is written
            (HERE / "entered.tmp").write_text(str(os.getpid()))
            (HERE / "entered.tmp").rename(HERE / "entered")
            while not (HERE / "go").exists():
                time.sleep(0.01)
"""


def runs(pid: int) -> bool:
    """Whether a process is there, and not only waits to be buried."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


FORKING = """
import os, time
from pathlib import Path


def mean(updates):
    child = os.fork()
    if child == 0:
        time.sleep(1000)
    (Path(__file__).parent / "child").write_text(str(child))
    return {name: updates[0].tensors[name] for name in updates[0].tensors}
"""


@pytest.mark.covers("D7")
def test_what_an_aggregator_forks_ends_with_the_server(nursery: Nursery, tmp_path: Path) -> None:
    """Else it keeps spools open that were removed, and their space."""
    (tmp_path / "forking.py").write_text(FORKING)
    with ServerProcess(
        nursery, tmp_path, **{"aggregation.aggregator.path": "forking.py:mean", "rounds.total": 1}
    ) as server:
        Sites(server.url, tmp_path).join()
        assert server.kept.wait() == 0
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not runs(child), "the end of what the aggregator has forked")


@pytest.mark.covers("F10", "D7")
def test_killed_while_the_aggregator_works(nursery: Nursery, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    with ServerProcess(nursery, plain) as server:
        Sites(server.url, plain).join()
        assert server.kept.wait() == 0
    own = tmp_path / "own"
    own.mkdir()
    (own / "slow.py").write_text(SLOW_MEAN)
    with ServerProcess(nursery, own, **{"aggregation.aggregator.path": "slow.py:mean"}) as server:
        sites = Sites(server.url, own)
        wait_until((own / "entered").exists, "the aggregation of round 2")
        aggregator = int((own / "entered").read_text())
        assert runs(aggregator)
        server.kept.now.kill()
        wait_until(lambda: not runs(aggregator), "the end of the aggregator's process")
        (own / "go").write_text("")
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == 1
    Result(own).require_same(Result(plain), sites)
    assert sorted(path.name for path in (own / "state").iterdir() if path.is_file()) == [
        "audit.head",
        "journal.sqlite",
        "lock",
        "status.json",
    ]
