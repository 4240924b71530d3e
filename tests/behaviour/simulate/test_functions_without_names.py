"""Training code that no other process can import: simulations train it in forks of their process."""

from __future__ import annotations

import functools
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.servers import new_simulation
from simulated_world import CLIENT, model_of, moved, run, start, workers_of

from atoll.errors import NotSimulated, RunFailed, UsageError
from atoll.simulate.simulated_site import result_of_error
from atoll.testing.run import wait_until

RULES = {"algorithm.name": "scaffold", "aggregation.upload_codec.name": "int8"}


def move(worker: Any, more: float = 0.0) -> None:
    """Each site moves each parameter by its number plus one, in each round."""
    model = start()
    for fl_round in worker:
        fl_round.load_into(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(int(worker.site[-4:]) + 1.0 + more)
        fl_round.submit(model, weight=1.0, metrics={"pid": os.getpid()})


class Mover:
    def __init__(self, more: float) -> None:
        self.more = more

    def train(self, worker: Any) -> None:
        move(worker, self.more)

    __call__ = train


def closure() -> Any:
    more = 1.0

    def train(worker: Any) -> None:
        move(worker, more)

    return train


FUNCTIONS = {
    "closure": closure(),
    "lambda": lambda worker: move(worker, 1.0),
    "partial": functools.partial(move, more=1.0),
    "partial of a lambda": functools.partial(lambda more, worker: move(worker, more), 1.0),
    "method": Mover(1.0).train,
    "object": Mover(1.0),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_a_simulation_trains_any_function_in_forks(tmp_path: Path, function: Any) -> None:
    """A simulation can train any function, even a local one, by forking the program."""
    # The mean of 2, 3, 4 and 5 in each of two rounds.
    done = run(tmp_path, function, processes=2)
    assert done.failed == {}
    assert moved(done) == pytest.approx(2 * 3.5, abs=1e-5)
    assert done.metrics["pid"] != os.getpid()


def test_forks_and_other_processes_give_the_same_bits(tmp_path: Path) -> None:
    """A simulation in forks gives the same bits as in fresh processes, also with SCAFFOLD and int8."""
    # Their state of a site passes from process to process.
    (tmp_path / "client.py").write_text(CLIENT)
    space = runpy.run_path(str(tmp_path / "client.py"))  # it leaves no module
    for name, script in ("file", f"{tmp_path / 'client.py'}:train"), ("fork", space["train"]):
        folder = {"disk.state_dir": tmp_path / name, "rounds.total": 3}
        new_simulation(space["build"](), script=script, sites=4, processes=2, **RULES, **folder).run()
    assert model_of(tmp_path / "fork") == model_of(tmp_path / "file")


def test_forks_train_after_torch_used_threads(tmp_path: Path) -> None:
    """A fork can train with several threads even if the program has used torch's thread pool before, which forks do not
    inherit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (torch.randn(600, 600) @ torch.randn(600, 600)).sum()
        seen = tmp_path / "threads"

        def train(worker: Any) -> None:
            torch.set_num_threads(2)
            loss = (torch.randn(600, 600, requires_grad=True) @ torch.randn(600, 600)).sum()
            loss.backward()
            seen.write_text(str(torch.get_num_threads()))
            move(worker)

        assert moved(run(tmp_path, train)) == pytest.approx(2 * 2.5, abs=1e-5)
        assert seen.read_text() == "2"
    finally:
        torch.set_num_threads(threads)


def test_a_killed_fork_is_replaced(tmp_path: Path) -> None:
    """If a fork of a simulation is killed, another fork trains its site, and the run ends."""
    mark = tmp_path / "killed"

    def train(worker: Any) -> None:
        if worker.site == "site-0001" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        move(worker)

    done = run(tmp_path, train)
    assert done.failed == {}
    assert moved(done) == pytest.approx(2 * 2.5, abs=1e-5)


def test_forks_find_the_arguments_of_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is simulated in forks sees the command line of the program in `sys.argv`."""
    monkeypatch.setattr(sys, "argv", ["program.py", "--rate", "0.1"])
    seen = tmp_path / "argv"

    def train(worker: Any) -> None:
        seen.write_text(" ".join(sys.argv))
        move(worker)

    for given, found in ({}, "program.py --rate 0.1"), ({"arguments": ["--fast"]}, "program.py --fast"):
        run(tmp_path / str(len(given)), train, **given)
        assert seen.read_text() == found


def test_an_error_in_a_fork_names_the_site(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RunFailed, match="no data at site-000"):
        run(tmp_path, lambda worker: 1 / 0 if not worker.site else move_or_raise(worker))
    assert "in move_or_raise" in caplog.text


def move_or_raise(worker: Any) -> None:
    raise ValueError(f"no data at {worker.site}")


def test_a_simulated_function_has_one_argument(tmp_path: Path) -> None:
    """A simulation refuses a training function that needs two arguments."""
    with pytest.raises(Exception, match="takes several arguments: worker, more"):
        run(tmp_path, lambda worker, more: None)


PROGRAM = """\
import os, time
from pathlib import Path

from torch import nn

import atoll

def main():
    def train(worker):
        model = nn.Linear(3, 2)
        for fl_round in worker:
            fl_round.load_into(model)
            while fl_round.number == 2 and not Path("go").exists():
                Path(f"here-{os.getpid()}").touch()
                time.sleep(0.01)
            fl_round.submit(model, weight=1.0)

    settings = {"rounds.total": 2, "algorithm.name": "fedavg", "disk.min_free_bytes": 0}
    done = atoll.Simulation(nn.Linear(3, 2), settings, script=train, sites=2, processes=2).run()
    print("rounds", done.rounds)

main()
"""


@pytest.mark.slow
def test_a_killed_simulation_leaves_no_fork(nursery: Nursery, tmp_path: Path) -> None:
    """If the program is killed, its forks end too and hold no lock, so a new start continues the run."""
    (tmp_path / "program.py").write_text(PROGRAM)
    killed = nursery.start("program.py", cwd=tmp_path)
    forks = wait_until(lambda: len(found := list(tmp_path.glob("here-*"))) == 2 and found, "both sites in round 2")
    killed.send(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    (tmp_path / "go").touch()
    again = nursery.start("program.py", cwd=tmp_path)
    assert again.wait() == 0, again.output()
    assert "rounds 1" in again.output()
    assert workers_of(tmp_path / "atoll-simulation") == [["0", "1"]] * 2
    for path in forks:
        pid = int(path.name.partition("-")[2])
        wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"the end of fork {pid}")


def test_ray_refuses_a_function_without_a_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"The function .*<lambda> cannot be imported by another process"):
        run(tmp_path, lambda worker: None, engine="ray")


def test_an_unusable_gpu_in_a_fork_has_a_remedy() -> None:
    """If a fork cannot use the GPU, the error says what to do."""
    torch_says = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use …"
    result = result_of_error(RuntimeError(torch_says))
    assert "atoll.run" in result.remedy
    assert str(NotSimulated(result.error, result.remedy)).startswith("The fork of a program that has used a GPU")
