"""Sizes of the parts of published objects: the default and the allowed range."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

CHUNK_BYTES = 8 * 2**20
"""Default size of a part, in bytes. Transfers with 2 and 4 MiB are slower, with 16 MiB not faster (decision 0012)."""
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES, CHUNK_STEP_BYTES = 2**16, 2**24, 64


def is_chunk(nbytes: int) -> bool:
    """Return whether parts may have this size."""
    return LEAST_CHUNK_BYTES <= nbytes <= MOST_CHUNK_BYTES and nbytes % CHUNK_STEP_BYTES == 0


def _chunk(nbytes: int) -> int:
    if nbytes and not is_chunk(nbytes):
        raise PydanticCustomError(
            "chunk",
            f"it should be 0, or {LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES} and a multiple of {CHUNK_STEP_BYTES}",
        )
    return nbytes


ChunkBytes = Annotated[int, AfterValidator(_chunk)]
"""Type of a setting for the size of a part, in bytes. 0 is also allowed."""
