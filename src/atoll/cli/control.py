"""`atoll pause`, `resume`, `stop` and `rollback`: what the admin of a run does with it.

A command asks the server of the run, with the admin's token from its state directory. If no server runs, it writes the
wish into the journal, and the next start of the server carries it out.
"""

from __future__ import annotations

import json as json_module
import os
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel

from atoll.cli.stored_status import admin_token, environ_of, stored_status
from atoll.cli.text import still
from atoll.cli.which_run import (
    HERE,
    RunArgument,
    RunDir,
    is_of_atoll_run,
    is_served,
    named_run,
    quoted,
    require_one,
    run_folder,
    run_folders,
    start_command,
)
from atoll.errors import TRANSIENT, Conflict, ServerUnreachable, StateLocked
from atoll.format_text import visible
from atoll.protocol import admin_messages, routes, status_messages
from atoll.store.reader import has_run, open_state
from atoll.transport.http_client import Http, ask, http_to, server_address
from atoll.transport.tls import read_token_file

Server = Annotated[str | None, typer.Option(help="Server address. Default: ATOLL_SERVER.", show_default=False)]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the admin's token: a copy of admin.token. Default: ATOLL_TOKEN, or the file of "
        "ATOLL_TOKEN_FILE; for a RUN, the one in its state directory.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]

Answer = TypeVar("Answer")
ANSWER_S = 30.0
"""Seconds to wait for an answer of the server."""
BACK_S = 120.0
"""Seconds within which a server has gone back to an earlier version."""
LOOK_S = 0.2


def pause(
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Server = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Pause a run: no round begins, and its sites wait. Updates that they are training still count."""
    target = Target(run, state_dir, server, token_file)
    answer = target.control(routes.PAUSE, admin_messages.PauseRun(paused=True))
    target.show(answer, json, f"To go on: atoll resume{target.named}{target.and_start}")


def resume(
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Server = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Let a paused run go on. With RUN, while no server runs, also a run that was stopped."""
    target = Target(run, state_dir, server, token_file)
    answer = target.control(routes.PAUSE, admin_messages.PauseRun(paused=False))
    target.show(answer, json, target.watch)


def stop(
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Server = None,
    token_file: TokenFile = None,
    now: Annotated[
        bool, typer.Option("--now", help="Do not wait for the end of the open round: its updates are not used.")
    ] = False,
    json: AsJson = False,
) -> None:
    """End a run in good order: after the present round its result is saved, and its sites and its server end."""
    target = Target(run, state_dir, server, token_file)
    answer = target.control(routes.STOP, admin_messages.StopRun(now=now))
    later = f"; to train further later: atoll resume{target.named}, and then {target.again}" if target.again else ""
    target.show(answer, json, f"{target.watch}{later}")


def rollback(
    version: Annotated[int, typer.Argument(min=0, help="Version from which the run goes on.", metavar="VERSION")],
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Server = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Let a run go back to an earlier version that its server still has, with the whole state of its optimizer.

    Rounds and updates since then no longer count. The numbers of the versions since then are not used again.

    A server keeps the newest disk.keep_versions versions: 2 by default, so a run can go back by one. To be able to go
    back further, set it higher before. The server's log says at the beginning what each further version takes on disk.
    """
    target = Target(run, state_dir, server, token_file)
    answer = target.control(routes.ROLLBACK, admin_messages.RollBack(version=version))
    if answer.text.startswith("the run goes back"):
        with still(f"still waiting until the server has gone back to version {version}"):
            answer = target.wait_until_back(answer, version)
    then = f"It is paused; to go on: atoll resume{target.named}{target.and_start}"
    target.show(answer, json, then if answer.paused else target.watch)


class Target:
    """The run that a command is for: at a server, or in a state directory without one.

    Attributes:
        named: the words that name the run, for the next command; they begin with a space.
        again: the command that starts its server again; empty: its state directory is not known.
        is_served: whether a server has answered.
    """

    def __init__(self, run: Path | None, directory: Path | None, server: str | None, token_file: Path | None) -> None:
        require_one(run, directory, has_server=server is not None or token_file is not None)
        state_dir, address = named_run(run, directory), server_address(server)
        if state_dir is None and not (server or os.environ.get("ATOLL_SERVER")) and has_run(HERE):
            state_dir = HERE
        self._dir, self._run, self._address, self._token = state_dir, "", address, None
        self.named, self.again, self.is_served = f" --server {server}" if server else "", "", True
        self._failed = ""
        if state_dir is not None:
            self.named, self.again = f" {quoted(run_folder(state_dir))}", start_command(state_dir)
            stored, _ = stored_status(state_dir)
            self._run, self._address, self._token = stored.run, stored.address, admin_token(state_dir)
            self._failed = stored.failed
        elif token_file is not None:
            self._token = read_token_file(token_file)

    @property
    def watch(self) -> str:
        """What to do to see what has come of it."""
        if self.is_served:
            return f"To watch it: atoll status{self.named} --watch"
        return f"To start its server: {self.again}"

    @property
    def and_start(self) -> str:
        """The words that start the server after another command, if it does not run."""
        return "" if self.is_served else f", and then {self.again}"

    def control(self, path: str, message: BaseModel) -> admin_messages.Controlled:
        """Ask the server to control the run. If none runs, write the wish into the journal. It raises what `ask` does.

        Raises:
            Conflict, Gone: the run does not allow it.
        """
        return self.ask(
            lambda http: http.post(path, message, admin_messages.Controlled, timeout_s=ANSWER_S),
            lambda state_dir: _in_journal(state_dir, message),
        )

    def ask(self, at_server: Callable[[Http], Answer], in_journal: Callable[[Path], Answer]) -> Answer:
        """Ask the server. If none runs, work on the journal.

        Args:
            at_server: asks the server.
            in_journal: does the same in the journal of a state directory.

        Raises:
            ServerUnreachable: no server answers, and no state directory is given.
            Conflict: the run has never had a server.
            StateLocked: a server uses the state directory, but does not answer.
        """
        try:
            if not self._address and self._dir is not None:
                raise Conflict(
                    f"No server has served the run in {run_folder(self._dir)}: a simulation has no admin.",
                    "Ctrl-C stops a simulation; the same command goes on.",
                )
            if self._run and self._status().run != self._run:
                raise ServerUnreachable(f"The server at {self._address} has another run.")
            with (
                still(f"still waiting for the answer of {self._address}"),
                closing(http_to(self._address, environ_of(self._dir), self._token)) as http,
            ):
                return at_server(http)
        except ServerUnreachable as error:
            if self._dir is None or error.is_other:
                last = run_folders()[-1:]
                name = f", such as {quoted(last[0])}" if last else ", or with --dir its state directory"
                raise ServerUnreachable(
                    error.message, f"{error.remedy} If no server runs, name the run{name}.".strip()
                ) from error
        self.is_served = False
        try:
            return in_journal(self._dir)
        except StateLocked as error:
            again = "It begins, ends or hangs: give the command again in some seconds; if that does not help, end it."
            raise StateLocked(error.message, again) from error

    def _status(self) -> status_messages.Status:
        return ask(
            self._address, routes.STATUS, status_messages.Status, environ=environ_of(self._dir), token=self._token
        )

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
        if as_json:
            print(answer.model_dump_json(indent=2))
        else:
            failed = f" Correct this first: {self._failed}" if self._failed and not self.is_served else ""
            print(visible(f"{answer.text}.{failed} {then}"))


def _in_journal(state_dir: Path, message: Any) -> admin_messages.Controlled:
    """Write a wish of the admin into the journal of a run that no server serves.

    Raises:
        StateLocked: a server has the directory.
        Conflict: the run is over or is being stopped, or it is a swarm and cannot go back.
        Gone: the version is not kept.
    """
    from atoll.store.store import Store  # it locks the directory

    _require_goes_on(state_dir, message)
    with closing(Store(state_dir)) as store:
        log, controls = store.run_log, store.run_log.controls
        heads = store.versions.heads()
        paused, stopping, newest = controls.paused, controls.stopping, max(heads, default=0)
        if isinstance(message, admin_messages.PauseRun) and not message.paused:
            text = "goes on with the next start of its server"
            if not (paused or stopping):
                text = f"was not paused; it {text}"
            if stopping:
                log.finish(False)
            paused = stopping = False
        elif isinstance(message, admin_messages.StopRun) and stopping:
            text = "is stopped already" if log.finished else "is being stopped already: its next start ends it"
        elif isinstance(message, admin_messages.PauseRun):
            text = "is paused already" if paused else "is paused from the next start of its server on"
            paused = True
        elif isinstance(message, admin_messages.StopRun):
            paused, stopping = False, True
            text = "is finished after its present round, with the next start of its server"
        elif log.run is not None and json_module.loads(log.run.settings_json)["swarm.enabled"]:
            raise Conflict(
                "The run is a swarm, so it cannot go back: earlier versions are at its sites.",
                f"To go on: {start_command(state_dir)}",
            )
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


def _require_goes_on(state_dir: Path, message: Any) -> None:
    """Check, without a change of the journal, that the state of a run allows a wish.

    Raises:
        Conflict: the run is over or is being stopped.
    """
    resumes = isinstance(message, admin_messages.PauseRun) and not message.paused
    stops = isinstance(message, admin_messages.StopRun)
    verb = "go back" if isinstance(message, admin_messages.RollBack) else "pause"
    verb = "be stopped" if stops else "resume" if resumes else verb
    where, start = run_folder(state_dir), start_command(state_dir)
    with open_state(state_dir) as state:
        finished, stopping = state.meta()[1], state.controls().stopping
    if is_served(state_dir):  # its lock says by which process
        return
    if finished and not stopping:
        more = f"{start} --rounds N" if is_of_atoll_run(state_dir) else f"raise rounds.total, and then {start}"
        raise Conflict(f"The run in {where} is finished, so it cannot {verb}.", f"To train further: {more}")
    if stopping and not (resumes or stops):
        is_over = "was stopped by its admin" if finished else "is being stopped: its next start ends it"
        raise Conflict(
            f"The run in {where} {is_over}, so it cannot {verb}.",
            f"To train further: atoll resume {quoted(where)}, and then {start}",
        )
