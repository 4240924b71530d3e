"""Every codec through the contract; and the exact bytes of each."""

import torch

from atoll.codecs.bf16 import Bf16Codec
from atoll.codecs.none import NoneCodec
from atoll.testing.codecs import CodecContract


class TestNone(CodecContract):
    codec = NoneCodec()
    relative_error = 0.0


class TestBf16(CodecContract):
    codec = Bf16Codec()
    relative_error = 2**-8


def test_bf16_halves_what_is_wide_and_leaves_the_rest():
    sizes = {dtype: Bf16Codec().encoded_bytes(100, dtype) for dtype in ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64")}
    assert sizes == {"F64": 200, "F32": 200, "F16": 200, "BF16": 200, "F8_E4M3": 100, "I64": 800}


def test_bf16_rounds_to_the_nearest_even():
    # bf16 has 7 bits after the point: 1 + 2⁻⁸ lies halfway between 1 and 1 + 2⁻⁷, and 1 is the even one;
    # 1 + 3·2⁻⁸ lies halfway between 1 + 2⁻⁷ and 1 + 2⁻⁶, and the latter is even.
    target = torch.zeros(4, dtype=torch.uint8)
    Bf16Codec().encode_(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]), target, "F32")
    assert target.view(torch.bfloat16).tolist() == [1.0, 1 + 2**-6]
