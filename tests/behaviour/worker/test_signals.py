"""What signals do to a process while it takes part in a run, and before and after; Ctrl-C among them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from harness.processes import Nursery, Process, free_port, wait_until
from kit import ForkedSite, atoll_worker, serve, write_run_file
from kit.servers import state_of

import atoll

HANGS = """
import ctypes, os
import atoll
with atoll.join():
    lock = {library}(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    print("hangs", os.getpid(), hex(ctypes.addressof(mutex)), flush=True)
    lock(mutex)
"""
FORKED_AND_ENDED = """
import array, fcntl, os, signal, termios, threading
import concurrent.futures.thread  # it takes a lock before a fork, which a fork within that fork could not take again
from atoll.worker.session import leave_at_exit
leave_at_exit._end_a_hang = lambda reader: None  # what is written for it stays in the pipe

def end_at_once():
    if ends_itself:
        os.kill(os.getpid(), signal.SIGTERM)

def fork_within():
    global forks_within
    if forks_within:
        forks_within = False
        if not (child := os.fork()):
            os._exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        held_back.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))  # Python drops an error of this function

held_back = []
ends_itself = forks_within = False
# registered first: before a fork it is called behind that of Atoll, in the fork ahead of it
os.register_at_fork(before=fork_within, after_in_child=end_at_once)

import atoll
with atoll.join():
    forks_within = True
    if not (child := os.fork()):
        os._exit(0)
    os.waitpid(child, 0)
    assert held_back == [0], f"a fork within a fork holds signals back: {held_back}"
    for ends_itself in [True] + [False] * 100:
        if not (child := os.fork()):
            signal.alarm(20)
            while True:  # Python may see a signal that comes just before a wait only behind it
                threading.Event().wait(0.1)
        if not ends_itself:
            os.kill(child, signal.SIGTERM)  # it may not have run any Python yet
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    written = array.array("i", [0])
    watched = signal.set_wakeup_fd(-1)
    fcntl.ioctl(watched, termios.FIONREAD, written)
    assert list(written) == [0], written
    signal.set_wakeup_fd(watched)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.raise_signal(signal.SIGUSR1)
    fcntl.ioctl(watched, termios.FIONREAD, written)
    assert list(written) == [1], "its own signals are not watched any more"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()), "signals are held back for ever"
"""
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
DROPPED = """
import os, signal, threading, time
import atoll
from atoll.worker.session import leave_at_exit

def be_ended():
    signal.pthread_kill(other.ident, signal.SIGTERM)  # this thread may hold signals back
    deadline = time.monotonic() + 60
    while not leave_at_exit._handled and time.monotonic() < deadline:
        pass
    print("goes on", flush=True)

class Finalized:
    def __del__(self):
        be_ended()

class Renamed:
    def __del__(self):
        try:
            be_ended()
        except BaseException as error:
            raise RuntimeError("cannot be closed") from error

def fork():
    if not os.fork():
        os._exit(0)

other = threading.Thread(target=threading.Event().wait, daemon=True)
other.start()
{before}
with atoll.join():
    {act}
    threading.Event().wait(100)
"""
RAISED_IN_A_FORK = """
import os, signal, threading
import atoll

def own(*_):
    raise RuntimeError("of the script's own")

def send():
    if not os.path.exists("sent"):
        open("sent", "w").close()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)  # held back until the fork is over

os.register_at_fork(before=send)
signal.signal(signal.SIGTERM, own)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run where it is ignored
with atoll.join():
    if not os.fork():
        os._exit(0)
    assert os.path.exists("sent")
    print("forked", flush=True)
    threading.Event().wait(100)
"""
ENDS_LATE = """
import atexit, os, signal, time
import atoll
from atoll.worker.session import leave_at_exit

class Slow:
    def leave(self, error=None):
        print("leaves by", error, flush=True)
        {in_leave}
        time.sleep(8 * leave_at_exit.AGAIN_S)
        print("has left", flush=True)

def upload():
    os.kill(os.getpid(), signal.SIGTERM)
    while not leave_at_exit._handled:
        pass

def close():
    time.sleep(8 * leave_at_exit.AGAIN_S)
    print("closed", flush=True)

slow, worker = Slow(), atoll.join()
leave_at_exit.watch_exit(slow)
atexit.register(close)  # called behind the one that is registered after it, if any
{at_exit}
"""
WRAPPED = """
import sys
import atoll

def wrap(name):
    before = getattr(sys, name)
    setattr(sys, name, lambda *given: before(*given))

class Broken:
    def __del__(self):
        raise ValueError("the finalizer's own")

with atoll.join(site="a"):
    wrap("exit")
    wrap("unraisablehook")
with atoll.join(site="a"):
    Broken()
    sys.exit(3)
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


def is_in_lock(pid: str, mutex: str) -> bool:
    """Whether the process waits for this mutex, in a system call; True on systems that do not tell."""
    try:
        return mutex in Path(f"/proc/{pid}/syscall").read_text().split()
    except OSError:
        return True


@pytest.mark.covers("L9")
def test_a_process_that_hangs_in_native_code_leaves_after_one_sigterm(server: atoll.Server, start: Start) -> None:
    site = start(HANGS.format(library="ctypes.CDLL"))
    pid, mutex = wait_until(lambda: re.search(r"hangs (\d+) (0x\w+)\n", site.output()), "the script").groups()
    wait_until(lambda: is_in_lock(pid, mutex), "the hang")
    site.send(signal.SIGTERM)
    assert site.wait() == 128 + signal.SIGTERM
    assert state_of(server) == "failed"


@pytest.mark.covers("L9")
def test_a_second_sigterm_ends_native_code_that_lets_no_thread_run(server: atoll.Server, tmp_path: Path) -> None:
    with atoll_worker(tmp_path, server.url, HANGS.format(library="ctypes.PyDLL")) as process:
        assert process.stdout is not None
        word, pid, mutex = process.stdout.readline().split()
        assert word == "hangs"
        wait_until(lambda: is_in_lock(pid, mutex), "the hang")
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(2)
        try:
            assert process.wait(15) == 128 + signal.SIGTERM
        finally:
            if process.poll() is None:  # it waits for its script
                os.kill(int(pid), signal.SIGKILL)
    assert state_of(server) == "failed"


LEAVES = """
import signal, sys
import atoll

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored under nohup, and left so
before = [sys.exit, sys.unraisablehook, *map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP))]
a, b = (atoll.join(site=site) for site in "ab")
a.leave()
while_joined = [sys.exit, sys.unraisablehook, *map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP))]
b.leave()
assert not any(now is then for now, then in zip(while_joined, before)), while_joined
assert [sys.exit, sys.unraisablehook, *map(signal.getsignal, (signal.SIGTERM, signal.SIGHUP))] == before
"""


def test_signals_and_sys_exit_do_what_they_did_before_once_the_last_worker_has_left(start: Start) -> None:
    """In a process of its own: other tests may have workers in this one."""
    script = start(LEAVES)
    assert script.wait(60) == 0, script.output()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_scripts_own_handler_stays(server: atoll.Server, tmp_path: Path, number: signal.Signals) -> None:
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
def test_a_forked_child_that_ends_does_not_leave_in_its_parents_name(
    server: atoll.Server, start: Start, join: str, child: str, code: int
) -> None:
    site = start(FORKS.format(join=join, child=child))
    wait_until(lambda: f"\n{code}\n" in site.output(), "the child's end")
    assert state_of(server) == "alive"
    site.kill()


@pytest.mark.usefixtures("fresh_processes")  # the script acts before Atoll is imported
def test_a_signal_to_a_fork_that_has_run_no_python_yet_ends_the_fork_and_not_its_parent(start: Start) -> None:
    site = start(FORKED_AND_ENDED)
    assert site.wait(60) == 0, site.output()


@pytest.mark.covers("L9")
@pytest.mark.parametrize(
    ("before", "act", "goes_on"),
    [
        ("", "Finalized()", False),
        ("", "Renamed()", False),
        ("", "os.register_at_fork(before=be_ended); fork()", False),
        ("", "os.register_at_fork(after_in_parent=be_ended); fork()", False),
        # registered ahead of Atoll, and so called while it holds signals back: half done it would leave a lock taken
        ("os.register_at_fork(before=be_ended)", "fork()", True),
        ("os.register_at_fork(after_in_parent=be_ended)", "fork()", True),
    ],
)
def test_a_sigterm_that_comes_where_python_drops_errors_ends_the_script_all_the_same(
    server: atoll.Server, start: Start, request: pytest.FixtureRequest, before: str, act: str, goes_on: bool
) -> None:
    if before:  # the script acts before Atoll is imported
        request.getfixturevalue("fresh_processes")
    site = start(DROPPED.format(before=before, act=act))
    assert site.wait(60) == 128 + signal.SIGTERM, site.output()
    assert ("goes on" in site.output()) == goes_on, site.output()
    assert state_of(server) == "failed"


@pytest.mark.covers("L9")
def test_a_script_handler_that_raises_in_a_fork_leaves_other_signals_alone(server: atoll.Server, start: Start) -> None:
    site = start(RAISED_IN_A_FORK)
    wait_until(lambda: "forked\n" in site.output(), "the fork")
    site.send(signal.SIGHUP)
    assert site.wait() == 128 + signal.SIGHUP, site.output()
    assert state_of(server) == "failed"


@pytest.mark.covers("L9")
@pytest.mark.parametrize(
    ("in_leave", "at_exit", "why"),
    [("pass", "atexit.register(upload)", "ended by SIGTERM"), ("os.kill(os.getpid(), signal.SIGTERM)", "", "None")],
)
def test_a_sigterm_at_the_end_of_python_does_not_keep_a_worker_from_leaving(
    server: atoll.Server, tmp_path: Path, in_leave: str, at_exit: str, why: str
) -> None:
    script = ENDS_LATE.format(in_leave=in_leave, at_exit=at_exit)
    own = {"ATOLL_SERVER": server.url, "ATOLL_SITE": "a", "ATOLL_DIR": str(tmp_path / "workers")}
    ended = subprocess.run(  # a process of its own: what is forked ends without Python's exit handlers
        [sys.executable, "-c", script], env=os.environ | own, capture_output=True, text=True, timeout=60
    )
    assert f"closed\nleaves by {why}\nhas left\n" in ended.stdout, ended.stdout + ended.stderr
    assert state_of(server) == ("failed" if at_exit else "left")


def test_hooks_that_others_have_wrapped_are_called_once(start: Start) -> None:
    site = start(WRAPPED)
    assert site.wait() == 3, site.output()
    assert site.output().count("ValueError: the finalizer's own") == 1, site.output()


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
def test_a_script_that_waits_for_others_or_trains_ends_with_one_line(
    nursery: Nursery, tmp_path: Path, script: str, sites: int, doing: str
) -> None:
    with serve(tmp_path, algorithm="diloco" if script == DILOCO else "fedavg", H=2, sites=sites) as server:
        process = ForkedSite(nursery, tmp_path, server.url, "a", script).start()
        wait_until(lambda: any(doing in each.doing for each in server.status().workers), f"that it is {doing}")
        require_one_line(process)
        wait_until(lambda: state_of(server) == "left", "its leaving")


@pytest.mark.covers("X3")
def test_a_script_that_waits_for_its_server_ends_with_one_line(nursery: Nursery, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    process = ForkedSite(nursery, tmp_path, url, "a", "import atoll; atoll.join()").start()
    wait_until(lambda: "does not answer" in process.output(), "it to wait")
    require_one_line(process)


@pytest.mark.covers("X3")
def test_the_worker_command_ends_with_130_while_it_waits_for_its_server(nursery: Nursery, tmp_path: Path) -> None:
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
def test_a_script_that_trains_in_other_processes_ends_with_one_line(
    nursery: Nursery, tmp_path: Path, script: str, client: str, file: str
) -> None:
    """And so do these. The file says `ready` once one of them trains."""
    (tmp_path / "client.py").write_text(client)
    (tmp_path / "script.py").write_text(script)
    process = nursery.start(str(tmp_path / "script.py"), cwd=tmp_path)
    wait_until(lambda: (tmp_path / file).exists() and "ready" in (tmp_path / file).read_text(), "the training", 300)
    require_one_line(process)


@pytest.mark.covers("X3")
@pytest.mark.timeout(400)
def test_the_simulate_command_ends_with_130_and_no_traceback(nursery: Nursery, tmp_path: Path) -> None:
    """A terminal interrupts the processes that train, too."""
    (tmp_path / "client.py").write_text(VIRTUAL)
    write_run_file(tmp_path, **{"model.source": "client:Model", "run.script": "client.py:train"})
    process = nursery.start("atoll", "simulate", "run.toml", "--processes", "1", cwd=tmp_path)
    wait_until((tmp_path / "trains").exists, "its training", 300)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert "Traceback" not in process.output()
    assert sum("stopping" in line for line in process.output().splitlines()) == 1
