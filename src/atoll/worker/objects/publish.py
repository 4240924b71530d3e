"""`atoll.publish`: tensors under a reference, from this process or through the server.

ref = atoll.publish({"w": w, "step": 7})                  # served by this process, to processes of this machine
ref = atoll.publish(model, server="http://host:8512")     # kept by the server, after this process has ended

with atoll.Publisher("0.0.0.0", tls_cert=..., tls_key=...) as publisher:
    ref = publisher.publish(model)                        # served by this process, to everybody who reaches it
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from atoll.blobs.manifest import Cut, cut_of
from atoll.blobs.object_file import pack_object
from atoll.border import border, bordered
from atoll.errors import AtollError, UsageError
from atoll.protocol import messages, routes
from atoll.sizes import CHUNK_BYTES, CHUNK_STEP_BYTES, LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES
from atoll.tensors.payload import Packed
from atoll.tensors.reference import TensorRef
from atoll.transport.http_client import Http
from atoll.transport.object_server import LONGEST_S, Draft, ObjectHost, written
from atoll.transport.resumable_transfer import Parts
from atoll.worker.log_lines import LOG
from atoll.worker.objects.object_transfer import Abort, chunk_sizes, idle_timeout, object_http, watched
from atoll.worker.session.address import http_to

EXPIRES_S = 3600.0
CONNECTIONS = 2


@bordered
class Publisher:
    """Serves what it publishes to whoever can reach this process and has the reference. Use it as a context manager.

    Args:
        host: address to listen on; other machines reach anything but loopback, which needs TLS.
        port: 0 takes any free one.
        name: under which others reach this machine; by default `host`.
        tls_cert, tls_key: PEM files; the key has mode 0600.
        insecure: listen beyond loopback without TLS.
        idle_timeout_s: a receiver that takes no byte for so long is broken off; by default `ATOLL_IDLE_TIMEOUT_S`,
            else 60.
        folder: where the bytes lie, in files without names; by default that of temporary files.

    Raises:
        ConfigError: the address needs TLS. PortInUse: somebody else has the port.
    """

    @border
    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        name: str | None = None,
        tls_cert: str | Path | None = None,
        tls_key: str | Path | None = None,
        insecure: bool = False,
        idle_timeout_s: float | None = None,
        folder: str | Path | None = None,
    ) -> None:
        self._host = ObjectHost(
            host,
            port,
            name=name,
            tls_cert=Path(tls_cert) if tls_cert else None,
            tls_key=Path(tls_key) if tls_key else None,
            insecure=insecure,
            idle_timeout_s=idle_timeout(idle_timeout_s),
            folder=Path(folder) if folder else None,
        )

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._host.port

    @border
    def publish(self, tensors: Any, *, chunk_bytes: int | None = None, expires_s: float = EXPIRES_S) -> TensorRef:
        """As `atoll.publish`, served by this publisher."""
        return self.publish_packed(pack_object(tensors), chunk_bytes=chunk_bytes, expires_s=expires_s)

    def publish_packed(
        self, packed: Packed, *, chunk_bytes: int | None = None, expires_s: float = EXPIRES_S
    ) -> TensorRef:
        """As `publish`, of what was taken apart already."""
        return self._host.publish(packed, cut_as_told(packed, chunk_bytes), expires_s=_lasting(expires_s))

    @border
    def withdraw(self, ref: TensorRef) -> bool:
        """Serve it no more, and give its disk back; who pulls it is broken off. False where it was not served."""
        return self._host.withdraw(ref)

    def close(self) -> None:
        """Withdraw everything and stop listening. Idempotent."""
        self._host.close()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@border
def publish(
    tensors: Any,
    *,
    chunk_bytes: int | None = None,
    expires_s: float = EXPIRES_S,
    server: str | None = None,
    abort: Abort | None = None,
    idle_timeout_s: float | None = None,
) -> TensorRef:
    """Put tensors under a reference, from which `atoll.fetch` gets them in another process.

    They are written to disk once, in runs of 2 MiB; nothing refers to them when this returns.

    Args:
        tensors: a dict of tensors, or any nested dicts, lists and tuples of tensors, arrays, references and plain
            values; or a module, for its state.
        chunk_bytes: bytes of a part, which is checked and sent again alone: 64 KiB to 16 MiB, a multiple of 64.
            0: all travels within the manifest, in one answer (16 MiB at most). By default
            `ATOLL_TENSOR_DOWNLOAD_CHUNK_SIZE` for torch tensors and `ATOLL_NP_DOWNLOAD_CHUNK_SIZE` for NumPy arrays,
            else 8 MiB.
        expires_s: seconds after which it is kept no more. A server may keep it shorter.
        server: address of an Atoll server that is to keep it, for processes that cannot reach this one. By default
            this process serves it, on loopback; `Publisher` does so on another address.
        abort: an event that ends the upload to a server.
        idle_timeout_s: an upload that moves no byte for so long is given up; by default `ATOLL_IDLE_TIMEOUT_S`, else
            60.

    Returns:
        The reference. Whoever has it can fetch the tensors; nobody else can.

    Raises:
        UsageError: something cannot travel; it is named.
        TransferAborted: `abort` was set.
        ServerUnreachable, AuthError, Busy, DiskFull, BadRequest: the server did not take it.
    """
    expires_s = _lasting(expires_s)
    idle_timeout_s = idle_timeout(idle_timeout_s)
    if server is None:
        return _own().publish(tensors, chunk_bytes=chunk_bytes, expires_s=expires_s)
    packed = pack_object(tensors)
    draft = written(packed, cut_as_told(packed, chunk_bytes), None)
    del tensors, packed
    try:
        return send(draft, server, expires_s=expires_s, idle_timeout_s=idle_timeout_s, abort=abort)
    finally:
        draft.close()


def send(
    draft: Draft, server: str, *, expires_s: float, idle_timeout_s: float, abort: Abort | None = None
) -> TensorRef:
    """Let a server keep what is on disk here; errors as `publish`."""
    http = http_to(server)
    parts, extent = Parts(http, CONNECTIONS, idle_timeout_s), draft.extent
    try:
        opening = messages.ObjectOpen(
            head_bytes=extent.head_bytes,
            nbytes=extent.nbytes,
            part_bytes=extent.part_bytes,
            inline=draft.inline,
            expires_s=expires_s,
        )
        opened = http.post(routes.OBJECTS, opening, messages.ObjectOpened, timeout_s=idle_timeout_s)
        http.secret, path = opened.secret, routes.OBJECT.format(object=opened.object)
        digest = draft.digest
        try:
            with watched(parts, abort):
                parts.push(routes.parts_of_object(opened.object), draft.fd, extent.parts(), draft.digests)
            complete = routes.OBJECT_COMPLETE.format(object=opened.object)
            http.send(complete, messages.ObjectComplete(digest=digest), timeout_s=idle_timeout_s)
        except BaseException:
            _forget(http, path)
            raise
    finally:
        parts.close()
        http.close()
    expires_at = int(time.time() + opened.expires_s)
    return TensorRef(http.host, http.port, http.secure is not None, opened.object, opened.secret, digest, expires_at)


@border
def withdraw(ref: TensorRef | str) -> bool:
    """Keep what a reference names no longer, here or at the server; who pulls it is broken off.

    Returns:
        False where it was not kept any more.

    Raises:
        AuthError: the reference's secret is another's. ServerUnreachable: nobody answers there.
    """
    ref = ref if isinstance(ref, TensorRef) else TensorRef.parse(ref)
    if _publisher is not None and _publisher[0] == os.getpid() and _publisher[1].withdraw(ref):
        return True
    http = object_http(ref)
    try:
        http.delete(routes.OBJECT.format(object=ref.object))
        return True
    except AtollError as error:
        if error.code != "gone":
            raise
        return False
    finally:
        http.close()


def _forget(http: Http, path: str) -> None:
    """What was not completed need not wait for its time at the server."""
    with contextlib.suppress(AtollError):  # it gives up by itself what does not arrive
        http.delete(path, timeout_s=2.0)


_publisher: tuple[int, Publisher] | None = None
_lock = threading.Lock()


def _own() -> Publisher:
    """This process's publisher on loopback; one that was forked has none yet."""
    global _publisher
    with _lock:
        if _publisher is None or _publisher[0] != os.getpid():
            publisher = Publisher()
            _publisher = (os.getpid(), publisher)
            atexit.register(publisher.close)
        return _publisher[1]


def cut_as_told(packed: Packed, chunk_bytes: int | None) -> Cut:
    """How a tree travels: as `publish` was told, else as the environment says."""
    if chunk_bytes is None:
        cut = cut_of(packed, chunk_sizes())
        if cut.too_large:
            LOG.warning("%d bytes of tensors are too many to travel inline: they are streamed", cut.too_large)
        return cut
    if chunk_bytes == 0:
        return Cut(CHUNK_BYTES, inline=True)
    if type(chunk_bytes) is not int or not LEAST_CHUNK_BYTES <= chunk_bytes <= MOST_CHUNK_BYTES:
        raise UsageError(
            f"chunk_bytes is {chunk_bytes!r}.", f"Give {LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES}, or 0 for inline."
        )
    if chunk_bytes % CHUNK_STEP_BYTES:
        raise UsageError(
            f"chunk_bytes is {chunk_bytes}, no multiple of {CHUNK_STEP_BYTES}.",
            f"Give {chunk_bytes // CHUNK_STEP_BYTES * CHUNK_STEP_BYTES}.",
        )
    return Cut(chunk_bytes)


def _lasting(expires_s: float) -> float:
    if not isinstance(expires_s, int | float) or not 0 < expires_s < math.inf:
        raise UsageError(f"expires_s is {expires_s!r}.", "Give the seconds that it is to be kept.")
    return min(float(expires_s), LONGEST_S)
