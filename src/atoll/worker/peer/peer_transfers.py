"""What workers of a swarm serve to each other, and how they pull it: files as they are, by byte range.

Where this worker listens is its own matter: `ATOLL_PEER_HOST` and `ATOLL_PEER_PORT`, the name that others reach it
under, `ATOLL_PEER_NAME`, and the certificate that it shows, `ATOLL_PEER_TLS_CERT` and `ATOLL_PEER_TLS_KEY`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import ConfigError, PartCorrupt, PortInUse
from atoll.protocol import routes
from atoll.protocol.object_manifest import FileManifest
from atoll.tensors.layout import PART_BYTES, Part
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import Counters
from atoll.transport.object_server import ObjectHost, Ranges
from atoll.transport.resumable_transfer import Parts
from atoll.transport.tls import is_loopback
from atoll.worker.objects.object_transfer import object_http

CONNECTIONS = 2


def open_host(site: str, server_host: str, idle_timeout_s: float) -> ObjectHost:
    """Listen for the other workers.

    Raises:
        ConfigError: the run's server is not on this machine, and nothing says where this worker is to be reached; or
            the address needs TLS, or is not this machine's. PortInUse: somebody else has the port.
    """
    host = os.environ.get("ATOLL_PEER_HOST")
    if host is None and not is_loopback(server_host):
        raise ConfigError(
            f"Worker {site} joins a swarm at {server_host}, and does not say where the other workers reach it.",
            "Set ATOLL_PEER_HOST (0.0.0.0 listens everywhere), ATOLL_PEER_PORT, and ATOLL_PEER_TLS_CERT and "
            "ATOLL_PEER_TLS_KEY, or ATOLL_PEER_INSECURE=1 if the network is your own.",
        )
    host = host or "127.0.0.1"
    cert, key = _path("ATOLL_PEER_TLS_CERT"), _path("ATOLL_PEER_TLS_KEY")
    insecure = os.environ.get("ATOLL_PEER_INSECURE", "").lower() in ("1", "true", "yes", "on")
    if (cert is None) != (key is None):
        raise ConfigError("Only one of ATOLL_PEER_TLS_CERT and ATOLL_PEER_TLS_KEY is set.", "Set both, or neither.")
    if cert is None and not is_loopback(host) and not insecure:
        raise ConfigError(
            f"Worker {site} would serve models on {host}, which others can reach, without TLS.",
            "Set ATOLL_PEER_TLS_CERT and ATOLL_PEER_TLS_KEY, or ATOLL_PEER_INSECURE=1 if the network is your own.",
        )
    try:
        return ObjectHost(
            host,
            _port(),
            name=os.environ.get("ATOLL_PEER_NAME"),
            tls_cert=cert,
            tls_key=key,
            insecure=insecure,
            idle_timeout_s=idle_timeout_s,
            folder=None,
        )
    except (ConfigError, PortInUse) as error:
        raise type(error)(
            f"Worker {site} cannot listen for the others: {error.message}",
            "Set ATOLL_PEER_HOST to an address of this machine, or 0.0.0.0, and ATOLL_PEER_PORT to a free port.",
        ) from error


def _port() -> int:
    text = os.environ.get("ATOLL_PEER_PORT", "0")
    if not (text.isascii() and text.isdigit() and int(text) < 2**16):
        raise ConfigError(f"ATOLL_PEER_PORT is {text!r}.", "Give a port, or 0 for any free one.")
    return int(text)


def _path(variable: str) -> Path | None:
    text = os.environ.get(variable)
    return Path(text) if text else None


def spans(nbytes: int) -> list[Part]:
    """A file in parts of 16 MiB: how outer states travel."""
    starts = range(0, nbytes, PART_BYTES)
    return [Part(index, start, min(start + PART_BYTES, nbytes), ()) for index, start in enumerate(starts)]


class Pull:
    """What one reference names, at the worker who serves it."""

    def __init__(self, ref: TensorRef, parts: Ranges) -> None:
        self._ref, self._parts = ref, parts
        what = f"what {ref.server} serves"
        path = routes.OBJECT.format(object=ref.object)
        self.manifest = FileManifest.read(parts.read(path, routes.MANIFEST_BYTES), what)

    def require(self, digest: str) -> Sequence[bytes]:
        """The digests of its parts, where they make up what is wanted.

        Raises:
            PartCorrupt: they do not.
        """
        if self.manifest.digest != digest or self._ref.digest != digest:
            raise PartCorrupt(f"{self._ref.server} serves something else than it said.", "Look at that worker.")
        return self.manifest.digests

    def parts(
        self,
        digests: Sequence[bytes],
        wanted: Sequence[Part],
        write: Callable[[int, memoryview], None],
        *,
        on_bytes: Callable[[int], None],
        on_part: Callable[[Part], None] | None = None,
    ) -> None:
        """Pull parts; one that arrives damaged is pulled again, alone."""
        path = routes.OBJECT_DATA.format(object=self._ref.object)
        self._parts.pull(path, digests, wanted, [Writing(write)], on_bytes=on_bytes, on_part=on_part)


class Writing:
    """A sink that is a function."""

    def __init__(self, write: Callable[[int, memoryview], None]) -> None:
        self.write = write


@contextmanager
def connected(text: str, idle_timeout_s: float, counters: Counters) -> Iterator[tuple[TensorRef, Parts]]:
    """Connections to who serves a reference, for as long as the block lasts.

    Args:
        counters: that its bytes are added to.
    """
    ref = TensorRef.parse(text)
    http = object_http(ref)
    http.counters = counters
    parts = Parts(http, CONNECTIONS, idle_timeout_s)
    try:
        yield ref, parts
    finally:
        parts.close()
        http.close()
