"""A server that a test lets say something else than it does."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from kit.peers import Connection, Peer, Request

Answer = tuple[int, bytes]
"""Status and body."""
Lie = Callable[[Connection, Request, Answer], Answer | None]
"""Makes another answer of the server's own one; None: the connection has had its answer."""
PASSED_ON = ("atoll-lease", "atoll-protocol", "range", "content-type")


class LyingServer(Peer):
    """Passes every request on to a server, and changes what it answers.

    Attributes:
        lie: what becomes of an answer.
        frames: whether `lie` gets answers with a ticket as they are framed, with a version. If False, no version comes
            with a ticket, and `lie` gets the JSON text.
        bodies: path → body of the last request.
    """

    def __init__(self, url: str, lie: Lie = lambda _, __, answer: answer, *, frames: bool = False) -> None:
        self._server, self.lie, self.frames = url, lie, frames
        self.bodies: dict[str, bytes] = {}
        super().__init__(self._pass_on)

    def count(self, path: str) -> int:
        """How many requests had a path like this."""
        return sum(path in request.path for request in self.requests)

    def _pass_on(self, connection: Connection) -> None:
        while not self.ended.is_set() and (request := connection.request()):
            self.requests.append(request)
            body = connection.body(request) if "content-length" in request.headers else None
            self.bodies[request.path] = body or b""
            is_framed = not self.frames and request.path == "/v1/tickets" and b'"holds"' in (body or b"")
            if is_framed:
                body = json.dumps({**json.loads(body or b""), "holds": None}).encode()
            headers = {name: request.headers[name] for name in PASSED_ON if name in request.headers}
            asked = urllib.request.Request(self._server + request.path, body, headers, method=request.method)
            try:
                with urllib.request.urlopen(asked, timeout=30) as reply:
                    told = reply.status, reply.read()
            except urllib.error.HTTPError as error:
                told = error.code, error.read()
            if (changed := self.lie(connection, request, told)) is not None:
                status, said = changed
                connection.answer(status, framed_text(said) if is_framed and status == 200 else said)


def framed_text(text: bytes, data: bytes = b"") -> bytes:
    """The JSON text of a message as it is framed, with bytes after it."""
    return len(text).to_bytes(4, "big") + text + data


def in_place_of(path: str, answer: Callable[[], Any]) -> Lie:
    """Answer every request for this path with JSON, or with bytes, that `answer` returns."""

    def lie(_: Connection, request: Request, told: Answer) -> Answer:
        if request.path != path:
            return told
        said = answer()
        return 200, said if isinstance(said, bytes) else json.dumps(said).encode()

    return lie
