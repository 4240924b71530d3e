"""Check the parts of an update while they arrive: compute the digest and the sum of squares, and find NaN and Inf.

Received bytes are hashed and written to a file at once, so that a part is never in memory as a whole. A part is checked
in byte runs (ranges of elements). If one call of `PartChecker.take` receives a whole run, the run is checked in memory.
A run that arrived in several calls is read back from the file. Reading back every run would cost the server 2 % more
CPU; checking each part only when it is complete would cost 10 % more.

If the sum of squares is finite, all values are finite, so one pass over the values is enough. The norms of short rows
are computed in fp32, at half the cost of a sum in fp64, and their squares are added in fp64. The relative error is
below 1e-6. If a square overflows or underflows in fp32, the sum is computed again in fp64.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from blake3 import blake3

from atoll.aggregation.decode_updates import read_at
from atoll.codecs.base import Codec
from atoll.errors import RunFailed
from atoll.runtime import single_thread
from atoll.tensors.byte_runs import ByteRun, RunTable
from atoll.tensors.chunks import WIDEST_BYTES, Scratch, bytes_of, is_sound
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, Piece
from atoll.tensors.schema import PARAMS, TensorSpec

ELEMENTS = 2**18
"""Maximum number of elements in a byte run: 2 MiB of fp64."""
RUN_BYTES = ELEMENTS * WIDEST_BYTES
"""Maximum number of bytes that are received, hashed and written together."""

ROW = 512
"""Number of elements over which one norm is computed in fp32."""
SMALLEST = 1e-20
"""Smallest sum of squares for which fp32 is used. Above it, underflow loses less than 1e-12 of the sum."""

_local = threading.local()


def _scratch() -> Scratch:
    """Return the calling thread's buffers for temporary tensors."""
    if not hasattr(_local, "scratch"):
        _local.scratch = Scratch(ELEMENTS)
    scratch: Scratch = _local.scratch
    return scratch


@dataclass(frozen=True, slots=True)
class PartStats:
    """Result of checking one part of an update.

    Attributes:
        digest: BLAKE3 of the part's bytes; empty if it was not computed.
        sumsq: sum of squares of the part's decoded `params`, in fp64; not finite if a value is NaN or Inf.
        bad: message that names the first tensor with NaN or Inf; None if all values are finite.
    """

    digest: bytes
    sumsq: float
    bad: str | None


class Inspection:
    """Checks the parts of updates for NaN and Inf and computes their norms. All threads use the same instance.

    Args:
        layout: layout of an update of one fragment of the model; it has no header.
        codecs: name → codec, for every codec in the layout.
    """

    def __init__(self, layout: Layout, codecs: Mapping[str, Codec]) -> None:
        self.codecs = codecs
        self._runs = RunTable(layout, ELEMENTS)

    def check(self, part: Part, fd: int, digest: bytes = b"") -> PartStats:
        """Check a part after all its bytes were written to a file.

        Args:
            part: the part, a range of the update's file.
            fd: descriptor of the update's file.
            digest: BLAKE3 of the part's bytes; copied into the result.

        Raises:
            StateCorrupt: the file ends before the end of the part.
        """
        scan = PartScan(self, part, fd)
        scan.check_until(part.stop)
        return scan.stats(digest)

    def runs_of(self, part: Part) -> Iterator[ByteRun]:
        """Yield the byte runs of a part that hold floating-point numbers to check, in file order."""
        return (run for run in self._runs.of(part) if run.spec.is_float)

    def squares_of(self, run: ByteRun, encoded: torch.Tensor, bad: list[str]) -> float:
        """Return the sum of squares, Σ x², of a byte run. For each tensor with NaN or Inf, append a message to `bad`.

        Padding between tensors is included. It should be zero; a worker that writes other values there only raises the
        norm of its own update.

        Args:
            run: the byte run, a range of elements that is processed at once.
            encoded: the bytes of the run, uint8 [stop - start]. Their address is a multiple of `ALIGN_BYTES`.
            bad: list of messages.
        """
        squares = self._quick_squares(run, encoded) if run.is_whole else math.nan
        if math.isnan(squares):
            squares = self._squares(run.spec, run.codec, encoded, run.numel) if run.is_whole else math.nan
        if squares < math.inf:
            return squares
        # NaN or Inf is in a tensor, or in the padding, which belongs to no tensor: check each tensor alone
        pieces = zip(run.pieces, run.encoded(encoded), strict=True)
        return sum(self._piece_squares(piece, values, bad) for piece, values in pieces)

    def _piece_squares(self, piece: Piece, encoded: torch.Tensor, bad: list[str]) -> float:
        """Return Σ x² of one tensor's piece of a byte run. If a value is NaN or Inf, append a message to `bad`."""
        spec = piece.segment.spec
        squares = self._squares(spec, piece.segment.codec, encoded, piece.numel)
        # the squares of finite fp64 values may overflow, so check the values, not the squares
        overflow = squares == math.inf and spec.dtype == "F64"
        if overflow:
            overflow = bool(_values(piece.numel, torch.float64).isfinite().all())
        if not (squares < math.inf or overflow or is_sound(spec, _values(piece.numel, torch.float64))):
            is_overflow = not bool(_values(piece.numel, torch.float64).isnan().any())
            overflowed = f"{spec.name} contains Inf: a value may be too large for {spec.dtype} or its codec"
            bad.append(overflowed if is_overflow else f"{spec.name} contains NaN or Inf")
        return squares

    def _quick_squares(self, run: ByteRun, encoded: torch.Tensor) -> float:
        """Return Σ x² of a byte run, computed in fp32; NaN if fp32 is not precise enough or a value is not finite."""
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
        """Return Σ x² of encoded elements, in fp64. The decoded elements stay in the memory that `_values` returns."""
        values = _values(numel, torch.float64)
        self.codecs[codec].decode_(encoded, values, spec.dtype)
        return float(torch.dot(values, values))


def _values(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor [numel] in the calling thread's memory, for decoded elements."""
    return _scratch().tensor("values", dtype, numel)


class PartScan:
    """Checks one part step by step, as its bytes arrive in a file. Only one thread at a time may use an instance."""

    def __init__(self, inspection: Inspection, part: Part, fd: int) -> None:
        self._inspection, self._part, self._fd, self._runs = inspection, part, fd, inspection.runs_of(part)
        self._next, self._sumsq, self._bad = next(self._runs, None), 0.0, list[str]()

    def next_stop(self, start: int) -> int:
        """Return the file offset up to which to receive next. If possible, this offset does not divide a byte run.

        Args:
            start: offset of the next byte to receive.
        """
        run, most = self._next, start + RUN_BYTES
        if run is None:
            return min(self._part.stop, most)
        return min(run.stop if run.stop <= most or run.start <= start else run.start, most)

    def check_until(self, offset: int, received: int = 0) -> None:
        """Check all byte runs that end at or before `offset` and are not checked yet.

        Args:
            offset: file offset of the end of the bytes that were written.
            received: number of bytes before `offset` that are still in the memory from `receive_buffer`, so that they
                need not be read back from the file.
        """
        with single_thread():
            while self._next is not None and self._next.stop <= offset:
                run = self._next
                nbytes, start = run.stop - run.start, offset - received
                if run.start >= start and run.start % ALIGN_BYTES == 0:
                    first = start % ALIGN_BYTES + run.start - start
                    encoded = _scratch().raw("source", first + nbytes)[first:]
                else:
                    read_at(self._fd, _scratch().view("source", nbytes), run.start)
                    encoded = _scratch().raw("source", nbytes)
                squares = self._inspection.squares_of(run, encoded, self._bad)
                self._sumsq += squares if run.spec.group == PARAMS else 0.0
                self._next = next(self._runs, None)

    def stats(self, digest: bytes) -> PartStats:
        """Return the result of the check. `digest` is the BLAKE3 of the part's bytes."""
        return PartStats(digest, self._sumsq, self._bad[0] if self._bad else None)


def norm_of(squares: Iterable[float]) -> float:
    """Return the square root of the sum of `squares`; infinity if the sum overflows or is not finite."""
    try:
        return min(math.inf, math.sqrt(math.fsum(squares)))  # infinity for NaN, too: `nan < inf` is false
    except OverflowError:  # the sum for huge fp64 values
        return math.inf


def receive_buffer(start: int, stop: int) -> memoryview:
    """Return the calling thread's buffer for bytes [start, stop) of a file.

    The buffer is aligned like the file: if the file offset of a byte is a multiple of `ALIGN_BYTES`, so is its address.
    """
    return _scratch().view("source", stop - start, start % ALIGN_BYTES)


class PartHasher:
    """Receives one part: writes and hashes its bytes in order. Only one thread at a time may use an instance.

    Args:
        part: the part, a range of a file.
        write: function that appends bytes to the part in the file.
    """

    def __init__(self, part: Part, write: Callable[[memoryview], None]) -> None:
        self._next, self._stop, self._write, self._hasher = part.start, part.stop, write, blake3()

    @property
    def complete(self) -> bool:
        """Whether all bytes of the part are written."""
        return self._next == self._stop

    @property
    def digest(self) -> bytes:
        """BLAKE3 of the bytes that were written so far."""
        return self._hasher.digest()

    def take(self, fill: Callable[[memoryview], int]) -> None:
        """Receive bytes by calling `fill`, until it returns 0 or the part is complete.

        Args:
            fill: function that copies the next bytes to the start of its argument, a buffer, and returns their number;
                0 if no bytes are available now.

        Raises:
            Exception: an error of `fill` or `write`.
        """
        count = -1
        while not self.complete and count:
            memory, filled = receive_buffer(self._next, self._next_stop()), 0
            while filled < len(memory) and (count := fill(memory[filled:])):
                filled += count
            if filled:
                self._write(memory[:filled])
                self._hasher.update(memory[:filled])
                self._next += filled
                self._check(filled)

    def _next_stop(self) -> int:
        """Return the file offset up to which to receive next."""
        return min(self._stop, self._next + RUN_BYTES)

    def _check(self, received: int) -> None:
        """Check the last `received` bytes, which are still in the memory from `receive_buffer`."""


class PartChecker(PartHasher):
    """Receives one part of an update: also checks its values.

    Args:
        inspection: the checks.
        part: the part, a range of the update's file.
        write: function that appends bytes to the part in the update's file.
        fd: descriptor of the update's file, to read written bytes back.
    """

    def __init__(self, inspection: Inspection, part: Part, write: Callable[[memoryview], None], fd: int) -> None:
        super().__init__(part, write)
        self._scan = PartScan(inspection, part, fd)

    @property
    def stats(self) -> PartStats:
        """Result of the checks of the bytes that were written so far."""
        return self._scan.stats(self.digest)

    def _next_stop(self) -> int:
        return self._scan.next_stop(self._next)

    def _check(self, received: int) -> None:
        self._scan.check_until(self._next, received)


class Overflow(RunFailed):
    """Raised if the next version would contain NaN, or a value that is too large for its dtype."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "Start a new run from the last version (atoll export) in another disk.state_dir. Use a lower "
            "algorithm.outer_optimizer.lr or algorithm.outer_optimizer.momentum, smaller updates (the filter "
            "norm_clip), or a model in bf16 or fp32. A restart with this disk.state_dir ends with the same "
            "error.",
        )


def require_finite(run: ByteRun, values: torch.Tensor, base_fd: int) -> None:
    """Raise an error if a byte run of the next version contains NaN or Inf.

    The base version and the updates were checked before, so NaN or Inf comes from this round's computation.

    Args:
        run: the byte run, a range of elements that is processed at once.
        values: values of the next version, [n], in the version's dtype.
        base_fd: file of the previous version, for the message.

    Raises:
        Overflow: a value is Inf or NaN.
    """
    if not run.spec.is_float:
        return
    wide = values.to(accumulate_dtype(run.spec.dtype))
    if bool(torch.dot(wide, wide).isfinite()):  # a fast check: with Inf or NaN the sum of squares is not finite
        return
    for piece, elements in zip(run.pieces, run.split(wide), strict=True):
        bad = elements.isfinite().logical_not_().nonzero()
        if not len(bad) or is_sound(piece.segment.spec, elements):
            continue
        index, spec, dtype = int(bad[0]), piece.segment.spec, torch_dtype(run.spec.dtype)
        before = torch.empty(1, dtype=dtype)
        read_at(base_fd, bytes_of(before), piece.offset + index * dtype.itemsize)
        raise Overflow(
            f"The round's result does not fit into {spec.dtype}, which represents values up to "
            f"{torch.finfo(dtype).max:g}: element {piece.start + index} of {spec.name!r} would go from "
            f"{float(before):g} to {float(elements[index]):g}. No new version is published."
        )
