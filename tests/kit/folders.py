"""Copies of folders, and the files that this process has open."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def open_paths(pid: str = "self") -> list[str]:
    """What the descriptors of a process lead to; a file without a name ends with `(deleted)`."""
    found = []
    for entry in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed by another thread meanwhile
            found.append(os.readlink(f"/proc/{pid}/fd/{entry}"))
    return found


def nameless_files(folder: Path) -> set[str]:
    """Files that never had a name in the folder, as this process has them open."""
    return {path for path in open_paths() if path.startswith(f"{folder}/#")}


def copy_folder(source: Path, target: Path) -> Path:
    """Copy a folder with all that is in it; holes of sparse files stay holes, SQLite files are copied unopened."""
    target.mkdir(parents=True)
    for entry in sorted(os.scandir(source), key=lambda each: each.name):
        here = target / entry.name
        if entry.is_symlink():
            here.symlink_to(os.readlink(entry.path))
        elif entry.is_dir():
            copy_folder(Path(entry.path), here)
        elif entry.is_file():
            _copy_sparse(Path(entry.path), here)
    shutil.copystat(source, target)
    return target


def put_back(backup: Path, folder: Path) -> None:
    """The folder has what the backup has; what it had is gone."""
    shutil.rmtree(folder)
    copy_folder(backup, folder)


def _copy_sparse(source: Path, target: Path) -> None:
    """Copy data, not holes."""
    with source.open("rb") as reader, target.open("wb") as writer:
        size = os.fstat(reader.fileno()).st_size
        os.truncate(writer.fileno(), size)
        offset = 0
        while offset < size:
            try:
                begin = os.lseek(reader.fileno(), offset, os.SEEK_DATA)
            except OSError:  # ENXIO: nothing but a hole follows
                break
            offset = os.lseek(reader.fileno(), begin, os.SEEK_HOLE)
            os.lseek(writer.fileno(), begin, os.SEEK_SET)
            os.lseek(reader.fileno(), begin, os.SEEK_SET)
            while begin < offset:
                begin += os.sendfile(writer.fileno(), reader.fileno(), begin, offset - begin)
    shutil.copystat(source, target)
