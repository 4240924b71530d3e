"""Filters of updates and of payloads: one that keeps to its contract, and some that do not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

from atoll.filters import CHUNK_ELEMENTS, Filter


class Halved(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        assert len(values) <= CHUNK_ELEMENTS
        return values.div_(2)


class Broken(Filter):
    """Fails at the tensor `head`."""

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        if name.endswith("head"):
            raise KeyError("salt")
        return values


class Leaving(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        raise SystemExit(3)


class Undecided(Filter):
    def keeps(self, spec: Any) -> bool:
        raise KeyError(spec.name)


class Shorter(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return values[1:]


class Infinite(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return values + float("inf")


class Hanging(Filter):
    """Calls `begun`, and hangs until `go` is set; the copy of each site has the same event."""

    def __init__(self, go: threading.Event, begun: Callable[[], object]) -> None:
        self.go, self.begun = go, begun

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        self.begun()
        assert self.go.wait(60)
        return values
