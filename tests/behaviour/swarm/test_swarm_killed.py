"""Workers of a swarm and its server are killed at the places that matter: the same bits, and no site trains twice.

The sites aggregate in the order a, b, c: round 1 is aggregated by a and checked by b, round 2 by b and c.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until
from kit import flip_bit
from swarm_run import SITES
from swarm_world import EVERY_SITE_AND_ROUND, Result, ServerProcess, sites

SETTINGS: dict[str, Any] = {
    "swarm.aggregators": ["a", "b", "c"],
    "network.heartbeat_timeout_s": 60.0,
    "network.idle_timeout_s": 5.0,
}


@pytest.fixture(scope="module")
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("undisturbed")
    with ServerProcess(nursery, folder, **SETTINGS) as server, sites(nursery, server) as running:
        assert len({running[site].ended()["digest"] for site in SITES}) == 1
        assert server.kept.wait() == 0
    result = Result(folder)
    assert result.aggregators == ["a", "b", "c"]
    return result


DEATHS = [
    pytest.param({"a": ["swarm.collected=kill@3"]}, id="the-aggregator-with-all-updates"),
    pytest.param({"a": ["pass.chunk=kill@2"]}, id="the-aggregator-while-it-reduces"),
    pytest.param({"a": ["swarm.closed=kill"]}, id="the-aggregator-before-it-says-that-it-has-reduced"),
    pytest.param({"a": ["swarm.told=kill"]}, id="the-aggregator-after-it-said-so"),
    pytest.param({"b": ["swarm.held=kill@2"]}, id="the-checker"),
    pytest.param({"c": ["worker.acknowledged=kill"]}, id="a-submitter-after-its-update-was-collected"),
    pytest.param(
        {"a": ["pass.chunk=kill"], "c": ["worker.acknowledged=kill"]}, id="submitter-and-aggregator-one-after-the-other"
    ),
    *(
        pytest.param({"server": [f"{place}=kill"]}, id=place)
        for place in ("accept.before", "swarm.asked", "head.before")
    ),
    pytest.param({"server": ["accept.after=kill@2", "recover.midway=kill", "head.before=kill"]}, id="in-its-recovery"),
]


@pytest.mark.slow
@pytest.mark.covers("P10")
@pytest.mark.parametrize("lives", DEATHS)
def test_a_run_with_deaths_has_the_bits_of_an_undisturbed_one(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, lives: dict[str, list[str]]
) -> None:
    """No site trains a round once more because the server was killed."""
    of_server = lives.get("server", [])
    with ServerProcess(nursery, tmp_path, of_server, **SETTINGS) as server, sites(nursery, server, lives) as running:
        assert len({running[site].ended()["digest"] for site in SITES}) == 1
        assert server.kept.wait() == 0
        assert server.kept.deaths == len(of_server), "a failpoint did not fire"
        assert sum(each.kept.deaths for each in running.values()) >= len(lives) - bool(of_server), "did not fire"
        trained = sum(each.kept.now.output().count('"trains"') for each in running.values())
    result = Result(tmp_path)
    assert result.bits == undisturbed.bits
    assert Counter(result.counted()) == Counter(EVERY_SITE_AND_ROUND)
    assert not of_server or trained == len(EVERY_SITE_AND_ROUND)


@pytest.mark.slow
@pytest.mark.covers("P10", "F41")
@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("version", "The version that the round starts from is damaged: its digest differs"),
        ("state", "The outer state that the round starts from is damaged"),
        ("spool", "differs from the one received: the disk has changed it"),
    ],
)
def test_a_bit_changes_on_the_disk_of_the_aggregator(
    nursery: Nursery, tmp_path: Path, undisturbed: Result, what: str, said: str
) -> None:
    """While round 2 is trained, or one of its updates is awaited: another aggregates it, of what it has itself."""
    go = tmp_path / "go"
    held = {site: {"HOLD": f"2:{go}"} for site in (SITES if what != "spool" else "c")}
    with ServerProcess(nursery, tmp_path, **SETTINGS) as server, sites(nursery, server, **held) as running:
        wait_until(lambda: all(each.told("trains", 2) for each in running.values()), "round 2")
        assert server.place("aggregator") == "b"
        if what == "spool":
            wait_until(lambda: collected(server) == ["a", "b"], "two updates at b")
        for path in files_of(tmp_path, "b", what):
            flip_bit(path, path.stat().st_size // 2)  # in place: it is open at b
        go.touch()
        assert len({running[site].ended()["digest"] for site in SITES}) == 1
        assert server.kept.wait() == 0
    assert "b no longer aggregates round 2" in server.log.read_text()
    assert said in server.log.read_text()
    result = Result(tmp_path)
    assert result.bits == undisturbed.bits
    assert Counter(result.counted()) == Counter(EVERY_SITE_AND_ROUND)
    assert result.aggregators[1] != "b"


def collected(server: ServerProcess) -> list[str]:
    now = server.status()
    place = now.fragments[0].place if now else None
    return sorted(place.collected) if place else []


def files_of(folder: Path, site: str, what: str) -> list[Path]:
    """Of the newest version that a site holds, or of all updates that it has collected."""
    (note,) = (folder / "workers" / site).glob("*/held.json")
    if what == "spool":
        return sorted(note.parent.glob("spool-*"))
    newest = max(json.loads(note.read_text())["versions"], key=lambda row: int(row[1]))
    return [note.parent / f"{what}-0-{newest[3] if what == 'version' else newest[4]}.safetensors"]


@pytest.mark.slow
@pytest.mark.covers("P10")
def test_a_finished_run_that_is_started_again_stays_as_it_is(nursery: Nursery, tmp_path: Path) -> None:
    with ServerProcess(nursery, tmp_path, **SETTINGS) as server, sites(nursery, server) as running:
        for site in SITES:
            running[site].ended()
        assert server.kept.wait() == 0
    bits = Result(tmp_path).bits
    with ServerProcess(nursery, tmp_path, **SETTINGS) as server:
        assert server.kept.wait() == 0
    assert Result(tmp_path).bits == bits
