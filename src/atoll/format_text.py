"""Format sizes, durations and metrics for messages, and make text from other processes safe for logs and terminals.

Unsafe text can contain escape sequences that a terminal executes, line feeds that forge log lines, or bidirectional
characters that change the visible order. All of these are unprintable characters, so each is shown as an escape.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime


def size(nbytes: float) -> str:
    """Return a size in bytes as text: 1.2 GB, 3.4 MB, 5.0 kB, 12 B."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.1f} {unit}"
    return f"{nbytes:.0f} B"


def duration(seconds: float) -> str:
    """Return a duration as text: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def time_left(seconds: float | None) -> str:
    """Return the remaining time as text, `about 12 s left`; empty for None."""
    return f"{about(seconds)} left" if seconds is not None else ""


def about(seconds: float) -> str:
    """Return an estimated duration as text: `about 12 s`, `less than 1 s`."""
    return f"about {duration(seconds)}" if seconds >= 1 else "less than 1 s"


def number_of(count: int, what: str) -> str:
    """Return a count with its noun: "1 death", "2 deaths", "2 entries", "2 arrays"."""
    is_y = what.endswith("y") and what[-2] not in "aeiou"
    return f"{count} {what if count == 1 else f'{what[:-1]}ies' if is_y else f'{what}s'}"


def of_fragment(number: int | None) -> str:
    """Return " of fragment 2", to append to "version 3"; empty for None, which means that there is one fragment."""
    return "" if number is None else f" of fragment {number}"


def quoted(name: str) -> str:
    """Return a name that another process has chosen, in quotation marks that it cannot close."""
    inner = visible(name).replace('"', "'")
    return f'"{inner}"'


def listed(names: Sequence[str]) -> str:
    """Return names as a list in words: `a`, `a and b`, `a, b and c`, or `a, b, c and 5 others`; empty for none."""
    words = list(names)
    if len(names) > 4:
        words[3:] = [f"{len(names) - 3} others"]
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def numbers(metrics: Mapping[str, float]) -> str:
    """Return metrics as text: "loss 2.31, tokens_per_s 4.1e+03"."""
    return ", ".join(f"{key} {value:.4g}" for key, value in metrics.items())


def where_different(one: str, other: str, chars: int = 12) -> tuple[str, str]:
    """Return two long ids, each cut to `chars` characters around the first place where they differ."""
    place = next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, place - chars // 2) if place >= chars else 0
    before = "…" if start else ""
    return before + one[start : start + chars], before + other[start : start + chars]


def visible(text: str, most: int | None = None) -> str:
    r"""Return the text with each unprintable character replaced by an escape: `\x1b`, `\n`, `\u202e`.

    Args:
        text: the text.
        most: maximum length of the result, in characters. A longer result is cut, but not within an escape.
    """
    if not text.isprintable():
        pieces = [char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text]
        if most is not None:
            lengths = itertools.accumulate(map(len, pieces))
            pieces = [piece for piece, length in zip(pieces, lengths, strict=True) if length <= most]
        return "".join(pieces)
    return text if most is None else text[:most]


def visible_lines(text: str) -> str:
    """Return the text with unprintable characters escaped (`visible`). Line feeds are kept; tabs become spaces."""
    return "\n".join(map(visible, text.expandtabs(4).split("\n")))


def shown(value: object, most: int = 80) -> str:
    """Return a value as Python writes it, for an error message about it. A longer text than `most` is cut."""
    try:
        text = visible(repr(value))
    except Exception:  # such as an integer with more than 4300 digits
        text = f"of type {type(value).__name__}"
    return text if len(text) <= most else f"{text[: most - 1]}…"


_LEASE = re.compile(r"(:[0-9]{1,18}:[0-9A-Za-z]{0,64}):[0-9a-f]{32}(?![0-9a-f])")


def without_leases(text: str) -> str:
    """Return the text with the secret of each lease replaced by dots, in case it quotes a request or an answer."""
    return _LEASE.sub(r"\1:...", text)


_CREDENTIALS = re.compile(r"(?<=://)[^/\s@'\"]+@")


def without_credentials(text: str) -> str:
    """Return the text with the user name and password of each address replaced by dots."""
    return _CREDENTIALS.sub("...@", text)


class VisibleLines(logging.Formatter):
    """A log formatter that replaces unprintable characters by escapes, so that a terminal does not execute them.

    It also hides the secrets of leases.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__(f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """Return the record and its traceback as text, with escapes for unprintable characters within lines."""
        return visible_lines(without_leases(super().format(record)))


LOG_JSON = "ATOLL_LOG_JSON"
"""Variable with which log lines are JSON objects; `atoll worker --log-json` sets it for its command."""


def logs_json() -> bool:
    """Return whether this process prints its log lines as JSON objects."""
    return bool(os.environ.get(LOG_JSON))


LOG_LEVEL = "ATOLL_LOG_LEVEL"
"""Variable with the least level of log lines: warning, info or debug; `-q` and `-v` set it for a command."""


def log_level() -> int:
    """Return the least level of the log lines that this process prints."""
    levels = {"warning": logging.WARNING, "debug": logging.DEBUG}
    return levels.get(os.environ.get(LOG_LEVEL, "").lower(), logging.INFO)


class JsonLines(logging.Formatter):
    """A log formatter that writes each record as one line with a JSON object, for programs that collect logs.

    Its keys are time (ISO 8601, UTC), level, logger, message and, after an error, traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line. Line feeds and all but ASCII are escaped; the secrets of leases are hidden."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": at, "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps({key: without_leases(text) for key, text in line.items()})


def json_line(logger: str, text: str, level: str = "INFO", error: BaseException | None = None) -> str:
    """Return a line that is printed past logging as `JsonLines` formats it. `error` adds its traceback."""
    trace = error and (type(error), error, error.__traceback__)
    about = {"name": logger, "levelname": level, "msg": text, "exc_info": trace}
    return JsonLines().format(logging.makeLogRecord(about))


TIMES_SAID = 3
"""How often one line of code may log in a simulation, which may have hundreds of sites."""


class Seldom(logging.Filter):
    """A log filter that passes only the first `TIMES_SAID` records that each line of code logs."""

    def __init__(self) -> None:
        super().__init__()
        self._times_said: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record. The last record that passes says that further messages are not shown."""
        location = record.pathname, record.lineno
        self._times_said[location] += 1
        if self._times_said[location] == TIMES_SAID:
            record.msg = f"{record.msg} (further messages of this kind are not shown)"
        return self._times_said[location] <= TIMES_SAID
