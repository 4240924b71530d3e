"""Aggregators that users write: what they are given, and what they may return.

    (a)  aggregate(updates) → (name, pseudo-gradient) pairs, or a mapping
    (b)  accept(update) as each arrives, then aggregate() → the same, then reset()

The pseudo-gradient of a tensor is pulled − local: the outer optimizer goes against it.

The file holds `params` alone, each element in the dtype in which the pass accumulates it, so that nothing is rounded
on the way to the outer optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from atoll import registry
from atoll.codecs.plain import Elementwise
from atoll.errors import ConfigError
from atoll.posix import write_at
from atoll.tensors.chunks import bytes_of
from atoll.tensors.dtypes import accumulate_dtype, dtype_name, torch_dtype
from atoll.tensors.layout import Layout, Segment, update_layout
from atoll.tensors.lazy_tensors import LazyState, LazyTensor
from atoll.tensors.schema import Schema


@dataclass(frozen=True)
class Update:
    """One accepted update. It may be kept: its tensors stay on disk until it is dropped (`max_kept_updates`).

    Attributes:
        site: that submitted it.
        round: for which it was submitted.
        weight: as the site gave it; finite and above zero.
        steps: local ones, 0 where the site did not say.
        metrics: as the site gave them.
        tensors: name → pseudo-gradient, of every tensor of `params`; each is read and decoded when it is asked for.
        buffers: name → value, of every buffer. The server averages them itself.
    """

    site: str
    round: int
    weight: float
    steps: int
    metrics: Mapping[str, float]
    tensors: LazyState
    buffers: LazyState


class AllAtOnce:
    """Form (a) behind the interface of form (b): updates are collected, and given at once."""

    incremental = False

    def __init__(self, aggregate: Callable[[Sequence[Update]], object]) -> None:
        self._aggregate = aggregate
        self._updates: list[Update] = []

    def accept(self, update: Update) -> None:
        """Keep the update until `reset`; user code does not run yet."""
        self._updates.append(update)

    def aggregate(self) -> object:
        """Return what the user's function makes of all updates since the last `reset`, in the order of `accept`."""
        return self._aggregate(tuple(self._updates))

    def reset(self) -> None:
        """Let go of the updates of this round."""
        self._updates.clear()


class Incremental:
    """Form (b), as it is."""

    incremental = True

    def __init__(self, user: Any) -> None:
        self.accept: Callable[[Update], object] = user.accept
        self.aggregate: Callable[[], object] = user.aggregate
        self.reset: Callable[[], object] = user.reset


def load(target: str, options: Mapping[str, Any]) -> AllAtOnce | Incremental:
    """Return the aggregator that the run file names.

    Args:
        target: `module:attribute` or `file.py:attribute`: a class, an object, or a function of the updates.
        options: keyword arguments of the class, or of the function beside its updates.

    Raises:
        ConfigError: it is not there, cannot be made with these options, or has neither form.
    """
    found = kind = registry.load_attribute(target)
    if isinstance(found, type):
        found = registry.made(
            lambda: kind(**options),
            f"The aggregator {target!r} cannot be made",
            "Write its keyword arguments beside the path in aggregation.aggregator.",
        )
    elif options and hasattr(found, "aggregate"):
        raise ConfigError(
            f"aggregation.aggregator has arguments, but {target!r} is an object already.",
            "Name its class, or give none.",
        )
    if callable(getattr(found, "accept", None)):
        missing = [name for name in ("aggregate", "reset") if not callable(getattr(found, name, None))]
        if missing:
            raise ConfigError(
                f"The aggregator {target!r} has accept, but no {' and no '.join(missing)}.",
                "It takes accept(update), aggregate() and reset(); or aggregate(updates) alone.",
            )
        return Incremental(found)
    if callable(getattr(found, "aggregate", None)):
        return AllAtOnce(found.aggregate)
    if callable(found):
        return AllAtOnce(lambda updates: found(updates, **options))
    raise ConfigError(
        f"The aggregator {target!r} is a {type(found).__name__}, which has no aggregate.",
        "Name a function of the updates, or a class with aggregate(updates).",
    )


@dataclass(frozen=True)
class Accumulated(Elementwise):
    """The codec of the file: elements in their dtype of accumulation."""

    name: ClassVar[str] = "accumulated"

    @staticmethod
    def stored(dtype: str) -> str:
        """Return the safetensors name of the dtype in which elements of `dtype` are accumulated."""
        return dtype_name(accumulate_dtype(dtype))


def result_layout(schema: Schema, part_bytes: int) -> Layout:
    """How what an aggregator gives lies in the file."""
    codec = Accumulated()
    return update_layout([spec for spec in schema.tensors if spec.is_stepped], lambda _: codec, part_bytes)


class BadResult(Exception):
    """What an aggregator gave cannot be used; the text says what it gave, and goes on after "it"."""


def write_result(fd: int, layout: Layout, given: object, progress: Callable[[], None]) -> None:
    """Write what an aggregator gives; a tensor is gone before the next one is asked for.

    Args:
        given: (name, tensor) pairs or a mapping; whatever asking for the next pair raises goes through.
        progress: called after each tensor.

    Raises:
        BadResult: it is no pairs, a name is unknown, missing or there twice, or a tensor does not fit or is not finite.
        OSError: the disk failed.
    """
    if isinstance(given, Mapping):
        given = given.items()
    if not isinstance(given, Iterable):
        raise BadResult(f"returned {_kind(given)}, not (name, tensor) pairs or a mapping")
    missing = dict(layout.by_name)
    for pair in given:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise BadResult(f"gave {_kind(pair)} where a (name, tensor) pair belongs")
        name, value = pair
        segment = missing.pop(name, None)
        if segment is None:
            if name in layout.by_name:
                raise BadResult(f"gave {name!r} twice")
            hint = registry.nearest(name, layout.by_name, "An aggregator gives parameters only.")
            raise BadResult(f"gave {name!r}, which is no parameter of the model ({hint.rstrip('.')})")
        write_at(fd, bytes_of(_checked(segment, value)), segment.offset)
        progress()
    if missing:
        raise BadResult(f"left out {len(missing)} of {len(layout.by_name)} tensors, first {next(iter(missing))!r}")


def _checked(segment: Segment, value: object) -> Tensor:
    """Return the tensor as it is written: on the CPU, contiguous, in its dtype of accumulation."""
    spec = segment.spec
    if isinstance(value, LazyTensor):
        value = value.resolve()
    if not isinstance(value, Tensor):
        raise BadResult(f"gave {_kind(value)} for {spec.name!r}, not a tensor")
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        raise BadResult(f"gave {spec.name!r} as a tensor that is not dense, or on the meta device")
    if tuple(value.shape) != tuple(spec.shape):
        raise BadResult(f"gave {spec.name!r} with the shape {list(value.shape)}, the model's is {list(spec.shape)}")
    allowed = {torch_dtype(spec.dtype), accumulate_dtype(spec.dtype)}
    if value.dtype not in allowed:
        names = " or ".join(sorted(dtype_name(dtype) for dtype in allowed))
        raise BadResult(f"gave {spec.name!r} as {dtype_name(value.dtype)}, which must be {names}")
    tensor = value.detach().to("cpu", accumulate_dtype(spec.dtype)).contiguous()
    if not bool(torch.isfinite(tensor).all()):
        raise BadResult(f"gave NaN or Inf in {spec.name!r}")
    return tensor


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
