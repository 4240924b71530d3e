"""A ticket's parts belong to the lease that it was issued under, until the last byte."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.processes import free_port, wait_until
from kit.by_hand import formed, note_of, part_body, push, put_part
from kit.requests import answer, begin_request, joined, post
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.protocol import messages, routes
from atoll.store.file_slots import WRITER
from atoll.worker.exchange.participation import Participation, take_part


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    with plain_server(tmp_path, nn.Linear(300, 100), **{"rounds.sites": 2, "network.part_bytes": 2**16}) as server:
        yield server


@pytest.fixture
def a(server: atoll.Server, tmp_path: Path) -> Iterator[Participation]:
    """Site a with an update in its outbox; site b takes part, too."""
    a, b = (take_part(server.url, site, folder=tmp_path / "w") for site in "ab")
    formed(a)
    yield a
    a.leave()
    b.leave()


def send_part(server: atoll.Server, place: Participation, nbytes: int | None = None, lease: str = "") -> socket.socket:
    """Send part 0, or its first bytes; the open request."""
    body = part_body(place, 0)
    ticket = note_of(place).ticket
    return put_part(server.port, lease or place.session.http.lease, ticket, 0, len(body), body[:nbytes])


def state_of(place: Participation, ticket: int) -> messages.TicketState:
    return place.session.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)


@pytest.mark.covers("F19")
def test_another_sites_request_does_not_touch_a_recorded_part(server: atoll.Server, a: Participation) -> None:
    """`put_part` without its first `require_open`: `begin_part` forgets the part before it is checked."""
    assert answer(send_part(server, a))[0] == 204
    lease = joined(server.url, "b")
    assert answer(send_part(server, a, lease=lease))[1]["code"] == "ticket_closed"
    assert state_of(a, note_of(a).ticket).parts == [0]


@pytest.mark.covers("F19")
def test_a_process_that_is_superseded_while_its_part_is_on_its_way_leaves_no_part(
    server: atoll.Server, a: Participation, tmp_path: Path
) -> None:
    """`put_part` without its second `require_open`."""
    raw = send_part(server, a, 1000)
    wait_until(lambda: server.status().bytes_up == 1000, "the first bytes")
    newer = take_part(server.url, "a", folder=tmp_path / "newer")
    raw.sendall(part_body(a, 0)[1000:])
    assert answer(raw)[1]["code"] == "superseded"
    assert state_of(newer, note_of(a).ticket).parts == []
    newer.leave()


def test_a_part_with_a_broken_connection_frees_its_slot(server: atoll.Server, a: Participation) -> None:
    """`put_part` without `writer.abandon()`: the part is not sent again, and the slot is never free for another."""

    def writers() -> int:
        return sum(who.get(WRITER, 0) for who in server._require_run().store.slots.holds().values())

    raw = send_part(server, a, 1000)
    wait_until(lambda: server.status().bytes_up == 1000, "the first bytes")
    assert writers() == 1
    raw.close()
    wait_until(lambda: writers() == 0, "the slot to be let go")
    assert state_of(a, note_of(a).ticket).parts == []


@pytest.mark.covers("F19")
def test_a_process_that_is_superseded_while_it_completes_is_not_accepted(
    server: atoll.Server, a: Participation, tmp_path: Path
) -> None:
    """`complete` without `require_open`."""
    message = push(a).model_dump_json().encode()
    ticket, presence = note_of(a).ticket, server._require_run().roster["a"]
    before = presence.heard_s
    raw = begin_request(
        server.port,
        f"POST {routes.COMPLETE.format(ticket=ticket)}",
        Atoll_Lease=a.session.http.lease,
        Content_Type="application/json",
        Content_Length=len(message),
    )
    wait_until(lambda: presence.heard_s > before, "the lease of the request to be looked at")
    newer = take_part(server.url, "a", folder=tmp_path / "newer")
    raw.sendall(message)
    assert answer(raw)[1]["code"] == "superseded"
    assert state_of(newer, ticket).outcome.state == "open"
    newer.leave()


@pytest.mark.covers("F19")
def test_the_older_of_two_processes_does_not_take_the_place_back_after_a_restart(tmp_path: Path) -> None:
    """A process that slept while another joined under its name, and wakes up to a server that was started again."""
    port = free_port()

    def serve() -> atoll.Server:
        return plain_server(tmp_path, nn.Linear(2, 1), **{"network.port": port})

    def beat(lease: str) -> tuple[int, str]:
        status, reply = post(server.url, routes.HEARTBEAT, {}, lease)
        return status, reply.get("code", "")

    with serve() as server:
        older, newer = (joined(server.url, "a", process=16 * digit) for digit in "0f")
    with serve():
        assert beat(older) == (409, "superseded")
        assert beat(newer) == (200, "")
        unheard = joined(server.url, "a", process=16 * "f")  # granted, and the server dies before its answer is read
    with serve():
        assert beat(newer) == (409, "lease_lost")
        assert beat(unheard) == (200, "")
