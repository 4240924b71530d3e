"""Which codec writes which tensor of an update: the one rule by which server and worker lay an update out alike."""

from __future__ import annotations

from collections.abc import Mapping

from atoll import registry
from atoll.codecs.base import Codec
from atoll.tensors.layout import Layout, update_layout
from atoll.tensors.schema import PARAMS, Schema, TensorSpec


def codecs_of(codec: str) -> dict[str, Codec]:
    """Every codec that an update uses whose `params` travel as `codec`, by name.

    Raises:
        ConfigError: nobody registered the name.
    """
    return {name: registry.load("codecs", name)() for name in {"none", codec}}


def encoded_layout(schema: Schema, codec: str, codecs: Mapping[str, Codec], part_bytes: int) -> Layout:
    """The layout of an update: `params` by `codec`, everything else as it is."""

    def encoding(spec: TensorSpec) -> Codec:
        return codecs[codec if spec.group == PARAMS else "none"]

    return update_layout(schema.tensors, encoding, part_bytes)
