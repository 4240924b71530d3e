"""What signals do to a process while it takes part in a run, and before and after; Ctrl-C among them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness.processes import Nursery, Process, free_port, wait_until
from kit import ForkedSite, serve, write_run_file
from kit.servers import state_of

import atoll

FORKS = """
import os, signal, threading
import atoll, torch
from kit import build_model
with {join}:
    if child := os.fork():
        print("forked", flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        threading.Event().wait(100)
    {child}
"""
ENDS_LATE = """
import atexit, os, signal, time
import atoll
from atoll.worker.session import leave_at_exit

class Slow:
    def leave(self, error=None):
        print("leaves by", error, flush=True)
        {in_leave}
        time.sleep(0.4)
        print("has left", flush=True)

def upload():
    os.kill(os.getpid(), signal.SIGTERM)
    while True:
        pass

def close():
    time.sleep(0.4)
    print("closed", flush=True)

slow, worker = Slow(), atoll.join()
leave_at_exit.watch_exit(slow)
atexit.register(close)  # called behind the one that is registered after it, if any
{at_exit}
"""
Start = Callable[[str], Process]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    """No test lives as long as a lease: what the server knows of an end, it was told."""
    with serve(tmp_path, sites=1, **{"network.heartbeat_timeout_s": 600.0}) as server:
        yield server


@pytest.fixture
def start(server: atoll.Server, tmp_path: Path, nursery: Nursery) -> Start:
    """Starts a script as site a."""
    return lambda script: ForkedSite(nursery, tmp_path, server.url, "a", script).start()


LEAVES = """
import signal
import atoll

def handlers():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and left so
before = handlers()
a, b = (atoll.join(site=site) for site in "ab")
a.leave()
while_joined = handlers()
b.leave()
assert not any(now is then for now, then in zip(while_joined, before)), while_joined
assert handlers() == before
"""


def test_signals_are_restored_after_leaving(start: Start) -> None:
    """When all workers of a process have left, its signal handlers are the same as before the first one joined.

    The script runs in a process of its own, because other tests may have workers in this one.
    """
    script = start(LEAVES)
    assert script.wait(60) == 0, script.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scripts_own_handler_stays(server: atoll.Server, tmp_path: Path, number: signal.Signals) -> None:
    """If a script has its own handler for SIGTERM or SIGHUP, this handler stays while the worker is joined and after it
    has left.
    """

    def own(*_: object) -> None: ...

    before = signal.signal(number, own)
    try:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers"):
            assert signal.getsignal(number) is own
        assert signal.getsignal(number) is own
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize(
    ("join", "child", "code"),
    [
        ("atoll.join()", "os.kill(os.getpid(), signal.SIGTERM); threading.Event().wait(100)", -signal.SIGTERM),
        ("atoll.join()", "import atexit; atexit._run_exitfuncs(); os._exit(0)", 0),
        ("atoll.join()", "raise SystemExit(5)", 5),
        ("atoll.join()", "1 / 0", 1),
        ("atoll.DiLoCo(net := build_model(), torch.optim.SGD(net.parameters()))", "raise SystemExit(5)", 5),
        ("atoll.tasks()", "raise SystemExit(5)", 5),
    ],
    ids=["sigterm", "exit", "end of the block", "error in the block", "DiLoCo", "tasks"],
)
def test_a_forked_child_does_not_leave(server: atoll.Server, start: Start, join: str, child: str, code: int) -> None:
    """If a forked child of a site's process ends, the site's worker does not leave, and the server shows the site as
    `alive`.
    """
    site = start(FORKS.format(join=join, child=child))
    wait_until(lambda: f"\n{code}\n" in site.output(), "the child's end")
    assert state_of(server) == "alive"
    site.kill()


@pytest.mark.covers("L9")
@pytest.mark.parametrize(
    ("in_leave", "at_exit", "why"),
    [("pass", "atexit.register(upload)", "ended by SIGTERM"), ("os.kill(os.getpid(), signal.SIGTERM)", "", "None")],
)
def test_a_worker_leaves_despite_late_signals(
    server: atoll.Server, tmp_path: Path, in_leave: str, at_exit: str, why: str
) -> None:
    """If SIGTERM arrives while Python exits, the worker still completes its leaving."""
    # A signal in an exit handler before the leaving makes the site's state `failed`. A signal during the leaving does
    # not: the state is `left`.
    script = ENDS_LATE.format(in_leave=in_leave, at_exit=at_exit)
    own = {"ATOLL_SERVER": server.url, "ATOLL_SITE": "a", "ATOLL_DIR": str(tmp_path / "workers")}
    ended = subprocess.run(  # a process of its own: what is forked ends without Python's exit handlers
        [sys.executable, "-c", script], env=os.environ | own, capture_output=True, text=True, timeout=60
    )
    assert f"closed\nleaves by {why}\nhas left\n" in ended.stdout, ended.stdout + ended.stderr
    assert state_of(server) == ("failed" if at_exit else "left")


# -- Ctrl-C ends what takes part with one line, no traceback, and the exit status of an interrupt


WAITING = """
import atoll
with atoll.join() as worker:
    for fl_round in worker:
        pass
"""
FUNCTIONS = """
import atoll
atoll.functional.init()
while atoll.functional.is_running():
    pass
"""
DILOCO = """
import atoll, torch
from kit.models import build_model, local_step
model = build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with atoll.DiLoCo(model, optimizer) as loop:
    for step in range(100):
        local_step(model, optimizer, "a", step)
"""
TRAINING = """
import threading, atoll
from kit.models import build_model
with atoll.join() as worker:
    next(iter(worker)).load_into(build_model())
    print("ready", flush=True)
    threading.Event().wait()
"""


def require_one_line(process: Process) -> None:
    """Ctrl-C ends it with the line of an interrupt, and the exit status; a shell calls that 130."""
    process.send(signal.SIGINT)
    assert process.wait(60) == -signal.SIGINT
    said = process.output()
    assert "Traceback" not in said
    assert [line for line in said.splitlines() if "interrupt" in line.lower()] == ["atoll: interrupted"]


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("script", "sites", "doing"),
    [(WAITING, 2, "waiting"), (FUNCTIONS, 2, "waiting"), (DILOCO, 2, "waiting"), (TRAINING, 1, "training")],
    ids=["rounds", "functions", "diloco", "training"],
)
def test_interrupted_scripts_end_with_one_line(
    nursery: Nursery, tmp_path: Path, script: str, sites: int, doing: str
) -> None:
    """If Ctrl-C interrupts a script that waits for other sites or trains, the script ends with one line and no
    traceback. Its site leaves the run.
    """
    with serve(tmp_path, algorithm="diloco" if script == DILOCO else "fedavg", H=2, sites=sites) as server:
        process = ForkedSite(nursery, tmp_path, server.url, "a", script).start()
        wait_until(lambda: any(doing in each.doing for each in server.status().workers), f"that it is {doing}")
        require_one_line(process)
        wait_until(lambda: state_of(server) == "left", "its leaving")


@pytest.mark.covers("X3")
def test_an_interrupted_script_without_server_prints_one_line(nursery: Nursery, tmp_path: Path) -> None:
    """If Ctrl-C interrupts a script that waits for its server, the script ends with one line and no traceback."""
    url = f"http://127.0.0.1:{free_port()}"
    process = ForkedSite(nursery, tmp_path, url, "a", "import atoll; atoll.join()").start()
    wait_until(lambda: "does not answer" in process.output(), "it to wait")
    require_one_line(process)


@pytest.mark.covers("X3")
def test_an_interrupted_worker_command_exits_with_130(nursery: Nursery, tmp_path: Path) -> None:
    """If Ctrl-C interrupts `atoll worker` while it waits for its server, the command exits with 130 and shows no
    traceback.
    """
    argv = ("atoll", "worker", "--server", f"http://127.0.0.1:{free_port()}", "--", "true")
    command = nursery.start(*argv, cwd=tmp_path)
    wait_until(lambda: "waiting" in command.output(), "the command to wait")
    command.send(signal.SIGINT)
    assert command.wait() == 128 + signal.SIGINT
    assert "Traceback" not in command.output()


LOCAL = """
from atoll.recipes import FedAvgRecipe, LocalEnv
from kit.models import build_model
recipe = FedAvgRecipe(name="r", model=build_model(), min_sites=2, num_rounds=2, train_script="client.py")
recipe.execute(LocalEnv(sites=2, folder="out"))
"""


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
        Path("trains").write_text("ready")
        threading.Event().wait()
"""


@pytest.mark.covers("X3")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "client", "file"),
    [(LOCAL, TRAINING, "out/site-2.log"), (SIMULATED, VIRTUAL, "trains")],
    ids=["local environment", "simulation"],
)
def test_interrupted_scripts_with_subprocesses_print_one_line(
    nursery: Nursery, tmp_path: Path, script: str, client: str, file: str
) -> None:
    """If Ctrl-C interrupts a script that trains in other processes, the script ends with one line and no traceback."""
    # The file says `ready` once one of these processes trains.
    (tmp_path / "client.py").write_text(client)
    (tmp_path / "script.py").write_text(script)
    process = nursery.start(str(tmp_path / "script.py"), cwd=tmp_path)
    wait_until(lambda: (tmp_path / file).exists() and "ready" in (tmp_path / file).read_text(), "the training", 300)
    require_one_line(process)


@pytest.mark.covers("X3")
@pytest.mark.timeout(400)
def test_an_interrupted_simulate_command_exits_with_130(nursery: Nursery, tmp_path: Path) -> None:
    """If Ctrl-C interrupts `atoll simulate`, the command exits with 130."""
    # It prints one line that it is stopping, and no traceback. As in a terminal, the signal interrupts the training
    # processes too.
    (tmp_path / "client.py").write_text(VIRTUAL)
    write_run_file(tmp_path, **{"model.source": "client:Model", "run.script": "client.py:train"})
    process = nursery.start("atoll", "simulate", "run.toml", "--processes", "1", cwd=tmp_path)
    wait_until((tmp_path / "trains").exists, "its training", 300)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert "Traceback" not in process.output()
    assert sum("stopping" in line for line in process.output().splitlines()) == 1
    assert "interrupted" not in process.output()
