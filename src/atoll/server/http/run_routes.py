"""Handlers of requests about a run and its server: status, events, numbers, health, the page, the OpenAPI document."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from atoll.protocol import run_events, status_messages
from atoll.protocol.openapi import openapi
from atoll.protocol.site_curves import SiteCurvesQuery
from atoll.server.coordinator.build_status import status_of
from atoll.server.coordinator.effective_settings import setting_shown, settings_in_effect
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.http import page_files
from atoll.server.http.caller import CALLER
from atoll.server.http.downloads import CSV, send_pieces
from atoll.server.http.event_stream import EVENT_STREAM, Streams
from atoll.server.http.gate import Gate
from atoll.server.http.run_metrics import RunMetrics
from atoll.store.reader import open_state
from atoll.store.round_summaries import Query, table_rows
from atoll.transport.serve_range import problem

STATUS_S = 0.5
"""Seconds for which the answer with the status is used again."""


class RunRoutes:
    """Handlers of requests about a run and its server, which are answered even after the run has failed."""

    def __init__(self, served: ServedRun, version: str, gate: Gate) -> None:
        self._served, self._refusals, self._streams = served, gate.refusals, Streams()
        self._status: status_messages.Status | None = None
        self._status_json, self._status_until_s, self._reading = b"", 0.0, asyncio.Lock()
        served.run.events.subscribe("the status", self._on_event)
        # most servers never need it
        self._document = functools.cache(
            lambda: openapi(version, is_open=gate.tokens.is_open, more=served.extensions.operations)
        )

    async def get_openapi(self) -> web.Response:
        """Return the description of all requests in the OpenAPI format."""
        return web.json_response(self._document())

    async def get_status(self) -> web.Response:
        """Return the status of the run, as `atoll status` shows it.

        However many clients ask, it is built at most once in `STATUS_S` seconds, and after an event that changes more
        than the progress of one site.
        """
        self._newest_status()
        return web.Response(body=self._status_json, content_type="application/json")

    def _newest_status(self) -> status_messages.Status:
        now_s = time.monotonic()
        if self._status is None or now_s >= self._status_until_s:
            self._status = status_of(self._served)
            self._status_json = self._status.model_dump_json().encode()
            self._status_until_s = now_s + STATUS_S
        return self._status

    async def get_events(
        self, query: run_events.EventQuery, request: web.Request
    ) -> run_events.EventPage | web.StreamResponse:
        """Return what happened after an event. If nothing has, wait for the next event.

        A request that accepts server-sent events gets a stream of them.

        Raises:
            Busy: too many clients follow the run.
            Gone: the server has no such event yet, or no longer has the ones that follow it.
        """
        if EVENT_STREAM in request.headers.get("Accept", ""):
            return await self._streams.send(request, self._served.run, query, CALLER.get().payer)
        return await self._served.run.events.get_events(query)

    async def get_settings(self) -> status_messages.SettingsInEffect:
        """Return the settings in effect, with their sources."""
        plan = self._served.run.plan
        found = settings_in_effect(plan.settings, plan.algorithm)
        return status_messages.SettingsInEffect(settings=[setting_shown(*each) for each in found])

    async def get_site_curves(self, query: SiteCurvesQuery) -> web.Response:
        """Return one number of each site's updates over the rounds.

        One request at a time reads them, in a thread, so that a chart of many sites does not hold up the run.

        Raises:
            BadRequest: there is no such fragment, site or range.
            StateCorrupt: a row is damaged.
        """

        def read() -> bytes:
            with open_state(self._served.run.store.directory, in_server=True) as state:
                return state.site_curves(query).model_dump_json().encode()

        async with self._reading:
            return web.Response(body=await asyncio.to_thread(read), content_type="application/json")

    async def get_updates_table(self, request: web.Request, **_: object) -> web.StreamResponse:
        """Send all updates of all rounds as CSV. A thread of its own reads them, some rounds at a time."""
        folder = self._served.run.store.directory

        @contextmanager
        def connect() -> Iterator[Query]:
            with open_state(folder, in_server=True) as state:
                yield state.rows

        pool = ThreadPoolExecutor(1)
        try:
            return await send_pieces(request, map(str.encode, table_rows(connect)), CSV, pool=pool)
        finally:
            pool.shutdown(wait=False)

    def _on_event(self, event: run_events.Happened) -> None:
        if not isinstance(event, run_events.TicketIssued | run_events.UpdateAccepted):
            self._status = None

    async def get_metrics(self) -> web.Response:
        """Return numbers about the run (`RunMetrics`) in the text format of Prometheus."""
        registry = CollectorRegistry()
        registry.register(RunMetrics(self._newest_status(), self._refusals))
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=generate_latest(registry), headers=headers)

    get_page = staticmethod(page_files.get_page)
    get_page_file = staticmethod(page_files.get_page_file)

    async def get_health(self) -> str:
        """Return `ok`. The request needs no token."""
        return "ok\n"

    async def get_readiness(self) -> web.Response:
        """Return `ready` if sites may join; else a problem that says why not. The request needs no token.

        Nothing is answered before the run is open.
        """
        run = self._served.run
        states = {
            "the run has failed": run.failed is not None,
            "the run is finished": run.finished.is_set(),
            "the run begins again": run.begins_again.is_set(),
            "the server is ending": run.is_ending,
        }
        if why := next((why for why, holds in states.items() if holds), ""):
            return problem("not_ready", f"The server is not ready: {why}.", "`atoll status` says more.")
        return web.Response(text="ready\n")
