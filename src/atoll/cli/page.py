"""`atoll page`: show the page of a run in a browser, from its server or from its state directory."""

from __future__ import annotations

import webbrowser
from contextlib import ExitStack
from typing import Annotated

import typer

from atoll.cli.status import live_status
from atoll.cli.stored_status import stored_status
from atoll.cli.text import still
from atoll.cli.which_run import RunsArgument, named_run, newest_run
from atoll.errors import UsageError
from atoll.format_text import visible
from atoll.store.caller_tokens import stored_tokens


def command(
    runs: RunsArgument = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0: any free one.")] = 0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show the page of a run: of one that runs from its server, of any other from its state directory.

    Without a RUN, it is the newest one here. Of several, it is the first one's as stored, and compares their metrics.

    Nothing in the directory changes. The address has a token: pass it on only to readers of the run.

    Raises:
        UsageError: there is no such run, or none is named and there is none here.
        StoreError: this user has no permission to read the directory.
        StateCorrupt: the journal is damaged.
    """
    found = [each for each in (map(named_run, runs) if runs else [newest_run()]) if each is not None]
    if not found:
        raise UsageError("No run is named, and there is none here.", "Name it: atoll page RUN.")
    state_dir = found[0]
    status, _ = stored_status(state_dir)

    def show(address: str) -> None:
        print(visible(address), flush=True)
        if open_:
            webbrowser.open(address)

    if len(found) == 1 and live_status(status, state_dir) is not None:
        print(f"The run {visible(status.name)} is served at {visible(status.address)}; its page:")
        token = stored_tokens(state_dir).get("reader", "")
        show(f"{status.address}/#token={token}")
        return
    others = "".join(f", beside {visible(str(each))}" for each in found[1:])
    print(
        f"The run {visible(status.name)}, as stored in {visible(str(state_dir))}{others}; loading takes a few seconds.",
        flush=True,
    )
    loads = ExitStack()

    def ready(address: str) -> None:
        loads.close()
        show(address)
        print("Ctrl-C ends this.", flush=True)

    with loads:
        loads.enter_context(still("still loading"))
        from atoll.server.http.stored_page import serve_stored

        serve_stored(found, lambda each: stored_status(each)[0], port, ready)
