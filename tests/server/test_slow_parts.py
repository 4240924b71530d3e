"""A part that has arrived is a sign of life: a site that sends slowly and nothing else is not declared dead."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from harness.processes import wait_until
from kit import serve
from torch import nn

from atoll.posix import read_at
from atoll.protocol import routes
from atoll.protocol.values import UpdateInfo
from atoll.tensors.module_tensors import named_tensors
from atoll.worker.exchange.participation import take_part


@pytest.mark.covers("L9")
def test_a_part_that_has_arrived_is_a_sign_of_life(tmp_path: Path) -> None:
    """The request for it is one, too; the site sends nothing else meanwhile."""
    torch.manual_seed(0)
    model = nn.Linear(4096, 4)  # 4 rows of 4,096 in fp32 are one part of 64 KiB
    with serve(
        tmp_path, model, **{"rounds.sites": 1, "network.heartbeat_interval_s": 0, "network.heartbeat_timeout_s": 0}
    ) as server:
        place = take_part(server.url, "a", folder=tmp_path / "workers")
        ticket = place.exchange.ask(wait_s=10.0).ticket
        assert ticket is not None
        tensors = named_tensors(model)[0]
        place.exchange.pull(ticket.base, tensors)
        place.exchange.form(ticket, tensors, UpdateInfo(1.0, 1, {}))
        part = place.exchange.outbox.layout.parts[0]
        data = bytearray(part.nbytes)
        read_at(place.exchange.outbox.fd, memoryview(data), part.start)
        run = server._require_run()

        def seen_s() -> float:
            return run.state.seen_s["a"]

        before_s = seen_s()
        head = (
            f"PUT {routes.PART.format(ticket=ticket.id, part=0)} HTTP/1.1",
            f"Host: 127.0.0.1:{server.port}",
            f"{routes.LEASE_HEADER}: {place.session.http.lease}",
            f"Content-Length: {part.nbytes + routes.DIGEST_BYTES}",
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sender:
            sender.sendall("\r\n".join((*head, "", "")).encode())
            wait_until(lambda: seen_s() > before_s, "the sign of life that every request is")
            asked_s = seen_s()
            sender.sendall(bytes(data) + blake3(data).digest())
            wait_until(lambda: seen_s() > asked_s, "the sign of life of the part", 15.0)
            assert sender.recv(100).startswith(b"HTTP/1.1 200 ")
        place.leave()
