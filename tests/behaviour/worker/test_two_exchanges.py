"""A round of a small model: its update is one request, and its version comes with the next ticket."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.lying_server import Answer, LyingServer, framed_text
from kit.peers import Connection, Request
from kit.requests import send
from kit.wire import WireSite
from kit.world import World
from torch import Tensor

import atoll
from atoll.protocol import messages, routes
from atoll.protocol.read_message import framed, read_framed
from atoll.tensors.layout import SHARES, WHOLE_BYTES, version_layout
from atoll.tensors.schema import Schema, TensorSpec

COUNT = 20_000
NBYTES = 4 * COUNT


def ones() -> dict[str, Tensor]:
    """A model of one tensor; an update of it has 80,000 bytes."""
    return {"w": torch.ones(COUNT)}


def add_one(world: World, url: str) -> tuple[int, int]:
    """Train as site a until the run is over, and add 1 in each round. Return bytes sent and received."""
    with world.worker(server=url) as worker:
        for fl_round in worker:
            model = fl_round.load_into({"w": torch.zeros(COUNT)})
            fl_round.submit({"w": model["w"] + 1})
        return worker.bytes_up, worker.bytes_down


def kinds(proxy: Proxy) -> list[str]:
    """The requests of rounds, without numbers and digests."""
    of_rounds = [line.split(" HTTP")[0] for line in proxy.requests if "tickets" in line or "fragments" in line]
    return ["/".join(part for part in line.split("/") if not part.isdigit()) for line in of_rounds]


@pytest.mark.covers("L9")
def test_a_small_models_round_takes_two_requests(tmp_path: Path) -> None:
    """In a run of a small model, a round takes two requests: one gets the ticket with the version, the other sends the
    update.
    """
    # A third request asks for the ticket's state, if the site does not know yet whether its last update is safe on
    # disk.
    with World(tmp_path, ones(), "a", rounds=3) as world, Proxy(world.server.port) as proxy:
        up, _ = add_one(world, proxy.url)
        assert world.finish()["w"].unique().tolist() == [4.0]
    asks, brings = "POST /v1/tickets", "PUT /v1/tickets/parts"
    assert [kind for kind in kinds(proxy) if kind != "GET /v1/tickets"] == [
        asks,
        brings,
        asks,
        brings,
        asks,
        brings,
        asks,
    ]
    assert up == 3 * NBYTES


@pytest.mark.covers("F17", "L10")
def test_a_lost_receipt_does_not_resend_the_update(tmp_path: Path) -> None:
    """If only the server's receipt is lost, the site asks what the server has. It then completes the update with a
    message alone.
    """
    with World(tmp_path, ones(), "a", rounds=1) as world, Proxy(world.server.port) as proxy:
        proxy.faults.append(Fault("PUT .*/parts/0 ", "down", at=BEFORE_HEADER, action="reset"))
        up, _ = add_one(world, proxy.url)
        assert world.finish()["w"].unique().tolist() == [2.0]
    asks = "POST /v1/tickets"
    assert kinds(proxy) == [asks, "PUT /v1/tickets/parts", "GET /v1/tickets", "POST /v1/tickets/complete", asks]
    assert up == NBYTES


@pytest.mark.parametrize("at", [0, NBYTES - 1, NBYTES + 31, NBYTES + 40], ids=["begin", "end", "digest", "message"])
@pytest.mark.covers("F14", "F17")
def test_an_update_that_breaks_off_is_sent_again(tmp_path: Path, at: int) -> None:
    """If the request with an update breaks off, the site sends the update again, and the update counts once.

    The server records nothing of an update before its last byte.
    """
    with World(tmp_path, ones(), "a", rounds=1) as world, Proxy(world.server.port) as proxy:
        proxy.faults.append(Fault("PUT .*/parts/0 ", "up", at=at, action="reset"))
        add_one(world, proxy.url)
        assert world.finish()["w"].unique().tolist() == [2.0]
        assert world.counted == [("a", 1)]
    assert kinds(proxy)[1:4] == ["PUT /v1/tickets/parts", "GET /v1/tickets", "PUT /v1/tickets/parts"]


@pytest.mark.covers("F15", "F16")
def test_a_damaged_version_with_a_ticket_is_downloaded(tmp_path: Path) -> None:
    """If the version that comes with a ticket is damaged, the site downloads the version in a separate request.

    The damage is in the last byte of the tensor, so only the digest of the part shows it.
    """
    with World(tmp_path, ones(), "a", rounds=1) as world, Proxy(world.server.port) as proxy:
        lease = WireSite(world.server.url, "a").lease
        answered = len(framed_answer(world.server.url, lease))
        proxy.faults.append(Fault("POST /v1/tickets ", "down", at=answered - 1, action="flip"))
        _, down = add_one(world, proxy.url)
        assert world.finish()["w"].unique().tolist() == [2.0]
    assert proxy.count("GET .*/versions/0/[0-9a-f]{64} ") == 1
    assert down >= 2 * NBYTES


def framed_answer(url: str, lease: str, holds: str = "") -> bytes:
    """The body of the answer to a request for a ticket by a site that has this version."""
    body = json.dumps({"holds": holds, "wait_s": 5}).encode()
    headers = {"Content-Type": "application/json", "Atoll-Lease": lease}
    with urllib.request.urlopen(urllib.request.Request(url + "/v1/tickets", body, headers), timeout=30) as reply:
        return bytes(reply.read())


def test_a_ticket_includes_a_version_the_site_lacks(tmp_path: Path) -> None:
    """If a site lacks the round's version, the answer with its ticket includes the version."""
    # A site that has the version gets the ticket alone. A site that does not say which version it has gets plain JSON.
    with World(tmp_path, ones(), "a", rounds=1) as world:
        site = WireSite(world.server.url, "a")
        reply, data = read_framed(messages.TicketReply, framed_answer(world.server.url, site.lease))
        assert reply.ticket is not None
        assert reply.manifest is not None
        assert reply.manifest.digest == reply.ticket.base_digest
        assert bytes(data[-NBYTES:]) == ones()["w"].numpy().tobytes()
        again, nothing = read_framed(
            messages.TicketReply, framed_answer(world.server.url, site.lease, reply.ticket.base_digest)
        )
        assert (again.ticket, again.manifest, len(nothing)) == (reply.ticket, None, 0)
        assert site.ask()["manifest"] is None


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (routes.VERSION_BYTES // 4, {}),
        (COUNT, {"aggregation.download_codec": {"name": "int8"}}),
    ],
    ids=["above 1 MiB", "with differences"],
)
def test_other_versions_come_as_a_manifest_only(tmp_path: Path, size: int, settings: dict[str, Any]) -> None:
    """If a version has more than 1 MiB or is sent as a difference, only its manifest comes with the ticket."""
    # The site downloads the parts. A header precedes the tensors, so 2^18 elements take more than 1 MiB.
    with (
        World(tmp_path, {"w": torch.ones(size)}, "a", rounds=2, **settings) as world,
        Proxy(world.server.port) as proxy,
    ):
        with world.worker(server=proxy.url) as worker:
            for fl_round in worker:
                fl_round.submit({"w": fl_round.load_into({"w": torch.zeros(size)})["w"] + 1})
    assert "GET /v1/fragments/versions" not in kinds(proxy)
    assert any(line.startswith("GET /v1/fragments/versions/") for line in kinds(proxy))


LIES = {
    "too short": lambda text, data: framed_text(text, data[:-1]),
    "too long": lambda text, data: framed_text(text, data + b"0"),
    "no bytes": lambda text, data: framed_text(text),
    "other bytes": lambda text, data: framed_text(text, bytes(len(data))),
    "other digests": lambda text, data: framed_text(text.replace(b'"part_digests":["', b'"part_digests":["0'), data),
    "another version": lambda text, data: framed_text(
        json.dumps(json.loads(text) | {"manifest": json.loads(text)["manifest"] | {"version": 7}}).encode(), data
    ),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.covers("X9")
def test_a_wrong_version_with_a_ticket_harms_no_site(tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a ticket comes with wrong bytes, the site downloads the version or ends with an error. It never trains from
    the wrong bytes.
    """
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "2")

    def told(_: Connection, request: Request, answer: Answer) -> Answer:
        if request.path != "/v1/tickets" or answer[0] != 200:
            return answer
        stop = 4 + int.from_bytes(answer[1][:4], "big")
        text, data = answer[1][4:stop], answer[1][stop:]
        return 200, LIES[lie](text, data) if data else answer[1]

    with World(tmp_path, ones(), "a", rounds=1) as world, LyingServer(world.server.url, told, frames=True) as liar:
        if lie == "other digests":
            with pytest.raises(atoll.AtollError, match="part_digests"):
                add_one(world, liar.url)
            return
        add_one(world, liar.url)
        assert world.finish()["w"].unique().tolist() == [2.0]


BODIES = {
    "no JSON": b"\x00\x00\x00\x01x",
    "longer than it says": framed(messages.Complete(digest="0" * 64)) + b"0",
    "shorter than it says": framed(messages.Complete(digest="0" * 64))[:-1],
    "another message": framed_text(b'{"weight": 1.0}'),
    "half a length": b"\x00\x00",
    "a length of 4 GB": b"\xff\xff\xff\xff{}",
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.covers("X2")
def test_a_malformed_message_after_a_part_is_refused(tmp_path: Path, body: str) -> None:
    """If a small update is sent in one request and the message after its bytes is malformed, the server answers 400 and
    records nothing.
    """
    with World(tmp_path, ones(), "a", rounds=1) as world:
        update = WireSite(world.server.url, "a").train(1.0)
        path = f"/v1/tickets/{update.ticket}"
        status, told = send(
            world.server.url, "PUT", f"{path}/parts/0", update.body(0) + BODIES[body], update.site.lease
        )
        assert (status, told["code"]) == (400, "bad_request")
        assert send(world.server.url, "GET", path)[1]["parts"] == []
        whole = update.body(0) + framed_text(json.dumps(update.message).encode())
        status, receipt = send(world.server.url, "PUT", f"{path}/parts/0", whole, update.site.lease)
        assert (status, receipt["digest"]) == (200, update.message["digest"])
        assert world.finish()["w"].unique().tolist() == [2.0]


def test_a_wrong_update_digest_is_a_conflict(tmp_path: Path) -> None:
    """If a small update is sent in one request and its digest is wrong, the server answers 409 and records nothing."""
    with World(tmp_path, ones(), "a", rounds=1) as world:
        update = WireSite(world.server.url, "a").train(1.0)
        wrong, right = (
            framed_text(json.dumps(message).encode())
            for message in (update.message | {"digest": "0" * 64}, update.message)
        )
        path = f"/v1/tickets/{update.ticket}"
        status, told = send(world.server.url, "PUT", f"{path}/parts/0", update.body(0) + wrong, update.site.lease)
        assert (status, told["code"]) == (409, "conflict")
        assert send(world.server.url, "GET", path)[1]["parts"] == []
        assert send(world.server.url, "PUT", f"{path}/parts/0", update.body(0) + right, update.site.lease)[0] == 200


@pytest.mark.parametrize(("mib", "parts"), [(0.5, 1), (3.9, 1), (4.1, SHARES), (40, SHARES), (63, SHARES), (100, 7)])
@pytest.mark.covers("P8")
def test_several_connections_share_a_file_above_4_mib(mib: float, parts: int) -> None:
    """The file of a version is one part up to 4 MiB, and several parts above it, so that several connections can share
    the file.
    """
    # Up to 64 MiB, there are as many parts as connections, and their sizes differ by less than 256 KiB.
    elements = int(mib * 2**20 / 40)
    layout = version_layout(Schema(tuple(TensorSpec(f"t{i}", "F32", (elements,), "params") for i in range(10))))
    sizes = [part.nbytes for part in layout.all_parts]
    assert len(sizes) == parts
    assert sum(sizes) == layout.nbytes
    if parts == SHARES:
        assert max(sizes) - min(sizes) < 2**18
    assert (layout.nbytes <= WHOLE_BYTES) == (parts == 1)
