"""A site of a swarm whose disk has no space for the updates of others, until the file ROOM is there."""

from __future__ import annotations

import errno
import os
import runpy
from pathlib import Path

allocate = os.posix_fallocate


def refuse(fd: int, offset: int, nbytes: int) -> None:
    spool = Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith("spool-")
    if spool and not Path(os.environ.get("ROOM", "room")).exists():
        raise OSError(errno.ENOSPC, "no space left on device")
    allocate(fd, offset, nbytes)


os.posix_fallocate = refuse
runpy.run_path(str(Path(__file__).with_name("swarm_site.py")), run_name="__main__")
