"""Server-sent events: the events of a run as they happen, over one answer that ends with the run.

Each message is an `EventPage` as JSON, and its id is the number of the last event that is complete in it. If the
connection breaks, the client asks again with `after` at that number.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping

from aiohttp import web

from atoll.errors import AtollError, Busy
from atoll.protocol.routes import LONG_POLL_S
from atoll.protocol.run_events import EventPage, EventQuery
from atoll.server.coordinator.run_core import RunCore
from atoll.transport.request_body import break_off

EVENT_STREAM = "text/event-stream"
STREAM_HEADERS: Mapping[str, str] = {
    "Content-Type": EVENT_STREAM,
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",
}
PAUSE_S = 0.5
"""Least seconds between two messages of a stream: events of this time travel together."""


class Streams:
    """How many streams a server sends at present, and to which callers."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()
        self._newest = ((0, 0, 0), (0, 0, b""))

    async def send(self, request: web.Request, run: RunCore, query: EventQuery, caller: str) -> web.StreamResponse:
        """Answer a request with the events after a number, until the run ends or the client goes.

        Args:
            request: the request.
            run: the run.
            query: the number.
            caller: the site that has shown its credential, or else the address.

        Raises:
            Busy: too many clients follow the run.
            Gone: the server has no such event yet, or no longer has the ones that follow it.
        """
        most = run.settings.limits.event_streams
        if self._open.total() >= most or self._open[caller] >= most // 4:
            raise Busy(
                f"{self._open.total()} clients follow this run already, {self._open[caller]} of {caller} "
                f"(limits.event_streams = {most}).",
                "Try again later, or ask without a stream.",
            )
        number, within, text = message_of(run.events.page(query), query.after)
        self._open[caller] += 1
        try:
            response = web.StreamResponse(headers=STREAM_HEADERS)
            await response.prepare(request)
            while True:
                async with asyncio.timeout(run.settings.network.idle_timeout_s):  # else the client reads nothing
                    await response.write(text)
                run.watched_s = time.monotonic()
                newest = await run.events.wait_beyond(number, 0.0 if within else LONG_POLL_S)
                if newest <= number and run.events.has_ended:
                    break
                number, within, text = self._next(run, number, within, newest)
                if number >= newest:
                    await asyncio.sleep(PAUSE_S)
        except (AtollError, TimeoutError):  # the answer has begun: the client asks again, and is then told why
            break_off(request)
        finally:
            self._open[caller] -= 1
            self._open += Counter()  # without those that have none
        return response

    def _next(self, run: RunCore, number: int, within: int, newest: int) -> tuple[int, int, bytes]:
        """Return the next message. Streams at the same event share it."""
        key = number, within, newest
        if key != self._newest[0]:
            page = run.events.page(EventQuery(after=number, within=within))
            self._newest = key, message_of(page, number)
        return self._newest[1]


def message_of(page: EventPage, after: int) -> tuple[int, int, bytes]:
    """Return a page as a message of a stream.

    Args:
        page: the events after `after`; without any, the message is a comment, which shows that the server is there.
        after: number of the last event before them.

    Returns:
        The number of the last event that is complete in the page; how many sites of the one after it were sent; the
        message.
    """
    if not page.events:
        return after, 0, b":\n\n"
    number = page.events[-1].number - (page.within > 0)
    return number, page.within, f"id: {number}\ndata: {page.model_dump_json()}\n\n".encode()
