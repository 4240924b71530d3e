"""State of 0 dimensions (`step`): read once, given to each chunk as a clone, and committed once per tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from atoll.aggregation.outer_state import WHOLES, merged
from atoll.aggregation.scratch import read_at
from atoll.outer_optimizers.torch_optimizer import State
from atoll.posix import write_at
from atoll.tensors.chunks import bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import Layout


class Wholes:
    """The wholes of a state file, as they were and as they become; a few bytes per tensor.

    Args:
        layout: of the state file; None where it has none, or where the pass steps whole tensors.
        fd: the file as it was; None in the first round.
    """

    def __init__(self, layout: Layout | None, fd: int | None) -> None:
        segments = [segment for segment in layout.segments if segment.spec.group == WHOLES] if layout else []
        self._before: dict[str, State] = {}
        self._after: dict[str, State] = {}
        self._runs: list[tuple[int, Tensor]] = []
        for low, nbytes in merged((segment.offset, segment.nbytes) for segment in segments):
            old, new = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
            if fd is not None:
                read_at(fd, bytes_of(old), low)
                new.copy_(old)
            self._runs.append((low, new))
            for segment in segments:
                if low <= segment.offset < low + nbytes:
                    tensor, _, key = segment.spec.name.rpartition(".")
                    span = slice(segment.offset - low, segment.offset - low + segment.nbytes)
                    dtype, shape = torch_dtype(segment.spec.dtype), segment.spec.shape
                    self._before.setdefault(tensor, {})[key] = old[span].view(dtype).view(shape)
                    self._after.setdefault(tensor, {})[key] = new[span].view(dtype).view(shape)

    def clones(self, tensor: str) -> State:
        """The state of a tensor as it was, free to be changed."""
        return {key: value.clone() for key, value in self._before.get(tensor, {}).items()}

    def set(self, tensor: str, key: str, value: Tensor) -> None:
        """What an entry becomes."""
        self._after[tensor][key].copy_(value)

    def write(self, fd: int) -> None:
        """Write what all entries became."""
        for offset, run in self._runs:
            write_at(fd, bytes_of(run), offset)
