"""What a worker says while it works: plain lines, one an event, with bytes, rate and time left.

Lines go to the logger `atoll`. A program that has set up logging decides what becomes of them; otherwise they are
printed on standard error, so that a terminal is never silent.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.errors import TicketClosed
from atoll.format_text import VisibleLines, time_left
from atoll.format_text import size as size
from atoll.protocol import messages

LOG = logging.getLogger("atoll")
ALONE = "no server is configured (ATOLL_SERVER): training alone"
ALONE_ENDED = "alone: nothing was sent, and Atoll saved nothing; the script keeps the model, or loses it"
EVERY_S = 5.0
WINDOW_S = 30.0
_LINES = threading.Lock()


def ensure_lines() -> None:
    """Print Atoll's lines on standard error, unless the program has set up logging; a level that it has set stays."""
    with _LINES:  # loops may begin in several threads at once
        if LOG.handlers or logging.getLogger().handlers:
            return
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(VisibleLines("atoll: "))
        LOG.addHandler(handler)
        LOG.propagate = False
        if LOG.level == logging.NOTSET:
            LOG.setLevel(logging.INFO)


def told(error: BaseException | str, most_chars: int = 2000) -> str:
    """An error as a message carries it; what is no UTF-8, as in names of files, is escaped."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return text[:most_chars].encode(errors="backslashreplace").decode()[:most_chars]


def in_words(info: messages.RunInfo, sync_every: int) -> str:
    """What a DiLoCo worker does in a run: "H = 60, asynchronous, codec int4 up, int8 down, 2 fragments, tau 1, ..."."""
    first = f" after {info.sync_rounds_first} synchronous rounds" if info.sync_rounds_first else ""
    down = f" up, {info.downlink_codec} down" if info.downlink_codec != "none" else ""
    parts = [
        f"H = {sync_every}",
        f"asynchronous{first}" if info.mode == "async" else "",
        f"codec {info.codec}{down}",
        f"{info.fragments} fragments" if info.fragments > 1 else "",
        f"tau {info.tau}, alpha {info.alpha:g}" if info.fragments > 1 or info.tau or info.alpha else "",
    ]
    return ", ".join(filter(None, parts))


def why_skipped(error: BaseException, info: messages.RunInfo) -> str:
    """Why a synchronisation was skipped, and what becomes of what was trained where the server is there."""
    if not isinstance(error, TicketClosed):
        return str(error)
    return f"{error.message} {'The next update holds these steps, too.' if info.on_missed == 'rebase' else ''}".rstrip()


def in_wait(waited_s: float, reply: messages.TicketReply) -> str:
    """How long a worker has waited, for what, and how long the run still takes."""
    left = f"; {told} of the run" if (told := time_left(reply.left_s)) else ""
    return f"waiting {waited_s:.0f} s: {reply.reason}{left}"


class Progress:
    """Bytes of one transfer; says how far it is every few seconds, and at the end where that took longer.

    Rate and time left are those of the last `WINDOW_S`, or since the transfer was resumed: an outage says nothing about
    what the connection carries now.
    """

    def __init__(self, what: str, total_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._clock = what, total_bytes, clock
        self._lock = threading.Lock()
        self._begin = self._said = clock()
        self._marks = deque([(self._begin, 0)])  # (when, bytes done), a second apart at least, none before the window
        self.done_bytes, self.failed = 0, False
        self._moved, self._away_s = self._begin, 0.0  # when the last bytes came; how long none could

    def resume(self) -> None:
        """The transfer goes on after an interruption, which does not count into its rate."""
        with self._lock:
            now = self._said = self._clock()
            self._away_s += now - self._moved
            self._moved = now
            self._marks = deque([(now, self.done_bytes)])

    def add(self, nbytes: int) -> None:
        """Count bytes that have moved; log a line if `EVERY_S` have passed since the last one. Safe from any thread."""
        with self._lock:  # parts travel in several threads
            self.done_bytes += nbytes
            now = self._moved = self._clock()
            while self._marks and self._marks[0][0] < now - WINDOW_S:
                self._marks.popleft()
            if not self._marks or now - self._marks[-1][0] >= 1.0:
                self._marks.append((now, self.done_bytes))
            if now - self._said < EVERY_S:
                return
            self._said = now
            done, pace = self.done_bytes, self._pace(now)
        LOG.info("%s: %s of %s%s", self._what, size(done), size(self._total), pace)

    def _pace(self, now: float) -> str:
        since, before = self._marks[0]
        if now <= since:  # the first bytes after an outage
            return ""
        rate = (self.done_bytes - before) / (now - since)
        return f", {size(rate)}/s, {max(self._total - self.done_bytes, 0) / max(rate, 1.0):.0f} s left"

    def end(self) -> None:
        """Log bytes, duration and mean rate, outages left out of it; at level DEBUG if all took less than 1 s."""
        seconds = self._clock() - self._begin
        level = logging.INFO if seconds >= 1.0 else logging.DEBUG
        LOG.log(
            level,
            "%s: %s in %.1f s%s (%s/s)",
            self._what,
            size(self.done_bytes),
            seconds,
            f", {self._away_s:.1f} s of them interrupted" if self._away_s >= 1.0 else "",
            size(self.done_bytes / max(seconds - self._away_s, 1e-3)),
        )


class Troubles:
    """What fails again and again of the same is said once; later at the level of every step."""

    def __init__(self) -> None:
        self._said: dict[object, str] = {}

    def say(self, of: object, text: str) -> None:
        """This has failed so."""
        known, self._said[of] = self._said.get(of), text
        LOG.log(logging.DEBUG if known == text else logging.INFO, "%s", text)

    def end(self, of: object) -> None:
        """This has not failed."""
        self._said.pop(of, None)


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Progress]:
    """A `Progress` that says its last line when the block ends without an error, and the transfer did not fail."""
    reporter = Progress(what, total_bytes)
    yield reporter
    if not reporter.failed:
        reporter.end()
