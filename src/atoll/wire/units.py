"""Bytes and seconds for people, the same in the lines of server, worker and commands."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes: 1.2 GB, 3.4 MB, 5.0 kB, 12 B."""
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
    """`about 12 s left`; empty where nobody knows."""
    return f"about {duration(seconds)} left" if seconds is not None else ""
