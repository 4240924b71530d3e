"""Codecs: encodings of updates, and of differences between versions, as bytes. To write a codec, import from here.

`Codec` is the interface. `Elementwise` is the base class of codecs that cast each element. `Narrowing` is the base
class of codecs that encode several floats together, such as a block with one scale, but always within one tile (`TILE`
elements).

`build_codecs` builds codecs from their names, and `encoded_layout` chooses one for each tensor of an update. Server and
worker both use `encoded_layout`, so they compute the same offsets.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from typing import Any

from atoll import registry
from atoll.codecs.base import Codec
from atoll.codecs.block_quantization import Int4Codec, Int8Codec
from atoll.codecs.plain import Bf16Codec, Elementwise, Narrowing, NoneCodec, WideCodec, is_of_short_range
from atoll.codecs.topk import TopKCodec
from atoll.errors import ConfigError
from atoll.registry import Name, ReceivedName
from atoll.tensors.layout import TILE, Layout, update_layout
from atoll.tensors.schema import PARAMS, Schema, TensorSpec

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

_METHODS = ("encoded_bytes", "encode_", "decode_")


def build_codecs(
    codec: Name, options: Mapping[str, Any], *, setting: str = "aggregation.upload_codec"
) -> dict[str, Codec]:
    """Build the codec for `params` (the float parameters), and return all codecs that an update needs: name → codec.

    The built codec is in the result twice: under the name `codec`, and under its attribute `name`.

    Args:
        codec: name of the codec of `params`.
        options: the codec's keyword arguments: strings and finite numbers, since only these are sent to workers.
        setting: the setting that names the codec, for messages.

    Raises:
        ConfigError: the name is unknown, is not the name of a codec, or an option is unknown or has a wrong value. Or
            the codec cannot tell how many bytes it makes of a float.
    """
    found = registry.find("codecs", codec)
    if not isinstance(found, type) or not all(callable(getattr(found, each, None)) for each in _METHODS):
        raise ConfigError(
            f"{setting} = {codec!r} is not a codec.",
            f"Name a class with the methods of atoll.codecs.Codec: {', '.join(_METHODS)}.",
        )
    registry.require_kinds(found, options, setting)
    built = registry.construct(
        lambda: found(**options),
        f"{setting} = {dict(options)!r}",
        registry.options_of(found, codec.text),
    )
    for option, value in options.items():
        if type(value) not in (str, int, float) or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{setting}: {option} = {value!r}.", "Use a string or a finite number.")
    if not isinstance(built, Codec):
        raise ConfigError(
            f"{setting} = {codec!r} lacks one of the properties name, elementwise, raw and feedback.",
            "Add the missing one, as in atoll.codecs.Codec; test the codec with atoll.testing.contracts.",
        )
    registry.construct(
        lambda: built.encoded_bytes(1, "F32"),
        f"{setting} = {codec!r}: encoded_bytes(1, 'F32') failed",
        "Correct it; a class derived from atoll.codecs.Elementwise has to define stored(dtype).",
    )
    is_ours = WideCodec.name in (codec.text, built.name)  # `wide` is internal: settings cannot name it
    if not isinstance(built.name, str) or not registry.is_sendable(built.name):
        raise ConfigError(
            f"{setting} = {codec!r} has the name {built.name!r}, which messages to sites cannot contain.",
            registry.SENDABLE,
        )
    if is_ours or (built.name != codec.text and _is_anothers(built.name, found)):
        raise ConfigError(
            f"{setting} = {codec!r} has the name {built.name!r}, which another codec has already.",
            "Give it another name.",
        )
    return {"none": NoneCodec(), WideCodec.name: WideCodec(), codec.text: built, built.name: built}


def _is_anothers(name: str, codec: type) -> bool:
    """Return whether a built-in, registered or installed codec has this name, and is not the class `codec`.

    A file that is imported by its path and as a module gives two classes, which are the same codec.
    """
    if not registry.is_known("codecs", name):
        return False
    other = registry.resolve_received("codecs", ReceivedName(name))
    return other is not codec and _origin(other) != _origin(codec)


def _origin(codec: type) -> tuple[str, str]:
    file = getattr(sys.modules.get(codec.__module__), "__file__", None)
    return os.path.realpath(file) if file else codec.__module__, codec.__qualname__


def sent_name(codec: Name, codecs: Mapping[str, Codec]) -> ReceivedName:
    """Return the name by which a run's messages name its codec: one that sites look up.

    It is the name in the settings. If the settings have a path instead, it is the codec's attribute `name`.

    Args:
        codec: name or path of the codec in the settings.
        codecs: the codecs that `build_codecs` returned for it.
    """
    is_name = registry.is_known("codecs", codec.text) and registry.is_sendable(codec.text)
    return ReceivedName(codec.text if is_name else codecs[codec.text].name)


def encoded_layout(schema: Schema, codec: str, codecs: Mapping[str, Codec], part_bytes: int, ranks: int = 1) -> Layout:
    """Return the layout of an update: the codec, the offset and the encoded size of each tensor.

    `params` (the float parameters) are encoded with `codec`; all other tensors are raw. If `codec` is raw, fp16 and fp8
    parameters are encoded as fp32 (`wide`), because their differences can exceed the range of their dtype. Tensors that
    each site keeps for itself are left out.

    Args:
        schema: schema of the model.
        codec: name of the codec of `params`.
        codecs: name → codec, from `build_codecs`.
        part_bytes: largest size, in bytes, of a part: a range of the update that is sent and checked alone.
        ranks: number of ranks among which the update is sharded.
    """

    def encoding(spec: TensorSpec) -> Codec:
        if spec.group != PARAMS:
            return codecs["none"]
        return codecs[WideCodec.name if codecs[codec].raw and is_of_short_range(spec.dtype) else codec]

    return update_layout([spec for spec in schema.tensors if not spec.is_kept], encoding, part_bytes, ranks)
