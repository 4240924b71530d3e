"""Payloads of objects and tasks: compared to the bit, cut into parts of a chosen size, and what of them is on disk."""

from __future__ import annotations

import dataclasses
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from atoll import TensorRef
from kit.requests import send

PART_SIZE_SETTINGS = ("workflow.tensor_part_bytes", "workflow.array_part_bytes")
"""Bytes of a part of torch tensors, and of arrays; 0: inline."""
PART_SIZE_VARIABLES = ("ATOLL_WORKFLOW__TENSOR_PART_BYTES", "ATOLL_WORKFLOW__ARRAY_PART_BYTES")


def plain(value: Any) -> Any:
    """A payload with digests in place of data: equal for payloads of the same types, order, dtypes, shapes and bits."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", value.dtype, value.shape, blake3(data).hexdigest()
    if isinstance(value, np.ndarray):
        return "array", value.dtype, value.shape, blake3(value.tobytes()).hexdigest()
    if isinstance(value, list | tuple):
        return type(value)(plain(item) for item in value)
    if dataclasses.is_dataclass(value):
        return type(value), plain(vars(value))
    if isinstance(value, dict):
        return OrderedDict((key, plain(item)) for key, item in value.items())
    return type(value), value


def nested(levels: int) -> list[Any]:
    """An empty list in a list, in a list: so many in all."""
    payload: list[Any] = []
    for _ in range(levels - 1):
        payload = [payload]
    return payload


def choose_part_sizes(monkeypatch: pytest.MonkeyPatch, tensors: int | None, arrays: int | None) -> None:
    """Set the variables of this process; None leaves the default."""
    for variable, size in zip(PART_SIZE_VARIABLES, (tensors, arrays), strict=True):
        if size is not None:
            monkeypatch.setenv(variable, str(size))


def manifest_of(ref: TensorRef) -> dict[str, Any]:
    """What a publisher, or a server, says of an object."""
    status, manifest = send(ref.server, "GET", f"/v1/objects/{ref.object}", secret=ref.secret)
    assert status == 200, manifest
    return manifest


@contextmanager
def calls_of(name: str) -> Iterator[list[int]]:
    """Bytes that each call of `os.pwrite`, or `os.preadv`, has moved within the block."""
    moved: list[int] = []
    function = getattr(os, name)

    def noted(*arguments: Any) -> int:
        moved.append(function(*arguments))
        return moved[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, noted)
        yield moved
