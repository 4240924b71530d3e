"""Digests of a version's files as server and workers of a swarm tell them to each other."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from blake3 import blake3

from atoll.protocol.routes import DIGEST_BYTES


def digest_of(digests: Sequence[bytes]) -> str:
    """What names an outer state: BLAKE3 over the digests of its regions; empty where there is none."""
    return blake3(b"".join(digests)).hexdigest() if digests else ""


def in_text(digests: Sequence[bytes]) -> str:
    """BLAKE3 digests as a message carries them."""
    return base64.b64encode(b"".join(digests)).decode()


def digests_in(text: str) -> tuple[bytes, ...]:
    """What `in_text` made of them."""
    return split(base64.b64decode(text))


def split(data: bytes) -> tuple[bytes, ...]:
    """Digests that are one behind the other."""
    return tuple(data[start : start + DIGEST_BYTES] for start in range(0, len(data), DIGEST_BYTES))
