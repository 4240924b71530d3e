"""The command `atoll`: a file for each subcommand, and the templates from which `atoll new` makes scripts.

The entry point is here: the packages of the command line take a tenth of a second to import, PyTorch takes seconds, and
Ctrl-C has to end a command in one line from the beginning.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # not from `typing`: what is imported here, Ctrl-C interrupts with a traceback
if TYPE_CHECKING:
    from types import FrameType

ENDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
"""Signal that asks a command to end → what the command says."""


class EndsAtOnce:
    """A `with` block that only imports: Ctrl-C ends the process in it with one line and exit code 130.

    Without it, a KeyboardInterrupt can be lost: Python only prints it if it comes while an import removes a lock. Also
    for SIGTERM, if it would raise an exception. A signal that is ignored stays ignored.
    """

    def __enter__(self) -> None:
        self._before = {}
        for number in ENDS:
            handler = signal.getsignal(number)
            if callable(handler) and handler is not _end:
                try:
                    self._before[number] = signal.signal(number, _end)
                except ValueError:  # not in the main thread
                    return

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    try:
        sys.stdout.flush()
        os.write(2, f"atoll: {ENDS[number]}\n".encode())
    finally:
        os._exit(128 + number)


def start() -> None:
    """Run the command line `atoll`: the entry point of the package."""
    with EndsAtOnce():
        from atoll.cli.main import main
    main()
