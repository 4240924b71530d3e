"""DiLoCo in a swarm, whole models and streams: workers and the server are killed, and the run comes to its end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery
from swarm_run import SITES
from swarm_world import EVERY_SITE_AND_ROUND, Result, ServerProcess, sites

SETTINGS: dict[str, Any] = {
    "algorithm.name": "diloco",
    "diloco.sync_every": 4,
    "swarm.aggregators": ["a", "b", "c"],
    "network.heartbeat_timeout_s": 60.0,
    "network.idle_timeout_s": 5.0,
}
STREAMING: dict[str, Any] = {
    "diloco.num_fragments": 2,
    "diloco.fragment_sync_delay": 1,
    "diloco.fragment_update_alpha": 0.25,
}
SITE = {"script": "swarm_diloco_site.py"}

LIVES = [
    pytest.param({"a": ["pass.chunk=kill"]}, id="the-aggregator-while-it-reduces"),
    pytest.param({"server": ["accept.after=kill@2", "head.before=kill"]}, id="the-server"),
]


def trained(nursery: Nursery, folder: Path, lives: dict[str, list[str]], **settings: Any) -> tuple[Result, set[str]]:
    """The run, with these deaths; what sites have in the end."""
    server_lives = lives.get("server", [])
    with (
        ServerProcess(nursery, folder, server_lives, **SETTINGS | settings) as server,
        sites(nursery, server, dict(lives), **dict.fromkeys(SITES, SITE)) as running,
    ):
        digests = {str(running[site].ended()["digest"]) for site in SITES}
        assert server.kept.wait() == 0
        assert server.kept.deaths == len(server_lives), "a failpoint did not fire"
        for site in lives.keys() & SITES.keys():
            assert running[site].kept.deaths == len(lives[site]), "a failpoint did not fire"
    return Result(folder), digests


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Result:
    result, digests = trained(nursery, tmp_path_factory.mktemp("undisturbed"), {})
    assert len(digests) == 1
    assert result.aggregators == ["a", "b", "c"]
    return result


@pytest.mark.slow
@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize("lives", LIVES)
def test_a_round_of_whole_models_has_the_updates_that_it_had(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, lives: dict[str, list[str]]
) -> None:
    """A site that is started again trains on at once, from the version that it has: its later updates are others."""
    result, digests = trained(nursery, tmp_path, lives)
    assert len(digests) == 1
    same = len(result.versions) if "server" in lives else 2
    assert result.versions[:same] == undisturbed.versions[:same]
    assert len(result.versions) == len(undisturbed.versions)
    assert Counter(result.counted()) == Counter(EVERY_SITE_AND_ROUND)


@pytest.mark.slow
@pytest.mark.covers("P10", "D10", "L4")
@pytest.mark.parametrize("lives", LIVES)
def test_streamed_fragments_come_to_the_same_end_everywhere(
    nursery: Nursery, tmp_path: Path, lives: dict[str, list[str]]
) -> None:
    """Every fragment has its rounds, and no update counts twice."""
    result, digests = trained(nursery, tmp_path, lives, **STREAMING)
    assert len(digests) == 1
    assert [(fragment, version) for fragment, version, _ in result.versions] == [
        (fragment, version) for fragment in range(2) for version in range(4)
    ]
    assert max(Counter(result.counted()).values()) <= 2  # once for each fragment
    assert len(result.counted()) >= 2 * len(EVERY_SITE_AND_ROUND) - 2 * len(lives)


@pytest.mark.slow
@pytest.mark.covers("P10", "L3", "L5")
def test_an_asynchronous_swarm_goes_on_without_its_aggregator(nursery: Nursery, tmp_path: Path) -> None:
    """Others' updates are waiting when it is lost, so that rounds are closed one upon the other."""
    lives = {site: ["swarm.closed=kill"] for site in ("a", "b")}
    changed = {"async.enabled": True, "rounds.total": 12, "network.idle_timeout_s": 3.0, "swarm.aggregators": []}
    with (
        ServerProcess(nursery, tmp_path, **SETTINGS | changed) as server,
        sites(nursery, server, lives, **dict.fromkeys(SITES, SITE)),
    ):
        assert server.kept.wait() == 0
    assert [version for _, version, _ in Result(tmp_path).versions] == list(range(13))
