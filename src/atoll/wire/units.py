"""Bytes for people, the same in the lines of server, worker and commands."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """Bytes: 1.2 GB, 3.4 MB, 5.0 kB, 12 B."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= limit:
            return f"{nbytes / limit:.1f} {unit}"
    return f"{nbytes:.0f} B"
