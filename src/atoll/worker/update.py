"""Local training → the bytes of an update, tile by tile into the outbox; and base → model after a missed round.

The pseudo-gradient of a parameter is `base − local` (architecture: §2), formed where the parameter is. Buffers travel
as raw values. Memory is a few fixed scratches, whatever the model's size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch import Tensor

from atoll.codecs.base import Codec
from atoll.tensors.alone import alone
from atoll.tensors.chunks import CHUNK_ELEMENTS, assign_run_, bytes_of, run_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import ALIGN_BYTES, Part, Piece, chunks
from atoll.tensors.modules import Tensors
from atoll.tensors.schema import PARAMS
from atoll.worker.files import BaseFile, Outbox

_BUFFER_BYTES = CHUNK_ELEMENTS * 8
"""Encoded, hashed and written at a time: one run of the widest dtype."""
_WIDEST_BYTES = 8
"""Of one element, in any dtype."""


@dataclass(frozen=True)
class Formed:
    """What is in the outbox: the digests that name it, and the L2 norm of the pseudo-gradient before encoding."""

    part_digests: list[bytes]
    digest: str
    norm: float


def form_update(
    outbox: Outbox,
    base: BaseFile,
    tensors: Tensors,
    codecs: Mapping[str, Codec],
    on_part: Callable[[Part, bytes], None] | None = None,
) -> Formed:
    """Write the update of `tensors` against `base` into the outbox.

    Args:
        outbox: its layout decides order, codec and place of everything.
        base: the version that was trained from.
        tensors: the model's own tensors, by name; not changed.
        codecs: by name, all that the layout uses.
        on_part: told of each part, with its BLAKE3, as soon as it is in the outbox.
    """
    former = _Former(outbox, base, tensors, codecs)
    with torch.no_grad(), alone():
        digests = []
        for part in outbox.layout.parts:
            digests.append(former.part(part))
            if on_part is not None:
                on_part(part, digests[-1])
    return Formed(digests, outbox.layout.update_digest(digests), math.sqrt(former.sum_squares))


class _Former:
    def __init__(self, outbox: Outbox, base: BaseFile, tensors: Tensors, codecs: Mapping[str, Codec]) -> None:
        self.outbox, self.base, self.tensors, self.codecs = outbox, base, tensors, codecs
        self.buffer = torch.zeros(_BUFFER_BYTES + ALIGN_BYTES, dtype=torch.uint8)
        self.view = bytes_of(self.buffer)
        self.base_scratch = bytearray(CHUNK_ELEMENTS * _WIDEST_BYTES)
        self.delta_scratch = torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8)
        self.sum_squares = 0.0

    def part(self, part: Part) -> bytes:
        """Encode one part; returns its BLAKE3."""
        hasher = blake3()
        begin = end = part.start  # file offsets of what the buffer holds
        for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
            run = self.outbox.layout.piece(piece.segment, start, stop)
            self.buffer[end - begin : run.offset - begin] = 0  # alignment between segments
            if run.offset + run.nbytes - begin > _BUFFER_BYTES:
                self._flush(hasher, begin, run.offset)
                begin = run.offset
            self._encode(piece, start, stop, self.buffer[run.offset - begin :][: run.nbytes])
            end = run.offset + run.nbytes
        self.buffer[end - begin : part.stop - begin] = 0
        self._flush(hasher, begin, part.stop)
        return hasher.digest()

    def _encode(self, piece: Piece, start: int, stop: int, target: Tensor) -> None:
        spec, codec = piece.segment.spec, self.codecs[piece.segment.codec]
        tensor = self.tensors[spec.name]
        if spec.group != PARAMS:
            codec.encode_(run_of(tensor, start, stop), target, spec.dtype)
            return
        base = self.base.run(piece, start, stop, self.base_scratch, torch_dtype(spec.dtype))
        wide = accumulate_dtype(spec.dtype)
        if tensor.device.type == "cpu":
            as_it_is = codec.name == "none" and wide == base.dtype  # then the difference is what travels
            delta = target.view(wide) if as_it_is else self.delta_scratch.view(wide)[: stop - start]
            torch.sub(base.to(wide), run_of(tensor, start, stop).to(wide), out=delta)
            self.sum_squares += float(torch.dot(delta, delta))
            if as_it_is:
                return
        else:
            delta = base.to(tensor.device, wide) - run_of(tensor, start, stop).to(wide)
            self.sum_squares += float(torch.dot(delta, delta))
        codec.encode_(delta, target, spec.dtype)

    def _flush(self, hasher: blake3, begin: int, end: int) -> None:
        data = self.view[: end - begin]
        hasher.update(data)
        self.outbox.write(begin, data)


def rebase_(tensors: Tensors, old: BaseFile, new: BaseFile) -> None:
    """w ← b_head + (w − b_base), in place: local progress is carried over to the version that others moved on to.

    Buffers take the new version's values.
    """
    scratch_old, scratch_new = (bytearray(CHUNK_ELEMENTS * _WIDEST_BYTES) for _ in range(2))
    with torch.no_grad(), alone():
        for part in new.layout.parts:
            for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                spec = piece.segment.spec
                dtype = torch_dtype(spec.dtype)
                head = new.run(piece, start, stop, scratch_new, dtype)
                if spec.group == PARAMS:
                    wide = accumulate_dtype(spec.dtype)
                    base = old.run(piece, start, stop, scratch_old, dtype)
                    local = run_of(tensors[spec.name], start, stop).cpu()
                    head = (head.to(wide) + (local.to(wide) - base.to(wide))).to(dtype)
                assign_run_(tensors[spec.name], start, head)


def advance_base_(base: BaseFile, outbox: Outbox, codecs: Mapping[str, Codec]) -> None:
    """base ← base − dec(update), in the base file: what was submitted, as the server decodes it."""
    scratch = bytearray(CHUNK_ELEMENTS * _WIDEST_BYTES)
    encoded = bytearray(CHUNK_ELEMENTS * _WIDEST_BYTES)
    with torch.no_grad(), alone():
        for part in outbox.layout.parts:
            for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                spec = piece.segment.spec
                if spec.group != PARAMS:
                    continue
                wide = accumulate_dtype(spec.dtype)
                values = base.run(piece, start, stop, scratch, torch_dtype(spec.dtype))
                run = outbox.layout.piece(piece.segment, start, stop)
                outbox.read_into(run.offset, memoryview(encoded)[: run.nbytes])
                delta = torch.empty(stop - start, dtype=wide)
                source = torch.frombuffer(encoded, dtype=torch.uint8, count=run.nbytes)
                codecs[piece.segment.codec].decode_(source, delta, spec.dtype)
                values.copy_(values.to(wide) - delta)
                offset = base.layout.by_name[spec.name].offset + start * spec.item_bytes
                base.write(offset, memoryview(scratch)[: (stop - start) * spec.item_bytes])


def load_(tensors: Tensors, base: BaseFile) -> None:
    """Copy the base file into the tensors, in place."""
    scratch = bytearray(CHUNK_ELEMENTS * _WIDEST_BYTES)
    with torch.no_grad():
        for part in base.layout.parts:
            for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                spec = piece.segment.spec
                assign_run_(tensors[spec.name], start, base.run(piece, start, stop, scratch, torch_dtype(spec.dtype)))
