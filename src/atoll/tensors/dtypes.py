"""Conversion between safetensors dtype names and torch dtypes, and the dtype for sums of a tensor."""

from __future__ import annotations

import torch

from atoll.tensors.schema import FLOATS

TORCH: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F32": torch.float32,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH.items()}

NOT_IN_NUMPY = frozenset({torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2})
"""torch dtypes that NumPy does not have."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype name."""
    return TORCH[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the safetensors name of a torch dtype; torch's own name if safetensors has none."""
    return NAMES.get(dtype, str(dtype))


def accumulate_dtype(name: str) -> torch.dtype:
    """Return the torch dtype for sums of a tensor: fp32 for floats (fp64 for fp64), else the tensor's own dtype.

    Args:
        name: safetensors name of the tensor's dtype.
    """
    if name not in FLOATS or name == "F64":
        return TORCH[name]
    return torch.float32  # torch has no promotion for the 8-bit floats
