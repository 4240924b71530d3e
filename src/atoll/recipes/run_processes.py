"""A server and its sites as child processes of this one, with their logs in the folder of the run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from atoll.child_processes import Children, Terminated, raise_on_sigterm
from atoll.config import NOT_SETTINGS, Settings
from atoll.errors import AtollError, AuthError, ConfigError, PortInUse, RunFailed, StateLocked, StoreError
from atoll.posix import read_own
from atoll.protocol.status_messages import Status
from atoll.store.reader import saved_status

SERVER = "server"

FAILURES: dict[int, type[AtollError]] = {
    error.exit_code: error for error in (ConfigError, PortInUse, StateLocked, StoreError, AuthError)
}
"""Exit code of a server → the class of the error that ended it."""
OF_THE_CALL = {"ATOLL_SERVER", "ATOLL_SITE", "ATOLL_DIR"}
"""Variables that child processes do not inherit: each environment sets its own values."""


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise an exception in the `with` block, so that the block can end its child processes.

    After the block, SIGTERM ends this process as usual.

    Outside of the main thread, or if the program has its own handler for SIGTERM, nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    raise_on_sigterm()
    terminated = False
    try:
        yield
    except Terminated:
        terminated = True
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if terminated:
            signal.raise_signal(signal.SIGTERM)


def environment(threads: int, **more: str) -> dict[str, str]:
    """Return the environment of a child process: that of this process, without ATOLL_* settings, plus `more`.

    Args:
        threads: number of PyTorch threads; 0: unchanged.
        more: variables to add or to replace.
    """
    passed = NOT_SETTINGS - OF_THE_CALL
    own = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_") or key in passed}
    if threads:
        own |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return own | {"PYTHONUNBUFFERED": "1"} | more


class RunProcesses:
    """The processes of a run, by name: the server, and each site.

    Args:
        folder: the folder of the run, with a log for each process.
        settings: the run's settings.
        children: the processes.
    """

    def __init__(self, folder: Path, settings: Settings, children: Children) -> None:
        self.folder, self.settings, self.children = folder, settings, children

    main = SERVER
    """The name of the process without which the run ends."""

    def spawn(self, name: str, argv: Sequence[str], variables: Mapping[str, str], *, appends: bool = False) -> None:
        """Start a process of this Python with arguments and environment variables; `appends` keeps its earlier log."""
        self.children.spawn(name, argv, environment=variables, log=self.log(name), appends=appends)

    def require_server(self) -> None:
        """Check that the server has not ended with an error.

        Raises:
            AtollError: it has. The message has the last line of its log.
        """
        if code := self.children.processes[self.main].poll():
            raise self.server_failed(code)

    def status(self) -> Status | None:
        """Return the last status that the server wrote to its file; None if there is no file, or it cannot be read."""
        saved = saved_status(self.settings.disk.state_dir)
        return saved[0] if saved else None

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.folder / f"{name}.log"

    def _last_line(self, name: str) -> str:
        lines = read_own(self.log(name)).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    def end_of(self, site: str, code: int) -> str:
        """Return how a site's process ended, as text."""
        if code < 0:
            return f"was killed ({signal.Signals(-code).name})"
        return f"ended with exit code {code} ({self._last_line(site)})"

    def server_failed(self, code: int) -> AtollError:
        """Return the error for a server that ended with an exit code."""
        kind = FAILURES.get(code, RunFailed)
        last_line = self._last_line(self.main).removeprefix("atoll: ")
        return kind(f"The {self.main} ended with exit code {code}: {last_line}", f"See {self.log(self.main)}.")
