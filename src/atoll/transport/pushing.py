"""What is sent together: parts of a file that is still being written, and what of a request must be sent again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from atoll.errors import AtollError
from atoll.tensors.layout import Part
from atoll.transport.crew import Crew

Digests = Mapping[int, bytes] | Sequence[bytes]
"""Index of a part → its BLAKE3."""

Look = Callable[[list[Part]], None]
"""Takes from the list what has arrived, before what is left is tried again."""

Recorded = Callable[[Mapping[int, bytes]], Collection[int]]
"""Asks the server which of these parts it has, with these digests."""


class Pushing:
    """Parts on their way while the file is still being written. `Parts.pushing` gives it.

    Attributes:
        sent: indices of the parts that the server has.
        error: what ended the sending; None while nothing has.
        ended: nothing more is sent once it is set.
    """

    def __init__(self, crew: Crew, send: Callable[[list[Part], dict[int, bytes]], bool], most: int) -> None:
        self.sent: set[int] = set()
        self.error: BaseException | None = None
        self.ended = crew.ended
        self._crew, self._do, self._most = crew, send, most
        self._waiting: list[Part] = []  # for those that follow, to go in one request
        self._digests: dict[int, bytes] = {}  # of those

    def add(self, part: Part, digest: bytes) -> None:
        """`part` is in the file and will not change; `digest` is its BLAKE3."""
        if self._waiting and self._waiting[-1].index + 1 != part.index:
            self.flush()
        self._waiting.append(part)
        self._digests[part.index] = digest
        if len(self._waiting) == self._most:
            self.flush()

    def flush(self) -> None:
        """Send what waits for more."""
        run, self._waiting = self._waiting, []
        digests, self._digests = self._digests, {}
        if run and not self.ended.is_set():
            self._crew.submit(self._send, run, digests)

    def _send(self, run: list[Part], digests: dict[int, bytes]) -> None:
        try:
            if self._do(run, digests):
                self.sent.update(digests)
        except BaseException as error:  # whoever asks finds it in `error`
            self.error = self.error or error


def lacking(recorded: Recorded | None, digests: Digests) -> Look | None:
    """Leaves in a list what the server lacks, of parts whose request failed somewhere in it."""
    if recorded is None:
        return None

    def look(todo: list[Part]) -> None:
        with suppress(AtollError):  # the next attempt tells the same
            has = recorded({part.index: digests[part.index] for part in todo})
            todo[:] = [part for part in todo if part.index not in has]

    return look
