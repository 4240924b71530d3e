"""Tensors ↔ bounded runs of their elements, in the order in which they lie in a file.

A run is [start, stop) of a tensor's elements in row-major order, whatever its strides and its device. Contiguous CPU
tensors are read and written where they are; others go through a scratch of the run's size, never of the tensor's.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from atoll.tensors.dtypes import NOT_IN_NUMPY
from atoll.tensors.layout import ALIGN_BYTES, Layout
from atoll.tensors.module_tensors import PLAIN, Tensors

CHUNK_BYTES = 2**21
"""What a transfer holds in memory at a time; 64 KiB costs 1.8 times the CPU, 8 MiB gains nothing."""

ROOM_BYTES = 2**18
"""A run of a tensor from this size on is received where it belongs; several smaller ones are received as one."""

CHUNK_ELEMENTS = 2**18
"""What a pass over a tensor holds at a time: 1 MiB of fp32, a multiple of the tile."""


class InPieces(Protocol):
    """Elements of a tensor that do not all lie in one."""

    def run(self, start: int, stop: int) -> Tensor:
        """As `run_of`."""
        ...

    def assign_(self, start: int, values: Tensor) -> None:
        """As `assign_run_`."""
        ...


AnyTensors = Mapping[str, Tensor | InPieces]
"""By name, what a process has of a model's tensors."""


def run_of(tensor: Tensor | InPieces, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) as a 1-D contiguous tensor on its device: a view if possible, else a copy."""
    if not isinstance(tensor, Tensor):
        return tensor.run(start, stop)
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        return flat if stop - start == flat.numel() else flat[start:stop]
    out = torch.empty(stop - start, dtype=tensor.dtype, device=tensor.device)
    _gather(tensor, start, stop, out)
    return out


def runs_of(tensor: Tensor) -> Iterator[memoryview]:
    """Give the bytes of a tensor in runs of `CHUNK_BYTES`; each holds until the next is asked for.

    Runs that are not views share one scratch: memory taken anew for each is not taken where the last one was, so that
    a long tensor grows the process.
    """
    numel, step = tensor.numel(), CHUNK_BYTES // tensor.itemsize
    scratch = None
    if not (tensor.is_cpu and tensor.is_contiguous()):
        scratch = torch.empty(min(step, numel), dtype=tensor.dtype, device="cpu")
    for start in range(0, numel, step):
        stop = min(start + step, numel)
        if scratch is None:
            yield bytes_of(run_of(tensor, start, stop))
            continue
        run = scratch[: stop - start]
        if tensor.is_cpu:
            _gather(tensor, start, stop, run)
        else:
            run.copy_(run_of(tensor, start, stop))
        yield bytes_of(run)


def _gather(tensor: Tensor, start: int, stop: int, out: Tensor) -> None:
    for source, low, high in _blocks(tensor, start, stop, 0):
        out[low:high].view(source.shape).copy_(source)


def assign_run_(tensor: Tensor | InPieces, start: int, values: Tensor) -> None:
    """Write the 1-D `values` into the elements from `start` on, in place, keeping strides, dtype and device."""
    if not isinstance(tensor, Tensor):
        tensor.assign_(start, values)
        return
    stop = start + values.numel()
    if tensor.is_contiguous():
        if start == 0 and stop == tensor.numel():
            tensor.copy_(values.view(tensor.shape))
            return
        tensor.reshape(-1)[start:stop].copy_(values)
        return
    for target, low, high in _blocks(tensor, start, stop, 0):
        target.copy_(values[low:high].reshape(target.shape))


def _blocks(tensor: Tensor, start: int, stop: int, base: int) -> Iterator[tuple[Tensor, int, int]]:
    """Give views that together are the elements [start, stop), with their places in a run that begins at `base`."""
    if start >= stop:
        return
    if tensor.dim() == 0 or (start == 0 and stop == tensor.numel()):
        yield tensor, base, base + stop - start
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _blocks(tensor[last], start - last * row, stop - last * row, base)
        return
    if start < first * row:
        yield from _blocks(tensor[first - 1], start - (first - 1) * row, row, base)
    if first < last:
        at = base + first * row - start
        yield tensor[first:last], at, at + (last - first) * row
    if last * row < stop:
        yield from _blocks(tensor[last], 0, stop - last * row, base + last * row - start)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())  # writable as that of any other tensor
    if tensor.dtype in NOT_IN_NUMPY:
        tensor = tensor.view(-1).view(torch.uint8)
    array: Any = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    return memoryview(array.reshape(-1).view(np.uint8))


WIDEST_BYTES = 8
"""Of one element, in any dtype."""


class Scratch:
    """Named buffers for one thread, allocated once, for `elements` elements of any dtype and padding on both sides.

    A buffer that is asked for more grows. Pages that are never touched cost nothing. Files are read and written by
    position through it, not by mmap: that counts the page cache as the process's own memory, and a truncated file ends
    the process.
    """

    def __init__(self, elements: int) -> None:
        self.nbytes = elements * WIDEST_BYTES + 2 * ALIGN_BYTES
        self._buffers: dict[str, tuple[Tensor, memoryview]] = {}

    def tensor(self, name: str, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the first `numel` elements of buffer `name`, as `dtype` [numel]."""
        return self.raw(name, numel * dtype.itemsize).view(dtype)

    def raw(self, name: str, nbytes: int) -> Tensor:
        """Return the first bytes of buffer `name`, as uint8 [nbytes]."""
        return self._buffer(name, nbytes)[0][:nbytes]

    def view(self, name: str, nbytes: int, start: int = 0) -> memoryview:
        """Return bytes [start, start + nbytes) of buffer `name`."""
        return self._buffer(name, start + nbytes)[1][start : start + nbytes]

    def _buffer(self, name: str, nbytes: int) -> tuple[Tensor, memoryview]:
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer[1]) < nbytes:
            memory = torch.empty(max(self.nbytes, nbytes), dtype=torch.uint8, device="cpu")
            buffer = self._buffers[name] = (memory, bytes_of(memory))
        return buffer


class Scatter:
    """A sink for the bytes of a version: writes them into the tensors of a model, in place, as they arrive.

    Contiguous CPU tensors are written where they are. Others go through one scratch, which is pinned where a tensor is
    on an accelerator, so that the copy to the device needs no other.

    Args:
        layout: the version's layout.
        tensors: those of the layout that are wanted, by name; the bytes of others are passed over.
    """

    def __init__(self, layout: Layout, tensors: Tensors) -> None:
        segments = [segment for segment in layout.segments if segment.spec.name in tensors]
        self._starts = [segment.offset for segment in segments]
        self._stops = [segment.offset + segment.nbytes for segment in segments]
        self._tensors = [tensors[segment.spec.name] for segment in segments]
        self._views = [writable_bytes(tensor) for tensor in self._tensors]
        self._lock = threading.Lock()
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def write(self, offset: int, data: memoryview) -> None:
        """Place `data`, which lies at `offset` of the file, at borders of whole elements; the header is passed over."""
        end = offset + len(data)
        for index in range(
            max(0, bisect.bisect_right(self._starts, offset) - 1), bisect.bisect_left(self._starts, end)
        ):
            start, view = self._starts[index], self._views[index]
            low, high = max(offset, start), min(end, self._stops[index])
            if low >= high:
                continue
            source = data[low - offset : high - offset]
            if view is not None:
                view[low - start : high - start] = source
            else:
                self._assign(index, (low - start) // self._tensors[index].itemsize, source)

    def room(self, offset: int, nbytes: int) -> memoryview | None:
        """Return the memory of a tensor for at most `nbytes` of the file, from `offset` on; None if they are few.

        Whole elements, as long as `offset` and `nbytes` are.
        """
        index = bisect.bisect_right(self._starts, offset) - 1
        view = self._views[index] if index >= 0 else None
        if view is None:
            return None
        start = offset - self._starts[index]
        room = view[start : start + nbytes]
        return room if len(room) >= ROOM_BYTES else None

    def _assign(self, index: int, start: int, source: memoryview) -> None:
        tensor = self._tensors[index]
        with self._lock:
            if self._scratch.numel() < len(source):
                pinned = any(_copies_from_pinned(other.device) for other in self._tensors)
                self._scratch = _memory(max(len(source), CHUNK_BYTES), pinned)
            held = self._scratch[: len(source)]
            bytes_of(held)[:] = source
            assign_run_(tensor, start, held.view(tensor.dtype))


def _copies_from_pinned(device: torch.device) -> bool:
    """Return whether a copy to this device takes no other on its way where it begins in pinned memory."""
    if device.type in ("cpu", "mps") or not torch.accelerator.is_available():  # mps has the memory of the CPU
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _memory(nbytes: int, pinned: bool) -> Tensor:
    """Return bytes of the CPU; as they come where the device's backend pins none."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def writable_bytes(tensor: Tensor) -> memoryview | None:
    """Return the memory of a tensor that lies there as in a file; None if it is on a device, or strided."""
    if type(tensor) not in PLAIN or not (tensor.is_cpu and tensor.is_contiguous()):
        return None
    return None if tensor.is_neg() else bytes_of(tensor)
