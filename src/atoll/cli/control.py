"""`atoll pause`, `resume`, `stop` and `rollback`: what the admin of a run does with it.

With `--dir`, a command asks the server of that state directory, with the admin's token there. If no server runs, it
writes the wish into the journal, and the next start of the server carries it out.
"""

from __future__ import annotations

import json as json_module
import os
import shlex
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from atoll.cli.status import HERE
from atoll.cli.stored_status import admin_token, state_directory, stored_status
from atoll.errors import TRANSIENT, Conflict, ServerUnreachable, UsageError
from atoll.format_text import visible
from atoll.protocol import admin_messages, routes, status_messages
from atoll.store.reader import has_run
from atoll.transport.http_client import ask, http_to, server_address
from atoll.transport.tls import read_token_file

Server = Annotated[str | None, typer.Option(help="Server address. Default: ATOLL_SERVER.", show_default=False)]
StateDir = Annotated[
    Path | None,
    typer.Option(
        "--dir",
        help="State directory of the run: its server's address and the admin's token are read there. Default, without "
        "--server and ATOLL_SERVER: atoll-run.",
        show_default=False,
    ),
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the admin's token: a copy of admin.token. Default: ATOLL_TOKEN, or the file of "
        "ATOLL_TOKEN_FILE; with --dir, the one in that directory.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]

BACK_S = 120.0
"""Seconds within which a server has gone back to an earlier version."""
LOOK_S = 0.2


def pause(
    server: Server = None, state_dir: StateDir = None, token_file: TokenFile = None, json: AsJson = False
) -> None:
    """Pause a run: no round begins, and its sites wait. Updates that they are training still count."""
    run = _Target(server, state_dir, token_file)
    answer = run.ask(routes.PAUSE, admin_messages.PauseRun(paused=True))
    run.show(answer, json, f"To go on: atoll resume{run.flags}.")


def resume(
    server: Server = None, state_dir: StateDir = None, token_file: TokenFile = None, json: AsJson = False
) -> None:
    """Let a paused run go on. With --dir, while no server runs, also a run that was stopped."""
    run = _Target(server, state_dir, token_file)
    answer = run.ask(routes.PAUSE, admin_messages.PauseRun(paused=False))
    run.show(answer, json, f"To watch it: atoll status{run.flags}.")


def stop(
    server: Server = None,
    state_dir: StateDir = None,
    token_file: TokenFile = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the end of the open round: its updates are not used.")
    ] = False,
    json: AsJson = False,
) -> None:
    """End a run in good order: after the present round its result is saved, and its sites and its server end."""
    run = _Target(server, state_dir, token_file)
    answer = run.ask(routes.STOP, admin_messages.StopRun(now=now))
    again = f" To train further later: atoll resume --dir {run.folder}, then start the server." if run.folder else ""
    run.show(answer, json, f"To watch it: atoll status{run.flags}.{again}")


def rollback(
    version: Annotated[int, typer.Argument(min=0, help="Version from which the run goes on.", metavar="VERSION")],
    server: Server = None,
    state_dir: StateDir = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Let a run go back to an earlier version that its server still has, with the whole state of its optimizer.

    Rounds and updates since then no longer count. The numbers of the versions since then are not used again.

    A server keeps the newest disk.keep_versions versions: 2 by default, so a run can go back by one. To be able to go
    back further, set it higher before. The server's log says at the beginning what each further version takes on disk.
    """
    run = _Target(server, state_dir, token_file)
    answer = run.ask(routes.ROLLBACK, admin_messages.RollBack(version=version))
    if answer.text.startswith("the run goes back"):
        answer = run.wait_until_back(answer, version)
    run.show(answer, json, f"To watch it: atoll status{run.flags}.")


class _Target:
    """The run that a command is for: at a server, or in a state directory without one.

    Attributes:
        folder: the state directory, quoted for a shell; empty: none is known.
        flags: the options that name the run, for the next command.
    """

    def __init__(self, server: str | None, state_dir: Path | None, token_file: Path | None) -> None:
        if state_dir is not None and (server is not None or token_file is not None):
            raise UsageError("--dir cannot be combined with --server and --token-file.", "Leave out one of them.")
        address = server_address(server)
        if state_dir is None and not (server or os.environ.get("ATOLL_SERVER")) and has_run(HERE):
            state_dir = HERE
        state_dir = state_dir and state_directory(state_dir)
        self._dir, self._run, self._address, self._token = state_dir, "", address, None
        self.folder = shlex.quote(str(state_dir)) if state_dir is not None else ""
        self.flags = f" --dir {self.folder}" if self.folder else f" --server {server}" if server else ""
        if state_dir is not None:
            stored, _ = stored_status(state_dir)
            self._run, self._address, self._token = stored.run, stored.address, admin_token(state_dir)
        elif token_file is not None:
            self._token = read_token_file(token_file)

    def ask(self, path: str, message: BaseModel) -> admin_messages.Controlled:
        """Ask the server. If none runs, write into the journal.

        Raises:
            ServerUnreachable: no server answers, and no state directory is given.
            Conflict, Gone: the run does not allow it.
            StateLocked: a server uses the state directory, but does not answer.
        """
        try:
            if not self._address:
                raise Conflict(f"No server has served the run in {self._dir}: a simulation has no admin.", "")
            if self._run and self._status().run != self._run:
                raise ServerUnreachable(f"The server at {self._address} has another run.")
            with closing(http_to(self._address, token=self._token)) as http:
                return http.post(path, message, admin_messages.Controlled, timeout_s=30.0)
        except ServerUnreachable as error:
            if self._dir is None or error.is_other:
                raise ServerUnreachable(
                    error.message, f"{error.remedy} If no server runs, give --dir with its state directory.".strip()
                ) from error
        return _in_journal(self._dir, message)

    def _status(self) -> status_messages.Status:
        return ask(self._address, routes.STATUS, status_messages.Status, token=self._token)

    def wait_until_back(self, before: admin_messages.Controlled, version: int) -> admin_messages.Controlled:
        """Wait until the server serves the run again, after it has gone back to a version.

        Raises:
            Conflict: it has not gone back: the version was damaged.
            ServerUnreachable: the server did not come back in time.
        """
        status, until_s = None, time.monotonic() + BACK_S
        while status is None or status.epoch <= before.epoch:
            if time.monotonic() > until_s:
                raise ServerUnreachable(
                    f"The server at {self._address} has not come back within {BACK_S:g} s.",
                    "Start it again: the run then goes back.",
                )
            time.sleep(LOOK_S)
            with suppress(*TRANSIENT):
                status = self._status()
        if any(each.version == before.version for each in status.history):  # a lost version is no longer there
            raise Conflict(f"The run has not gone back: version {version} is damaged.", "See the server's log.")
        text = f"the run has gone back to version {version}; its sites take it with their next round"
        return before.model_copy(update={"version": status.version, "epoch": status.epoch, "text": text})

    def show(self, answer: admin_messages.Controlled, as_json: bool, then: str) -> None:
        """Print an answer, and what can be done next."""
        print(answer.model_dump_json(indent=2) if as_json else visible(f"{answer.text}. {then}"))


def _in_journal(state_dir: Path, message: Any) -> admin_messages.Controlled:
    """Write a wish of the admin into the journal of a run that no server serves.

    Raises:
        StateLocked: a server has the directory.
        Conflict: the run is finished.
        Gone: the version is not kept.
    """
    from atoll.store.store import Store  # it locks the directory

    with closing(Store(state_dir)) as store:
        log, controls = store.run_log, store.run_log.controls
        heads = store.versions.heads()
        paused, stopping, newest = controls.paused, controls.stopping, max(heads, default=0)
        if isinstance(message, admin_messages.PauseRun) and not message.paused and (stopping or not log.finished):
            paused = stopping = False
            text = "goes on with the next start of its server"
        elif log.finished:
            raise Conflict(f"The run in {state_dir} is finished.", "To train further, raise rounds.total.")
        elif isinstance(message, admin_messages.PauseRun):
            paused, text = True, "is paused from the next start of its server on"
        elif isinstance(message, admin_messages.StopRun):
            paused, stopping = False, True
            text = "is finished after its present round, with the next start of its server"
        elif log.run is not None and json_module.loads(log.run.settings_json)["swarm.enabled"]:
            raise Conflict("The run is a swarm, so it cannot go back: earlier versions are at its sites.", "")
        else:
            text = f"goes back to version {message.version} with the next start of its server"
            if {*heads} != {message.version}:
                store.versions.require_whole(message.version)
                log.ask_back_to(message.version)
        if (paused, stopping) != (controls.paused, controls.stopping):
            log.control(paused=paused, stopping=stopping)
        return admin_messages.Controlled(
            paused=paused, stopping=stopping, version=newest, epoch=log.epoch, text=f"no server runs; the run {text}"
        )
