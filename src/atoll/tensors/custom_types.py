"""Types of the user's own in a payload: a producer takes a value apart at the sender, a consumer rebuilds it.

    @dataclass
    class File:
        path: Path

    def produce(file):                       # any payload; what is large is a Stream
        return {"name": file.path.name, "bytes": Stream(torch.uint8, (size,), chunks)}

    def consume(sent):                       # the same payload, with a LazyTensor for each Stream
        for run in sent["bytes"].runs():
            ...

    register(File, "my-site.file", produce, consume)

Both sides register the same name. Only the name travels: what is built is decided by the code of the receiver.
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
    """Elements that are made while they travel, and never held all at once. A part of what a producer gives.

    Attributes:
        dtype, shape: of what the receiver gets.
        chunks: called each time it is sent: gives the elements in row-major order, in tensors or arrays of `dtype` or
            in bytes, whole elements each. A chunk is memory: give many small ones, of some MiB.
        where: its place in the payload, for errors; found when it is sent.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[Chunk]]
    where: str = field(default="a stream", repr=False)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return math.prod(self.shape) * self.itemsize

    def runs(self) -> Iterator[memoryview]:
        """Give the bytes, as its chunks give them.

        Raises:
            UsageError: they are of another dtype, more or less than its shape says, or `chunks` raised.
        """
        given = 0
        for chunk in self._chunks():
            data = self._bytes(chunk)
            given += len(data)
            if given > self.nbytes:
                break
            yield data
            del chunk, data  # before the next one is made
        if given != self.nbytes:
            than = "more" if given > self.nbytes else f"{given} bytes, less"
            raise UsageError(
                f"{self.where} gave {than} than the {self.nbytes} bytes of {self.dtype}{list(self.shape)}.",
                "Did it change while it was sent? The producer's shape and chunks must agree.",
            )

    def _chunks(self) -> Iterator[Chunk]:
        try:
            yield from self.chunks()
        except Exception as error:
            raise UsageError(
                f"{self.where} could not be read: {type(error).__name__}: {error}.", "Look at its producer."
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
                f"{self.where} gave a chunk of {len(data)} bytes, no multiple of {self.itemsize}.",
                "Give whole elements.",
            )
        return data

    def _require(self, dtype: torch.dtype) -> None:
        if dtype != self.dtype:
            raise UsageError(
                f"{self.where} gave a chunk of {dtype}, and is of {self.dtype}.", "Convert it in the producer."
            )


@dataclass(frozen=True)
class Kind:
    """A registered type."""

    type: type
    name: str
    produce: Callable[[Any], Any]
    consume: Callable[[Any], Any]

    def take_apart(self, value: Any, where: str) -> Any:
        """Return what travels in place of a value.

        Raises:
            UsageError: the producer failed; the place in the payload is named.
        """
        try:
            return self.produce(value)
        except Exception as error:
            raise UsageError(self._failed("producer", where, error), "Look at its code.") from error

    def put_together(self, sent: Any, where: str) -> Any:
        """Rebuild the value from what was received.

        Raises:
            BadRequest: the consumer failed; the place in the payload is named.
        """
        try:
            return self.consume(sent)
        except Exception as error:
            remedy = "Look whether both sides have the same producer and consumer."
            raise BadRequest(self._failed("consumer", where, error), remedy) from error

    def _failed(self, which: str, where: str, error: Exception) -> str:
        return f"{where}: the {which} of {self.name!r} failed: {type(error).__name__}: {error}."


_BY_TYPE: dict[type, Kind] = {}
_BY_NAME: dict[str, Kind] = {}

_OWN = (
    *(type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict),
    *(Tensor, nn.Parameter, nn.Buffer, np.ndarray, TensorRef, LazyTensor, Stream),
)
"""Types that travel as they are, or stand for what does."""


def register(type_: type[T], name: str, produce: Callable[[T], Any], consume: Callable[[Any], T]) -> None:
    """Let values of a type travel in payloads, from now on and in this process. The receiver registers it, too.

    Args:
        type_: of the values; exactly this one, no subclasses.
        name: on the wire, the same on both sides, such as `my-site.file`.
        produce: value → what travels in its place: any nested dicts, lists and tuples of tensors, arrays, plain values,
            other registered types, and a `Stream` where the data is not to be held in memory at once. It is called
            anew each time that a value is sent or measured; it must not change the value, and reads no data itself.
        consume: what travelled → value. For each `Stream` it is given a `LazyTensor`, on disk: `runs()` gives its
            elements in chunks, `resolve()` all of them. The file goes with the last of these.

    Raises:
        UsageError: another type has the name, the type has another name, or it travels by itself.
    """
    if type_ in _OWN or not isinstance(type_, type):
        raise UsageError(
            f"{getattr(type_, '__name__', type_)!r} cannot be registered.", "Register a class of your own."
        )
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name of a type.", "Use 1 to 100 letters, digits, dots, hyphens and underscores."
        )
    kind, before, same = Kind(type_, name, produce, consume), _BY_NAME.get(name), _BY_TYPE.get(type_)
    if before is not None and _home(before.type) != _home(type_):
        raise UsageError(f"The name {name!r} is taken by {_home(before.type)}.", "Give each type a name of its own.")
    if same is not None and same.name != name:
        raise UsageError(f"{_home(type_)} is registered as {same.name!r} already.", "Give a type one name.")
    if before is not None:  # its module was loaded anew
        _BY_TYPE.pop(before.type, None)
    _BY_TYPE[type_] = _BY_NAME[name] = kind


def kind_of(value: object) -> Kind | None:
    """Return what is registered for the type of a value."""
    return _BY_TYPE.get(type(value))


def kind_named(name: str, where: str) -> Kind:
    """Return what is registered under a name.

    Raises:
        BadRequest: nothing is, in this process.
    """
    kind = _BY_NAME.get(name)
    if kind is None:
        known = ", ".join(sorted(_BY_NAME)) or "none"
        raise BadRequest(
            f"{where} is of the type {name!r}, which is not registered in this process; registered here: {known}.",
            f"Call atoll.objects.register(…, {name!r}, …) here, too, before the payload is read.",
        )
    return kind


def _home(type_: type) -> str:
    return f"{type_.__module__}.{type_.__qualname__}"
