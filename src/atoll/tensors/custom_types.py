"""Send values of your own types: a producer converts a value to a payload, and a consumer rebuilds the value.

A payload is any nesting of dicts, lists and tuples with tensors, arrays and plain values:

    @dataclass
    class File:
        path: Path

    def produce(file):                       # runs at the sender; a Stream sends large data in chunks
        return {"name": file.path.name, "bytes": Stream(torch.uint8, (size,), chunks)}

    def consume(sent):                       # runs at the receiver; gets a LazyTensor for each Stream
        for run in sent["bytes"].runs():
            ...

    register(File, "my-site.file", produce, consume)

Both sides register the type under the same name. Only this name and the payload are sent, never code, so the receiver's
own consumer decides what is built.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from atoll.errors import BadRequest, UsageError
from atoll.tensors.chunks import bytes_of
from atoll.tensors.lazy_tensors import LazyTensor
from atoll.tensors.reference import TensorRef

T = TypeVar("T")

Chunk = Tensor | np.ndarray[Any, Any] | bytes | bytearray | memoryview

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, eq=False)
class Stream:
    """A tensor that a producer generates in chunks while they are sent, so the whole tensor is never in memory.

    Attributes:
        dtype, shape: dtype and shape of the tensor that the receiver gets.
        chunks: function that yields the elements in row-major order, called each time the stream is sent. A chunk is a
            tensor or an array of `dtype`, or bytes of whole elements. A chunk should have a few MiB.
        where: place of the stream in the payload, for error messages; `atoll.tensors.payload.pack` sets it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Chunk]]
    where: str = field(default="a stream", repr=False)

    @property
    def itemsize(self) -> int:
        """Size of one element, in bytes."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of all elements, in bytes."""
        return math.prod(self.shape) * self.itemsize

    def runs(self) -> Iterator[memoryview]:
        """Yield the bytes of each chunk.

        Raises:
            UsageError: a chunk has another dtype, the number of bytes does not match the shape, or `chunks` raised.
        """
        produced = 0
        for chunk in self._chunks():
            data = self._bytes(chunk)
            produced += len(data)
            if produced > self.nbytes:
                break
            yield data
            del chunk, data  # free this chunk before the next one is created
        if produced != self.nbytes:
            amount = "too many bytes" if produced > self.nbytes else f"only {produced} bytes"
            raise UsageError(
                f"{self.where} produced {amount}, but {self.dtype}{list(self.shape)} has {self.nbytes} bytes.",
                "Check that the producer's shape matches its chunks, and that the data did not change during sending.",
            )

    def _chunks(self) -> Iterator[Chunk]:
        try:
            yield from self.chunks()
        except Exception as error:
            raise UsageError(
                f"{self.where} could not be read: {type(error).__name__}: {error}.",
                "Check the stream's `chunks`.",
            ) from error

    def _bytes(self, chunk: Chunk) -> memoryview:
        if isinstance(chunk, np.ndarray):
            self._require(torch.from_numpy(np.empty(0, chunk.dtype)).dtype)
            array: Any = np.ascontiguousarray(chunk)
            return memoryview(array.reshape(-1).view(np.uint8))
        if isinstance(chunk, Tensor):
            self._require(chunk.dtype)
            return bytes_of(chunk.detach().cpu().contiguous())
        data = memoryview(chunk).cast("B")
        if len(data) % self.itemsize:
            raise UsageError(
                f"{self.where} produced a chunk of {len(data)} bytes, not whole elements of {self.itemsize} bytes.",
                "Produce chunks of whole elements.",
            )
        return data

    def _require(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            raise UsageError(
                f"{self.where} produced a chunk of {dtype}, but the stream's dtype is {self.dtype}.",
                "Convert the chunk in the producer.",
            )


@dataclass(frozen=True)
class Kind:
    """A type that was registered with `register`, with its name on the wire, its producer and its consumer."""

    type: type
    name: str
    produce: Callable[[Any], Any]
    consume: Callable[[Any], Any]

    def take_apart(self, value: Any, where: str) -> Any:
        """Call the producer on a value. Return its payload, which is sent instead of the value.

        Args:
            value: the value.
            where: place of the value in the payload, for error messages.

        Raises:
            UsageError: the producer failed.
        """
        try:
            return self.produce(value)
        except Exception as error:
            raise UsageError(self._failed("producer", where, error), "Check the producer's code.") from error

    def put_together(self, sent: Any, where: str) -> Any:
        """Call the consumer on a received payload, and return the rebuilt value.

        Args:
            sent: the received payload.
            where: place of the value in the whole message, for error messages.

        Raises:
            BadRequest: the consumer failed.
        """
        try:
            return self.consume(sent)
        except Exception as error:
            remedy = "Check that both sides use the same producer and consumer."
            raise BadRequest(self._failed("consumer", where, error), remedy) from error

    def _failed(self, which: str, where: str, error: Exception) -> str:
        return f"{where}: the {which} of {self.name!r} failed: {type(error).__name__}: {error}."


_BY_TYPE: dict[type, Kind] = {}
_BY_NAME: dict[str, Kind] = {}

_OWN = (
    *(type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict),
    *(Tensor, nn.Parameter, nn.Buffer, np.ndarray, TensorRef, LazyTensor, Stream),
)
"""Types that payloads support without registration. They cannot be registered."""


def register(type_: type[T], name: str, produce: Callable[[T], Any], consume: Callable[[Any], T]) -> None:
    """Register a type, so that this process can send and receive values of it. The other side must register it, too.

    Args:
        type_: the type. Subclasses are not included.
        name: name on the wire, the same on both sides, such as `my-site.file`.
        produce: function: value → payload that is sent instead. The payload may be any nesting of dicts, lists and
            tuples, with tensors, arrays, plain values and other registered types. For large data, use a `Stream`. The
            function is called whenever a value is sent or its size is needed. It must not change the value, and should
            leave the reading of large data to a `Stream`.
        consume: function: received payload → value. In place of each `Stream`, the payload has a `LazyTensor` on disk:
            its `runs()` yields the elements in chunks, its `resolve()` loads all of them. When Python deletes the last
            `LazyTensor` of the message, the file is removed.

    Raises:
        UsageError: another type has the name, the type is registered under another name, the name is invalid, `type_`
            is not a class, or payloads support the type without registration.
    """
    if type_ in _OWN or not isinstance(type_, type):
        raise UsageError(
            f"{getattr(type_, '__name__', type_)!r} cannot be registered: it is not a class, or needs no registration.",
            "Register your own class.",
        )
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a valid type name.", "Use up to 100 letters, digits and . _ -; first a letter or digit."
        )
    kind, before, same = Kind(type_, name, produce, consume), _BY_NAME.get(name), _BY_TYPE.get(type_)
    if before is not None and _home(before.type) != _home(type_):
        raise UsageError(f"The name {name!r} is already used by {_home(before.type)}.", "Give each type its own name.")
    if same is not None and same.name != name:
        raise UsageError(f"{_home(type_)} is already registered as {same.name!r}.", "Register each type only once.")
    if before is not None:  # the type's module was reloaded
        _BY_TYPE.pop(before.type, None)
    _BY_TYPE[type_] = _BY_NAME[name] = kind


def kind_of(value: object) -> Kind | None:
    """Return the registration of a value's type; None if the type is not registered."""
    return _BY_TYPE.get(type(value))


def kind_named(name: str, where: str) -> Kind:
    """Return the registration of the type with this name.

    Args:
        name: name of the type on the wire.
        where: place of the value in the payload, for error messages.

    Raises:
        BadRequest: this process has no type of this name.
    """
    kind = _BY_NAME.get(name)
    if kind is None:
        known = ", ".join(sorted(_BY_NAME)) or "none"
        raise BadRequest(
            f"{where} has the type {name!r}, which is not registered in this process; registered types: {known}.",
            f"Call atoll.objects.register(…, {name!r}, …) in this process, too, before the payload is read.",
        )
    return kind


def _home(type_: type) -> str:
    return f"{type_.__module__}.{type_.__qualname__}"
