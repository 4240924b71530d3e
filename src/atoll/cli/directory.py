"""What commands ask of a state directory before they open it."""

from __future__ import annotations

from pathlib import Path

from atoll.errors import UsageError


def journal_of(state_dir: Path) -> Path:
    """The journal of the run in a state directory.

    Raises:
        UsageError: no run was begun there.
    """
    path = state_dir / "journal.sqlite"
    if not path.exists():
        raise no_run(state_dir)
    return path


def no_run(state_dir: Path) -> UsageError:
    """What is wrong with a directory in which no run was begun."""
    return UsageError(f"{str(state_dir)!r} holds no run.", "Name the state_dir of the run file.")
