"""Which codec writes which tensor of an update: the one rule by which server and worker lay an update out alike."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from atoll import registry
from atoll.codecs.base import Codec
from atoll.codecs.plain import NoneCodec, WideCodec, is_of_short_range
from atoll.errors import ConfigError
from atoll.tensors.layout import Layout, update_layout
from atoll.tensors.schema import PARAMS, Schema, TensorSpec

_METHODS = ("encoded_bytes", "encode_", "decode_")


def codecs_of(
    codec: str, options: Mapping[str, Any], *, setting: str = "aggregation.upload_codec", sent: bool = False
) -> dict[str, Codec]:
    """Return every codec of an update with `params` that travel as `codec`, by that name and by its own.

    Args:
        options: its keyword arguments: texts and finite numbers, which is what reaches a worker.
        setting: that names it.
        sent: whether the name came over the wire. `module:Class` then has to be imported here already: a name that was
            sent makes no code run.

    Raises:
        ConfigError: the name is not registered, it is no codec, or an option is not one of its own, or has a wrong
            value.
    """
    if sent:
        _require_imported(codec)
    found = registry.load("codecs", codec)
    if not isinstance(found, type) or not all(callable(getattr(found, each, None)) for each in _METHODS):
        raise ConfigError(
            f"{setting} = {codec!r} is no codec.", f"Name a class that has {', '.join(_METHODS)}: atoll.codecs.base."
        )
    made = registry.made(
        lambda: found(**options),
        f"{setting} = {dict(options)!r}",
        f"They are the keyword arguments of {codec!r}.",
    )
    for option, value in options.items():
        if type(value) not in (str, int, float) or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{setting}: {option} = {value!r}.", "An option is a text or a finite number.")
    if not isinstance(made, Codec):
        raise ConfigError(
            f"{setting} = {codec!r} lacks a name, or does not say whether it is elementwise or raw, or has feedback.",
            "They are properties of atoll.codecs.base.Codec; atoll.testing.codecs has tests of it.",
        )
    is_ours = WideCodec.name in (codec, made.name)  # it is no setting, and travels beside every codec
    if is_ours or (made.name != codec and made.name in registry.names("codecs")):
        raise ConfigError(
            f"{setting} = {codec!r} calls itself {made.name!r}, as another one does.", "Give it another name."
        )
    return {"none": NoneCodec(), WideCodec.name: WideCodec(), codec: made, made.name: made}


def _require_imported(codec: str) -> None:
    if ":" not in codec or codec in registry.names("codecs"):
        return
    target = codec.rpartition(":")[0]
    module = Path(target).stem if registry.is_file(codec) else target
    if module not in sys.modules:
        raise ConfigError(
            f"The run names the codec {codec!r}, code that this program has not imported.",
            f"Import {module} in your script before it joins, where you trust it; a server alone cannot have it run.",
        )


def encoded_layout(schema: Schema, codec: str, codecs: Mapping[str, Codec], part_bytes: int, ranks: int = 1) -> Layout:
    """Return the layout of an update: `params` by `codec`, or wide if finite values would be lost; the rest raw."""

    def encoding(spec: TensorSpec) -> Codec:
        if spec.group != PARAMS:
            return codecs["none"]
        return codecs[WideCodec.name if codecs[codec].raw and is_of_short_range(spec.dtype) else codec]

    return update_layout(schema.tensors, encoding, part_bytes, ranks)
