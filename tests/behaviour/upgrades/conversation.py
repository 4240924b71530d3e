"""What a worker and a server have said to each other, as a file; and the same requests sent to another server."""

from __future__ import annotations

import base64
import http.client
import json
import lzma
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsonschema
from harness.hostile_answers import Truth
from harness.hostile_server import operation_of, right
from kit.peers import Connection, Peer

from atoll.protocol import routes
from atoll.protocol.read_message import LENGTH_BYTES

_OF_THE_CONNECTION = {"host", "connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}


@dataclass
class Exchange:
    """A request and its answer. Bodies are in base64."""

    method: str
    path: str
    headers: dict[str, str]
    body: str
    status: int = 0
    kind: str = ""
    answer: str = ""

    @property
    def message(self) -> Any:
        """The JSON value of the answer; None if it has none."""
        return message_in(self.kind, base64.b64decode(self.answer))


def message_in(kind: str, body: bytes) -> Any:
    """Return the JSON value in an answer, also in a framed one; None if it has none."""
    if kind.startswith("application/json"):
        return json.loads(body)
    if kind == "application/octet-stream" and body[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{":
        return json.loads(body[LENGTH_BYTES : LENGTH_BYTES + int.from_bytes(body[:LENGTH_BYTES], "big")])
    return None


class Recording(Peer):
    """Passes requests on to a server, and keeps them and its answers."""

    def __init__(self, port: int) -> None:
        self.exchanges: list[Exchange] = []
        self._target, self._lock = port, threading.Lock()
        super().__init__(self._pass_on)

    def _pass_on(self, connection: Connection) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self._target, timeout=60)
        while not self.ended.is_set() and (request := connection.request()):
            body = connection.body(request) if "content-length" in request.headers else b""
            headers = {name: value for name, value in request.headers.items() if name not in _OF_THE_CONNECTION}
            exchange = Exchange(request.method, request.path, headers, base64.b64encode(body).decode())
            with self._lock:
                self.exchanges.append(exchange)
            upstream.request(request.method, request.path, body, headers)
            answer = upstream.getresponse()
            data = answer.read()
            exchange.status, exchange.kind = answer.status, answer.headers.get("Content-Type", "")
            exchange.answer = base64.b64encode(data).decode()
            kept = tuple(each for each in answer.getheaders() if each[0].lower() not in _OF_THE_CONNECTION)
            connection.sock.sendall(right(Truth("", answer.status, kept, data)))


def save(path: Path, exchanges: list[Exchange], document: dict[str, Any]) -> None:
    """Write a conversation, with what the worker's own OpenAPI document says of the answers that it reads."""
    text = json.dumps({"exchanges": [asdict(each) for each in exchanges], "document": document}, sort_keys=True)
    path.write_bytes(lzma.compress(text.encode()))


def load(path: Path) -> tuple[list[Exchange], dict[str, Any]]:
    """Return a conversation, and the OpenAPI document of its worker."""
    found = json.loads(lzma.decompress(path.read_bytes()))
    return [Exchange(**each) for each in found["exchanges"]], found["document"]


def replayed(exchanges: list[Exchange], url: str) -> Iterator[tuple[Exchange, int, Any]]:
    """Send the requests of a worker to another server. Yield each with the status and the message of the new answer.

    What the recorded server has issued at random, the run's id and the lease, is replaced by what this one issues.
    """
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    issued: dict[str, str] = {}
    for exchange in exchanges:
        body = base64.b64decode(exchange.body)
        headers = dict(exchange.headers)
        for old, new in issued.items():
            body = body.replace(old.encode(), new.encode())
            headers = {name: value.replace(old, new) for name, value in headers.items()}
        connection.request(exchange.method, exchange.path, body, headers)
        answer = connection.getresponse()
        message, old_message = message_in(answer.headers.get("Content-Type", ""), answer.read()), exchange.message
        for path, field in ((routes.RUN, "run"), (routes.WORKERS, "lease")):
            if exchange.path == path and answer.status == 200:
                issued[old_message[field]] = message[field]
        yield exchange, answer.status, message
    connection.close()


def require_readable(exchange: Exchange, status: int, message: Any, document: dict[str, Any]) -> None:
    """Check that a worker with this OpenAPI document accepts an answer: it refuses fields that it does not know."""
    name = operation_of(exchange.method, exchange.path)
    described = next(
        operation
        for path in document["paths"].values()
        for operation in path.values()
        if operation["operationId"] == name
    )
    content = described["responses"].get(str(status), _RECEIPT).get("content", {})
    if message is not None and "application/json" in content:
        schema = {**content["application/json"]["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(message)


_RECEIPT = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Receipt"}}}}
"""The answer to the last part of an update, if the message that it is complete comes with the part."""
