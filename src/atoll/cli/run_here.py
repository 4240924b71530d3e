"""One run on this machine: starts its processes, shows it, and sees it to its end or to an orderly stop."""

from __future__ import annotations

import math
import os
import time
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from atoll.child_processes import Terminated
from atoll.cli.run_folders import Place, model_digest, write_run_file
from atoll.cli.run_view import RunView
from atoll.cli.stored_status import admin_token, stored_status
from atoll.cli.text import UNTRAINED, duration, faults_of_evaluation, number_of, numbers, say_stopping
from atoll.cli.which_run import STATE, note_failure, quoted
from atoll.config import Settings
from atoll.errors import AtollError, RunFailed, StateLocked
from atoll.format_text import visible
from atoll.posix import FolderTaken, replace_file, take_folder
from atoll.protocol import routes
from atoll.protocol.status_messages import Status
from atoll.recipes.environments import model_of
from atoll.recipes.run_processes import SERVER, RunProcesses, environment
from atoll.simulate import threads_of
from atoll.simulate.inputs import Inputs, listed_differences
from atoll.store.caller_tokens import stored_tokens
from atoll.system_calls import cores
from atoll.transport.http_client import ask

POLL_S = 0.25
KILL_POLL_S = 0.02
"""Pause between two looks at the run while its server is to be killed: rounds may be short."""
ADDRESS = "address"
"""Name of the file in the run's folder that tells the sites where their server is."""
PAGE = "page.html"
DIGEST_CHARS = 16


@dataclass(frozen=True)
class Chosen:
    """What is run.

    Attributes:
        settings: the settings, without the folder of the run.
        script: the training code, as `name_of` in simulate/script.py returns it.
        arguments: the script's arguments.
        sites: the names of the sites.
        engine: process, simulate or ray.
        sources: the folders from which code is imported: that of the run file, that of a Flower app.
        stem: the folder of the run without its number.
        inputs: what the run is begun with.
    """

    settings: Settings
    script: str
    arguments: list[str]
    sites: list[str]
    engine: str
    sources: list[Path]
    stem: Path
    inputs: Inputs


@dataclass(frozen=True)
class Shown:
    """How a run is shown: the flags `--open`, `--quiet`, `--verbose` and `--json`."""

    opens: bool
    quiet: bool
    verbose: bool
    json: bool


class RunHere(RunProcesses):
    """One run on this machine.

    Args:
        chosen: what is run.
        place: the folder of the run, and whether a run goes on there.
        shown: how it is shown.
        port: port of the server; 0: any free one.
        kills: whether to kill the server halfway, and to start it again.

    Attributes:
        view: shows the run.
        named: the folder, for a command to copy.
        next: what to do next, if it is not the usual; known at the end.
    """

    def __init__(self, chosen: Chosen, place: Place, shown: Shown, *, port: int = 0, kills: bool = False) -> None:
        folder = place.folder
        own: dict[str, Any] = {"disk.state_dir": folder / STATE, "disk.export_dir": None}
        if chosen.engine != "process":  # a simulated swarm computes the same bits, at a server
            own |= {"swarm.enabled": False, "swarm.aggregators": ()}
        settings = chosen.settings.changed(own)
        self.named, self.next = quoted(folder), ""
        goes_on = f"When it is mended: atoll run {self.named}"
        super().__init__(folder, settings, chosen.sites, goes_on)
        self._chosen, self._place, self._shown, self._port, self._kills = chosen, place, shown, port, kills
        self.main = SERVER if chosen.engine == "process" else "simulation"
        self.view = RunView(
            chosen.sites, self.ended, self.named, quiet=shown.quiet, verbose=shown.verbose, json=shown.json
        )
        self._address, self._begin_s, self.first_round_s = "", time.monotonic(), math.nan
        self._last: Status | None = None

    @property
    def model(self) -> Path:
        """The trained model."""
        return model_of(self.settings, self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """The result, for `--json`."""
        status, _ = stored_status(self.settings.disk.state_dir)
        return {
            "run": self.folder.name,
            "folder": str(self.folder),
            "finished": status.finished,
            "version": status.version,
            "rounds": status.history[-1].round if status.history else 0,
            "metrics": status.history[-1].metrics if status.history else {},
            "model": str(self.model),
            "warnings": status.warnings,
            "digest": model_digest(self.model) if self.model.exists() else "",
            "seconds": round(time.monotonic() - self._begin_s, 3),
            "first_round_s": None if math.isnan(self.first_round_s) else round(self.first_round_s, 3),
            "ended": self.ended,
        }

    def to_end(self) -> None:
        """Run until the run has finished.

        Raises:
            StateLocked: another process runs in the folder.
            AtollError: the server could not start, too few sites are left, or the run has failed.
            KeyboardInterrupt: Ctrl-C; all processes have ended, and the run can go on later.
        """
        try:
            lock = take_folder(self.folder)
        except FolderTaken as holder:
            raise StateLocked(
                f"The run in {self.folder} is going on: {holder} has it.",
                f"`atoll status {self.named}` shows it; --fresh begins another run beside it.",
            ) from None
        try:
            with self.children, self.view:
                self._run()
        except AtollError as error:
            note_failure(self.folder, error.message)
            raise
        finally:
            lock.close()

    def _run(self) -> None:
        earlier, view = self._place.earlier, self.view
        if self._place.said:
            view.say(self._place.said)
        total = self.settings.rounds.total
        if earlier is not None and earlier.finished and earlier.version >= total:
            view.say(f"{earlier.described(self.folder)}; nothing was trained. Its model: {self.model}")
            self.next = f"atoll run {self.named} --rounds N trains further, with N above {earlier.version}"
            return
        if earlier is not None and earlier.finished and stored_status(self.settings.disk.state_dir)[0].stopping:
            view.say(f"The run in {self.folder} was stopped by its admin; nothing was trained. Its model: {self.model}")
            self.next = f"to train further: atoll resume {self.named}, and then atoll run {self.named}"
            return
        note_failure(self.folder, "")
        try:
            self._start()
            self._watch()
            self.wait_for_ends()
        except (KeyboardInterrupt, Terminated) as asked:
            view.__exit__()
            view.say("stopping; a second Ctrl-C ends all processes at once")
            self.children.stop()
            version = self._last.version if self._last is not None else 0
            with suppress(AtollError):  # a round may have ended since the last look
                version = stored_status(self.folder / STATE)[0].version
            then = f"stopped at version {version}, and nothing is lost; to go on: atoll run {self.named}"
            say_stopping(asked, visible(then))
            raise
        view.is_over = True
        self._last = self._asked() or self._last  # rounds may have ended since the last look
        self.look()
        metrics = numbers(self._last.history[-1].metrics) if self._last and self._last.history else ""
        seconds = duration(time.monotonic() - self._begin_s)
        how = self._last.stopped if self._last and self._last.stopped else "finished"
        evaluation = self._last.evaluation if self._last else None
        faults = faults_of_evaluation(evaluation.failed, evaluation.failures) if evaluation else ""
        trained = UNTRAINED if self._last and self.model.exists() and not self._last.version else ""
        view.say("; ".join(filter(None, [f"{how} after {seconds}", trained, metrics, faults, self._told_model()])))
        if self._last and self._last.stopping:
            self.next = f"to train further: atoll resume {self.named}, and then atoll run {self.named}"

    def _told_model(self) -> str:
        return f"{self.model} ({model_digest(self.model)[:DIGEST_CHARS]})" if self.model.exists() else ""

    # -- start

    def _start(self) -> None:
        chosen, view, earlier = self._chosen, self.view, self._place.earlier
        if earlier is not None:
            other = f", now with: {listed_differences(earlier.differences)}" if earlier.differences else ""
            view.say(f"{self.folder} goes on from version {earlier.version}{other}")
            view.skip_rounds(stored_status(self.settings.disk.state_dir)[0])
        self._run_file = write_run_file(self.folder, chosen.settings)
        chosen.inputs.write(self.folder)
        self._logs = {name: self.log(name) for name in (self.main, *(chosen.sites if self.main == SERVER else ()))}
        view.skip_logs(self._logs)
        folders = [os.getcwd(), *(str(each.resolve()) for each in chosen.sources), os.environ.get("PYTHONPATH", "")]
        self._variables = {"PYTHONPATH": os.pathsep.join(filter(None, dict.fromkeys(folders)))}
        count = number_of(len(chosen.sites), "site")
        if self.main == SERVER:
            view.begin_phase(
                f"{self.folder}: starting a server and {count}; they import PyTorch, which takes seconds",
                "still starting",
            )
            (self.folder / ADDRESS).unlink(missing_ok=True)
            self._serve(self._port)
            self._spawn_sites()
            self._tell_address()
            if self._shown.opens:
                self._open_page()
        else:
            view.begin_phase(
                f"{self.folder}: starting a simulation of {count}; it imports PyTorch, which takes seconds",
                "still starting",
            )
            self._spawn_simulation()

    def say(self, line: str) -> None:
        """Print a line, above the table if there is one."""
        self.view.say(line)

    def look(self) -> None:
        """Show the run."""
        self.view.show_logs(self._logs)
        self.view.show(self._last, f"{self._address or self.main} · {self.folder}")

    def _serve(self, port: int) -> None:
        self.spawn_server(self._run_file, port, environment(0, **self._variables), appends=True)

    def _spawn_sites(self) -> None:
        chosen, threads = self._chosen, threads_of(min(len(self.sites), cores()))
        own = self._variables | self.variables_of_sites() | {"PYTHONHASHSEED": "0"}  # as in a simulation
        place = [str(self.folder / ADDRESS), str(self.settings.run.seed), str(threads)]
        argv = ["-m", "atoll.simulate.site_process", *place, chosen.script, *chosen.arguments]
        for number, site in enumerate(chosen.sites, 1):
            own |= {"ATOLL_SITE": site, "ATOLL_SITE_NUMBER": str(number), "ATOLL_SITES": str(len(chosen.sites))}
            self.spawn(site, argv, environment(threads, **own), appends=True)

    def _spawn_simulation(self) -> None:
        chosen, before = self._chosen, self.status()
        self._epoch = before.epoch if before is not None else 0
        where = ["--dir", str(self.settings.disk.state_dir), "--sites", ",".join(chosen.sites) + ","]
        engine = {"simulate": "local"}.get(chosen.engine, chosen.engine)
        how = ["--processes", str(min(len(chosen.sites), cores())), "--engine", engine, "--resume"]
        argv = ["-m", "atoll.cli.main", "simulate", str(self._run_file), *where, *how, "--", *chosen.arguments]
        self.spawn(self.main, argv, environment(0, **self._variables), appends=True)

    def _tell_address(self) -> None:
        """Wait until the server runs, and tell the sites its address."""
        self._address = self.wait_for_server().address
        replace_file(self.folder / ADDRESS, [self._address.encode()])
        self.view.begin_phase(f"the server is ready at {self._address}; waiting for the sites", "waiting for the sites")

    def _open_page(self) -> None:
        """Open the page of the run in a browser.

        The reader's token reaches the browser through a file, because other users can read command lines.
        """
        token = stored_tokens(self.settings.disk.state_dir).get("reader", "")
        page, path = f"{self._address}/#token={token}" if token else f"{self._address}/", self.folder / PAGE
        text = (
            f'<!doctype html><meta http-equiv="refresh" content="0; url={page}"><a href="{page}">{self._address}</a>\n'
        )
        replace_file(path, [text.encode()])
        is_open = webbrowser.open(path.resolve().as_uri())
        self.view.say(f"the page: {self._address}/{'' if is_open else ' (no browser was found here)'}")

    # -- until the end

    def _watch(self) -> None:
        while True:
            ends = self.ends()
            status = self._last = self._asked() or self._last
            self.look()
            if status is not None and status.history and math.isnan(self.first_round_s):
                self.first_round_s = time.monotonic() - self._begin_s
            if status is not None and status.finished:
                if self._kills:
                    raise RunFailed("The run finished before its server was killed.", "Give more rounds: --rounds 30.")
                return
            self.note_ends(status, ends)
            if self._kills and status is not None and status.version >= max(1, self.settings.rounds.total // 2):
                self._kill(status)
            time.sleep(KILL_POLL_S if self._kills else POLL_S)

    def _asked(self) -> Status | None:
        """Return the status of the run; None if it has none, or its server does not answer."""
        state_dir = self.settings.disk.state_dir
        try:
            if self.main != SERVER or self.children.processes[SERVER].poll() is not None:
                status, _ = stored_status(state_dir)
                if status.epoch <= self._epoch:  # of an earlier start
                    return None
                rounds = [each.model_copy(update={"reason": ""}) for each in status.fragments]
                return status.model_copy(update={"fragments": rounds})
            authority = self.settings.network.tls_cert
            environ = os.environ | ({"ATOLL_TLS_CA": str(authority)} if authority is not None else {})
            return ask(
                self._address, routes.STATUS, Status, timeout_s=2.0, environ=environ, token=admin_token(state_dir)
            )
        except AtollError:
            return None

    def _kill(self, status: Status) -> None:
        """Kill the server with SIGKILL, and start it again at the same port."""
        self._kills, self._last, server = False, None, self.children.processes[SERVER]
        server.kill()
        server.wait()
        begin_s = time.monotonic()
        self.view.begin_phase(
            f"killed the server (SIGKILL, process {server.pid}) at version {status.version}; restarting it",
            "still restarting the server",
        )
        self._serve(urlsplit(self._address).port or 0)
        self._tell_address()
        self.view.say(f"the server runs again after {duration(time.monotonic() - begin_s)}, and the run goes on")
