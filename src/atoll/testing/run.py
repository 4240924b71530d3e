"""Run a server and its sites inside a test, kill them where you like, and read what the run has done.

Threads of the test's process are the quickest:

    settings = {"algorithm": {"name": "fedavg"}, "rounds": {"total": 3, "sites": 2}}
    with serve(build(), folder / "state", settings) as server:
        together(lambda: train("a", server.url), lambda: train("b", server.url))
        server.run()                                    # until its result is written
    assert [line["version"] for line in history(folder / "state")] == [1, 2, 3]

Processes can be killed, or stop themselves at a named place (a failpoint). A `ForkServer` has imported torch and Atoll
already, so what it starts needs milliseconds:

    with ForkServer() as fork_server:
        server = fork_server.start("atoll", "server", "run.toml", cwd=folder, failpoints="accept.before=kill")
        assert server.wait() == -signal.SIGKILL

Failpoints are written `name=action`, with `;` between several. The actions are `kill` (SIGKILL), `stop` (SIGSTOP),
`enospc`, `emfile` and `eio` (raise that OSError), and `pause:PATH` (create PATH.reached, and wait until PATH exists).
`name=action@3` acts at the third time that the place is reached, `name=action@1,2` at the first and the second.

Processes need Linux.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from atoll import runtime
from atoll.protocol import routes
from atoll.protocol.status_messages import Status

if TYPE_CHECKING:
    from torch import nn

    from atoll.server.serve import Server

__all__ = [
    "ForkServer",
    "Process",
    "RestartedProcess",
    "Status",
    "Threads",
    "failpoints",
    "free_port",
    "history",
    "interruptible",
    "serve",
    "status",
    "together",
    "wait_until",
]

T = TypeVar("T")

PRELOAD = (
    "atoll.cli.main",
    "atoll.cli.server",
    "atoll.server.serve",
    "atoll.worker.training.federated_loop",
    "atoll.worker.training.diloco_loop",
    "torch._dynamo",  # torch.optim imports it when the first optimizer is made
)
"""What a `ForkServer` imports before its first fork."""

POLL_S = 0.01
_PORTS: Sequence[int] = range(20_000, 32_000)  # below those that Linux gives out by itself, 32,768 to 60,999
_HELD_PORTS: list[socket.socket] = []
_PR_SET_PDEATHSIG = 1


# -- a server in this process


@contextmanager
def serve(
    model: nn.Module | str | None, state_dir: Path | str, settings: Mapping[str, Any] | None = None, **more: Any
) -> Iterator[Server]:
    """Start a server in this process, on a port that no other test uses, and stop it at the end of the block.

    Args:
        model: the initial model, or its name; None for a run of tasks alone.
        state_dir: where the run is kept. A second server on it goes on with the same run.
        settings: of the run, by `group.key` or group.
        more: further arguments of `atoll.Server`, such as a workflow or filters.
    """
    from atoll.server.serve import Server

    chosen = {"network.port": free_port(), "disk.state_dir": Path(state_dir), **(settings or {})}
    server = Server(model, chosen, **more).start()
    try:
        yield server
    finally:
        server.stop()


def status(url: str) -> Status:
    """Return the status of the run at `url`, without taking part in it.

    Raises:
        ServerUnreachable: no server answers.
    """
    from atoll.transport.http_client import ask

    return ask(url, routes.STATUS, Status)


def history(state_dir: Path | str) -> list[dict[str, Any]]:
    """Return what the server wrote of each round in `exports/metrics.jsonl`, oldest first.

    Each has `round`, `version`, `workers`, `metrics`, `bytes_up`, `seconds` and more.
    """
    path = Path(state_dir) / "exports" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


# -- sites in this process


class Threads:
    """Run jobs at once, each in a thread. The threads end with the process, so a job that hangs blocks no other."""

    def __init__(self, *jobs: Callable[[], object]) -> None:
        self._ends = [_begun(job) for job in jobs]

    def join(self, timeout_s: float = 60.0) -> None:
        """Wait for all jobs, and raise the first error of one at once.

        Raises:
            AssertionError: a job still runs after `timeout_s` seconds.
        """
        _, waiting = wait(self._ends, timeout_s, FIRST_EXCEPTION)
        for end in self._ends:
            if end.done():
                end.result()
        assert not waiting, f"{len(waiting)} of {len(self._ends)} jobs still run after {timeout_s:g} s"


def _begun(job: Callable[[], object]) -> Future[object]:
    end: Future[object] = Future()

    def work() -> None:
        try:
            end.set_result(job())
        except BaseException as error:
            end.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return end


def together(*jobs: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Run jobs at once and wait for all of them, as `Threads.join` does."""
    Threads(*jobs).join(timeout_s)


@contextmanager
def failpoints(text: str) -> Iterator[Callable[[str], int]]:
    """Switch failpoints on in this process within the block. Yields a function: name → how often it was reached.

    Raises:
        ValueError: an action is unknown.
    """
    before = runtime.switch_failpoints_on(text)
    try:
        yield runtime.times_reached
    finally:
        runtime.switch_failpoints_on(before)


# -- waiting, signals and ports


def wait_until(condition: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """Ask until the answer is true, and return it.

    Raises:
        TimeoutError: `what` did not happen in `timeout_s` seconds.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > end_s:
            raise TimeoutError(f"{what} did not happen in {timeout_s:g} s")
        time.sleep(POLL_S)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGINT interrupt this process, and those that it starts, within the block. For the main thread.

    A shell without job control makes what it starts in the background ignore SIGINT, with all descendants.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free, and that no other call returns until this process ends.

    The system never gives it to a socket that asks for any port. Otherwise another test could get it before the server
    that is meant, or between two starts of that server. A named socket holds it against other processes' calls.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):  # tests seed `random`
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
            try:
                held.bind(f"\0atoll-port-{port}")
                probe.bind(("127.0.0.1", port))
            except OSError:
                held.close()
                continue
        _HELD_PORTS.append(held)
        return port
    raise RuntimeError(f"no port of {_PORTS} is free")


# -- processes


class Process:
    """A process of a `ForkServer`. `returncode` is None while it runs, and −n once signal n has ended it."""

    def __init__(self, fork_server: ForkServer, pid: int, log: Path) -> None:
        self._fork_server, self.pid, self.log = fork_server, pid, log
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._fork_server.ask(do="poll", pid=self.pid)
        return self.returncode

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for its end, and return the exit status.

        Raises:
            TimeoutError: it still runs; the message has its output.
        """
        end_s = time.monotonic() + timeout_s
        while self.poll() is None:
            if time.monotonic() > end_s:
                raise TimeoutError(f"process {self.pid} still runs after {timeout_s:g} s:\n{self.output()[-4000:]}")
            time.sleep(POLL_S)
        assert self.returncode is not None
        return self.returncode

    def stopped(self) -> bool:
        """Return whether SIGSTOP has stopped it since the last call; each stop is reported once."""
        return self.returncode is None and bool(self._fork_server.ask(do="stopped", pid=self.pid))

    def stop(self) -> None:
        """Stop it and its process group, and wait until it has stopped or ended."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGSTOP)
            wait_until(lambda: self.stopped() or self.poll() is not None, f"the stop of process {self.pid}")

    def go_on(self) -> None:
        """Continue it and its process group."""
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGCONT)

    def send(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> int:
        """Send SIGKILL, wait for its end, and return the exit status."""
        self.send(signal.SIGKILL)
        return self.wait()

    def output(self) -> str:
        """Return what it has written to standard output and standard error."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class ForkServer:
    """Start processes that need no time to import, each forked from one that has imported everything.

    Each is an ordinary process: it has its own pid, environment, folder and output. SIGINT interrupts it, and SIGKILL
    ends it at any instruction. None outlives the fork server. Use it as a context manager; it is thread-safe.

    Args:
        preload: modules that are imported once, for all.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # forks must have one thread
        self._parent = subprocess.Popen(
            [sys.executable, "-c", "from atoll.testing.run import _serve_forks; _serve_forks()", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._lock = threading.Lock()
        self._started: list[Process] = []

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, **request: Any) -> Any:
        """Send one request to the parent process, and return its answer."""
        with self._lock:
            assert self._parent.stdin is not None
            assert self._parent.stdout is not None
            self._parent.stdin.write(json.dumps(request) + "\n")
            self._parent.stdin.flush()
            line = self._parent.stdout.readline()
        if not line:
            raise RuntimeError("the fork server has ended")
        return json.loads(line)

    def start(
        self,
        *argv: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        failpoints: str = "",
        log: Path | None = None,
    ) -> Process:
        """Start `atoll ARGS`, or a Python script with arguments.

        Args:
            argv: the first is `atoll`, or the path of a script.
            env: further environment variables; ATOLL_* of this process are not passed on.
            failpoints: see the head of this module.
            log: file to which its output is appended; by default one in `cwd`.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
        environment |= dict(env or {}) | ({runtime.FAILPOINTS_VARIABLE: failpoints} if failpoints else {})
        log = log or cwd / f"{Path(argv[0]).stem}-{len(self._started)}.log"
        log.touch()
        pid = self.ask(do="start", argv=list(argv), cwd=str(cwd), env=environment, log=str(log))
        process = Process(self, pid, log)
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kill what still runs, and end."""
        for process in self._started:
            process.kill()
        assert self._parent.stdin is not None
        assert self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(30)
        self._parent.stdout.close()


class RestartedProcess:
    """A process that is started again each time SIGKILL has ended it.

    Args:
        start: starts it with these failpoints.
        lives: failpoints of the first start, the second, …; later starts have none.
    """

    def __init__(self, start: Callable[[str], Process], lives: Sequence[str] = ()) -> None:
        self._start, self._lives = start, list(lives)
        self._closing = threading.Event()
        self.processes = [self._next()]
        self._thread = threading.Thread(target=self._watch, name="restarts", daemon=True)
        self._thread.start()

    def _next(self) -> Process:
        return self._start(self._lives.pop(0) if self._lives else "")

    def _watch(self) -> None:
        while not self._closing.wait(POLL_S):
            code = self.processes[-1].poll()
            if code == -signal.SIGKILL:
                self.processes.append(self._next())
            elif code is not None:
                return

    @property
    def now(self) -> Process:
        """The process that runs, or that has ended by itself."""
        return self.processes[-1]

    @property
    def deaths(self) -> int:
        """How often SIGKILL has ended it."""
        return len(self.processes) - 1

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait until it ends by itself, and return the exit status."""
        wait_until(lambda: not self._thread.is_alive(), f"the end of process {self.now.pid}", timeout_s)
        return self.now.wait()

    def close(self) -> None:
        """Kill it for good."""
        self._closing.set()
        self._thread.join()
        self.now.kill()


# -- inside the parent process of a fork server


def _serve_forks() -> None:
    """Answer requests until standard input ends; the forks die with this process."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints must not be taken for an answer
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_answer(request, answers.fileno(), ended)) + "\n")
        answers.flush()


def _answer(request: dict[str, Any], answers: int, ended: dict[int, int]) -> int | None:
    """Carry out one request. `ended`: pid → exit status of the forks that are known to have ended."""
    if request["do"] == "poll":
        return _ended(request["pid"], ended)
    if request["do"] == "stopped":
        return _stopped(request["pid"], ended)
    pid = _fork(request, answers)
    ended.pop(pid, None)  # of an earlier process: pids come again, on many systems after 32,768
    return pid


def _ended(pid: int, ended: dict[int, int]) -> int | None:
    if pid not in ended:
        found, state = os.waitpid(pid, os.WNOHANG)
        if not found:
            return None
        ended[pid] = os.waitstatus_to_exitcode(state)
    return ended[pid]


def _stopped(pid: int, ended: dict[int, int]) -> bool:
    if pid in ended:
        return False
    found, state = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    if found and not os.WIFSTOPPED(state):
        ended[pid] = os.waitstatus_to_exitcode(state)
    return bool(found) and os.WIFSTOPPED(state)


def _fork(request: dict[str, Any], answers: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.close(answers)
        _become(request)
        _run(request["argv"])
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _become(request: dict[str, Any]) -> None:
    """Turn the fork into the process that was asked for."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server may have been started with it ignored
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    runtime.switch_failpoints_on(os.environ.get(runtime.FAILPOINTS_VARIABLE, ""))


def _run(argv: list[str]) -> None:
    sys.argv = argv
    if argv[0] == "atoll":
        importlib.import_module("atoll.cli.main").main()
    else:
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")
