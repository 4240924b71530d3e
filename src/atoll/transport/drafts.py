"""What is published, on disk before anybody serves it: a file without a name, which nothing is left of."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from atoll.blobs.manifest import Cut
from atoll.blobs.object_file import Extent, write_object
from atoll.errors import DiskFull, StoreError, UsageError
from atoll.posix import FULL, nameless_file
from atoll.protocol import routes
from atoll.tensors.payload import Packed


def nameless(folder: Path | None) -> int:
    """`nameless_file`, for what is published.

    Raises:
        StoreError: the folder takes none.
    """
    try:
        return nameless_file(folder)
    except OSError as error:
        raise StoreError(
            f"No file can be made in {folder or tempfile.gettempdir()}: {error.strerror}.",
            "Give a folder that can be written to; TMPDIR decides where files lie by default.",
        ) from error


@dataclass(frozen=True)
class Draft:
    """An object on disk that nobody serves yet; nothing in it refers to the tensors any more.

    Attributes:
        fd: of a file without a name.
        digests: BLAKE3 of every part.
    """

    fd: int
    extent: Extent
    digests: list[bytes]
    inline: bool

    @property
    def digest(self) -> str:
        return self.extent.digest(self.digests)

    def close(self) -> None:
        os.close(self.fd)


def written(packed: Packed, cut: Cut, folder: Path | None) -> Draft:
    """Write a tree to disk.

    Raises:
        UsageError: it is too much to be inline, or for one object.
        DiskFull, StoreError: the disk's.
    """
    fd = nameless(folder)
    try:
        extent, digests = write_object(packed, fd, cut)
        if cut.inline and extent.nbytes > routes.INLINE_BYTES:
            raise UsageError(
                f"The object has {extent.nbytes} bytes, too many to travel inline (chunk_bytes = 0).",
                f"At most {routes.INLINE_BYTES}; leave chunk_bytes out for a larger one.",
            )
    except BaseException as error:
        os.close(fd)
        raise (disk_error(error) if isinstance(error, OSError) else error) from error
    return Draft(fd, extent, digests, cut.inline)


def disk_error(error: OSError) -> StoreError:
    """What an error of a temporary file means."""
    where = "the folder of temporary files"
    remedy = "Make space, or give another folder; TMPDIR decides where files lie by default."
    if error.errno in FULL:
        return DiskFull(f"The disk of {where} is full.", remedy)
    return StoreError(f"A file in {where} failed: {error.strerror}.", remedy)
