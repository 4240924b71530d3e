"""A ticket's parts belong to the lease that it was issued under, until the last byte."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.processes import free_port, wait_until
from kit.servers import new_server
from torch import nn

import atoll
from atoll.errors import LeaseLost, Superseded
from atoll.protocol import messages, routes
from atoll.protocol.values import UpdateInfo
from atoll.store.file_slots import WRITER
from atoll.tensors.module_tensors import named_tensors
from atoll.transport.http_client import Http
from atoll.worker.exchange.participation import Participation, take_part


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    options = {"algorithm.name": "fedavg", "rounds.sites": 2, "network.part_bytes": 2**16, "disk.min_free_bytes": 0}
    with new_server(
        nn.Linear(300, 100), **{"network.port": 0, "disk.state_dir": tmp_path / "state"}, **options
    ) as server:
        yield server


def formed(server: atoll.Server, folder: Path) -> tuple[Participation, Participation, int]:
    """Site a with an update in its outbox, site b beside it, and a's ticket."""
    a, b = take_part(server.url, "a", folder=folder / "w"), take_part(server.url, "b", folder=folder / "w")
    ticket = a.exchange.ask().ticket
    assert ticket is not None
    tensors = named_tensors(nn.Linear(300, 100))[0]
    a.exchange.pull(ticket.base, tensors)
    a.exchange.form(ticket, tensors, UpdateInfo(1.0, 1, {}))
    return a, b, ticket.id


def request(server: atoll.Server, head: str, lease: str, length: int, kind: str) -> socket.socket:
    raw = socket.create_connection(("127.0.0.1", server.port))
    raw.settimeout(20.0)
    raw.sendall(
        f"{head} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{routes.LEASE_HEADER}: {lease}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n".encode()
    )
    return raw


def answer(raw: socket.socket) -> dict[str, object]:
    got = b""
    while chunk := raw.recv(1 << 16):
        got += chunk
    raw.close()
    return json.loads(got.partition(b"\r\n\r\n")[2])


def part_body(a: Participation, index: int) -> bytes:
    part, note = a.exchange.outbox.layout.parts[index], a.exchange.outbox.note
    assert note is not None
    data = bytearray(part.nbytes)
    a.exchange.outbox.read_into(part.start, memoryview(data))
    return bytes(data) + bytes.fromhex(note.part_digests[index])


def have(a: Participation, ticket: int) -> list[int]:
    return a.session.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState).parts


@pytest.mark.covers("F19")
def test_another_sites_request_does_not_touch_a_recorded_part(server: atoll.Server, tmp_path: Path) -> None:
    """`put_part` without its first `_require_open`: `begin_part` forgets the part before anybody looks."""
    a, b, ticket = formed(server, tmp_path)
    body = part_body(a, 0)
    for lease in (a.session.http.lease, b.session.http.lease):
        raw = request(
            server, f"PUT {routes.PART.format(ticket=ticket, part=0)}", lease, len(body), "application/octet-stream"
        )
        raw.sendall(body)
        told = answer(raw)
    assert told["code"] == "ticket_closed", told
    assert have(a, ticket) == [0]
    a.leave()
    b.leave()


@pytest.mark.covers("F19")
def test_a_process_that_is_superseded_while_its_part_is_on_its_way_leaves_no_part(
    server: atoll.Server, tmp_path: Path
) -> None:
    """`put_part` without its second `_require_open`."""
    a, b, ticket = formed(server, tmp_path)
    body = part_body(a, 0)
    raw = request(
        server,
        f"PUT {routes.PART.format(ticket=ticket, part=0)}",
        a.session.http.lease,
        len(body),
        "application/octet-stream",
    )
    before = server.status().bytes_up
    raw.sendall(body[:1000])
    wait_until(lambda: server.status().bytes_up > before, "the first bytes")
    newer = take_part(server.url, "a", folder=tmp_path / "newer")
    raw.sendall(body[1000:])
    told = answer(raw)
    assert told.get("code") == "superseded", told
    assert have(newer, ticket) == []
    newer.leave()
    b.leave()


def test_a_part_with_a_broken_connection_frees_its_slot(server: atoll.Server, tmp_path: Path) -> None:
    """`put_part` without `writer.abandon()`: nobody sends the part again, and the slot is never free for another."""
    a, b, ticket = formed(server, tmp_path)
    body = part_body(a, 0)
    raw = request(
        server,
        f"PUT {routes.PART.format(ticket=ticket, part=0)}",
        a.session.http.lease,
        len(body),
        "application/octet-stream",
    )

    def writers() -> int:
        return sum(who.get(WRITER, 0) for who in server._require_run().store.slots.holds().values())

    before = server.status().bytes_up
    raw.sendall(body[:1000])
    wait_until(lambda: server.status().bytes_up > before, "the first bytes")
    assert writers() == 1
    raw.close()
    wait_until(lambda: writers() == 0, "the slot to be let go")
    assert have(a, ticket) == []
    a.leave()
    b.leave()


@pytest.mark.covers("F19")
def test_a_process_that_is_superseded_while_it_completes_is_not_accepted(server: atoll.Server, tmp_path: Path) -> None:
    """`complete` without `_require_open`."""
    a, b, ticket = formed(server, tmp_path)
    note = a.exchange.outbox.note
    assert note is not None
    for index in range(len(a.exchange.outbox.layout.parts)):
        body = part_body(a, index)
        raw = request(
            server,
            f"PUT {routes.PART.format(ticket=ticket, part=index)}",
            a.session.http.lease,
            len(body),
            "application/octet-stream",
        )
        raw.sendall(body)
        assert "digest" in answer(raw)
    message = messages.Complete(digest=note.digest, weight=1.0, steps=1).model_dump_json().encode()
    assert server._run is not None
    presence = server._run.roster["a"]
    before = presence.heard_s
    raw = request(
        server, f"POST {routes.COMPLETE.format(ticket=ticket)}", a.session.http.lease, len(message), "application/json"
    )
    wait_until(lambda: presence.heard_s > before, "the lease of the request to be looked at")
    newer = take_part(server.url, "a", folder=tmp_path / "newer")
    raw.sendall(message)
    told = answer(raw)
    assert told.get("code") == "superseded", told
    state = newer.session.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)
    assert state.outcome.state == "open"
    newer.leave()
    b.leave()


def test_a_part_that_is_sent_anew_ends_the_request_before(server: atoll.Server, tmp_path: Path) -> None:
    """Its sender has given it up: it does not keep its connection until it stands still for the idle timeout."""
    a, _, ticket = formed(server, tmp_path)
    path, body = routes.PART.format(ticket=ticket, part=0), part_body(a, 0)
    older = request(server, f"PUT {path}", a.session.http.lease, len(body), "application/octet-stream")
    older.sendall(body[:1000])
    run = server._require_run()
    wait_until(lambda: run.bytes_up == 1000, "the bytes")
    newer = request(server, f"PUT {path}", a.session.http.lease, len(body), "application/octet-stream")
    newer.sendall(body)
    assert answer(newer)["ticket"] == ticket
    with contextlib.suppress(ConnectionResetError):  # long before idle_timeout_s
        assert older.recv(1) == b""
    older.close()


@pytest.mark.covers("F19")
def test_the_older_of_two_processes_does_not_take_the_place_back_after_a_restart(tmp_path: Path) -> None:
    """A process that slept while another joined under its name, and wakes up to a server that was started again."""

    port = free_port()

    def serve() -> atoll.Server:
        return atoll.Server(
            nn.Linear(2, 1),
            settings={
                "network.port": port,
                "algorithm.name": "fedavg",
                "rounds.sites": 1,
                "disk.state_dir": tmp_path / "state",
            },
        )

    def join(process: str) -> str:
        message = messages.Join(protocol=routes.PROTOCOL, site="a", process=process)
        return http.post(routes.WORKERS, message, messages.Joined).lease

    def beat(lease: str) -> None:
        http.lease = lease
        http.post(routes.HEARTBEAT, messages.Heartbeat(), messages.HeartbeatReply)

    with serve() as server:
        http = Http(server.url)
        older, newer = join("0" * 16), join("f" * 16)
    with serve():
        with pytest.raises(Superseded):
            beat(older)
        beat(newer)
        unheard = join("f" * 16)  # granted, and the server dies before its answer is read
    with serve():
        with pytest.raises(LeaseLost):
            beat(newer)
        beat(unheard)
    http.close()
