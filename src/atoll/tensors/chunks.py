"""Read and write ranges of a tensor's elements in row-major order, the order of the elements in a file.

A range [start, stop) counts elements in this order, whatever the tensor's strides and device. Contiguous CPU tensors
are read and written in place. Other tensors are copied through scratch memory as large as the range, not the tensor.
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
from atoll.tensors.schema import TensorSpec

CHUNK_BYTES = 2**21
"""Bytes that a transfer holds in memory. 64 KiB would cost 1.8 times the CPU time; 8 MiB would not be faster."""

ROOM_BYTES = 2**18
"""Minimum size, in bytes, of a read directly into a tensor. Smaller tensors are received together in a buffer."""

CHUNK_ELEMENTS = 2**18
"""Elements that a pass over a tensor holds in memory: 1 MiB of fp32, a multiple of `TILE`."""


class InPieces(Protocol):
    """A tensor that is stored in several places, such as a rank's own rows and its copies of other ranks' rows."""

    def run(self, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) as a 1-D contiguous tensor."""
        ...

    def assign_(self, start: int, values: Tensor) -> None:
        """Write the 1-D `values` into the elements from `start` on, in place."""
        ...


AnyTensors = Mapping[str, Tensor | InPieces]
"""Name → the elements of a model's tensor that this process has."""


def run_of(tensor: Tensor | InPieces, start: int, stop: int) -> Tensor:
    """Return elements [start, stop) as a 1-D contiguous tensor on the same device: a view if possible, else a copy."""
    if not isinstance(tensor, Tensor):
        return tensor.run(start, stop)
    if tensor.is_contiguous():
        flat = tensor.reshape(-1)
        return flat if stop - start == flat.numel() else flat[start:stop]
    out = torch.empty(stop - start, dtype=tensor.dtype, device=tensor.device)
    _gather(tensor, start, stop, out)
    return out


def runs_of(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in chunks of `CHUNK_BYTES`. A chunk is valid until the next one is requested.

    If chunks are copies, all use the same scratch buffer. A new buffer for each chunk would make the process grow,
    because the allocator does not reuse the memory of the previous one.
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
    """Write the 1-D `values` into the elements from `start` on, in place; strides, dtype and device stay the same."""
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
    """Divide the elements [start, stop) of a tensor into views, to copy them from or to a flat buffer.

    Args:
        tensor: the tensor, possibly not contiguous.
        start: first element.
        stop: element after the last one.
        base: position of element `start` in the buffer.

    Yields:
        (view, low, high): a view of some of the tensor's elements, and their place in the buffer: [low, high).
    """
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
        offset = base + first * row - start
        yield tensor[first:last], offset, offset + (last - first) * row
    if last * row < stop:
        yield from _blocks(tensor[last], 0, stop - last * row, base + last * row - start)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all elements are finite (not NaN or Inf). Scratch memory: at most `CHUNK_ELEMENTS` elements."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    starts = range(0, tensor.numel() if tensor.is_floating_point() else 0, CHUNK_ELEMENTS)
    runs = (run_of(tensor, start, min(start + CHUNK_ELEMENTS, tensor.numel())) for start in starts)
    return all(bool(torch.isfinite(run.to(wide)).all()) for run in runs)


def add_(target: Tensor, values: Tensor) -> None:
    """Add `values` to `target` in place. Use NumPy for integers: torch has no sum of uint16 to uint64."""
    if target.dtype == values.dtype and target.is_floating_point():
        target.add_(values)
    elif target.is_floating_point():
        target.copy_(target.to(values.dtype).add_(values))
    else:
        np.add(target.numpy(), values.numpy(), out=target.numpy())


def moved(base: Tensor, local: Tensor, wide: torch.dtype) -> Tensor:
    """Return local − base, for two 1-D CPU tensors of one dtype, in new memory. Differences of integers wrap around.

    Args:
        base: the value before training.
        local: the value after training.
        wide: dtype in which floats are subtracted, and of the result; for integers, their own dtype.
    """
    if wide.is_floating_point:
        return local.to(wide) - base.to(wide)
    return torch.from_numpy(np.subtract(local.numpy(), base.numpy()))


def is_sound(spec: TensorSpec, values: Tensor) -> bool:
    """Return whether a tensor may have these values: finite ones; any values if they are only copied; Inf in a maximum.

    Args:
        spec: the tensor.
        values: some or all of its values.
    """
    if spec.is_copied or is_finite(values):
        return True
    return spec.is_buffer and spec.rule == "max" and not bool(values.isnan().any())


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(bytearray())  # a writable view, as for all other tensors
    if tensor.dtype in NOT_IN_NUMPY:
        tensor = tensor.view(-1).view(torch.uint8)
    array: Any = (tensor.detach() if tensor.requires_grad else tensor).numpy()
    return memoryview(array.reshape(-1).view(np.uint8))


WIDEST_BYTES = 8
"""Size of an element of the widest dtype, in bytes."""


class Scratch:
    """Named scratch buffers for one thread, each allocated at its first use.

    Files are read into these buffers and written from them. Files are not mapped: with mmap, the page cache would count
    as the process's memory, and reading a truncated file would kill the process.

    Args:
        elements: number of elements of any dtype that a new buffer can hold, with padding on both sides. A buffer grows
            if more elements are requested. Pages that are never touched cost no memory.
    """

    def __init__(self, elements: int) -> None:
        self.nbytes = elements * WIDEST_BYTES + 2 * ALIGN_BYTES
        self._buffers: dict[str, tuple[Tensor, memoryview]] = {}

    def tensor(self, name: str, dtype: torch.dtype, numel: int) -> Tensor:
        """Return the first `numel` elements of buffer `name`, as a tensor of `dtype`, [numel]."""
        return self.raw(name, numel * dtype.itemsize).view(dtype)

    def raw(self, name: str, nbytes: int) -> Tensor:
        """Return the first `nbytes` bytes of buffer `name`, as a uint8 tensor, [nbytes]."""
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
    """Writes the bytes of a version (a model file) into a model's tensors, in place, as the bytes arrive.

    Contiguous CPU tensors are written directly. Other tensors are written through one scratch buffer. If a tensor is on
    an accelerator, the buffer is pinned, which saves a copy.

    Args:
        layout: layout of the version: the offset of each tensor in the file.
        tensors: name → tensor to write. Bytes of other tensors in the layout are skipped, and of those that the site
            keeps for itself.
    """

    def __init__(self, layout: Layout, tensors: Tensors) -> None:
        segments = [each for each in layout.segments if each.spec.name in tensors and not each.spec.is_kept]
        self._starts = [segment.offset for segment in segments]
        self._stops = [segment.offset + segment.nbytes for segment in segments]
        self._tensors = [tensors[segment.spec.name] for segment in segments]
        self._views = [writable_bytes(tensor) for tensor in self._tensors]
        self._lock = threading.Lock()
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data`, the file's bytes from `offset` on, into the tensors.

        `data` must consist of whole elements. Bytes of the file's header are skipped.
        """
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
        """Return the memory of the tensor at file offset `offset`, so that bytes can be received directly into it.

        Args:
            offset: file offset of the next byte to receive; the start of an element.
            nbytes: maximum size of the result; whole elements.

        Returns:
            The memory, whole elements of one tensor. None if it would be smaller than `ROOM_BYTES`, or if the tensor
            cannot be written directly (`writable_bytes`).
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
            staged = self._scratch[: len(source)]
            bytes_of(staged)[:] = source
            assign_run_(tensor, start, staged.view(tensor.dtype))


def _copies_from_pinned(device: torch.device) -> bool:
    """Return whether pinned memory makes copies to `device` faster: on the current accelerator, except MPS."""
    if device.type in ("cpu", "mps") or not torch.accelerator.is_available():  # MPS shares the CPU's memory
        return False
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device.type


def _memory(nbytes: int, pinned: bool) -> Tensor:
    """Return a new uint8 CPU tensor, [nbytes]; pinned if `pinned` is True and the backend supports it."""
    if pinned:
        with suppress(RuntimeError):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")


def writable_bytes(tensor: Tensor) -> memoryview | None:
    """Return the memory of a contiguous CPU tensor; None for other tensors, subclasses and lazily negated views."""
    if type(tensor) not in PLAIN or not (tensor.is_cpu and tensor.is_contiguous()):
        return None
    return None if tensor.is_neg() else bytes_of(tensor)
