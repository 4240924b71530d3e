"""Log lines of a worker: one line for each event. Long transfers report bytes, rate and remaining time.

Lines go to the logger `atoll`. If the program has not set up logging, `runtime.ensure_lines` prints them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.errors import TicketClosed
from atoll.format_text import size as size
from atoll.format_text import time_left, without_leases
from atoll.protocol import messages

LOG = logging.getLogger("atoll")
ALONE = "no server is set in ATOLL_SERVER: training alone"
ALONE_ENDED = "training alone: nothing was sent or saved by Atoll; save the model in the script"
LONG_S = 60.0
"""Seconds left of the run from which a waiting worker says them, too: below, they say less than what it waits for."""
EVERY_S = 5.0
WINDOW_S = 30.0


def error_text(error: BaseException | str, most_chars: int = 2000) -> str:
    """Return the text of an error, shortened to `most_chars` characters and valid as UTF-8.

    An exception becomes "class: message"; a string is used as it is. Lone surrogates, which UTF-8 cannot encode, are
    escaped.
    """
    text = without_leases(error if isinstance(error, str) else f"{type(error).__name__}: {error}")
    return text[:most_chars].encode(errors="backslashreplace").decode()[:most_chars]


def in_words(info: messages.RunInfo, sync_every: int) -> str:
    """Return a DiLoCo run's settings as text: "H = 60, asynchronous, codec int4 up, int8 down, 2 fragments, tau 1".

    Args:
        info: the run's description.
        sync_every: H, the number of local steps between two synchronisations.
    """
    first = f" after {info.sync_rounds_first} synchronous rounds" if info.sync_rounds_first else ""
    down = f" up, {info.downlink_codec} down" if info.downlink_codec.text != "none" else ""
    parts = [
        f"H = {sync_every}",
        f"asynchronous{first}" if info.mode == "async" else "",
        f"codec {info.codec}{down}",
        f"{info.fragments} fragments" if info.fragments > 1 else "",
        f"tau {info.tau}, alpha {info.alpha:g}" if info.streams else "",
    ]
    return ", ".join(filter(None, parts))


def why_skipped(error: BaseException, info: messages.RunInfo) -> str:
    """Return why a synchronisation was skipped.

    If the reason is that the round has closed, and the next update contains the skipped local steps, say both.

    Args:
        error: the error that caused the skip.
        info: the run's description.
    """
    if not isinstance(error, TicketClosed):
        return str(error)
    return (
        f"{error.message} {'The next update contains its local steps.' if info.on_missed == 'rebase' else ''}".rstrip()
    )


def in_wait(waited_s: float, reply: messages.TicketReply) -> str:
    """Return a text for the log of a waiting worker: the seconds waited, what it waits for, and the time left if long.

    Args:
        waited_s: seconds waited so far.
        reply: the server's last reply to the worker's request for a ticket; it has the reason and the remaining time.
    """
    awaited = reply.reason or f"the round waits for {', '.join(reply.waiting_for) or 'the server'}"
    remaining = f"; {time_left(reply.left_s)} of the run" if (reply.left_s or 0.0) >= LONG_S else ""
    return f"waiting {waited_s:.0f} s: {awaited}{remaining}"


class TransferProgress:
    """The progress of one transfer: counts bytes, and logs a line every `EVERY_S` seconds and one at the end.

    Rate and time left are measured over the last `WINDOW_S` seconds. After an interruption, measuring starts again, so
    that the outage does not lower the rate.

    Args:
        what: name of the transfer, which begins each line.
        total_bytes: number of bytes to move.
        clock: returns the current time, in seconds.

    Attributes:
        done_bytes: bytes that were moved so far.
        failed: set to True by the caller if the transfer failed; then no last line is logged.
    """

    def __init__(self, what: str, total_bytes: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._total, self._clock = what, total_bytes, clock
        self._lock = threading.Lock()
        self._begin = self._logged_s = clock()
        self._marks = deque([(self._begin, 0)])  # (time, bytes done) inside the window, at least 1 s apart
        self.done_bytes, self.failed = 0, False
        self._moved, self._away_s = self._begin, 0.0  # time of the last bytes; total seconds of interruptions

    def resume(self) -> None:
        """Measure the rate again after an interruption. The time since the last bytes counts as a pause."""
        with self._lock:
            now = self._logged_s = self._clock()
            self._away_s += now - self._moved
            self._moved = now
            self._marks = deque([(now, self.done_bytes)])

    def add(self, nbytes: int) -> None:
        """Count bytes that were moved. If `EVERY_S` seconds have passed since the last line, log one. Thread-safe."""
        with self._lock:  # several threads transfer parts
            self.done_bytes += nbytes
            now = self._moved = self._clock()
            while self._marks and self._marks[0][0] < now - WINDOW_S:
                self._marks.popleft()
            if not self._marks or now - self._marks[-1][0] >= 1.0:
                self._marks.append((now, self.done_bytes))
            if now - self._logged_s < EVERY_S:
                return
            self._logged_s = now
            done, pace = self.done_bytes, self._pace(now)
        LOG.info("%s: %s of %s%s", self._what, size(done), size(self._total), pace)

    def _pace(self, now: float) -> str:
        since, before = self._marks[0]
        if now <= since:  # the first bytes after an outage
            return ""
        rate = (self.done_bytes - before) / (now - since)
        return f", {size(rate)}/s, {max(self._total - self.done_bytes, 0) / max(rate, 1.0):.0f} s left"

    def end(self) -> None:
        """Log bytes, seconds and the mean rate without pauses; at level DEBUG if the transfer took less than 1 s."""
        seconds = self._clock() - self._begin
        level = logging.INFO if seconds >= 1.0 else logging.DEBUG
        LOG.log(
            level,
            "%s: %s in %.1f s%s (%s/s)",
            self._what,
            size(self.done_bytes),
            seconds,
            f", paused for {self._away_s:.1f} s" if self._away_s >= 1.0 else "",
            size(self.done_bytes / max(seconds - self._away_s, 1e-3)),
        )


MOST_TROUBLES = 1024


class Troubles:
    """Logs failures that repeat: a new text at level INFO or above, the same text again at level DEBUG."""

    def __init__(self) -> None:
        self._logged_s: dict[object, str] = {}

    def say(self, of: object, text: str, level: int = logging.INFO) -> None:
        """Log that something failed: at level DEBUG if the last failure with this key had the same text, else `level`.

        Args:
            of: a key for the thing that failed, such as the address of another worker.
            text: the line to log.
            level: the level of a new text.
        """
        previous = self._logged_s.pop(of, None)
        self._logged_s[of] = text
        if len(self._logged_s) > MOST_TROUBLES:  # the keys may come from another process, without end
            del self._logged_s[next(iter(self._logged_s))]
        LOG.log(logging.DEBUG if previous == text else level, "%s", text)

    def end(self, of: object) -> None:
        """Record that the thing with the key `of` works again, so that its next failure is logged at level INFO."""
        self._logged_s.pop(of, None)


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[TransferProgress]:
    """Yield a `TransferProgress`. At the end of the `with` block, log its last line, unless the transfer failed.

    Args:
        what: name of the transfer, which begins each line.
        total_bytes: number of bytes to move.
    """
    reporter = TransferProgress(what, total_bytes)
    yield reporter
    if not reporter.failed:
        reporter.end()
