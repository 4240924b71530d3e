"""Filters that do not keep to their contract, in rounds and in tasks alike."""

from __future__ import annotations

from torch import Tensor

from atoll.filters import Filter
from atoll.tensors.schema import TensorSpec


class Undecided(Filter):
    def keeps(self, spec: TensorSpec) -> bool:
        raise KeyError(spec.name)


class Shorter(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return values[1:]


class Infinite(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        return values + float("inf")
