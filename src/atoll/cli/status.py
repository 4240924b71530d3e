"""`atoll status`: show the state of a run as a table, lines of text or JSON."""

from __future__ import annotations

import json as json_module
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.stored_status import admin_token, environ_of, stored_status
from atoll.cli.text import (
    against_data_parallel,
    aligned,
    awaited,
    best_line,
    codecs,
    duration,
    evaluation_line,
    next_step,
    number_of,
    numbers,
    optimizer,
    size,
    staleness,
    still,
    streaming,
    task_line,
    task_totals,
    time_left,
    workflow_lines,
)
from atoll.cli.which_run import (
    RunArgument,
    RunDir,
    RunState,
    is_served,
    named_run,
    newest_run,
    quoted,
    require_one,
    run_folder,
    start_command,
    state_of,
)
from atoll.errors import AtollError, ServerUnreachable
from atoll.format_text import visible
from atoll.protocol import routes, status_messages
from atoll.transport.http_client import ask, server_address
from atoll.transport.tls import Token, read_token_file

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Fetch = Callable[[], status_messages.Status]
"""Asks a server for its status."""
WATCH_S = 1.0
ROUNDS_SHOWN = 5
AWAY_S = 60.0
"""Seconds without an answer after which `--watch` ends: the server is taken for dead."""
AWAY = f"Asking again every second, for at most {AWAY_S:g} s; Ctrl-C stops this."
ROWS = 40
"""Most workers in lines of text; a terminal shows as many as it has lines for, at least `LEAST_ROWS`."""
LEAST_ROWS = 8


def command(
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Annotated[
        str | None, typer.Option(help="Server address. Default: ATOLL_SERVER, else port 8512 here.", show_default=False)
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print the status as JSON; with --watch, one line for each answer.")
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help=f"Ask again every second, until the run has ended, or its server is away for {AWAY_S:g} s."
        ),
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a token, such as a copy of the server's reader.token. Default: ATOLL_TOKEN, or the file of "
            "ATOLL_TOKEN_FILE; for a RUN, the admin's token in its state directory.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show the workers and rounds of a run, and for which sites a round waits, how long and why.

    If no server answers, the status is read from the state directory of RUN. Without RUN and --server, it is the run of
    the server at port 8512 here; if none answers there, the newest run here.
    """
    require_one(run, state_dir, has_server=server is not None or token_file is not None)
    if (found := named_run(run, state_dir)) is not None:
        _show_run(found, json=json, watch=watch)
        return
    address = server_address(server)
    fetch = _asking(address, None if token_file is None else read_token_file(token_file))
    try:
        with still(f"still waiting for the answer of {address}"):
            status = fetch()
    except ServerUnreachable as error:
        named = server or os.environ.get("ATOLL_SERVER")
        if not (named or watch or error.is_other) and (newest := newest_run(error.message)):
            _show_run(newest, json=json, watch=False)
            return
        if not watch or error.is_other:
            raise ServerUnreachable(
                error.message, f"{error.remedy} To see a run that is over, name it: atoll status RUN.".strip()
            ) from error
        status = _ask_until_answered(fetch)
    _show(status, address, fetch if watch else None, f" --server {address}", json=json)


def _show_run(state_dir: Path, *, json: bool, watch: bool) -> None:
    """Show a run by its state directory: from its server if that answers, else as it is stored."""
    stored, token = stored_status(state_dir)[0], admin_token(state_dir)
    if not watch or not stored.address or _asked_by(stored, token) is None:
        _show_stored(state_dir, json=json)
        return
    fetch = _asking(stored.address, token, state_dir)
    _show(fetch(), stored.address, fetch, f" {quoted(run_folder(state_dir))}", json=json)


def _show(status: status_messages.Status, address: str, fetch: Fetch | None, named: str, *, json: bool) -> None:
    """Show the status of a server; with `fetch`, again and again until the run has ended."""
    if sys.stdout.isatty() and not json:
        _on_terminal(status, address, fetch)
    else:
        _print(status, address, state_of(status, is_served=True), json=json, is_line=fetch is not None)
        while fetch is not None and not (status.finished or status.failed):
            time.sleep(WATCH_S)
            status = _ask_until_answered(fetch)
            if not json:
                print()
            _print(status, address, state_of(status, is_served=True), json=json, is_line=True)
    is_over = fetch is not None or status.finished or status.failed
    next_step(f"atoll export model.safetensors{named}" if is_over else f"atoll status{named} --watch")


def _print(status: status_messages.Status, address: str, state: RunState, *, json: bool, is_line: bool) -> None:
    """Print a status as lines of text, or as JSON with the state of the run."""
    if json:
        found = {"state": state} | json_module.loads(status.model_dump_json())
        print(json_module.dumps(found, indent=None if is_line else 2), flush=True)
    else:
        print("\n".join(plain(status, address)), flush=True)


def _show_stored(state_dir: Path, *, json: bool) -> None:
    """Print the status of the run in a state directory: from its server if that answers, else the stored status.

    The server's address is read from the stored status, and the admin's token from the directory.
    """
    status, saved_at = stored_status(state_dir)
    named = quoted(run_folder(state_dir))
    with still(f"still waiting for the answer of {status.address}"):
        live = live_status(status, state_dir)
    state = state_of(live or status, is_served=live is not None or is_served(state_dir))
    if live is not None:
        status, source = live, status.address
        then = f"atoll status {named} --watch"
    else:
        when = f"{datetime.fromtimestamp(saved_at):%Y-%m-%d %H:%M:%S}, {duration(max(0.0, time.time() - saved_at))} ago"
        source = f"{state_dir} (stored at {when}; no server answers)"
        is_over = state in ("finished", "stopped")
        then = f"atoll export model.safetensors {named}" if is_over else start_command(state_dir)
        if not json:
            status = status.model_copy(update={"workers": list(map(_at_that_time, status.workers))})
    if sys.stdout.isatty() and not json:
        _on_terminal(status, source, None)
    else:
        _print(status, source, state, json=json, is_line=False)
    next_step(then)


def _at_that_time(worker: status_messages.WorkerStatus) -> status_messages.WorkerStatus:
    """Return a worker of a stored status with the state that it had: whether it is still alive is not known."""
    return worker.model_copy(update={"state": "alive then"}) if worker.state == "alive" else worker


def live_status(stored: status_messages.Status, state_dir: Path) -> status_messages.Status | None:
    """Return the status of the server that runs on a state directory; None if none answers."""
    return _asked_by(stored, admin_token(state_dir)) if stored.address else None


def _asked_by(stored: status_messages.Status, token: Token | None) -> status_messages.Status | None:
    """Ask the server at the address in a stored status. Return its status; None if this run's server does not answer.

    If the server there refuses to answer, or another program answers, print the error, too.
    """
    try:
        live = _asking(stored.address, token, Path(stored.state_dir) if stored.state_dir else None)()
    except AtollError as error:
        if not isinstance(error, ServerUnreachable) or error.is_other:  # for example, a refused certificate
            print(f"atoll: the server at {stored.address} refuses to answer: {error}", file=sys.stderr)
        return None
    return live if live.run == stored.run else None


def _asking(address: str, token: Token | None, state_dir: Path | None = None) -> Fetch:
    environ = environ_of(state_dir)
    return partial(ask, address, routes.STATUS, status_messages.Status, environ=environ, token=token)


def _ask_until_answered(fetch: Fetch) -> status_messages.Status:
    """Ask the server for its status every second until the server answers, because it may be started later.

    Raises:
        ServerUnreachable: it has not answered for `AWAY_S` seconds.
    """
    is_logged, until_s = False, time.monotonic() + AWAY_S
    while True:
        try:
            return fetch()
        except ServerUnreachable as error:
            _require_patience(error, until_s)
            if not is_logged:
                print(f"atoll: {visible(error.message)} {AWAY}", file=sys.stderr, flush=True)
            is_logged = True
        time.sleep(WATCH_S)


def _require_patience(error: ServerUnreachable, until_s: float) -> None:
    """Raise the error of a server that is away, if this time is over."""
    if time.monotonic() >= until_s:
        raise ServerUnreachable(
            f"{error.message} It has been away for {AWAY_S:g} s.",
            "See its log, and start it again; `atoll status --dir` shows what it has stored.",
        ) from error


def _on_terminal(status: status_messages.Status, address: str, fetch: Fetch | None) -> None:
    """Draw the status on a terminal, and again every second if `fetch` is given."""
    from rich.console import Console

    if fetch is None:
        console = Console()
        console.print(table(status, address, console.width))
        return
    with live_table(status, address) as show:
        until_s = time.monotonic() + AWAY_S
        while not (status.finished or status.failed):
            time.sleep(WATCH_S)
            try:
                status = fetch()
                until_s = time.monotonic() + AWAY_S
                show(status)
            except ServerUnreachable as error:
                show(status, f"{error.message} {AWAY}")
                _require_patience(error, until_s)


@contextmanager
def live_table(
    status: status_messages.Status, address: str, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """Draw the status table on a terminal and keep it below all printed lines.

    Yields:
        The function `show(status, trouble="")`, which redraws the table, and prints `trouble` below it in red.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = console or Console()

    def view_of(status: status_messages.Status) -> RenderableType:
        return table(status, address, console.width, console.height)

    with Live(view_of(status), console=console, auto_refresh=False) as live:

        def show(status: status_messages.Status, trouble: str = "") -> None:
            view = view_of(status)
            live.update(Group(view, Text(trouble, style="red")) if trouble else view, refresh=True)

        yield show


COLUMNS = (
    "site",
    "state",
    "doing",
    "step",
    "steps/s",
    "rounds",
    "trained",
    "waited",
    "weight",
    "version",
    "stale",
    "up",
    "down",
    "retries",
    "heard",
    "metrics",
)


MOST_IMPORTANT = (
    *("site", "state", "step", "waited", "rounds", "doing", "metrics", "trained", "heard"),
    *("weight", "version", "stale", "steps/s", "up", "down", "retries"),
)
"""The order in which columns get a place on a terminal that is too narrow for all."""
FOLDED, FOLD_CHARS = ("doing", "metrics"), 24
"""Columns with texts that may be broken into several lines, and the width from which on they may be."""


def picked(status: status_messages.Status, most: int) -> tuple[list[status_messages.WorkerStatus], str]:
    """Return at most `most` workers in their order, and a line about the others; empty if there are none.

    Those that need attention come first: dead, failed or missing ones, and those that a round waits for.
    """
    workers = list(status.workers)
    if len(workers) <= most:
        return workers, ""
    awaited_sites = {missing.site for fragment in status.fragments for missing in fragment.waiting_for}
    by_need = sorted(workers, key=lambda each: each.state == "alive" and each.site not in awaited_sites)
    chosen = {each.site for each in by_need[:most]}
    states = Counter(each.state for each in workers if each.site not in chosen)
    rest = ", ".join(f"{count} {state}" for state, count in states.most_common())
    return [each for each in workers if each.site in chosen], (
        f"and {len(workers) - most} more: {rest} (atoll status --json has all)"
    )


def columns_for(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return the columns of a table that fit into `width` characters, in their order; at least the sites' names."""
    shown, rest = [0], width - max(len(row[0]) for row in rows)
    for name in MOST_IMPORTANT[1:]:
        column = COLUMNS.index(name)
        needs = max(len(row[column]) for row in rows)
        rest -= 2 + (min(needs, FOLD_CHARS) if name in FOLDED else needs)
        if rest < 0:
            break
        shown.append(column)
    return sorted(shown)


def worker_row(worker: status_messages.WorkerStatus) -> list[str]:
    """Return the cells of one worker, in the order of `COLUMNS`. A dash stands for an unknown or meaningless value.

    `trained`, `waited` and `weight` are those of the site's last counted update, and so are the metrics, unless its
    process reports newer ones. `in all` is since the server's start. Steps are unknown if the script counts none.
    Staleness has a meaning only while a site trains, submits or pulls: a site that does none of these will get the
    newest version next, or none.
    """
    is_training = worker.state.startswith("alive") and worker.doing.startswith(("training", "submitting", "pulling"))
    pace = f"{worker.steps_per_s:.2f}" + (f" (H {worker.local_steps})" if worker.local_steps else "")
    cells = [
        worker.site,
        worker.state,
        worker.doing,
        *((str(worker.step), pace) if worker.step else ("-", "-")),
        str(worker.rounds),
        duration(worker.last.train_seconds) if worker.last else "-",
        f"{duration(worker.last.wait_seconds)} (in all {duration(worker.waited_s)})" if worker.last else "-",
        f"{worker.last.weight:g}" if worker.last else "-",
        str(worker.version),
        str(worker.staleness) if is_training else "-",
        size(worker.bytes_up),
        size(worker.bytes_down),
        f"{worker.retries}"
        + (f" (+{number_of(worker.reconnections, 'reconnection')})" if worker.reconnections else ""),
        f"{duration(worker.last_heartbeat_s)} ago" if worker.heard else "none since the server restarted",
        worker.error or numbers(worker.metrics or (worker.last.metrics if worker.last else {})),
    ]
    return [visible(cell) for cell in cells]


def headline(status: status_messages.Status, address: str) -> list[str]:
    """Return the lines about the run as a whole."""
    state = state_of(status, is_served=not status.stored)
    end = f", {state.upper()}" if state != "running" else ""
    run = f"run {status.run[:8]}, epoch {status.epoch}{end}"
    if status.model_bytes and not status.algorithm:  # the saved status is missing
        lines = [f"{status.name} at {address}: model {size(status.model_bytes)}, {run}"]
    elif status.model_bytes:
        lines = [f"{status.name} at {address}: {status.algorithm}, {status.policy}, {run}", *_of_training(status)]
    else:
        lines = [f"{status.name} at {address}: no model, {run}, up {duration(status.uptime_s)}"]
    if status.headline is not None:
        todo = f" Next: {status.headline.command}" if status.headline.command else ""
        lines.append(f"{status.headline.text}{todo}")
    if status.failed and status.failed not in (status.headline.text if status.headline else ""):
        lines.append(f"the run has failed: {status.failed}")
    lines += workflow_lines(status.workflows)
    if status.tasks:
        lines.append(task_totals(status.tasks))
    for fragment in status.fragments if status.model_bytes else ():
        waiting = awaited(fragment)
        name = f"fragment {fragment.fragment}: " if len(status.fragments) > 1 else ""
        lines.append(f"{name}version {fragment.version}, {fragment.phase}{f'; {waiting}' if waiting else ''}")
        if fragment.place is not None:
            lines.append(f"{name}{placed(fragment.place)}")
    return [visible(line) for line in (*lines, *(f"warning: {warning}" for warning in status.warnings))]


def _of_training(status: status_messages.Status) -> list[str]:
    durable = f", durable version {status.durable_version}" if status.durable_version is not None else ""
    every = f"sync every {status.sync_every}, " if status.sync_every else ""
    lines = [
        f"model {size(status.model_bytes)}, {codecs(status)}, {every}"
        f"rounds {f'{status.rounds} in all' if status.rounds else 'until stopped'}, up {duration(status.uptime_s)}"
        f"{f', {time_text}' if (time_text := time_left(status.left_s)) else ''}",
        f"{size(status.bytes_up)} received, {size(status.bytes_down)} sent, {number_of(status.deaths, 'death')}, "
        f"{number_of(status.refused, 'update')} refused, durability {status.durability}{durable}",
    ]
    if compared := against_data_parallel(status):
        lines.append(compared)
    if streams := streaming(status):
        lines.append(streams)
    if status.outer:
        behind = staleness(status.staleness)
        lines.append(f"{optimizer(status)}{'; ' + behind if behind else ''}")
    if status.best is not None:
        lines.append(best_line(status.best))
    if status.evaluation is not None and (evaluated := evaluation_line(status.evaluation)):
        lines.append(evaluated)
    return lines


def placed(place: status_messages.PlaceStatus) -> str:
    """Return a text that says which workers of a swarm aggregate, check and store a fragment of the model."""
    there = ", ".join(place.collected) or "no update yet"
    parts = [
        f"aggregated by {place.aggregator}, which has {there}" if place.aggregator else "aggregated by no worker now",
        f"checked by {place.checker}" if place.checker else "",
        f"newest version at {', '.join(place.holders)}" if place.holders else "newest version at no worker",
    ]
    return "; ".join(filter(None, parts))


def plain(status: status_messages.Status, address: str) -> list[str]:
    """Return the status as lines of text with aligned columns."""
    workers, rest = picked(status, ROWS)
    rows = aligned([COLUMNS, *map(worker_row, workers)])
    body = [*rows, *filter(None, [rest])] if workers else ["no worker has joined yet"]
    return [*headline(status, address), *body, *latest(status)]


def latest(status: status_messages.Status) -> list[str]:
    """Return the lines about the last rounds, then those about the last tasks."""
    count = len(status.fragments)
    rounds = [summary.line(has_fragments=count > 1) for summary in status.history[-ROUNDS_SHOWN:]]
    return [visible(line) for line in (*rounds, *(task_line(task) for task in status.sent[-ROUNDS_SHOWN:]))]


def table(status: status_messages.Status, address: str, width: int, height: int | None = None) -> RenderableType:
    """Return the status as a table for the package rich: lines about the run, workers, and the last rounds.

    A narrow terminal has fewer columns. The name of a site is never cut: a longer one is broken into several lines.

    Args:
        status: the status.
        address: address of the server.
        width: width of the terminal in characters.
        height: its height in lines; None: as many workers as in lines of text.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    colours = {"alive": "green", "dead": "red", "failed": "red", "left": "dim"}
    grid = Table(box=None, pad_edge=False, header_style="bold")
    lines, ends = headline(status, address), latest(status)
    used = sum(len(line) // width + 1 for line in (*lines, *ends)) + 5
    most = ROWS if height is None else max(LEAST_ROWS, height - used)
    workers, rest = picked(status, most)
    rows = list(map(worker_row, workers))
    shown = columns_for([COLUMNS, *rows], width)
    for column in (COLUMNS[each] for each in shown):
        left = column in ("site", "state", "doing", "metrics")
        folds = column in FOLDED or len(shown) == 1
        grid.add_column(column, justify="left" if left else "right", overflow="fold", no_wrap=not folds)
    for worker, row in zip(workers, rows, strict=True):
        cells = [Text(row[each]) for each in shown]
        if len(cells) > 1:
            cells[1].stylize(colours.get(worker.state, ""))
        grid.add_row(*cells)
    hidden = len(COLUMNS) - len(shown)
    narrow = f"{hidden} columns need a wider terminal" if hidden and workers else ""
    return Group(
        Text(lines[0], style="bold"),
        *map(Text, lines[1:]),
        grid if status.workers else Text("no worker has joined yet", style="dim"),
        *(Text(line, style="dim") for line in filter(None, [rest, narrow, *ends])),
    )
