"""Models that lie in files, as they travel: read in runs while they are written, never held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.tensors.custom_types import Stream
from atoll.tensors.lazy_tensors import LazyState
from atoll.tensors.payload import Packed


def packed_state(state: LazyState, aliases: Mapping[str, str] | None = None) -> Packed:
    """A lazy state taken apart, as a dict name → tensor.

    Args:
        aliases: further name → name, of tied tensors that the state has once.
    """
    numbers: dict[str, int] = {}
    streams: list[Stream] = []
    for name in state:
        lazy = state.ref(name)
        numbers[name] = len(streams)
        streams.append(Stream(lazy.dtype, tuple(lazy.shape), lazy.runs, f"tensor {name!r}"))
    numbers |= {name: numbers[owner] for name, owner in (aliases or {}).items() if name not in numbers}
    skeleton: dict[str, Any] = {name: {"$": "tensor", "index": index} for name, index in numbers.items()}
    if "$" in skeleton:  # as pack() writes such a dict
        skeleton = {"$": "dict", "items": [[name, node] for name, node in skeleton.items()]}
    return Packed(skeleton, tuple(streams), frozenset())
