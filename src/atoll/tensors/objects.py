"""Objects: any tree with tensors ↔ one safetensors file, cut into parts that can be checked alone.

    file   | head: names, dtypes, shapes; the tree's skeleton | tensors, widest elements first, no gaps |
    parts  [0      ][1      ]                                 [2        ][3        ][4        ][5       ]

The head has parts of its own, so that a receiver knows where every tensor belongs before the first of them comes. The
rest is cut every `part_bytes`, through tensors. The digest is over the sizes and the digests of all parts.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3
from torch import Tensor, nn

from atoll.errors import BadRequest, UsageError
from atoll.posix import write_at
from atoll.tensors.chunks import CHUNK_BYTES, bytes_of, run_of
from atoll.tensors.dtypes import dtype_name
from atoll.tensors.header import MOST_BYTES as MOST_HEAD_BYTES
from atoll.tensors.header import read_header
from atoll.tensors.kinds import Stream
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, Segment, safetensors_header
from atoll.tensors.lazy import Handle, LazyTensor
from atoll.tensors.payload import Plain, pack, unpack
from atoll.tensors.schema import TensorSpec

LEAST_PART_BYTES, MOST_PART_BYTES = 2**16, 2**24
MOST_PARTS = 400_000
"""Of an object: their digests are held in memory, and travel in one message of 27 MB."""

_PAYLOAD = "atoll.payload"
_REMEDY = "Publish it with Atoll, of the same version on both sides."


@dataclass(frozen=True, slots=True)
class Extent:
    """What decides the parts of an object.

    Attributes:
        head_bytes: of the head, a multiple of 64.
        nbytes: of the file, head included.
        part_bytes: the most bytes of one part.
    """

    head_bytes: int
    nbytes: int
    part_bytes: int

    def require_sound(self, what: str) -> None:
        """Refuse sizes that no object has, before anything is made for them.

        Raises:
            BadRequest: which.
        """
        if not LEAST_PART_BYTES <= self.part_bytes <= MOST_PART_BYTES or self.part_bytes % ALIGN_BYTES:
            raise BadRequest(
                f"{what} has parts of {self.part_bytes} bytes.",
                f"Parts have {LEAST_PART_BYTES} to {MOST_PART_BYTES} bytes, a multiple of {ALIGN_BYTES}.",
            )
        if not 0 < self.head_bytes <= MOST_HEAD_BYTES or self.head_bytes % ALIGN_BYTES or self.head_bytes > self.nbytes:
            raise BadRequest(f"{what} has a head of {self.head_bytes} of its {self.nbytes} bytes.", _REMEDY)
        if self.count > MOST_PARTS:
            raise BadRequest(
                f"{what} would have {self.count} parts, more than {MOST_PARTS}.",
                "Publish it with a larger chunk_bytes.",
            )

    @property
    def head_count(self) -> int:
        """Parts of the head; those behind it hold the tensors."""
        return -(-self.head_bytes // self.part_bytes)

    @property
    def count(self) -> int:
        return self.head_count - (self.head_bytes - self.nbytes) // self.part_bytes

    def part(self, index: int) -> Part:
        """The part of this number; parts cover every byte once."""
        begin, end, number = 0, self.head_bytes, index
        if index >= self.head_count:
            begin, end, number = self.head_bytes, self.nbytes, index - self.head_count
        start = begin + number * self.part_bytes
        return Part(index, start, min(start + self.part_bytes, end), ())

    def parts(self) -> list[Part]:
        """All of them."""
        return [self.part(index) for index in range(self.count)]

    def digest(self, part_digests: Sequence[bytes]) -> str:
        """What a reference names an object by, in hex."""
        hasher = blake3(f"atoll.object.1 {self.head_bytes} {self.nbytes} {self.part_bytes} ".encode())
        for digest in part_digests:
            hasher.update(digest)
        return hasher.hexdigest()


def write_object(tree: Any, fd: int, part_bytes: int) -> tuple[Extent, list[bytes]]:
    """Write a tree into the file `fd`, in runs of `CHUNK_BYTES`; no tensor of it is referred to afterwards.

    Args:
        tree: nested dicts, lists and tuples with tensors, arrays, plain values and registered types; or a module, for
            its state.
        part_bytes: the most bytes of a part.

    Returns:
        The sizes, and BLAKE3 of every part.

    Raises:
        UsageError: something in it cannot travel; it is named.
        OSError: as `write`.
    """
    packed = pack(tree.state_dict(keep_vars=True) if isinstance(tree, nn.Module) else tree)
    names = _names(packed.skeleton, len(packed.tensors))
    order = sorted(range(len(names)), key=lambda index: -packed.tensors[index].itemsize)
    tensors = [packed.tensors[index] for index in order]
    specs = [
        TensorSpec(names[index], dtype_name(tensor.dtype), tuple(tensor.shape))
        for index, tensor in zip(order, tensors, strict=True)
    ]
    payload = json.dumps({"names": names, "skeleton": packed.skeleton}, separators=(",", ":"))
    head = safetensors_header(specs, {"format": "pt", _PAYLOAD: payload})
    extent = Extent(len(head), len(head) + sum(spec.nbytes for spec in specs), part_bytes)
    if len(head) > MOST_HEAD_BYTES or extent.count > MOST_PARTS:
        raise UsageError(
            f"The object has a head of {len(head)} bytes and {extent.count} parts; "
            f"the most are {MOST_HEAD_BYTES} and {MOST_PARTS}.",
            "Publish it in pieces, or with a larger chunk_bytes.",
        )
    writer = _Writer(fd, extent)
    writer.write(memoryview(head))
    for tensor in tensors:
        for run in tensor.runs() if isinstance(tensor, Stream) else _runs(tensor):
            writer.write(run)
            del run  # before the next one is made
    return extent, writer.digests


def _runs(tensor: Tensor) -> Iterator[memoryview]:
    step = max(1, CHUNK_BYTES // tensor.itemsize)
    for start in range(0, tensor.numel(), step):
        yield bytes_of(run_of(tensor, start, min(start + step, tensor.numel())).cpu())


class _Writer:
    """Appends to a file, and takes the digest of each part on the way."""

    def __init__(self, fd: int, extent: Extent) -> None:
        self._fd, self._extent, self._offset = fd, extent, 0
        self._hasher, self._part = blake3(), extent.part(0)
        self.digests: list[bytes] = []

    def write(self, data: memoryview) -> None:
        write_at(self._fd, data, self._offset)
        while data:
            run, data = data[: self._part.stop - self._offset], data[self._part.stop - self._offset :]
            self._hasher.update(run)
            self._offset += len(run)
            if self._offset == self._part.stop:
                self.digests.append(self._hasher.digest())
                self._hasher = blake3()
                self._part = self._extent.part(self._part.index + 1)


@dataclass(frozen=True)
class Contents:
    """What an object's head says.

    Attributes:
        skeleton: the tree without its tensors.
        names: of the tensors in the file, by their index in the tree.
        layout: where each of them lies.
        streams: whether registered types read some of them in runs.
    """

    skeleton: Plain
    names: tuple[str, ...]
    layout: Layout
    streams: bool = False

    @classmethod
    def read(cls, head: bytes | bytearray, extent: Extent, what: str) -> Contents:
        """Read a head strictly; nothing is made for a tensor.

        Raises:
            BadRequest: it is none of an object, or describes something else than these sizes.
        """
        header = read_header(lambda at, count: bytes(head[at : at + count]), extent.nbytes, what)
        if header.nbytes != extent.head_bytes:
            raise BadRequest(f"{what} has a head of {header.nbytes} bytes, not of {extent.head_bytes}.", _REMEDY)
        widths = [spec.item_bytes for spec, _ in header.tensors if spec.numel]
        if widths != sorted(widths, reverse=True):  # else runs of bytes would not end at borders of elements
            raise BadRequest(f"{what} does not have its tensors in the order of their element sizes.", _REMEDY)
        skeleton, names = _payload(header.metadata.get(_PAYLOAD, ""), what)
        segments = [Segment(spec, "none", 0, spec.numel, at, spec.nbytes) for spec, at in header.tensors]
        if sorted(names) != sorted(segment.spec.name for segment in segments):
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
        layout = Layout(tuple(segments), extent.head_bytes, extent.nbytes, extent.part_bytes, {})
        return cls(skeleton, names, layout, bool(streams))

    def tree(self, tensors: Callable[[str], Any], streams: Callable[[str], Any] | None = None) -> Any:
        """The tree with these tensors by name, or with what stands for them; each is asked for where it is needed.

        Args:
            streams: what consumers of registered types read from; by default what `tensors` gives.
        """
        at = functools.cache(lambda index: tensors(self.names[index]))
        return unpack(self.skeleton, at, None if streams is None else lambda index: streams(self.names[index]))

    def by_key(self) -> dict[str, str] | None:
        """Key → name in the file, for a flat dict of tensors and arrays; None for any other tree."""
        return flat_keys(self.skeleton, self.names)


class Stored:
    """An object that has arrived, in an open file; the file goes with this and what is lazy of it.

    Args:
        read: (offset, memory) → fills the memory from the file's byte `offset` on.
        give_back: closes the file; called once.
    """

    def __init__(
        self, contents: Contents, read: Callable[[int, memoryview], None], give_back: Callable[[], None]
    ) -> None:
        self.contents = contents
        self.handle = Handle(read, give_back)
        self.lazy = {name: LazyTensor(self.handle, segment, None) for name, segment in contents.layout.by_name.items()}

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


def _payload(text: str, what: str) -> tuple[Plain, tuple[str, ...]]:
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest(f"{what} has no payload in its head.", _REMEDY) from None
    names = payload.get("names") if isinstance(payload, dict) else None
    if not isinstance(names, list) or not all(type(name) is str for name in names) or "skeleton" not in payload:
        raise BadRequest(f"{what} has a payload without names or without a skeleton.", _REMEDY)
    return payload["skeleton"], tuple(names)
