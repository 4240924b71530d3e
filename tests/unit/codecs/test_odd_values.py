"""Codecs on what models seldom hold, and on bytes that no codec has written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codecs import Codec, Int4Codec, Int8Codec, TopKCodec

CODECS = [Int8Codec(), Int4Codec(), TopKCodec(), TopKCodec(density=0.25)]
IDS = ["int8", "int4", "topk", "topk-quarter"]
SIZES = (1, 2, 255, 256, 257, 4095, 4096, 4097, 32 * 4096 + 300)
KINDS = ("normal", "wide", "ties", "mostly zero", "negative zero", "denormal", "one huge", "one huge a block")


def values_of(kind: str, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator)
    match kind:
        case "wide":
            values *= torch.exp(8 * torch.randn(numel, generator=generator))
        case "ties":
            values = (2 * values).round() / 2
        case "mostly zero":
            values *= torch.rand(numel, generator=generator) < 0.01
        case "negative zero":
            values = torch.full((numel,), -0.0)
        case "denormal":
            values *= 1e-41
        case "one huge":
            values[numel // 2] = -1e36
        case "one huge a block":
            values[::256] = 1e30
    return values


def encoded(codec: Codec, values: Tensor) -> Tensor:
    target = torch.zeros(codec.encoded_bytes(values.numel(), "F32"), dtype=torch.uint8)
    codec.encode_(values, target, "F32")
    return target


def decoded(codec: Codec, source: Tensor, numel: int) -> Tensor:
    target = torch.empty(numel)
    codec.decode_(source, target, "F32")
    return target


def rounded(values: Tensor, levels: int) -> Tensor:
    """What a block codec makes of values, one block after the other, as its file says it."""
    out = np.zeros(values.numel(), dtype=np.float32)
    for start in range(0, values.numel(), 256):
        block = values[start : start + 256].numpy()
        largest = np.abs(block).max()
        if largest >= np.float32(2.0**-100):
            scale = largest / np.float32(levels)
            codes = np.round(block * (np.float32(1) / largest * np.float32(levels)))
            assert np.abs(codes).max() <= levels
            out[start : start + 256] = codes * scale
    return torch.from_numpy(out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize(("codec", "levels"), [(Int8Codec(), 127), (Int4Codec(), 7)], ids=["int8", "int4"])
def test_blocks_are_rounded_as_their_file_says(codec: Codec, levels: int, numel: int, kind: str) -> None:
    values = values_of(kind, numel)
    assert torch.equal(decoded(codec, encoded(codec, values), numel), rounded(values, levels))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("codec", [TopKCodec(), TopKCodec(density=0.25)], ids=["64", "1024"])
def test_topk_keeps_the_largest_and_of_each_group_the_sum(codec: TopKCodec, numel: int, kind: str) -> None:
    values = values_of(kind, numel)
    found = decoded(codec, encoded(codec, values), numel)
    for start in range(0, numel, 4096):
        tile, back = values[start : start + 4096], found[start : start + 4096]
        sizes = tile.abs().sort(descending=True).values
        sent = back != 0
        assert int(sent.sum()) <= codec.k
        if len(tile) == 4096:  # a shorter one is padded with zeros, which may travel
            assert not bool(sent.any()) or tile[sent].abs().min() >= sizes[codec.k - 1]
            kept, travels = back.double().abs().sum(), sizes[: codec.k].double().sum()
            torch.testing.assert_close(kept, travels, rtol=1e-4, atol=1e-42)
        sent &= tile != 0
        assert torch.equal(back[sent].sign(), tile[sent].sign())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_threads_and_cuts_change_no_bit(codec: Codec, kind: str) -> None:
    values = values_of(kind, 32 * 4096 + 300)
    whole = encoded(codec, values)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(encoded(codec, values), whole)
    finally:
        torch.set_num_threads(threads)
    for step in (4096, 5 * 4096, 32 * 4096):
        runs = [encoded(codec, values[start : start + step]) for start in range(0, values.numel(), step)]
        assert torch.equal(torch.cat(runs), whole)
    back = decoded(codec, whole, values.numel())
    for step in (4096, 7 * 4096):
        low, high = (codec.encoded_bytes(at, "F32") for at in (step, 3 * step))
        assert torch.equal(decoded(codec, whole[low:high], 2 * step), back[step : 3 * step])


@pytest.mark.covers("L16")
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_decodes_arbitrary_bytes_to_the_same_values_every_time(codec: Codec) -> None:
    """Places in no order, twice, or behind the last element; scales that are no numbers. Nothing outside is written."""
    for numel in (1, 300, 4096, 2 * 4096 + 5):
        size = codec.encoded_bytes(numel, "F32")
        source = torch.randint(0, 256, (size,), generator=torch.Generator().manual_seed(numel), dtype=torch.uint8)
        for found in (source, torch.full_like(source, 255), torch.zeros_like(source)):
            around = torch.full((numel + 2,), 7.0)
            codec.decode_(found, around[1:-1], "F32")
            again = decoded(codec, found, numel)
            assert torch.equal(around[1:-1].nan_to_num(nan=1.5), again.nan_to_num(nan=1.5))
            assert around[[0, -1]].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("codec", "place"), [(Int8Codec(), 0), (Int4Codec(), 0), (TopKCodec(), 1)], ids=IDS[:3])
def test_a_scale_that_is_no_number_shows_in_what_is_decoded(codec: Codec, place: int, bad: float) -> None:
    source = encoded(codec, torch.linspace(-1, 1, 300))
    source[:8].view(torch.float32)[place] = bad
    assert not bool(decoded(codec, source, 300).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_what_has_no_room_is_within_bounds_or_not_finite(codec: Codec, dtype: torch.dtype) -> None:
    """Up to 10³⁴ everything has; a value beyond fp32, or a sum of such, is to be seen and not to be wrapped around."""
    for largest in (1e34, 3.4e38, 1e300 if dtype == torch.float64 else 3.4028234e38):
        values = torch.full((5000,), largest, dtype=dtype)
        back = torch.empty(5000, dtype=torch.float64)
        source = torch.zeros(codec.encoded_bytes(5000, "F32"), dtype=torch.uint8)
        codec.encode_(values, source, "F32")
        codec.decode_(source, back, "F32")
        sent = back[back != 0]
        assert bool(((sent / largest - 1).abs() < 1e-4).all()) or not bool(back.isfinite().all())
        assert largest > 1e34 or bool(back.isfinite().all())


@pytest.mark.parametrize(("codec", "zero"), [(Int8Codec(), 0), (Int4Codec(), 8 | 8 << 4)], ids=["int8", "int4"])
def test_a_block_without_a_scale_has_the_code_of_zero(codec: Codec, zero: int) -> None:
    """All zero, next to nothing, and with what is no number in it: the same bytes on every machine."""
    for block in ([0.0, -0.0, 0.0], [1e-40, -1e-31, 0.0], [1.0, float("nan"), -3.0], [float("inf"), 1.0, -3.0]):
        found = encoded(codec, torch.tensor(block))
        assert set(found[4:].tolist()) == {zero}
        assert bool(found[:4].any()) == (block[0] > 0.5)
