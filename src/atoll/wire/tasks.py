"""How the payload of a task or of its answer travels; both sides decide by the same rules."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from atoll.errors import BadRequest
from atoll.tensors.payload import pack, unpack
from atoll.wire import routes

PLAIN_BYTES = 24 * 2**10
"""A payload without tensors travels as text within its message up to this; text in text may be twice as long."""

INLINE_TENSOR_BYTES = routes.INLINE_BYTES - 2**20
"""Tensors that travel inline have no more: the rest of `INLINE_BYTES` is for the head."""


@dataclass(frozen=True, slots=True)
class Way:
    """How a payload travels.

    Attributes:
        plain: its text, where it travels within the message.
        inline: whether its object comes in one answer, with its manifest; else in parts.
        warning: what the user should know; empty for nothing.
    """

    plain: str | None
    inline: bool
    warning: str = ""

    @property
    def kind(self) -> str:
        """What status calls it: `skipped` had no tensors to be moved."""
        return "skipped" if self.plain is not None else "inline" if self.inline else "streamed"


def way_of(name: str, payload: Any, *, streamed: bool, what: str = "payload") -> Way:
    """Decide it for a payload of the task `name`; `what` warnings call it.

    Raises:
        UsageError: something in the payload cannot travel; it is named.
    """
    packed = pack(payload)
    text = json.dumps(packed.skeleton, separators=(",", ":"))
    nbytes = sum(tensor.nbytes for tensor in packed.tensors)
    if not packed.tensors:
        small = len(text) <= PLAIN_BYTES
        warning = f"task {name!r} is among stream_tasks, but its {what} has no tensors: it goes inline"
        return Way(text if small else None, len(text) <= INLINE_TENSOR_BYTES, warning if streamed else "")
    if streamed:
        return Way(None, False)
    if nbytes + len(text) > INLINE_TENSOR_BYTES:
        warning = f"the {what} of task {name!r} has {nbytes} bytes of tensors, too many to go inline: it is streamed"
        return Way(None, False, warning + "; name the task in stream_tasks")
    return Way(None, True)


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
