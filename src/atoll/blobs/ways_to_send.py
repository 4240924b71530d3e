"""How objects and the payloads of tasks are sent: inside a message, as one piece, or in parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from atoll.config.bounds import CHUNK_BYTES as PART_BYTES
from atoll.errors import BadRequest
from atoll.tensors.payload import Packed, unpack

MOST_INLINE_BYTES = 15 * 2**20
"""Maximum total size of inline tensors. Together with their descriptions they stay below 16 MiB."""
DESCRIBED_BYTES = 256
"""Estimated size of a tensor's description in a head. The description has the tensor's name twice."""


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Maximum part sizes for torch tensors (`tensor`) and NumPy arrays (`np`), in bytes. 0: send inside the message."""

    tensor: int = PART_BYTES
    np: int = PART_BYTES


INLINE = ChunkSizes(0, 0)


@dataclass(frozen=True, slots=True)
class Cut:
    """How the tensors of an object are sent: in one message with the rest of the object, or streamed (in parts).

    Attributes:
        part_bytes: maximum size of a part, in bytes.
        inline: whether the whole object is sent in one message.
        in_head: indices of the tensors that are sent inside the object's head; all others are streamed.
        too_large: total bytes of the tensors that are streamed only because they are too large for one message; else 0.
    """

    part_bytes: int
    inline: bool = False
    in_head: frozenset[int] = frozenset()
    too_large: int = 0


def cut_of(packed: Packed, sizes: ChunkSizes) -> Cut:
    """Decide how the tensors of a payload are sent.

    Args:
        packed: the payload.
        sizes: part sizes for tensors and arrays. If both are streamed, all parts have the smaller size.
    """
    by_number = [sizes.np if number in packed.arrays else sizes.tensor for number in range(len(packed.tensors))]
    in_head = frozenset(number for number, size in enumerate(by_number) if not size)
    streamed = [size for size in by_number if size]
    if not in_head:
        return Cut(min(streamed, default=sizes.tensor or sizes.np or PART_BYTES))
    nbytes = sum(packed.tensors[number].nbytes for number in in_head)
    cut = Cut(min(streamed, default=PART_BYTES))
    described = 2 * len(json.dumps(packed.skeleton)) + DESCRIBED_BYTES * len(packed.tensors)  # × 2: escaped
    if nbytes + described > MOST_INLINE_BYTES:
        return replace(cut, too_large=nbytes)
    return replace(cut, in_head=in_head) if streamed else replace(cut, inline=True)


PLAIN_BYTES = 24 * 2**10
"""Up to this size, the JSON of a payload without tensors is sent inside the task's message.

JSON inside JSON is escaped, which can double its size.
"""


@dataclass(frozen=True, slots=True)
class Way:
    """How a task's payload is sent: as JSON inside the task's message, or as a separate object.

    Attributes:
        plain: the payload's JSON, if it is sent inside the message; else None.
        cut: how the object's tensors are sent, if `plain` is None.
        warning: a warning for the user; empty for none.
    """

    plain: str | None
    cut: Cut
    warning: str = ""

    @property
    def kind(self) -> str:
        """Name that the status shows: `streamed`, `inline`, or `without_tensors` (`plain` is sent, in the message)."""
        return "without_tensors" if self.plain is not None else "inline" if self.cut.inline else "streamed"


def way_of(name: str, packed: Packed, sizes: ChunkSizes, *, streamed: bool, what: str = "payload") -> Way:
    """Decide how a payload is sent.

    Args:
        name: name of the task.
        packed: the payload.
        sizes: part sizes for streamed tensors and arrays.
        streamed: whether the task is among `workflow.streamed_tasks`.
        what: the word for the payload in warnings.
    """
    if not packed.tensors:
        text = json.dumps(packed.skeleton, separators=(",", ":"))
        small = len(text) <= PLAIN_BYTES
        warning = f"workflow.streamed_tasks has task {name!r}, but its {what} has no tensors: sent inside the message"
        cut = replace(cut_of(packed, sizes), inline=len(text) <= MOST_INLINE_BYTES)
        return Way(text if small else None, cut, warning if streamed and cut.inline else "")
    cut = cut_of(packed, sizes if streamed else INLINE)
    if not cut.too_large:
        return Way(None, cut)
    warning = (
        f"the {what} of task {name!r} has {cut.too_large} bytes of tensors, too many for one message: sent in parts"
    )
    return Way(None, cut, warning if streamed else warning + "; add it to workflow.streamed_tasks")


def read_plain(text: str, *, build: bool = True) -> Any:
    """Return the payload that was sent as JSON text (`Way.plain`).

    Args:
        text: the JSON text.
        build: whether to build values of registered types. If False, the text is only checked.

    Raises:
        BadRequest: the text is not a payload.
    """
    try:
        skeleton = json.loads(text)
    except (ValueError, RecursionError):
        raise BadRequest("The payload is not JSON.", "Use the same Atoll version on both sides.") from None
    return unpack(skeleton, (), build=build)
