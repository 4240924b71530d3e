"""`atoll worker -- python train.py`: run a training script as one worker of a run.

The script gets the server's address, the site's name and the site's folder in variables: ATOLL_SERVER, ATOLL_SITE and
ATOLL_DIR. The credential is the one that `atoll enrol` has stored. A token comes only from the environment
(ATOLL_TOKEN, ATOLL_TOKEN_FILE), because other users of the machine can read a command line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple

import typer

from atoll import registry
from atoll.child_processes import END_WITH_PARENT
from atoll.cli import ENDS
from atoll.cli.flare import flare_command
from atoll.cli.flower import Flower, GivenKeys, RunConfig, flower_worker
from atoll.cli.text import (
    FIRST_S,
    SILENT_S,
    LogJson,
    Quiet,
    Ticker,
    Verbose,
    aligned,
    choose_json,
    choose_level,
    log_level,
    next_step,
    print_line,
    telling_what_is_awaited,
)
from atoll.errors import ServerUnreachable, UsageError
from atoll.format_text import duration, numbers, size, visible
from atoll.posix import OWN_FOLDER, folder_error, remove_left_behind
from atoll.protocol import messages, routes
from atoll.transport.http_client import answer_of, enrolled_site, http_to, server_address
from atoll.transport.way_out import DRY_RUN, MESSAGES
from atoll.worker.arguments import give_up_s, require_site
from atoll.worker.session.leave_at_exit import ENDED_WELL, LEASES, RUN_FAILED, SUPERSEDED, leave_for

CONTEXT: dict[str, Any] = {"allow_interspersed_args": False, "ignore_unknown_options": False}

RESTART_PAUSE_S = 1.0
LONGEST_RESTART_PAUSE_S = 60.0
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SERVER_PAUSE_S = 1.0
NOT_RESTARTED = {
    SUPERSEDED: "another process takes part as its site",
    RUN_FAILED: "the run has failed at the server",
}
"""File that a script leaves in the folder of its leases → why the script is not restarted."""


def command(
    script: Annotated[
        list[str] | None, typer.Argument(help="The command to run, after `--`: python train.py …", metavar="-- COMMAND")
    ] = None,
    flower: Flower = None,
    run_config: RunConfig = None,
    node_config: Annotated[
        list[str] | None,
        typer.Option(help="What a Flower app is told of this site: partition-id=0 num-partitions=2.", metavar="PAIRS"),
    ] = None,
    record_keys: GivenKeys = None,
    server: Annotated[
        str | None,
        typer.Option(
            help="Address of the server. Default: ATOLL_SERVER, or that at which a site here has enrolled.",
            show_default=False,
        ),
    ] = None,
    site: Annotated[
        str | None,
        typer.Option(
            help="Name of the site. Default: ATOLL_SITE, the site enrolled here, or from host and process number.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for the worker's files, each as large as the model.", show_default=False),
    ] = None,
    max_sync_retries: Annotated[
        int | None,
        typer.Option(
            min=0, help="Retries to reach the server before DiLoCo skips a synchronisation.", show_default=False
        ),
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="Maximum number of restarts of a failed or killed command.")] = 0,
    dry_run: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write all that would leave in the first round to this new folder, send none of it, and end.",
            show_default=False,
        ),
    ] = None,
    flare: Annotated[
        bool, typer.Option("--flare", help="The command is a script on NVFlare's Client API, which runs unchanged.")
    ] = False,
    log_json: LogJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Run a training script as a worker. A token comes from ATOLL_TOKEN or ATOLL_TOKEN_FILE, never from an option."""
    choose_json(log_json)
    choose_level(quiet=quiet, verbose=verbose)
    if flower is not None:
        script = flower_worker(flower, run_config or [], node_config or [], record_keys or [])
    elif not script:
        raise UsageError("No command was given.", "Give it after `--`: atoll worker -- python train.py")
    script = flare_command(script) if flare else script
    address = server_address(server, enrolled=True)
    environment = os.environ | {"ATOLL_SERVER": address}
    site = site or os.environ.get("ATOLL_SITE") or enrolled_site(address)
    if site is not None:
        environment["ATOLL_SITE"] = require_site(site)
    elif restarts:
        raise UsageError(
            "--restarts needs a site name that stays the same after a restart.", "Give --site NAME, or set ATOLL_SITE."
        )
    if directory is not None:
        environment["ATOLL_DIR"] = str(directory.resolve())
    if max_sync_retries is not None:
        environment["ATOLL_MAX_SYNC_RETRIES"] = str(max_sync_retries)
    _require_program(script[0], environment.get("PATH", os.defpath))
    if dry_run is not None:
        restarts, environment[DRY_RUN] = 0, str(_new_folder(dry_run))
    code = _run(script, environment, restarts)
    if dry_run is not None and not code:
        _show_dry_run(dry_run)
    elif not code:
        next_step(f"atoll status --server {address}")
    raise typer.Exit(code)


def _new_folder(folder: Path) -> Path:
    """Make the folder of a dry run, and return its absolute path.

    Raises:
        UsageError: there is such a file or folder already.
    """
    try:
        folder.mkdir(OWN_FOLDER, parents=True)
    except FileExistsError:
        raise UsageError(f"{folder} exists already.", "Give a new folder: --dry-run FOLDER.") from None
    except OSError as error:
        raise folder_error(error, folder, "Give a folder that this user may write.") from error
    return folder.absolute()


def _show_dry_run(folder: Path) -> None:
    """Print the table of what would have left. Remove the worker's own files.

    Raises:
        UsageError: the script has ended before it had anything to send.
    """
    shutil.rmtree(folder / "files", ignore_errors=True)
    update, answer = folder / "update.json", folder / "answer.json"
    if answer.exists():
        print(f"The answer to a task would leave: {answer}")
    elif update.exists():
        found = json.loads(update.read_text(encoding="utf-8"))
        rows = [
            [*(str(each[key]) for key in ("name", "dtype", "shape", "codec")), size(each["bytes"]), each["norm"]]
            for each in found["tensors"]
        ]
        for line in aligned([["tensor", "dtype", "shape", "codec", "bytes", "norm"], *rows]):
            print(visible(line))
        metrics = numbers(found["message"].get("metrics", {})) or "none"
        print(visible(f"{size(found['bytes'])} would leave, after: {', '.join(found['filters']) or 'no filter'}"))
        print(visible(f"weight {found['message'].get('weight', 1.0):g}, metrics {metrics}"))
    else:
        raise UsageError("The script has ended without an update or an answer.", "A dry run ends at the first one.")
    print(f"All of it is in {folder}. Sent: what joining needs, which is in {folder / MESSAGES}.")


def _require_program(name: str, path: str) -> None:
    """Check that a program exists, before the wait for the server.

    Args:
        name: name or path of the program.
        path: the folders in which a name is looked for, as in `PATH`.

    Raises:
        UsageError: there is no such program. The message suggests the nearest one.
    """
    if shutil.which(name, path=path) is not None or (os.sep in name and os.path.exists(name)):
        return
    known: set[str] = set()
    for folder in filter(None, path.split(os.pathsep)):
        with contextlib.suppress(OSError):
            known |= {entry.name for entry in os.scandir(folder)}
    raise UsageError(
        f"The command {name!r} was not found.",
        registry.nearest(name, sorted(known), "Give a command after `--`, for example: -- python train.py"),
    )


def _require_server(address: str, signals: list[int], site: str | None = None) -> str:
    """Wait for the server to answer, for up to `ATOLL_GIVE_UP_S` seconds. Return the name of its run.

    While the server does not answer, print why: the first time, when the reason changes, and at growing intervals.

    Args:
        address: the address of the server.
        signals: the numbers of the signals received so far; a signal ends the wait.
        site: name of the site; None: it has none of its own.

    Raises:
        ServerUnreachable: the server did not answer in that time, or its certificate is not accepted.
        ConfigError: the site's policy does not let it take part.
    """
    most_s = give_up_s()
    end = time.monotonic() + most_s
    why, last_reason, told_s = "", "", -SILENT_S
    upto = "" if math.isinf(most_s) else f" for up to {duration(most_s)}"

    def awaited() -> str:
        return f"atoll: waiting for {address}{upto} (ATOLL_GIVE_UP_S){f': {why}' if why else ''}"

    def awaited_still() -> str:
        return awaited() if time.monotonic() - told_s >= SILENT_S else ""

    with telling_what_is_awaited(awaited_still, _inform, FIRST_S):
        while True:
            try:
                timeout_s = min(10.0, max(1.0, end - time.monotonic()))
                with contextlib.closing(http_to(address, site=site)) as http:
                    info = answer_of(http, routes.RUN, messages.RunInfo, timeout_s)
                    http.way_out.require_run(info, http.server)
                return info.name
            except ServerUnreachable as error:
                # is_other: TLS or its certificate is wrong; waiting does not help
                if signals or time.monotonic() >= end or error.is_other:
                    raise
                why = str(error)
            if why != last_reason:
                _inform(awaited())
                last_reason, told_s = why, time.monotonic()
            _pause(signals, SERVER_PAUSE_S)


def _inform(line: str) -> None:
    if log_level() <= logging.INFO:
        print_line(line)


def _run(script: list[str], environment: dict[str, str], restarts: int) -> int:
    """Run the command, and restart it after a failure, up to `restarts` times; return its last exit code.

    A signal to this process ends the command and prevents further restarts.
    """
    ended = _End(0, "")  # the last failure
    prefix = f"atoll-leases-{socket.gethostname()}_"  # several machines may share the folder of temporary files
    remove_left_behind(tempfile.gettempdir(), prefix)
    # made by the command, when it has joined
    leases = Path(tempfile.gettempdir(), f"{prefix}{os.getpid()}-{secrets.token_hex(8)}")
    environment = environment | {LEASES: str(leases)}
    children: list[subprocess.Popen[bytes]] = []
    with _forwarded_signals(children) as signals:
        try:
            for attempt in range(restarts + 1):
                try:
                    end = _run_once(script, environment, children, signals)
                    ended, failure = end if end.failure else ended, end.failure
                    if end.code == 0 or signals or attempt == restarts:
                        return end.code
                    for mark, reason in NOT_RESTARTED.items():
                        if (leases / mark).exists():
                            print_line(f"atoll: {failure}; not restarted, because {reason}")
                            return end.code
                except ServerUnreachable as error:
                    failure = error.message.rstrip(".")
                    if attempt == restarts and not signals:
                        raise
                if not signals:
                    print_line(f"atoll: {failure}; restart {attempt + 1} of {restarts}")
                    _pause(signals, restart_pause_s(attempt))
                if signals:
                    return _not_started(signals, script)
            raise AssertionError("unreachable")
        finally:
            if ended.failure:
                _leave(leases, ended, is_asked=bool(signals))
            shutil.rmtree(leases, ignore_errors=True)


def _not_started(signals: list[int], script: list[str]) -> int:
    """Say that a signal came before the command was started, or started again. Return the exit code."""
    print_line(f"atoll: {ENDS.get(signals[-1], 'hung up')} before {name_of(script)} was started")
    return 128 + signals[-1]


class _End(NamedTuple):
    """How a command ended.

    Attributes:
        code: the exit code; 128 + the signal's number after a signal.
        failure: how the command ended, in words; empty if it was not started.
        killed: whether a signal ended the command.
    """

    code: int
    failure: str
    killed: bool = False


def _run_once(
    script: list[str], environment: dict[str, str], children: list[subprocess.Popen[bytes]], signals: list[int]
) -> _End:
    """Wait for the server, run the command, and return how the command ended.

    Args:
        script: the command.
        environment: the environment variables for the command.
        children: a list to which the running command is added, so that signals can be forwarded.
        signals: the numbers of the signals received so far.

    Raises:
        ServerUnreachable: the server did not answer in time, or its certificate is not accepted.
    """
    name = _require_server(environment["ATOLL_SERVER"], signals, environment.get("ATOLL_SITE"))
    if signals:
        return _End(_not_started(signals, script), "")
    # a script prints nothing while it loads PyTorch; its arguments are not printed, because one may be a secret
    found = f"{environment['ATOLL_SERVER']} answers, run {name}"
    _inform(f"atoll: {found}; starting {script[0]}")
    # the command has its own session, so that Ctrl-C reaches it only once, forwarded from here
    children[:] = [_start(script, environment)]
    if signals:  # while it was being started
        children[0].send_signal(signals[-1])
    # no second thread tells this: the system sends the signal of `END_WITH_PARENT` again for each thread that ends
    not_joined = _not_joined(name_of(script), Path(environment[LEASES]))
    ticker, code = Ticker(not_joined, _inform), None
    while code is None:
        try:
            code = children[0].wait(ticker.step_s if not_joined() else None)
        except subprocess.TimeoutExpired:
            ticker.look()
    if code < 0:
        return _End(128 - code, f"{signal.Signals(-code).name} ended the command", killed=True)
    return _End(code, f"the command ended with exit code {code}")


def name_of(script: list[str]) -> str:
    """Return the name of a command's script, without its interpreter and its arguments."""
    is_python = Path(script[0]).name.startswith("python") and len(script) > 1 and not script[1].startswith("-")
    return script[1] if is_python else script[0]


def _not_joined(name: str, leases: Path) -> Callable[[], str]:
    """Return a function that returns a text until the script has joined. Then it asks no more."""
    is_joined = False

    def awaited() -> str:
        nonlocal is_joined
        is_joined = is_joined or leases.exists()
        return "" if is_joined else f"atoll: {name} has not joined yet; it takes seconds to load PyTorch"

    return awaited


@contextmanager
def _forwarded_signals(children: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Forward signals to the running command in the `with` block. Yield a list that collects the received signals."""
    signals: list[int] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        signals.append(signum)
        for child in children:
            if child.poll() is None:
                child.send_signal(signum)

    before: dict[int, Any] = {}
    for signum in FORWARDED:
        ignored = signal.getsignal(signum) is signal.SIG_IGN  # nohup, or a background job: keep ignoring
        if signum == signal.SIGTERM or not ignored:
            before[signum] = signal.signal(signum, forward)
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(leases: Path, end: _End, *, is_asked: bool) -> None:
    """After the command has ended, end the leases that it left behind, so that no run waits for their sites.

    Unless the command has ended well, print how it ended and which sites have left in this way. If there is no such
    site, print only if a signal that this process did not forward ended the command.

    Args:
        leases: the folder in which the command stored its leases.
        end: how the command ended; the server gets the text of a failure.
        is_asked: whether this process has received a signal.
    """
    is_well = end.code in ENDED_WELL and not end.killed
    sites = leave_for(leases, None if is_well else end.failure)
    if (sites and not is_well) or (end.killed and not is_asked):
        departed = f"; {', '.join(sites)} left the run" if sites else ""
        print_line(f"atoll: {end.failure}{departed}")


def _start(script: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(script, env=environment, start_new_session=True, preexec_fn=END_WITH_PARENT)
    except FileNotFoundError:
        raise UsageError(
            f"The command {script[0]!r} was not found.", "Give a command after `--`, for example: -- python train.py"
        ) from None
    except PermissionError:
        raise UsageError(
            f"{script[0]!r} is not an executable file.", f"Put its interpreter first: -- python {script[0]}"
        ) from None


def restart_pause_s(attempt: int) -> float:
    """Return the seconds to wait before restart number `attempt` + 1: 1, 2, 4, … 60."""
    return min(RESTART_PAUSE_S * 2.0**attempt, LONGEST_RESTART_PAUSE_S)


def _pause(signals: list[int], seconds: float) -> None:
    """Wait for `seconds` seconds; return early when a signal is added to `signals`."""
    end = time.monotonic() + seconds
    while not signals and time.monotonic() < end:
        time.sleep(0.05)
