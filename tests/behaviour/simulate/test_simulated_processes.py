"""Simulations whose sites train in processes of their own, as everyone's do, and real workers: the same bits."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, free_port, wait_until
from kit.folders import open_paths
from kit.processes import running_in
from kit.servers import new_simulation
from simulated_world import (
    KILLS,
    MOVES,
    RULES,
    SITES,
    doing,
    model_of,
    moved,
    result_of,
    run,
    simulate,
    simulation,
    start,
    told,
    workers_of,
    write,
)

import atoll
from atoll.errors import RunFailed
from atoll.simulate import engine, schedule_sites
from atoll.simulate.engine import Engine, Job
from atoll.testing.run import together

pytestmark = pytest.mark.slow
FOUR = ("--set", "rounds.sites=4", "--processes", "1")
TWO = ("--set", "rounds.sites=4", "--processes", "2")

# -- the same bits

RUNS: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm.name": "fedavg"},
    "scaffold": {"algorithm.name": "scaffold", "network.part_bytes": 65536},  # several parts
}
"""Others are compared in one process: tests/behaviour/golden."""
SAMPLED = {"algorithm.name": "scaffold", "rounds.sample_fraction": 0.5, "rounds.sample_min": 2}


def trained(nursery: Nursery, folder: Path, **settings: Any) -> bytes:
    """By `atoll server` and a process for each site."""
    port = free_port()
    write(folder, **{"rounds.sites": len(SITES), "network.port": port, "disk.state_dir": "state"}, **settings)
    server = nursery.start("atoll", "server", "run.toml", cwd=folder)
    url = {"ATOLL_SERVER": f"http://127.0.0.1:{port}", "ATOLL_DIR": str(folder / "workers")}
    workers = [nursery.start("client.py", cwd=folder, env=url | {"ATOLL_SITE": site}) for site in SITES]
    assert [worker.wait(60) for worker in workers] == [0] * len(SITES), workers[0].output()
    assert server.wait(60) == 0
    return model_of(folder / "state")


@pytest.mark.covers("V1")
@pytest.mark.parametrize("name", RUNS)
def test_a_simulation_gives_the_bits_of_workers(
    nursery: Nursery, tmp_path: Path, name: str, request: pytest.FixtureRequest
) -> None:
    """A simulation gives the same bits as a server with a process for each site."""
    result = trained(nursery, tmp_path, **RUNS[name])
    processes = 2
    if name == "fedavg":  # as for users: the process imports torch, and has its own seed of hashes
        request.getfixturevalue("fresh_processes")
        processes = 1
    assert result_of(tmp_path / "simulated", processes=processes, **RUNS[name]) == result


def test_sampled_simulations_give_the_bits_of_workers(nursery: Nursery, tmp_path: Path) -> None:
    """With sampled sites, a simulation gives the same bits as a server with workers, whether its script is a function
    or a file.
    """
    result = trained(nursery, tmp_path, **SAMPLED)
    assert result_of(tmp_path / "main", script="client.py:main", **SAMPLED) == result
    assert result_of(tmp_path / "script", script="client.py", **SAMPLED) == result


# -- processes


def test_a_sampled_round_has_the_requested_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, client: str) -> None:
    """A sampled round has the requested number of sites. Its mean and its metrics are over these sites."""
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
def test_simulate_passes_arguments_and_prints_only_json(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll simulate` passes the arguments after `--` to the client script."""
    # With `--json`, it prints only JSON on its standard output. Processes that the client starts and leaves running are
    # ended.
    more = "    import subprocess, sys\n    print('trains', *sys.argv[1:], flush=True)\n"
    more += "    subprocess.Popen(['sleep', '600'], cwd=HERE)\n    model, number ="
    write(tmp_path, MOVES.replace("    model, number =", more, 1), **{"rounds.total": 2})
    words = ("simulate", "run.toml", *TWO, "--json", "--", "--lr", "0.1")
    process = nursery.start("atoll", *words, cwd=tmp_path, errors=tmp_path / "errors")
    assert process.wait(100) == 0, (tmp_path / "errors").read_text()
    assert json.loads(process.output())["worker_rounds"] == 8
    assert (tmp_path / "errors").read_text().count("trains --lr 0.1\n") == 8
    assert (
        len((tmp_path / "loaded").read_text().split()) == 2 + 1
    )  # of both processes, and of the one that builds the model
    assert running_in(tmp_path) == []


@pytest.mark.covers("V3")
def test_lines_of_two_processes_do_not_mix(nursery: Nursery, tmp_path: Path) -> None:
    """If one process prints half a line and another prints a whole one, the output has both lines unmixed."""
    more = """\
    import sys, time
    begun, whole = HERE / 'begun', HERE / 'whole'
    def wait_for(path):
        end = time.monotonic() + 120
        while not path.exists() and time.monotonic() < end:
            time.sleep(0.01)
    if worker.site.endswith('0'):
        print('half', end=' ')
        begun.touch()
        wait_for(whole)
        print('a line')
    else:
        wait_for(begun)
        print('whole')
        whole.touch()
    model, number ="""
    run_file = write(tmp_path, MOVES.replace("    model, number =", more, 1), **{"rounds.total": 1})
    flags = ("--set", "rounds.sites=2", "--processes", "2")
    assert "whole\nhalf a line\n" in simulate(nursery, run_file, *flags, PYTHONUNBUFFERED="1")


@pytest.mark.covers("V4")
def test_memory_does_not_grow_with_sites(tmp_path: Path, client: str) -> None:
    """The memory of a simulation's process does not grow with the number of sites that it trains one
    after the other.
    """
    # Each of 60 sites uses 32 MB while it trains.
    run(tmp_path, client.replace(":train", ":measure"), sites=60, **{"rounds.total": 1})
    used = [int(line.split()[0]) for line in (tmp_path / "measured").read_text().splitlines()]
    assert len(used) == 60
    assert max(used[5:]) - used[4] < 16 * 2**20  # 55 more of them, with 32 MB each while they train


def test_a_stopped_simulation_can_continue(tmp_path: Path, client: str) -> None:
    """A simulation can be stopped in the middle and started again."""
    # Its process has then ended. A later run with a smaller `rounds.total` than reached has nothing to do.
    reached = threading.Event()

    def on_round(summary: Any) -> None:
        if summary.round == 3:
            reached.set()

    options = {"sites": 4, "processes": 1, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "state"}
    endless = new_simulation(start(), script=client, **options, **{"rounds.total": 100_000}, on_round=on_round)
    with endless as simulated:
        assert reached.wait(60)
        (pid,) = simulated.pids()
    assert not Path(f"/proc/{pid}").exists()
    with new_simulation(script=client, **options, **{"rounds.total": 100_000}):
        pass
    done = run(tmp_path, client, **{"rounds.total": 3})  # which it has: there is nothing to do
    assert (done.rounds, done.worker_rounds) == (0, 0)
    assert done.version >= 3


def test_a_repeated_warning_is_printed_three_times(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """If many simulated sites log the same warning, it is printed three times only."""
    (tmp_path / "client.py").write_text(MOVES.replace("parameter.add_(number + 1.0)", "pass"))
    with caplog.at_level(logging.WARNING):
        run(tmp_path, f"{tmp_path / 'client.py'}:train", sites=20, **{"rounds.total": 1})
    assert capfd.readouterr().err.count("the update is all zero") == 3


def test_the_number_of_files_stays_constant(tmp_path: Path, client: str) -> None:
    """Over 30 rounds, the simulation rewrites its files for versions and updates: neither files nor open files grow in
    number.
    """
    files: list[int] = []
    pins: list[int] = []

    def on_round(summary: Any) -> None:
        files.append(len(list((tmp_path / "state" / "slots").iterdir())))
        pins.append(sum(path.startswith(str(tmp_path / "state")) for path in open_paths()))

    run(tmp_path, client.replace(":train", ":measure"), **{"rounds.total": 30}, on_round=on_round)
    assert (
        max(files[5:]) <= 4 + 5
    )  # 4 updates; two versions, the durable one, that on its way to disk, the next, in work
    assert max(pins[10:]) <= max(pins[:10]) + 4
    theirs = [int(line.split()[1]) for line in (tmp_path / "measured").read_text().splitlines()]
    assert len(theirs) == 120
    assert max(theirs[20:]) <= max(theirs[:20]) + 4


def test_a_site_starts_after_its_ticket_is_stored(tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulated site starts to train only after its ticket is in the journal."""
    # If the journal's transaction failed, tickets and files would go to other sites.
    put, missing = Engine.put, list[int]()

    def looked_up(engine: Engine, job: Job) -> None:
        with contextlib.closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite")) as journal:
            found = journal.execute("SELECT slot FROM tickets WHERE ticket = ?", (job.ticket.id,)).fetchone()
        if found is None or found[0] is None:
            missing.append(job.ticket.id)
        put(engine, job)

    monkeypatch.setattr(Engine, "put", looked_up)
    run(tmp_path, client, **{"rounds.total": 2})
    assert missing == []


FORKS = """\
        import os
        if worker.site == "site-0001" and fl_round.number == 1:
            if os.fork() == 0:
                return
            os.wait()
"""


def test_a_forking_client_answers_once(nursery: Nursery, tmp_path: Path) -> None:
    """If a client forks in its training and both processes return, the simulation takes one result."""
    said = simulate(nursery, write(tmp_path, doing(FORKS)), *FOUR, "--json")
    assert told(said)["failed"] == {}
    assert workers_of(tmp_path / "atoll-simulation") == [list("0123")] * 3
    assert "ignored a second result" not in said


@pytest.mark.covers("V2")
def test_a_killed_simulation_process_is_replaced(nursery: Nursery, tmp_path: Path, undisturbed: bytes) -> None:
    """If a process is killed twice while it trains a site, the site is trained again from the same model, with the same
    result.
    """
    said = simulate(nursery, write(tmp_path, doing(KILLS, times=2), **RULES), *TWO, "--json")
    assert said.count("ended with signal SIGKILL while it trained site-0001") == 2
    assert told(said)["failed"] == {}
    assert model_of(tmp_path / "atoll-simulation") == undisturbed


@pytest.mark.covers("V2")
@pytest.mark.long
def test_a_site_that_kills_three_processes_fails(nursery: Nursery, tmp_path: Path) -> None:
    """If a process ends three times in a row while it trains one site, this site fails. The simulation continues with
    the others.
    """
    said = simulate(nursery, write(tmp_path, doing(KILLS, times=100), **{"rounds.min_sites": 1}), *FOUR, "--json")
    assert told(said)["failed"] == {"site-0001": "its process ended with signal SIGKILL, 3 times in a row"}
    assert workers_of(tmp_path / "atoll-simulation") == [list("0123"), list("023"), list("023")]


WAITS = """\
        import pathlib, time
        marks = pathlib.Path(__file__).parent
        while worker.site == "site-0001" and fl_round.number == 2 and not (marks / "go").exists():
            (marks / "here").touch()
            time.sleep(0.01)
"""


@pytest.mark.covers("V3")
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGKILL))],
    ids=lambda number: number.name,
)
def test_a_killed_simulation_can_continue(
    nursery: Nursery, tmp_path: Path, number: signal.Signals, undisturbed: bytes
) -> None:
    """If a simulation is interrupted or killed, no process of it is left running. A new start continues it, with the
    result of an undisturbed one.
    """
    run_file = write(tmp_path, doing(WAITS), **RULES)
    process = nursery.start("atoll", "simulate", "run.toml", *FOUR, cwd=tmp_path)
    wait_until((tmp_path / "here").exists, "round 2")
    process.send(number)
    assert process.wait() == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    wait_until(lambda: not running_in(tmp_path), "the end of every process")
    (tmp_path / "go").touch()
    assert told(simulate(nursery, run_file, *FOUR, "--json"))["rounds"] == 2
    assert model_of(tmp_path / "atoll-simulation") == undisturbed


LATE = """\
        import pathlib, time
        marks = pathlib.Path(__file__).parent
        while worker.site == "site-0001" and fl_round.number == 1 and not (marks / "go").exists():
            time.sleep(0.01)
        if fl_round.number == 2:
            (marks / "go").touch()
"""


def test_a_deadline_closes_a_simulated_round(nursery: Nursery, tmp_path: Path) -> None:
    """At the deadline, a simulated round closes with the sites that are there. The late update does not count."""
    run_file = write(tmp_path, doing(LATE), **{"rounds.quorum": 3, "rounds.deadline_s": 1.0})
    done = told(simulate(nursery, run_file, *TWO, "--json"))  # the other process takes what waits behind it
    assert (done["late"], done["failed"]) == (1, {})
    first, *others = workers_of(tmp_path / "atoll-simulation")
    assert first == list("023")
    assert len(others) == 2


def test_a_client_that_does_not_start_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a client's script does not get ready in time, its process is stopped, and the simulation fails and says
    why.
    """
    monkeypatch.setattr(engine, "START_S", 0.5)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    settings = {"run.script": f"{tmp_path / 'slow.py'}:train"}
    read = atoll.Settings.read(write(tmp_path, **settings), {"disk.state_dir": tmp_path / "state"})
    with pytest.raises(RunFailed, match=r"was not ready after 0\.5 s, and was stopped"):
        atoll.Simulation(settings=read, sites=4, processes=1).run()
    sys.modules.pop("client", None)


@pytest.mark.covers("V2")
def test_hanging_sites_do_not_keep_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Simulated sites that never return do not keep their processes: other sites train in their place, and the rounds
    close.

    As many sites hang as there are processes, and the round needs three sites.
    """
    monkeypatch.setattr(schedule_sites, "LEAST_PATIENCE_S", 1.0)
    sleeps = "        import time\n        if worker.site < 'site-0002':\n            time.sleep(100000)\n"
    rules = {"rounds.quorum": 3, "rounds.min_sites": 3, "rounds.deadline_s": 0.5}
    simulated = simulation(tmp_path, doing(sleeps), sites=5, processes=2, **rules)
    together(simulated.run, timeout_s=90)
    assert workers_of(tmp_path / "state") == [list("234")] * 3
    assert "site-0000 did not return within 1 s" in caplog.text


@pytest.mark.covers("V2")
def test_a_bug_in_the_scheduler_ends_the_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the code that frees the processes raises, the simulation ends with this error."""

    def bug(*_: Any) -> None:
        raise KeyError("w")

    monkeypatch.setattr(schedule_sites, "LEAST_PATIENCE_S", 0.1)
    monkeypatch.setattr(Engine, "free", bug)
    rules = {"rounds.quorum": 3, "rounds.deadline_s": 0.5}
    simulated = simulation(tmp_path, doing("        __import__('time').sleep(100000)\n"), **rules)
    with pytest.raises(RunFailed, match=r"The server failed: KeyError\('w'\)"):
        together(simulated.run, timeout_s=60)


@pytest.mark.covers("V5", "X3")
@pytest.mark.parametrize(
    ("flags", "settings", "why"),
    [
        (["--set", "run.script=other.py:train"], {}, "does not exist"),
        (["--set", "run.script=client.py:trian"], {}, "Did you mean 'train'?"),
        (["--set", "run.script=train"], {}, "is neither the name of a function nor that of a file"),
        (["--engine", "slurm"], {}, "Use one of local, ray"),
        (["--address", "box:6379"], {}, "the engine is 'local'"),
        ([], {"rounds.total": 0}, "would never end"),
        ([], {"async.enabled": True}, "async.enabled is True"),
        ([], {"diloco.num_fragments": 2}, "diloco.num_fragments is 2"),
    ],
    ids=["file", "name", "form", "engine", "address", "rounds", "async", "fragments"],
)
def test_wrong_options_of_simulate_are_refused(
    nursery: Nursery, tmp_path: Path, flags: list[str], settings: dict[str, object], why: str
) -> None:
    """`atoll simulate` refuses wrong scripts, engines and settings with exit code 2 and says why."""
    assert why in " ".join(simulate(nursery, write(tmp_path, **settings), *flags, code=2).split())


def test_a_broken_client_shows_its_traceback(nursery: Nursery, tmp_path: Path) -> None:
    """If the client cannot be imported, the error shows its traceback with the file and line."""
    run_file = write(tmp_path)
    (tmp_path / "their.py").write_text("import torch\nraise RuntimeError('no licence')\n")
    said = simulate(nursery, run_file, *FOUR, "--set", "run.script=their.py:train", code=2)
    assert "Traceback" in said
    assert "their.py:train' cannot be imported: RuntimeError: no licence (" in said
    assert "their.py, line 2)" in said
    (tmp_path / "their.py").write_text("import os\nos._exit(3)\n")
    said = simulate(nursery, run_file, *FOUR, "--set", "run.script=their.py:train", code=9)
    assert "ended with exit code 3 before it was ready" in said


def test_simulate_uses_the_given_directory(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll simulate --dir` keeps the run in the given state directory. `atoll status --dir` shows it, and a second
    start trains nothing.
    """
    simulate(nursery, write(tmp_path, **{"rounds.total": 1}), *FOUR, "--dir", "atoll-run")
    assert (tmp_path / "atoll-run" / "exports" / "model.safetensors").exists()
    assert not (tmp_path / "atoll-simulation").exists()
    shown = nursery.start("atoll", "status", "--dir", "atoll-run", cwd=tmp_path)
    assert shown.wait() == 0
    assert "; no server answers): fedavg, " in shown.output()
    assert ", FINISHED" in shown.output()
    again = simulate(nursery, tmp_path / "run.toml", *FOUR, "--dir", "atoll-run", code=2)
    assert "The run in atoll-run finished at version 1" in again
    again = simulate(nursery, tmp_path / "run.toml", *FOUR, "--dir", "atoll-run", "--resume")
    assert "the simulation was already finished, at version 1; nothing was trained; " in again
