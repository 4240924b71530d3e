"""Where `atoll.join` takes part without a server: the place of a virtual worker, in a process of a simulation."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from atoll.errors import UsageError
from atoll.filters.base import Filter
from atoll.protocol import messages

if TYPE_CHECKING:
    from atoll.worker.training.federated_loop import Worker


class Seat(Protocol):
    """A virtual worker, as the scripts of its process find it."""

    @property
    def site(self) -> str:
        """Its name."""
        ...

    @property
    def info(self) -> messages.RunInfo:
        """Of the run that is simulated."""
        ...

    def with_filters(self, filters: Sequence[Filter]) -> Worker:
        """What `atoll.join` returns, given the filters of the site."""
        ...


_seat: Seat | None = None


@contextmanager
def taken_by(seat: Seat) -> Iterator[None]:
    """Within, whoever joins in this process is this virtual worker; `ATOLL_SITE` names it, as at a real site."""
    global _seat
    _seat, before = seat, os.environ.get("ATOLL_SITE")
    os.environ["ATOLL_SITE"] = seat.site
    try:
        yield
    finally:
        _seat = None
        if before is None:
            os.environ.pop("ATOLL_SITE", None)
        else:
            os.environ["ATOLL_SITE"] = before


def seat_here() -> Seat | None:
    """The virtual worker that this process trains at this moment; None outside of simulations."""
    return _seat


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
