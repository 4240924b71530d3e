"""What the server knows of each worker beyond the round machine: to be shown, never to decide."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime

from atoll.errors import BadRequest
from atoll.wire import messages


@dataclass
class Presence:
    """One worker as it was last heard of.

    Attributes:
        heard: whether it gave a sign of life since this server started; `heard_s` is when.
    """

    site: str
    host: str = ""
    process: str = ""
    joined_at: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    state: str = "alive"
    error: str = ""
    heard: bool = True
    heard_s: float = field(default_factory=time.monotonic)
    beat: messages.Heartbeat = field(default_factory=messages.Heartbeat)
    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    base_version: int = 0
    refused_in_a_row: int = 0


@dataclass(frozen=True)
class Lease:
    """Who sends a request, as its lease header says. It fences; it does not authenticate."""

    site: str
    number: int
    process: str

    def __str__(self) -> str:
        return f"{self.site}:{self.number}:{self.process}"

    @classmethod
    def parse(cls, text: str | None) -> Lease:
        """The lease of a request.

        Raises:
            BadRequest: the header is missing or malformed.
        """
        if text is None or not re.match(messages.LEASE_PATTERN, text):
            raise BadRequest(
                "The Atoll-Lease header is missing or malformed.", "Join first, and send the lease that was given."
            )
        pieces = text.split(":")
        return cls(pieces[0], int(pieces[1]), pieces[2])


def now_text() -> str:
    """The wall clock, for people; nothing is decided by it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
