"""Which updates are sent again when a server gives a ticket: those that it has forgotten, and no others."""

from __future__ import annotations

import pytest

from atoll.protocol import messages
from atoll.worker.exchange.base_and_outbox import OutboxNote
from atoll.worker.exchange.upload_update import resend_note

A, B, LAYOUT = "a" * 64, "b" * 64, "c" * 64
LOST = messages.Outcome(ticket=8, state="expired", base_version=3)


def note(*, sent: bool = True) -> OutboxNote:
    """An update from version 3 with the bits A, under ticket 8."""
    return OutboxNote(
        run="r", ticket=8, fragment=0, base_version=3, base_digest=A, layout_digest=LAYOUT, digest=B,
        part_digests=[], weight=1.0, steps=2, sent=sent,
    )  # fmt: skip


def ticket_from(version: int, digest: str) -> messages.Ticket:
    return messages.Ticket(id=9, fragment=0, round=4, base_version=version, base_digest=digest, layout_digest=LAYOUT)


def info(mode: str) -> messages.RunInfo:
    return messages.RunInfo.model_construct(run="r", mode=mode)


@pytest.mark.covers("F41")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("version", "bits", "fate", "base"),
    [
        pytest.param(3, A, "expired", 3, id="the same version: it is for this round"),
        pytest.param(5, A, "expired", 3, id="its version under another number: the server fell back"),
        pytest.param(5, A, "counted", None, id="it counts, and left the bits as they were"),
        pytest.param(5, B, "counted", None, id="it counts"),
    ],
)
def test_only_what_the_server_has_forgotten(mode: str, version: int, bits: str, fate: str, base: int | None) -> None:
    ticket = ticket_from(version, bits)
    again = resend_note(note(), ticket, LOST, info(mode), lambda _: LOST.model_copy(update={"state": fate}))
    assert (again and (again.ticket, again.base_version, again.sent)) == (base and (9, base, False))


@pytest.mark.covers("F41")
@pytest.mark.parametrize(("mode", "sent"), [("async", True), ("async", False), ("sync", True)])
def test_an_asynchronous_run_takes_a_forgotten_update_against_its_head(mode: str, sent: bool) -> None:
    """Where the server had acknowledged it; one that never came is part of what is local."""
    ticket = ticket_from(2, B)
    again = resend_note(note(sent=sent), ticket, LOST, info(mode), lambda _: LOST)
    assert (again and again.base_version) == (2 if mode == "async" and sent else None)
