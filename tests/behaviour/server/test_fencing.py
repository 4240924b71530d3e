"""A ticket's parts belong to the lease that it was issued under, until the last byte."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from harness.processes import free_port, wait_until
from kit.requests import answer, begin_request
from kit.servers import plain_server
from kit.wire import WireSite, WireUpdate, heard
from torch import nn

import atoll


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, nn.Linear(300, 100), **{"rounds.sites": 2, "network.part_bytes": 2**16}) as server:
        yield server


@pytest.fixture
def a(server: atoll.Server) -> WireSite:
    return WireSite(server.url, "a", process="one")


@pytest.fixture
def b(server: atoll.Server) -> WireSite:
    return WireSite(server.url, "b")


@pytest.fixture
def update(a: WireSite, b: WireSite) -> WireUpdate:
    """Of a, not sent yet."""
    return a.train()


def begun(server: atoll.Server, update: WireUpdate) -> socket.socket:
    """The request of part 0, of which 1000 bytes have arrived."""
    raw = update.begin(0, update.body(0)[:1000])
    wait_until(lambda: server.status().bytes_up == 1000, "the first bytes")
    return raw


@pytest.mark.covers("F19")
def test_another_sites_request_does_not_touch_a_recorded_part(b: WireSite, update: WireUpdate) -> None:
    """`put_part` without its first `require_open`: `begin_part` forgets the part before it is checked."""
    assert update.put(0)[0] == 204
    assert replace(update, site=b).put(0)[1]["code"] == "ticket_closed"
    assert update.state()["parts"] == [0]


@pytest.mark.covers("F19")
def test_a_process_that_is_superseded_while_its_part_is_on_its_way_leaves_no_part(
    server: atoll.Server, update: WireUpdate
) -> None:
    """`put_part` without its second `require_open`."""
    raw = begun(server, update)
    newer = WireSite(server.url, "a", process="two")
    raw.sendall(update.body(0)[1000:])
    assert answer(raw)[1]["code"] == "superseded"
    assert replace(update, site=newer).state()["parts"] == []


def test_a_part_with_a_broken_connection_frees_its_slot(tmp_path: Path) -> None:
    """`put_part` without `writer.abandon()`: the part is not sent again, and the slot is never free for another."""
    with plain_server(tmp_path, nn.Linear(300, 100), **{"network.part_bytes": 2**16}) as server:
        a = WireSite(server.url)
        update = a.train()
        begun(server, update).close()
        update.submit()
        for _ in range(3):
            a.train().submit()
        assert len(list((tmp_path / "state" / "slots").glob("spool-*"))) == 1, "rounds later need no other file"


@pytest.mark.covers("F19")
def test_a_process_that_is_superseded_while_it_completes_is_not_accepted(
    server: atoll.Server, a: WireSite, update: WireUpdate
) -> None:
    """`complete` without `require_open`."""
    message = json.dumps(update.push().message).encode()
    headers = {"Atoll_Lease": a.lease, "Content_Type": "application/json", "Content_Length": len(message)}
    line = f"POST /v1/tickets/{update.ticket}/complete"
    raw = heard(server, "a", lambda: begin_request(server.port, line, **headers))  # the lease was looked at
    newer = WireSite(server.url, "a", process="two")
    raw.sendall(message)
    assert answer(raw)[1]["code"] == "superseded"
    assert replace(update, site=newer).state()["outcome"]["state"] == "open"


@pytest.mark.covers("F19")
def test_the_older_of_two_processes_does_not_take_the_place_back_after_a_restart(tmp_path: Path) -> None:
    """A process that slept while another joined under its name, and wakes up to a server that was started again."""
    port = free_port()

    def serve() -> atoll.Server:
        return plain_server(tmp_path, nn.Linear(2, 1), **{"network.port": port})

    def beat(site: WireSite) -> tuple[int, str]:
        status, reply = site.post("/v1/heartbeat", {})
        return status, reply.get("code", "")

    with serve() as server:
        older, newer = (WireSite(server.url, "a", process=16 * digit) for digit in "0f")
    with serve():
        assert beat(older) == (409, "superseded")
        assert beat(newer) == (200, "")
        # granted, and the server dies before its answer is read
        unheard = WireSite(server.url, "a", process=16 * "f")
    with serve():
        assert beat(newer) == (409, "lease_lost")
        assert beat(unheard) == (200, "")
