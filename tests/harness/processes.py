"""Processes of tests, each forked from a parent that has imported torch and Atoll: they start in milliseconds.

    nursery = Nursery()
    server = nursery.start("atoll", "server", "run.toml", cwd=folder, failpoints="accept.before=kill")
    assert server.wait() == -signal.SIGKILL

Processes need Linux.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll.testing.run import free_port, wait_until
from harness.fork_server import end_with_test

__all__ = ["Nursery", "Process", "RestartedProcess", "free_port", "interruptible", "wait_until"]

POLL_S = 0.01


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

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self._popen, self.pid, self.log = popen, popen.pid, log

    @property
    def returncode(self) -> int | None:
        """The exit status that the last call has found."""
        return self._popen.returncode

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._popen.poll()

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for its end, and return the exit status.

        Raises:
            TimeoutError: it still runs; the message has its output.
        """
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"process {self.pid} still runs after {timeout_s:g} s:\n{self.output()[-4000:]}"
            ) from None

    def stopped(self) -> bool:
        """Return whether SIGSTOP has stopped it since the last call; each stop is reported once."""
        try:
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is not None
        except ChildProcessError:  # it has ended
            return False

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
        self._popen.send_signal(number)

    def kill(self) -> int:
        """Send SIGKILL, wait for its end, and return the exit status."""
        self.send(signal.SIGKILL)
        return self.wait()

    def output(self) -> str:
        """Return what it has written to standard output and standard error."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""


class Nursery:
    """Start `atoll` and scripts as processes that end with the tests; the fork server makes them quick.

    Each has a session of its own, and SIGINT interrupts it however the tests were started.
    """

    def __init__(self) -> None:
        self._started: list[Process] = []

    def start(
        self,
        *argv: str,
        cwd: Path,
        env: Mapping[str, str] | None = None,
        failpoints: str = "",
        log: Path | None = None,
        errors: Path | None = None,
        pass_fds: Sequence[int] = (),
    ) -> Process:
        """Start `atoll ARGS`, or a Python script with arguments.

        Args:
            argv: the first is `atoll`, or the path of a script.
            env: further environment variables; ATOLL_* of this process are not passed on.
            failpoints: see `atoll.testing.run`.
            log: file to which its output is appended; by default one in `cwd`.
            errors: file for its standard error, where that is to be apart.
            pass_fds: descriptors that it gets.
        """
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
        environment |= dict(env or {}) | ({"ATOLL_FAILPOINTS": failpoints} if failpoints else {})
        log = log or cwd / f"{Path(argv[0]).stem}-{len(self._started)}.log"
        with log.open("ab") as out, (errors or log).open("ab") as err:
            popen = subprocess.Popen(
                [str(Path(sys.executable).with_name("atoll")), *argv[1:]]
                if argv[0] == "atoll"
                else [sys.executable, *argv],
                pass_fds=pass_fds,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=end_with_test,
            )
        process = Process(popen, log)
        self._started.append(process)
        return process

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._started:
            process.kill()


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
