"""What may happen to a swarm besides kills: workers that stop, that cannot be reached, that come late or go early."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, wait_until
from kit import flip_bit
from safetensors.torch import load_file
from swarm_run import SITES, build
from swarm_world import (
    EVERY_SITE_AND_ROUND,
    PLAIN,
    ROUNDS,
    Result,
    ServerProcess,
    SiteProcess,
    Sites,
    serve_swarm,
    sites,
)

import atoll
from atoll.errors import ConfigError, Gone, UsageError
from atoll.filters import NormClip

IN_TURN: dict[str, Any] = {"swarm.aggregators": ["a", "b", "c"]}


@pytest.mark.slow
@pytest.mark.covers("P10")
def test_a_stopped_aggregator_is_replaced_and_does_no_harm_when_it_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    paused = tmp_path / "reduces"
    lives = {"a": [f"pass.chunk=pause:{paused}"]}
    settings = IN_TURN | {"network.idle_timeout_s": 1.5, "network.heartbeat_timeout_s": 4.0, "rounds.min_sites": 1}
    with ServerProcess(nursery, tmp_path, **settings) as server, sites(nursery, server, lives) as running:
        wait_until(Path(f"{paused}.reached").exists, "the reduction")
        running["a"].kept.now.send(signal.SIGSTOP)
        server.said("a no longer aggregates round 1: ")
        server.said("round 1: version 1")
        paused.touch()
        running["a"].kept.now.send(signal.SIGCONT)
        digests = {running[site].ended()["digest"] for site in SITES}
        assert server.kept.wait() == 0
    result = Result(tmp_path)
    assert len(digests) == 1
    assert result.aggregators[0] != "a"
    assert set(EVERY_SITE_AND_ROUND) - set(result.counted()) <= {("a", 1), ("a", 2)}  # it was silent meanwhile
    assert len(result.counted()) == len(set(result.counted()))


@pytest.mark.slow
@pytest.mark.covers("P10")
def test_a_stopped_checker_is_replaced(nursery: Nursery, tmp_path: Path) -> None:
    reduces = tmp_path / "reduces"
    lives = {"a": [f"pass.chunk=pause:{reduces}"]}
    settings = IN_TURN | {"network.idle_timeout_s": 3.0, "network.heartbeat_timeout_s": 60.0}
    with ServerProcess(nursery, tmp_path, **settings) as server, sites(nursery, server, lives) as running:
        wait_until(Path(f"{reduces}.reached").exists, "the reduction")
        running["b"].kept.now.send(signal.SIGSTOP)
        reduces.touch()
        server.said("round 1: version 1")
        running["b"].kept.now.send(signal.SIGCONT)
        assert len({running[site].ended()["digest"] for site in SITES}) == 1
    result = Result(tmp_path)
    assert (result.history[0]["aggregator"], result.history[0]["checker"]) == ("a", "c")
    assert sorted(result.counted()) == EVERY_SITE_AND_ROUND


@pytest.mark.slow
@pytest.mark.covers("P10", "X3")
def test_the_last_worker_waits_and_says_why(nursery: Nursery, tmp_path: Path) -> None:
    settings = {"rounds.sites": 2, "rounds.min_sites": 1, "rounds.total": 2, "swarm.aggregators": ["a", "b"]}
    hold = f"2:{tmp_path / 'go'}"
    with ServerProcess(nursery, tmp_path, **settings) as server:
        a = SiteProcess(nursery, tmp_path, server.url, "a", HOLD=hold)
        b = SiteProcess(nursery, tmp_path, server.url, "b", HOLD=f"2:{tmp_path / 'never'}")
        wait_until(lambda: a.told("trains", 2) and b.told("trains", 2), "round 2")
        b.kept.close()
        (tmp_path / "go").touch()
        wait_until(lambda: "waits for a second worker: version 2" in server.reason(), "the reason")
        again = SiteProcess(nursery, tmp_path, server.url, "b")
        assert a.ended()["digest"] == again.ended()["digest"]
        assert server.kept.wait() == 0
        again.kept.close()
        a.kept.close()


@pytest.mark.slow
@pytest.mark.covers("P10", "X3")
def test_an_unreachable_worker_learns_it_before_the_first_round(nursery: Nursery, tmp_path: Path) -> None:
    with ServerProcess(nursery, tmp_path, **{"rounds.min_sites": 3}) as server:
        first = [SiteProcess(nursery, tmp_path, server.url, site) for site in ("a", "b")]
        wait_until(lambda: server.log.read_text().count(" joined") == 2, "two workers")
        hidden = SiteProcess(nursery, tmp_path, server.url, "c", ATOLL_PEER_NAME="127.0.0.2")
        assert hidden.kept.wait(60) != 0
        told = hidden.kept.now.output()
        assert "cannot reach c at http://127.0.0.2:" in told
        assert "ATOLL_PEER_NAME" in told
        assert "round 1: version 1" not in server.log.read_text()
        third = SiteProcess(nursery, tmp_path, server.url, "c")
        assert len({each.ended()["digest"] for each in [*first, third]}) == 1
        assert server.kept.wait() == 0


@pytest.mark.slow
@pytest.mark.covers("P10")
def test_a_nan_is_refused_by_name_and_the_others_go_on(nursery: Nursery, tmp_path: Path) -> None:
    with (
        ServerProcess(nursery, tmp_path, **{"rounds.min_sites": 1}) as server,
        sites(nursery, server, b={"NAN_IN": "2"}) as running,
    ):
        assert len({running[site].ended()["digest"] for site in SITES}) == 1
        assert server.kept.wait() == 0
        assert "decoder.bias" in running["b"].kept.now.output()
    assert sorted(set(EVERY_SITE_AND_ROUND) - set(Result(tmp_path).counted())) == [("b", 2)]
    assert "b: update refused: " in server.log.read_text()


@pytest.mark.slow
@pytest.mark.covers("P10")
@pytest.mark.parametrize("damaged", [1, 2], ids=["one", "both"])
def test_all_die_and_what_they_hold_is_believed_where_it_is_whole(
    nursery: Nursery, tmp_path: Path, damaged: int
) -> None:
    hold = {site: {"HOLD": f"2:{tmp_path / 'go'}"} for site in SITES}
    with ServerProcess(nursery, tmp_path, **IN_TURN, **{"network.heartbeat_timeout_s": 60.0}) as server:
        with sites(nursery, server, **hold) as running:
            wait_until(lambda: all(each.told("trains", 2) for each in running.values()), "round 2")
        holders = sorted(path.parent for path in (tmp_path / "workers").glob("*/*/held.json"))
        assert len(holders) == 2  # have version 1
        for folder in holders[:damaged]:
            for path in folder.glob("version-0-*"):
                flip_bit(path, -1)
        (tmp_path / "go").touch()
        with sites(nursery, server) as running:
            if damaged == 2:
                lost = "no connected worker has version 1, and a and b have lost it: export an older version"
                wait_until(lambda: lost in server.reason(), "the reason")
                return
            assert len({running[site].ended()["digest"] for site in SITES}) == 1
            assert server.kept.wait() == 0
    assert sorted(Result(tmp_path).counted()) == EVERY_SITE_AND_ROUND


@pytest.mark.slow
@pytest.mark.covers("P10")
def test_late_joiners_and_early_leavers(nursery: Nursery, tmp_path: Path) -> None:
    """The worker that leaves holds the newest version: it stays until another has it."""
    settings = {"rounds.sites": 2, "rounds.min_sites": 2, "rounds.total": 5, "swarm.aggregators": ["a"]}
    with ServerProcess(nursery, tmp_path, **settings) as server:
        a = SiteProcess(nursery, tmp_path, server.url, "a", LEAVE_AFTER="3")
        b = SiteProcess(nursery, tmp_path, server.url, "b", HOLD=f"2:{tmp_path / 'go'}")
        wait_until(lambda: b.told("trains", 2), "round 2")
        c = SiteProcess(nursery, tmp_path, server.url, "c")
        server.said("c joined")
        (tmp_path / "go").touch()
        a.ended()
        assert b.ended()["digest"] == c.ended()["digest"]
        assert server.kept.wait() == 0
    assert {site for site, number in Result(tmp_path).counted() if number > 3} == {"b", "c"}


@pytest.mark.slow
@pytest.mark.covers("P10")
def test_the_only_holder_of_the_newest_version_stays_until_another_has_it(nursery: Nursery, tmp_path: Path) -> None:
    """Of the two that have version 1, b is killed for good in round 2, and a leaves with its update to that round."""
    settings = {"rounds.sites": 4, "rounds.min_sites": 2, "swarm.aggregators": ["a", "b"]}
    with ServerProcess(nursery, tmp_path, **settings) as server:
        a = SiteProcess(nursery, tmp_path, server.url, "a", HOLD=f"2:{tmp_path / 'go'}", LEAVE_AFTER="2")
        b = SiteProcess(nursery, tmp_path, server.url, "b", HOLD=f"2:{tmp_path / 'never'}")
        others = [SiteProcess(nursery, tmp_path, server.url, site, HOLD=f"2:{tmp_path / 'go'}") for site in ("c", "d")]
        wait_until(lambda: all(each.told("trains", 2) for each in (a, b, *others)), "round 2")
        assert sorted(path.parent.parent.name for path in (tmp_path / "workers").glob("*/*/held.json")) == ["a", "b"]
        b.kept.close()
        (tmp_path / "go").touch()
        a.ended()
        assert len({each.ended()["digest"] for each in others}) == 1
        assert server.kept.wait() == 0
    result = Result(tmp_path)
    assert ("a", 2) in result.counted()
    assert [len(summary["workers"]) for summary in result.history] == [4, 3, 2]


@pytest.mark.covers("P10")
def test_each_site_has_the_result_and_nothing_else_is_left(nursery: Nursery, tmp_path: Path) -> None:
    with serve_swarm(tmp_path, **PLAIN | {"algorithm.name": "scaffold"}) as server:
        ran = Sites(server.url, tmp_path)
        ran.join()
        server.run()
    for site in SITES:
        found = load_file(tmp_path / "workers" / site / "model.safetensors")
        build().load_state_dict(found, strict=True)
        expected = ran.models[site].state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not list((tmp_path / "workers" / site).glob("*/spool-*"))
    state = server.settings.disk.state_dir
    export = nursery.start("atoll", "export", "out.safetensors", "--dir", str(state), cwd=tmp_path)
    assert export.wait(60) == Gone.exit_code
    said = " ".join(export.output().split())
    assert "version 3 is stored at its sites" in said
    assert "take model.safetensors from a site's folder" in said
    with pytest.raises(UsageError, match=r"so the server cannot evaluate them\. .*versions = "):
        atoll.Server(settings=server.settings, evaluation={})


@pytest.mark.covers("P10", "X3")
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rounds.sites": 1}, "rounds.sites is 1"),
        ({"disk.export_every": 2}, "disk.export_every"),
        ({"rounds.best_metric": "loss"}, "best_metric"),
        ({"aggregation.download_codec.name": "int8"}, "aggregation.download_codec"),
        ({"model.ranks": 2}, "ranks"),
        ({"disk.durability": "power"}, "durability"),
        ({"aggregation.aggregator.path": "mine.py:Mean"}, "aggregator"),
        ({"aggregation.reducer.path": "mine.py:Mean"}, "reducer"),
        (
            {"algorithm.outer_optimizer.name": None, "algorithm.outer_optimizer.path": "mine.py:Adam"},
            "algorithm.outer_optimizer",
        ),
        ({"outer_optimizer": torch.optim.Adam}, "Server got outer_optimizer"),
        ({"filters": [NormClip(1.0)]}, "Server got filters"),
        ({"workflow": print}, "Server got workflow"),
        ({"workflow.function": "mine.py:main"}, "workflow"),
        ({"workflow.result_filters": [{"filters": [{"path": "mine.py:Clip"}]}]}, "workflow.result_filters"),
        ({"model.persistor": {"path": "mine.py:Keep"}}, "persistor"),
        ({"aggregation.upload_codec.path": "mine.py:Codec"}, "codec"),
        ({"algorithm.name": None, "algorithm.path": "mine.py:MINE"}, "algorithm"),
        ({"swarm.enabled": False, "swarm.aggregators": ("a",)}, "aggregators"),
    ],
)
def test_what_does_not_go_with_a_swarm_is_refused_by_name(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        with serve_swarm(tmp_path, **settings):
            pass


def test_the_export_comes_from_the_workers(nursery: Nursery, tmp_path: Path) -> None:
    hold = {site: {"HOLD": f"3:{tmp_path / 'go'}"} for site in SITES}
    with (
        ServerProcess(nursery, tmp_path, **{"rounds.total": ROUNDS}) as server,
        sites(nursery, server, **hold) as running,
    ):
        wait_until(lambda: all(each.told("trains", 3) for each in running.values()), "round 3")
        done = nursery.start(
            "atoll", "export", "out.safetensors", "--server", server.url, cwd=tmp_path, log=tmp_path / "export.log"
        )
        assert done.wait(60) == 0, done.output()
        build().load_state_dict(load_file(tmp_path / "out.safetensors"), strict=True)
        shown = nursery.start("atoll", "status", "--server", server.url, cwd=tmp_path, log=tmp_path / "status.log")
        assert shown.wait(60) == 0
        assert "aggregated by " in shown.output()
        (tmp_path / "go").touch()
        for site in SITES:
            running[site].ended()
