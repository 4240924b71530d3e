"""What is said of a worker's files: small notes beside them, and their names."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.errors import StoreError


def name_of(name: str, fragment: int | None) -> str:
    """The name of a fragment's files; as it is where the run has one."""
    return name if fragment is None else f"{name}-f{fragment}"


def read_note(path: Path, kind: Any) -> Any:
    """What `write_note` wrote; None where nothing is, or something else."""
    try:
        return kind(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def write_note(path: Path, note: Any) -> None:
    """Write a dataclass as JSON: all of it or nothing, whatever happens meanwhile."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps(asdict(note)))
        os.replace(temporary, path)
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written ({error.strerror}).",
            "Look at the disk. A worker whose folder was removed has to be started again: it pulls anew.",
        ) from error
