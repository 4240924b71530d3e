"""The model as the bytes of a safetensors file, for exports, results, kept models and checkpoints.

A tied tensor is in the file under each of its names, so that `load_state_dict(strict=True)` works. The file does not
contain the algorithm's extra tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from atoll.errors import StateCorrupt
from atoll.posix import read_at
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of
from atoll.tensors.custom_types import Stream
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import BUFFER_NAMES, TIED, Layout, Part, chunks, safetensors_header
from atoll.tensors.lazy_tensors import LazyState
from atoll.tensors.payload import Packed
from atoll.tensors.safetensors_header import read_header
from atoll.tensors.schema import Schema, TensorSpec

MASTER = "master"
"""Suffix of the names of masters: full-precision parameters in an outer state. The master of `x` is `x.master`."""


def model_header(
    schema: Schema, metadata: Mapping[str, str] | None = None, further: Sequence[TensorSpec] = ()
) -> tuple[bytes, list[TensorSpec]]:
    """Return the header of a model file, and the file's tensors in order. A tied tensor occurs once for each name.

    The header's metadata contain the names of tied tensors and of buffers.

    Args:
        schema: schema of the whole model.
        metadata: further metadata entries of the header.
        further: tensors that the file has besides the model, under names that the model does not have.
    """
    schema = schema.model
    owners = {spec.name: spec for spec in schema.tensors}
    named = [(spec, spec.name) for spec in schema.tensors] + [
        (TensorSpec(alias, owners[owner].dtype, owners[owner].shape, owners[owner].group), owner)
        for alias, owner in schema.aliases
    ]
    owners |= {spec.name: spec for spec in further}
    named += [(spec, spec.name) for spec in further]
    ordered = sorted(named, key=lambda pair: -pair[0].item_bytes)
    entries = {"format": "pt", BUFFER_NAMES: json.dumps([spec.name for spec, _ in named if spec.is_buffer])}
    if schema.aliases:
        entries[TIED] = json.dumps(dict(schema.aliases))
    header = safetensors_header([spec for spec, _ in ordered], entries | dict(metadata or {}))
    return header, [owners[owner] for _, owner in ordered]


FragmentFiles = tuple[Layout, int, int | None]
"""Files of one fragment: the version's layout, the version's descriptor, and the descriptor of the outer state with
the masters (None: there are no masters)."""


def model_runs(owners: Sequence[TensorSpec], sources: Sequence[FragmentFiles]) -> Iterator[memoryview]:
    """Yield the bytes that follow the header of a model file. They are read from the files of a version.

    Args:
        owners: the tensors in file order, from `model_header`.
        sources: for each fragment of the model, the layout and the open files of the version.

    Raises:
        StateCorrupt: a file is too short.
    """
    files = [ModelFile(*source) for source in sources]
    of = {name: file for (layout, *_), file in zip(sources, files, strict=True) for name in layout.by_name}
    for spec in owners:
        yield from of[spec.name].runs(spec)


class ModelFile:
    """Reads a version's tensors, one chunk at a time. It reads full-precision parameters if they are stored.

    If workers download versions through a lossy codec, the version file has the rounded parameters that the workers
    get. The full-precision parameters, called masters, are then in the version's outer state, the file with the state
    of the outer optimizer. They are read from there and cast to the model's dtype.

    Args:
        layout: layout of the version file.
        version_fd: descriptor of the version file.
        state_fd: descriptor of the version's outer state, which must have masters. None: read all tensors from the
            version file. Version 0, the initial model, has no outer state.
    """

    def __init__(self, layout: Layout, version_fd: int, state_fd: int | None) -> None:
        self._layout, self._version_fd, self._state_fd = layout, version_fd, state_fd
        self._masters = _masters_in(state_fd) if state_fd is not None else {}

    def runs(self, spec: TensorSpec) -> Iterator[memoryview]:
        """Yield the bytes of a tensor, one chunk at a time.

        Raises:
            StateCorrupt: a file is too short.
        """
        for start in range(0, spec.numel, CHUNK_ELEMENTS):
            yield bytes_of(self._run(spec, start, min(start + CHUNK_ELEMENTS, spec.numel)))

    def part(self, part: Part) -> Iterator[memoryview]:
        """Yield the bytes of a part of the version file, one chunk at a time. Read parameters from the masters, if any.

        Raises:
            StateCorrupt: a file is too short.
        """
        header_bytes = min(part.stop, self._layout.header_bytes) - part.start
        if header_bytes > 0:
            yield bytes_of(_read(self._version_fd, part.start, header_bytes, torch.uint8))
        for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
            yield bytes_of(self._run(piece.segment.spec, start, stop))

    def tensor(self, spec: TensorSpec) -> Tensor:
        """Read a whole tensor into new memory and return it."""
        tensor, offset = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype)), 0
        memory = bytes_of(tensor)
        for run in self.runs(spec):
            memory[offset : offset + len(run)] = run
            offset += len(run)
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
            f"A file of a version was truncated: {error}.", "Start the run again, which then verifies its files."
        ) from None
    return values


def _masters_in(fd: int) -> dict[str, tuple[int, torch.dtype]]:
    """Return where the masters, the full-precision parameters, are in an outer state: name → (file offset, dtype)."""
    header = read_header(lambda at, count: os.pread(fd, count, at), os.fstat(fd).st_size, "the outer state")
    named = [(spec.name.rpartition("."), spec, offset) for spec, offset in header.tensors]
    return {name: (offset, torch_dtype(spec.dtype)) for (name, _, key), spec, offset in named if key == MASTER}


def packed_state(state: LazyState, aliases: Mapping[str, str] | None = None) -> Packed:
    """Pack tensors on disk as a dict, name → tensor, for sending. Each tensor is read in chunks when it is sent.

    Args:
        state: the tensors on disk.
        aliases: further name → name in `state`, for tied tensors that `state` has only once.
    """
    numbers: dict[str, int] = {}
    streams: list[Stream] = []
    for name in state:
        lazy = state.ref(name)
        numbers[name] = len(streams)
        streams.append(Stream(lazy.dtype, tuple(lazy.shape), lazy.runs, f"tensor {name!r}"))
    numbers |= {name: numbers[owner] for name, owner in (aliases or {}).items() if name not in numbers}
    skeleton: dict[str, Any] = {name: {"$": "tensor", "index": index} for name, index in numbers.items()}
    if "$" in skeleton:  # "$" marks special nodes, so pack() writes a dict with this key as a list of items
        skeleton = {"$": "dict", "items": [[name, node] for name, node in skeleton.items()]}
    return Packed(skeleton, tuple(streams), frozenset())
