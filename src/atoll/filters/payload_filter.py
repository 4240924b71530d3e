"""Filters between a payload and what travels: each float tensor passes through all of them while it is written.

    model.w  ──run──▶ fp32 ──filter──▶ … ──filter──▶ its own dtype ──▶ file

Nothing is copied before: a tensor stands in the payload as a `Stream` that reads its runs and filters them when they
are asked for. Integers, booleans and NumPy scalars stay as they are.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from atoll.errors import UsageError
from atoll.filters.base import About, BadFilter, Chain, Filter, require_filters
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of, run_of
from atoll.tensors.custom_types import Chunk, Stream
from atoll.tensors.dtypes import accumulate_dtype, dtype_name
from atoll.tensors.payload import Packed, names_of, without
from atoll.tensors.schema import TensorSpec

T = TypeVar("T")

ByTask = Sequence[Filter] | Mapping[str, Sequence[Filter]]
"""Filters for every task, or by the name of a task."""


def for_tasks(given: ByTask) -> list[tuple[Filter, frozenset[str]]]:
    """Each filter with the tasks that it is for; none for every task.

    Raises:
        UsageError: one is no filter.
    """
    if not isinstance(given, Mapping):
        return [(each, frozenset()) for each in require_filters(given)]
    return [(each, frozenset([task])) for task, filters in given.items() for each in require_filters(filters)]


def filtered(packed: Packed, filters: Sequence[Filter], about: About, what: str) -> Packed:
    """A payload as it is to travel: None in the places of what is dropped, and each float tensor behind the filters.

    The filters' `begin` and `keeps` are called here, and `apply` while it is written: until then they may not be used
    for another payload.

    Args:
        what: begins the errors: names the payload, and says what does not become of it.

    Raises:
        UsageError: a filter raised, or looked at what is not finite; filter and tensor are named.
    """
    names = _told(lambda: names_of(packed), what) if filters else {}
    if not names:
        return packed
    tensors = {own[0]: packed.tensors[index] for index, own in names.items()}
    specs = {name: TensorSpec(name, dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}
    cursors = {name: _Cursor(each) for name, each in tensors.items() if isinstance(each, Stream)}

    def raw(name: str, start: int, stop: int) -> Tensor:
        tensor = tensors[name]
        run = run_of(tensor, start, stop) if isinstance(tensor, Tensor) else cursors[name].run(start, stop)
        values = torch.empty(stop - start, dtype=accumulate_dtype(specs[name].dtype)).copy_(run)
        if not bool(torch.isfinite(values).all()):  # a filter would make NaN of it, or be blamed for it
            raise UsageError(f"{name!r} has NaN or Inf before it is filtered.", "Drop it first, or send booleans.")
        return values

    aliases = {further: own[0] for own in names.values() for further in own[1:]}
    chain = _told(lambda: Chain(filters, specs, about, raw, aliases=aliases, finite=True), what)
    changing = any(type(each).apply is not Filter.apply for each in filters)
    through = list(packed.tensors)
    for index, (name, *_) in names.items():
        if changing and specs[name].is_float and chain.sends(name):
            runs = partial(_runs, chain, specs[name], packed.tensors[index].dtype, repr(filters[-1]), what)
            through[index] = _Through(packed.tensors[index].dtype, specs[name].shape, runs)
    dropped = frozenset(index for index, (name, *_) in names.items() if not chain.sends(name))
    return without(replace(packed, tensors=tuple(through)), dropped)


def said(error: BaseException) -> str:
    """An error for the log, with the traceback of what a filter raised: as text, since a record keeps no payload."""
    cause = "" if error.__cause__ is None else "\n" + "".join(traceback.format_exception(error.__cause__)).rstrip()
    return f"{error}{cause}"


class _Through(Stream):
    """A tensor behind the filters; what fails has been told by then."""

    def _chunks(self) -> Iterator[Chunk]:
        yield from self.chunks()


def _runs(chain: Chain, spec: TensorSpec, dtype: torch.dtype, last: str, what: str) -> Iterator[Tensor]:
    for start in range(0, spec.numel, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, spec.numel)
        values = _told(partial(chain.change, spec.name, start, stop), what).to(dtype)
        if dtype.itemsize < 4 and not bool(torch.isfinite(values.float()).all()):
            raise UsageError(
                f"{what}: what filter {last} left of {spec.name!r} is beyond what {dtype} can hold.",
                "Send the tensor in a wider dtype, or filter it to smaller values.",
            )
        yield values


@dataclass(eq=False)
class _Cursor:
    """Reads runs of a stream, which are mostly asked for in their order; one that lies before begins it anew."""

    stream: Stream
    at: int = 0
    rest: memoryview = field(default_factory=lambda: memoryview(b""))
    chunks: Iterator[memoryview] | None = None

    def run(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in new memory."""
        size = self.stream.itemsize
        if self.chunks is None or start * size < self.at:
            self.chunks, self.at, self.rest = self.stream.runs(), 0, memoryview(b"")
        out = torch.empty(stop - start, dtype=self.stream.dtype)
        self._read(None, start * size - self.at)
        self._read(bytes_of(out), (stop - start) * size)
        if stop * size == self.stream.nbytes:
            for _ in self.chunks:  # it looks whether there is more than there should be
                pass
            self.chunks = None
        return out

    def _read(self, into: memoryview | None, count: int) -> None:
        assert self.chunks is not None
        done = 0
        while done < count:
            if not self.rest:
                self.rest = next(self.chunks)  # it raises where it has too few
            run, self.rest = self.rest[: count - done], self.rest[count - done :]
            if into is not None:
                into[done : done + len(run)] = run
            done += len(run)
        self.at += count


def _told(call: Callable[[], T], what: str) -> T:
    try:
        return call()
    except BadFilter as error:
        remedy = "Look at its code." if error.raised else "It returns as many elements, finite, of their dtype."
        raise UsageError(f"{what}: the filter {error}.", remedy) from error.__cause__
    except UsageError as error:
        raise UsageError(f"{what}: {error.message}", error.remedy) from error
