"""The updates of a frozen round, as the reducers see them: one row of decoded elements per update, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from atoll.aggregation.plan import Run
from atoll.aggregation.scratch import Scratch, read_at
from atoll.aggregation.values import UpdateSource
from atoll.codecs.base import Codec
from atoll.reducers.base import Reducer, normalised
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Layout

_RAW = "none"


@dataclass(slots=True)
class _Strip:
    """Bytes [offset, offset + nbytes) of an update that decode to elements [start, start + numel) of a row."""

    codec: str
    offset: int
    nbytes: int
    start: int
    numel: int


class Updates:
    """Reduces the same runs of elements of every update.

    Args:
        sources: in the frozen order.
        reducers: by group, for floats.
        integers: the reducer of everything else.
        codecs: by name.
    """

    def __init__(
        self,
        sources: Sequence[UpdateSource],
        reducers: Mapping[str, Reducer],
        integers: Reducer,
        codecs: Mapping[str, Codec],
    ) -> None:
        self._sources = sources
        self._weights = normalised([source.weight for source in sources])
        self._reducers = reducers
        self._integers = integers
        self._codecs = codecs

    @property
    def rows_at_once(self) -> int:
        """Rows that are in memory together, beside the result."""
        return len(self._sources) if any(reducer.needs_all for reducer in self._reducers.values()) else 1

    def reduce_(self, runs: Sequence[Run], out: Tensor, scratch: Scratch) -> None:
        """Write the reduction of runs of one group and dtype, one after the other, into `out`.

        Args:
            runs: of n elements together.
            out: [n], in their dtype of accumulation.
            scratch: of at least n × `rows_at_once` elements.
        """
        spec = runs[0].spec
        reducer = self._reducers[spec.group] if spec.is_float else self._integers
        rows = self._rows(runs, out.numel(), scratch)
        if reducer.needs_all:
            together = scratch.tensor("rows", out.dtype, len(self._sources) * out.numel()).view(-1, out.numel())
            for target, row in zip(together, rows, strict=True):
                target.copy_(row)
            reducer.reduce_(together, self._weights, out)
        else:
            reducer.reduce_(rows, self._weights, out)

    def _rows(self, runs: Sequence[Run], numel: int, scratch: Scratch) -> Iterator[Tensor]:
        """Each update's elements, in turn; a row is overwritten by the next."""
        dtype = runs[0].spec.dtype
        stored, accumulate = torch_dtype(dtype), accumulate_dtype(dtype)
        reads: dict[int, list[list[_Strip]]] = {}  # the updates of a round have one layout, as a rule
        for source in self._sources:
            layout = source.layout
            if id(layout) not in reads:
                reads[id(layout)] = list(_reads(self._strips(layout, runs), scratch.nbytes))
            row = None
            for strips in reads[id(layout)]:
                low, high = strips[0].offset, strips[-1].offset + strips[-1].nbytes
                read_at(source.fd, scratch.view("source", high - low), low)
                encoded = scratch.raw("source", high - low)
                if strips[0].numel == numel and strips[0].codec == _RAW and stored == accumulate:
                    row = encoded.view(stored)
                    break
                row = scratch.tensor("row", accumulate, numel)
                for strip in strips:
                    source_bytes = encoded[strip.offset - low : strip.offset - low + strip.nbytes]
                    target = row[strip.start : strip.start + strip.numel]
                    self._codecs[strip.codec].decode_(source_bytes, target, dtype)
            assert row is not None
            yield row

    def _strips(self, layout: Layout, runs: Sequence[Run]) -> Iterator[_Strip]:
        """Where the runs lie in an update; what touches is joined where the codec allows it."""
        strip: _Strip | None = None
        start = 0
        for run in runs:
            piece = layout.piece(layout.by_name[run.segment.spec.name], run.start, run.stop)
            codec = piece.segment.codec
            joins = strip is not None and strip.codec == codec and strip.offset + strip.nbytes == piece.offset
            if strip is not None and joins and self._codecs[codec].elementwise:
                strip.nbytes += piece.nbytes
                strip.numel += piece.numel
            else:
                if strip is not None:
                    yield strip
                strip = _Strip(codec, piece.offset, piece.nbytes, start, piece.numel)
            start += piece.numel
        if strip is not None:
            yield strip


def _reads(strips: Iterator[_Strip], max_bytes: int) -> Iterator[list[_Strip]]:
    """Strips that are read at once, the padding between them included: tiny tensors may be mostly padding."""
    held: list[_Strip] = []
    for strip in strips:
        if held and strip.offset + strip.nbytes - held[0].offset > max_bytes:
            yield held
            held = []
        held.append(strip)
    if held:
        yield held
