"""`atoll worker -- python train.py`: runs a training script as one worker of a run.

The script finds the server by ATOLL_SERVER, ATOLL_SITE and ATOLL_DIR; a token only ever comes from the environment
(ATOLL_TOKEN, ATOLL_TOKEN_FILE), because others on the machine can read a command line.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from atoll.child_processes import END_WITH_PARENT
from atoll.errors import ConfigError, ServerUnreachable, UsageError, VersionSkew
from atoll.worker.session.leave_at_exit import LEASES, leave_for

CONTEXT: dict[str, Any] = {"allow_interspersed_args": False, "ignore_unknown_options": False}

RESTART_PAUSE_S = 1.0
LONGEST_RESTART_PAUSE_S = 60.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SERVER_PAUSE_S = 1.0
REPEAT_S = 30.0
"""While the server does not answer, how long after the last line the same one is printed again."""


def command(
    script: Annotated[
        list[str], typer.Argument(help="The command, after `--`: python train.py …", metavar="-- COMMAND")
    ],
    server: Annotated[
        str | None, typer.Option(help="Address of the server; by default ATOLL_SERVER.", show_default=False)
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="This worker's name; by default made of host and process.", show_default=False)
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder of the worker's files, each as large as the model.", show_default=False),
    ] = None,
    max_sync_retries: Annotated[
        int | None,
        typer.Option(
            min=0, help="Attempts before DiLoCo skips a synchronisation with a lost server.", show_default=False
        ),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Start a command that failed or was killed again, so often.")
    ] = 0,
) -> None:
    """Run a training script as a worker. A token comes from ATOLL_TOKEN or ATOLL_TOKEN_FILE, never from a flag."""
    from atoll.transport.http_client import server_address

    address = server_address(server)
    environment = os.environ | {"ATOLL_SERVER": address}
    if site is not None:
        environment["ATOLL_SITE"] = _site(site)
    elif "ATOLL_SITE" not in environment and restarts:
        raise UsageError("--restarts needs a name that stays the same.", "Give --site NAME, or set ATOLL_SITE.")
    if directory is not None:
        environment["ATOLL_DIR"] = str(directory.resolve())
    if max_sync_retries is not None:
        environment["ATOLL_MAX_SYNC_RETRIES"] = str(max_sync_retries)
    raise typer.Exit(_run(script, environment, restarts))


def _require_server(address: str, told: list[int]) -> str:
    """Wait for the server as ATOLL_GIVE_UP_S says; a signal ends the wait. Returns the name of its run.

    Print why it does not answer and what to do: at first, when that changes, and every `REPEAT_S`.

    Raises:
        ServerUnreachable: it did not answer in that time, or something else answers.
        VersionSkew: it speaks another protocol.
    """
    from atoll.format_text import duration
    from atoll.protocol import messages, routes
    from atoll.transport.http_client import ask
    from atoll.worker.session.session import give_up_s

    most_s = give_up_s()
    end = time.monotonic() + most_s
    said, said_s = "", 0.0
    while True:
        try:
            timeout_s = min(10.0, max(1.0, end - time.monotonic()))
            info = ask(address, routes.RUN, messages.RunInfo, timeout_s=timeout_s)
            break
        except ServerUnreachable as error:
            # a certificate does not become right by waiting
            if told or time.monotonic() >= end or error.is_other:
                raise
            why = str(error)
        if why != said or time.monotonic() - said_s >= REPEAT_S:
            upto = "" if math.isinf(most_s) else f" for up to {duration(most_s)}"
            print(f"atoll: waiting for {address}{upto} (ATOLL_GIVE_UP_S): {why}", file=sys.stderr, flush=True)
            said, said_s = why, time.monotonic()
        _pause(told, SERVER_PAUSE_S)
    if info.protocol != routes.PROTOCOL:
        older = "this worker" if info.protocol > routes.PROTOCOL else "the server"
        raise VersionSkew(
            f"This worker speaks protocol {routes.PROTOCOL}, {address} speaks {info.protocol}.",
            f"Upgrade Atoll at {older}.",
        )
    return info.name


def _site(site: str) -> str:
    import re

    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", site):
        raise ConfigError(
            f"{site!r} is not a site name.", "Use 1 to 64 letters, digits, dots, hyphens and underscores."
        )
    return site


def _run(script: list[str], environment: dict[str, str], restarts: int) -> int:
    """Run the command until it ends well, is told to end, or has failed too often; returns its exit code."""
    told: list[int] = []
    child: subprocess.Popen[bytes] | None = None
    ended, killed = "", False  # how the last command ended
    leases = Path(tempfile.mkdtemp(prefix="atoll-"))
    environment = environment | {LEASES: str(leases)}

    def forward(signum: int, frame: FrameType | None) -> None:
        told.append(signum)
        if child is not None and child.poll() is None:
            child.send_signal(signum)

    before: dict[int, Any] = {}
    for signum in FORWARDED:
        ignored = signal.getsignal(signum) is signal.SIG_IGN  # by nohup, or in the background of a script: it stays so
        if signum == signal.SIGTERM or not ignored:
            before[signum] = signal.signal(signum, forward)
    try:
        for attempt in range(restarts + 1):
            try:
                name = _require_server(environment["ATOLL_SERVER"], told)
            except ServerUnreachable as error:
                if attempt == restarts and not told:
                    raise
                failure = error.message.rstrip(".")
            else:
                if told:
                    return 128 + told[-1]
                # a script says nothing while it loads PyTorch; its arguments are not repeated: one may be a secret
                found = f"{environment['ATOLL_SERVER']} answers, run {name}"
                print(f"atoll: {found}; starting {script[0]}", file=sys.stderr, flush=True)
                # a session of its own: Ctrl-C reaches it once, from here, not twice
                child = _start(script, environment)
                code = child.wait()
                failure, killed = f"the command ended with {code}", code < 0
                if killed:
                    failure, code = f"{signal.Signals(-code).name} ended the command", 128 - code
                ended = failure
                if code == 0 or told or attempt == restarts:
                    return code
            if told:
                return 128 + told[-1]
            print(f"atoll: {failure}; restart {attempt + 1} of {restarts}", file=sys.stderr, flush=True)
            _pause(told, restart_pause_s(attempt))
            if told:
                return 128 + told[-1]
        raise AssertionError("unreachable")
    finally:
        if ended:
            _leave(leases, ended, killed=killed and not told)
        shutil.rmtree(leases, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(leases: Path, failure: str, *, killed: bool) -> None:
    """Take the sites of a command that has ended out of their runs, where it did not do so itself."""
    sites = leave_for(leases, failure)
    if sites or killed:
        left = f"; {', '.join(sites)} left the run" if sites else ""
        print(f"atoll: {failure}{left}", file=sys.stderr, flush=True)


def _start(script: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(script, env=environment, start_new_session=True, preexec_fn=END_WITH_PARENT)
    except FileNotFoundError:
        raise UsageError(
            f"There is no command {script[0]!r}.", "Name it after `--`, for example: -- python train.py"
        ) from None
    except PermissionError:
        raise UsageError(f"{script[0]!r} cannot be executed.", f"Name its interpreter: -- python {script[0]}") from None


def restart_pause_s(attempt: int) -> float:
    """Before restart `attempt` + 1: 1, 2, 4, … 60 s, so that a command that always fails does not keep others busy."""
    return min(RESTART_PAUSE_S * 2.0**attempt, LONGEST_RESTART_PAUSE_S)


def _pause(told: list[int], seconds: float) -> None:
    """Wait before a restart; a signal ends it."""
    end = time.monotonic() + seconds
    while not told and time.monotonic() < end:
        time.sleep(0.05)
