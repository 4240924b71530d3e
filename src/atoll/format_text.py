"""Bytes and seconds for people, and text of a peer made harmless for logs and terminals.

A terminal obeys escape sequences, a line feed makes a line of a log that nothing wrote, and bidirectional characters
show text in another order than it has. All of these are characters that do not print, so each is shown as its escape.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter


def size(nbytes: float) -> str:
    """Return bytes for people: 1.2 GB, 3.4 MB, 5.0 kB, 12 B."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.1f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def time_left(seconds: float | None) -> str:
    """`about 12 s left`; empty if that is not known."""
    return f"about {duration(seconds)} left" if seconds is not None else ""


def visible(text: str, most: int | None = None) -> str:
    r"""Return the text with each character that does not print as its escape: `\x1b`, `\n`, `\u202e`.

    Args:
        most: characters of the result; a longer one is cut, never within an escape.
    """
    if not text.isprintable():
        pieces = [char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text]
        if most is not None:
            lengths = itertools.accumulate(map(len, pieces))
            pieces = [piece for piece, length in zip(pieces, lengths, strict=True) if length <= most]
        return "".join(pieces)
    return text if most is None else text[:most]


def visible_lines(text: str) -> str:
    """As `visible`, line by line: for text of this process that has lines on purpose, as tracebacks have."""
    return "\n".join(map(visible, text.expandtabs(4).split("\n")))


class VisibleLines(logging.Formatter):
    """A formatter of log lines in which nothing is left that a terminal would obey."""

    def __init__(self, prefix: str = "") -> None:
        super().__init__(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the record with its traceback, line by line, every character that does not print as its escape."""
        return visible_lines(super().format(record))


TIMES_SAID = 3
"""How often lines of one kind are logged where hundreds of simulated sites say the same."""


class Seldom(logging.Filter):
    """Passes on what one line of code says, `TIMES_SAID` times."""

    def __init__(self) -> None:
        super().__init__()
        self._said: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Count a record by its file and line; the last one that passes says that more are not shown."""
        place = record.pathname, record.lineno
        self._said[place] += 1
        if self._said[place] == TIMES_SAID:
            record.msg = f"{record.msg} (what follows of this kind is not shown)"
        return self._said[place] <= TIMES_SAID
