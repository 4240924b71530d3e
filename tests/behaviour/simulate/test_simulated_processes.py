"""Simulations whose sites train in processes of their own, as everyone's do."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until
from kit.client import Client
from kit.servers import new_simulation
from simulated_world import CLIENT, MOVES, model_of, moved, run, simulate, start, told, workers_of, write

import atoll
from atoll.errors import ConfigError, UsageError

FOUR = ("--set", "rounds.sites=4", "--processes", "1")
TWO = ("--set", "rounds.sites=4", "--processes", "2")


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
def undisturbed(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What SCAFFOLD comes to, of four sites and three rounds."""
    folder = tmp_path_factory.mktemp("undisturbed")
    simulate(nursery, write(folder, **{"algorithm.name": "scaffold"}), *FOUR)
    return model_of(folder / "atoll-simulation")


@pytest.mark.slow
def test_a_round_is_of_as_many_as_it_asks_for_and_counts_like_any_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, client: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    seen: list[Any] = []
    done = run(tmp_path, client, sites=9, **{"rounds.sample_fraction": 1 / 3}, processes=2, on_round=seen.append)
    assert [len(round_.workers) for round_ in seen] == [3, 3]
    means = [sum(int(site[-4:]) + 1 for site in round_.workers) / 3 for round_ in seen]
    assert moved(done) == pytest.approx(sum(means), abs=1e-5)
    assert [round_.metrics["number"] for round_ in seen] == pytest.approx([mean - 1 for mean in means])
    assert [round_.metrics["threads"] for round_ in seen] == [3, 3]
    assert (done.worker_rounds, done.rounds, done.failed) == (6, 2, {})
    assert len((tmp_path / "loaded").read_text().split()) == 2  # once in each process
    assert not (tmp_path / "state" / "sites").exists()  # FedAvg keeps nothing of a site


@pytest.mark.covers("V2", "V3")
@pytest.mark.slow
def test_the_command_takes_arguments_of_the_client_prints_json_alone_and_leaves_nothing_running(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Whose processes start others of their own, and print."""
    more = "    import subprocess, sys\n    print('trains', *sys.argv[1:], flush=True)\n"
    more += "    subprocess.Popen(['sleep', '600'], cwd=HERE)\n    model, number ="
    (tmp_path / "client.py").write_text(MOVES.replace("    model, number =", more, 1))
    (tmp_path / "run.toml").write_text(
        'model.source = "client.py:build"\nalgorithm.name = "fedavg"\nrounds.total = 2\n'
    )
    flags = [
        "--set",
        "run.script=client.py:train",
        "--set",
        "rounds.sites=4",
        "--processes",
        "2",
        "--json",
        "--",
        "--lr",
        "0.1",
    ]
    process = nursery.start("atoll", "simulate", "run.toml", *flags, cwd=tmp_path, errors=tmp_path / "errors")
    assert process.wait(100) == 0, (tmp_path / "errors").read_text()
    assert json.loads(process.output())["worker_rounds"] == 8
    assert (tmp_path / "errors").read_text().count("trains --lr 0.1\n") == 8
    assert len((tmp_path / "loaded").read_text().split()) == 2 + 1  # of both processes, and of who builds the model
    assert processes_in(tmp_path) == []


@pytest.mark.covers("V3")
@pytest.mark.slow
def test_lines_of_two_processes_do_not_mix(nursery: Nursery, tmp_path: Path) -> None:
    """The first prints half a line, waits until the other has printed a whole one, and prints the rest."""
    more = "    import sys, time\n    begun, whole = HERE / 'begun', HERE / 'whole'\n"
    more += "    def wait_for(path):\n        end = time.monotonic() + 120\n"
    more += "        while not path.exists() and time.monotonic() < end:\n            time.sleep(0.01)\n"
    more += "    if worker.site.endswith('0'):\n        print('half', end=' ')\n        begun.touch()\n"
    more += "        wait_for(whole)\n        print('a line')\n"
    more += "    else:\n        wait_for(begun)\n        print('whole')\n        whole.touch()\n    model, number ="
    (tmp_path / "client.py").write_text(MOVES.replace("    model, number =", more, 1))
    (tmp_path / "run.toml").write_text(
        'model.source = "client.py:build"\nalgorithm.name = "fedavg"\nrounds.total = 1\n'
    )
    flags = ["--set", "run.script=client.py:train", "--set", "rounds.sites=2", "--processes", "2", "--json"]
    env = {"PYTHONUNBUFFERED": "1"}
    process = nursery.start("atoll", "simulate", "run.toml", *flags, cwd=tmp_path, env=env)
    assert process.wait(100) == 0, process.output()
    assert "whole\nhalf a line\n" in process.output()


@pytest.mark.covers("V4")
@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_simulated_sites(tmp_path: Path, client: str) -> None:
    run(tmp_path, client.replace(":train", ":remember"), sites=60, **{"rounds.total": 1})
    used = [int(line) for line in (tmp_path / "memory").read_text().split()]
    assert len(used) == 60
    assert max(used[5:]) - used[4] < 16 * 2**20  # 55 more of them, with 32 MB each while they train


@pytest.mark.slow
def test_a_simulation_can_be_stopped_and_goes_on(tmp_path: Path, client: str) -> None:
    reached = threading.Event()

    def on_round(summary: Any) -> None:
        if summary.round == 3:
            reached.set()

    options = {"sites": 4, "processes": 1, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "state"}
    with new_simulation(
        start(), script=client, **{"rounds.total": 100_000}, on_round=on_round, **options
    ) as simulation:
        assert reached.wait(60)
        (pid,) = simulation.pids()
    assert not Path(f"/proc/{pid}").exists()
    journal = new_simulation(script=client, **{"rounds.total": 100_000}, **options)
    with journal:
        pass
    done = run(tmp_path, client, **{"rounds.total": 3})  # which it has: there is nothing to do
    assert (done.rounds, done.worker_rounds) == (0, 0)
    assert done.version >= 3


@pytest.mark.slow
def test_hundreds_that_have_the_same_to_say_are_not_all_heard(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "client.py").write_text(MOVES.replace("parameter.add_(number + 1.0)", "pass"))
    with caplog.at_level(logging.WARNING):
        run(tmp_path, f"{tmp_path / 'client.py'}:train", sites=20, **{"rounds.total": 1})
    assert capfd.readouterr().err.count("the pseudo-gradient is all zero") == 3


def open_within(folder: Path) -> list[str]:
    """Files of this process; not its sockets, which a Ray of other tests opens and closes as it likes."""
    found = []
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(os.readlink(each))
    return [path for path in found if path.startswith(str(folder))]


@pytest.mark.slow
def test_versions_and_spools_are_rewritten_round_after_round(tmp_path: Path, client: str) -> None:
    files: list[int] = []
    pins: list[int] = []

    def on_round(summary: Any) -> None:
        files.append(len(list((tmp_path / "state" / "slots").iterdir())))
        pins.append(len(open_within(tmp_path / "state")))

    run(tmp_path, client.replace(":train", ":opened"), **{"rounds.total": 30}, on_round=on_round)
    assert (
        max(files[5:]) <= 4 + 5
    )  # 4 updates; two versions, the durable one, that on its way to disk, the next, in work
    assert max(pins[10:]) <= max(pins[:10]) + 4
    theirs = [int(line) for line in (tmp_path / "opened").read_text().split()]
    assert len(theirs) == 120
    assert max(theirs[20:]) <= max(theirs[:20]) + 4


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
    assert "ignored a second answer" not in said


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


# -- what is refused before a process is started


def test_a_function_that_no_other_process_finds_is_refused(tmp_path: Path) -> None:
    def within(worker: Any) -> None: ...

    for function in (within, lambda worker: None):
        with pytest.raises(UsageError, match="cannot be imported by another process"):
            run(tmp_path, function)


@pytest.mark.covers("X3")
def test_workflows_are_refused_rather_than_left_out(tmp_path: Path, client: str) -> None:
    entries = [{"kind": "train"}, {"kind": "cross_site_evaluation"}]
    with pytest.raises(
        ConfigError, match=r"workflow.steps is set, but simulated sites cannot answer tasks.*atoll server"
    ):
        run(tmp_path, client, **{"workflow.steps": entries})


def test_names_of_simulated_sites_have_to_differ(tmp_path: Path, client: str) -> None:
    with pytest.raises(ConfigError, match="with its own name"):
        run(tmp_path, client, sites=["a", "b", "a"])
    with pytest.raises(ConfigError, match="not a site name"):
        run(tmp_path, client, sites=["a b"])


def test_a_run_of_real_workers_is_left_alone(tmp_path: Path, client: str) -> None:
    server = atoll.Server(
        start(),
        settings={
            "algorithm.name": "fedavg",
            "rounds.total": 2,
            "network.port": 0,
            "disk.state_dir": tmp_path / "state",
        },
    ).start()
    with Client(server.url, site="clinic-a", folder=tmp_path / "workers") as worker:
        worker.register()
    server.stop()
    with pytest.raises(ConfigError, match="has real workers, for example clinic-a"):
        run(tmp_path, client)


@pytest.mark.covers("V5", "X3")
@pytest.mark.parametrize(
    ("flags", "settings", "why"),
    [
        (["--set", "run.script=other.py:train"], {}, "does not exist"),
        (["--set", "run.script=client.py:trian"], {}, "Did you mean 'train'?"),
        (["--set", "run.script=train"], {}, "has neither the form of a function nor of a file"),
        (["--engine", "slurm"], {}, "Use one of local, ray"),
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
    assert "ended with exit code 3 before it was ready" in said


@pytest.mark.slow
def test_a_state_directory_that_is_given_is_the_one_that_is_taken(nursery: Nursery, tmp_path: Path) -> None:
    simulate(nursery, write(tmp_path, **{"rounds.total": 1}), *FOUR, "--dir", "atoll-run")
    assert (tmp_path / "atoll-run" / "exports" / "model.safetensors").exists()
    assert not (tmp_path / "atoll-simulation").exists()
    again = simulate(nursery, tmp_path / "run.toml", *FOUR, "--dir", "atoll-run")
    assert "the simulation was already finished, at version 1; nothing was trained; " in again
