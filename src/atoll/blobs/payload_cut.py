"""How a payload travels: which of its tensors in parts, and which inline. Both sides decide by the same rules."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from atoll.errors import BadRequest
from atoll.sizes import CHUNK_BYTES
from atoll.tensors.payload import Packed, unpack

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


PLAIN_BYTES = 24 * 2**10
"""A payload without tensors travels as text within its message up to this; text in text may be twice as long."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a payload travels.

    Attributes:
        plain: its text, where it travels within the message.
        cut: else that of its object.
        warning: what the user should know; empty for nothing.
    """

    plain: str | None
    cut: Cut
    warning: str = ""

    @property
    def kind(self) -> str:
        """What status calls it: `skipped` had no tensors to be moved."""
        return "skipped" if self.plain is not None else "inline" if self.cut.inline else "streamed"


def way_of(name: str, packed: Packed, sizes: ChunkSizes, *, streamed: bool, what: str = "payload") -> Way:
    """Decide it for a payload of the task `name`; `what` warnings call it.

    Args:
        sizes: of what is streamed.
        streamed: whether the task is among `workflow.streamed_tasks`.
    """
    if not packed.tensors:
        text = json.dumps(packed.skeleton, separators=(",", ":"))
        small = len(text) <= PLAIN_BYTES
        warning = f"task {name!r} is among workflow.streamed_tasks, but its {what} has no tensors: it goes inline"
        cut = replace(cut_of(packed, sizes), inline=len(text) <= MOST_INLINE_BYTES)
        return Way(text if small else None, cut, warning if streamed else "")
    cut = cut_of(packed, sizes if streamed else INLINE)
    if not cut.too_large:
        return Way(None, cut)
    warning = f"the {what} of task {name!r} has {cut.too_large} bytes of tensors, too many to go inline: it is streamed"
    return Way(None, cut, warning if streamed else warning + "; name the task in workflow.streamed_tasks")


def read_plain(text: str, *, build: bool = True) -> Any:
    """The payload of a text; without `build` it is only looked at.

    Raises:
        BadRequest: it is none.
    """
    try:
        skeleton = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest("The payload is no JSON.", "Use the same Atoll version on both sides.") from None
    return unpack(skeleton, (), build=build)
