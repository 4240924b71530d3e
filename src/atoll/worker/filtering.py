"""Filters between the model and the outbox: each run of the update passes through all of them, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from atoll.errors import AtollError, UsageError
from atoll.filters.base import About, Filter, Outgoing
from atoll.tensors.chunks import run_of
from atoll.tensors.dtypes import accumulate_dtype
from atoll.tensors.modules import Tensors
from atoll.tensors.schema import CONTROL
from atoll.worker.files import BaseFile


class Filtered:
    """The change of a model as it leaves the site.

    Args:
        filters: in their order.
        base: the version that was trained from.
        tensors: the model's own, by name; not changed.
        about: the update's metadata.

    Raises:
        UsageError: what a filter's `begin` raised, naming the filter.
    """

    def __init__(self, filters: Sequence[Filter], base: BaseFile, tensors: Tensors, about: About) -> None:
        self._filters, self._base, self._tensors = filters, base, tensors
        specs = {each.spec.name: each.spec for each in base.layout.segments if each.spec.group != CONTROL}
        self._specs, self._kept = specs, set(specs)
        for index, filter_ in enumerate(filters):
            kept = {name: spec for name, spec in specs.items() if name in self._kept}

            def before(name: str, start: int, stop: int, index: int = index) -> Tensor:
                return self._through(name, start, stop, index)

            update = Outgoing(about, kept, before)
            self._call(filter_, "the begin of the update", partial(filter_.begin, update))
            self._kept -= {name for name, spec in kept.items() if not filter_.keeps(spec)}

    def change(self, name: str, start: int, stop: int) -> Tensor:
        """version − local [stop − start] of a float tensor, behind every filter; zeros where one does not keep it."""
        if name not in self._kept:
            return torch.zeros(stop - start, dtype=accumulate_dtype(self._specs[name].dtype))
        return self._through(name, start, stop, len(self._filters))

    def value(self, name: str, start: int, stop: int) -> Tensor:
        """What a buffer [stop − start] is said to have become."""
        if name not in self._kept:
            return self._base.values_of(name, start, stop)
        spec, local = self._specs[name], run_of(self._tensors[name], start, stop).cpu()
        if not spec.is_float:
            return local
        raw = self._raw(name, start, stop)
        raw.sub_(self._behind(name, start, raw.clone(), len(self._filters)))
        return raw.add_(local)  # its own value, to the bit, where no filter changed it

    def sends(self, name: str) -> bool:
        """Whether every filter keeps this tensor."""
        return name in self._kept

    def _raw(self, name: str, start: int, stop: int) -> Tensor:
        """The change as it was trained, in new memory."""
        wide = accumulate_dtype(self._specs[name].dtype)
        values = self._base.values_of(name, start, stop).to(wide)
        return values.sub_(run_of(self._tensors[name], start, stop).to("cpu", wide))

    def _through(self, name: str, start: int, stop: int, count: int) -> Tensor:
        """The change, behind the first `count` filters."""
        return self._behind(name, start, self._raw(name, start, stop), count)

    def _behind(self, name: str, start: int, values: Tensor, count: int) -> Tensor:
        """What the first `count` filters make of `values`, which they may change."""
        wide = values.dtype
        for filter_ in self._filters[:count]:
            found = self._call(filter_, f"{name!r}", partial(filter_.apply, name, start, values))
            if not isinstance(found, Tensor) or found.shape != values.shape or found.dtype != wide:
                told = f"{found.dtype} {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
                raise UsageError(
                    f"The filter {filter_!r} made {told} where {name!r} had {wide} {list(values.shape)}.",
                    "A filter returns as many elements as it was given, of the same dtype; this update does not count.",
                )
            values = found.to("cpu")
        return values

    @staticmethod
    def _call(filter_: Filter, of: str, call: Callable[[], object]) -> object:
        try:
            return call()
        except AtollError:
            raise
        except Exception as error:
            raise UsageError(
                f"The filter {filter_!r} failed at {of}: {type(error).__name__}: {error}. The update is not completed.",
                "Its traceback is above; the round goes on with the other sites.",
            ) from error


def require_filters(filters: Sequence[Filter]) -> tuple[Filter, ...]:
    """What a user gave as `filters`.

    Raises:
        UsageError: one is no filter.
    """
    for each in filters:
        if not isinstance(each, Filter):
            raise UsageError(f"{each!r} is not a filter.", "Derive it from atoll.filters.Filter.")
    return tuple(filters)
