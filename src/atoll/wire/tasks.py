"""How the payload of a task or of its answer travels; both sides decide by the same rules."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from atoll.errors import BadRequest
from atoll.tensors.cuts import INLINE, MOST_INLINE_BYTES, ChunkSizes, Cut, cut_of
from atoll.tensors.payload import Packed, unpack

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
        streamed: whether the task is among `stream_tasks`.
    """
    if not packed.tensors:
        text = json.dumps(packed.skeleton, separators=(",", ":"))
        small = len(text) <= PLAIN_BYTES
        warning = f"task {name!r} is among stream_tasks, but its {what} has no tensors: it goes inline"
        cut = replace(cut_of(packed, sizes), inline=len(text) <= MOST_INLINE_BYTES)
        return Way(text if small else None, cut, warning if streamed else "")
    cut = cut_of(packed, sizes if streamed else INLINE)
    if not cut.too_large:
        return Way(None, cut)
    warning = f"the {what} of task {name!r} has {cut.too_large} bytes of tensors, too many to go inline: it is streamed"
    return Way(None, cut, warning if streamed else warning + "; name the task in stream_tasks")


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
