"""What goes down of the next version: encoded window by window, in the pass that makes it.

θ' is stepped from the master, b is what the base holds; the difference is encoded, and b' = b + what it decodes to is
what the version file gets. Codecs are fixed-rate and windows begin at tiles, so that each is encoded for itself.
"""

from __future__ import annotations

import torch
from blake3 import blake3
from torch import Tensor

from atoll.aggregation.scratch import Scratch
from atoll.aggregation.windows import Window
from atoll.codecs.version_difference import Downlink
from atoll.failpoints import failpoint
from atoll.posix import write_at
from atoll.tensors.chunks import bytes_of
from atoll.tensors.layout import ALIGN_BYTES, Part


class DeltaWriter:
    """One thread's: writes the parts of a delta, one at a time, through a buffer of fixed size.

    Args:
        downlink: its layout.
        fd: of the delta.
        scratch: of the thread.
    """

    def __init__(self, downlink: Downlink, fd: int, scratch: Scratch) -> None:
        self._downlink, self._fd = downlink, fd
        self._buffer = scratch.raw("delta", scratch.nbytes)
        self._hasher = blake3()
        self._part: Part
        self._begin = self._end = 0  # of what the buffer holds, in the delta

    def begin(self, index: int) -> None:
        """The part of this number comes next."""
        self._part, self._hasher = self._downlink.parts[index], blake3()
        self._begin = self._end = self._part.start

    def add(self, window: Window, values: Tensor, theta: Tensor | None) -> None:
        """Encode the next window of the part.

        Args:
            values: of the window [n]. Of parameters b, which becomes b'; else what the next version has.
            theta: θ' [n] of parameters, in the dtype of accumulation.
        """
        layout, at = self._downlink.layout, 0
        for extent in window.extents:
            piece = layout.piece(layout.by_name[extent.spec.name], extent.start, extent.stop)
            run, target = values[at : at + extent.numel], self._room(piece.offset, piece.nbytes)
            if theta is None:
                self._downlink.codecs[piece.segment.codec].encode_(run, target, extent.spec.dtype)
            else:
                self._downlink.encode_(piece.segment, theta[at : at + extent.numel], run, target)
            at += extent.numel

    def end(self) -> bytes:
        """The part is complete; returns its BLAKE3."""
        self._room(self._part.stop, 0)
        self._flush()
        return self._hasher.digest()

    def _room(self, offset: int, nbytes: int) -> Tensor:
        """Where bytes [offset, offset + nbytes) of the delta go; what is between them and the last ones is zero.

        Offsets in memory are as aligned as those in the file.
        """
        low = self._begin - self._begin % ALIGN_BYTES
        if offset + nbytes - low > len(self._buffer):
            self._flush()
            low = self._begin - self._begin % ALIGN_BYTES
            if offset + nbytes - low > len(self._buffer):  # a codec that makes more of few elements than they are
                self._buffer = torch.empty(offset + nbytes - low, dtype=torch.uint8)
        self._buffer[self._end - low : offset - low].zero_()
        self._end = offset + nbytes
        return self._buffer[offset - low : self._end - low]

    def _flush(self) -> None:
        shift = self._begin % ALIGN_BYTES
        data = bytes_of(self._buffer)[shift : shift + self._end - self._begin]
        self._hasher.update(data)
        failpoint("pass.delta")
        write_at(self._fd, data, self._begin)
        self._begin = self._end
