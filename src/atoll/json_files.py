"""JSON in files and in messages: notes that show whether they are damaged, and a limit for received JSON.

A note is a small JSON file: its last value is a digest of the rest. `require_light` bounds the memory that received
JSON can take, whatever it says.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blake3 import blake3

from atoll.errors import StoreError
from atoll.posix import no_sync, read_own, remedy_of, replace_file

LOG = logging.getLogger("atoll")

KEY = "blake3"
"""The last key of a note: its value is the digest."""


class NoteDamaged(ValueError):
    """Error: the bytes of a note differ from those that were written. `str()` gives the reason."""


def seal(note: Mapping[str, Any]) -> str:
    """Return the note as one line of JSON, with the digest as its last key. Messages in it become objects."""
    text = json.dumps(note, sort_keys=True, default=dict)
    comma = ", " if note else ""
    return f'{text[:-1]}{comma}"{KEY}": "{blake3(text.encode()).hexdigest()}"}}'


def unseal(data: bytes) -> dict[str, Any]:
    """Parse the bytes of a note, check the digest in them, and return the note.

    Raises:
        NoteDamaged: the bytes are cut off or changed.
    """
    try:
        note = json.loads(data.decode())
    except ValueError as error:  # also UnicodeDecodeError
        raise NoteDamaged(f"the content is not JSON ({error})") from None
    except RecursionError:
        raise NoteDamaged("the content is not JSON") from None
    digest = note.pop(KEY, None) if isinstance(note, dict) else None
    if not isinstance(digest, str):
        raise NoteDamaged("the digest is missing")
    if blake3(json.dumps(note, sort_keys=True).encode()).hexdigest() != digest:
        raise NoteDamaged("the content does not match the digest")
    return dict(note)


def read_note(path: Path, kind: Any) -> Any:
    """Return a note that `write_note` wrote, as an instance of `kind`; None if the file is missing or damaged.

    A damaged note is removed with a warning. Callers then do not use the file that the note described: they download
    its content again, or make it again by training.
    """
    try:
        return peek_note(path, kind)
    except NoteDamaged as error:
        LOG.warning(
            "%s is damaged: %s. Atoll removes it. The data that it described is downloaded again, or made again by "
            "training. Check the disk.",
            path,
            error,
        )
        path.unlink(missing_ok=True)
        return None


def peek_note(path: Path, kind: Any) -> Any:
    """Return a note that `write_note` wrote, as an instance of `kind`; None if there is no file.

    Raises:
        NoteDamaged: the file was changed or damaged after `write_note`, or does not fit `kind`.
        StoreError: the file cannot be read.
    """
    try:
        return note_from(read_own(path), kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read ({error.strerror}).",
            remedy_of(error, "Let this user read and write it. Then start again."),
        ) from error


def note_from(data: bytes, kind: Any) -> Any:
    """Return a note from the bytes of its file, as an instance of the dataclass `kind`.

    Raises:
        NoteDamaged: the bytes differ from those that `write_note` wrote, or do not fit `kind`.
    """
    try:
        return kind(**unseal(data))
    except TypeError as error:
        raise NoteDamaged(f"another version of Atoll wrote the file ({error})") from None


def write_note(path: Path, note: Any) -> None:
    """Write a dataclass as a JSON file with a digest. The file is replaced in one step, completely or not at all.

    Raises:
        StoreError: the file cannot be written.
    """
    try:
        replace_file(path, [seal(asdict(note)).encode()], temporary=path.with_suffix(".tmp"), sync=no_sync)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror}).",
            "Check the disk. If a worker's folder was removed, start that worker again; it downloads the model again.",
        ) from error


def chain_hash(seq: int, at: str, what: str, detail_json: str, previous: str) -> str:
    """Return the hash of an entry of a log (hex): the BLAKE3 of its fields as a JSON list.

    One of the fields is `previous`, the hash of the entry before, so the entries form a chain.
    """
    return blake3(json.dumps([seq, at, what, detail_json, previous]).encode()).hexdigest()


MOST_LIGHT_BYTES = 56 * 2**20
"""Memory that the values of one received JSON text may take, in bytes."""
_TOKEN = r'"(?:[^"\\]++|\\.)*+"?|[:{[,]'  # a string, also one without an end; or a sign
_OF_TEXT, _OF_BYTES = re.compile(_TOKEN, re.DOTALL), re.compile(_TOKEN.encode(), re.DOTALL)
_COSTS = {":": 120, "{": 250, "[": 100, ",": 40, '"': 80}
"""JSON character outside strings → memory in bytes of the value that it begins: a key, a dict, a list, a value, a
string."""


def require_light(text: str | bytes | bytearray, costs: Mapping[str, int] = _COSTS) -> None:
    """Raise a `ValueError` if the values in a JSON text could take more memory than `MOST_LIGHT_BYTES`.

    Args:
        text: the JSON text; bytes are UTF-8.
        costs: JSON character → memory in bytes of the value that it begins.
    """
    cost, cost_of = 2 * len(text), {key: nbytes for sign, nbytes in costs.items() for key in (sign, ord(sign))}
    found: Any = _OF_TEXT.finditer(text) if isinstance(text, str) else _OF_BYTES.finditer(text)
    for token in found:
        cost += cost_of[text[token.start()]]
        if cost > MOST_LIGHT_BYTES:
            raise ValueError(f"its {len(text)} bytes have too many values")
