"""A part that has arrived is a sign of life: a site that sends for long and does nothing else is not declared dead."""

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
from atoll.tensors.module_tensors import named_tensors
from atoll.worker.session.session import Session

PARTS = 3


@pytest.mark.covers("L9")
def test_each_part_of_a_request_is_a_sign_of_life(tmp_path: Path) -> None:
    """One request brings three parts, one after the other; the site sends nothing else meanwhile."""
    torch.manual_seed(0)
    model = nn.Linear(4096, PARTS * 4)  # 4 rows of 4,096 in fp32 are one part of 64 KiB
    with serve(tmp_path, model, num_workers=1, heartbeat_interval_s=0, heartbeat_timeout_s=0) as server:
        session = Session(server.url, "a", folder=tmp_path / "workers")
        ticket = session.next_ticket(wait_s=10.0).ticket
        assert ticket is not None
        tensors = named_tensors(model)[0]
        session.pull(ticket.base_version, ticket.base_digest, tensors)
        session.form(ticket, tensors, weight=1.0, steps=1, metrics={})
        parts = session.outbox.layout.parts[:PARTS]
        bodies = []
        for part in parts:
            data = bytearray(part.nbytes)
            read_at(session.outbox.fd, memoryview(data), part.start)
            bodies.append(bytes(data) + blake3(data).digest())
        run = server._require_run()

        def seen_s() -> float:
            return run.state.seen_s["a"]

        before_s = seen_s()
        head = (
            f"PUT {routes.PART.format(ticket=ticket.ticket, part=0)} HTTP/1.1",
            f"Host: 127.0.0.1:{server.port}",
            f"{routes.LEASE_HEADER}: {session.http.lease}",
            f"Content-Length: {sum(map(len, bodies))}",
        )
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as sender:
            sender.sendall("\r\n".join((*head, "", "")).encode())
            wait_until(lambda: seen_s() > before_s, "the sign of life that every request is")
            for number, body in enumerate(bodies):
                before_s = seen_s()
                sender.sendall(body)
                wait_until(lambda before_s=before_s: seen_s() > before_s, f"a sign of life after part {number}", 15.0)
            assert sender.recv(100).startswith(b"HTTP/1.1 200 ")
        session.leave()
