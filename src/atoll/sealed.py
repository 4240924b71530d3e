"""Notes that cover themselves: JSON objects whose last key is the BLAKE3 of the others, so a changed bit shows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

KEY = "blake3"
"""The last key of a sealed note."""


class NoteDamaged(ValueError):
    """The text is not what `seal` wrote; `str()` says what is wrong with it."""


def seal(note: Mapping[str, Any]) -> str:
    """The note as JSON with its digest, on one line."""
    text = json.dumps(note, sort_keys=True)
    comma = ", " if note else ""
    return f'{text[:-1]}{comma}"{KEY}": "{blake3(text.encode()).hexdigest()}"}}'


def unseal(data: bytes) -> dict[str, Any]:
    """The note that `seal` made.

    Raises:
        NoteDamaged: it was cut short, or changed since.
    """
    try:
        note = json.loads(data.decode())
    except ValueError as error:  # also UnicodeDecodeError
        raise NoteDamaged(f"it is not JSON ({error})") from None
    except RecursionError:
        raise NoteDamaged("it is not JSON") from None
    digest = note.pop(KEY, None) if isinstance(note, dict) else None
    if not isinstance(digest, str):
        raise NoteDamaged("its digest is missing")
    if blake3(json.dumps(note, sort_keys=True).encode()).hexdigest() != digest:
        raise NoteDamaged("its content is not what its digest says")
    return dict(note)
