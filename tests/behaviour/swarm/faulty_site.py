"""A site of a swarm that cannot do its part, or lies: the variable FAULT says how.

`full`: it has no space for the updates of others, until the file ROOM is there. `lying`: its versions
have digests of none. `slow`: it pulls the updates of others a byte at a time, until the file ENOUGH is there.
"""

from __future__ import annotations

import errno
import os
import runpy
import time
from pathlib import Path
from typing import Any

from atoll.worker.peer import agent
from atoll.worker.peer.peer_transfers import PeerTransfers

allocate, update = os.posix_fallocate, PeerTransfers.update


def refuse(fd: int, offset: int, nbytes: int) -> None:
    spool = Path(os.readlink(f"/proc/self/fd/{fd}")).name.startswith("spool-")
    if spool and not Path(os.environ.get("ROOM", "room")).exists():
        raise OSError(errno.ENOSPC, "no space left on device")
    allocate(fd, offset, nbytes)


def trickle(self: PeerTransfers, *arguments: Any) -> Any:
    while not Path(os.environ["ENOUGH"]).exists():
        self._move(1)
        time.sleep(0.1)
    return update(self, *arguments)


match os.environ["FAULT"]:
    case "full":
        os.posix_fallocate = refuse
    case "lying":
        vars(agent)["in_text"] = lambda digests: "A"
    case "slow":
        PeerTransfers.update = trickle
runpy.run_path(str(Path(__file__).with_name("swarm_site.py")), run_name="__main__")
