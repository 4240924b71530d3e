"""Objects: store a tree (nested dicts, lists and tuples with tensors) in a safetensors file that is sent in parts.

    file   | head: names, dtypes, shapes; the tree's skeleton | tensors, widest elements first, no gaps |
    parts  [0      ][1      ]                                 [2        ][3        ][4        ][5       ]

The skeleton is the tree without its tensors. The head has its own parts, so that a receiver knows the offset of every
tensor before the first tensor arrives. The rest is divided into parts of `part_bytes`, which may end within a tensor.
Some tensors can be inline: their bytes are in the head, next to the skeleton. The receiver rebuilds the tree from the
file.
"""

from __future__ import annotations

import base64
import binascii
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from atoll.blobs.manifest import MOST_OBJECT_HEAD_BYTES, MOST_PARTS, Cuts, Manifest
from atoll.blobs.ways_to_send import Cut
from atoll.errors import BadRequest, UsageError
from atoll.format_text import number_of
from atoll.json_files import require_light
from atoll.posix import write_at
from atoll.runtime import gc_as_usual, no_gc
from atoll.tensors.chunks import CHUNK_BYTES, ROOM_BYTES, bytes_of, run_of, runs_of
from atoll.tensors.custom_types import Stream
from atoll.tensors.dtypes import dtype_name, torch_dtype
from atoll.tensors.layout import Layout, Segment, safetensors_header
from atoll.tensors.lazy_tensors import Handle, LazyTensor
from atoll.tensors.module_tensors import state_of
from atoll.tensors.payload import Packed, Plain, pack, unpack
from atoll.tensors.safetensors_header import read_header, read_tensor
from atoll.tensors.schema import TensorSpec

_PAYLOAD = "atoll.payload"
_REMEDY = "Use the same version of Atoll on both sides, then publish it again."
_LENGTH_BYTES = 8
_SPLIT = "Publish it as several objects."


def pack_object(tree: Any) -> Packed:
    """Split a tree into its tensors and a skeleton without them. Nothing is copied.

    Args:
        tree: nested dicts, lists and tuples with tensors, arrays, plain values and registered types; or a module, which
            is replaced by its `state_dict`.

    Raises:
        UsageError: the tree contains a value that cannot be sent. The message names the value.
    """
    return pack(state_of(tree) if isinstance(tree, nn.Module) else tree)


def write_object(packed: Packed, fd: int, cut: Cut) -> Manifest:
    """Write a packed tree into a file, one chunk at a time.

    Args:
        packed: the tree, from `pack_object`.
        fd: descriptor of the file.
        cut: which tensors are in the head, and the part size.

    Returns:
        The object's manifest.

    Raises:
        UsageError: the tree is too large for one object.
        OSError: writing to the file failed.
    """
    with no_gc():
        head, tensors = _head(packed, cut)
    cuts = Cuts(len(head), len(head) + sum(tensor.nbytes for tensor in tensors), cut.part_bytes)
    if len(head) > MOST_OBJECT_HEAD_BYTES or cuts.count > MOST_PARTS:
        raise UsageError(
            f"The object has a header of {len(head)} bytes and {cuts.count} parts, but may have at most "
            f"{MOST_OBJECT_HEAD_BYTES} bytes and {MOST_PARTS} parts.",
            "Publish it as several objects, or with a larger chunk_bytes.",
        )
    writer = _Writer(fd, cuts)
    writer.write(memoryview(head))
    for tensor in tensors:
        for run in tensor.runs() if isinstance(tensor, Stream) else runs_of(tensor):
            writer.write(run)
            del run  # frees its memory before the next chunk is made
    writer.flush()
    return Manifest.of_cuts(cuts, writer.digests)


def _head(packed: Packed, cut: Cut) -> tuple[bytes, list[Tensor | Stream]]:
    """Return the bytes of the head, and the tensors that follow it in the file, in file order."""
    names = _names(packed.skeleton, len(packed.tensors))
    order = sorted(set(range(len(names))) - cut.in_head, key=lambda index: -packed.tensors[index].itemsize)
    tensors = [packed.tensors[index] for index in order]
    specs = [
        TensorSpec(names[index], dtype_name(tensor.dtype), tuple(tensor.shape))
        for index, tensor in zip(order, tensors, strict=True)
    ]
    payload: dict[str, Plain] = {"names": names, "skeleton": packed.skeleton}
    if cut.in_head:
        payload["inline"] = {names[index]: _as_text(packed.tensors[index]) for index in sorted(cut.in_head)}
    text = json.dumps(payload, separators=(",", ":"))
    return safetensors_header(specs, {"format": "pt", _PAYLOAD: text}), tensors


class _Writer:
    """Appends bytes to a file and hashes each part of the file. It collects small pieces into larger writes."""

    def __init__(self, fd: int, cuts: Cuts) -> None:
        self._fd, self._cuts, self._offset = fd, cuts, 0
        self._hasher, self._part = blake3(), cuts.part(0)
        self._buffer, self._buffered_bytes = memoryview(bytearray(CHUNK_BYTES)), 0
        self.digests: list[bytes] = []

    def write(self, data: memoryview) -> None:
        end = self._buffered_bytes + len(data)
        if len(data) >= ROOM_BYTES or end > CHUNK_BYTES:
            self.flush()
            end = len(data)
        if len(data) >= ROOM_BYTES:
            self._append(data)
            return
        self._buffer[self._buffered_bytes : end] = data
        self._buffered_bytes = end

    def flush(self) -> None:
        """Write the collected pieces to the file."""
        if self._buffered_bytes:
            self._append(self._buffer[: self._buffered_bytes])
        self._buffered_bytes = 0

    def _append(self, data: memoryview) -> None:
        write_at(self._fd, data, self._offset)
        while data:
            run, data = data[: self._part.stop - self._offset], data[self._part.stop - self._offset :]
            self._hasher.update(run)
            self._offset += len(run)
            if self._offset == self._part.stop:
                self.digests.append(self._hasher.digest())
                self._hasher = blake3()
                self._part = self._cuts.part(self._part.index + 1)


@dataclass(frozen=True)
class Contents:
    """What the head of an object's file contains: the tree without its tensors, and a description of each tensor.

    Attributes:
        skeleton: the tree without its tensors.
        names: names of the tensors, by their index in the tree.
        layout: offsets and sizes of the tensors that follow the head in the file.
        inline: name → tensor, for the tensors in the head.
        streams: whether the tree has values of registered types that read tensors in chunks.
    """

    skeleton: Plain
    names: tuple[str, ...]
    layout: Layout
    inline: Mapping[str, Tensor]
    streams: bool = False

    @classmethod
    def read(cls, head: bytes | bytearray, cuts: Cuts, what: str) -> Contents:
        """Parse and check the head of an object's file, without allocating the tensors that follow the head.

        Args:
            head: the bytes of the head; a bytearray is empty afterwards.
            cuts: sizes of the file.
            what: the object's name, for messages.

        Raises:
            BadRequest: the bytes are not the head of an object, or do not match the sizes.
        """
        with no_gc():
            return cls._read(head, cuts, what)

    @classmethod
    def _read(cls, head: bytes | bytearray, cuts: Cuts, what: str) -> Contents:
        pieces = _pieces(head, what)
        header = read_header(lambda offset, count: pieces.pop(), cuts.nbytes, what)
        if header.nbytes != cuts.head_bytes:
            raise BadRequest(f"{what} has a header of {header.nbytes} bytes instead of {cuts.head_bytes}.", _REMEDY)
        widths = [spec.item_bytes for spec, _ in header.tensors if spec.numel]
        if widths != sorted(widths, reverse=True):  # else chunks of bytes would not end at element borders
            raise BadRequest(f"{what} does not have its tensors ordered by element size.", _REMEDY)
        skeleton, names, inline = _payload(header.metadata.get(_PAYLOAD, ""), what)
        segments = [Segment(spec, "none", tensor_at, spec.nbytes) for spec, tensor_at in header.tensors]
        described = [*(segment.spec.name for segment in segments), *inline]
        if sorted(names) != sorted(described) or len(set(names)) != len(names):
            raise BadRequest(f"{what} has other tensor names in its payload than in its header.", _REMEDY)

        def tensor_at(index: int) -> object:
            if index >= len(names):
                raise BadRequest(
                    f"{what} refers to tensor {index}, but has only {number_of(len(names), 'tensor')}.", _REMEDY
                )
            return None

        streams: set[int] = set()

        def stream(index: int) -> object:
            streams.add(index)
            return tensor_at(index)

        unpack(skeleton, tensor_at, stream, build=False)
        layout = Layout(tuple(segments), cuts.head_bytes, cuts.nbytes, cuts.part_bytes, {})
        return cls(skeleton, names, layout, inline, bool(streams))

    def tree(self, tensors: Callable[[str], Any], streams: Callable[[str], Any] | None = None) -> Any:
        """Build the tree with the given tensors.

        Args:
            tensors: name → tensor, or a stand-in for it; called once for each tensor in the tree, including those in
                the head.
            streams: name → the source that a registered type reads from; by default the result of `tensors`.
        """
        tensor_at = functools.cache(lambda index: tensors(self.names[index]))
        return unpack(self.skeleton, tensor_at, None if streams is None else lambda index: streams(self.names[index]))

    @functools.cached_property
    def segments(self) -> dict[str, Segment]:
        """Name → offset and size of each tensor. Inline tensors get offsets as if they were appended to the file."""
        segments, offset = dict(self.layout.by_name), self.layout.nbytes
        for name, tensor in self.inline.items():
            spec = TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            segments[name] = Segment(spec, "none", offset, tensor.nbytes)
            offset += tensor.nbytes
        return segments

    @property
    def inline_bytes(self) -> bytes:
        """The bytes of all inline tensors (the tensors in the head), one after the other."""
        return b"".join(bytes_of(tensor) for tensor in self.inline.values())

    def by_key(self) -> dict[str, str] | None:
        """Return key → the tensor's name in the file, if the tree is a flat dict of tensors and arrays; else None."""
        return flat_keys(self.skeleton, self.names)


class Stored:
    """A received object in an open file. The file is closed when this instance and its lazy tensors are deleted.

    Args:
        contents: contents of the object's head.
        read: function (offset, memory) that fills `memory` with the file's bytes from `offset` on.
        give_back: callback that closes the file; called only once.
        inline_bytes: bytes of the inline tensors (`contents.inline_bytes`); empty if they were appended to the file.
    """

    def __init__(
        self,
        contents: Contents,
        read: Callable[[int, memoryview], None],
        give_back: Callable[[], None],
        *,
        inline_bytes: bytes = b"",
    ) -> None:
        end = contents.layout.nbytes

        def read_all(offset: int, memory: memoryview) -> None:
            if inline_bytes and offset >= end:
                memory[:] = inline_bytes[offset - end : offset - end + len(memory)]
            else:
                read(offset, memory)

        self.segments = contents.segments
        self.contents = replace(contents, inline={})  # frees the head's tensors: `read_all` gives their bytes
        self.handle = Handle(read_all, give_back)

    @functools.cached_property
    def lazy(self) -> dict[str, LazyTensor]:
        """Name → lazy tensor, for all tensors including the inline ones."""
        with no_gc():
            return {name: LazyTensor(self.handle, segment, None) for name, segment in self.segments.items()}

    def tree(self) -> Any:
        """Return the received tree, with its tensors loaded into new memory.

        A value of a registered type is built by the type's consumer, which may read the file's tensors in chunks.
        """
        return self.contents.tree(lambda name: self.lazy[name].resolve(), self.lazy.__getitem__)


def flat_keys(skeleton: Plain, names: Sequence[str]) -> dict[str, str] | None:
    """Return key → the tensor's name in the file, if the tree is a flat dict of only tensors and arrays; else None.

    Args:
        skeleton: the tree without its tensors.
        names: names of the tensors in the file, by their index in the tree.
    """
    if not isinstance(skeleton, dict) or "$" in skeleton:
        return None
    kinds = [node["$"] if isinstance(node, dict) and "$" in node else "" for node in skeleton.values()]
    if not all(kind in ("tensor", "array") for kind in kinds):
        return None
    return {key: names[node["index"]] for key, node in skeleton.items()}


def _names(skeleton: Plain, count: int) -> list[str]:
    """Return the names of the tensors in the file: the keys if the tree is a flat dict, else "0", "1" and so on."""
    keys = flat_keys(skeleton, [str(index) for index in range(count)])
    if not keys or "__metadata__" in keys:
        return [str(index) for index in range(count)]
    named: dict[str, str] = {}
    for key, number in keys.items():
        named.setdefault(number, key)
    return [named[str(index)] for index in range(count)]


def _pieces(head: bytes | bytearray, what: str) -> list[bytes | str]:
    """Return the JSON of an object's head, and before it the bytes of its length: the last one is read first.

    Raises:
        BadRequest: the JSON is not ASCII, or would take too much memory.
    """
    length = bytes(head[:_LENGTH_BYTES])
    try:
        with memoryview(head) as whole, whole[_LENGTH_BYTES:] as body:  # a slice of bytes would be a third copy
            text = str(body, "ascii")
        require_light(text)
    except ValueError as error:
        raise BadRequest(f"{what} has a header that cannot be read: {error}.", _SPLIT) from None
    if isinstance(head, bytearray):
        head.clear()  # or the header would be in memory twice while it is parsed
    return [text, length]


def _payload(text: str, what: str) -> tuple[Plain, tuple[str, ...], dict[str, Tensor]]:
    try:
        require_light(text)
        payload = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest(f"{what} has no payload in its header.", _REMEDY) from None
    names = payload.get("names") if isinstance(payload, dict) else None
    if not isinstance(names, list) or not all(type(name) is str for name in names) or "skeleton" not in payload:
        raise BadRequest(f"{what} has a payload without tensor names or without a skeleton.", _REMEDY)
    inline = payload.get("inline", {})
    if not isinstance(inline, dict):
        raise BadRequest(f"{what} has a payload with an invalid list of inline tensors.", _REMEDY)
    return payload["skeleton"], tuple(names), {name: _from_text(name, entry, what) for name, entry in inline.items()}


def _as_text(tensor: Tensor | Stream) -> dict[str, Plain]:
    """Return an inline tensor, which is small, as a JSON entry of an object's head. A `Stream` is read as a whole."""
    if isinstance(tensor, Stream):
        with gc_as_usual():
            data = b"".join(tensor.runs())
    else:
        data = bytes(bytes_of(run_of(tensor, 0, tensor.numel()).cpu()))
    entry = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [0, tensor.nbytes]}
    return {**entry, "base64": base64.b64encode(data).decode()}


def _from_text(name: str, entry: Plain, what: str) -> Tensor:
    """Return the inline tensor in a JSON entry of an object's head.

    Raises:
        BadRequest: the entry is not a tensor.
    """
    text = entry.pop("base64", None) if isinstance(entry, dict) else None
    spec, _, _ = read_tensor(name, entry, what)
    try:
        data = bytearray(base64.b64decode(text, validate=True)) if isinstance(text, str) else bytearray()
    except (binascii.Error, ValueError):
        data = bytearray()
    if len(data) != spec.nbytes or type(text) is not str:
        raise BadRequest(f"{what} has {len(data)} bytes of {name!r} in its header instead of {spec.nbytes}.", _REMEDY)
    dtype = torch_dtype(spec.dtype)
    return torch.frombuffer(data, dtype=dtype).view(spec.shape) if data else torch.empty(spec.shape, dtype=dtype)
