"""`atoll logs`: what happened in a run, one line an event; of a run that is over, from its state directory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from atoll import registry
from atoll.cli.control import Server, TokenFile
from atoll.cli.stored_status import admin_token, environ_of, stored_status
from atoll.cli.text import after_run, next_step, still
from atoll.cli.which_run import RunArgument, RunDir, is_served, quoted, run_folder, run_to_read, start_command
from atoll.errors import Gone, ServerUnreachable, UsageError
from atoll.format_text import duration, listed, numbers, of_fragment, visible
from atoll.protocol import routes
from atoll.store.reader import open_state
from atoll.transport.http_client import ask, server_address
from atoll.transport.tls import Token, read_token_file

if TYPE_CHECKING:
    from atoll.protocol import run_events

WAIT_S = routes.LONG_POLL_S
ENDS = ("run finished", "run failed")
GOES_ON = ("site joined", "round opened", "run resumed")
"""After its end, one of these says that the run was started again."""


def command(
    run: RunArgument = None,
    state_dir: RunDir = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens next, until the run or its server ends.")
    ] = False,
    site: Annotated[
        str | None, typer.Option(help="Only events with this site, and those of whole rounds.", show_default=False)
    ] = None,
    server: Server = None,
    token_file: TokenFile = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
) -> None:
    """Print what happened in a run, one line an event: joins, rounds and their results, refusals, warnings.

    Without RUN and --server, it is the newest run here; if there is none, that of the server at port 8512.
    """
    folder = run_to_read(run, state_dir, has_server=server is not None or token_file is not None)
    last, events = 0, list[Any]()
    if folder is not None:
        with open_state(folder) as state:
            events = list(_known(state.events()))
        last = events[-1].number if events else 0
        if site is not None and not (follow and is_served(folder)):
            _require_known(site, events)
    ended = _print(events, site, as_json=json)
    if folder is not None and (ended or not follow or not is_served(folder)):
        named = quoted(run_folder(folder))
        if follow and not ended:
            print(f"atoll: Nothing follows: no server runs. To start it: {start_command(folder)}", file=sys.stderr)
        next_step(f"atoll logs {named} --follow" if is_served(folder) and not ended else _after(folder))
        return
    address, token = _server_of(folder) if folder is not None else (server_address(server), None)
    if token_file is not None:
        token = read_token_file(token_file)
    for page in _pages(address, token, last, environ_of(folder), follow=follow):
        if _print(page, site, as_json=json):
            break
    next_step(f"atoll status --server {address}" if folder is None else _after(folder))


def _require_known(site: str, events: Iterable[Any]) -> None:
    """Check that events are of a site, which may join a run later only while it is followed.

    Raises:
        UsageError: there are none. The message names the nearest site.
    """
    known = sorted({each for event in events if event.what != "warning" for each in _sites(event) if each})
    if site not in known:
        remedy = registry.nearest(site, known, f"Its sites: {listed(known)}." if known else "No site has joined it.")
        raise UsageError(f"The run has no event of a site {site!r}.", visible(remedy))


def _after(folder: Path) -> str:
    """Return what to do after the events of a run were read: see its result, if it is over, else its state."""
    named = quoted(run_folder(folder))
    if not stored_status(folder)[0].finished:
        return f"atoll status {named}"
    return after_run(named)


def _server_of(folder: Path) -> tuple[str, Token | None]:
    """Return the address of the server of a state directory, and the admin's token there.

    Raises:
        ServerUnreachable: no server has served the run, or a simulation has.
    """
    address = stored_status(folder)[0].address
    if not address:
        raise ServerUnreachable(f"No server serves the run in {folder}.", "Leave out --follow.")
    return address, admin_token(folder)


def _pages(
    address: str, token: Token | None, after: int, environ: Mapping[str, str], *, follow: bool
) -> Iterator[list[run_events.RunEvent]]:
    """Yield the events of a server after one, page by page; with `follow`, until the server ends.

    Raises:
        ServerUnreachable: no server answers, or it has ended before the run.
    """
    from atoll.protocol.run_events import EventPage

    within, is_answered = 0, False
    while True:
        wait_s = WAIT_S if follow else 0.0
        path = f"{routes.EVENTS}?after={after}&within={within}&wait_s={wait_s}"
        try:
            with nullcontext() if follow else still(f"still waiting for the answer of {address}"):
                page = ask(address, path, EventPage, environ=environ, token=token, timeout_s=routes.CALL_TIMEOUT_S)
        except Gone:
            if not after:
                raise
            after = within = 0  # the journal was restored, or the oldest events are no longer kept
            continue
        except ServerUnreachable as error:
            if not is_answered:
                raise
            raise ServerUnreachable(
                f"The server at {address} has ended, and the run is not finished.",
                "Start the server again to continue the run, then this command.",
            ) from error
        is_answered = True
        yield page.events
        within = page.within
        after = page.events[-1].number - (1 if within else 0) if page.events else after
        if not follow and not within and after >= page.newest:
            return


def _known(events: Iterable[dict[str, object]]) -> Iterator[run_events.RunEvent]:
    """Yield the events that this version of Atoll knows."""
    from atoll.protocol.run_events import EventPage  # it takes a while

    for event in events:
        with suppress(ValidationError):
            yield EventPage.model_validate({"events": [event], "oldest": 0, "newest": 0}).events[0]


def _print(events: Iterable[run_events.RunEvent], site: str | None, *, as_json: bool) -> bool:
    """Print the events that are of a site or of the whole run. Return whether the run has ended with one of them."""
    ended = False
    for event in events:
        is_end = event.what in ENDS
        ended = is_end or (ended and event.what not in GOES_ON)  # sites leave after the end
        if site is None or site in _sites(event) or is_end:
            print(event.model_dump_json() if as_json else visible(f"{event.at}  {line(event)}"))
    sys.stdout.flush()
    return ended


def _sites(event: Any) -> list[str]:
    """Return the sites that an event is about."""
    if event.what == "round ended":
        return [*event.summary.workers, *event.summary.sat_out]
    if event.what == "warning":
        return [event.text.partition(":")[0]]
    return [*getattr(event, "expected", ()), *getattr(event, "sites", ()), getattr(event, "site", "")]


def _round(event: Any) -> str:
    """Return the name of an event's round; it names the fragment unless that is the first or only one."""
    return f"round {event.round}{of_fragment(event.fragment or None)}"


def _listed(sites: Sequence[str]) -> str:
    return listed(sites) if sites else "no site yet"


LINES: dict[str, Callable[[Any], str]] = {
    "site joined": lambda event: f"{event.site} joined{' again' * event.again}",
    "site left": lambda event: f"{event.site} {'failed' if event.reason else 'left'}",
    "site silent": lambda event: f"{event.site} is silent",
    "round opened": lambda event: f"{_round(event)} opened from version {event.version}, for {_listed(event.expected)}",
    "ticket issued": lambda event: f"{event.site} trains for {_round(event)}",
    "update accepted": lambda event: f"the update of {event.site} for {_round(event)} is accepted",
    "update refused": lambda event: f"the update of {event.site} for {_round(event)} is refused",
    "site sat out": lambda event: f"{event.site} sits out {_round(event)}",
    "round closed": lambda event: f"{_round(event)} closed with {_listed(event.sites)}",
    "round reopened": lambda event: f"{_round(event)} is open again",
    "round ended": lambda event: event.summary.line(has_fragments=event.fragment > 0),
    "version evaluated": lambda event: (
        f"version {event.version} is evaluated: {numbers(event.metrics) or 'no result'}, {duration(event.seconds)}"
    ),
    "task opened": lambda event: f"the task {event.task} is sent to {_listed(event.sites)}",
    "task answered": lambda event: f"{event.site} {'could not answer' if event.error else 'answered'} {event.task}",
    "warning": lambda event: f"warning: {event.text}",
    "run paused": lambda event: "the admin has paused the run",
    "run resumed": lambda event: "the admin lets the run go on",
    "run stopping": lambda event: "the admin has stopped the run",
    "went back": lambda event: f"the run went back from version {event.lost} to version {event.version}",
}
"""What an event is → its line, without the time, and without the reason that follows."""


def line(event: run_events.RunEvent) -> str:
    """Return an event as one line of text, without its time."""
    text = LINES[event.what](event) if event.what in LINES else f"the {event.what}"
    because = next(filter(None, (getattr(event, name, "") for name in ("reason", "error", "problem"))), "")
    return f"{text}: {because}" if because else text
