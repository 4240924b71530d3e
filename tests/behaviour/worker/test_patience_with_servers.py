"""A server that answers, but never as it should: the site goes on or ends by its own patience, and never spins."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness.processes import wait_until
from kit import serve
from kit.lying_server import Answer, Lie, LyingServer
from kit.peers import Connection, Peer, Request
from torch import nn

import atoll
from atoll.cli.main import main
from atoll.errors import (
    AtollError,
    PartCorrupt,
    PeerError,
    ServerFailed,
    ServerLost,
    ServerUnreachable,
    Superseded,
    VersionSkew,
)
from atoll.worker.session import session
from atoll.worker.training.federated_loop import Worker

pytestmark = pytest.mark.covers("X9")

PATIENCE_S = 1.0
MOST_REQUESTS = 60
"""Requests in the seconds of a test: a loop without pauses makes hundreds."""

OTHER_IDS = itertools.count(1000)


@pytest.fixture
def lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LyingServer]:
    """A server of a run of one site and two rounds, behind a liar. The site's patience is short."""
    monkeypatch.setenv("ATOLL_GIVE_UP_S", str(PATIENCE_S))
    with serve(tmp_path / "server", build(), sites=1, rounds=2, part_bytes=2**16) as server:
        with LyingServer(server.url) as liar:
            yield liar


def build() -> nn.Linear:
    """A model of two parts: a message of its own says that an update is complete."""
    return nn.Linear(200, 100)


def train(url: str, folder: Path) -> int:
    """Take part until the run is over; how many rounds there were."""
    model, count = build(), 0
    with atoll.join(url, site="a", folder=folder) as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            fl_round.submit(model)
            count += 1
    return count


def train_once(worker: Worker) -> None:
    fl_round = worker.next_round()
    fl_round.submit(fl_round.load_into(build()))


def always(path: str, status: int, **body: Any) -> Callable[[Connection, Request, Answer], Answer]:
    """Answer every request for a path like this."""

    def lie(_: Connection, request: Request, answer: Answer) -> Answer:
        return (status, json.dumps(body).encode()) if path in request.path else answer

    return lie


def changed(path: str, **fields: Any) -> Lie:
    """Change fields of every good answer to a request for a path."""

    def lie(_: Connection, request: Request, answer: Answer) -> Answer:
        if path not in request.path or answer[0] != 200:
            return answer
        return 200, json.dumps(json.loads(answer[1]) | fields).encode()

    return lie


def with_ticket(**fields: Any) -> Lie:
    """Change fields of every ticket."""

    def lie(_: Connection, request: Request, answer: Answer) -> Answer:
        if request.path != "/v1/tickets" or answer[0] != 200:
            return answer
        reply = json.loads(answer[1])
        if reply["ticket"] is not None:
            reply["ticket"] |= fields
        return 200, json.dumps(reply | {"head_version": 2**61, "head_digest": "0" * 64}).encode()

    return lie


def numbered_tickets(_: Connection, request: Request, answer: Answer) -> Answer:
    """Give each ticket an id that no ticket has."""
    if request.path != "/v1/tickets" or answer[0] != 200:
        return answer
    reply = json.loads(answer[1])
    if reply["ticket"] is not None:
        reply["ticket"]["id"] += next(OTHER_IDS)
    return 200, json.dumps(reply).encode()


def of_another_ticket(_: Connection, request: Request, answer: Answer) -> Answer:
    """Have the site ask what the server has of its update, and answer for another ticket."""
    if request.path.startswith("/v1/tickets/") and request.method == "GET":
        state = json.loads(answer[1])
        state["outcome"]["ticket"] += 1
        return 200, json.dumps(state).encode()
    if "/parts/" in request.path:
        return 409, json.dumps({"code": "conflict", "message": "other parts"}).encode()
    return answer


def one_after_another(*lies: Callable[[Connection, Request, Answer], Answer]) -> Lie:
    def lie(connection: Connection, request: Request, answer: Answer) -> Answer:
        for each in lies:
            answer = each(connection, request, answer)
        return answer

    return lie


def replayed(path: str) -> Lie:
    """Answer every request for a path, and for what is below it, as the first one."""
    first: dict[str, Answer] = {}

    def lie(_: Connection, request: Request, answer: Answer) -> Answer:
        return first.setdefault(request.path, answer) if request.path.startswith(path) else answer

    return lie


def first_line(path: str, line: bytes) -> Lie:
    """Answer every request for a path with this line, which is no HTTP."""

    def lie(connection: Connection, request: Request, answer: Answer) -> Answer | None:
        if path not in request.path:
            return answer
        connection.sock.sendall(line)
        connection.sock.shutdown(1)
        return None

    return lie


BUSY = {"code": "busy", "message": "later", "retry_after_s": 1e308}
LOST = {"code": "lease_lost", "message": "unknown lease"}
MANIFEST = "/v1/fragments/0/versions/0"

LIES: dict[str, tuple[Lie, type[AtollError], str]] = {
    "busy for ever": (always("/v1/run", 429, **BUSY), ServerLost, "could not join, although .* answers: later"),
    "busy with tickets": (always("/v1/tickets", 429, **BUSY), ServerLost, "could not ask for the next round"),
    "no disk for ever": (always("/v1/workers", 507, code="disk_full", message="full"), ServerLost, "could not join"),
    "a proxy without its server": (always("/v1/run", 502), ServerLost, "has not answered for"),
    "lease always lost": (always("/v1/tickets", 409, **LOST), ServerLost, "could not ask for the next round"),
    "ssh": (first_line("/v1/run", b"SSH-2.0-x\r\n"), ServerUnreachable, "There is no Atoll server at"),
    "ssh later": (first_line("/v1/tickets", b"SSH-2.0-x\r\n"), ServerLost, "could not ask for the next round"),
    "version 2^61": (
        with_ticket(base_version=2**61, base_digest="0" * 64),
        ServerLost,
        "could not pull a version, although",
    ),
    "base of another digest": (with_ticket(base_digest="0" * 64), ServerLost, "could not pull a version"),
    "manifest of other parts": (changed(MANIFEST, part_digests=["0" * 64]), PartCorrupt, "is not the expected one"),
    "manifest of another version": (changed(MANIFEST, version=9), ServerLost, "could not pull a version"),
    "ticket of another fragment": (with_ticket(fragment=1), VersionSkew, "ticket for fragment 1, not 0"),
    "ticket of too many steps": (
        with_ticket(local_steps=2),
        VersionSkew,
        "with 2 local steps, but in this run the script decides when a round ends",
    ),
    "state of another ticket": (of_another_ticket, VersionSkew, "answered for ticket 2, not 1"),
    "tickets closed at once": (
        one_after_another(numbered_tickets, always("/v1/tickets/", 409, code="ticket_closed", message="too late")),
        ServerLost,
        "could not make progress, although .* answers: too late",
    ),
    "the same ticket again and again": (replayed("/v1/tickets"), ServerLost, "could not submit its update again"),
    "wrong ids of tickets": (numbered_tickets, ServerLost, "could not make progress"),
    "first fragment out of range": (changed("/v1/workers", due=1), VersionSkew, "asks for fragment 1"),
    "another schema": (changed("/v1/schema", tensors=[]), VersionSkew, "does not match the digest"),
    "lease of two lines": (changed("/v1/workers", lease="a:1:x\r\nHost: evil"), VersionSkew, "Joined: lease: "),
    "endless timeout": (changed("/v1/run", idle_timeout_s=1e308), VersionSkew, "idle_timeout_s: "),
    "no timeout": (changed("/v1/run", idle_timeout_s=1e-300), VersionSkew, "idle_timeout_s: "),
    "2^40 connections": (changed("/v1/run", connections=2**40), VersionSkew, "connections: "),
    "huge protocol": (changed("/v1/run", protocol=2**61), VersionSkew, "Upgrade Atoll at this worker"),
    "redirect": (always("/v1/run", 302), PeerError, "answers with a redirect"),
    "page": (lambda _, __, answer: (200, b"<html>"), PeerError, "There is no Atoll server at"),
}


@pytest.mark.parametrize("case", LIES)
def test_a_site_gives_up_on_bad_servers(lying: LyingServer, tmp_path: Path, case: str) -> None:
    """If a server always answers wrongly, the site ends with the right error after a limited number of requests."""
    lying.lie, kind, text = LIES[case]
    with pytest.raises(AtollError, match=text) as caught:
        train(lying.url, tmp_path / "site")
    assert type(caught.value) is kind
    assert str(caught.value).isprintable()
    assert len(lying.requests) < MOST_REQUESTS


WAYS = {
    "a heartbeat": "/v1/heartbeat",
    "a request for a ticket": "/v1/tickets",
    "a part of the model": "/v1/fragments/0/versions/0/",
    "a part of an update": "/parts/",
    "the end of an update": "/complete",
}
"""Request → a text in its path."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("error", [ServerFailed, Superseded, ServerLost], ids=lambda error: error.code)
def test_any_answer_may_end_a_site(lying: LyingServer, tmp_path: Path, way: str, error: type[AtollError]) -> None:
    """An answer that ends the site counts, whichever request gets it. Each later call raises the same error and sends
    no request.
    """
    told = threading.Event()

    def lie(_: Connection, request: Request, answer: Answer) -> Answer:
        if WAYS[way] not in request.path or told.is_set():
            return answer
        told.set()
        return 409, json.dumps({"code": error.code, "message": "It is over."}).encode()

    lying.lie = lie
    with atoll.join(lying.url, site="a", folder=tmp_path / "site") as worker:
        if way == "a heartbeat":
            wait_until(lambda: worker._session.closing_wait(0.0), "its answer")
        with pytest.raises(error, match="It is over"):
            train_once(worker)
        worker._session._beat.join(30)  # the last heartbeat may be under way
        asked = len(lying.requests)
        with pytest.raises(error, match="It is over"):
            train_once(worker)
    assert lying.requests[asked:] == []


@pytest.mark.parametrize(
    "path", ["/v1/run", "/v1/schema", "/v1/workers", "/v1/tickets", MANIFEST, "/complete", "/parts/"]
)
@pytest.mark.parametrize("damage", ["first line", "body"])
def test_one_damaged_answer_costs_one_more_request(lying: LyingServer, tmp_path: Path, path: str, damage: str) -> None:
    """If one answer of the server is damaged, the site sends the request again and finishes as usual."""
    once = [True]

    def lie(connection: Connection, request: Request, answer: Answer) -> Answer | None:
        if not (path in request.path and once):
            return answer
        once.clear()
        if damage == "first line":
            return first_line(path, b"HTTQ/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")(connection, request, answer)
        return answer[0], b"\xff" + answer[1][1:]

    lying.lie = lie
    assert train(lying.url, tmp_path / "site") == 2
    assert not once


def test_eight_damaged_answers_end_a_site(lying: LyingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site ends with an error after eight damaged answers to one request, although it may wait for a minute.

    The server has answered well before.
    """
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "60")
    monkeypatch.setattr(session, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(session, "LONGEST_BACKOFF_S", 0.01)

    too_often = json.dumps({"code": "config", "message": "asked too often"}).encode()

    def lie(_: Connection, request: Request, answer: Answer) -> Answer:
        if request.path != "/v1/tickets":
            return answer
        return (200, b"\xff") if lying.count(request.path) < 16 else (400, too_often)

    lying.lie = lie
    with pytest.raises(PeerError):
        train(lying.url, tmp_path / "site")
    assert lying.count("/v1/tickets") == 8


def test_a_status_without_fragments_ends_a_site(lying: LyingServer, tmp_path: Path) -> None:
    """If the server's status has no fragments, the site gives up after a limited number of requests."""
    lying.lie = changed("/v1/status", fragments=[])
    with atoll.join(lying.url, site="a", folder=tmp_path / "site") as worker:
        with pytest.raises(ServerLost, match=r"could not pull a version, although .* does not have fragment 0"):
            worker.load_into(build())
    assert lying.count("/v1/status") < MOST_REQUESTS


def test_a_site_pauses_if_told_to_wait(lying: LyingServer, tmp_path: Path) -> None:
    """A site pauses between its requests even if the server answers each one at once with `wait`."""
    lying.lie = changed("/v1/tickets", status="wait", ticket=None)
    with atoll.join(lying.url, site="a", folder=tmp_path / "site") as worker:
        assert worker.next_round(wait_s=2.0) is None
    assert 2 <= lying.count("/v1/tickets") < 12


def test_a_site_gives_up_on_a_repeated_task(lying: LyingServer) -> None:
    """If a server accepts each answer but always sends the same task again, the site pauses between its requests and
    then gives up.
    """
    body = {"plain": "null", "object": None}
    sizes = {"streamed": False, "tensor_chunk_bytes": 0, "np_chunk_bytes": 0}
    reply = {"status": "task", "task": {"task": "0" * 32, "name": "echo", "body": body} | sizes}

    def lie(_: Connection, request: Request, answer: Answer) -> Answer:
        if request.path.startswith("/v1/tasks"):
            return 200, json.dumps(reply if request.path == "/v1/tasks" else {}).encode()
        return answer

    lying.lie = lie
    with atoll.tasks(lying.url, site="a") as worker:
        worker.task("echo")(lambda payload: payload)
        with pytest.raises(ServerLost, match="could not make progress, although"):
            worker.run()
    assert lying.count("/v1/tasks") < MOST_REQUESTS


@pytest.mark.parametrize("status", ["wait", "rounds"])
def test_a_site_without_tasks_asks_rarely(lying: LyingServer, tmp_path: Path, status: str) -> None:
    """If the server has no task or runs rounds, a site for tasks asks a few times only."""
    calls = 0

    def lie(_: Connection, request: Request, answer: Answer) -> Answer:
        nonlocal calls
        if request.path != "/v1/tasks":
            return answer
        calls += 1
        return 200, json.dumps({"status": status if calls < 4 else "finished"}).encode()

    lying.lie = lie
    with atoll.tasks(lying.url, site="a") as worker:
        worker.task("train")(lambda payload: payload)
        worker.run()
    assert calls in (1, 4)


COMMANDS = {
    "status": ["atoll", "status", "--server"],
    "export": ["atoll", "export", "x.safetensors", "--server"],
}
FIRST_LINES = {
    "ssh": (b"SSH-2.0-x\r\n", 5),
    "TLS alert": (b"\x15\x03\x01\x00\x02\x02\x46", 5),
    "nothing": (b"", 5),
    "redirect": (b"HTTP/1.1 301 No\r\nLocation: http://evil/\r\nContent-Length: 0\r\n\r\n", 6),
    "gzip": (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b", 6),
    "nested": (b"HTTP/1.1 200 OK\r\nContent-Length: 60005\r\n\r\n" + b'{"a":' + b"[" * 60_000, 6),
    "no status": (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", 6),
}


@pytest.mark.parametrize("case", FIRST_LINES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_ends_with_one_line(
    command: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If a server's answer is not HTTP, or is wrong, `atoll status` and `atoll export` end with one line and an exit
    code.
    """
    line, code = FIRST_LINES[case]

    def serve(connection: Connection) -> None:
        connection.request()
        connection.sock.sendall(line)

    monkeypatch.chdir(tmp_path)
    with Peer(serve) as peer:
        monkeypatch.setattr(sys, "argv", [*COMMANDS[command], peer.url])
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("atoll: ")
    assert shown.err.count("\n") == 1
