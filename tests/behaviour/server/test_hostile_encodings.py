"""What a site says its codec has written: the server refuses it with the tensor's name, or has finite values of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from kit.sites import clients, finish
from torch import Tensor

from atoll.codecs import Codec, build_codecs


class Forged:
    """A codec with changed bytes."""

    elementwise, raw, feedback = False, False, True

    def __init__(self, codec: Codec, change: Callable[[Tensor], Any]) -> None:
        self.name, self.encoded_bytes, self.decode_ = codec.name, codec.encoded_bytes, codec.decode_
        self._codec, self._change = codec, change

    def encode_(self, source: Tensor, target: Tensor, dtype: str) -> None:
        self._codec.encode_(source, target, dtype)
        if source.numel() == 300:
            self._change(target)


def number(value: float) -> Callable[[Tensor], Any]:
    return lambda encoded: encoded[4:8].view(torch.float32).fill_(value)


def same_places(encoded: Tensor) -> None:
    """Every one of the 64 the last of the tile, behind the 300th; three bytes for two of them."""
    encoded[8 : 8 + 96] = 255


def all_ones(encoded: Tensor) -> None:
    encoded[8:] = 255


@pytest.mark.covers("L16", "X3")
@pytest.mark.parametrize(
    ("codec", "change", "refused"),
    [
        ("int8", number(float("nan")), "w contains NaN or Inf"),
        ("int8", number(-float("inf")), "w contains Inf, which"),
        ("int8", number(3e38), "w contains Inf, which"),
        ("int8", number(1e30), "its norm is"),
        ("int8", number(-1.0), ""),
        ("int4", number(float("inf")), "w contains Inf, which"),
        ("int4", all_ones, ""),
        ("topk", number(float("inf")), "w contains Inf, which"),
        ("topk", same_places, ""),
        ("topk", all_ones, ""),
    ],
    ids=[
        "int8-nan", "int8-inf", "int8-overflow", "int8-huge", "int8-negative", "int4-inf", "int4-ones", "topk-inf",
        "topk-same-places", "topk-ones",
    ],
)  # fmt: skip
def test_forged_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str, change: Callable[[Tensor], Any], refused: str
) -> None:
    start = {"w": torch.zeros(300), "v": torch.zeros(5)}
    settings = {"rounds.total": 2, "aggregation.upload_codec.name": codec}
    with plain_server(tmp_path, start, **settings) as server:
        (site,) = clients(server, tmp_path, "a").values()
        place, honest = site._place, build_codecs(codec, {})[codec]
        assert place is not None
        moved = torch.linspace(1, 2, 300)
        for forged in (True, False):
            place.exchange.local.layouts.codecs[codec] = Forged(honest, change) if forged else honest
            site.next_round()
            site.submit({name: tensor - (moved if name == "w" else 1) for name, tensor in site.pull().items()})
            assert server.status().refused == bool(refused)
        if refused:  # a refused update is a round that was not
            assert site.next_round() == 2
            site.submit({name: tensor - (moved if name == "w" else 1) for name, tensor in site.pull().items()})
        found = finish(server, {"a": site})
    assert (refused in caplog.text) if refused else ("refused" not in caplog.text)
    assert all(bool(tensor.isfinite().all()) for tensor in found.values())
