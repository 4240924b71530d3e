"""`atoll.Simulation` in a program: which settings count, which clients there are, what goes wrong, what is refused."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import flip_bit
from kit.servers import plain_server
from simulated_world import CLIENT, MOVES, RULES, doing, moved, result_of, run, simulation, start, workers_of

import atoll
from atoll.cli.simulate import summary
from atoll.errors import ConfigError, RunFailed, StoreError, UsageError
from atoll.protocol import messages
from atoll.server.coordinator.site_operations import SiteOperations
from atoll.simulate import schedule_sites
from atoll.testing.run import failpoints

pytestmark = pytest.mark.usefixtures("here")

DRAWS = """
import random
import numpy as np

LOADED = [random.random(), np.random.rand(), torch.rand(()).item()]


def draw(worker) -> None:
    before = [random.random(), np.random.rand(), torch.rand(()).item()]
    model = build()
    for fl_round in worker:
        fl_round.load_into(model)
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        fl_round.submit(model)
    with (HERE / "drawn").open("a") as file:
        file.write(f"{worker.site} {' '.join(map(str, [*LOADED, *before, *drawn]))}\\n")
"""


@pytest.mark.covers("V1")
def test_random_numbers_depend_on_seed_site_and_round(tmp_path: Path) -> None:
    """The random numbers that a client draws in a round depend only on the seed, the site and the round, also after a
    restart.
    """
    # This holds for all three generators. The numbers drawn before the rounds depend on the seed and the site, so that
    # a site has the same data in every round. The numbers drawn while the client is loaded depend on the seed only.

    def drawn(name: str, *given: int, **options: Any) -> list[list[str]]:
        """A line for each site and round: of the loading, of the round. In the order in which they were trained."""
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(MOVES + DRAWS)
        client = f"{tmp_path / name / f'{name}.py'}:draw"
        for rounds in given:
            random.seed(rounds)
            torch.manual_seed(rounds)
            run(tmp_path / name, client, **{"rounds.total": rounds}, **options)
        return sorted(line.split() for line in (tmp_path / name / "drawn").read_text().splitlines())

    whole, interrupted, other = drawn("a", 2), drawn("b", 1, 2), drawn("c", 2, **{"run.seed": 1})
    assert whole == interrupted
    for column in range(1, 4):
        assert len({line[column] for line in whole}) == 1
        assert {line[column] for line in whole}.isdisjoint(line[column] for line in other)
    for column in range(4, 7):
        assert len({line[column] for line in [*whole, *other]}) == 2 * 4  # seeds, sites
    for column in range(7, 10):
        assert len({line[column] for line in [*whole, *other]}) == 2 * 4 * 2  # seeds, sites, rounds


def test_simulated_updates_pass_through_the_runs_filters(tmp_path: Path, client: str) -> None:
    """A simulation applies the filters of the run to the sites' updates."""
    # Each of 8 parameters changes by 1, as clipped.
    clip = {"path": "norm_clip", "args": {"max_norm": 8.0**0.5}}  # of 8 parameters: a change of 1 in each
    done = run(tmp_path, client, **{"workflow.result_filters": [clip]})
    assert moved(done) == pytest.approx(2.0, abs=1e-4)


def test_a_simulation_in_memory_writes_no_tensor_files(tmp_path: Path, client: str) -> None:
    """A simulation with `disk.in_files` false leaves no tensor file on the disk, and gives the same result."""
    done = run(tmp_path, client, **{"disk.in_files": False})
    assert moved(done) == pytest.approx(2 * 2.5, abs=1e-5)
    assert list((tmp_path / "state" / "slots").iterdir()) == []


def test_a_simulation_stops_while_sites_join(tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulation of 200 sites can be stopped while they join, at the end of the join transactions that have begun."""
    monkeypatch.setattr(schedule_sites, "JOIN_AT_ONCE", 10)
    joined, join = list[str](), SiteOperations.join

    async def counted(self: SiteOperations, message: messages.Join) -> messages.Joined:
        joined.append(message.site)
        if len(joined) == 25:
            task = asyncio.current_task()
            task.cancel()  # as `stop` does, which a signal calls
        return await join(self, message)

    monkeypatch.setattr(SiteOperations, "join", counted)
    with pytest.raises(UsageError, match="The simulation was stopped"):
        run(tmp_path, client, sites=200)
    assert len(joined) == 30  # those of the three transactions that had begun


def test_a_client_that_simulates_on_import_is_refused(tmp_path: Path) -> None:
    """If the script starts the simulation whenever it is imported, the error recommends `if __name__ == '__main__'`."""
    (tmp_path / "again.py").write_text(
        "import atoll\nfrom torch import nn\n\ndef train(worker):\n    pass\n\n"
        "atoll.Simulation(nn.Linear(1, 1), script=train).run()\n"
    )
    with pytest.raises(ConfigError, match="if __name__ == '__main__'"):
        run(tmp_path, f"{tmp_path / 'again.py'}:train")


def test_a_simulation_accepts_a_function(tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program can give a simulation the training function itself, in place of its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "client", raising=False)  # of another test
    import client as theirs

    assert moved(run(tmp_path, theirs.train)) == pytest.approx(2 * 2.5, abs=1e-5)


def test_a_simulation_continues_with_other_numbers_of_sites(tmp_path: Path, client: str) -> None:
    """A simulation continues with fewer or with more simulated sites. A new site counts from the next round on."""
    seen: list[list[str]] = []

    def on_round(summary: Any) -> None:
        seen.append([site[-1] for site in summary.workers])

    for rounds, workers in ((1, 4), (2, 2), (4, 5)):
        run(tmp_path, client, **{"rounds.total": rounds}, sites=workers, **{"rounds.min_sites": 1}, on_round=on_round)
    assert seen == [list("0123"), list("01"), list("01"), list("01234")]  # a late joiner counts from the next round on


def test_functional_scripts_run_one_by_one(tmp_path: Path) -> None:
    """A script that uses `atoll.functional` runs for the simulated sites one after the other. If it raises, the error
    is reported.
    """
    (tmp_path / "script.py").write_text(
        "import sys\nimport torch\nimport atoll\n"
        "model = torch.nn.Linear(3, 2)\n"
        "atoll.functional.init()\n"
        "while atoll.functional.is_running():\n"
        "    atoll.functional.receive(into=model)\n"
        "    if sys.argv[1:] == ['raise']:\n"
        "        raise ValueError('in the middle of a round')\n"
        "    model.weight.data += 1.0\n"
        "    atoll.functional.send(model)\n"
    )
    done = run(tmp_path, str(tmp_path / "script.py"))
    assert moved(done) == pytest.approx(2.0, abs=1e-5)
    with pytest.raises(RunFailed, match="in the middle of a round"):  # each of them, not "init was called twice"
        run(tmp_path / "raises", str(tmp_path / "script.py"), arguments=["raise"])


def test_scripts_find_the_programs_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script reads the program's `sys.argv` at a simulated site. If the simulation has its own arguments, the script
    reads those.
    """
    note = "    (HERE / 'argv').write_text(' '.join(sys.argv[1:]))\n"
    client = MOVES.replace("import os\n", "import os\nimport sys\n").replace(
        "    model, number", note + "    model, number"
    )
    (tmp_path / "client.py").write_text(client)
    monkeypatch.setattr(sys, "argv", ["program.py", "--rate", "0.1"])
    for given, found in ({}, "--rate 0.1"), ({"arguments": ["--fast"]}, "--fast"), ({"arguments": []}, ""):
        run(tmp_path / (found or "none"), f"{tmp_path / 'client.py'}:train", **given)
        assert (tmp_path / "argv").read_text() == found


# -- no stale answers


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, r"The run in .* finished at version 3, .* ago\. fresh=True, .* begins a new one and keeps"),
        ({"client": CLIENT + "\n"}, "was begun otherwise: .*client.py has changed"),
        ({"sites": 3}, "was begun otherwise: the sites are 3, were 4"),
        ({"algorithm.name": "fedprox"}, 'was begun otherwise: algorithm.name is "fedprox", was "fedavg"'),
    ],
    ids=["finished", "code", "sites", "algorithm"],
)
def test_a_simulation_returns_no_outdated_result(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    """If the code or the settings have changed since a finished simulation, its result is not returned: the error says
    what differs.
    """
    # `fresh` begins anew beside the old run, `resume` returns its result.
    before = simulation(tmp_path).run()
    with pytest.raises(UsageError, match=said):
        simulation(tmp_path, **{"again": ""} | changed).run()
    if not changed:
        again = simulation(tmp_path).run()
        assert (again.rounds, again.metrics) == (0, before.metrics)
        assert simulation(tmp_path, again="fresh").run().rounds == 3
        assert (tmp_path / "state-1" / "exports" / "model.safetensors").exists()


def test_an_interrupted_simulation_needs_the_same_code(tmp_path: Path) -> None:
    """An interrupted simulation continues by itself only if its code and settings are unchanged."""
    client = CLIENT.replace("import atoll\n", "import atoll\nimport rates\n").replace("lr=0.1", "lr=rates.RATE")
    (tmp_path / "rates.py").write_text("RATE = 0.1\n")
    stops = failpoints("worker.write=enospc@90")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        with stops, pytest.raises(StoreError):
            simulation(tmp_path, client, again="", **RULES).run()
        (tmp_path / "rates.py").write_text("RATE = 0.2\n")
        with pytest.raises(UsageError, match=r"stopped after version [12], .*: .*rates\.py has changed"):
            simulation(tmp_path, client, again="", **RULES).run()
        (tmp_path / "rates.py").write_text("RATE = 0.1\n")
        assert simulation(tmp_path, client, again="", **RULES).run().version == 3
        sys.modules.pop("rates", None)


# -- what goes wrong

RAISES = CLIENT.replace(
    "        fl_round.load_into(model)\n",
    "        fl_round.load_into(model)\n"
    "        if {where}:\n            raise ValueError('no data at ' + worker.site)\n",
)


def raising(where: str) -> str:
    return RAISES.replace("{where}", where)


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
        (doing(NAN), 1, ({}, {"site-0003": 1}), ["012", "0123", "0123"]),
        (doing(NAN), 4, ({}, {"site-0003": 1}), ["0123"] * 3),
    ],
    ids=["raises", "submits nothing", "refused", "refused, and needed"],
)
def test_rounds_go_on_without_failing_sites(
    tmp_path: Path,
    client: str,
    least: int,
    ends: tuple[dict[str, str], dict[str, int]],
    workers: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If a simulated site raises, submits nothing or submits NaN, the rounds go on without its update.

    If `rounds.min_sites` needs the refused site, the round waits for its next update.
    """
    done = simulation(tmp_path, client, **{"rounds.min_sites": least}).run()
    assert (done.failed, done.refused) == ends
    assert workers_of(tmp_path / "state") == [list(names) for names in workers]
    if done.refused:
        assert "site-0003: update refused: 0.weight contains NaN or Inf" in caplog.text
        assert "; 1 update refused: site-0003; " in summary(done)
    if "site-0002" in done.failed:
        assert 'client.py", line' in caplog.text  # the user's own
        assert "simulated_site.py" not in caplog.text


def test_at_most_three_tracebacks_are_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log reports every simulated site that fails, but shows a traceback for three of them at most."""
    with pytest.raises(RunFailed):
        simulation(tmp_path, raising("True")).run()
    lines = [line for line in caplog.messages if "no longer takes part" in line]
    assert ["Traceback" in line for line in lines] == [True, True, True, False]
    assert sorted(line.split()[0] for line in lines) == [f"site-000{number}" for number in range(4)]
    assert "ValueError: no data at site-000" in lines[3]


@pytest.mark.covers("V2", "X3")
def test_a_stuck_round_gives_exit_code_9(tmp_path: Path, undisturbed: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """If a round cannot close because too many sites failed, the simulation ends with exit code 9. It continues after
    the cause is repaired.
    """
    rules = {"rounds.min_sites": 3} | RULES
    client = raising("worker.site < 'site-0002' and fl_round.number == 2")
    lacks = r"waits for another site: only 2 of 3 updates accepted or expected \(rounds.min_sites\)"
    why = rf"Round 2 cannot end \({lacks}\).*no data at site-0001"
    with pytest.raises(RunFailed, match=why) as failed:
        simulation(tmp_path, client, **rules).run()
    assert "it continues from here" in failed.value.remedy
    assert failed.value.exit_code == 9
    assert "site-0001 raised an error and no longer takes part" in caplog.text
    assert "under the same name" not in caplog.text  # a user cannot start a simulated site, or a server for it
    assert result_of(tmp_path, **rules) == undisturbed


@pytest.mark.covers("S2", "V2", "F41")
def test_a_damaged_control_makes_its_site_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a site's SCAFFOLD control is damaged, the site fails."""
    # It does not go on with a control of zero, which would train it away from the rest. If the site's folder is
    # missing, the start is refused, unless `ATOLL_NEW_STATE` is set.

    def simulated(rounds: int) -> Any:
        return simulation(tmp_path, **RULES, **{"rounds.total": rounds, "rounds.min_sites": 1}).run()

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
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")  # as for the site's worker
    assert simulated(rounds=5).failed == {}  # round 4 was opened without the site
    assert workers_of(tmp_path / "state")[-1] == list("0123")


INT8 = {"algorithm.name": "fedavg", "aggregation.upload_codec.name": "int8"}


def ahead_of_journal(folder: Path, rules: dict[str, Any], by: int) -> None:
    """Leave the state directory of one round with the folder `sites` of `by` rounds later."""
    state, older = folder / "state", folder / "older"
    for rounds in (1, 1 + by):
        result_of(folder, **rules, **{"rounds.total": rounds})
        if rounds == 1:
            shutil.copytree(state, older)
    shutil.rmtree(older / "sites")
    (state / "sites").rename(older / "sites")
    shutil.rmtree(state)
    older.rename(state)


@pytest.mark.covers("S2", "V2")
def test_a_restored_simulation_gives_the_same_bits(tmp_path: Path, undisturbed: bytes) -> None:
    """If a run's state is one round older than the folder of its sites, the simulation gives the same bits as an
    undisturbed run.

    Each site has a pending update that the run has lost.
    """
    ahead_of_journal(tmp_path, RULES, by=1)
    assert result_of(tmp_path, **RULES) == undisturbed


CONTROLS = """\
        import pathlib
        c, own = (state("control")["4.bias"][0].item() for state in (fl_round.global_state, fl_round.own_state))
        with (pathlib.Path(__file__).parent / "seen").open("a") as file:
            file.write(f"{worker.site} {fl_round.number} {c} {own}\\n")
"""


@pytest.mark.covers("S2", "F42")
def test_a_restored_run_resets_scaffold_controls(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a run was restored and its sites' folder is two rounds ahead, the controls of all sites start again at zero,
    with one warning.

    The sites' files have no control c_i of the restored round any more.
    """
    client = doing(CONTROLS)
    ahead_of_journal(tmp_path, RULES | {"client": client}, by=2)
    done = simulation(tmp_path, client, **RULES).run()
    assert (done.failed, done.late) == ({}, 0)
    assert workers_of(tmp_path / "state") == [list("0123")] * 3
    assert caplog.text.count("gone back to version 1") == 1
    seen = {tuple(line.split()[:2]): list(map(float, line.split()[2:])) for line in (tmp_path / "seen").open()}
    own = {site: seen[site, "3"][1] for site, number in seen if number == "3"}
    mean = sum((10 + int(site[-1])) * value for site, value in own.items()) / sum(range(10, 14))
    assert all(seen[site, "2"] == [0.0, 0.0] for site in own)
    assert all(own.values())
    assert [seen[site, "3"][0] for site in own] == pytest.approx([mean] * 4, rel=1e-5)


SITS_OUT = """\
        if fl_round.number == 3:
            fl_round.submit(model, weight=0)
            continue
"""


@pytest.mark.covers("S2", "F41")
@pytest.mark.parametrize("sits_out", [False, True], ids=["pending", "counted"])
def test_a_damaged_earlier_control_is_reset(tmp_path: Path, caplog: pytest.LogCaptureFixture, sits_out: bool) -> None:
    """If a restored run needs a site's earlier SCAFFOLD control and this is damaged, the control of the site starts at
    zero.
    """
    # A run was restored to before an update of each site. A site learns that its update has counted when it begins
    # round 3, which all sites sit out.
    client = doing(SITS_OUT) if sits_out else CLIENT
    ahead_of_journal(tmp_path, RULES | {"client": client}, by=2 if sits_out else 1)
    kept = tmp_path / "state" / "sites" / "site-0001"
    current = json.loads((kept / "algorithm.json").read_text())["current"]
    flip_bit(kept / f"algorithm-{1 - current if sits_out else current}.bin", 3)
    done = simulation(tmp_path, CLIENT, **RULES).run()
    assert (done.failed, done.late) == ({}, 0)
    assert workers_of(tmp_path / "state") == [list("0123")] * 3
    assert caplog.text.count("gone back to version 1") == 1
    assert "is damaged (its digest differs)" in caplog.text


@pytest.mark.covers("S2")
def test_a_residual_ahead_of_the_run_is_reset(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a restored run is two rounds behind a site's kept encoding error, this error is set to zero and the log says
    so.
    """
    ahead_of_journal(tmp_path, INT8, by=2)
    assert simulation(tmp_path, **INT8).run().failed == {}
    assert "site-0000: the server went back to version 1; the encoding error of earlier updates is set" in caplog.text


@pytest.mark.covers("F25")
def test_a_simulation_goes_on_after_a_full_disk(tmp_path: Path, undisturbed: bytes) -> None:
    """A full disk ends the simulation with exit code 7. A new start with free space continues it, with the result of an
    undisturbed one.
    """
    # The full disk drops no site: without its control, a site would be lost for the rest of the run.
    full_disk = pytest.raises(StoreError, match=r"The disk failed while site-000\d was trained: .*no space left")
    with failpoints("worker.write=enospc@90"), full_disk as error:
        simulation(tmp_path, **RULES).run()
    assert error.value.exit_code == 7
    assert 0 < len(workers_of(tmp_path / "state")) < 3
    assert result_of(tmp_path, **RULES) == undisturbed


# -- what is refused


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"workflow.steps": [{"kind": "train"}, {"kind": "cross_site_evaluation"}]},
            "workflow.steps is set, but simulated sites cannot answer tasks.*atoll server",
        ),
        ({"sites": ["a", "b", "a"]}, "with its own name"),
        ({"sites": ["a b"]}, "not a site name"),
    ],
    ids=["workflows", "one name twice", "no name"],
)
def test_unsupported_simulations_are_refused(tmp_path: Path, client: str, given: dict[str, Any], said: str) -> None:
    """A simulation refuses workflows of tasks, two sites of one name and invalid site names."""
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, client, **given)


def test_a_simulation_refuses_a_run_of_workers(tmp_path: Path, client: str) -> None:
    """A simulation refuses a state directory in which real workers have joined a run."""
    with plain_server(tmp_path, start(), rounds=2) as server:
        with atoll.join(server.url, site="clinic-a", folder=tmp_path / "workers"):
            pass
    with pytest.raises(ConfigError, match="has real workers, for example clinic-a"):
        run(tmp_path, client)


RAISING = """
from atoll.reducers import Reducer


class Raising(Reducer):
    def reduce_(self, rows, weights, out):
        raise ZeroDivisionError("3 of 0 rows")
"""


def test_an_error_in_a_reducer_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a reducer raises in a simulation, the caller gets the error with its cause, and the log has it once."""
    (tmp_path / "raising.py").write_text(RAISING)
    reducer = {"aggregation.reducer.path": f"{tmp_path / 'raising.py'}:Raising"}
    with pytest.raises(RunFailed, match=r"Round 1 failed: ZeroDivisionError\('3 of 0 rows'\)") as raised:
        simulation(tmp_path, sites=1, **reducer).run()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert len([each for each in caplog.records if "3 of 0 rows')" in each.getMessage()]) == 1
