"""Every codec through the contract; the exact bytes of each; odd values, and bytes that no codec has written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll.codecs import Bf16Codec, Codec, Int4Codec, Int8Codec, NoneCodec, TopKCodec, build_codecs
from atoll.errors import ConfigError
from atoll.registry import OwnName
from atoll.testing.contracts import CodecContract


class TestNone(CodecContract):
    codec = NoneCodec()
    relative_error = 0.0


class TestInt8(CodecContract):
    codec = Int8Codec()
    relative_error = 0.5 / 127 * 1.0001  # of rounding; and fp32's own


class TestInt4(CodecContract):
    codec = Int4Codec()
    relative_error = 0.5 / 7 * 1.0001


class TestTopK(CodecContract):
    codec = TopKCodec()
    relative_error = 1.0  # most become zero


class TestWide(CodecContract):
    codec = build_codecs(OwnName("none"), {})["wide"]  # what fp16 and fp8 travel as
    relative_error = 0.0


class TestBf16(CodecContract):
    codec = Bf16Codec()
    relative_error = 2**-8


def test_bf16_takes_two_bytes_for_every_float():
    """The codec bf16 takes two bytes for each floating-point element, whatever its dtype. Integers keep their size."""
    sizes = {dtype: Bf16Codec().encoded_bytes(100, dtype) for dtype in ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64")}
    assert sizes == {"F64": 200, "F32": 200, "F16": 200, "BF16": 200, "F8_E4M3": 200, "I64": 800}


def test_bf16_rounds_to_the_nearest_even():
    # bf16 has 7 bits after the point: 1 + 2⁻⁸ lies halfway between 1 and 1 + 2⁻⁷, and 1 is the even one;
    # 1 + 3·2⁻⁸ lies halfway between 1 + 2⁻⁷ and 1 + 2⁻⁶, and the latter is even.
    """The codec bf16 rounds a value that is halfway between two numbers of bf16 to the even one."""
    target = torch.zeros(4, dtype=torch.uint8)
    Bf16Codec().encode_(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]), target, "F32")
    assert target.view(torch.bfloat16).tolist() == [1.0, 1 + 2**-6]


def encoded(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    target = torch.zeros(codec.encoded_bytes(values.numel(), "F32"), dtype=torch.uint8)
    codec.encode_(values, target, "F32")
    return target


def test_int8_blocks_have_a_scale_and_bytes():
    """A block of the codec int8 has a scale and then one byte for each element."""
    # The largest value is 254, so the scale is 254/127 = 2. 3/2 and 5/2 are halfway and become the even 2. -254 becomes
    # the code -127.
    found = encoded(Int8Codec(), torch.tensor([3.0, 5.0, -254.0]))
    assert found[:4].view(torch.float32).item() == 2.0
    assert found[4:7].view(torch.int8).tolist() == [2, 2, -127]
    assert (len(found), found[7:].any().item()) == (260, False)  # padded
    assert decoded(Int8Codec(), found, 3).tolist() == [4.0, 4.0, -254.0]


def test_int4_blocks_have_a_scale_and_half_bytes():
    """A block of the codec int4 has a scale and then half a byte for each element."""
    # The largest value is 14, so the scale is 14/7 = 2. The codes are -7, 1, 3 and 0; with 8 added, 1, 9, 11 and 8. The
    # first code of each byte is in its low half.
    found = encoded(Int4Codec(), torch.tensor([-14.0, 2.0, 6.0, 0.5]))
    assert found[:4].view(torch.float32).item() == 2.0
    assert found[4:6].tolist() == [1 | 9 << 4, 11 | 8 << 4]
    assert (len(found), set(found[6:].tolist())) == (132, {8 | 8 << 4})
    assert decoded(Int4Codec(), found, 4).tolist() == [-14.0, 2.0, 6.0, 0.0]


def test_a_tile_has_its_scales_first():
    """The codec int8 writes the scales of all blocks of a tile before their codes."""
    # There are 17 blocks, and the block b is full of b + 1. The sixteen scales of the first tile come before their
    # codes, and then the last block follows.
    values = torch.arange(1.0, 18.0).repeat_interleave(256)
    found = encoded(Int8Codec(), values)
    scales = torch.cat([found[:64], found[4160:4164]]).view(torch.float32)
    assert torch.equal(scales, torch.arange(1.0, 18.0) / 127)
    assert set(found[64:4160].tolist()) == {127}
    assert set(found[4164:].tolist()) == {127}
    assert len(found) == 4160 + 260


def test_topk_sends_the_largest_with_two_magnitudes():
    """The codec topk sends the largest elements of a tile, each with one of two magnitudes."""
    # Of 20 elements, 16 are sent, without the four of 0.5: fourteen of 3, and two of 15, which are above the mean of
    # 4.5.
    values = torch.full((20,), 3.0)
    values[[0, 5, 9, 13]] = 0.5
    values[[2, 7]] = torch.tensor([-15.0, 15.0])
    values[19] = -3.0
    codec = TopKCodec(density=16 / 4096)
    found = encoded(codec, values)
    assert codec.tile_bytes == len(found) == 8 + 24 + 4
    assert found[:8].view(torch.float32).tolist() == [3.0, 15.0]
    places = [1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 19]
    pairs = zip(places[::2], places[1::2], strict=True)
    assert found[8:32].tolist() == [part for a, b in pairs for part in (a & 255, a >> 8 | (b & 15) << 4, b >> 4)]
    bits = [0, 3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]  # 2: the larger magnitude, 1: below zero
    assert found[32:].tolist() == [sum(bits[at + i] << 2 * i for i in range(4)) for at in (0, 4, 8, 12)]
    assert decoded(codec, found, 20).tolist() == torch.where(values == 0.5, 0.0, values).tolist()


def test_a_topk_tile_has_exactly_these_bytes():
    """The codec topk writes a tile as the documented bytes."""
    # Of 4,096 elements, 16 are sent: eight of ±1, four of ±2 and four of ±4, at the places 0, 255, 510, … 3825. The
    # mean of their sizes is (8 + 8 + 16)/16 = 2, and 2 is not above it. So the two magnitudes are (8 + 8)/12 = 4/3 and
    # 4. Two places of 12 bits make three bytes, with the first place in the low bits: 0x000 and 0x0ff become 00 f0 0f.
    sizes = torch.tensor([1.0, 2.0, 1.0, 4.0]).repeat(4)
    sizes[7::8] = -4.0  # two of the four largest are below zero
    sizes[1] = -2.0
    values = torch.zeros(4096)
    values[torch.arange(0, 4096, 255)[:16]] = sizes
    found = encoded(TopKCodec(density=16 / 4096), values)
    assert bytes(found[:8].tolist()).hex() == "abaaaa3f" + "00008040"  # 4/3 and 4 in fp32, little-endian
    assert bytes(found[8:32].tolist()).hex() == (
        "00f00f" "fed12f" "fcb34f" "fa956f" "f8778f" "f659af" "f43bcf" "f21def"
    )  # fmt: skip
    # from the low bits on, two each: the low is set below zero, the high for the larger magnitude
    assert found[32:].tolist() == [0b10_00_01_00, 0b11_00_00_00, 0b10_00_00_00, 0b11_00_00_00]


def test_topk_can_send_any_place_of_a_tile():
    """The codec topk can send an element from any place of a tile, also behind the first 256 and from
    the last place.
    """
    # A place has 12 bits. The zeros that are sent too have a magnitude of their own.
    values = torch.zeros(2 * 4096)
    values[[300, 4095, 4096 + 4094]] = torch.tensor([2.0, -2.0, 1.0])
    codec = TopKCodec(density=16 / 4096)
    assert decoded(codec, encoded(codec, values), 8192).tolist() == values.tolist()


def test_codecs_compress_fp32_by_known_factors():
    """Compared with fp32, int8 takes 3.94 times fewer bytes, int4 7.76 times and topk 136.53 times. The number of
    elements of topk is rounded to the nearest multiple of 16.
    """
    numel = 2**20
    ratios = [4 * numel / codec.encoded_bytes(numel, "F32") for codec in (Int8Codec(), Int4Codec(), TopKCodec())]
    assert [round(ratio, 2) for ratio in ratios] == [3.94, 7.76, 136.53]
    assert TopKCodec(density=0.02).k == 80  # 81.92, to the nearest 16
    assert TopKCodec(density=0.022).k == 96  # 90.112, to the nearest, not the lower
    assert TopKCodec(density=1e-9).k == 16


def test_the_contract_suite_accepts_codec_options() -> None:
    """The contract suite for codecs accepts a codec that was created with options."""

    class Denser(CodecContract):
        codec = TopKCodec(density=1 / 32)

    Denser().test_it_is_a_codec()


@pytest.mark.covers("X3")
@pytest.mark.parametrize("density", [0, -0.1, 1.5, "much", None])
def test_an_invalid_density_is_refused(density):
    """The codec topk refuses a density that is not a number above 0 and at most 1."""
    with pytest.raises(ConfigError, match=r"The codec topk has density = .*above 0, at most 1"):
        TopKCodec(density=density)


@pytest.mark.covers("X3")
def test_a_codec_accepts_only_its_own_options():
    """A codec gets the options of a run file. An option that the codec does not have, and the internal option `raw`,
    are refused.
    """
    assert build_codecs(OwnName("topk"), {"density": 0.5})["topk"] == TopKCodec(density=0.5)
    with pytest.raises(ConfigError, match=r"aggregation.upload_codec = .*density.*'int8'"):
        build_codecs(OwnName("int8"), {"density": 0.5})
    for codec in ("none", "bf16", "int8", "int4", "topk"):  # no run file says what a codec is
        with pytest.raises(ConfigError, match=r"aggregation.upload_codec = .*raw"):
            build_codecs(OwnName(codec), {"raw": True})


# -- odd values


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
def test_int8_and_int4_round_as_documented(codec: Codec, levels: int, numel: int, kind: str) -> None:
    """The codecs int8 and int4 round each block as documented: the values are those of a separate calculation in
    numpy.
    """
    values = values_of(kind, numel)
    assert torch.equal(decoded(codec, encoded(codec, values), numel), rounded(values, levels))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("codec", [TopKCodec(), TopKCodec(density=0.25)], ids=["64", "1024"])
def test_topk_keeps_the_largest_and_their_sum(codec: TopKCodec, numel: int, kind: str) -> None:
    """The codec topk keeps at most k elements of a tile: the largest, with their signs and the sum of their sizes."""
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
def test_threads_and_cuts_do_not_change_codes(codec: Codec, kind: str) -> None:
    """The bits of a codec do not depend on the number of threads. A tensor may be encoded or decoded in any pieces of
    whole tiles.
    """
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
def test_arbitrary_bytes_always_decode_to_equal_values(codec: Codec) -> None:
    """A codec decodes arbitrary bytes to equal values each time."""
    # It writes nothing outside its target. The bytes may have places in no order, twice or behind the last element, and
    # scales that are no numbers.
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
def test_a_damaged_scale_decodes_to_nonfinite_values(codec: Codec, place: int, bad: float) -> None:
    """If a scale is NaN or infinite, the decoded values are not all finite."""
    source = encoded(codec, torch.linspace(-1, 1, 300))
    source[:8].view(torch.float32)[place] = bad
    assert not bool(decoded(codec, source, 300).isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_huge_values_stay_right_or_become_nonfinite(codec: Codec, dtype: torch.dtype) -> None:
    """Values up to 10³⁴ are decoded within the error bounds. For larger values, the result is within the bounds or not
    finite, and never a wrong finite number.
    """
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
def test_a_block_without_a_scale_encodes_zeros(codec: Codec, zero: int) -> None:
    """A block of zeros, of tiny values, or with NaN or infinity is encoded as if all its elements were zero."""
    for block in ([0.0, -0.0, 0.0], [1e-40, -1e-31, 0.0], [1.0, float("nan"), -3.0], [float("inf"), 1.0, -3.0]):
        found = encoded(codec, torch.tensor(block))
        assert set(found[4:].tolist()) == {zero}
        assert bool(found[:4].any()) == (block[0] > 0.5)
