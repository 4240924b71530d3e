"""The page of a run without its server: the same files and requests, answered from a state directory.

Nothing in the directory changes. Only the holder of the token that is made here may ask, because a state directory is
private to its owner.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from aiohttp import web
from pydantic import BaseModel

from atoll.aggregation.outer_state import is_whole
from atoll.blobs.model_file import model_header, model_runs
from atoll.config import to_toml
from atoll.errors import AtollError
from atoll.protocol.openapi import OPERATIONS
from atoll.protocol.run_events import EventPage, EventQuery
from atoll.protocol.site_curves import SiteCurvesQuery
from atoll.protocol.status_messages import SettingInEffect, SettingsInEffect, Status
from atoll.server.http import page_files
from atoll.server.http.app import HTTP_LOG, RequestHandler, admit, parameters, query_of
from atoll.server.http.downloads import CSV, send_pieces
from atoll.server.http.event_stream import EVENT_STREAM, STREAM_HEADERS, message_of
from atoll.server.http.gate import Gate
from atoll.store.reader import open_state, open_version
from atoll.transport.listener import files_limit, listen, runner_of, start_listener
from atoll.transport.serve_range import problem

HOST = "127.0.0.1"
Pieces = tuple[Iterator[bytes | memoryview], int | None]
"""The pieces of a download, and the size of all of them, if it is known."""
JOURNAL_SAYS = "the run's journal; the settings that cannot change"


class StoredPage:
    """Answers the requests of the page from a state directory.

    Args:
        state_dir: the state directory.
        status: reads the run's status from there.
        compared: paths, below this page's, of the pages of runs to compare this one with.
    """

    def __init__(self, state_dir: Path, status: Callable[[Path], Status], compared: Sequence[str] = ()) -> None:
        self._dir, self._status, self._compared = state_dir, status, list(compared)
        self.get_page, self.get_page_file = page_files.get_page, page_files.get_page_file

    async def get_status(self) -> Status:
        """Return the status that was stored."""
        status = await asyncio.to_thread(self._status, self._dir)
        return status.model_copy(update={"compared": self._compared})

    async def get_events(self, query: EventQuery, request: web.Request) -> EventPage | web.StreamResponse:
        """Return what happened after an event; as server-sent events, all of it."""
        page = await asyncio.to_thread(self._events, query)
        if EVENT_STREAM not in request.headers.get("Accept", ""):
            return page
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)
        while page.events:
            number, _, text = message_of(page, query.after)
            await response.write(text)
            page = await asyncio.to_thread(self._events, EventQuery(after=number, within=page.within))
        return response

    def _events(self, query: EventQuery) -> EventPage:
        with open_state(self._dir) as state:
            return state.event_page(query)

    async def get_site_curves(self, query: SiteCurvesQuery) -> BaseModel:
        """Return one number of each site's updates over the rounds."""

        def read() -> BaseModel:
            with open_state(self._dir) as state:
                return state.site_curves(query)

        return await asyncio.to_thread(read)

    async def get_updates_table(self, request: web.Request) -> web.StreamResponse:
        """Send all updates of all rounds as CSV."""

        def pieces(stack: ExitStack) -> Iterator[bytes]:
            yield from map(str.encode, stack.enter_context(open_state(self._dir)).table_rows())

        return await self._send(request, CSV, lambda stack: (pieces(stack), None))

    async def get_model(self, version: int, request: web.Request) -> web.StreamResponse:
        """Send the model of a version as a safetensors file, the same bytes as `atoll export` writes.

        Raises:
            Gone: the directory has no such version, or none at all.
            StateCorrupt: a file of the version is damaged.
        """

        def opened(stack: ExitStack) -> Pieces:
            stored = stack.enter_context(open_version(self._dir, version, is_whole))
            header, owners = model_header(stored.schema)
            nbytes = len(header) + sum(spec.nbytes for spec in owners)
            return itertools.chain([header], model_runs(owners, stored.fragments)), nbytes

        return await self._send(request, "application/octet-stream", opened)

    @staticmethod
    async def _send(request: web.Request, kind: str, opened: Callable[[ExitStack], Pieces]) -> web.StreamResponse:
        """Send what `opened` returns. One thread opens, reads and closes it: SQLite's connection is bound to it."""
        pool, stack = ThreadPoolExecutor(1), ExitStack()
        try:
            pieces, nbytes = await asyncio.get_running_loop().run_in_executor(pool, opened, stack)
            return await send_pieces(request, pieces, kind, pool=pool, nbytes=nbytes)
        finally:
            pool.submit(stack.close)
            pool.shutdown(wait=False)

    async def get_settings(self) -> SettingsInEffect:
        """Return the settings that are fixed for the run."""

        def read() -> SettingsInEffect:
            with open_state(self._dir) as state:
                found = json.loads(state.run().settings_json)
            return SettingsInEffect(
                settings=[
                    SettingInEffect(key=key, value="" if value is None else to_toml(value), source=JOURNAL_SAYS)
                    for key, value in found.items()
                ]
            )

        return await asyncio.to_thread(read)


def stored_app(page: StoredPage, gate: Gate) -> web.Application:
    """Return the application that answers the requests of the page, and no others.

    Args:
        page: answers them.
        gate: has the token.
    """
    app = web.Application()
    for operation in OPERATIONS:
        method: Callable[..., Awaitable[BaseModel | web.StreamResponse]] | None = getattr(page, operation.name, None)
        if method is not None:
            app.router.add_route(operation.method, operation.path, _handler(operation.name, method, gate))
    return app


def _handler(name: str, method: Callable[..., Awaitable[BaseModel | web.StreamResponse]], gate: Gate) -> RequestHandler:
    operation = next(each for each in OPERATIONS if each.name == name)

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            admit(gate, request, operation, {})
            arguments = parameters(request)
            if operation.query is not None:
                arguments["query"] = query_of(operation.query, request.query)
            if operation.streams or operation.reply is bytes:
                arguments["request"] = request
            result = await method(**arguments)
        except AtollError as error:
            return problem(error.code, error.message, error.remedy)
        if isinstance(result, web.StreamResponse):
            return result
        return web.Response(body=result.model_dump_json().encode(), content_type="application/json")

    return handle


def serve_stored(
    state_dirs: Sequence[Path], status: Callable[[Path], Status], port: int, on_ready: Callable[[str], None]
) -> None:
    """Serve the page of a state directory on loopback, until the process is interrupted.

    Args:
        state_dirs: the state directory, and those of runs to compare it with; they do not change.
        status: reads a run's status from its directory.
        port: the port; 0: any free one.
        on_ready: called with the page's address, which has the token.

    Raises:
        PortInUse: the port cannot be used.
    """
    token = secrets.token_urlsafe(24)
    compared = {f"runs/{number}/": each for number, each in enumerate(state_dirs[1:], 1)}
    app = stored_app(StoredPage(state_dirs[0], status, list(compared)), Gate(token))
    for path, other in compared.items():
        app.add_subapp(f"/{path}", stored_app(StoredPage(other, status), Gate(token)))
    listener = listen(HOST, [port], setting="--port", remedy="Choose another port; 0: any free one.")

    async def serve() -> None:
        runner = runner_of(app, HTTP_LOG, read_bytes=2**16, linger_s=0.5)
        accepting = await start_listener(listener, runner, None, files=files_limit(), idle_timeout_s=60.0)
        try:
            on_ready(f"http://{HOST}:{listener.getsockname()[1]}/#token={token}")
            await asyncio.Event().wait()
        finally:
            await accepting.close()
            await runner.cleanup()

    asyncio.run(serve())
