"""The updates of a frozen round, as the reducers see them: one row of decoded elements per update, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from atoll.aggregation.scratch import Scratch, read_at
from atoll.aggregation.values import UpdateSource
from atoll.aggregation.windows import Place, Places, Window
from atoll.codecs.base import Codec
from atoll.reducers.base import Reducer, RoundFacts
from atoll.tensors.chunks import bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.schema import PARAMS


class Updates:
    """Reduces the same runs of elements of every update.

    Args:
        sources: in the frozen order.
        reducers: by group, for floats.
        integers: the reducer of everything else.
        codecs: by name.
        places: where windows lie in updates of these layouts.
        population: weight of all sites, and the base's divided by it (`RoundFacts`).

    Attributes:
        carries: group → what the base of a group beside the model is multiplied by.
    """

    def __init__(
        self,
        sources: Sequence[UpdateSource],
        reducers: Mapping[str, Reducer],
        integers: Reducer,
        codecs: Mapping[str, Codec],
        places: Places,
        population: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self._sources = sources
        facts = RoundFacts(
            [source.weight for source in sources],
            [source.norm for source in sources],
            [source.steps for source in sources],
            *population,
        )
        self._weights = {group: reducer.weigh(facts) for group, reducer in reducers.items()}
        self.carries = {group: reducer.carry(facts) for group, reducer in reducers.items()}
        if any(source.scale != 1 for source in sources):
            scaled = zip(self._weights[PARAMS], sources, strict=True)
            self._weights[PARAMS] = [weight * source.scale for weight, source in scaled]
        self._unweighted = integers.weigh(facts)
        self._reducers = reducers
        self._integers = integers
        self._codecs = codecs
        self._places = places

    def place(self, window: Window) -> Place:
        """How the rows of a window lie in memory, and so what `reduce_` writes."""
        return self._places.of(window, self._sources[0].layout)

    def reduce_(self, window: Window, out: Tensor, scratch: Scratch) -> None:
        """Write the reduction of a window into `out`.

        Args:
            window: of n elements, as `place` says: with the padding between runs, whose values mean nothing.
            out: [n], in the window's dtype of accumulation.
            scratch: of at least n × `rows_at_once` elements.
        """
        spec = window.extents[0].spec
        if spec.is_float:
            reducer, weights = self._reducers[spec.group], self._weights[spec.group]
        else:
            reducer, weights = self._integers, self._unweighted
        if reducer.needs_all:
            together = scratch.tensor("rows", out.dtype, len(self._sources) * out.numel()).view(-1, out.numel())
            for source, target in zip(self._sources, together, strict=True):
                self._row(source, window, scratch, target)
            reducer.reduce_(together, weights, out)
        else:
            row = scratch.tensor("row", out.dtype, out.numel())
            reducer.reduce_((self._row(source, window, scratch, row) for source in self._sources), weights, out)

    def _row(self, source: UpdateSource, window: Window, scratch: Scratch, row: Tensor) -> Tensor:
        """One update's elements, in `row` [n]."""
        dtype, numel = window.dtype, row.numel()
        for strips in self._places.reads(window, source.layout, self._sources[0].layout):
            low, high = strips[0].offset, strips[-1].offset + strips[-1].nbytes
            if strips[0].numel == numel and self._codecs[strips[0].codec].raw and torch_dtype(dtype) == row.dtype:
                read_at(source.fd, bytes_of(row), low)
                break
            read_at(source.fd, scratch.view("source", high - low), low)
            encoded = scratch.raw("source", high - low)
            for strip in strips:
                source_bytes = encoded[strip.offset - low : strip.offset - low + strip.nbytes]
                target = row[strip.start : strip.start + strip.numel]
                self._codecs[strip.codec].decode_(source_bytes, target, dtype)
        return row


def rows_at_once(sources: Sequence[UpdateSource], reducers: Mapping[str, Reducer]) -> int:
    """Rows of a window that are in memory together, beside the result."""
    return len(sources) if any(reducer.needs_all for reducer in reducers.values()) else 1
