"""Processes of tests, each forked from a parent that has imported torch and Atoll: they start in milliseconds.

    with Nursery() as nursery:
        server = nursery.start("atoll", "server", "run.toml", cwd=folder, failpoints="accept.before=kill")
        assert server.wait() == -signal.SIGKILL

Processes need Linux.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from atoll.testing.run import failpoints, free_port, wait_until

__all__ = ["PRELOAD", "Kept", "Nursery", "Process", "free_port", "interruptible", "wait_until"]

PRELOAD = (
    "atoll.cli.main",
    "atoll.cli.server",
    "atoll.server.serve",
    "atoll.worker.training.federated_loop",
    "atoll.worker.training.diloco_loop",
    "torch._dynamo",  # torch.optim imports it when the first optimizer is made
)
"""What a `Nursery` imports before its first fork."""

POLL_S = 0.01
FAILPOINTS = "ATOLL_FAILPOINTS"
_PR_SET_PDEATHSIG = 1


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


class Process:
    """A process of a `Nursery`. `returncode` is None while it runs, and −n once signal n has ended it."""

    def __init__(self, nursery: Nursery, pid: int, log: Path) -> None:
        self._nursery, self.pid, self.log = nursery, pid, log
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask(do="poll", pid=self.pid)
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
        return self.returncode is None and bool(self._nursery.ask(do="stopped", pid=self.pid))

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


class Nursery:
    """Start processes that need no time to import, each forked from one that has imported everything.

    Each is an ordinary process: it has its own pid, environment, folder and output. SIGINT interrupts it, and SIGKILL
    ends it at any instruction. None outlives the nursery. Use it as a context manager; it is thread-safe.

    Args:
        preload: modules that are imported once, for all.
    """

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # forks must have one thread
        self._parent = subprocess.Popen(
            [sys.executable, "-c", "from harness.processes import serve_forks; serve_forks()", *preload],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self._lock = threading.Lock()
        self._started: list[Process] = []

    def __enter__(self) -> Nursery:
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
            raise RuntimeError("the nursery has ended")
        return json.loads(line)

    def start(
        self,
        *argv: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        failpoints: str = "",
        log: Path | None = None,
        errors: Path | None = None,
    ) -> Process:
        """Start `atoll ARGS`, or a Python script with arguments.

        Args:
            argv: the first is `atoll`, or the path of a script.
            env: further environment variables; ATOLL_* of this process are not passed on.
            failpoints: see the head of this module.
            log: file to which its output is appended; by default one in `cwd`.
            errors: file for its standard error, where that is to be apart.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
        environment |= dict(env or {}) | ({FAILPOINTS: failpoints} if failpoints else {})
        log = log or cwd / f"{Path(argv[0]).stem}-{len(self._started)}.log"
        log.touch()
        pid = self.ask(
            do="start", argv=list(argv), cwd=str(cwd), env=environment, log=str(log), errors=str(errors or log)
        )
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


class Kept:
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


# -- inside the parent process of a nursery


def serve_forks() -> None:
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
        with failpoints(os.environ.get(FAILPOINTS, "")):
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
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the nursery may have been started with it ignored
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    log, errors = (os.open(request[key], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for key in ("log", "errors"))
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (errors, 2)):
        os.dup2(source, target)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _run(argv: list[str]) -> None:
    sys.argv = argv
    if argv[0] == "atoll":
        importlib.import_module("atoll.cli.main").main()
    else:
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")
