"""Which bytes go through the pass together: a part of the version as windows.

A window is one run of the version file and of each column of the state file, read and written at once: a chunk of a
large tensor, or many small tensors one after the other, all of one kind, group and dtype. Tensors are still stepped
each for itself.

    part     | header | w0 ........ | w1 ........... | w2 | w3  |
    window             [tensor 0   ][0: rest][1][2][3] ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from atoll.outer.rule import Granularity
from atoll.tensors.layout import Part, Segment, chunks
from atoll.tensors.schema import PARAMS, TensorSpec

Kind = Literal["step", "whole", "mean", "count"]
"""step: parameters; whole: those that were stepped as whole tensors before; mean: other floats; count: integers."""


@dataclass(frozen=True, slots=True)
class Run:
    """Elements [start, stop) of one tensor of the version."""

    segment: Segment
    start: int
    stop: int

    @property
    def spec(self) -> TensorSpec:
        return self.segment.spec

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(slots=True)
class Window:
    """Runs that follow one another in the version file, from byte `offset` on."""

    kind: Kind
    group: str
    dtype: str
    offset: int
    numel: int = 0
    runs: list[Run] = field(default_factory=list)


def kind_of(spec: TensorSpec, granularity: Granularity) -> Kind:
    """What the pass does with a tensor."""
    if not spec.is_float:
        return "count"
    if spec.group != PARAMS:
        return "mean"
    return "step" if granularity == "chunk" else "whole"


def windows(part: Part, max_elements: int, granularity: Granularity) -> Iterator[Window]:
    """The windows of `part`, in file order, each of at most `max_elements` (a multiple of the tile)."""
    window: Window | None = None
    for piece, start, stop in chunks(part, max_elements):
        spec = piece.segment.spec
        kind = kind_of(spec, granularity)
        fits = window is not None and window.numel + stop - start <= max_elements
        if window is None or not fits or (window.kind, window.group, window.dtype) != (kind, spec.group, spec.dtype):
            if window is not None:
                yield window
            window = Window(kind, spec.group, spec.dtype, piece.offset + (start - piece.start) * spec.item_bytes)
        window.runs.append(Run(piece.segment, start, stop))
        window.numel += stop - start
    if window is not None:
        yield window
