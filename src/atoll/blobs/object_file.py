"""Objects: any tree with tensors ↔ one safetensors file, cut into parts that can be checked alone.

    file   | head: names, dtypes, shapes; the tree's skeleton | tensors, widest elements first, no gaps |
    parts  [0      ][1      ]                                 [2        ][3        ][4        ][5       ]

The head has parts of its own, so that a receiver knows where every tensor belongs before the first of them comes. The
rest is cut every `part_bytes`, through tensors. Tensors that travel inline while others are streamed are in the head
itself, beside the skeleton.
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

from atoll.blobs.manifest import MOST_PARTS, Cuts, Manifest
from atoll.blobs.payload_cut import Cut
from atoll.errors import BadRequest, UsageError
from atoll.posix import write_at
from atoll.runtime import gc_as_usual, no_gc
from atoll.tensors.chunks import CHUNK_BYTES, ROOM_BYTES, bytes_of, run_of, runs_of
from atoll.tensors.custom_types import Stream
from atoll.tensors.dtypes import dtype_name, torch_dtype
from atoll.tensors.layout import Layout, Segment, safetensors_header
from atoll.tensors.lazy_tensors import Handle, LazyTensor
from atoll.tensors.module_tensors import state_of
from atoll.tensors.payload import Packed, Plain, pack, unpack
from atoll.tensors.safetensors_header import MOST_BYTES as MOST_HEAD_BYTES
from atoll.tensors.safetensors_header import read_header, read_tensor
from atoll.tensors.schema import TensorSpec

_PAYLOAD = "atoll.payload"
_REMEDY = "Publish it with Atoll, of the same version on both sides."


def pack_object(tree: Any) -> Packed:
    """Take what is published apart: nested dicts, lists and tuples; or a module, for its state. Nothing is copied.

    Args:
        tree: nested dicts, lists and tuples with tensors, arrays, plain values and registered types; or a module, for
            its state.

    Raises:
        UsageError: something in it cannot travel; it is named.
    """
    return pack(state_of(tree) if isinstance(tree, nn.Module) else tree)


def write_object(packed: Packed, fd: int, cut: Cut) -> Manifest:
    """Write a tree into the file `fd`, in runs of `CHUNK_BYTES`; a `Stream` as its chunks are made.

    Returns:
        The object's manifest.

    Raises:
        UsageError: it is too large for one object.
        OSError: as `write`.
    """
    with no_gc():
        head, tensors = _head(packed, cut)
    cuts = Cuts(len(head), len(head) + sum(tensor.nbytes for tensor in tensors), cut.part_bytes)
    if len(head) > MOST_HEAD_BYTES or cuts.count > MOST_PARTS:
        raise UsageError(
            f"The object has a head of {len(head)} bytes and {cuts.count} parts; "
            f"the most are {MOST_HEAD_BYTES} and {MOST_PARTS}.",
            "Publish it in pieces, or with a larger chunk_bytes.",
        )
    writer = _Writer(fd, cuts)
    writer.write(memoryview(head))
    for tensor in tensors:
        for run in tensor.runs() if isinstance(tensor, Stream) else runs_of(tensor):
            writer.write(run)
            del run  # before the next one is made
    writer.flush()
    return Manifest.of_cuts(cuts, writer.digests)


def _head(packed: Packed, cut: Cut) -> tuple[bytes, list[Tensor | Stream]]:
    """The head, and the tensors behind it in their order."""
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
    """Appends to a file, and takes the digest of each part on the way. What is small is gathered to runs."""

    def __init__(self, fd: int, cuts: Cuts) -> None:
        self._fd, self._cuts, self._offset = fd, cuts, 0
        self._hasher, self._part = blake3(), cuts.part(0)
        self._held, self._held_bytes = memoryview(bytearray(CHUNK_BYTES)), 0
        self.digests: list[bytes] = []

    def write(self, data: memoryview) -> None:
        end = self._held_bytes + len(data)
        if len(data) >= ROOM_BYTES or end > CHUNK_BYTES:
            self.flush()
            end = len(data)
        if len(data) >= ROOM_BYTES:
            self._append(data)
            return
        self._held[self._held_bytes : end] = data
        self._held_bytes = end

    def flush(self) -> None:
        """Write what is held."""
        if self._held_bytes:
            self._append(self._held[: self._held_bytes])
        self._held_bytes = 0

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
    """What an object's head says.

    Attributes:
        skeleton: the tree without its tensors.
        names: of the tensors, by their index in the tree.
        layout: where each one lies that is in the file.
        inline: those that came within the head, by name.
        streams: whether registered types read some of them in runs.
    """

    skeleton: Plain
    names: tuple[str, ...]
    layout: Layout
    inline: Mapping[str, Tensor]
    streams: bool = False

    @classmethod
    def read(cls, head: bytes | bytearray, cuts: Cuts, what: str) -> Contents:
        """Read a head strictly; nothing is made for a tensor.

        Raises:
            BadRequest: it is none of an object, or describes something else than these sizes.
        """
        with no_gc():
            return cls._read(head, cuts, what)

    @classmethod
    def _read(cls, head: bytes | bytearray, cuts: Cuts, what: str) -> Contents:
        header = read_header(lambda at, count: bytes(head[at : at + count]), cuts.nbytes, what)
        if header.nbytes != cuts.head_bytes:
            raise BadRequest(f"{what} has a head of {header.nbytes} bytes, not of {cuts.head_bytes}.", _REMEDY)
        widths = [spec.item_bytes for spec, _ in header.tensors if spec.numel]
        if widths != sorted(widths, reverse=True):  # else runs of bytes would not end at borders of elements
            raise BadRequest(f"{what} does not have its tensors in the order of their element sizes.", _REMEDY)
        skeleton, names, inline = _payload(header.metadata.get(_PAYLOAD, ""), what)
        segments = [Segment(spec, "none", at, spec.nbytes) for spec, at in header.tensors]
        described = [*(segment.spec.name for segment in segments), *inline]
        if sorted(names) != sorted(described) or len(set(names)) != len(names):
            raise BadRequest(f"{what} names other tensors in its payload than in its head.", _REMEDY)

        def at(index: int) -> object:
            if index >= len(names):
                raise BadRequest(f"{what} names tensor {index} in its payload, and has {len(names)}.", _REMEDY)
            return None

        streams: set[int] = set()

        def stream(index: int) -> object:
            streams.add(index)
            return at(index)

        unpack(skeleton, at, stream, build=False)
        layout = Layout(tuple(segments), cuts.head_bytes, cuts.nbytes, cuts.part_bytes, {})
        return cls(skeleton, names, layout, inline, bool(streams))

    def tree(self, tensors: Callable[[str], Any], streams: Callable[[str], Any] | None = None) -> Any:
        """The tree with these tensors by name, or with what stands for them; each is asked for where it is needed.

        Args:
            tensors: also of those that came within the head.
            streams: what consumers of registered types read from; by default what `tensors` gives.
        """
        at = functools.cache(lambda index: tensors(self.names[index]))
        return unpack(self.skeleton, at, None if streams is None else lambda index: streams(self.names[index]))

    @functools.cached_property
    def segments(self) -> dict[str, Segment]:
        """Name → where each tensor lies; those of the head follow the file, as `behind` has them."""
        segments, at = dict(self.layout.by_name), self.layout.nbytes
        for name, tensor in self.inline.items():
            spec = TensorSpec(name, dtype_name(tensor.dtype), tuple(tensor.shape))
            segments[name] = Segment(spec, "none", at, tensor.nbytes)
            at += tensor.nbytes
        return segments

    @property
    def behind(self) -> bytes:
        """The tensors of the head, one after the other."""
        return b"".join(bytes_of(tensor) for tensor in self.inline.values())

    def by_key(self) -> dict[str, str] | None:
        """Key → name in the file, for a flat dict of tensors and arrays; None for any other tree."""
        return flat_keys(self.skeleton, self.names)


class Stored:
    """An object that has arrived, in an open file; the file goes with this and what is lazy of it.

    Args:
        read: (offset, memory) → fills the memory from the file's byte `offset` on.
        give_back: closes the file; called once.
        behind: what follows the file and is not in it: the tensors of its head, unless they were written there.
    """

    def __init__(
        self,
        contents: Contents,
        read: Callable[[int, memoryview], None],
        give_back: Callable[[], None],
        *,
        behind: bytes = b"",
    ) -> None:
        end = contents.layout.nbytes

        def read_all(offset: int, memory: memoryview) -> None:
            if behind and offset >= end:
                memory[:] = behind[offset - end : offset - end + len(memory)]
            else:
                read(offset, memory)

        self.segments = contents.segments
        self.contents = replace(contents, inline={})  # what is on disk is not held in memory, too
        self.handle = Handle(read_all, give_back)

    @functools.cached_property
    def lazy(self) -> dict[str, LazyTensor]:
        """By name, the tensors of the head, too."""
        with no_gc():
            return {name: LazyTensor(self.handle, segment, None) for name, segment in self.segments.items()}

    def tree(self) -> Any:
        """What was sent, with its tensors in new memory; only what consumers read in runs stays in the file."""
        return self.contents.tree(lambda name: self.lazy[name].resolve(), self.lazy.__getitem__)


def flat_keys(skeleton: Plain, names: Sequence[str]) -> dict[str, str] | None:
    """Key → name, where the tree is a dict of strings with nothing but tensors and arrays; else None."""
    if not isinstance(skeleton, dict) or "$" in skeleton:
        return None
    kinds = [node["$"] if isinstance(node, dict) and "$" in node else "" for node in skeleton.values()]
    if not all(kind in ("tensor", "array") for kind in kinds):
        return None
    return {key: names[node["index"]] for key, node in skeleton.items()}


def _names(skeleton: Plain, count: int) -> list[str]:
    """Names of the tensors in the file: their keys where the tree is a flat dict, else their numbers."""
    keys = flat_keys(skeleton, [str(index) for index in range(count)])
    if not keys or "__metadata__" in keys:
        return [str(index) for index in range(count)]
    named: dict[str, str] = {}
    for key, number in keys.items():
        named.setdefault(number, key)
    return [named[str(index)] for index in range(count)]


def _payload(text: str, what: str) -> tuple[Plain, tuple[str, ...], dict[str, Tensor]]:
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest(f"{what} has no payload in its head.", _REMEDY) from None
    names = payload.get("names") if isinstance(payload, dict) else None
    if not isinstance(names, list) or not all(type(name) is str for name in names) or "skeleton" not in payload:
        raise BadRequest(f"{what} has a payload without names or without a skeleton.", _REMEDY)
    inline = payload.get("inline", {})
    if not isinstance(inline, dict):
        raise BadRequest(f"{what} has a payload without inline tensors where they are announced.", _REMEDY)
    return payload["skeleton"], tuple(names), {name: _from_text(name, entry, what) for name, entry in inline.items()}


def _as_text(tensor: Tensor | Stream) -> dict[str, Plain]:
    """An entry of the head; `cut_of` sees to it that a `Stream` is small here."""
    if isinstance(tensor, Stream):
        with gc_as_usual():
            data = b"".join(tensor.runs())
    else:
        data = bytes(bytes_of(run_of(tensor, 0, tensor.numel()).cpu()))
    entry = {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "data_offsets": [0, tensor.nbytes]}
    return {**entry, "base64": base64.b64encode(data).decode()}


def _from_text(name: str, entry: Plain, what: str) -> Tensor:
    """A tensor of the head.

    Raises:
        BadRequest: it is none.
    """
    text = entry.pop("base64", None) if isinstance(entry, dict) else None
    spec, _, _ = read_tensor(name, entry, what)
    try:
        data = bytearray(base64.b64decode(text, validate=True)) if isinstance(text, str) else bytearray()
    except (binascii.Error, ValueError):
        data = bytearray()
    if len(data) != spec.nbytes or type(text) is not str:
        raise BadRequest(f"{what} has {name!r} in its head with {len(data)} of {spec.nbytes} bytes.", _REMEDY)
    dtype = torch_dtype(spec.dtype)
    return torch.frombuffer(data, dtype=dtype).view(spec.shape) if data else torch.empty(spec.shape, dtype=dtype)
