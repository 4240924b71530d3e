"""`atoll.Simulation` in a program: which settings count, what stays in memory, which clients there are."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from engine_here import simulate_here
from kit.client import Client
from kit.servers import new_simulation
from torch import nn

import atoll
from atoll.cli.simulate import summary
from atoll.errors import ConfigError, RunFailed, UsageError
from atoll.protocol import messages
from atoll.protocol.status_messages import RoundSummary
from atoll.server.coordinator.coordinator import Coordinator
from atoll.simulate import schedule_sites
from atoll.simulate.simulation import threads_of

CLIENT = '''\
"""Every site moves each parameter by its number plus one, in each round."""

import os
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
with (HERE / "loaded").open("a") as file:
    file.write(f"{os.getpid()}\\n")


def build() -> nn.Module:
    return nn.Linear(3, 2)


def train(worker) -> None:
    model, number = build(), int(worker.site[-4:])
    for fl_round in worker:
        fl_round.load_into(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(number + 1.0)
        fl_round.submit(model, weight=1.0, metrics={"number": number, "threads": torch.get_num_threads()})


def remember(worker) -> None:
    """As `train`, and says how much memory its process has."""
    held = torch.ones(8 * 2**20)  # 32 MB of a simulated site's own, past what stays with the process when it is freed
    train(worker)
    status = Path("/proc/self/status").read_text().splitlines()
    anonymous = next(line.split()[1] for line in status if line.startswith("RssAnon:"))
    with (HERE / "memory").open("a") as file:
        file.write(f"{int(anonymous) * 1024 * int(held[0])}\\n")


def opened(worker) -> None:
    """As `train`, and says how many files its process has open."""
    train(worker)
    with (HERE / "opened").open("a") as file:
        file.write(f"{len(os.listdir('/proc/self/fd'))}\\n")
'''


@pytest.fixture(autouse=True)
def _here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that are not slow start no process."""
    if "slow" not in request.keywords:
        simulate_here(monkeypatch)


@pytest.fixture
def client(tmp_path: Path) -> str:
    (tmp_path / "client.py").write_text(CLIENT)
    return f"{tmp_path / 'client.py'}:train"


def start() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def run(folder: Path, client: Any, **options: Any) -> Any:
    given = {
        "sites": 4,
        "processes": 1,
        "rounds.total": 2,
        "algorithm.name": "fedavg",
        "disk.state_dir": folder / "state",
    }
    return new_simulation(start(), script=client, **given | options).run()


def moved(done: Any) -> float:
    """By how much the first weight has moved."""
    result = safetensors.torch.load_file(done.model)
    return float(result["weight"][0, 0] - start().weight[0, 0].detach())


@pytest.mark.slow
def test_a_round_is_of_as_many_as_it_asks_for_and_counts_like_any_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, client: str
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    seen: list[RoundSummary] = []
    done = run(tmp_path, client, sites=9, **{"rounds.sample_fraction": 1 / 3}, processes=2, on_round=seen.append)
    assert [len(round_.workers) for round_ in seen] == [3, 3]
    means = [sum(int(site[-4:]) + 1 for site in round_.workers) / 3 for round_ in seen]
    assert moved(done) == pytest.approx(sum(means), abs=1e-5)
    assert [round_.metrics["number"] for round_ in seen] == pytest.approx([mean - 1 for mean in means])
    assert [round_.metrics["threads"] for round_ in seen] == [3, 3]
    assert (done.worker_rounds, done.rounds, done.failed) == (6, 2, {})
    assert len((tmp_path / "loaded").read_text().split()) == 2  # once in each process
    assert not (tmp_path / "state" / "sites").exists()  # FedAvg keeps nothing of a site


def test_processes_divide_the_cores_among_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [threads_of(processes) for processes in (1, 3, 8, 20)] == [8, 2, 1, 1]
    for told, threads in (("4", 4), ("4,2", 4), ("0", 2), ("many", 2), ("", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert threads_of(4) == threads


@pytest.mark.covers("V2", "V3")
@pytest.mark.slow
def test_the_command_takes_arguments_of_the_client_prints_json_alone_and_leaves_nothing_running(
    tmp_path: Path, client: str
) -> None:
    """Whose processes start others of their own, and print."""
    more = "    import subprocess, sys\n    print('trains', *sys.argv[1:], flush=True)\n"
    more += "    subprocess.Popen(['sleep', '600'], cwd=HERE)\n    model, number ="
    (tmp_path / "client.py").write_text(CLIENT.replace("    model, number =", more, 1))
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
    command = [sys.executable, "-m", "atoll.cli.main", "simulate", "run.toml", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["worker_rounds"] == 8
    assert done.stderr.count("trains --lr 0.1\n") == 8
    assert len((tmp_path / "loaded").read_text().split()) == 2 + 1  # of both processes, and of who builds the model
    assert [entry for entry in Path("/proc").glob("[0-9]*") if cwd_of(entry) == str(tmp_path)] == []


DRAWS = """
import random
import numpy as np

LOADED = [random.random(), np.random.rand(), torch.rand(()).item()]


def draw(worker) -> None:
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    train(worker)
    with (HERE / "drawn").open("a") as file:
        file.write(f"{worker.site} {' '.join(map(str, [*LOADED, *drawn]))}\\n")
"""


@pytest.mark.covers("V1")
def test_what_is_drawn_hangs_on_the_seed_the_site_and_the_round(tmp_path: Path) -> None:
    """By all three generators; and of what is drawn when the client is loaded, on the seed."""

    def drawn(name: str, *given: int, **options: Any) -> list[list[str]]:
        """A line for each site and round: of the loading, of the round. In the order in which they were trained."""
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(CLIENT + DRAWS)
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
        assert len({line[column] for line in [*whole, *other]}) == 2 * 4 * 2  # seeds, sites, rounds


@pytest.mark.covers("V3")
@pytest.mark.slow
def test_lines_of_two_processes_do_not_mix(tmp_path: Path, client: str) -> None:
    """The first prints half a line, waits until the other has printed a whole one, and prints the rest."""
    more = "    import sys, time\n    begun, whole = HERE / 'begun', HERE / 'whole'\n"
    more += "    def wait_for(path):\n        end = time.monotonic() + 120\n"
    more += "        while not path.exists() and time.monotonic() < end:\n            time.sleep(0.01)\n"
    more += "    if worker.site.endswith('0'):\n        print('half', end=' ')\n        begun.touch()\n"
    more += "        wait_for(whole)\n        print('a line')\n"
    more += "    else:\n        wait_for(begun)\n        print('whole')\n        whole.touch()\n    model, number ="
    (tmp_path / "client.py").write_text(CLIENT.replace("    model, number =", more, 1))
    (tmp_path / "run.toml").write_text(
        'model.source = "client.py:build"\nalgorithm.name = "fedavg"\nrounds.total = 1\n'
    )
    flags = ["--set", "run.script=client.py:train", "--set", "rounds.sites=2", "--processes", "2", "--json"]
    command = [sys.executable, "-m", "atoll.cli.main", "simulate", "run.toml", *flags]
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=unbuffered, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "whole\nhalf a line\n" in done.stderr


def cwd_of(process: Path) -> str:
    try:
        return os.readlink(process / "cwd")
    except OSError:
        return ""


def test_updates_pass_through_the_filters_of_the_run(tmp_path: Path, client: str) -> None:
    clip = {"path": "norm_clip", "args": {"max_norm": 8.0**0.5}}  # of 8 parameters: a change of 1 in each
    done = run(tmp_path, client, **{"workflow.result_filters": [clip]})
    assert moved(done) == pytest.approx(2.0, abs=1e-4)


def test_a_run_in_memory_has_no_file_of_a_tensor(tmp_path: Path, client: str) -> None:
    done = run(tmp_path, client, **{"disk.in_files": False})
    assert moved(done) == pytest.approx(2 * 2.5, abs=1e-5)
    assert list((tmp_path / "state" / "slots").iterdir()) == []


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

    def on_round(summary: RoundSummary) -> None:
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
    assert summary(done) == f"was finished before, at version {done.version}: nothing is trained; {done.model}"


def test_a_simulation_of_very_many_can_be_stopped_while_they_join(
    tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedule_sites, "JOIN_AT_ONCE", 10)
    joined, join = list[str](), Coordinator.join

    async def counted(self: Coordinator, message: messages.Join) -> messages.Joined:
        joined.append(message.site)
        if len(joined) == 25:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()  # as `stop` does, which a signal calls
        return await join(self, message)

    monkeypatch.setattr(Coordinator, "join", counted)
    simulation = atoll.Simulation(
        start(),
        script=client,
        sites=200,
        settings={"rounds.total": 1, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "s"},
    )
    with pytest.raises(UsageError, match="The simulation was stopped"):
        simulation.run()
    assert len(joined) == 30  # those of the three transactions that had begun


def test_a_client_that_begins_a_simulation_when_it_is_imported_is_told_how_not_to(tmp_path: Path) -> None:
    (tmp_path / "again.py").write_text(
        "import atoll\nfrom torch import nn\n\ndef train(worker):\n    pass\n\n"
        "atoll.Simulation(nn.Linear(1, 1), script=train).run()\n"
    )
    with pytest.raises(ConfigError, match="if __name__ == '__main__'"):
        run(tmp_path, f"{tmp_path / 'again.py'}:train")


def test_a_program_gives_the_function_itself(tmp_path: Path, client: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "client", raising=False)  # of another test
    import client as theirs  # type: ignore[import-not-found]

    assert moved(run(tmp_path, theirs.train)) == pytest.approx(2 * 2.5, abs=1e-5)


def test_a_function_that_no_other_process_finds_is_refused(tmp_path: Path) -> None:
    def within(worker: Any) -> None: ...

    for function in (within, lambda worker: None):
        with pytest.raises(UsageError, match="cannot be found by another process"):
            run(tmp_path, function)


@pytest.mark.covers("X3")
def test_workflows_are_refused_rather_than_left_out(tmp_path: Path, client: str) -> None:
    entries = [{"kind": "train"}, {"kind": "cross_site_evaluation"}]
    with pytest.raises(ConfigError, match=r"workflow.steps is set: a simulation has rounds of training.*atoll server"):
        run(tmp_path, client, **{"workflow.steps": entries})


def test_names_of_simulated_sites_have_to_differ(tmp_path: Path, client: str) -> None:
    with pytest.raises(ConfigError, match="a name of its own"):
        run(tmp_path, client, sites=["a", "b", "a"])
    with pytest.raises(ConfigError, match="not a site name"):
        run(tmp_path, client, sites=["a b"])


@pytest.mark.slow
def test_hundreds_that_have_the_same_to_say_are_not_all_heard(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "client.py").write_text(CLIENT.replace("parameter.add_(number + 1.0)", "pass"))
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

    def on_round(summary: RoundSummary) -> None:
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


def test_it_goes_on_with_fewer_simulated_sites_or_with_more(tmp_path: Path, client: str) -> None:
    seen: list[list[str]] = []

    def on_round(summary: RoundSummary) -> None:
        seen.append([site[-1] for site in summary.workers])

    for rounds, workers in ((1, 4), (2, 2), (4, 5)):
        run(tmp_path, client, **{"rounds.total": rounds}, sites=workers, **{"rounds.min_sites": 1}, on_round=on_round)
    assert seen == [list("0123"), list("01"), list("01"), list("01234")]  # a late joiner counts from the next round on


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
    with pytest.raises(ConfigError, match="has real workers, such as clinic-a"):
        run(tmp_path, client)


def test_a_script_in_the_functional_form_runs_for_one_after_the_other(tmp_path: Path) -> None:
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
