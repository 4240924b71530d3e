"""What goes wrong in a simulation: a simulated site that raises or ends its process, a client that is none, an end."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine_here import simulate_here
from harness.processes import Nursery, wait_until
from simulated_world import CLIENT, model_of, simulate, simulation, told, write

import atoll
from atoll.cli.simulate import summary
from atoll.errors import ConfigError, RunFailed, StoreError
from atoll.simulate import engine, schedule_sites
from atoll.simulate.job_messages import Answer, Beginning, Job
from atoll.simulate.site_process import answer_to
from atoll.testing.run import failpoints, together

FOUR = ("--set", "rounds.sites=4", "--processes", "1")
TWO = ("--set", "rounds.sites=4", "--processes", "2")

RAISES = CLIENT.replace(
    "        fl_round.load_into(model)\n",
    "        fl_round.load_into(model)\n"
    "        if {where}:\n            raise ValueError('no data at ' + worker.site)\n",
)


def raising(where: str) -> str:
    return RAISES.replace("{where}", where)


def workers_of(folder: Path) -> list[list[str]]:
    """Who took part in each round."""
    lines = (folder / "exports" / "metrics.jsonl").read_text().splitlines()
    return [[name[-1] for name in json.loads(line)["workers"]] for line in lines]


def processes_in(folder: Path) -> list[int]:
    """What still runs with this as its current folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.readlink(entry / "cwd") == str(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


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
            ({"site-0001": "it returned without an update"}, {}),
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
        assert "site-0003: update refused: 0.weight holds NaN or Inf" in caplog.text
        assert "; 1 update refused: site-0003; " in summary(done)
    if "site-0002" in done.failed:
        assert 'client.py", line' in caplog.text  # the user's own
        assert "site_process.py" not in caplog.text


@pytest.mark.covers("V2", "X3")
def test_a_round_that_cannot_close_ends_with_9_and_goes_on_once_mended(
    here: None, tmp_path: Path, undisturbed: bytes
) -> None:
    rules = {"rounds.min_sites": 3, "algorithm.name": "scaffold"}
    client = raising("worker.site < 'site-0002' and fl_round.number == 2")
    why = r"Round 2 cannot close \(waits for another site: 2 of rounds.min_sites 3 alive\).*no data at site-0001"
    with pytest.raises(RunFailed, match=why) as failed:
        simulation(tmp_path, client, **rules).run()
    assert "Nothing is lost" in failed.value.remedy
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
    assert "the state that its algorithm keeps here is lost" in done.failed["site-0001"]
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
    assert "the state that its algorithm keeps here is lost" in failed["site-0001"]
    assert workers_of(tmp_path / "state") == [list("0123"), list("0123"), list("023")]
    shutil.rmtree(kept)
    with pytest.raises(ConfigError, match=r"What site-0001 keeps .* is not in .* Bring its folder back"):
        simulated(rounds=4)


@pytest.mark.covers("F25")
def test_a_disk_that_is_full_ends_the_simulation_which_goes_on_when_there_is_space(
    here: None, tmp_path: Path, undisturbed: bytes
) -> None:
    """No site is dropped for it: without its control a site would be lost for the rest of the run."""
    full_disk = pytest.raises(StoreError, match=r"While site-000\d was trained, the disk failed: .*no space left")
    with failpoints("worker.write=enospc@50"), full_disk as error:
        simulation(tmp_path, **{"algorithm.name": "scaffold"}).run()
    assert error.value.exit_code == 7
    assert 0 < len(workers_of(tmp_path / "state")) < 3
    assert simulation(tmp_path, **{"algorithm.name": "scaffold"}).run().failed == {}
    assert model_of(tmp_path / "state") == undisturbed


def test_an_exception_that_is_its_own_cause_is_told() -> None:
    error = ValueError("round and round")
    error.__cause__ = error
    assert answer_to(error).error == "ValueError: round and round"


@pytest.mark.slow
def test_a_client_that_does_not_begin_is_ended_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "START_S", 0.5)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    settings = {"run.script": f"{tmp_path / 'slow.py'}:train"}
    read = atoll.Settings.read(write(tmp_path, **settings), {"disk.state_dir": tmp_path / "state"})
    with pytest.raises(RunFailed, match=r"has not begun within 0\.5 s, and was ended"):
        atoll.Simulation(settings=read, sites=4, processes=1).run()
    sys.modules.pop("client", None)


FORKS = """\
        import os
        if worker.site == "site-0001" and fl_round.number == 1:
            if os.fork() == 0:
                return
            os.wait()
"""


@pytest.mark.slow
def test_a_client_that_forks_and_returns_twice_answers_once(nursery: Nursery, tmp_path: Path) -> None:
    submit = next(line for line in CLIENT.splitlines(keepends=True) if "fl_round.submit(" in line)
    said = simulate(nursery, write(tmp_path, CLIENT.replace(submit, FORKS + submit)), *FOUR, "--json")
    assert told(said)["failed"] == {}
    assert workers_of(tmp_path / "atoll-simulation") == [list("0123")] * 3
    assert "ignored an answer" not in said


KILLS = """\
        import os, pathlib, signal
        marks = pathlib.Path(__file__).parent
        if worker.site == "site-0001" and fl_round.number == 2 and len(list(marks.glob("killed-*"))) < {times}:
            (marks / f"killed-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(times: int) -> str:
    """A client whose process is killed in round 2, so often."""
    text = KILLS.replace("{times}", str(times))
    return CLIENT.replace("        fl_round.submit(", text + "        fl_round.submit(")


@pytest.mark.covers("V2")
@pytest.mark.slow
def test_a_process_that_is_killed_is_replaced_and_its_simulated_site_trained_again(
    nursery: Nursery, tmp_path: Path, undisturbed: bytes
) -> None:
    said = simulate(nursery, write(tmp_path, killed(2), **{"algorithm.name": "scaffold"}), *TWO, "--json")
    assert said.count("ended with signal SIGKILL while it trained site-0001") == 2
    assert told(said)["failed"] == {}
    assert model_of(tmp_path / "atoll-simulation") == undisturbed


@pytest.mark.covers("V2")
@pytest.mark.slow
@pytest.mark.long
def test_blames_the_site_that_ends_three_processes(nursery: Nursery, tmp_path: Path) -> None:
    said = simulate(nursery, write(tmp_path, killed(100), **{"rounds.min_sites": 1}), *FOUR, "--json")
    assert told(said)["failed"] == {"site-0001": "its process ended with signal SIGKILL, 3 times in a row"}
    assert workers_of(tmp_path / "atoll-simulation") == [list("0123"), list("023"), list("023")]


WAITS = """\
        import pathlib, time
        marks = pathlib.Path(__file__).parent
        while worker.site == "site-0001" and fl_round.number == 2 and not (marks / "go").exists():
            (marks / "here").touch()
            time.sleep(0.01)
"""
WAITING = CLIENT.replace("        fl_round.submit(", WAITS + "        fl_round.submit(")


@pytest.mark.covers("V3")
@pytest.mark.slow
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGKILL))],
    ids=lambda number: number.name,
)
def test_a_simulation_that_was_ended_leaves_nothing_running_and_goes_on(
    nursery: Nursery, tmp_path: Path, number: signal.Signals, undisturbed: bytes
) -> None:
    run_file = write(tmp_path, WAITING, **{"algorithm.name": "scaffold"})
    process = nursery.start("atoll", "simulate", "run.toml", *FOUR, cwd=tmp_path)
    wait_until((tmp_path / "here").exists, "round 2")
    process.send(number)
    assert process.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    wait_until(lambda: not processes_in(tmp_path), "the end of every process")
    (tmp_path / "go").touch()
    assert told(simulate(nursery, run_file, *FOUR, "--json"))["rounds"] == 2
    assert model_of(tmp_path / "atoll-simulation") == undisturbed


@pytest.mark.slow
def test_a_deadline_closes_the_round_and_the_late_update_does_not_count(nursery: Nursery, tmp_path: Path) -> None:
    late = """\
        import pathlib, time
        marks = pathlib.Path(__file__).parent
        while worker.site == "site-0001" and fl_round.number == 1 and not (marks / "go").exists():
            time.sleep(0.01)
        if fl_round.number == 2:
            (marks / "go").touch()
"""
    client = CLIENT.replace("        fl_round.submit(", late + "        fl_round.submit(")
    run_file = write(tmp_path, client, **{"rounds.quorum": 3, "rounds.deadline_s": 1.0})
    done = told(simulate(nursery, run_file, *TWO, "--json"))  # the other process takes what waits behind it
    assert (done["late"], done["failed"]) == (1, {})
    first, *others = workers_of(tmp_path / "atoll-simulation")
    assert first == list("023")
    assert len(others) == 2


@pytest.mark.covers("V5", "X3")
@pytest.mark.parametrize(
    ("flags", "settings", "why"),
    [
        (["--set", "run.script=other.py:train"], {}, "there is no file"),
        (["--set", "run.script=client.py:trian"], {}, "Did you mean 'train'?"),
        (["--set", "run.script=train"], {}, "does not name code"),
        (["--engine", "slurm"], {}, "Take one of local, ray"),
        (["--address", "box:6379"], {}, "the engine is 'local'"),
        ([], {"rounds.total": 0}, "would never end"),
        ([], {"async.enabled": True}, "async.enabled is True"),
        ([], {"diloco.num_fragments": 2}, "diloco.num_fragments is 2"),
    ],
    ids=["file", "name", "form", "engine", "address", "rounds", "async", "fragments"],
)
def test_what_has_no_meaning_is_refused_with_exit_code_2(
    nursery: Nursery, tmp_path: Path, flags: list[str], settings: dict[str, object], why: str
) -> None:
    write(tmp_path, **settings)
    process = nursery.start("atoll", "simulate", "run.toml", *flags, cwd=tmp_path)
    assert process.wait(60) == 2, process.output()
    assert why in " ".join(process.output().split())


@pytest.mark.slow
def test_a_client_that_cannot_be_imported_is_said_with_its_traceback(nursery: Nursery, tmp_path: Path) -> None:
    run_file = write(tmp_path)
    (tmp_path / "their.py").write_text("import torch\nraise RuntimeError('no licence')\n")
    said = simulate(nursery, run_file, *FOUR, "--set", "run.script=their.py:train", code=2)
    assert "Traceback" in said
    assert "their.py:train' cannot be imported: RuntimeError: no licence (" in said
    assert "their.py, line 2)" in said
    (tmp_path / "their.py").write_text("import os\nos._exit(3)\n")
    said = simulate(nursery, run_file, *FOUR, "--set", "run.script=their.py:train", code=9)
    assert "ended with code 3 before it began" in said


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


class Ends:
    """A host, and each of its processes in turn, by how it begins and how it ends."""

    name, kind, ahead, pid = "test", "a process", 0, 1

    def __init__(self, *lives: str) -> None:
        self._lives, self._life = list(lives), ""
        self._given = queue.SimpleQueue[int]()
        self.answers = queue.SimpleQueue[str]()

    def begin(self, beginning: Beginning) -> Ends:
        self._life = self._lives.pop(0)
        return self

    def ready(self) -> None:
        if self._life == "killed":
            raise engine.Killed("It was ended by SIGKILL.")

    def give(self, job: Job) -> None:
        for _ in range(2 if self._life == "answers twice" else 1):
            self._given.put(job.ticket.id)

    def hear(self) -> tuple[int, Answer] | None:
        ticket = self._given.get()
        return None if self._life == "ends" else (ticket, Answer(error="raised"))

    def bury(self) -> str:
        return "ended"

    def answered(self, job: Job, answer: Answer) -> None:
        self.answers.put(answer.error)

    def failed_to_go_on(self, error: Exception) -> None:
        self.answers.put(str(error))

    def nothing(self) -> None: ...

    open = close = kill = take_back = nothing

    def answer(self) -> str:
        """What comes of a job."""
        begun = engine.Engine(self, 1)
        begun.start(None, self)  # type: ignore[arg-type]
        begun.put(SimpleNamespace(ticket=SimpleNamespace(id=7), site="a", attempts=0))  # type: ignore[arg-type]
        return self.answers.get(timeout=10)


@pytest.mark.covers("V2")
@pytest.mark.parametrize(
    ("lives", "error"),
    [
        (["answers"], "raised"),
        (["ends", "killed", "killed", "answers"], "raised"),
        (["ends", "killed", "killed", "killed"], "It was ended by SIGKILL."),
        (["ends", "ends", "ends", "answers"], "its process ended, 3 times in a row"),
    ],
)
def test_begins_a_job_again_in_another_process(lives: list[str], error: str) -> None:
    assert Ends(*lives).answer() == error


@pytest.mark.covers("V2")
def test_ignores_a_second_answer(caplog: pytest.LogCaptureFixture) -> None:
    host = Ends("answers twice")
    assert host.answer() == "raised"
    wait_until(lambda: "ignored an answer to no job" in caplog.text, "a line")
    assert host.answers.empty()


@pytest.mark.slow
def test_a_state_directory_that_is_given_is_the_one_that_is_taken(nursery: Nursery, tmp_path: Path) -> None:
    simulate(nursery, write(tmp_path, **{"rounds.total": 1}), *FOUR, "--dir", "atoll-run")
    assert (tmp_path / "atoll-run" / "exports" / "model.safetensors").exists()
    assert not (tmp_path / "atoll-simulation").exists()
