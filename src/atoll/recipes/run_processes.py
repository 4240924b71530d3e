"""A server and its sites as child processes of this one, with their logs in the folder of the run."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from atoll.algorithms.resolve import resolve
from atoll.child_processes import Children, Terminated, raise_on_sigterm
from atoll.config import NOT_SETTINGS, Settings
from atoll.errors import AtollError, AuthError, ConfigError, PortInUse, RunFailed, StateLocked, StoreError
from atoll.posix import read_own
from atoll.protocol.status_messages import Status
from atoll.rounds.state import Rules
from atoll.store.reader import saved_status

SERVER = "server"
SITES = "workers"
"""Name of the folder that holds a folder of files for each site."""

START_S = 120.0
END_S = 45.0
"""Seconds that processes get to end by themselves after the run has finished."""

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


class RunProcesses(ABC):
    """The processes of a run, by name: the server, and each site.

    Args:
        folder: the folder of the run, with a log for each process.
        settings: the run's settings.
        sites: the names of the sites.
        goes_on: how to continue the run after a failure, as text.

    Attributes:
        children: the processes.
        ended: site → how its process ended before the run, as text.
    """

    main = SERVER
    """The name of the process without which the run ends."""

    def __init__(self, folder: Path, settings: Settings, sites: Sequence[str], goes_on: str) -> None:
        self.folder, self.settings, self.sites, self._goes_on = folder, settings, sites, goes_on
        self.children, self.ended = Children(), dict[str, str]()
        self._epoch = 0

    @abstractmethod
    def say(self, line: str) -> None:
        """Print a line."""

    @abstractmethod
    def look(self) -> None:
        """Show the run, or do nothing: called several times a second while this object waits."""

    def spawn(self, name: str, argv: Sequence[str], variables: Mapping[str, str], *, appends: bool = False) -> None:
        """Start a process of this Python with arguments and environment variables; `appends` keeps its earlier log."""
        self.children.spawn(name, argv, environment=variables, log=self.log(name), appends=appends)

    def spawn_server(self, run_file: Path, port: int, variables: Mapping[str, str], *, appends: bool = False) -> None:
        """Start the server. Its port is `port`; if this is 0, that of the settings, else any free one."""
        before = self.status()
        self._epoch = before.epoch if before is not None else 0
        given = ["--port", str(port)] if port or self.settings.network.port is None else []
        argv = ["-m", "atoll.cli.main", "server", str(run_file), *given]
        self.spawn(SERVER, argv, variables, appends=appends)

    def wait_for_server(self) -> Status:
        """Wait until the server has written its first status, which has its address. Return the status.

        Raises:
            AtollError: the server or a site ended, or there was no status within `START_S`.
        """
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            ends = self.ends()  # before the status: the server of a finished run may end at once
            status = self.status()
            if status is not None and status.epoch > self._epoch:
                return status
            self.note_ends(None, ends)
            self.look()
            time.sleep(0.05)
        raise RunFailed(f"The server did not start within {START_S:g} s.", f"See {self.log(SERVER)}.")

    def variables_of_sites(self) -> dict[str, str]:
        """Return the variables of every site: its folder, and how it gets through to the server."""
        network = self.settings.network
        files = {"ATOLL_TOKEN_FILE": network.token_file, "ATOLL_TLS_CA": network.tls_cert}
        own = {name: str(path.resolve()) for name, path in files.items() if path is not None}
        own |= {"ATOLL_SWARM": "1"} if self.settings.swarm.enabled else {}
        return own | {"ATOLL_DIR": str(self.folder.resolve() / SITES)}

    def ends(self) -> dict[str, int]:
        """Return the exit codes of the processes that have ended."""
        return {name: code for name, each in self.children.processes.items() if (code := each.poll()) is not None}

    def note_ends(self, status: Status | None, ends: Mapping[str, int] | None = None) -> None:
        """Say which sites have ended before the run.

        Args:
            status: a status that the server gave after the processes had ended; None: there is none yet.
            ends: their exit codes; None: those of now.

        Raises:
            RunFailed: fewer sites are left than a round needs.
            AtollError: the server has ended.
        """
        ends = self.ends() if ends is None else ends
        if self.main in ends:
            raise self.server_failed(ends[self.main])
        if status is not None and status.failed:
            return  # the sites end by it, too; the server ends when all were told
        for site in ends.keys() - self.ended:
            self.ended[site] = self.end_of(site, ends[site])
            self.say(f"{site} {self.ended[site]}")
        needs_all = bool(self.settings.algorithm.target) and resolve(self.settings).needs_all
        floor = Rules.from_settings(self.settings, needs_all=needs_all).floor
        left = len(self.sites) - len(self.ended)
        if self.ended and left < floor:
            site, how = next(reversed(self.ended.items()))
            raise RunFailed(
                f"Site {site} {how} before the run was finished. A round needs {floor} sites, but only "
                f"{left} of {len(self.sites)} are left.",
                f"See {self.log(site)}. {self._goes_on}",
            )

    def wait_for_ends(self) -> None:
        """Wait for all processes to end: up to `END_S` seconds, and as long as the last version may be evaluated.

        Say which sites still run then, and which have failed.

        Raises:
            AtollError: the server ended with an error.
        """
        server, processes, is_asked = self.settings.server, self.children.processes, False
        most_s = END_S + (server.evaluate_timeout_s if server.evaluate else 0.0)  # of the last version
        end_s = time.monotonic() + most_s
        while time.monotonic() < end_s and (left := processes.keys() - self.ends()):
            if left == {SERVER} and not is_asked and self._has_result():
                is_asked = True  # it would stay for programs that ask for the status
                processes[SERVER].terminate()
            self.look()
            time.sleep(0.05)
        for name, process in processes.items():
            if name != self.main and process.returncode is None:
                self.say(f"{name} still runs {most_s:g} s after the end of the run, and is stopped now")
            elif name != self.main and process.returncode:
                self.say(f"{name} {self.end_of(name, process.returncode)} after the run was finished")
        code = processes[self.main].poll()
        if code and not (is_asked and code in (-signal.SIGTERM, 128 + signal.SIGTERM)):  # it was ending by itself
            raise self.server_failed(code)

    def status(self) -> Status | None:
        """Return the last status that the server wrote to its file; None if there is no file, or it cannot be read."""
        saved = saved_status(self.settings.disk.state_dir)
        return saved[0] if saved else None

    def _has_result(self) -> bool:
        status = self.status()
        return status is not None and status.has_result

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
