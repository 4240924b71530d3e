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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atoll.codecs.base import Codec
from atoll.codecs.encoded_layout import codecs_of
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, Piece, Segment, update_layout
from atoll.tensors.schema import PARAMS, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


def is_difference(spec: TensorSpec) -> bool:
    """Whether a delta has the difference of this tensor, not its new values."""
    return spec.group == PARAMS and spec.is_float


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
        """The way down of versions with this layout; None for the codec `none`: they are pulled whole.

        Args:
            sent: as `codecs_of`.

        Raises:
            ConfigError: nobody registered the codec, or an option is not one of its own.
        """
        if codec == "none":
            return None
        codecs = codecs_of(codec, options, setting="downlink_codec", sent=sent)

        def encoding(spec: TensorSpec) -> Codec:
            return codecs[codec if is_difference(spec) else "none"]

        layout = update_layout((segment.spec for segment in version.segments), encoding, version.part_bytes)
        parts = tuple(part for part in _along(version, layout) if version.rank in (None, part.rank))
        return cls(codecs, layout, parts, len(version.all_parts))

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
        if not is_difference(spec):
            codec.decode_(encoded, held, spec.dtype)
            return
        change = torch.empty(held.numel(), dtype=accumulate_dtype(spec.dtype))
        codec.decode_(encoded, change, spec.dtype)
        held.copy_(held.to(change.dtype) + change)

    def digest(self, part_digests: list[bytes] | tuple[bytes, ...]) -> str:
        """What names a delta with these parts."""
        return self.layout.update_digest(part_digests)


def _along(version: Layout, delta: Layout) -> Iterator[Part]:
    start = 0
    for part in version.all_parts:
        pieces = tuple(delta.piece(delta.by_name[p.segment.spec.name], p.start, p.stop) for p in part.pieces)
        stop = padded_end(pieces[-1]) if pieces else start
        yield Part(part.index, start, stop, pieces, part.rank)
        start = stop


def padded_end(piece: Piece) -> int:
    """Where the next piece of a delta begins: what is behind a segment belongs to its last piece."""
    end = piece.offset + piece.nbytes
    return -(-end // ALIGN_BYTES) * ALIGN_BYTES if piece.stop == piece.segment.stop else end
