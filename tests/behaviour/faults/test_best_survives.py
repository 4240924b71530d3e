"""Server killed around the best version and the early stop: what is best, and that the run is over, is known again."""

import json

import pytest
from fault_world import Result, ServerProcess, Sites, build
from safetensors import safe_open

TRACKED = {"rounds.best_metric": "loss", "rounds.best_mode": "min"}
"""The sites report 1 / round: every round is better than the one before, so the best is what round 3 pulled."""


@pytest.mark.covers("X41")
@pytest.mark.parametrize("failpoints", ["export.write=kill@1", "export.write=kill@2", "head.after=kill@3"])
def test_killed_while_the_best_version_is_written(nursery, tmp_path, failpoints):
    quiet, killed = tmp_path / "quiet", tmp_path / "killed"
    for folder, lives in ((quiet, ()), (killed, (failpoints,))):
        folder.mkdir()
        with ServerProcess(nursery, folder, lives, **TRACKED) as server:
            Sites(server.url, folder).join()
            assert server.kept.wait() == 0
            assert server.kept.deaths == len(lives)
    for folder in (quiet, killed):
        exports = folder / "state" / "exports"
        note = json.loads((exports / "best.json").read_text())
        assert note == {"version": 2, "round": 3, "metric": "loss", "mode": "min", "value": 1 / 3}
        with safe_open(exports / "best.safetensors", framework="pt") as file:
            assert build().load_state_dict({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        assert [path.name for path in exports.iterdir() if path.name.startswith(".")] == []
    best = [(folder / "state" / "exports" / "best.safetensors").read_bytes() for folder in (quiet, killed)]
    assert best[0] == best[1]
    assert Result(quiet).bits == Result(killed).bits


@pytest.mark.covers("X42")
def test_killed_between_the_last_commit_and_the_word_that_the_run_is_over(nursery, tmp_path):
    # the largest is best: 1 of version 0, then 1/2 of version 1 is worse, and one round of patience is over.
    # head.after is reached for versions 0, 1 and 2: killed when version 2 is the head and nobody knows of the end
    settings = TRACKED | {"rounds.best_mode": "max", "rounds.early_stop_after": 1, "rounds.total": 0}
    with ServerProcess(nursery, tmp_path, ("head.after=kill@3",), **settings) as server:
        sites = Sites(server.url, tmp_path)
        sites.join()
        assert server.kept.wait() == 0
        assert server.kept.deaths == 1
    assert [version for version, _ in Result(tmp_path).versions] == [0, 1, 2]
    assert max(number for _, number in sites.trained) == 2
    assert json.loads((tmp_path / "state" / "exports" / "best.json").read_text())["version"] == 0
    log = server.log.read_text()
    assert "stopped early: loss has not improved for 1 round; the best is 1, version 0" in log
