"""A hospital's relay in a process of its own: a proxy that loses acknowledgements, falls silent and drops connections.

    python -m harness.relay '{"listen": ["10.209.77.1", 8512], "target": 8512, "lose": true}'

It ends when its standard input closes, and prints as JSON what it has passed on.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections import Counter

from harness.proxy import BEFORE_HEADER, Fault, Proxy

PART = re.compile(r"PUT \S*/tickets/(\d+)/parts/(\d+) ")


class Relay(Proxy):
    """A proxy at an address of its own.

    Args:
        lose: lose the answer to the last part of each update, once: its bytes have arrived.
        parts: number of parts of an update.
    """

    def __init__(self, listen: tuple[str, int], target: int, *, lose: bool = False, parts: int = 0) -> None:
        self._lose, self._last, self.lost = lose, parts - 1, set[str]()
        super().__init__(target, at=listen)

    def _fault(self, request: str, direction: str, start: int, stop: int) -> Fault | None:
        found = PART.match(request) if self._lose and direction == "down" and start == BEFORE_HEADER else None
        if found and found[1] not in self.lost and int(found[2]) == self._last:
            self.lost.add(found[1])
            return Fault(request, "down", at=BEFORE_HEADER, action="reset")
        return super()._fault(request, direction, start, stop)

    def disturb(self, open_s: float, silent_s: float, ended: threading.Event) -> float:
        """Pass everything on for a while, then nothing, then drop every connection; again and again.

        Returns how long nothing was passed on, in seconds.
        """
        silent = 0.0
        while not ended.wait(open_s):
            began_s = time.monotonic()
            self.silence()
            ended.wait(silent_s)
            self.cut()
            self.heal()
            silent += time.monotonic() - began_s
        return silent


def main() -> None:
    """Relay until standard input closes."""
    told = json.loads(sys.argv[1])
    disturbance, ended, silent = told.pop("disturb", None), threading.Event(), list[float]()
    with Relay(tuple(told.pop("listen")), **told) as relay:
        if disturbance:
            run = threading.Thread(target=lambda: silent.append(relay.disturb(*disturbance, ended)))
            run.start()
        sys.stdin.read()
        ended.set()
        if disturbance:
            run.join()
        parts = Counter(match.groups() for line in relay.requests if (match := PART.match(line)))
    print(json.dumps({"again": sum(parts.values()) - len(parts), "lost": len(relay.lost), "silent_s": sum(silent)}))


if __name__ == "__main__":
    main()
