"""Where `atoll.join` takes part without a server: the place of a virtual worker, in a process of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from atoll.errors import UsageError
from atoll.filters.base import Filter

if TYPE_CHECKING:
    from atoll.worker.federated import Worker

Seat = Callable[[Sequence[Filter]], "Worker"]
"""Given the filters of the site, the worker that `join` returns."""

_seat: Seat | None = None


@contextmanager
def taken_by(seat: Seat) -> Iterator[None]:
    """Within, whoever joins in this process is this virtual worker."""
    global _seat
    _seat = seat
    try:
        yield
    finally:
        _seat = None


def require_real(what: str) -> None:
    """Refuse, in a simulation, what does not take part in it by rounds: it would train alone, and never end.

    Raises:
        UsageError: this process trains a virtual worker.
    """
    if _seat is not None:
        raise UsageError(
            f"{what} counts steps of a loop of its own, and a virtual worker has one round at a time.",
            "Write the client as a loop over rounds, with atoll.join; or run it with real workers.",
        )


def worker_here(filters: Sequence[Filter]) -> Worker | None:
    """The virtual worker that this process trains at this moment; None outside of simulations."""
    return _seat(filters) if _seat is not None else None
