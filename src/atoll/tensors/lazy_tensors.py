"""Lazy tensors: tensors on disk that are loaded one at a time, for user code that aggregates, saves or receives models.

    state["w"]            load one tensor of a LazyState, into new memory each time
    state.ref("w")        return a LazyTensor, without loading
    resolve(tree)         replace all lazy values in dicts, lists and tuples by loaded tensors
    release(tree)         close the files now, even if lazy values still exist

A lazy value is a `LazyTensor` or a `LazyState`. All lazy values from the same files share one handle, which keeps the
files open. When the last of these values is garbage-collected, the files are closed. Loaded tensors are copies, so they
remain valid.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from atoll.errors import StoreError, UsageError, public_api
from atoll.format_text import number_of
from atoll.posix import open_named, read_at
from atoll.tensors.chunks import CHUNK_BYTES, bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import Segment
from atoll.tensors.safetensors_header import read_header

Decode = Callable[[Tensor, Tensor, Segment], None]
"""A function (encoded bytes, target, segment) that decodes into `target`, a 1-D tensor of the segment's dtype."""


class Handle:
    """The open files that several lazy values share. They are closed by `release`, or when the last lazy value is gone.

    Args:
        read: function (offset, memory) that fills `memory` with the file's bytes from `offset` on.
        give_back: callback that closes the files, and removes them or allows their removal; called only once.
    """

    def __init__(self, read: Callable[[int, memoryview], None], give_back: Callable[[], None]) -> None:
        self._read = read
        self._lock, self._readers, self.released = threading.Lock(), 0, False
        self._end = weakref.finalize(self, give_back)

    def release(self) -> None:
        """Close the files now, or as soon as running reads end. Later reads raise an error. Idempotent."""
        with self._lock:
            self.released = True
            in_use = self._readers > 0
        if not in_use:
            self._end()

    def read(self, offset: int, memory: memoryview) -> None:
        """Fill `memory` with the file's bytes from `offset` on. Any thread may call it.

        Raises:
            UsageError: the files were released.
        """
        with self._lock:
            if self.released:
                raise UsageError("A lazy tensor was read after its file was released.", "Call resolve() earlier.")
            self._readers += 1
        try:
            self._read(offset, memory)
        finally:
            with self._lock:
                self._readers -= 1
                last = self.released and not self._readers
            if last:
                self._end()


class LazyTensor:
    """A tensor on disk. It is not a `torch.Tensor`; `resolve` loads it.

    Attributes:
        name, shape, dtype: name, shape and dtype of the tensor that `resolve` returns.
    """

    __slots__ = ("__weakref__", "_decode", "_handle", "_segment")

    def __init__(self, handle: Handle, segment: Segment, decode: Decode | None) -> None:
        self._handle, self._segment, self._decode = handle, segment, decode

    @property
    def name(self) -> str:
        """Name of the tensor in the file. If the tensor is tied, this may differ from the name that was requested."""
        return self._segment.spec.name

    @property
    def shape(self) -> torch.Size:
        """Shape of the tensor that `resolve` returns; known without reading."""
        return torch.Size(self._segment.spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tensor that `resolve` returns, independent of the encoding on disk."""
        return torch_dtype(self._segment.spec.dtype)

    def numel(self) -> int:
        """Return the number of elements, without reading."""
        return self._segment.spec.numel

    def resolve(self) -> Tensor:
        """Load the tensor into new memory and return it.

        Raises:
            UsageError: the files were released.
        """
        segment = self._segment
        tensor = torch.empty(segment.spec.shape, dtype=self.dtype)
        if self._decode is None:
            self._handle.read(segment.offset, bytes_of(tensor))
            return tensor
        encoded = torch.empty(segment.nbytes, dtype=torch.uint8)
        self._handle.read(segment.offset, bytes_of(encoded))
        self._decode(encoded, tensor.view(-1), segment)
        return tensor

    def runs(self, most_bytes: int = CHUNK_BYTES) -> Iterator[Tensor]:
        """Yield the elements in row-major order, as 1-D tensors of at most `most_bytes` bytes, each in new memory.

        A tensor that is encoded on disk, as in an update, is first loaded as a whole.

        Raises:
            UsageError: the files were released.
        """
        segment = self._segment
        count, most = segment.spec.numel, max(1, most_bytes // segment.spec.item_bytes)
        whole = None if self._decode is None else self.resolve().view(-1)
        for start in range(0, count, most):
            stop = min(start + most, count)
            if whole is not None:
                yield whole[start:stop].clone()
                continue
            run = torch.empty(stop - start, dtype=self.dtype)
            self._handle.read(segment.offset + start * segment.spec.item_bytes, bytes_of(run))
            yield run

    def release(self) -> None:
        """Close the files. This affects all lazy values that share them. Idempotent."""
        self._handle.release()

    def __repr__(self) -> str:
        return f"LazyTensor({self._segment.spec.name!r}, {self._segment.spec.dtype}{list(self._segment.spec.shape)})"

    def __reduce__(self) -> Any:
        raise UsageError(f"{self!r} cannot be pickled.", "Load it with resolve() first.")


class LazyState(Mapping[str, Tensor]):
    """A mapping name → tensor on disk. Each access loads the tensor again.

    Args:
        handle: handle of the open file.
        segments: name → `Segment` with the tensor's dtype, shape and range of the file.
        decode: decoder for encoded tensors; None if the tensors are not encoded.
    """

    def __init__(self, handle: Handle, segments: Mapping[str, Segment], decode: Decode | None = None) -> None:
        self._handle, self._segments, self._decode = handle, segments, decode

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LazyState:
        """Open a safetensors file, and return its tensors.

        Args:
            path: path of the file.

        Raises:
            BadRequest: the file is not a valid safetensors file.
            OSError: the file cannot be opened, or is no file: for example, a folder or a named pipe.
        """
        fd = open_named(path)
        try:
            header = read_header(lambda at, count: os.pread(fd, count, at), os.fstat(fd).st_size, str(path))
        except BaseException:
            os.close(fd)
            raise

        def read(offset: int, memory: memoryview) -> None:
            try:
                read_at(fd, memory, offset)
            except EOFError as error:
                raise StoreError(f"{path} was truncated: {error}, before the end of the tensor.") from None

        segments = {spec.name: Segment(spec, "none", offset, spec.nbytes) for spec, offset in header.tensors}
        return cls(Handle(read, lambda: os.close(fd)), segments)

    def __getitem__(self, name: str) -> Tensor:
        return self.ref(name).resolve()

    def __iter__(self) -> Iterator[str]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, name: object) -> bool:
        return name in self._segments

    def ref(self, name: str) -> LazyTensor:
        """Return the tensor with this name as a lazy tensor, without loading it.

        Raises:
            KeyError: the mapping has no such name.
        """
        return LazyTensor(self._handle, self._segments[name], self._decode)

    def release(self) -> None:
        """Close the files. This affects all lazy values that share them. Idempotent."""
        self._handle.release()

    def __repr__(self) -> str:
        return f"LazyState of {number_of(len(self), 'tensor')}{', released' if self._handle.released else ''}"

    def __reduce__(self) -> Any:
        raise UsageError("A LazyState cannot be pickled.", "Load its tensors with resolve(state) first.")


@public_api
def resolve(tree: Any) -> Any:
    """Return the same structure with tensors in place of lazy values. A lazy value that occurs twice is loaded once.

    Lists, tuples and dicts are copied. All other values stay the same objects.

    Raises:
        UsageError: the files of a lazy value were released.
    """
    loaded: dict[tuple[int, int], Tensor] = {}  # by ids of handle and segment; the structure keeps both alive

    def of(value: LazyTensor) -> Tensor:
        key = (id(value._handle), id(value._segment))
        if key not in loaded:
            loaded[key] = value.resolve()
        return loaded[key]

    def walk(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return of(value)
        if isinstance(value, LazyState):
            return {name: of(value.ref(name)) for name in value}
        if type(value) in (list, tuple):
            return type(value)(walk(item) for item in value)
        if type(value) is dict:
            return {key: walk(item) for key, item in value.items()}
        return value

    return walk(tree)


def release(tree: Any) -> None:
    """Close the files of all lazy values in a structure of mappings, lists and tuples. Idempotent."""
    if isinstance(tree, LazyTensor | LazyState):
        tree.release()
    elif isinstance(tree, Mapping):
        for value in tree.values():
            release(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            release(value)
