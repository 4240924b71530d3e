"""What an object's file that cannot be written says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from atoll.errors import DiskFull
from atoll.transport.object_server import disk_error


@pytest.mark.parametrize(
    ("folder", "where", "remedy"),
    [
        (None, "the folder of temporary files", "set TMPDIR to another folder"),
        (Path("/data/objects"), "/data/objects", "use another folder"),
    ],
    ids=["temporary", "given"],
)
def test_a_full_disk_is_named_with_the_way_to_another_folder(folder: Path | None, where: str, remedy: str) -> None:
    error = disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder)
    assert isinstance(error, DiskFull)
    assert error.message == f"The disk of {where} is full."
    assert remedy in error.remedy
