"""A part of an update, checked as it arrives: digest, finite or not, sum of squares. In fixed memory.

Bytes are hashed and written as they come, so a part that is on its way has no memory of its own. Each run of elements
is read back from the file once its last byte is there, while the processor's cache still has it: to look at a part as
a whole at its end costs a server a tenth more CPU. One pass does for both numbers: where the sum of
squares is finite, all values are. Norms of short rows are taken in fp32, at half the cost of a sum in fp64, and their
squares added in fp64: that differs from the exact sum by less than 1e-6 of it. Where fp32 has no room for a square,
above or below, fp64 looks again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from blake3 import blake3

from atoll.aggregation.decode_updates import read_at
from atoll.codecs.base import Codec
from atoll.errors import RunFailed
from atoll.runtime import single_thread
from atoll.tensors.byte_runs import Run, RunTable
from atoll.tensors.chunks import Scratch, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Layout, Part, Piece
from atoll.tensors.schema import PARAMS, TensorSpec

ELEMENTS = 2**18
"""Looked at in one go: 2 MiB of fp64."""
RUN_BYTES = 2**20
"""Received, hashed and written in one go."""

ROW = 512
"""Elements of a norm that is taken in fp32."""
SMALLEST = 1e-20
"""A sum of squares below it may lack what fp32 has no room for; above, less than 1e-12 of it is lacking."""

_local = threading.local()


def _scratch() -> Scratch:
    """Return the memory of the calling thread."""
    if not hasattr(_local, "scratch"):
        _local.scratch = Scratch(ELEMENTS)
    scratch: Scratch = _local.scratch
    return scratch


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


class Inspection:
    """How the parts of a run's updates are looked at: made once, shared by all that arrive.

    Args:
        layout: the updates'; it has no header.
        codecs: by name, every one that the layout names.
    """

    def __init__(self, layout: Layout, codecs: Mapping[str, Codec]) -> None:
        self.codecs = codecs
        self._runs = RunTable(layout, ELEMENTS)

    def look(self, part: Part, fd: int, digest: bytes = b"") -> PartStats:
        """Return what a part holds that lies at its place in an open file.

        Raises:
            StateCorrupt: the file ends before.
        """
        look = PartLook(self, part, fd)
        look.up_to(part.stop)
        return look.stats(digest)

    def runs_of(self, part: Part) -> Iterator[Run]:
        """Give the runs of a part that hold floating-point numbers, in file order."""
        return (run for run in self._runs.of(part) if run.spec.is_float)

    def squares_of(self, run: Run, fd: int, bad: list[str]) -> float:
        """Return Σ x² of a run, read from an open file; a tensor of it that is not finite is named in `bad`.

        Padding is zero, and counts; a worker that writes other values there only raises its own norm.
        """
        read_at(fd, _scratch().view("source", run.stop - run.start), run.start)
        encoded = _scratch().raw("source", run.stop - run.start)
        squares = self._quick_squares(run, encoded) if run.is_whole else math.nan
        if math.isnan(squares):
            squares = self._squares(run.spec, run.codec, encoded, run.numel) if run.is_whole else math.nan
        if squares < math.inf:
            return squares
        # somewhere in it, or in the padding, which belongs to no tensor
        pieces = zip(run.pieces, run.encoded(encoded), strict=True)
        return sum(self._piece_squares(piece, values, bad) for piece, values in pieces)

    def _piece_squares(self, piece: Piece, encoded: torch.Tensor, bad: list[str]) -> float:
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
            bad.append(overflow_told if is_overflow else f"{spec.name} holds NaN or Inf")
        return squares

    def _quick_squares(self, run: Run, encoded: torch.Tensor) -> float:
        """Σ x² in fp32 rows; NaN where that cannot be told from them."""
        codec, dtype = self.codecs[run.codec], run.spec.dtype
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
        self.codecs[codec].decode_(encoded, values, spec.dtype)
        return float(torch.dot(values, values))


def _values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the first elements of what the calling thread decodes into [numel]."""
    return _scratch().tensor("values", dtype, numel)


class PartLook:
    """The look at one part in an open file, which goes on as its bytes come; one thread at a time."""

    def __init__(self, inspection: Inspection, part: Part, fd: int) -> None:
        self._inspection, self._fd, self._runs = inspection, fd, inspection.runs_of(part)
        self._next, self._sumsq, self._bad = next(self._runs, None), 0.0, list[str]()

    def up_to(self, offset: int) -> None:
        """Look at every run that ends at or before a place of the file."""
        with single_thread():
            while self._next is not None and self._next.stop <= offset:
                squares = self._inspection.squares_of(self._next, self._fd, self._bad)
                self._sumsq += squares if self._next.spec.group == PARAMS else 0.0
                self._next = next(self._runs, None)

    def stats(self, digest: bytes) -> PartStats:
        """Return what was found, with the digest of the part's bytes."""
        return PartStats(digest, self._sumsq, self._bad[0] if self._bad else None)


class PartChecker:
    """Takes the bytes of one part, in order; one thread at a time.

    Args:
        write: given every byte once, in order and in runs.
        fd: the update's file, in which they then are.

    Attributes:
        stats: what the part holds, once it is complete.
    """

    def __init__(self, inspection: Inspection, part: Part, write: Callable[[memoryview], None], fd: int) -> None:
        self._look, self._stop, self._write = PartLook(inspection, part, fd), part.stop, write
        self._hasher, self._left = blake3(), part.nbytes
        self.stats: PartStats | None = None

    @property
    def complete(self) -> bool:
        """Whether every byte of the part was written and looked at."""
        return self.stats is not None

    def take(self, fill: Callable[[memoryview], int]) -> None:
        """Have memory filled until there is no more for now, or until the part is complete.

        Args:
            fill: brings the next bytes into the memory it is given, from its start; returns how many, 0: none for now.

        Raises:
            Exception: what `fill` raised, or the writer.
        """
        memory, filled, count = _scratch().view("source", RUN_BYTES), 0, -1
        while self._left and count:
            count = fill(memory[filled : min(filled + self._left, RUN_BYTES)])
            filled, self._left = filled + count, self._left - count
            if filled == RUN_BYTES or not (self._left and count):
                self._write(memory[:filled])
                self._hasher.update(memory[:filled])
                self._look.up_to(self._stop - self._left)
                filled = 0
        if not (self._left or self.stats):
            self.stats = self._look.stats(self._hasher.digest())


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
