"""How the tensors of an object travel: cut into parts, or inline; torch tensors and NumPy arrays each as it is set."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from atoll.sizes import CHUNK_BYTES
from atoll.tensors.payload import Packed

MOST_INLINE_BYTES = 15 * 2**20
"""Tensors that travel inline have no more: with what describes them they stay below 16 MiB."""
DESCRIBED_BYTES = 256
"""What describes a tensor in a head, with a name of usual length twice."""


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """The most bytes of a part that holds such tensors; 0: they travel inline."""

    tensor: int = CHUNK_BYTES
    np: int = CHUNK_BYTES


INLINE = ChunkSizes(0, 0)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the tensors of one object travel.

    Attributes:
        part_bytes: the most bytes of a part.
        inline: whether the whole object comes within its manifest, in one answer.
        in_head: numbers of the tensors that come within the head, while the others are streamed.
        too_large: bytes that should have gone inline and are streamed, as they are too many; 0 for none.
    """

    part_bytes: int
    inline: bool = False
    in_head: frozenset[int] = frozenset()
    too_large: int = 0


def cut_of(packed: Packed, sizes: ChunkSizes) -> Cut:
    """The cut of a tree's object. Where both kinds are streamed, its parts have the smaller of the two sizes."""
    by_number = [sizes.np if number in packed.arrays else sizes.tensor for number in range(len(packed.tensors))]
    in_head = frozenset(number for number, size in enumerate(by_number) if not size)
    streamed = [size for size in by_number if size]
    if not in_head:
        return Cut(min(streamed, default=sizes.tensor or sizes.np or CHUNK_BYTES))
    nbytes = sum(packed.tensors[number].nbytes for number in in_head)
    cut = Cut(min(streamed, default=CHUNK_BYTES))
    described = 2 * len(json.dumps(packed.skeleton)) + DESCRIBED_BYTES * len(packed.tensors)  # text in text: escaped
    if nbytes + described > MOST_INLINE_BYTES:
        return replace(cut, too_large=nbytes)
    return replace(cut, in_head=in_head) if streamed else replace(cut, inline=True)
