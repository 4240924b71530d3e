"""Which codec writes which tensor of an update: the one rule by which server and worker lay an update out alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll import registry
from atoll.codecs.base import Codec
from atoll.codecs.none import NoneCodec
from atoll.errors import ConfigError
from atoll.tensors.layout import Layout, update_layout
from atoll.tensors.schema import PARAMS, Schema, TensorSpec


def codecs_of(codec: str, options: Mapping[str, Any], setting: str = "codec") -> dict[str, Codec]:
    """Every codec that an update uses whose `params` travel as `codec`, by name.

    Args:
        options: its keyword arguments.
        setting: that names it.

    Raises:
        ConfigError: nobody registered the name, or an option is not one of its own, or has a wrong value.
    """
    try:
        made: Codec = registry.load("codecs", codec)(**options)
    except TypeError as error:
        raise ConfigError(
            f"{setting}_options = {dict(options)!r}: {error}.", f"They are the keyword arguments of {codec!r}."
        ) from None
    return {"none": NoneCodec(), codec: made}


def encoded_layout(schema: Schema, codec: str, codecs: Mapping[str, Codec], part_bytes: int) -> Layout:
    """The layout of an update: `params` by `codec`, everything else as it is."""

    def encoding(spec: TensorSpec) -> Codec:
        return codecs[codec if spec.group == PARAMS else "none"]

    return update_layout(schema.tensors, encoding, part_bytes)
