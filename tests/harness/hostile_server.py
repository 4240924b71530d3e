"""A hostile server: it answers as a true one does, except where a plan says otherwise.

    with Recorder(server.port) as recorder:
        site(recorder.url)                        # a true run, whose answers are kept
    with HostileServer(recorder.tape, plan) as hostile:
        site(hostile.url)                         # the same, and one of the answers is wrong

A tape has each answer of an `atoll.Server` to the requests of one site. Requests come again in each run, for the site
and its model are the same. So a run against a tape needs no server, and begins at the same state each time.
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kit.peers import Connection, Peer, Request

from atoll.protocol import messages
from atoll.protocol.openapi import HEX_DIGITS, OPERATIONS
from harness.hostile_answers import KEEP, RESET, Answer, Truth, pieces, right

PATIENCE_S = 1.0
"""`ATOLL_GIVE_UP_S` of the sites, and the other times that they may wait where they can be chosen."""
STAY_S = 2.5 * PATIENCE_S
"""For so long after the first wrong answer, a plan that stays gives wrong answers. Then the truth follows."""

_OF_THE_CONNECTION = {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
_GONE = messages.Problem(code="gone", message="The tape has no answer.").model_dump_json().encode()

Key = tuple[str, str, str, str]
"""Method, path, range and fragment of a request."""


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(
        re.sub(r"\\{(\w+)\\}", lambda found: f"[0-9a-f]{{{HEX_DIGITS.get(found[1], '1,20')}}}", re.escape(path))
    )


_PATTERNS = [(operation.name, operation.method, _pattern(operation.path)) for operation in OPERATIONS]


def operation_of(method: str, path: str) -> str:
    """Return the name of the operation of a request; empty for none."""
    return next((name for name, verb, pattern in _PATTERNS if verb == method and pattern.fullmatch(path)), "")


@dataclass
class Tape:
    """The answers of a true server to one site.

    Attributes:
        port: where the site found the server. Addresses with it are replaced in messages.
        truths: all of them, oldest first.
        answers: key of a request → its answers; the last one is repeated.
    """

    port: int = 0
    truths: list[Truth] = field(default_factory=list)
    answers: dict[Key, list[Truth]] = field(default_factory=dict)

    def add(self, key: Key, truth: Truth) -> None:
        """Append an answer."""
        self.truths.append(truth)
        self.answers.setdefault(key, []).append(truth)

    def count(self, operation: str) -> int:
        """Return how often an operation was asked for."""
        return sum(truth.operation == operation for truth in self.truths)

    @property
    def operations(self) -> list[str]:
        """All operations that were asked for, in the order of their first request."""
        return [*dict.fromkeys(truth.operation for truth in self.truths)]


@dataclass(frozen=True)
class Strike:
    """Where wrong answers come in a run.

    Attributes:
        operation: the operation whose requests are answered wrongly.
        at: the first such request, from 0.
        answer: the wrong answer.
        stays: whether later requests of the operation get it as well, for `STAY_S`.
    """

    operation: str
    at: int
    answer: Answer
    stays: bool = False

    def __str__(self) -> str:
        return f"{self.operation}[{self.at}{'…' if self.stays else ''}] {self.answer}"


def _key_of(request: Request, body: bytes) -> Key:
    fragment = ""
    if request.method == "POST" and body[:1] == b"{":
        fragment = str(json.loads(body).get("fragment", ""))
    return request.method, request.path.partition("?")[0], request.headers.get("range", ""), fragment


def _read(connection: Connection, request: Request) -> bytes:
    return connection.body(request) if "content-length" in request.headers else b""


class Recorder(Peer):
    """Passes requests on to a true server, and keeps its answers.

    Args:
        port: the true server's.
    """

    def __init__(self, port: int) -> None:
        self.tape = Tape()
        self._target, self._lock = port, threading.Lock()
        super().__init__(self._pass_on)
        self.tape.port = self.port

    def _pass_on(self, connection: Connection) -> None:
        upstream = http.client.HTTPConnection("127.0.0.1", self._target, timeout=60)
        while not self.ended.is_set() and (request := connection.request()):
            body = _read(connection, request)
            headers = {name: value for name, value in request.headers.items() if name != "host"}
            upstream.request(request.method, request.path, body, headers)
            answer = upstream.getresponse()
            kept = tuple(each for each in answer.getheaders() if each[0].lower() not in _OF_THE_CONNECTION)
            name = operation_of(request.method, request.path)
            truth = Truth(name, answer.status, kept, answer.read())
            with self._lock:
                self.tape.add(_key_of(request, body), truth)
            connection.sock.sendall(right(truth))


class HostileServer(Peer):
    """Answers from a tape, and wrongly where a strike says so.

    Attributes:
        told: number of wrong answers that were sent, or begun.
        asked: operation → number of its requests.
    """

    def __init__(self, tape: Tape, strikes: Sequence[Strike] = ()) -> None:
        self.told, self.asked = 0, Counter[str]()
        self._tape, self._strikes, self._counts = tape, strikes, Counter[Key]()
        self._since: dict[int, float] = {}
        self._lock = threading.Lock()
        super().__init__(self._answer)

    def _answer(self, connection: Connection) -> None:
        while not self.ended.is_set() and (request := connection.request()):
            key = _key_of(request, _read(connection, request))
            truth, strike = self._next(key)
            if strike is None:
                connection.sock.sendall(right(truth))
            elif not self._strike(connection, truth, strike.answer):
                return

    def _next(self, key: Key) -> tuple[Truth, Strike | None]:
        """Return the true answer to a request, and the strike that replaces it."""
        with self._lock:
            found = self._tape.answers.get(key)
            name = operation_of(key[0], key[1])
            truth = Truth(name, 410, (("Content-Type", "application/json"),), _GONE)
            if found:
                truth = self._moved(found[min(self._counts[key], len(found) - 1)])
            number, self._counts[key], self.asked[name] = self.asked[name], self._counts[key] + 1, self.asked[name] + 1
            for strike in self._strikes:
                if strike.operation == name and self._is_due(strike, number):
                    self.told += 1
                    return truth, strike
        return truth, None

    def _is_due(self, strike: Strike, number: int) -> bool:
        if number == strike.at:
            self._since[id(strike)] = time.monotonic()
            return True
        return strike.stays and number > strike.at and time.monotonic() < self._since.get(id(strike), 0.0) + STAY_S

    def _moved(self, truth: Truth) -> Truth:
        """Return an answer with this server's address in place of the recorded one."""
        if not truth.body.startswith(b"{"):
            return truth
        body = truth.body.replace(b"127.0.0.1:%d" % self._tape.port, b"127.0.0.1:%d" % self.port)
        return Truth(truth.operation, truth.status, truth.headers, body)

    def _strike(self, connection: Connection, truth: Truth, answer: Answer) -> bool:
        """Send a wrong answer. Return whether the connection stays."""
        for piece in pieces(answer, truth, self._tape.truths):
            if piece is KEEP:
                return True
            if piece is RESET:
                connection.reset()
            elif isinstance(piece, bytes):
                connection.sock.sendall(piece)
            elif self.ended.wait(piece):
                return False
        return False
