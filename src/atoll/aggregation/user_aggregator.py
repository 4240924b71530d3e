"""Aggregators that users write: their two forms, their input and their result.

    (a)  aggregate(updates) → (name, pseudo-gradient) pairs, or a mapping
    (b)  accept(update) when an update arrives, then aggregate() → as in (a), then reset()

The pseudo-gradient of a tensor is base − local. The outer optimizer uses it as a gradient.

The result is written to a file with `params` only. Each element has the accumulation dtype (at least fp32), so that
nothing is rounded before the outer step.
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
    """One accepted update, as a user's aggregator gets it. Its tensors can be read as long as this object lives.

    An aggregator may keep updates after the round, at most `aggregation.max_kept_updates`.

    Attributes:
        site: name of the site.
        round: number of the round that the update was submitted for.
        weight: the update's weight, as the site sent it; finite and positive.
        steps: number of local steps; 0 if the site did not report it.
        metrics: metrics that the site reported.
        tensors: name → pseudo-gradient, for every tensor of `params`. Each access reads the tensor from disk.
        buffers: name → value, for every buffer. The server averages buffers itself.
    """

    site: str
    round: int
    weight: float
    steps: int
    metrics: Mapping[str, float]
    tensors: LazyState
    buffers: LazyState


class AllAtOnce:
    """Wraps a user's function `aggregate(updates)`: collects the updates of a round, and then calls it."""

    incremental = False

    def __init__(self, aggregate: Callable[[Sequence[Update]], object]) -> None:
        self._aggregate = aggregate
        self._updates: list[Update] = []

    def accept(self, update: Update) -> None:
        """Keep an update until `reset`. The user's code does not run yet."""
        self._updates.append(update)

    def aggregate(self) -> object:
        """Call the user's function with all updates since the last `reset`, in the order of `accept`."""
        return self._aggregate(tuple(self._updates))

    def reset(self) -> None:
        """Forget the collected updates."""
        self._updates.clear()


class Incremental:
    """Wraps a user's object with `accept`, `aggregate` and `reset`, which gets updates one by one as they arrive."""

    incremental = True

    def __init__(self, user: Any) -> None:
        self.accept: Callable[[Update], object] = user.accept
        self.aggregate: Callable[[], object] = user.aggregate
        self.reset: Callable[[], object] = user.reset


def load(target: str, options: Mapping[str, Any]) -> AllAtOnce | Incremental:
    """Load the user's aggregator that the setting `aggregation.aggregator` names.

    Args:
        target: `module:attribute` or `file.py:attribute`. The attribute is a class, an object or a function.
        options: keyword arguments for the class, or for the function in addition to the updates.

    Raises:
        ConfigError: the attribute does not exist, cannot be created with these options, or is no aggregator.
    """
    aggregator = kind = registry.load_attribute(target)
    if isinstance(aggregator, type):
        aggregator = registry.construct(
            lambda: kind(**options),
            f"The aggregator {target!r} cannot be created",
            "Write its keyword arguments next to the path in aggregation.aggregator.",
        )
    elif options and hasattr(aggregator, "aggregate"):
        raise ConfigError(
            f"aggregation.aggregator has arguments, but {target!r} is an object, not a class.",
            "Use its class, or leave the arguments out.",
        )
    if callable(getattr(aggregator, "accept", None)):
        missing = [name for name in ("aggregate", "reset") if not callable(getattr(aggregator, name, None))]
        if missing:
            raise ConfigError(
                f"The aggregator {target!r} has a method accept, but no {' and no '.join(missing)}.",
                "Give it accept(update), aggregate() and reset(), or only aggregate(updates).",
            )
        return Incremental(aggregator)
    if callable(getattr(aggregator, "aggregate", None)):
        return AllAtOnce(aggregator.aggregate)
    if callable(aggregator):
        return AllAtOnce(lambda updates: aggregator(updates, **options))
    raise ConfigError(
        f"The aggregator {target!r} is a {type(aggregator).__name__}, which has no method aggregate.",
        "Use a function of the updates, or a class with aggregate(updates).",
    )


@dataclass(frozen=True)
class Accumulated(Elementwise):
    """The codec of an aggregator's result file: it stores each element in the accumulation dtype (at least fp32)."""

    name: ClassVar[str] = "accumulated"

    @staticmethod
    def stored(dtype: str) -> str:
        """Return the safetensors name of the dtype in which elements of `dtype` are accumulated."""
        return dtype_name(accumulate_dtype(dtype))


def result_layout(schema: Schema, part_bytes: int) -> Layout:
    """Return the layout of an aggregator's result file: all parameters that the outer optimizer steps."""
    codec = Accumulated()
    return update_layout([spec for spec in schema.tensors if spec.is_stepped], lambda _: codec, part_bytes)


class BadResult(Exception):
    """Raised if the result of a user's aggregator cannot be used."""


def write_result(fd: int, layout: Layout, result: object, progress: Callable[[], None]) -> None:
    """Write an aggregator's result to a file, one tensor at a time.

    Args:
        fd: the file.
        layout: layout of the file, from `result_layout`.
        result: the result: (name, tensor) pairs or a mapping. It may be a generator; its errors are raised unchanged.
        progress: callback after each tensor.

    Raises:
        BadResult: `result` does not consist of pairs; a name is unknown, missing or repeated; or a tensor has the wrong
            shape or dtype, or is not finite.
        OSError: the write failed.
    """
    if isinstance(result, Mapping):
        result = result.items()
    if not isinstance(result, Iterable):
        raise BadResult(f"the aggregator returned {_kind(result)}, not (name, tensor) pairs or a mapping")
    missing = dict(layout.by_name)
    for pair in result:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            raise BadResult(f"the aggregator returned {_kind(pair)} instead of a (name, tensor) pair")
        name, value = pair
        segment = missing.pop(name, None)
        if segment is None:
            if name in layout.by_name:
                raise BadResult(f"the aggregator returned {name!r} twice")
            hint = registry.nearest(name, layout.by_name, "Return only parameters.")
            raise BadResult(f"the aggregator returned {name!r}, which is no parameter ({hint.rstrip('.')})")
        write_at(fd, bytes_of(_checked(segment, value)), segment.offset)
        progress()
    if missing:
        raise BadResult(
            f"the aggregator left out {next(iter(missing))!r} ({len(missing)} of {len(layout.by_name)} are missing)"
        )


def _checked(segment: Segment, value: object) -> Tensor:
    """Check one tensor of a result, and return it on the CPU, contiguous and in the accumulation dtype (at least fp32).

    Raises:
        BadResult: the value is not a dense tensor, has the wrong shape or dtype, or is not finite.
    """
    spec = segment.spec
    if isinstance(value, LazyTensor):
        value = value.resolve()
    if not isinstance(value, Tensor):
        raise BadResult(f"the aggregator returned {_kind(value)} for {spec.name!r}, not a tensor")
    if value.layout is not torch.strided or value.is_nested or value.is_meta:
        raise BadResult(f"the aggregator returned {spec.name!r} as a tensor that is not dense or has no values")
    if tuple(value.shape) != tuple(spec.shape):
        raise BadResult(
            f"the aggregator returned {spec.name!r} in the shape {list(value.shape)}, not {list(spec.shape)}"
        )
    allowed = {torch_dtype(spec.dtype), accumulate_dtype(spec.dtype)}
    if value.dtype not in allowed:
        names = " or ".join(sorted(dtype_name(dtype) for dtype in allowed))
        raise BadResult(f"the aggregator returned {spec.name!r} as {dtype_name(value.dtype)}, but must return {names}")
    tensor = value.detach().to("cpu", accumulate_dtype(spec.dtype)).contiguous()
    if not bool(torch.isfinite(tensor).all()):
        raise BadResult(f"the aggregator returned NaN or Inf in {spec.name!r}")
    return tensor


def _kind(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
