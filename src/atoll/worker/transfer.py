"""What publishing and fetching share: who is asked for an object, and how a transfer is told to stop."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from atoll.errors import TransferAborted, UsageError
from atoll.tensors.reference import TensorRef
from atoll.transport.client import Http
from atoll.transport.parts import Parts

LOOK_S = 0.05
"""How often an abort event is looked at, also while no byte moves."""


class Abort(Protocol):
    """What a `threading.Event` is: set once, from any thread."""

    def is_set(self) -> bool: ...


def object_http(ref: TensorRef) -> Http:
    """For requests about an object. It sends the secret alone: a token must not go where somebody's reference leads."""
    http = Http(ref.server, ca=os.environ.get("ATOLL_TLS_CA"))
    http.secret = ref.secret
    return http


def require_timeout(idle_timeout_s: float) -> None:
    """Refuse a time in which nothing could move.

    Raises:
        UsageError: it is not positive and finite.
    """
    if not isinstance(idle_timeout_s, int | float) or not 0 < idle_timeout_s < math.inf:
        raise UsageError(
            f"idle_timeout_s is {idle_timeout_s!r}.", "Give the seconds without a byte after which to give up."
        )


@contextmanager
def watched(parts: Parts, abort: Abort | None) -> Iterator[None]:
    """Within, `abort` breaks off what these parts transfer.

    Raises:
        TransferAborted: it is set already.
        UsageError: it is no event.
    """
    if abort is None:
        yield
        return
    if not hasattr(abort, "is_set"):
        raise UsageError(f"abort is a {type(abort).__name__}.", "Give an event: threading.Event().")
    if abort.is_set():
        raise TransferAborted("The transfer was told to stop before it began.")
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_S):
            if abort.is_set():
                parts.break_off()
                return

    thread = threading.Thread(target=watch, name="atoll-abort", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
