r"""Payloads: nested dicts and lists with tensors, arrays and plain values. They are sent as JSON and tensors.

`pack` separates a payload into a skeleton, which is plain JSON, and a list of tensors. `unpack` reverses this:

    {"model": {"w": tensor, "b": array}, "lr": 0.1, "tags": ("a", b"\x00")}
      skeleton  {"model": {"w": {"$": "tensor", "index": 0}, "b": {"$": "array", "index": 1}}, "lr": 0.1,
                 "tags": {"$": "tuple", "items": ["a", {"$": "bytes", "base64": "AA=="}]}}
      tensors   [tensor, array]

The receiver gets the identical structure: dicts keep their order, and tuples remain tuples, ints remain ints and NumPy
arrays remain NumPy arrays. A tensor that occurs twice is sent once, and is again one tensor at the receiver. A
`TensorRef` is sent as a reference; its object is not pulled. For a value of a registered type (`custom_types.py`), its
producer's payload is sent, and the consumer rebuilds the value. A `Stream` is generated and read in chunks. `unpack`
checks the skeleton, and builds only the types that are listed here.

Filters select tensors by name. Each place of a tensor in a payload gives it one name, such as `model.w`:

    {"model": {"w": t, "layers": [a, {"b": t}]}, "n": 3}      t is model.w and model.layers.1.b, a is model.layers.0

In a flat dict, the keys are the names. A payload that is itself a tensor has the name `payload`. A tensor inside a
registered type is named by its place in the producer's payload. NumPy scalars are numbers without a name.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.errors import BadRequest, UsageError
from atoll.runtime import gc_as_usual, no_gc
from atoll.tensors.arrays import from_numpy
from atoll.tensors.custom_types import Kind, Stream, kind_named, kind_of
from atoll.tensors.dtypes import NAMES, NOT_IN_NUMPY
from atoll.tensors.module_tensors import memory_of
from atoll.tensors.reference import TensorRef

Plain = Any
"""A JSON value: None, bool, int, float, str, list or dict."""

DEPTH = 100
"""Maximum levels of nesting."""

INT_BITS = 14_000
"""Maximum bits of an integer. Python does not parse integers of more than 4,300 digits."""

_KEYS = (str, int, float, bool, type(None))


@dataclass(frozen=True)
class Packed:
    """A payload, separated into skeleton and tensors.

    Attributes:
        skeleton: everything except the tensors, as a value for `json.dumps`.
        tensors: the tensors, in the order of their first place in the payload. They share the payload's memory. A
            `Stream` generates its values when it is sent.
        arrays: indices of the tensors that are NumPy arrays in the payload.
    """

    skeleton: Plain
    tensors: tuple[Tensor | Stream, ...]
    arrays: frozenset[int]


def pack(payload: Any, place: str = "payload", verb: str = "send") -> Packed:
    """Separate a payload into skeleton and tensors. Tensors are not copied.

    Args:
        payload: the payload.
        place: what errors call the payload.
        verb: what errors say that Atoll cannot do with a value.

    Raises:
        UsageError: a value in the payload cannot be sent. The message names its place.
    """
    packer = _Packer(verb)
    with no_gc():
        skeleton = packer.node(payload, place)
    return Packed(skeleton, tuple(packer.tensors), frozenset(packer.arrays))


def unpack(
    skeleton: Plain,
    tensors: Sequence[Any] | Callable[[int], Any],
    streams: Callable[[int], Any] | None = None,
    *,
    build: bool = True,
) -> Any:
    """Rebuild a payload from its skeleton and tensors.

    Args:
        skeleton: the skeleton, as parsed JSON.
        tensors: a sequence of torch tensors, or a function index → tensor. The function may also return another value,
            such as a `LazyTensor`, to put it into the payload.
        streams: function index → the value that a consumer gets for a `Stream`; default: the value from `tensors`.
        build: whether to rebuild registered types. If False, their payloads are only checked, and None takes the place
            of each such value.

    Raises:
        BadRequest: the skeleton is invalid or refers to a missing tensor. Or `build` is True, and this process has not
            registered a type, or a consumer failed.
    """

    def of_sequence(index: int) -> Any:
        sequence: Any = tensors
        if index >= len(sequence):
            raise BadRequest(f"The payload refers to tensor {index}, but only {len(sequence)} came with it.", _REMEDY)
        return sequence[index]

    tensor_at = tensors if callable(tensors) else of_sequence
    with no_gc():
        return _Unpacker(tensor_at, streams or tensor_at, build).node(skeleton, "payload", 0)


class _Packer:
    def __init__(self, verb: str) -> None:
        self._cannot = f"which Atoll cannot {verb}"
        self.tensors: list[Tensor | Stream] = []
        self.arrays: set[int] = set()
        self._index_of: dict[tuple[object, ...], int] = {}
        self._open: dict[int, str] = {}  # ids of the containers around the current value, to find cycles → places
        self._alive: list[object] = []  # keeps objects alive, so that their ids are not reused
        self._kinds = 0  # number of registered types around the current value

    def node(self, value: Any, path: str) -> Plain:
        if type(value) is int and value.bit_length() > INT_BITS:
            raise UsageError(
                f"{path} is an integer of {value.bit_length()} bits, too large to be sent.",
                f"Use at most {INT_BITS} bits, or send the integer as bytes.",
            )
        if value is None or type(value) in (bool, int, str):
            return value
        kind = kind_of(value)
        if kind is not None:
            return self._registered(kind, value, path)
        if type(value) is float:
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if isinstance(value, Tensor):
            return {"$": "tensor", "index": self._tensor(value, path)}
        if isinstance(value, np.ndarray):
            return {"$": "array", "index": self._array(value, path)}
        if isinstance(value, np.generic):
            return {"$": "scalar", "index": self._array(np.asarray(value), path)}
        if type(value) in (bytes, bytearray):
            return {"$": type(value).__name__, "base64": base64.b64encode(value).decode()}
        if isinstance(value, TensorRef):
            return {"$": "ref", "text": str(value)}
        if type(value) in (list, tuple) or isinstance(value, Mapping):
            return self._within(value, path, self._container)
        if type(value) is Stream and self._kinds:
            return {"$": "stream", "index": self._stream(value, path)}
        raise UsageError(
            f"{path} is of type {_name(value)}, {self._cannot}.",
            "Use dicts, lists, tuples, tensors, arrays, references, numbers, strings, bytes, None, or types "
            "registered with atoll.objects.register.",
        )

    def _within(self, value: Any, path: str, write: Callable[[Any, str], Plain]) -> Plain:
        """Call `write` for a nested container. Refuse cycles and too many levels of nesting."""
        if id(value) in self._open:
            raise UsageError(
                f"{path} is {self._open[id(value)]} again, so the payload contains itself.",
                "Remove this cycle.",
            )
        if len(self._open) == DEPTH:
            raise UsageError(f"{path} is {DEPTH} levels deep, {self._cannot}.", "Use fewer levels.")
        self._open[id(value)] = path
        try:
            return write(value, path)
        finally:
            del self._open[id(value)]

    def _container(self, value: Any, path: str) -> Plain:
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        items = [self.node(item, f"{path}[{index}]") for index, item in enumerate(value)]
        return items if type(value) is list else {"$": "tuple", "items": items}

    def _registered(self, kind: Kind, value: Any, path: str) -> Plain:
        def write(value: Any, path: str) -> Plain:
            with gc_as_usual():
                produced = kind.take_apart(value, path)
            return {"$": "registered", "type": kind.name, "as": self.node(produced, f"{path} (as {kind.name})")}

        self._kinds += 1
        try:
            return self._within(value, path, write)
        finally:
            self._kinds -= 1

    def _stream(self, stream: Stream, path: str) -> int:
        if stream.dtype not in NAMES or any(type(size) is not int or size < 0 for size in stream.shape):
            raise UsageError(
                f"{path} is a stream of {stream.dtype}{list(stream.shape)}, {self._cannot}.",
                f"Use one of these dtypes: {', '.join(str(dtype) for dtype in NAMES)}.",
            )
        return self._add(replace(stream, where=path), stream)

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Plain:
        for key in value:
            if type(key) not in _KEYS:
                raise UsageError(
                    f"{path} has the key {key!r} of type {_name(key)}, {self._cannot}.",
                    "Use strings, numbers, booleans or None as keys.",
                )
        if all(type(key) is str for key in value) and "$" not in value:
            return {key: self.node(item, f"{path}[{key!r}]") for key, item in value.items()}
        items = [
            [self.node(key, f"a key of {path}"), self.node(item, f"{path}[{key!r}]")] for key, item in value.items()
        ]
        return {"$": "dict", "items": items}

    def _tensor(self, tensor: Tensor, path: str) -> int:
        plain = type(tensor) in (Tensor, torch.nn.Parameter, torch.nn.Buffer) and not tensor.is_nested
        if not plain or tensor.layout is not torch.strided:
            kind = f"a tensor of layout {tensor.layout}" if type(tensor) is Tensor else f"of type {_name(tensor)}"
            kind = "a nested tensor" if tensor.is_nested else kind
            raise UsageError(f"{path} is {kind}, {self._cannot}.", "Make it a dense tensor first.")
        if tensor.is_quantized or tensor.dtype not in NAMES:
            raise UsageError(
                f"{path} is a tensor of {tensor.dtype}, {self._cannot}.",
                f"Convert it to one of {', '.join(str(dtype) for dtype in NAMES)}.",
            )
        if tensor.is_meta:
            raise UsageError(f"{path} is on the meta device and has no values.", "Initialise it first.")
        return self._add(tensor.detach().resolve_neg(), tensor)

    def _array(self, array: np.ndarray[Any, Any], path: str) -> int:
        if isinstance(array, np.ma.MaskedArray):
            raise UsageError(f"{path} is a masked array, {self._cannot}.", "Send data and mask as two arrays.")
        try:
            tensor = from_numpy(array)
            travels = tensor.dtype in NAMES
        except (TypeError, ValueError):
            travels = False
        if not travels:
            raise UsageError(
                f"{path} is an array of {array.dtype}, {self._cannot}.",
                "Convert it to an array of numbers or booleans.",
            )
        number = self._add(tensor, array)
        self.arrays.add(number)
        return number

    def _add(self, tensor: Tensor | Stream, original: Any) -> int:
        identity: tuple[object, ...] = (type(original), id(original))
        if isinstance(original, Tensor) and isinstance(tensor, Tensor) and tensor.numel():
            identity = memory_of(tensor)
        if identity not in self._index_of:
            self._index_of[identity] = len(self.tensors)
            self.tensors.append(tensor)
            self._alive.append(original)
        return self._index_of[identity]


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_TEXTS: dict[Plain, tuple[str, Callable[[str], Any]]] = {
    "float": ("value", {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}.__getitem__),
    "bytes": ("base64", _bytes),
    "bytearray": ("base64", lambda text: bytearray(_bytes(text))),
    "ref": ("text", TensorRef.parse),
}
"""Kind of a node that is sent as text → the key of the text in the node, and the function that parses the text."""


_REMEDY = "The sender's Atoll is of another version, or its message was changed: use the same version on both sides."


class _Unpacker:
    def __init__(self, tensor_at: Callable[[int], Any], streams: Callable[[int], Any], build: bool) -> None:
        self._tensor_at, self._streams, self._build = tensor_at, streams, build
        self._kinds = 0  # number of registered types around the current node
        self._arrays: dict[int, Any] = {}

    def node(self, node: Plain, path: str, depth: int) -> Any:
        if depth > DEPTH + 1:
            raise BadRequest(f"{path} is more than {DEPTH} levels deep.", _REMEDY)
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, list):
            return self._items(node, path, depth)
        if not isinstance(node, dict):
            raise BadRequest(f"{path} is of type {_name(node)}, which a payload cannot contain.", _REMEDY)
        if "$" not in node:
            return {key: self.node(item, f"{path}[{key!r}]", depth + 1) for key, item in node.items()}
        return self._tagged(node, node["$"], path, depth)

    def _tagged(self, node: dict[str, Plain], kind: Plain, path: str, depth: int) -> Any:
        """Return the value of a node with the key `$`, which names the node's kind."""
        if kind in ("tensor", "array", "scalar"):
            return self._tensor(kind, _only(node, "index", int, path))
        if kind == "stream" and self._kinds:
            return self._streams(_index(_only(node, "index", int, path)))
        if kind == "registered":
            return self._registered(node, path, depth)
        if kind == "tuple":
            return tuple(self._items(_only(node, "items", list, path), path, depth))
        if kind == "dict":
            return self._dict(_only(node, "items", list, path), path, depth)
        if isinstance(kind, str) and kind in _TEXTS:
            entry, read = _TEXTS[kind]
            text = _only(node, entry, str, path)
            try:
                return read(text)
            except (KeyError, UsageError, ValueError) as error:
                raise BadRequest(f"{path} is not a valid {kind!r}: {error}", _REMEDY) from None
        raise BadRequest(f"{path} is of the unknown kind {kind!r}.", _REMEDY)

    def _items(self, items: list[Plain], path: str, depth: int) -> list[Any]:
        return [self.node(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(items)]

    def _dict(self, items: list[Plain], path: str, depth: int) -> dict[Any, Any]:
        built: dict[Any, Any] = {}
        for pair in items:
            if not isinstance(pair, list) or len(pair) != 2:
                raise BadRequest(f"{path} has an entry that is not a pair of key and value.", _REMEDY)
            key = self.node(pair[0], f"a key of {path}", depth + 1)
            if type(key) not in _KEYS or key in built:
                raise BadRequest(f"{path} has the key {key!r}, which occurs twice or is not a valid key.", _REMEDY)
            built[key] = self.node(pair[1], f"{path}[{key!r}]", depth + 1)
        return built

    def _registered(self, node: dict[str, Plain], path: str, depth: int) -> Any:
        name = node.get("type")
        if set(node) != {"$", "type", "as"} or type(name) is not str:
            raise BadRequest(f"{path} is marked as a registered type, but lacks its name or its payload.", _REMEDY)
        kind = kind_named(name, path) if self._build else None
        self._kinds += 1
        sent = self.node(node["as"], f"{path} (as {name})", depth + 1)
        self._kinds -= 1
        if kind is None:
            return None
        with gc_as_usual():
            return kind.put_together(sent, path)

    def _tensor(self, kind: str, index: int) -> Any:
        value = self._tensor_at(_index(index))
        if kind == "tensor" or not isinstance(value, Tensor):
            return value
        if index not in self._arrays:
            if value.dtype in NOT_IN_NUMPY:
                raise BadRequest(f"Tensor {index} should be a NumPy array, but NumPy lacks {value.dtype}.", _REMEDY)
            self._arrays[index] = value.numpy()
        array = self._arrays[index]
        return array if kind == "array" else array[()]


def _index(index: int) -> int:
    if index < 0:
        raise BadRequest(f"The payload refers to tensor {index}, which does not exist.", _REMEDY)
    return index


def _only(node: dict[str, Plain], key: str, kind: type, path: str) -> Any:
    """Return the value of `key`, which must be the node's only key besides `$`, the name of its kind.

    Raises:
        BadRequest: the node has other keys, or the value has another type.
    """
    value = node.get(key)
    if set(node) != {"$", key} or type(value) is not kind:
        raise BadRequest(f"{path} is not a valid {node['$']!r}.", _REMEDY)
    return value


def _name(value: object) -> str:
    return type(value).__qualname__


ROOT = "payload"

_NAMED = ("tensor", "array", "stream")


def names_of(packed: Packed) -> dict[int, tuple[str, ...]]:
    """Return the names of each tensor, one for each of its places in the payload: index of the tensor → names.

    Raises:
        UsageError: two tensors have the same name.
    """
    found: dict[int, dict[str, None]] = {}
    owner: dict[str, int] = {}
    with no_gc():
        for path, index in _tensor_paths(packed.skeleton, ""):
            name = path or ROOT
            if owner.setdefault(name, index) != index:
                raise UsageError(
                    f"Two tensors of the payload have the name {name!r}, so filters cannot tell them apart.",
                    "Use different keys.",
                )
            found.setdefault(index, {})[name] = None
    return {index: tuple(names) for index, names in found.items()}


def without(packed: Packed, numbers: frozenset[int]) -> Packed:
    """Return a packed payload, but leave out the tensors with these indices: the receiver gets None in their places."""
    if not numbers:
        return packed
    kept = [index for index in range(len(packed.tensors)) if index not in numbers]
    new = {index: number for number, index in enumerate(kept)}
    with no_gc():
        skeleton = _renumbered(packed.skeleton, new)
    arrays = frozenset(new[index] for index in packed.arrays if index in new)
    return Packed(skeleton, tuple(packed.tensors[index] for index in kept), arrays)


def _tensor_paths(node: Plain, path: str) -> Iterator[tuple[str, int]]:
    """Yield (name, index) for every place of a tensor in a valid skeleton."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _tensor_paths(item, _join(path, str(index)))
    elif isinstance(node, dict):
        kind = node.get("$")
        if kind is None:
            for key, item in node.items():
                yield from _tensor_paths(item, _join(path, key))
        elif kind in _NAMED:
            yield path, node["index"]
        elif kind == "registered":
            yield from _tensor_paths(node["as"], path)
        elif kind == "tuple":
            yield from _tensor_paths(node["items"], path)
        elif kind == "dict":
            for key, item in node["items"]:
                yield from _tensor_paths(item, _join(path, str(key["value"] if isinstance(key, dict) else key)))


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _renumbered(node: Plain, new: Mapping[int, int]) -> Plain:
    if isinstance(node, list):
        return [_renumbered(item, new) for item in node]
    if not isinstance(node, dict):
        return node
    kind = node.get("$")
    if kind in (*_NAMED, "scalar"):
        return {**node, "index": new[node["index"]]} if node["index"] in new else None
    return {key: item if key == "$" else _renumbered(item, new) for key, item in node.items()}
