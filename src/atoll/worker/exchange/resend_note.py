"""What is sent again: a server that lost power falls back, and what it had acknowledged since is still in outboxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from atoll.protocol import messages
from atoll.worker.exchange.base_and_outbox import OutboxNote


def sent_again(
    note: OutboxNote | None,
    ticket: messages.Ticket,
    previous: messages.Outcome | None,
    info: messages.RunInfo,
    outcome_of: Callable[[int], messages.Outcome],
) -> OutboxNote | None:
    """The note under which what the outbox holds serves this ticket; None where it does not.

    In a synchronous run it was formed from the very version that the ticket is for: the same bits alone are no reason,
    a round may have left them as they were. In an asynchronous one its base may be behind the head as any other's may
    be: an acknowledged update that has expired is sent as if it had started from there.

    Args:
        previous: what became of the site's ticket before.
    """
    fell_back = previous is not None and previous.state == "expired"
    if note is None or note.run != info.run or note.layout_digest != ticket.layout_digest:
        return None
    again = replace(
        note, ticket=ticket.ticket, base_version=ticket.base_version, base_digest=ticket.base_digest, sent=False
    )
    same = note.base_digest == ticket.base_digest
    if same and note.base_version == ticket.base_version:
        return again
    if not fell_back or outcome_of(note.ticket).state != "expired":  # it counts already: the head has its base's bits
        return None
    if same:
        return replace(again, base_version=note.base_version)
    return again if info.mode == "async" and note.sent else None
