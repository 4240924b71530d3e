"""Conversion between tensors and arrays of other libraries: numpy directly, others through DLPack or `__array__`.

numpy has no bf16 and no 8-bit floats. Tensors of these dtypes become fp32 arrays, which hold all of their values
exactly. When an fp32 array is given for a tensor of these dtypes, its values are rounded to the tensor's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from torch import Tensor, nn

from atoll.errors import UsageError
from atoll.tensors.dtypes import NOT_IN_NUMPY, torch_dtype
from atoll.tensors.schema import Schema

Arrays = Mapping[str, Any]
"""Name → tensor, numpy array, or any object with `__dlpack__` or `__array__`."""


def to_numpy(tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    """Convert tensors to numpy arrays. A CPU tensor is only copied if numpy lacks its dtype; the array is then fp32."""
    return {
        name: (tensor.float() if tensor.dtype in NOT_IN_NUMPY else tensor).detach().cpu().numpy()
        for name, tensor in tensors.items()
    }


def as_tensor(name: str, value: object) -> Tensor:
    """Return a tensor with the values of `value`. The tensor shares memory with `value` if possible.

    Args:
        name: name of the tensor, for messages.
        value: tensor, array, or an object with `__dlpack__` or `__array__`.

    Raises:
        UsageError: `value` has none of these types, is a masked array, or is an array that torch cannot convert.
    """
    if isinstance(value, Tensor):
        return value
    if not isinstance(value, np.ndarray) and hasattr(value, "__dlpack__"):
        try:
            return torch.utils.dlpack.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            if not hasattr(value, "__array__"):
                raise UsageError(
                    f"Tensor {name!r} is of type {type(value).__name__}, which torch cannot convert: {error}.",
                    "Convert it to a numpy array first.",
                ) from error
    if not hasattr(value, "__array__"):
        raise UsageError(
            f"{name!r} is of type {type(value).__name__}: not a tensor, nor an object with __dlpack__ or __array__.",
            "Convert it to a numpy array, or leave it out of the mapping.",
        )
    if isinstance(value, np.ma.MaskedArray):
        raise UsageError(f"{name!r} is a masked array; its mask would be lost.", "Call its method filled() first.")
    return _from_numpy(name, np.asarray(value))


def require_model(model: object, *, mapping: bool = True) -> None:
    """Check that a model is an `nn.Module` or, if `mapping` is True, a mapping.

    Raises:
        UsageError: the model is neither. The message names its type.
    """
    if not isinstance(model, nn.Module) and not (mapping and isinstance(model, Mapping)):
        given_type = f"the class {model.__name__}" if isinstance(model, type) else f"of type {type(model).__name__}"
        or_mapping = ", or a mapping: name → tensor or array" if mapping else ""
        call = " Call a function that builds it: build(), not build." if callable(model) else ""
        raise UsageError(f"The model is {given_type}, not an nn.Module.", f"Pass an nn.Module{or_mapping}.{call}")


def as_tensors(arrays: Arrays, schema: Schema) -> dict[str, Tensor]:
    """Convert a mapping of tensors and arrays to tensors.

    numpy lacks bf16 and 8-bit floats. If `schema` has one of these dtypes for a tensor, and an fp32 array is given, the
    array is converted to this dtype.

    Raises:
        UsageError: `arrays` is not a mapping, or an entry is neither a tensor nor an array. The message names the
            entry.
    """
    require_model(arrays)
    wanted = {spec.name: torch_dtype(spec.dtype) for spec in schema.tensors}
    tensors = {}
    for name, value in arrays.items():
        tensor = as_tensor(name, value)
        dtype = wanted.get(name)
        if not isinstance(value, Tensor) and dtype in NOT_IN_NUMPY and tensor.dtype == torch.float32:
            tensor = tensor.to(dtype)
        tensors[name] = tensor
    return tensors


def from_numpy(array: np.ndarray[Any, Any]) -> Tensor:
    """Convert a numpy array to a tensor.

    The tensor shares the array's memory, with one exception: if the array is read-only, or has a negative stride or a
    foreign byte order, the tensor is a copy.

    Raises:
        TypeError: torch does not have the array's dtype.
    """
    native = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    if not native.flags.writeable or any(stride < 0 for stride in native.strides):
        native = native.copy()  # torch warns about read-only arrays, and refuses negative strides
    return torch.from_numpy(native)


def _from_numpy(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    try:
        return from_numpy(array)
    except TypeError as error:
        raise UsageError(
            f"{name!r} is an array of {array.dtype}, which Atoll cannot send.", "Convert it to an array of numbers."
        ) from error


def require_framework(name: str) -> None:
    """Check that `name` is "torch" or "numpy".

    Raises:
        UsageError: `name` is another framework.
    """
    if name not in ("torch", "numpy"):
        raise UsageError(f"Atoll cannot return tensors as {name!r}.", 'Use "torch" or "numpy", and convert the result.')
