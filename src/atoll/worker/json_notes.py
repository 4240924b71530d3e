"""What is said of a worker's files: small notes beside them, and their names."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.errors import StoreError
from atoll.sealed import NoteDamaged, seal, unseal
from atoll.worker.log_lines import LOG


def name_of(name: str, fragment: int | None) -> str:
    """The name of a fragment's files; as it is where the run has one."""
    return name if fragment is None else f"{name}-f{fragment}"


def read_note(path: Path, kind: Any) -> Any:
    """What `write_note` wrote; None where there is none. A damaged one is said, and removed.

    Without its note a file is scrap: what it held is pulled, trained or formed again.
    """
    try:
        return peek_note(path, kind)
    except NoteDamaged as error:
        LOG.warning(
            "%s is damaged: %s. It is removed, and what it told of is pulled or trained again. Look at the disk.",
            path,
            error,
        )
        path.unlink(missing_ok=True)
        return None


def peek_note(path: Path, kind: Any) -> Any:
    """What `write_note` wrote; None where there is none.

    Raises:
        NoteDamaged: it is not what was written.
    """
    try:
        return note_from(path.read_bytes(), kind)
    except FileNotFoundError:
        return None


def note_from(data: bytes, kind: Any) -> Any:
    """A note from the bytes of its file.

    Raises:
        NoteDamaged: they are not what was written.
    """
    try:
        return kind(**unseal(data))
    except TypeError as error:
        raise NoteDamaged(f"it is of another version of Atoll ({error})") from None


def write_note(path: Path, note: Any) -> None:
    """Write a dataclass as JSON with its digest: all of it or nothing, whatever happens meanwhile."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(seal(asdict(note)))
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror}).",
            "Look at the disk. A worker whose folder was removed has to be started again: it pulls anew.",
        ) from error
