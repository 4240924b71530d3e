"""Fixed memory for work on files: buffers that are allocated once, and positioned reads and writes through them.

No mmap: it counts the page cache as the process's own memory, and a truncated file ends the process.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atoll import posix
from atoll.errors import StateCorrupt
from atoll.tensors.chunks import bytes_of
from atoll.tensors.layout import ALIGN_BYTES

WIDEST_BYTES = 8
"""Of one element, in any dtype."""


class Scratch:
    """Named buffers of `elements` × 8 bytes (and padding) for one thread; pages that are never touched cost nothing."""

    def __init__(self, elements: int) -> None:
        self.nbytes = elements * WIDEST_BYTES + 2 * ALIGN_BYTES  # padding before and behind
        self._buffers: dict[str, tuple[Tensor, memoryview]] = {}

    def tensor(self, name: str, dtype: torch.dtype, numel: int) -> Tensor:
        """The first `numel` elements of buffer `name`, as `dtype` [numel]."""
        return self._buffer(name)[0][: numel * dtype.itemsize].view(dtype)

    def raw(self, name: str, nbytes: int) -> Tensor:
        """The first bytes of buffer `name`, as uint8 [nbytes]."""
        return self._buffer(name)[0][:nbytes]

    def view(self, name: str, nbytes: int, start: int = 0) -> memoryview:
        """Bytes [start, start + nbytes) of buffer `name`."""
        return self._buffer(name)[1][start : start + nbytes]

    def _buffer(self, name: str) -> tuple[Tensor, memoryview]:
        buffer = self._buffers.get(name)
        if buffer is None:
            memory = torch.empty(self.nbytes, dtype=torch.uint8)
            buffer = self._buffers[name] = (memory, bytes_of(memory))
        return buffer


def read_at(fd: int, target: memoryview, offset: int) -> None:
    """Fill `target` from the file's byte `offset` on.

    Raises:
        StateCorrupt: the file ends before.
    """
    try:
        posix.read_at(fd, target, offset)
    except EOFError:
        raise StateCorrupt(
            f"A file that the round is made of ends before byte {offset + len(target)}, which it should have.",
            "Something else has cut it off: look at the disk.",
        ) from None
