"""Codecs: encodings of updates, and of differences between versions, as bytes. To write a codec, import from here.

`Codec` is the interface. `Elementwise` is the base class of codecs that cast each element. `Narrowing` is the base
class of codecs that encode several floats together, such as a block with one scale, but always within one tile (`TILE`
elements).
"""

from atoll.codecs.base import Codec
from atoll.codecs.block_quantization import Int4Codec, Int8Codec
from atoll.codecs.encoded_layout import build_codecs
from atoll.codecs.plain import Bf16Codec, Elementwise, Narrowing, NoneCodec
from atoll.codecs.topk import TopKCodec
from atoll.tensors.layout import TILE

__all__ = [
    "TILE",
    "Bf16Codec",
    "Codec",
    "Elementwise",
    "Int4Codec",
    "Int8Codec",
    "Narrowing",
    "NoneCodec",
    "TopKCodec",
    "build_codecs",
]
