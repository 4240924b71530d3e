"""Sites that cannot do their part, or say what is not so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness.processes import Nursery, wait_until
from swarm_world import SITES, Result, ServerProcess, Sites, serve_swarm, sites


def faulty(fault: str, **env: str) -> dict[str, str]:
    return {"script": "faulty_site.py", "FAULT": fault, **env}


@pytest.mark.slow
@pytest.mark.covers("P10", "X3")
@pytest.mark.parametrize(
    ("fault", "aggregators", "why"),
    [
        ("full", ["a"], "round 1: it has moved no byte for "),
        ("lying", ["a"], "round 1: the digests of its report do not belong to a version"),
        ("slow", ["b", "a"], r"round 2: it has been working for .* s, but no round before took "),
    ],
    ids=["full", "lying", "slow"],
)
def test_replaces_a_worker_that_cannot_aggregate(
    nursery: Nursery, tmp_path: Path, fault: str, aggregators: list[str], why: str
) -> None:
    """No disk for the updates; digests of no version, which must neither end the server nor come into its journal;
    far slower than round 1 has shown that it takes, though its bytes move all the time.
    """
    env = {"a": faulty(fault, ENOUGH=str(tmp_path / "enough"))}
    settings = {"swarm.aggregators": aggregators, "network.idle_timeout_s": 1.0}
    with ServerProcess(nursery, tmp_path, **settings) as server, sites(nursery, server, **env) as running:
        if fault == "slow":
            server.said("a no longer aggregates round 2", 90)
            (tmp_path / "enough").touch()
        assert len({each.ended()["digest"] for each in running.values()}) == 1
        assert server.kept.wait() == 0
    assert re.search(f"a no longer aggregates {why}", server.log.read_text())


@pytest.mark.slow
@pytest.mark.covers("P10", "X3")
def test_status_says_while_no_worker_can_aggregate(nursery: Nursery, tmp_path: Path) -> None:
    env = dict.fromkeys(SITES, faulty("full", ROOM=str(tmp_path / "room")))
    settings = {"network.idle_timeout_s": 0.5, "rounds.total": 1}
    with ServerProcess(nursery, tmp_path, **settings) as server, sites(nursery, server, **env) as running:
        told = "workers in a row could not aggregate the round; the last was "
        wait_until(lambda: told in server.reason(), "the reason")
        assert "it has moved no byte for " in server.reason()
        (tmp_path / "room").touch()
        assert len({each.ended()["digest"] for each in running.values()}) == 1
        assert server.kept.wait() == 0


@pytest.mark.covers("P10")
def test_the_collecting_worker_refuses_an_update_that_is_too_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of so many steps with gradients of norm √82,688: 0.05 · √82,688 · √steps is 14 for c, 20 for a, 25 for b."""
    with serve_swarm(
        tmp_path, **{"aggregation.max_update_norm": 22.0, "rounds.min_sites": 2, "rounds.total": 2}
    ) as server:
        Sites(server.url, tmp_path).join()
        server.run()
    result = Result(tmp_path)
    assert [summary["workers"] for summary in result.history] == [["a", "c"]] * 2
    assert {site for site, _, state in result.tickets if state == "refused"} == {"b"}
    assert "b: update refused: its norm is 24.89, above aggregation.max_update_norm 22" in caplog.text
