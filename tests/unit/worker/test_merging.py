"""w ← (1−α)·b + α·w, element by element, whatever the dtype and the strides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from atoll.tensors.chunks import bytes_of
from atoll.tensors.layout import version_layout
from atoll.tensors.module_tensors import Told, schema_of
from atoll.worker.exchange.apply_version import merge_
from atoll.worker.exchange.base_and_outbox import BaseFile


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "double": torch.randn(7, dtype=torch.float64, generator=generator),
        "single": torch.randn(300, 1000, generator=generator),  # more than one chunk
        "turned": torch.randn(6, 5, generator=generator).t(),
        "bf16": torch.randn(9, generator=generator).bfloat16(),
        "mean": torch.randn(4, generator=generator),
        "count": torch.randint(100, (3,), generator=generator),
    }


def version_of(values: dict[str, Tensor], folder: Path) -> BaseFile:
    layout = version_layout(schema_of(Told(values, {"mean": True, "count": True})))
    file = BaseFile(folder, layout)
    for segment in layout.segments:
        file.write(segment.offset, bytes_of(values[segment.spec.name].contiguous()))
    return file


@pytest.mark.covers("L7")
@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
def test_every_element_is_mixed_in_the_dtype_of_accumulation(tmp_path: Path, alpha: float) -> None:
    held, local = tensors(1), tensors(2)
    before = {name: value.clone() for name, value in local.items()}
    merge_(local, version_of(held, tmp_path), alpha)
    for name, value in local.items():
        assert value.stride() == before[name].stride()
        if alpha in (0, 1) or not value.is_floating_point():
            assert torch.equal(value, before[name] if alpha == 1 else held[name]), name
            continue
        wide = torch.promote_types(value.dtype, torch.float32)
        mixed = held[name].to(wide) * (1 - alpha) + before[name].to(wide) * alpha
        error = (value.to(wide) - mixed).abs().max()
        assert error <= {torch.float64: 1e-15, torch.bfloat16: 2e-2}.get(value.dtype, 1e-6), name


@pytest.mark.covers("L7")
def test_with_alpha_0_nothing_local_is_left_though_it_is_nan(tmp_path: Path) -> None:
    held, local = tensors(1), tensors(2)
    local["single"].fill_(float("nan"))
    merge_(local, version_of(held, tmp_path), 0.0)
    assert all(torch.equal(local[name], held[name]) for name in held)
