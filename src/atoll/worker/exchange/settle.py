"""What a synchronisation that broke off has left, and how it is taken up again: docs/decisions/0005.

An update was formed, and nobody has heard yet whether it counts; the head moved on while it was pulled; the run ended
while this worker was at it. Whole models and fragments alike.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.errors import Gone, TicketClosed
from atoll.protocol import messages
from atoll.tensors.module_tensors import Tensors
from atoll.worker.broken_off import NetworkLost
from atoll.worker.exchange.base_and_outbox import BaseFile, OutboxNote
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.log_lines import LOG

BROKE_OFF = (*NetworkLost, TicketClosed, Gone)
"""What a synchronisation is skipped for, and training goes on."""


def unsettled(exchange: Exchange) -> OutboxNote | None:
    """The update that was formed from the base, where it is not known yet what became of it."""
    note: OutboxNote | None = exchange.outbox.note
    base = exchange.base.note
    if note is None or base is None or note.ticket == exchange.settled or note.base_digest != base.digest:
        return None
    return note


def counted_step(exchange: Exchange, base_step: int) -> int:
    """The last local step whose progress is in an update that the server has, as far as this worker knows.

    Args:
        base_step: after which what is local now began.
    """
    note = unsettled(exchange)
    return base_step + note.steps if note is not None and note.sent else base_step


def settle(exchange: Exchange, note: OutboxNote, max_retries: int) -> int:
    """Find out what became of an update that is `unsettled`.

    If it is in, only what was trained since is local progress: the base advances to what was submitted. If it is not,
    the next update holds all of it.

    Returns:
        Local steps that are local progress no more.
    """
    outcome = exchange.connection.outcome(note.ticket, max_retries)
    if not outcome.is_in:
        exchange.outbox.clear()
        return 0
    LOG.info("%s: the update of round %d is in after all", exchange.site, note.round)
    exchange.advance_base()
    exchange.settled = note.ticket
    return note.steps


def begin_from_base(exchange: Exchange) -> None:
    """The base is a version that was pulled: whatever the outbox holds, nothing of it is local progress.

    It is kept: until a later version is durable the server may fall back, and need it again.
    """
    if exchange.outbox.note is not None:
        exchange.settled = exchange.outbox.note.ticket


def pull_newest(
    exchange: Exchange,
    version: int,
    digest: str,
    into: Tensors | None,
    base: BaseFile | None = None,
    *,
    max_retries: int | None,
    waits: bool = True,
) -> messages.TicketReply | None:
    """Pull a version, or the head where it is gone: with `waits`, a pull that has begun ends with a whole version.

    Args:
        into, base, max_retries, waits: as `Puller.pull`.

    Returns:
        What the server said of the head that was pulled instead; None where it was the version.
    """
    newer: messages.TicketReply | None = None
    while True:
        try:
            exchange.pull(version, digest, into, base, max_retries=max_retries, waits=waits)
            return newer
        except Gone:
            max_retries = None if into is not None and waits else max_retries  # from now on
            newer = exchange.connection.next_ticket(exchange.fragment, wait_s=0.0, max_retries=max_retries)
            version, digest = newer.head_version, newer.head_digest


def ended_without_us(exchange: Exchange, take: Callable[[messages.TicketReply], None]) -> bool:
    """Whether a ticket was over because the run is, and its result is here: an asynchronous one ends without some.

    It is no skipped synchronisation then. Where the network is lost on the way, a later turn finds out.

    Args:
        take: makes the head the model.
    """
    try:
        reply = exchange.connection.next_ticket(exchange.fragment, wait_s=0.0, max_retries=0)
        if reply.status == "finished":
            take(reply)
    except NetworkLost:
        return False
    return reply.status == "finished"
