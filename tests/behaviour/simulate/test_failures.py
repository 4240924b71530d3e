"""What goes wrong in a simulation: a simulated site that raises or ends its process, a client that is none, an end."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_here import simulate_here
from simulated_world import CLIENT, model_of, simulation, workers_of, write

import atoll
from atoll.cli.simulate import summary
from atoll.errors import ConfigError, RunFailed, StoreError
from atoll.simulate import engine, schedule_sites
from atoll.testing.run import failpoints, together

RAISES = CLIENT.replace(
    "        fl_round.load_into(model)\n",
    "        fl_round.load_into(model)\n"
    "        if {where}:\n            raise ValueError('no data at ' + worker.site)\n",
)


def raising(where: str) -> str:
    return RAISES.replace("{where}", where)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What SCAFFOLD comes to, of four sites and three rounds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        simulate_here(monkeypatch)
        simulation(folder, **{"algorithm.name": "scaffold"}).run()
    return model_of(folder / "state")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate_here(monkeypatch)


SUBMITS = "        fl_round.submit("
NAN = """\
        import pathlib
        mark = pathlib.Path(__file__).parent / "tried"
        if worker.site == "site-0003" and not mark.exists():
            mark.touch()
            model[0].weight.data[0, 0] = float("nan")
"""
RETURNS = "    if worker.site == 'site-0001':\n        return\n"


@pytest.mark.covers("V2")
@pytest.mark.parametrize(
    ("client", "least", "ends", "workers"),
    [
        (
            raising("worker.site == 'site-0002' and fl_round.number == 2"),
            1,
            ({"site-0002": "ValueError: no data at site-0002"}, {}),
            ["0123", "013", "013"],
        ),
        (
            CLIENT.replace("    model = build()\n", RETURNS + "    model = build()\n"),
            1,
            ({"site-0001": "its script returned without an update"}, {}),
            ["023"] * 3,
        ),
        (CLIENT.replace(SUBMITS, NAN + SUBMITS), 1, ({}, {"site-0003": 1}), ["012", "0123", "0123"]),
        (CLIENT.replace(SUBMITS, NAN + SUBMITS), 4, ({}, {"site-0003": 1}), ["0123"] * 3),
    ],
    ids=["raises", "submits nothing", "refused", "refused, and needed"],
)
def test_the_rounds_go_on_without_a_site_that_fails(
    here: None,
    tmp_path: Path,
    client: str,
    least: int,
    ends: tuple[dict[str, str], dict[str, int]],
    workers: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = simulation(tmp_path, client, **{"rounds.min_sites": least}).run()
    assert (done.failed, done.refused) == ends
    assert workers_of(tmp_path / "state") == [list(names) for names in workers]
    if done.refused:
        assert "site-0003: update refused: 0.weight contains NaN or Inf" in caplog.text
        assert "; 1 update refused: site-0003; " in summary(done)
    if "site-0002" in done.failed:
        assert 'client.py", line' in caplog.text  # the user's own
        assert "simulated_site.py" not in caplog.text


def test_names_every_site_that_fails_and_prints_three_tracebacks(
    here: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RunFailed):
        simulation(tmp_path, raising("True")).run()
    lines = [line for line in caplog.messages if "no longer takes part" in line]
    assert ["Traceback" in line for line in lines] == [True, True, True, False]
    assert sorted(line.split()[0] for line in lines) == [f"site-000{number}" for number in range(4)]
    assert "ValueError: no data at site-000" in lines[3]


@pytest.mark.covers("V2", "X3")
def test_a_round_that_cannot_close_ends_with_9_and_goes_on_once_mended(
    here: None, tmp_path: Path, undisturbed: bytes
) -> None:
    rules = {"rounds.min_sites": 3, "algorithm.name": "scaffold"}
    client = raising("worker.site < 'site-0002' and fl_round.number == 2")
    why = r"Round 2 cannot close \(waits for another site: 2 alive, rounds.min_sites is 3\).*no data at site-0001"
    with pytest.raises(RunFailed, match=why) as failed:
        simulation(tmp_path, client, **rules).run()
    assert "it continues from here" in failed.value.remedy
    assert failed.value.exit_code == 9
    assert simulation(tmp_path, **rules).run().failed == {}
    assert model_of(tmp_path / "state") == undisturbed


DAMAGES = """\
        import pathlib
        if worker.site == "site-0001" and fl_round.number == 2:
            for path in pathlib.Path(__file__).parent.glob("state/sites/site-0001/algorithm-*.bin"):
                path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
"""


@pytest.mark.covers("S2", "F41")
def test_a_control_that_the_disk_has_damaged_ends_its_simulated_sites_part(here: None, tmp_path: Path) -> None:
    """At zero it would train that site away from the rest, without a word."""
    submit = next(line for line in CLIENT.splitlines(keepends=True) if SUBMITS in line)
    rules = {"algorithm.name": "scaffold", "rounds.total": 4, "rounds.min_sites": 1}
    done = simulation(tmp_path, CLIENT.replace(submit, submit + DAMAGES), **rules).run()
    assert list(done.failed) == ["site-0001"]
    assert "The algorithm's state of this site is lost" in done.failed["site-0001"]
    assert workers_of(tmp_path / "state") == [list("0123"), list("0123"), list("023"), list("023")]


@pytest.mark.covers("S2", "V2")
def test_a_control_that_is_lost_between_two_starts_is_no_zero(here: None, tmp_path: Path) -> None:
    def simulated(rounds: int) -> Any:
        rules = {"algorithm.name": "scaffold", "rounds.total": rounds, "rounds.min_sites": 1}
        return simulation(tmp_path, **rules).run()

    kept = tmp_path / "state" / "sites" / "site-0001"
    assert simulated(rounds=2).failed == {}
    for path in kept.glob("algorithm-*.bin"):
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    failed = simulated(rounds=3).failed
    assert list(failed) == ["site-0001"]
    assert "The algorithm's state of this site is lost" in failed["site-0001"]
    assert workers_of(tmp_path / "state") == [list("0123"), list("0123"), list("023")]
    shutil.rmtree(kept)
    with pytest.raises(ConfigError, match=r"The local state of site site-0001 is missing in .* Restore its folder"):
        simulated(rounds=4)


@pytest.mark.covers("F25")
def test_a_disk_that_is_full_ends_the_simulation_which_goes_on_when_there_is_space(
    here: None, tmp_path: Path, undisturbed: bytes
) -> None:
    """No site is dropped for it: without its control a site would be lost for the rest of the run."""
    full_disk = pytest.raises(StoreError, match=r"The disk failed while site-000\d was trained: .*no space left")
    with failpoints("worker.write=enospc@50"), full_disk as error:
        simulation(tmp_path, **{"algorithm.name": "scaffold"}).run()
    assert error.value.exit_code == 7
    assert 0 < len(workers_of(tmp_path / "state")) < 3
    assert simulation(tmp_path, **{"algorithm.name": "scaffold"}).run().failed == {}
    assert model_of(tmp_path / "state") == undisturbed


@pytest.mark.slow
def test_a_client_that_does_not_begin_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "START_S", 0.5)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    settings = {"run.script": f"{tmp_path / 'slow.py'}:train"}
    read = atoll.Settings.read(write(tmp_path, **settings), {"disk.state_dir": tmp_path / "state"})
    with pytest.raises(RunFailed, match=r"was not ready after 0\.5 s, and was stopped"):
        atoll.Simulation(settings=read, sites=4, processes=1).run()
    sys.modules.pop("client", None)


@pytest.mark.covers("V2")
@pytest.mark.slow
def test_simulated_sites_that_never_return_do_not_keep_the_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As many of them as there are processes: without a third the round cannot close."""
    monkeypatch.setattr(schedule_sites, "LEAST_PATIENCE_S", 1.0)
    sleeps = "        import time\n        if worker.site < 'site-0002':\n            time.sleep(100000)\n"
    client = CLIENT.replace("        fl_round.submit(", sleeps + "        fl_round.submit(")
    rules = {"rounds.quorum": 3, "rounds.min_sites": 3, "rounds.deadline_s": 0.5, "rounds.total": 3, "rounds.sites": 5}
    given = {"disk.state_dir": tmp_path / "state", "model.source": f"{tmp_path / 'client.py'}:build"}
    settings = atoll.Settings.read(write(tmp_path, client, **rules), given)
    simulated = atoll.Simulation(settings=settings, script=f"{tmp_path / 'client.py'}:train", sites=5, processes=2)
    together(simulated.run, timeout_s=90)
    assert workers_of(tmp_path / "state") == [list("234")] * 3
    assert "site-0000 did not return within 1 s" in caplog.text
