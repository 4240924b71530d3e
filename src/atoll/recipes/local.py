"""A recipe on this machine: `atoll server` and a process for each client, which all end with the call."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.algorithms.resolve import resolve
from atoll.child_processes import Children
from atoll.config import NOT_SETTINGS, Settings
from atoll.errors import (
    AtollError,
    AuthError,
    ConfigError,
    PortInUse,
    RunFailed,
    ServerUnreachable,
    StateLocked,
    StoreError,
    public_api,
)
from atoll.protocol import routes
from atoll.protocol.status_messages import Status
from atoll.recipes.recipe import Strict, require_number, require_path
from atoll.recipes.result import (
    RUN_FILE,
    WORKERS,
    RunResult,
    ended_by_sigterm,
    model_of,
    prepared,
    require_clients,
    result_of,
    sites_of,
    told,
)
from atoll.rounds.state import Rules
from atoll.transport.http_client import ask

if TYPE_CHECKING:
    from atoll.recipes.recipe import Recipe

POLL_S = 0.2
START_S = 120.0
END_S = 45.0
"""From the end of the run until its processes have ended by themselves."""

LISTENS = re.compile(r"^\d\d:\d\d:\d\d listening on (\S+)$", re.MULTILINE)
"""What a server says when workers reach it, in a line of its own: others may hold words of a user's."""
STOPPED = re.compile(r"^\d\d:\d\d:\d\d stopping; the same command goes on from", re.MULTILINE)
"""What a server says that was told to end before its run was finished."""
FAILURES: dict[int, type[AtollError]] = {
    error.exit_code: error for error in (ConfigError, PortInUse, StateLocked, StoreError, AuthError)
}
"""Exit code of a server → the error that it ended with."""

OF_THE_CALL = ("ATOLL_SERVER", "ATOLL_SITE", "ATOLL_DIR")
"""What each client is given anew."""


@public_api
@dataclass(frozen=True)
class LocalEnv(Strict):
    """Real processes on this machine: a server, and a client for each name.

    Args:
        num_clients: how many; round one waits for all of them.
        folder: for the run file, logs, state and result; by default a new one in `atoll-recipes`. Where the same run
            lies there already, it goes on.
        threads: of PyTorch in each client; 0: as the environment says.
        quiet: say nothing while it runs.

    Raises:
        UsageError: a value is of a wrong type.
    """

    num_clients: int
    folder: str | Path | None = None
    threads: int = 1
    quiet: bool = False

    def __post_init__(self) -> None:
        require_number(self, "num_clients", self.num_clients, 1)
        require_number(self, "threads", self.threads, 0)
        if self.folder is not None:
            require_path(self, "folder", self.folder)

    def run(self, recipe: Recipe) -> RunResult:
        """Execute a recipe; what was started has ended when this returns or raises.

        Raises:
            AtollError: the server could not start, too few clients are left, or the run failed.
        """
        require_clients(recipe, self.num_clients)
        folder = prepared(recipe, self.folder, self.num_clients)
        settings = Settings.read(folder / RUN_FILE, environ={})
        with ended_by_sigterm(), Children() as children:
            status = _Local(self, recipe, folder, settings, children).run()
        return result_of(settings, folder, status)


def environment(threads: int, **more: str) -> dict[str, str]:
    """Of a process: what a worker finds in its own, but no ATOLL_* that would be a setting of the run."""
    kept = NOT_SETTINGS - {*OF_THE_CALL}
    own = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_") or key in kept}
    if threads:
        own |= {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    return own | {"PYTHONUNBUFFERED": "1"} | more


class _Local:
    """One execution, from the first process to the last."""

    def __init__(self, env: LocalEnv, recipe: Recipe, folder: Path, settings: Settings, children: Children) -> None:
        self._env, self._recipe, self._folder = env, recipe, folder
        self._settings, self._children = settings, children
        self._sites = sites_of(env.num_clients)
        self._floor = Rules.from_settings(settings, needs_all=resolve(settings).needs_all).floor
        self._told = 0
        files = {"ATOLL_TOKEN_FILE": settings.network.token_file, "ATOLL_TLS_CA": settings.network.tls_cert}
        self._keys = {name: str(path.resolve()) for name, path in files.items() if path is not None}

    def run(self) -> Status | None:
        """Start everything, watch it, and wait until it has ended; the last status, if there was one."""
        say, settings = self._say, self._settings
        say(f"{settings.run.name}: a server and {len(self._sites)} clients start; files and logs in {self._folder}")
        server = self._start_server()
        address = self._address(server)
        for site in self._sites:
            own = {"ATOLL_SERVER": address, "ATOLL_SITE": site, "ATOLL_DIR": str(self._folder.resolve() / WORKERS)}
            self._children.spawn(
                site,
                self._recipe.argv,
                environment=environment(self._env.threads, **own, **self._keys),
                log=self._log(site),
            )
        status = self._watch(address)
        if status is None:  # finished before: the clients find no server, and would wait for it
            return None
        self._settle()
        code = server.poll()
        if code:
            raise self._server_failed(code)
        say(f"{settings.run.name} is finished: {model_of(settings, self._folder)}")
        return status

    def _start_server(self) -> subprocess.Popen[bytes]:
        port = [] if self._settings.network.port is not None else ["--port", "0"]
        own, beside = environment(self._env.threads), Path(self._recipe.train_script).resolve().parent
        if beside != Path.cwd():  # a model may lie beside the script; in the current folder the server looks anyway
            own["PYTHONPATH"] = os.pathsep.join([str(beside), *filter(None, [own.get("PYTHONPATH")])])
        return self._children.spawn(
            "server",
            ["-m", "atoll.cli.main", "server", str(self._folder / RUN_FILE), *port],
            environment=own,
            log=self._log("server"),
        )

    def _address(self, server: subprocess.Popen[bytes]) -> str:
        """Where the server listens, as its log says."""
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            text = self._log("server").read_text(encoding="utf-8", errors="replace")
            if found := LISTENS.search(text):
                return found.group(1)
            if (code := server.poll()) is not None:
                raise self._server_failed(code)
            time.sleep(0.05)
        raise RunFailed(f"The server said no address within {START_S:g} s.", f"Look into {self._log('server')}.")

    def _watch(self, address: str) -> Status | None:
        """Look on until the run is finished.

        Raises:
            RunFailed: fewer clients are left than a round takes.
        """
        status: Status | None = None
        gone: dict[str, int] = {}
        while True:
            ended = {site: code for site in self._sites if (code := self._children.processes[site].poll()) is not None}
            try:
                status = ask(address, routes.STATUS, Status, environ=os.environ | self._keys)
            except ServerUnreachable:
                return self._last(status)
            self._tell(status)
            if status.finished:
                return status
            for site in ended.keys() - gone.keys():  # before the run was finished, which was looked at behind it
                self._say(f"{site} {self._end_of(site, ended[site])}")
            gone = ended
            if len(self._sites) - len(gone) < self._floor:
                site, code = next(reversed(gone.items()))
                left = f"{len(self._sites) - len(gone)} of {len(self._sites)}"
                raise RunFailed(
                    f"{site} {self._end_of(site, code)} before the run was finished; a round takes "
                    f"{self._floor} clients, and {left} are left.",
                    f"Look into {self._log(site)}. The same call with folder={str(self._folder)!r} goes on.",
                )
            time.sleep(POLL_S)

    def _last(self, status: Status | None) -> Status | None:
        """The status when the server is gone: it ended well, or this raises why it did not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._children.processes["server"].wait(END_S)
            log = self._log("server").read_text(encoding="utf-8", errors="replace")
            if code or STOPPED.search(log):
                raise self._server_failed(code)
            if status is None:
                self._say(f"{self._settings.run.name} was finished before; nothing is trained")
            return status and status.model_copy(update={"finished": True})
        raise RunFailed("The server does not answer any more.", f"Look into {self._log('server')}.")

    def _settle(self) -> None:
        """Let every process end by itself."""
        end_s = time.monotonic() + END_S
        while time.monotonic() < end_s and any(each.poll() is None for each in self._children.processes.values()):
            time.sleep(0.05)
        for site in self._sites:
            code = self._children.processes[site].poll()
            if code is None:
                self._say(f"{site} still runs {END_S:g} s after the run, and is ended now")
            elif code:
                self._say(f"{site} {self._end_of(site, code)} after the run was finished")

    def _tell(self, status: Status) -> None:
        for summary in status.history:
            if summary.fragment == 0 and summary.round > self._told:
                self._told = summary.round
                self._say(told(summary, status.rounds))

    def _say(self, line: str) -> None:
        if not self._env.quiet:
            print(line, flush=True)

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _end_of(self, site: str, code: int) -> str:
        if code < 0:
            return f"was killed ({signal.Signals(-code).name})"
        return f"ended with {code} ({_last_line(self._log(site))})"

    def _server_failed(self, code: int) -> AtollError:
        kind = FAILURES.get(code, RunFailed)
        said = _last_line(self._log("server")).removeprefix("atoll: ")
        return kind(f"The server ended with {code}: {said}", f"{self._log('server')} has more.")


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
