"""A site that speaks the HTTP interface itself: plain JSON, and parts as bytes. A test takes its steps one by one.

site = WireSite(server.url, "a")
update = site.train(1.0)            # asks for a ticket, pulls its version, and adds 1 to every element
update.push()
status, receipt = update.complete()
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor, nn

import atoll
from atoll.testing.run import wait_until
from kit.requests import begin_request, get, joined, post, send

T = TypeVar("T")

DIGEST_BYTES = 32
TILE, _ALIGN = 4096, 64
NAMES = {torch.float64: "F64", torch.float32: "F32", torch.int64: "I64"}
"""dtype → its name in safetensors."""


@dataclass
class WireUpdate:
    """An update as it travels.

    Attributes:
        ticket: the number of its ticket.
        parts: the bytes of each part.
        message: what completes it.
    """

    site: WireSite
    ticket: int
    parts: list[bytes]
    message: dict[str, Any]

    def body(self, part: int) -> bytes:
        """One part and its digest."""
        return self.parts[part] + blake3(self.parts[part]).digest()

    def put(self, part: int) -> tuple[int, dict[str, Any]]:
        """Send one part; status and body of the answer."""
        path = f"/v1/tickets/{self.ticket}/parts/{part}"
        return send(self.site.url, "PUT", path, self.body(part), self.site.lease)

    def begin(self, part: int, sent: bytes = b"", nbytes: int | None = None, **headers: object) -> socket.socket:
        """Begin the request that brings a part, and send some of its body.

        Args:
            nbytes: the size that is announced; by default that of the part and its digest.
        """
        nbytes = len(self.parts[part]) + DIGEST_BYTES if nbytes is None else nbytes
        line = f"PUT /v1/tickets/{self.ticket}/parts/{part}"
        return begin_request(self.site.port, line, sent, Atoll_Lease=self.site.lease, Content_Length=nbytes, **headers)

    def push(self) -> WireUpdate:
        """Send all parts."""
        for part in range(len(self.parts)):
            status, reply = self.put(part)
            assert status == 204, reply
        return self

    def complete(self, **changed: Any) -> tuple[int, dict[str, Any]]:
        """Say that all parts were sent; status and body of the answer. `changed` replaces keys of the message."""
        return self.site.post(f"/v1/tickets/{self.ticket}/complete", self.message | changed)

    def submit(self) -> None:
        """Send all of it; it is accepted."""
        status, reply = self.push().complete()
        assert status == 200, reply

    def state(self) -> dict[str, Any]:
        """What the server says of its ticket, and of the parts that it has."""
        status, reply = get(self.site.url, f"/v1/tickets/{self.ticket}", self.site.lease)
        assert status == 200, reply
        return reply


class WireSite:
    """A site that has joined. It sends no heartbeat but those of `beat`, and keeps nothing on disk.

    Updates are formed for the codec `none`, and for tensors of F32, F64 and integers.

    Args:
        more: further fields of the message that joins.
    """

    def __init__(self, url: str, name: str = "a", **more: Any) -> None:
        self.url, self.name, self.port = url, name, int(url.rpartition(":")[2])
        self.lease = joined(url, name, **more)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer."""
        return post(self.url, path, body, self.lease)

    def beat(self, **values: Any) -> dict[str, Any]:
        """One heartbeat; its answer."""
        status, reply = self.post("/v1/heartbeat", values)
        assert status == 200, reply
        return reply

    def leave(self, error: str | None = None) -> None:
        """Leave the run."""
        self.post("/v1/workers/leave", {"error": error})

    def ask(self, fragment: int = 0, wait_s: float = 10.0) -> dict[str, Any]:
        """The answer to a request for a ticket."""
        status, reply = self.post("/v1/tickets", {"fragment": fragment, "wait_s": wait_s})
        assert status == 200, reply
        return reply

    def ticket(self, fragment: int = 0) -> dict[str, Any]:
        """The ticket of the round that is open, or opens next."""
        reply = self.ask(fragment)
        for _ in range(5):
            if reply["status"] == "wait":
                reply = self.ask(fragment)
        assert reply["status"] == "ticket", reply
        return reply["ticket"]

    def pull(self, ticket: dict[str, Any]) -> dict[str, Tensor]:
        """The version that a ticket is for."""
        path = "/v1/fragments/{fragment}/versions/{base_version}/{base_digest}".format(**ticket)
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return safetensors.torch.load(reply.read())

    def train(
        self, by: float | Callable[[dict[str, Tensor]], object] = 0.0, *, fragment: int = 0, **message: Any
    ) -> WireUpdate:
        """Ask for a ticket, pull its version, and form an update of what training makes of it.

        Args:
            by: what training adds to every element of floats; or a function that changes the tensors in place.
            message: fields of the message that completes the update, such as `weight`.
        """
        ticket = self.ticket(fragment)
        base = self.pull(ticket)
        local = {name: tensor.clone() for name, tensor in base.items()}
        if callable(by):
            by(local)
        else:
            for tensor in local.values():
                tensor += by if tensor.is_floating_point() else 0
        return self.form(ticket, base, local, **message)

    def form(
        self, ticket: dict[str, Any], base: dict[str, Tensor], local: dict[str, Tensor], **message: Any
    ) -> WireUpdate:
        """The update that leads from `base` to `local`: parameters as base − local, buffers as they are."""
        body, sizes = b"", []
        for entry in get(self.url, "/v1/schema")[1]["tensors"]:
            name = entry["name"]
            if name in local:  # of the ticket's fragment
                value = base[name] - local[name] if entry["group"] == "params" else local[name]
                raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                body += raw + bytes(-len(raw) % _ALIGN)
                sizes.append((len(raw), TILE * value.element_size()))
        part_bytes = get(self.url, "/v1/run")[1]["part_bytes"]
        parts = [body[start:stop] for start, stop in cuts(sizes, part_bytes)]
        digests = b"".join(blake3(part).digest() for part in parts)
        digest = blake3(bytes.fromhex(ticket["layout_digest"]) + digests).hexdigest()
        return WireUpdate(self, ticket["id"], parts, {"digest": digest, "weight": 1.0, "steps": 1} | message)


def heard(server: atoll.Server, site: str, send: Callable[[], T]) -> T:
    """Send a request of a site that is silent, and wait until the server has heard of the site."""

    def silence_s() -> float:
        return next(worker.last_heartbeat_s for worker in server.status().workers if worker.site == site)

    wait_until(lambda: silence_s() > 0.3, "some silence")
    sent = send()
    wait_until(lambda: silence_s() < 0.3, "the request at the server")
    return sent


def update_parts(model: nn.Module, part_bytes: int) -> list[tuple[int, int]]:
    """Where an update of the model is cut, without a codec: first and last byte of each part."""
    return list(cuts([(tensor.nbytes, TILE * tensor.element_size()) for _, tensor in _stored(model)], part_bytes))


def version_parts(model: nn.Module, part_bytes: int) -> list[tuple[int, int]]:
    """Where a version of the model, which is a safetensors file, is cut."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt", "atoll.schema": "0" * 64}}
    sizes, offset = list[tuple[int, int]](), 0
    for name, tensor in _stored(model):
        end = offset + tensor.nbytes
        table[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        sizes.append((tensor.nbytes, TILE * tensor.element_size()))
        offset = end
    text = json.dumps(table, separators=(",", ":"))
    return list(cuts(sizes, part_bytes, header_bytes=8 + len(text) + -(8 + len(text)) % _ALIGN))


def _stored(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The tensors in the order of files: the widest elements first."""
    return sorted(model.state_dict().items(), key=lambda item: -item[1].element_size())


def cuts(sizes: list[tuple[int, int]], part_bytes: int, *, header_bytes: int = 0) -> Iterator[tuple[int, int]]:
    """Where an update is cut into parts, or a file with a header: a part is filled, and ends at a whole tile.

    Args:
        sizes: bytes of each tensor, and of one of its tiles.
        header_bytes: before the first tensor, less than a part; then the tensors follow each other without gaps.
    """
    total = header_bytes + sum(nbytes + (0 if header_bytes else -nbytes % _ALIGN) for nbytes, _ in sizes)
    if total > 4 * 2**20:  # then four parts at least, with room for one tile of the widest dtype
        part_bytes = min(part_bytes, -(-total // 4) + TILE * 8)
    start, end, offset = 0, header_bytes, header_bytes
    for nbytes, tile in sizes:
        behind = offset + nbytes + (0 if header_bytes else -nbytes % _ALIGN)
        at = offset
        while at < offset + nbytes:
            tiles = (start + part_bytes - at) // tile
            if behind <= start + part_bytes:
                at = end = behind
            elif tiles > 0 and at + tiles * tile < offset + nbytes:
                at = end = at + tiles * tile
            elif end > start:
                yield start, end
                start = end
            else:
                at = end = min(at + tile, behind)
        offset = behind
    yield start, end
