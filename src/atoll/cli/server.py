"""`atoll server`: serve a run until it is finished."""

from __future__ import annotations

import gc
import logging
import os
import select
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atoll.child_processes import Terminated, raise_on_sigterm
from atoll.cli import EndsAtOnce
from atoll.cli.config import Dir, Host, Port, Rounds, RunFile, Sets, TokenFile, read_settings
from atoll.cli.text import (
    UNREAD_S,
    LogJson,
    Quiet,
    Verbose,
    against_data_parallel,
    awaited,
    best_line,
    choose_json,
    choose_level,
    codecs,
    duration,
    faults_of_evaluation,
    log_level,
    log_lines_in_background,
    logs_json,
    next_step,
    number_of,
    numbers,
    optimizer,
    say_stopping,
    size,
    staleness,
    streaming,
    telling_what_is_awaited,
)
from atoll.config import TRAIN, Settings, entries_of
from atoll.errors import AtollError, ConfigError
from atoll.format_text import listed
from atoll.protocol import status_messages
from atoll.runtime import return_freed_memory
from atoll.simulate.inputs import put_aside
from atoll.store.reader import has_run

if TYPE_CHECKING:
    from atoll.server.serve import Server

LOG = logging.getLogger("atoll.cli")

CONTEXT: dict[str, Any] = {"help_option_names": ["-h", "--help"]}


def command(
    run_file: RunFile = None,
    sets: Sets = None,
    host: Host = None,
    port: Port = None,
    directory: Dir = None,
    token_file: TokenFile = None,
    rounds: Rounds = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", help="Begin a new run, with new credentials; the earlier one is kept in a folder beside it."
        ),
    ] = False,
    log_json: LogJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Serve a run. Its settings come from a run file and from options; options take precedence."""
    choose_json(log_json)
    choose_level(quiet=quiet, verbose=verbose)
    try:
        settings = read_settings(
            run_file, sets, host=host, port=port, directory=directory, token_file=token_file, rounds=rounds
        )
        if run_file is None and not (
            settings.algorithm.target or settings.workflow.function or settings.workflow.steps
        ):
            raise ConfigError(  # PyTorch, which takes seconds to import, is not needed to see that
                "No run file was given, and no setting names an algorithm or a workflow.",
                "Give the run file: atoll server run.toml. `atoll new` writes one; `atoll run --example digits` runs "
                "an example.",
            )
        run_until_finished(settings, fresh=fresh)
    except ConfigError as error:
        if run_file is not None or not Path("run.toml").is_file():
            raise
        raise ConfigError(error.message, f"{error.remedy} Did you mean: atoll server run.toml?".strip()) from error


def run_until_finished(settings: Settings, *, fresh: bool = False) -> None:
    """Serve a run until it is finished, and log its progress.

    SIGINT (Ctrl-C) or SIGTERM stops the server earlier. The next start continues the run.

    Args:
        settings: the settings.
        fresh: put an earlier run aside, and begin a new one.

    Raises:
        AtollError: the server cannot start, or the run failed.
        KeyboardInterrupt: Ctrl-C came before the run was finished. The server has stopped when this is raised.
    """
    raise_on_sigterm()
    started: list[Server] = []
    with log_lines_in_background(), telling_what_is_awaited(lambda: _awaited(started)):
        if fresh and has_run(settings.disk.state_dir):
            put_aside(settings.disk.state_dir)
        _serve(settings, started)


def _awaited(started: Sequence[Server]) -> str:
    """Return what the command waits for; empty while a table shows it."""
    for server in started:
        with suppress(AtollError):  # it has no status yet
            status = server.status()
            return "" if _has_table() and not status.finished else awaited_by(status)
        return "still starting the server"
    return "still loading PyTorch"


def _serve(settings: Settings, started: list[Server]) -> None:
    return_freed_memory()
    LOG.info("starting the run %s; loading PyTorch takes a few seconds", settings.run.name)
    with EndsAtOnce():
        from atoll.server.serve import Server

    server = Server(settings=settings)
    started.append(server)
    begin = time.monotonic()
    so_far = ""
    try:
        server.start()
        if settings.model.source is not None:
            folder = shlex.quote(str(settings.disk.state_dir))
            so_far = f"; to export the model so far: atoll export model.safetensors --dir {folder}"
        gc.freeze()  # otherwise a full garbage collection visits all objects of torch and stops requests for 0.2 s
        _announce(server, settings)
        _watch(server)
        seconds = time.monotonic() - begin
        server.run()  # returns once workers have downloaded the result, so the summary counts those bytes, too
        LOG.info("%s", _summary(server, seconds))
        next_step(f"atoll status --dir {shlex.quote(str(settings.disk.state_dir))}")
    except (KeyboardInterrupt, Terminated) as asked:
        server.stop()
        if server.finished:
            LOG.info("%s", _summary(server, time.monotonic() - begin))
            LOG.info(
                "stopping; to serve the result to sites that have not downloaded it yet, start the same command again"
            )
            return
        say_stopping(asked, f"stopping; to continue the run, start the same command again{so_far}")
        if isinstance(asked, KeyboardInterrupt):
            raise
    finally:
        server.stop()


def _has_table() -> bool:
    return sys.stdout.isatty() and not logs_json() and log_level() <= logging.INFO


def _announce(server: Server, settings: Settings) -> None:
    status = server.status()
    if not _has_rounds(settings):
        LOG.info("run %s (%s): only workflows; files in %s", status.name, status.run[:8], settings.disk.state_dir)
        name = settings.workflow.function or " → ".join(each.name for each in status.workflows)
        LOG.info("starting the workflow %s; start workers with a script that uses atoll.tasks", name)
        return
    if status.workflows:
        LOG.info("workflows: %s", " → ".join(each.name for each in status.workflows))
    LOG.info(
        "run %s (%s): %s, %s, model of %s, %s%s, %s; files in %s",
        status.name,
        status.run[:8],
        status.algorithm,
        status.policy,
        size(status.model_bytes),
        codecs(status),
        f", sync every {status.sync_every}" if status.sync_every else "",
        number_of(status.rounds, "round") if status.rounds else "until stopped",
        settings.exports,
    )
    dylu = "DyLU on: slower workers take fewer steps per round" if status.dylu else ""
    LOG.info("%s", "; ".join(filter(None, [streaming(status), dylu, optimizer(status)])))
    version = status.version
    if version:
        LOG.info("continuing the run at version %d", version)
    if not status.finished:
        LOG.info(
            "start a worker: %satoll worker --server %s --site NAME -- python train.py%s",
            "ATOLL_SWARM=1 " if settings.swarm.enabled else "",  # a site takes part in a swarm only if it says so
            settings.trust.address or server.url,
            _for_sites(server),
        )


def _for_sites(server: Server) -> str:
    """Return what a site needs before its worker can connect, as the end of a log line."""
    from atoll.server.http.gate import needs_credentials
    from atoll.transport.tls import is_loopback

    if needs_credentials(server.settings):
        folder = shlex.quote(str(server.settings.disk.state_dir))
        return f"; before that, invite each site: atoll invite NAME --dir {folder}"
    if not server.url.startswith("https"):
        is_here = is_loopback(server.settings.network.host) and server.settings.trust.address is None
        return "; sites on other machines need a server that listens for them: --host 0.0.0.0" if is_here else ""
    return (
        "; use a host name that the certificate contains, ATOLL_TLS_CA if you use your own authority, and "
        "ATOLL_TOKEN_FILE for the token"
    )


def _watch(server: Server) -> None:
    """Wait until the run is finished. On a terminal, show the same table as `atoll status --watch`."""
    if not _has_table():
        server.wait()
        return
    from atoll.cli.status import WATCH_S, live_table

    with live_table(server.status(), server.url) as show:
        try:
            while not server.wait(WATCH_S):
                show(server.status())
            show(server.status())
        except Terminated:
            if not select.select([], [1], [], UNREAD_S)[1]:  # after Ctrl-S, drawing waits for Ctrl-Q
                server.stop()
                os._exit(0)
            raise


def _has_rounds(settings: Settings) -> bool:
    trains = any(entry.kind == TRAIN for entry in entries_of(settings.workflow.steps))
    return settings.workflow.function is None and (trains or not settings.workflow.steps)


def awaited_by(status: status_messages.Status) -> str:
    """Return what a run waits for; empty if its status does not say."""
    if status.finished:
        return "the run is finished; its sites and its server end"
    running = next((each for each in status.workflows if each.state == "running"), None)
    if running is not None and running.kind != TRAIN:
        return f"the workflow {running.name}{f': {running.detail}' if running.detail else ' is running'}"
    if status.paused:
        return "the run is paused; `atoll resume` lets it go on"
    all_finished = all(fragment.phase == "finished" for fragment in status.fragments)
    waits = {
        each.fragment: f"round {each.round}: {awaited(each, has_times=False) or each.phase}"
        for each in status.fragments
        if each.phase != "finished" or all_finished
    }
    return _joined_texts(waits, len(status.fragments))


def _joined_texts(texts: Mapping[int, str], count: int) -> str:
    """Join the texts that say what each fragment's round waits for.

    If all `count` fragments have the same text, return it only once. Otherwise, put the fragment's number before each
    text.

    Args:
        texts: number of a fragment → its text.
        count: the number of fragments.
    """
    if count == 1 or (len(texts) == count and len(set(texts.values())) == 1):
        return next(iter(texts.values()), "")
    return "; ".join(f"fragment {fragment} {text}" for fragment, text in texts.items())


def _summary(server: Server, seconds: float) -> str:
    status = server.status()
    last = status.history[-1].metrics if status.history else {}
    rounds = _has_rounds(server.settings)
    version, refused = (
        (f" at version {status.version}", f", {number_of(status.refused, 'update')} refused") if rounds else ("", "")
    )
    parts = [
        f"finished{version} after {duration(seconds)}",
        f"{size(status.bytes_up)} received, {size(status.bytes_down)} sent",
        against_data_parallel(status),
        f"{number_of(len(status.workers), 'worker')}, {number_of(status.deaths, 'death')}{_failed(status)}{refused}",
        _missed(status) if rounds else "",
        _troubles(status),
        staleness(status.staleness),
        numbers(last),
        faults_of_evaluation(status.evaluation.failed, status.evaluation.failures) if status.evaluation else "",
        best_line(status.best) if status.best else "",
        status.stopped,
    ]
    return "; ".join(filter(None, parts))


def _failed(status: status_messages.Status) -> str:
    failed = sum(worker.state == "failed" for worker in status.workers)
    return f", {failed} failed" if failed else ""


def _missed(status: status_messages.Status) -> str:
    """Return a text that says which sites missed rounds; empty if none did.

    The text is also empty for asynchronous runs, and for runs that divide the model into several fragments.
    """
    if len(status.fragments) > 1 or not status.history or not status.history[-1].expected:
        return ""
    done = status.history[-1].round
    missed = [
        f"{each.site} took part in {each.rounds} of {number_of(done, 'round')}"
        for each in status.workers
        if each.rounds < done
    ]
    return listed(missed) if missed else ""


def _troubles(status: status_messages.Status) -> str:
    """Return a text with the numbers of retries and reconnections of all workers; empty if there were none."""
    retries = sum(worker.retries for worker in status.workers)
    joins = sum(worker.reconnections for worker in status.workers)
    return f"{number_of(retries, 'retry')}, {number_of(joins, 'reconnection')}" if retries or joins else ""
