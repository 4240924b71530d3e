"""What publishing and fetching share: settings, who is asked for an object, and how a transfer is told to stop."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from atoll.blobs.manifest import ChunkSizes
from atoll.config import ENV_PREFIX, IDLE_TIMEOUT_S, Settings
from atoll.errors import TransferAborted, UsageError
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import Http
from atoll.transport.resumable_transfer import Parts

LOOK_S = 0.05
"""How often an abort event is looked at, also while no byte moves."""


def chunk_sizes(default: ChunkSizes | None = None) -> ChunkSizes:
    """How this process cuts what it publishes: `ATOLL_…_DOWNLOAD_CHUNK_SIZE` of its environment, else as given.

    Raises:
        ConfigError: a variable has a size that cannot be.
    """
    default = default or ChunkSizes()
    return ChunkSizes(
        _setting("tensor_download_chunk_size", default.tensor), _setting("np_download_chunk_size", default.np)
    )


def idle_timeout(given_s: float | None, default_s: float = IDLE_TIMEOUT_S) -> float:
    """The idle timeout of a transfer: as given, else `ATOLL_IDLE_TIMEOUT_S` of the environment, else the default.

    Raises:
        UsageError, ConfigError: it is none.
    """
    if given_s is None:
        return float(_setting("idle_timeout_s", default_s))
    if type(given_s) not in (int, float) or not 0 < given_s < math.inf:
        raise UsageError(f"idle_timeout_s is {given_s!r}.", "Give the seconds without a byte after which to give up.")
    return float(given_s)


def _setting(key: str, default: Any) -> Any:
    variable = ENV_PREFIX + key.upper()
    if variable not in os.environ:
        return default
    return getattr(Settings.build({key: os.environ[variable]}, {key: variable}), key)


class Abort(Protocol):
    """What a `threading.Event` is: set once, from any thread."""

    def is_set(self) -> bool: ...


def object_http(ref: TensorRef) -> Http:
    """For requests about an object. It sends the secret alone: a token must not go where somebody's reference leads."""
    http = Http(ref.server, ca=os.environ.get("ATOLL_TLS_CA"))
    http.secret = ref.secret
    return http


@contextmanager
def watched(parts: Parts, abort: Abort | None) -> Iterator[None]:
    """Within, `abort` breaks off what these parts transfer.

    Raises:
        TransferAborted: it is set already.
        UsageError: it is no event.
    """
    if abort is None:
        yield
        return
    if not hasattr(abort, "is_set"):
        raise UsageError(f"abort is a {type(abort).__name__}.", "Give an event: threading.Event().")
    if abort.is_set():
        raise TransferAborted("The transfer was told to stop before it began.")
    done = threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_S):
            if abort.is_set():
                parts.break_off()
                return

    thread = threading.Thread(target=watch, name="atoll-abort", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
