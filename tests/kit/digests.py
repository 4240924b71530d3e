"""Digests of tensors that the tests compute themselves, not Atoll's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from blake3 import blake3
from safetensors.torch import load_file
from torch import Tensor, nn


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """BLAKE3 over the sorted (name, dtype, shape, raw bytes) of tensors."""
    digest = blake3()
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{plain.dtype}\0{tuple(plain.shape)}\0".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def same(one: nn.Module, other: nn.Module) -> bool:
    """Whether two models have the same bits."""
    return tensors_digest(one.state_dict()) == tensors_digest(other.state_dict())


def exported(folder: Path) -> dict[str, Tensor]:
    """The model that a finished run with its state in `folder`/state has exported."""
    return load_file(folder / "state" / "exports" / "model.safetensors")
