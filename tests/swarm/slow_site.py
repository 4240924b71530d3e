"""A site of a swarm that pulls the updates of others a byte at a time, until the file ENOUGH is there."""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import Any

from atoll.worker.peer.peer_transfers import PeerTransfers

update, enough = PeerTransfers.update, Path(os.environ["ENOUGH"])


def trickle(self: PeerTransfers, *arguments: Any) -> Any:
    while not enough.exists():
        self._move(1)
        time.sleep(0.1)
    return update(self, *arguments)


PeerTransfers.update = trickle
runpy.run_path(str(Path(__file__).with_name("swarm_site.py")), run_name="__main__")
