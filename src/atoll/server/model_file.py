"""The model of a version as people and their programs get it: of each parameter the master, where the run has them.

Where versions go down by a codec that loses, a version file has what workers hold. What was trained is θ, in the outer
state beside it; it is cast to the model's dtype.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from atoll.aggregation.outer_state import MASTER, RUNS, WHOLES, state_regions
from atoll.errors import StateCorrupt
from atoll.posix import read_at
from atoll.store.file_slots import region_digest
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import Layout, Part, chunks, file_layout
from atoll.tensors.safetensors_header import Header, read_header
from atoll.tensors.schema import TensorSpec


class ModelFile:
    """Reads tensors of a version, a run at a time.

    Args:
        layout: of the version.
        version_fd: the version.
        state_fd: the outer state beside it; None of the first version, which is the initial model.
    """

    def __init__(self, layout: Layout, version_fd: int, state_fd: int | None) -> None:
        self._layout, self._version_fd, self._state_fd = layout, version_fd, state_fd
        self._masters = _masters_in(state_fd) if state_fd is not None else {}

    def runs(self, spec: TensorSpec) -> Iterator[memoryview]:
        """The bytes of a tensor, a run at a time; each holds until the next is asked for.

        Raises:
            StateCorrupt: a file ends early.
        """
        for start in range(0, spec.numel, CHUNK_ELEMENTS):
            yield bytes_of(self._run(spec, start, min(start + CHUNK_ELEMENTS, spec.numel)))

    def part(self, part: Part) -> Iterator[memoryview]:
        """The bytes of a part of the version's file, with the masters in it, a run at a time.

        Raises:
            StateCorrupt: a file ends early.
        """
        header_bytes = min(part.stop, self._layout.header_bytes) - part.start
        if header_bytes > 0:
            yield bytes_of(_read(self._version_fd, part.start, header_bytes, torch.uint8))
        for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
            yield bytes_of(self._run(piece.segment.spec, start, stop))

    def tensor(self, spec: TensorSpec) -> Tensor:
        """A tensor, in new memory."""
        tensor, at = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)), 0
        memory = bytes_of(tensor)
        for run in self.runs(spec):
            memory[at : at + len(run)] = run
            at += len(run)
        return tensor

    def _run(self, spec: TensorSpec, start: int, stop: int) -> Tensor:
        dtype = torch_dtype(spec.dtype)
        if spec.is_stepped and self._state_fd is not None:
            offset, wide = self._masters[spec.name]
            master = _read(self._state_fd, offset + start * wide.itemsize, stop - start, wide)
            return master.to(dtype)
        offset = self._layout.by_name[spec.name].offset + start * spec.item_bytes
        return _read(self._version_fd, offset, stop - start, dtype)


def _read(fd: int, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    values = torch.empty(numel, dtype=dtype)
    try:
        read_at(fd, bytes_of(values), offset)
    except EOFError as error:
        raise StateCorrupt(
            f"A file of a version was cut off: {error}.", "Restart the server; it verifies its files."
        ) from None
    return values


def is_whole(fd: int, version: Layout, digests: Sequence[bytes], *, in_chunks: bool) -> bool:
    """Whether an outer state is what its digests say, as far as its own header tells how it was cut.

    Args:
        version: the layout of the version beside it.
        in_chunks: whether the outer optimizer steps tensors chunk by chunk.
    """
    header = _header(fd)
    shapes = {segment.spec.name: segment.spec.shape for segment in version.segments}
    split = [(spec.name.rpartition("."), spec) for spec, _ in header.tensors]
    if in_chunks and not any(shapes.get(name) for (name, _, _), _ in split):
        return True  # of tensors without dimensions alone it cannot be told
    cut = {key for (name, _, key), spec in split if in_chunks and shapes.get(name) and spec.shape == shapes[name]}
    specs = [replace(spec, group=RUNS if key in cut else WHOLES) for (_, _, key), spec in split]
    layout = file_layout(specs, os.pread(fd, header.nbytes, 0))
    regions = state_regions(version, layout)
    return len(regions) == len(digests) and all(
        region_digest(fd, region.ranges) == digest for region, digest in zip(regions, digests, strict=True)
    )


def _header(fd: int) -> Header:
    return read_header(lambda at, count: os.pread(fd, count, at), os.fstat(fd).st_size, "the outer state")


def _masters_in(fd: int) -> dict[str, tuple[int, torch.dtype]]:
    """Tensor → where its master lies in an outer state, and in which dtype."""
    named = [(spec.name.rpartition("."), spec, offset) for spec, offset in _header(fd).tensors]
    return {name: (offset, torch_dtype(spec.dtype)) for (name, _, key), spec, offset in named if key == MASTER}
