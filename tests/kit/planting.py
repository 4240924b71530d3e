"""A proxy that plants a text at one place of one answer of a server.

with planting(server) as proxy:
    ...                                                      # a site at proxy.url, whose answers show the places
    plant(proxy.url, "get_run", ["codec"], "evil:Thing")     # in the next such answer
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import atoll
from atoll.protocol.openapi import OPERATIONS

Place = Sequence[str | int]
KEY = "a key that no message has"
"""Place in a table: the text becomes a further key of it."""


def places(value: Any, where: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], bool]]:
    """Where a text can be planted into a JSON value, and whether a text may be right there."""
    if isinstance(value, dict):
        yield (*where, KEY), True
        for key, item in value.items():
            yield from places(item, (*where, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*where, 0))
    else:
        yield where, not isinstance(value, int | float)


def planted(value: Any, where: Place, text: str) -> Any:
    """The value with the text at a place.

    Raises:
        KeyError, IndexError, TypeError: the value does not have the place.
    """
    if not where:
        return [text] if isinstance(value, list) else text
    key, *rest = where
    if key == KEY:
        return {**value, text: text}
    if isinstance(value, dict):
        return {**value, key: planted(value[key], rest, text)}
    return [planted(value[0], rest, text), *value[1:]]


class Planter(ThreadingHTTPServer):
    """The proxy.

    Attributes:
        url: its address.
        count: number of planted texts.
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url, self.port, self.count = f"http://127.0.0.1:{self.server_port}", port, 0
        self._found: dict[str, dict[tuple[str | int, ...], bool]] = {}  # operation → places
        self._next: tuple[str, Place, Any] | None = None
        self._guard = threading.Lock()

    def plant(self, what: tuple[str, Place, Any] | None) -> list[tuple[str, Place, bool]]:
        """Plant this into the next answer that has the place. Return all places so far."""
        with self._guard:
            self._next = what
            return [(name, where, text) for name, them in self._found.items() for where, text in them.items()]

    def changed(self, method: str, path: str, body: bytes) -> bytes:
        """The server's answer, with what is to be planted there."""
        operation, reply = _operation(method, path.partition("?")[0])
        if not hasattr(reply, "model_validate_json"):
            return body
        answer = reply.model_validate_json(body).model_dump(mode="json")  # with every field that the server left out
        with self._guard:
            self._found.setdefault(operation, {}).update(places(answer))
            if self._next is None or self._next[0] != operation:
                return body
            try:
                answer = planted(answer, *self._next[1:])
            except (KeyError, IndexError, TypeError):
                return body  # a later one may have the place
            self._next, self.count = None, self.count + 1
        return json.dumps(answer).encode()


def _operation(method: str, path: str) -> tuple[str, Any]:
    found = (each for each in OPERATIONS if each.method == method)
    named = {each.name: each.reply for each in found if re.fullmatch(re.sub(r"{\w+}", "[^/]+", each.path), path)}
    return next(iter(named.items()), ("", None))


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True  # else each answer waits for an ACK of its head
    server: Planter

    def log_message(self, *_: Any) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self._upstream = http.client.HTTPConnection("127.0.0.1", self.server.port)

    def finish(self) -> None:
        self._upstream.close()
        super().finish()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/plant":
            return self._answer(200, {}, json.dumps(self.server.plant(json.loads(body))).encode())
        self._upstream.request(self.command, self.path, body or None, dict(self.headers.items()))
        reply = self._upstream.getresponse()
        data = reply.read()
        if reply.status == 200:
            data = self.server.changed(self.command, self.path, data)
        kept = {key: value for key, value in reply.getheaders() if key not in ("Content-Length", "Transfer-Encoding")}
        return self._answer(reply.status, kept, data)

    def _answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response_only(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_DELETE = _pass_on  # noqa: N815 (names of the standard library)


@contextmanager
def planting(server: atoll.Server) -> Iterator[Planter]:
    """A proxy in front of a server."""
    proxy = Planter(int(server.url.rpartition(":")[2]))
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def plant(url: str, what: tuple[str, Place, Any] | None) -> list[tuple[str, Place, bool]]:
    """`Planter.plant`, from another process."""
    request = urllib.request.Request(f"{url}/plant", json.dumps(what).encode(), method="POST")
    with urllib.request.urlopen(request) as reply:
        found: list[tuple[str, Place, bool]] = json.loads(reply.read())
    return found
