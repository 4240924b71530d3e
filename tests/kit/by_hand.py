"""A worker of one update whose steps a test takes one by one, and the bytes that it would send."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch

from atoll.protocol import messages, routes
from atoll.protocol.messages import Report, Ticket
from atoll.tensors.dtypes import torch_dtype
from atoll.transport.part_transfer import HttpTransfer
from atoll.worker.exchange.base_and_outbox import OutboxNote
from atoll.worker.exchange.participation import Participation
from kit.requests import begin_request


def formed(
    place: Participation, change_: Callable[[dict[str, torch.Tensor]], Any] | None = None, **report: Any
) -> Ticket:
    """Ask for a ticket, pull its version, and form an update in the outbox; the ticket.

    Args:
        change_: trains the tensors in place; without it the update is zero.
        report: fields of its `Report`.
    """
    ticket = place.exchange.ask(wait_s=10.0).ticket
    assert ticket is not None
    specs = place.exchange.local.layouts.schema.model.tensors
    tensors = {spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in specs}
    place.exchange.pull(ticket.base, tensors)
    if change_ is not None:
        change_(tensors)
    place.exchange.form(ticket, tensors, Report(**{"steps": 1, **report}))
    return ticket


def note_of(place: Participation) -> OutboxNote:
    """What the outbox says of its update."""
    note = place.exchange.outbox.note
    assert note is not None
    return note


def push(place: Participation, *indices: int) -> messages.Complete:
    """Send parts of the update, by default all; what completes it."""
    note, outbox = note_of(place), place.exchange.outbox
    digests = [bytes.fromhex(text) for text in note.part_digests]
    parts = [outbox.layout.parts[index] for index in indices] or outbox.layout.parts
    HttpTransfer(place.session.http, 1, 10.0).push(routes.parts_of(note.ticket), outbox.fd, parts, digests)
    return messages.Complete(digest=note.digest, weight=note.report.weight, steps=1)


def put_part(
    port: int, lease: str, ticket: int, part: int, nbytes: int, sent: bytes = b"", **headers: object
) -> socket.socket:
    """Begin the request that brings a part of so many bytes, its digest among them, and send some of them."""
    line = f"PUT {routes.PART.format(ticket=ticket, part=part)}"
    return begin_request(port, line, sent, Atoll_Lease=lease, Content_Length=nbytes, **headers)
