"""Updates whose change is beyond the range of the model's own dtype: fp16's largest is 65,504, fp8's 448."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import exported, serve
from torch import nn

import atoll

DTYPES = {
    "fp16": (torch.float16, 40_000.0),
    "fp8 e4m3": (torch.float8_e4m3fn, 384.0),
    "fp8 e5m2": (torch.float8_e5m2, 49_152.0),
}
"""A dtype, and a value of it: the difference to its negative has no place in the dtype."""

FEDAVG: dict[str, Any] = {
    "algorithm.name": "fedavg",
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.0,
    "rounds.sites": 1,
    "rounds.total": 1,
}


class One(nn.Module):
    """A parameter with `value` in every element, and a buffer with it."""

    def __init__(self, dtype: torch.dtype, value: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((3,), value).to(dtype), requires_grad=False)
        self.register_buffer("b", torch.full((2,), value).to(dtype))


@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "topk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_carries_a_change_that_the_models_dtype_cannot_hold(tmp_path: Path, dtype: str, codec: str) -> None:
    """From x to −x, and so by −2x. Each codec writes the largest value of a tile to 1 part in 256."""
    kind, value = DTYPES[dtype]
    with serve(tmp_path, One(kind, value), **FEDAVG, **{"aggregation.upload_codec.name": codec}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                model = fl_round.load_into(One(kind, 0.0))
                assert model.w.float().tolist() == [value] * 3
                model.w.copy_(-model.w.float())
                fl_round.submit(model)
        server.run()
        assert server.status().refused == 0
    result = exported(tmp_path)
    assert result["w"].dtype == kind
    assert result["w"].float().tolist() == pytest.approx([-value] * 3, abs=0 if codec == "none" else 2 * value / 256)
    assert result["b"].float().tolist() == [value] * 2


@pytest.mark.parametrize("down", ["bf16", "int8"])
def test_carries_such_a_change_down_to_the_next_round(tmp_path: Path, down: str) -> None:
    """The second round begins from −x, which goes down as the difference from x."""
    seen = []
    with serve(
        tmp_path,
        One(torch.float16, 40_000.0),
        **FEDAVG | {"rounds.total": 2},
        **{"aggregation.download_codec.name": down},
    ) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                model = fl_round.load_into(One(torch.float16, 0.0))
                seen.append(model.w.float().tolist())
                model.w.copy_(-model.w.float())
                fl_round.submit(model)
        server.run()
        assert server.status().refused == 0
    assert seen[0] == [40_000.0] * 3
    assert seen[1] == pytest.approx([-40_000.0] * 3, abs=80_000 / 256)


def test_reports_a_change_that_cannot_be_carried_as_an_overflow(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """3e38 − (−3e38) is beyond fp32: both values are finite, and no NaN of the site's."""
    with serve(tmp_path, One(torch.float32, 3e38), **FEDAVG) as server, caplog.at_level(logging.WARNING):
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            for attempt, fl_round in enumerate(worker):
                model = fl_round.load_into(One(torch.float32, 0.0))
                if attempt == 0:
                    model.w.neg_()
                fl_round.submit(model)
        server.run()
        assert server.status().refused == 1
    (said,) = [record.getMessage() for record in caplog.records if record.name == "atoll.server"]
    assert {"a", "w", "Inf", "F32"} <= set(re.findall(r"\w+", said))
    assert "NaN" not in said
