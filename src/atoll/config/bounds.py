"""Bounds and defaults of settings that messages need, too: the settings themselves take long to import."""

from __future__ import annotations

DEFAULT_PORT = 8512
IDLE_TIMEOUT_S = 60.0
MOST_RANKS, MOST_CONNECTIONS = 4096, 64
MAX_WEIGHT = 1e300
"""Largest weight of an update: sums of such weights are finite."""
MOST_FRAGMENTS, MOST_STEPS = 1024, 10**12
"""Largest number of fragments, for each of which a site keeps files open; and of steps between synchronisations."""
CHUNK_BYTES = 8 * 2**20
"""Default part size of published objects, in bytes. Decision 0012: 2 and 4 MiB are slower, 16 MiB is not faster."""
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES, CHUNK_STEP_BYTES = 2**16, 2**24, 64


def is_chunk(nbytes: int) -> bool:
    """Return whether published objects may be sent in parts of this size, in bytes."""
    return LEAST_CHUNK_BYTES <= nbytes <= MOST_CHUNK_BYTES and nbytes % CHUNK_STEP_BYTES == 0
