"""Ctrl-C ends what takes part with one line, no traceback, and the exit status of an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness.processes import Nursery, free_port, wait_until
from kit import serve

pytestmark = [pytest.mark.covers("X3"), pytest.mark.usefixtures("interruptible")]

INTERRUPTED = -signal.SIGINT
"""A shell calls it 130."""

WAITING = """
import sys, atoll
with atoll.join(sys.argv[1], site="a", folder="w") as worker:
    for fl_round in worker:
        pass
"""

FUNCTIONS = """
import sys, atoll
atoll.functional.init(sys.argv[1], site="a", folder="w")
while atoll.functional.is_running():
    pass
"""

DILOCO = """
import sys, atoll, torch
sys.path.insert(0, sys.argv[2])
from kit.models import build_model, local_step
model = build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.DiLoCo(model, optimizer, server=sys.argv[1], site="a", folder="w") as loop:
    for step in range(100):
        local_step(model, optimizer, "a", step)
"""

TRAINING = """
import sys, threading, atoll
with atoll.join(sys.argv[1], site="a", folder="w") as worker:
    print("ready", flush=True)
    threading.Event().wait()
"""

UNREACHED = """
import sys, atoll
atoll.join(sys.argv[1], site="a", folder="w")
"""

KIT = str(Path(__file__).parents[2])


@contextmanager
def script(folder: Path, text: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A script that runs, and the file that has all that it prints; killed at the end of the block."""
    (folder / "script.py").write_text(text)
    log = folder / "script.log"
    argv = [sys.executable, "script.py", *arguments]
    with log.open("wb") as file:
        process = subprocess.Popen(argv, cwd=folder, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process, log
    finally:
        process.kill()
        process.wait()


def read(log: Path) -> str:
    """What is in a file; nothing where there is none yet."""
    return log.read_text() if log.exists() else ""


def require_one_line(process: subprocess.Popen[bytes], log: Path) -> None:
    """Ctrl-C ends it with the line of an interrupt, and the exit status."""
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == INTERRUPTED
    said = log.read_text()
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if "interrupt" in line.lower()] == ["atoll: interrupted"]


@pytest.mark.parametrize("text", [WAITING, FUNCTIONS, DILOCO], ids=["rounds", "functions", "diloco"])
def test_a_script_that_waits_for_others_ends_with_one_line(tmp_path: Path, text: str) -> None:
    with (
        serve(tmp_path, algorithm="diloco", H=2) as server,
        script(tmp_path, text, server.url, KIT) as (process, log),
    ):
        wait_until(
            lambda: [each.doing for each in server.status().workers if "waiting" in each.doing], "it to wait", 60
        )
        require_one_line(process, log)
        wait_until(lambda: server.status().workers[0].state == "left", "its leaving")


def test_a_script_that_trains_ends_with_one_line(tmp_path: Path) -> None:
    with serve(tmp_path) as server, script(tmp_path, TRAINING, server.url) as (process, log):
        wait_until(lambda: "ready" in log.read_text(), "it to train", 60)
        require_one_line(process, log)
        wait_until(lambda: server.status().workers[0].state == "left", "its leaving")


def test_a_script_that_waits_for_its_server_ends_with_one_line(tmp_path: Path) -> None:
    with script(tmp_path, UNREACHED, f"http://127.0.0.1:{free_port()}") as (process, log):
        wait_until(lambda: "does not answer" in log.read_text(), "it to wait", 60)
        require_one_line(process, log)


def test_the_worker_command_ends_with_130_while_it_waits_for_its_server(nursery: Nursery, tmp_path: Path) -> None:
    log = tmp_path / "log"
    argv = ("atoll", "worker", "--server", f"http://127.0.0.1:{free_port()}", "--", "true")
    command = nursery.start(*argv, cwd=tmp_path, log=log)
    wait_until(lambda: "waiting" in log.read_text(), "the command to wait")
    os.kill(command.pid, signal.SIGINT)
    assert command.wait() == 128 + signal.SIGINT
    assert "Traceback" not in log.read_text()


LOCAL = """
import sys
sys.path.insert(0, sys.argv[1])
import atoll
from atoll.recipes import FedAvgRecipe, LocalEnv
from kit.models import build_model
recipe = FedAvgRecipe(name="r", model=build_model(), min_sites=2, num_rounds=2, train_script="client.py")
recipe.execute(LocalEnv(sites=2, folder="out"))
"""

CLIENT = """
import threading
import atoll
with atoll.join() as worker:
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_a_script_with_a_local_environment_ends_with_one_line(tmp_path: Path) -> None:
    """And so do its server and its clients."""
    (tmp_path / "client.py").write_text(CLIENT)
    with script(tmp_path, LOCAL, KIT) as (process, log):
        wait_until(lambda: read(tmp_path / "out" / "site-2.log").count("ready"), "the clients", 120)
        require_one_line(process, log)


SIMULATED = """
import atoll
settings = {"model.source": "client:Model", "algorithm.name": "fedavg", "rounds.total": 3}
atoll.Simulation(settings=settings, script="client.py:train", sites=2, processes=1).run()
"""

VIRTUAL = """
import threading
from pathlib import Path
from torch import nn


class Model(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)


def train(worker):
    for fl_round in worker:
        Path("trains").touch()
        threading.Event().wait()
"""


@pytest.mark.timeout(400)
def test_a_script_with_a_simulation_ends_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(VIRTUAL)
    with script(tmp_path, SIMULATED) as (process, log):
        wait_until(lambda: (tmp_path / "trains").exists(), "its training", 300)
        require_one_line(process, log)


@pytest.mark.timeout(400)
def test_the_simulate_command_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    """A terminal interrupts the processes that train, too."""
    (tmp_path / "client.py").write_text(VIRTUAL)
    run = (
        'model.source = "client:Model"\nrun.script = "client.py:train"\nalgorithm.name = "fedavg"\nrounds.sites = '
        "2\nrounds.total = 3\n"
    )
    (tmp_path / "run.toml").write_text(run)
    command = "from atoll.cli.main import main\nmain()\n"
    with script(tmp_path, command, "simulate", "run.toml", "--processes", "1") as (process, log):
        wait_until(lambda: (tmp_path / "trains").exists(), "its training", 300)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 128 + signal.SIGINT
    said = log.read_text()
    assert "Traceback" not in said
    assert sum("stopping" in line for line in said.splitlines()) == 1
