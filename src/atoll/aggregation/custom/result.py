"""What an aggregator gives: checked tensor by tensor, and written to a file that the pass reads as one update.

The file holds `params` alone, each element in the dtype in which the pass accumulates it, so that nothing is rounded
on the way to the outer optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll import registry
from atoll.posix import write_at
from atoll.tensors.chunks import bytes_of
from atoll.tensors.dtypes import accumulate_dtype, dtype_name, torch_dtype
from atoll.tensors.layout import Layout, Segment, update_layout
from atoll.tensors.lazy_tensors import LazyTensor
from atoll.tensors.schema import PARAMS, Schema, TensorSpec


@dataclass(frozen=True)
class Accumulated:
    """The codec of the file: elements in their dtype of accumulation."""

    name: ClassVar[str] = "accumulated"
    elementwise: ClassVar[bool] = True
    raw: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return numel * accumulate_dtype(dtype).itemsize

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        target.view(accumulate_dtype(dtype)).copy_(source)

    def decode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        target.copy_(source.view(accumulate_dtype(dtype)))


def result_layout(schema: Schema, part_bytes: int) -> Layout:
    """How what an aggregator gives lies in the file."""
    codec = Accumulated()
    return update_layout(filter(is_stepped, schema.tensors), lambda _: codec, part_bytes)


def is_stepped(spec: TensorSpec) -> bool:
    """Whether the outer optimizer steps this tensor, so that an aggregator has to give it."""
    return spec.group == PARAMS and spec.is_float


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
            hint = registry.nearest(name, layout.by_name, "Buffers and controls are the server's own matter.")
            raise BadResult(f"gave {name!r}, which is no parameter of the model ({hint.rstrip('.')})")
        write_at(fd, bytes_of(_checked(segment, value)), segment.offset)
        progress()
    if missing:
        raise BadResult(f"left out {len(missing)} of {len(layout.by_name)} tensors, first {next(iter(missing))!r}")


def _checked(segment: Segment, value: object) -> Tensor:
    """The tensor as it is written: on the CPU, contiguous, in its dtype of accumulation."""
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
