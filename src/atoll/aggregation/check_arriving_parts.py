"""A part of an update, looked at once while it arrives, in fixed memory: digest, finite or not, sum of squares.

Bytes are gathered into spans of about 1 MiB; each is written and looked at while it is still in a core's cache. One
pass does for both numbers: where the sum of squares is finite, all values are. Norms of short rows are taken in fp32,
at half the cost of a sum in fp64, and their squares added in fp64: that differs from the exact sum by less than 1e-6
of it. Where fp32 has no room for a square, above or below, fp64 looks again.

A part has memory while a thread works on it. Between two turns of a thread the first `HELD` parts keep it; with more,
what has come of a span is written early, and read back from the page cache when its next bytes are there. So memory
does not grow with the number of parts that arrive at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch
from blake3 import blake3

from atoll.aggregation.decode_updates import read_at
from atoll.codecs.base import Codec
from atoll.errors import BadRequest, RunFailed, StoreError
from atoll.runtime import single_thread
from atoll.tensors.byte_runs import Run, RunTable, neighbours
from atoll.tensors.chunks import WIDEST_BYTES, Scratch, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Layout, Part, Piece
from atoll.tensors.schema import PARAMS, TensorSpec

ELEMENTS = 2**18
"""Looked at in one go: 2 MiB of fp64."""

ROW = 512
"""Elements of a norm that is taken in fp32."""
SMALLEST = 1e-20
"""A sum of squares below it may lack what fp32 has no room for; above, less than 1e-12 of it is lacking."""

HELD = 12
"""Scratches that parts hold between two turns of a thread, at most: 1 MiB each."""
FREE = 12
"""Scratches that wait for the next part, at most."""

_local = threading.local()


@dataclass(frozen=True, slots=True)
class PartStats:
    """What a part holds.

    Attributes:
        digest: BLAKE3 of its bytes; empty where it was not asked for.
        sumsq: of all `params` in it, decoded, in fp64; not finite where they are not.
        bad: what is wrong with it, naming the tensor; None where nothing is.
    """

    digest: bytes
    sumsq: float
    bad: str | None


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes [start, stop) of the update with whole runs: at most `ELEMENTS` × 8 and the padding on both sides."""

    start: int
    stop: int
    runs: tuple[Run, ...]


class Inspection:
    """How the parts of a run's updates are looked at: made once, shared by all that arrive.

    Args:
        layout: the updates'; it has no header.
        codecs: by name, every one that the layout names.
    """

    def __init__(self, layout: Layout, codecs: Mapping[str, Codec]) -> None:
        self.codecs = codecs
        self._runs = RunTable(layout, ELEMENTS)
        self._spans: dict[int, tuple[_Span, ...]] = {}
        self._free: list[Scratch] = []
        self._lent, self._lock = 0, threading.Lock()

    def begin(
        self,
        part: Part,
        write: Callable[[memoryview], None],
        read: Callable[[memoryview, int], None] | None = None,
        *,
        hashed: bool = True,
    ) -> PartInspector:
        """Look at a part from its first byte.

        Args:
            part: one of the layout's.
            write: given every byte of it once, in order and in runs, before they are looked at.
            read: fills memory with what was written at a byte of the update; None: the part keeps its memory.
            hashed: whether the digest is wanted; a worker that has formed the part knows it.
        """
        spans = self._spans.get(part.index)
        if spans is None:
            spans = self._spans[part.index] = tuple(self._cut(part))
        return PartInspector(self, part, spans, write, read, hashed)

    def lend(self) -> Scratch:
        """Return a scratch, to be given back."""
        with self._lock:
            self._lent += 1
            return self._free.pop() if self._free else Scratch(ELEMENTS)

    def give_back(self, scratch: Scratch) -> None:
        """Keep a scratch that is not used any more for the next part."""
        with self._lock:
            self._lent -= 1
            if len(self._free) < FREE:
                self._free.append(scratch)

    @property
    def scarce(self) -> bool:
        """Whether so many are lent that no part should keep one without using it."""
        return self._lent > HELD

    def _cut(self, part: Part) -> Iterator[_Span]:
        def joins(span: list[Run], run: Run) -> bool:
            return run.stop - span[0].start <= ELEMENTS * WIDEST_BYTES

        spans = list(neighbours(self._runs.of(part), joins))
        ends = [span[-1].stop for span in spans[:-1]]
        for start, stop, runs in zip([part.start, *ends], [*ends, part.stop], spans or [[]], strict=True):
            if stop > start:
                yield _Span(start, stop, tuple(runs))


class PartInspector:
    """Takes the bytes of one part, in order; one thread at a time. A context: on leaving it, its memory is given back.

    A thread that leaves it while another one is in `take` leaves the memory to that one.
    """

    def __init__(
        self,
        inspection: Inspection,
        part: Part,
        spans: tuple[_Span, ...],
        write: Callable[[memoryview], None],
        read: Callable[[memoryview, int], None] | None,
        hashed: bool,
    ) -> None:
        self._inspection, self._spans, self._write, self._read = inspection, spans, write, read
        self._index, self._next = part.index, 0
        self._filled = self._written = 0  # of the next span
        self._scratch: Scratch | None = None
        self._hasher, self._sumsq, self._bad = blake3() if hashed else None, 0.0, list[str]()
        self._busy, self._left = threading.Lock(), False

    def __enter__(self) -> PartInspector:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._left = True
        self._let_go()

    @property
    def complete(self) -> bool:
        """Whether every byte of the part was written and looked at."""
        return self._next == len(self._spans)

    def take(self, fill: Callable[[memoryview], int]) -> None:
        """Have memory filled until there is no more for now, or until the part is complete.

        Args:
            fill: brings the next bytes into the memory it is given, from its start; returns how many, 0: none for now.

        Raises:
            StoreError: the part was left before.
            Exception: what `fill` raised, or the writer.
        """
        with self._working():
            if not self.complete:
                self._take(fill, self._scratch or self._take_up())

    def take_from(self, data: memoryview) -> int:
        """Look at the bytes that come next where they lie, in writable memory, as far as they are whole spans.

        Returns:
            How many that were; `take` brings the others.

        Raises:
            StoreError, Exception: as `take`.
        """
        done = 0
        with self._working():
            while not self.complete and not self._filled:
                span = self._spans[self._next]
                view = data[done : done + span.stop - span.start]
                if len(view) < span.stop - span.start:
                    break
                self._look(span, view, torch.frombuffer(view, dtype=torch.uint8))
                self._next, done = self._next + 1, done + len(view)
        return done

    @contextmanager
    def _working(self) -> Iterator[None]:
        try:
            with self._busy, single_thread():
                if self._left:
                    raise StoreError(f"Part {self._index} is no longer received.")
                yield
        finally:
            if self._left:  # meanwhile; the thread that left could not take the memory from this one
                self._let_go()

    def _take(self, fill: Callable[[memoryview], int], scratch: Scratch) -> None:
        while not self.complete:
            span = self._spans[self._next]
            room = scratch.view("source", span.stop - span.start)[self._filled :]
            count = fill(room)
            if not count:
                break
            self._filled += count
            if count == len(room):
                nbytes = span.stop - span.start
                self._look(span, scratch.view("source", nbytes), scratch.raw("source", nbytes))
                self._next, self._filled, self._written = self._next + 1, 0, 0
        self._put_aside(scratch)

    def _take_up(self) -> Scratch:
        """Memory, with what has come of the span before."""
        scratch = self._scratch = self._inspection.lend()
        if self._filled and self._read is not None:
            self._read(scratch.view("source", self._filled), self._spans[self._next].start)
        return scratch

    def _put_aside(self, scratch: Scratch) -> None:
        """Do without memory until there is more to take, where it is empty, or where others need it."""
        if self._filled:
            if self._read is None or not self._inspection.scarce:
                return
            self._write(scratch.view("source", self._filled - self._written, self._written))
            self._written = self._filled
        self._scratch = None
        self._inspection.give_back(scratch)

    def _let_go(self) -> None:
        if self._busy.acquire(blocking=False):
            scratch, self._scratch = self._scratch, None
            self._busy.release()
            if scratch is not None:
                self._inspection.give_back(scratch)

    def stats(self) -> PartStats:
        """Return what the part holds.

        Raises:
            BadRequest: it is not all there.
        """
        if not self.complete:
            raise BadRequest(f"Part {self._index} is not all there.", "Send it again.")
        digest = self._hasher.digest() if self._hasher is not None else b""
        return PartStats(digest, self._sumsq, self._bad[0] if self._bad else None)

    def _look(self, span: _Span, view: memoryview, raw: torch.Tensor) -> None:
        """Write what was not yet written of a span, and sum what is in it; `view` and `raw` are its bytes."""
        self._write(view[self._written :])
        if self._hasher is not None:
            self._hasher.update(view)
        for run in span.runs:
            if run.spec.is_float:
                squares = self._run_squares(run, raw[run.start - span.start : run.stop - span.start])
                if run.spec.group == PARAMS:
                    self._sumsq += squares

    def _run_squares(self, run: Run, encoded: torch.Tensor) -> float:
        """Σ x² of a run; a tensor of it that holds what is not finite is named in `_bad`.

        Padding is zero, and counts; a worker that writes other values there only raises its own norm.
        """
        squares = self._quick_squares(run, encoded) if run.is_whole else math.nan
        if math.isnan(squares):
            squares = self._squares(run.spec, run.codec, encoded, run.numel) if run.is_whole else math.nan
        if squares < math.inf:
            return squares
        # somewhere in it, or in the padding, which belongs to no tensor
        return sum(map(self._piece_squares, run.pieces, run.encoded(encoded)))

    def _piece_squares(self, piece: Piece, encoded: torch.Tensor) -> float:
        """Σ x² of one piece alone."""
        spec = piece.segment.spec
        squares = self._squares(spec, piece.segment.codec, encoded, piece.numel)
        # fp64 values can be finite and their squares not, so those are looked at one by one
        overflow = squares == math.inf and spec.dtype == "F64"
        if overflow:
            overflow = bool(_values(piece.numel, torch.float64).isfinite().all())
        if not (squares < math.inf or overflow):
            is_overflow = not bool(_values(piece.numel, torch.float64).isnan().any())
            overflow_told = f"{spec.name} holds Inf: an overflow of what {spec.dtype} or its codec can hold"
            self._bad.append(overflow_told if is_overflow else f"{spec.name} holds NaN or Inf")
        return squares

    def _quick_squares(self, run: Run, encoded: torch.Tensor) -> float:
        """Σ x² in fp32 rows; NaN where that cannot be told from them."""
        codec, dtype = self._inspection.codecs[run.codec], run.spec.dtype
        if accumulate_dtype(dtype) != torch.float32:
            return math.nan
        if codec.raw and dtype == "F32":
            values = encoded.view(torch.float32)
        else:
            values = _values(run.numel, torch.float32)
            codec.decode_(encoded, values, dtype)
        whole = run.numel - run.numel % ROW
        norms = torch.linalg.vector_norm(values[:whole].view(-1, ROW), dim=1).double()
        squares = float(torch.dot(norms, norms))
        if whole < run.numel:
            rest = values[whole:].double()
            squares += float(torch.dot(rest, rest))
        return squares if SMALLEST < squares < math.inf else math.nan

    def _squares(self, spec: TensorSpec, codec: str, encoded: torch.Tensor, numel: int) -> float:
        """Σ x² in fp64 of what lies encoded in the scratch; decoded, it stays in this thread's `_values`."""
        values = _values(numel, torch.float64)
        self._inspection.codecs[codec].decode_(encoded, values, spec.dtype)
        return float(torch.dot(values, values))


def _values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first elements of what the calling thread decodes into [numel]."""
    if not hasattr(_local, "scratch"):
        _local.scratch = Scratch(ELEMENTS)
    scratch: Scratch = _local.scratch
    return scratch.tensor("values", dtype, numel)


class Overflow(RunFailed):
    """The next version would hold a value that its dtype cannot."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "Begin a new run in another disk.state_dir from that version (atoll export) with a lower "
            "algorithm.outer_optimizer.lr or "
            "algorithm.outer_optimizer.momentum, smaller updates (the filter norm_clip), or a model in bf16 or fp32. "
            "A server that is "
            "started on this disk.state_dir again comes to the same.",
        )


def require_finite(run: Run, values: torch.Tensor, base_fd: int) -> None:
    """Check what the next version is to have of a run. Base and updates are finite, so Inf and NaN are the round's own.

    Args:
        values: [n], in the version's dtype.
        base_fd: of the version before it, for the message.

    Raises:
        Overflow: one of them is Inf or NaN.
    """
    if not run.spec.is_float:
        return
    wide = values.to(accumulate_dtype(run.spec.dtype))
    if bool(torch.dot(wide, wide).isfinite()):  # as a sum of squares: one quick pass, which no Inf or NaN survives
        return
    for piece, elements in zip(run.pieces, run.split(wide), strict=True):
        bad = elements.isfinite().logical_not_().nonzero()
        if not len(bad):
            continue
        at, spec, dtype = int(bad[0]), piece.segment.spec, torch_dtype(run.spec.dtype)
        before = torch.empty(1, dtype=dtype)
        read_at(base_fd, bytes_of(before), piece.offset + at * dtype.itemsize)
        raise Overflow(
            f"The round's result overflows {spec.dtype}, which holds values up to {torch.finfo(dtype).max:g}: element "
            f"{piece.start + at} of {spec.name!r} would go from {float(before):g} to {float(elements[at]):g}. No "
            "version is published; the last one stays."
        )
