"""The way down: a version as a difference from the one before it, and what server and workers make of that alike.

    Δ = C(θ' − b)        b' = b + dec(Δ)

θ is the server's master of a parameter, b what every worker holds of it, in the model's dtype. What C loses stays in
θ' − b', and so is part of the next difference: error feedback without a file of its own. Both sides compute b' by
`advance_`, in the dtype of accumulation, then cast; the digest of b' says whether they agree. Everything that is no
float parameter travels as its new values.

A delta is laid out as an update is, and cut where the version is: part n of it makes part n of the next version from
part n of the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from atoll.codecs.base import Codec
from atoll.codecs.encoded_layout import codecs_of
from atoll.posix import write_at
from atoll.runtime import failpoint
from atoll.tensors.byte_runs import Run, RunTable
from atoll.tensors.layout import ALIGN_BYTES, TILE, Layout, Part, Segment, update_layout
from atoll.tensors.schema import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.tensors.chunks import Scratch


@dataclass(frozen=True)
class Downlink:
    """How the versions of one fragment go down.

    Attributes:
        codecs: by name, all that the layout names.
        layout: of a delta.
        parts: one for each part of the version that is ours; some have no bytes.
        count: of the version's parts, whosever.
    """

    codecs: Mapping[str, Codec]
    layout: Layout
    parts: tuple[Part, ...]
    count: int

    @classmethod
    def of(cls, version: Layout, codec: str, options: Mapping[str, Any], *, sent: bool = False) -> Downlink | None:
        """Return the way down of versions with this layout; None for the codec `none`: they are pulled whole.

        Args:
            sent: as `codecs_of`.

        Raises:
            ConfigError: the codec is not registered, or an option is not one of its own.
        """
        if codec == "none":
            return None
        codecs = codecs_of(codec, options, setting="aggregation.download_codec", sent=sent)

        def encoding(spec: TensorSpec) -> Codec:
            return codecs[codec if spec.is_stepped else "none"]

        layout = update_layout((segment.spec for segment in version.segments), encoding, version.part_bytes)
        parts = tuple(part for part in _along(version, layout) if version.rank in (None, part.rank))
        return cls(codecs, layout, parts, len(version.all_parts))

    @functools.cached_property
    def runs(self) -> RunTable:
        """Of the layout."""
        return RunTable(self.layout, TILE)

    def encode_(self, segment: Segment, theta: Tensor, held: Tensor, target: Tensor) -> None:
        """Write the difference of a run of a parameter into `target`, and bring `held` from b to b'.

        Args:
            segment: of the delta.
            theta: θ' [n], in the dtype of accumulation.
            held: b [n], in the model's dtype.
            target: uint8, as many as `layout.piece` says.
        """
        self.codecs[segment.codec].encode_(theta - held.to(theta.dtype), target, segment.spec.dtype)
        self.advance_(segment, held, target)

    def advance_(self, segment: Segment, held: Tensor, encoded: Tensor) -> None:
        """Bring a run of a tensor from b to b', in place; what is no difference is replaced.

        Args:
            segment: of the delta.
            held: [n], on the CPU, in the model's dtype.
            encoded: uint8, what the delta has of the run.
        """
        import torch  # here, so that layouts can be computed without torch

        from atoll.tensors.dtypes import accumulate_dtype

        spec, codec = segment.spec, self.codecs[segment.codec]
        if not spec.is_stepped:
            codec.decode_(encoded, held, spec.dtype)
            return
        change = torch.empty(held.numel(), dtype=accumulate_dtype(spec.dtype))
        codec.decode_(encoded, change, spec.dtype)
        held.copy_(held.to(change.dtype) + change)

    def digest(self, part_digests: list[bytes] | tuple[bytes, ...]) -> str:
        """Return what names a delta with these parts."""
        return self.layout.blob_id(part_digests)


class DifferenceWriter:
    """Writes the parts of a delta, one at a time, run by run; of one thread.

    Codecs are fixed-rate and runs begin at tiles, so that each is encoded for itself.

    Args:
        downlink: its layout.
        fd: of the delta.
        scratch: of the thread.
    """

    def __init__(self, downlink: Downlink, fd: int, scratch: Scratch) -> None:
        self._downlink, self._fd, self._scratch = downlink, fd, scratch
        self._part: Part
        self._hasher: blake3
        self._end = 0  # of what is written, in the delta

    def begin(self, part: Part) -> None:
        """Go on with what belongs to this part of the version."""
        self._part, self._hasher = self._downlink.parts[part.index], blake3()
        self._end = self._part.start

    def add(self, run: Run, values: Tensor, theta: Tensor | None) -> None:
        """Encode the next run of the part.

        Args:
            run: of the version, n elements.
            values: [n]; of parameters b, which becomes b'; else what the next version has.
            theta: θ' [n] of parameters, in the dtype of accumulation.
        """
        there = self._downlink.runs.counterpart(run)
        memory = self._zeros(there.stop)[there.start - there.stop :]
        thetas = run.split(values if theta is None else theta)
        for piece, target, held, new in zip(
            there.pieces, there.encoded(memory), run.split(values), thetas, strict=True
        ):
            if theta is None:
                self._downlink.codecs[piece.segment.codec].encode_(held, target, run.spec.dtype)
            else:
                self._downlink.encode_(piece.segment, new, held, target)
        self._write(there.stop)

    def end(self) -> bytes:
        """Return the BLAKE3 of the part, which is complete."""
        self._zeros(self._part.stop)
        self._write(self._part.stop)
        return self._hasher.digest()

    def _zeros(self, stop: int) -> Tensor:
        """Return zeros for the delta from its end to `stop`, as aligned in memory as they are in the file."""
        shift = self._end % ALIGN_BYTES
        return self._scratch.raw("delta", shift + stop - self._end)[shift:].zero_()

    def _write(self, stop: int) -> None:
        shift = self._end % ALIGN_BYTES
        data = self._scratch.view("delta", stop - self._end, shift)
        self._hasher.update(data)
        failpoint("pass.delta")
        write_at(self._fd, data, self._end)
        self._end = stop


def _along(version: Layout, delta: Layout) -> Iterator[Part]:
    start = 0
    for part in version.all_parts:
        pieces = tuple(delta.piece(delta.by_name[p.segment.spec.name], p.start, p.stop) for p in part.pieces)
        stop = delta.padded_end(pieces[-1]) if pieces else start
        yield Part(part.index, start, stop, pieces, part.rank)
        start = stop
