"""A server that gets no more memory ends at once: nothing that was acknowledged is lost, and the next start goes on.

It could not end in good order. A thread that gets no memory for its first frame never begins, and Python waits for that
without an end.
"""

from __future__ import annotations

import mmap
import os
import time

from atoll.errors import RunFailed

SPARE_BYTES = 16 << 20
"""A thread's stack and what its first calls need."""
LOOK_S = 1.0
_SAID = b"The server has run out of memory. Start it again, with more: what was acknowledged is not lost.\n"


def end_without_memory() -> None:
    """Look now and then whether this process would get memory; end it where it would not. For a thread of its own."""
    while True:
        try:
            time.sleep(LOOK_S)
            mmap.mmap(-1, SPARE_BYTES).close()
        except (OSError, MemoryError):
            os.write(2, _SAID)
            os._exit(RunFailed.exit_code)
