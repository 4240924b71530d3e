"""Serves published objects from this process to every process that can connect and has the reference.

Each object is an unnamed file. The system deletes it when the process ends, even if the process is killed. The file is
written once, when the object is published. Receivers download byte ranges of it, so no receiver waits for another.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from atoll.blobs.manifest import Manifest
from atoll.blobs.object_file import write_object
from atoll.blobs.ways_to_send import Cut
from atoll.errors import (
    AtollError,
    AuthError,
    BadRequest,
    ConfigError,
    DiskFull,
    Gone,
    PartCorrupt,
    StoreError,
    UsageError,
)
from atoll.filters.base import About, filtered
from atoll.filters.site_filters import site_filters
from atoll.posix import FULL, read_at, write_at
from atoll.protocol import messages, routes
from atoll.system_calls import nameless_file
from atoll.tensors.layout import Part
from atoll.tensors.payload import Packed
from atoll.tensors.reference import TensorRef, address_of, hash_of_secret, new_id, require_secret
from atoll.transport.credential_store import ANEW
from atoll.transport.listener import files_limit, listen, runner_of, start_listener
from atoll.transport.loop_thread import LoopThread
from atoll.transport.part_transfer import Delivery, HttpTransfer, Memory, Sink, read_parts
from atoll.transport.request_body import break_off
from atoll.transport.serve_range import problem, serve_file
from atoll.transport.tls import ContextMaker, fixed, is_loopback, server_context
from atoll.transport.way_out import way_out


@dataclass(eq=False)
class ServedBlob:
    """An object that this process serves.

    Attributes:
        sealed: hash of the reference's secret.
        manifest: manifest of the object.
        inline: whether the object's bytes are sent within its manifest.
        fd: descriptor of the object's file; -1 after it is closed.
        until_s: expiry time, by `time.monotonic`.
        readers: number of requests that are reading `fd`. Used only on the event loop.
        removed: event that is set when the object is no longer served.
        on_bytes: callback with the number of bytes sent.
    """

    sealed: str
    manifest: Manifest
    inline: bool
    fd: int
    until_s: float
    on_bytes: Callable[[int], None]
    readers: int = 0
    removed: threading.Event = field(default_factory=threading.Event)

    def close_if_unread(self) -> None:
        """Close `fd` if the object is no longer served and no request reads it. Call it on the event loop."""
        if self.removed.is_set() and not self.readers and self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def nameless(folder: Path | None) -> int:
    """Create an unnamed file for a published object, and return its descriptor.

    Args:
        folder: folder of the file; None for the folder of temporary files.

    Raises:
        StoreError: the file cannot be created in this folder.
    """
    try:
        return nameless_file(folder)
    except OSError as error:
        raise StoreError(
            f"No file can be created in {folder or tempfile.gettempdir()}: {error.strerror}.",
            "Pass a folder that this user may write; TMPDIR sets the default folder.",
        ) from error


@dataclass(frozen=True)
class UnpublishedObject:
    """An object that is written to disk, but not published yet. It keeps no tensor in memory.

    Attributes:
        fd: descriptor of the unnamed file.
        manifest: manifest of the object.
        inline: whether the object's bytes will be sent within its manifest.
    """

    fd: int
    manifest: Manifest
    inline: bool

    def close(self) -> None:
        """Close the file, which frees its disk space."""
        os.close(self.fd)


def written(packed: Packed, cut: Cut, folder: Path | None) -> UnpublishedObject:
    """Write an object to an unnamed file, so that it can be published.

    Args:
        packed: the object, as `pack_object` returns it.
        cut: how the object is divided into parts.
        folder: folder of the file; None for the folder of temporary files.

    Raises:
        UsageError: `cut.inline` is set (the object's bytes are sent inside its manifest), but the object is too large
            for that; or the object is too large for any manifest.
        DiskFull: the disk is full.
        StoreError: the disk fails.
    """
    fd = nameless(folder)
    try:
        manifest = write_object(packed, fd, cut)
        if cut.inline and manifest.nbytes > routes.INLINE_BYTES:
            raise UsageError(
                f"The object has {manifest.nbytes} bytes, too many to be sent inside a message (chunk_bytes = 0).",
                f"Inside a message, send at most {routes.INLINE_BYTES} bytes. For more, leave chunk_bytes out.",
            )
    except BaseException as error:
        os.close(fd)
        raise (unnamed_file_error(error, folder) if isinstance(error, OSError) else error) from error
    return UnpublishedObject(fd, manifest, cut.inline)


def unnamed_file_error(error: OSError, folder: Path | None) -> StoreError:
    """Return the error to raise for a failed write to an unnamed file: `DiskFull` or `StoreError`.

    Args:
        error: the error.
        folder: folder of the file; None for the folder of temporary files.
    """
    where = "the folder of temporary files" if folder is None else str(folder)
    remedy = f"Free disk space, or {'set TMPDIR to' if folder is None else 'use'} another folder."
    if error.errno in FULL:
        return DiskFull(f"The disk of {where} is full.", remedy)
    return StoreError(f"A file in {where} cannot be written: {error.strerror}.", remedy)


def outgoing(packed: Packed, cut: Cut, folder: Path | None, what: str) -> UnpublishedObject:
    """Write an object to an unnamed file, as `written` does, after the filters of the site's policy. It may then leave.

    Args:
        packed: the object.
        cut: how the object is divided into parts.
        folder: folder of the file; None for the folder of temporary files.
        what: what the object is, for messages, as the beginning of a sentence that ends with "was not sent".

    Raises:
        UsageError: a tensor may not leave, or as for `written`.
        DiskFull, StoreError: as for `written`.
    """
    way = way_out()
    packed = filtered(packed, site_filters(way.policy), About("", task="object"), f"{what} was not sent")
    draft = written(packed, cut, folder)
    way.clear(draft.manifest.part_digests)
    return draft


class UnnamedFile:
    """Writes a download to an unnamed file. Errors name `folder`; None means the folder of temporary files."""

    def __init__(self, fd: int, folder: Path | None) -> None:
        self._fd, self._folder = fd, folder

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` into the file from byte `offset` on.

        Raises:
            DiskFull, StoreError: the disk is full, or fails.
        """
        try:
            write_at(self._fd, data, offset)
        except OSError as error:  # an OSError would count as a network error
            raise unnamed_file_error(error, self._folder) from error


@dataclass(frozen=True)
class LocalBlob:
    """Reads an object that this process serves, from its file instead of over the network.

    Its methods `read` and `pull` take the same arguments as those of `HttpTransfer`, which downloads objects.

    Attributes:
        fd: descriptor of the file; `close` closes it.
        manifest: manifest of the object.
        removed: event that is set when the object is no longer served. After that, the file may be rewritten.
        on_read: callback with the number of bytes read.
    """

    fd: int
    manifest: Manifest
    removed: threading.Event
    on_read: Callable[[int], None] = lambda _: None

    def read(self, path: str, most_bytes: int) -> bytearray:
        """Return the object's manifest as a JSON message.

        Args:
            path: name of the object for error messages.
            most_bytes: maximum size of the message.

        Raises:
            BadRequest: the message has more than `most_bytes` bytes.
        """
        message = messages.BlobManifest.of(self.manifest).model_dump_json().encode()
        if len(message) > most_bytes:
            raise BadRequest(f"The manifest of {path}, which this process serves, has more than {most_bytes} bytes.")
        return bytearray(message)

    def pull(
        self,
        path: str,
        digests: Sequence[bytes],
        parts: Sequence[Part],
        sinks: Sequence[Sink],
        *,
        into: Memory | None = None,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_part: Callable[[Part], None] = lambda _: None,
    ) -> None:
        """Read parts of the file and check them. The arguments are those of `HttpTransfer.pull`.

        Raises:
            Gone: the object is no longer served.
            PartCorrupt: a part does not match its digest, or cannot be read.
        """

        def count(nbytes: int) -> None:
            self.on_read(nbytes)
            on_bytes(nbytes)

        def require_served() -> None:  # after the read: the file may have been rewritten during it
            if self.removed.is_set():
                raise Gone(f"This process no longer serves {path}: it was withdrawn, or has expired.")

        def read(run: memoryview, offset: int, part: Part) -> None:
            try:
                read_at(self.fd, run, offset)
            except (OSError, EOFError) as error:
                require_served()
                raise PartCorrupt(f"Part {part.index} of {path} cannot be read: {error}.", "Check the disk.") from error

        damaged = f"Part {{}} of {path}, which this process serves, is damaged."
        delivery = Delivery(digests, sinks, into, count, on_part)
        read_parts(parts, delivery, read, damaged, "Check the disk.", require_served)

    def close(self) -> None:
        """Close this reader's descriptor. The process still serves the object."""
        os.close(self.fd)


PartSource = HttpTransfer | LocalBlob
"""Source of parts: another process over HTTP, or this process."""


LOG = logging.getLogger("atoll.objects")

T = TypeVar("T")

THREADS = 4
"""Number of threads that read files from disk, for all receivers together."""
LONGEST_S = 10 * 365 * 86400.0
"""Maximum seconds until an object expires: ten years."""


class ObjectHost:
    """Serves the published objects of one process, from a thread of its own.

    Args:
        host: address to listen on.
        port: port to listen on; 0 takes any free port.
        name: host name of this machine in the references. Default: `host`, or the machine's name if `host` is a
            wildcard.
        tls_cert: path of the PEM certificate. TLS is required for an address other than loopback, unless `insecure`.
        tls_key: path of the PEM private key.
        insecure: whether to allow an address other than loopback without TLS.
        idle_timeout_s: seconds after which a receiver that reads no byte is disconnected.
        folder: folder for the files of the objects; None for the folder of temporary files.
        context: returns the TLS context for a new connection, in place of one with `tls_cert`; None: there is none.

    Attributes:
        refuses: whether nothing is served to a connection with this certificate, as `getpeercert` returns it; it is
            asked again before each write.

    Raises:
        ConfigError: the address needs TLS, or is not an address of this machine.
        PortInUse: the port is in use.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        host: str,
        port: int,
        *,
        name: str | None,
        tls_cert: Path | None,
        tls_key: Path | None,
        insecure: bool,
        idle_timeout_s: float,
        folder: Path | None,
        context: ContextMaker | None = None,
    ) -> None:
        if (tls_cert is None) != (tls_key is None):
            raise ConfigError("Only one of tls_cert and tls_key is set.", "Set both, or neither.")
        if tls_cert is None and context is None and not is_loopback(host) and not insecure:
            raise ConfigError(
                f"Objects would be published without TLS on {host}, which other machines can reach.",
                "Pass tls_cert and tls_key, publish on 127.0.0.1 or through the server (server=…), or pass "
                "insecure=True on a trusted network.",
            )
        self._context = context
        if context is None and tls_cert and tls_key:
            self._context = fixed(server_context(tls_cert, tls_key))
        self._folder, self._idle_timeout_s = folder, idle_timeout_s
        self._objects: dict[str, ServedBlob] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="atoll-objects")
        self._listener = listen(host, [port], setting="host", remedy="Use a free port; 0: any free port.")
        self.port: int = self._listener.getsockname()[1]
        self.name = name or (socket.gethostname() if host in ("0.0.0.0", "::") else host)
        self.refuses: Callable[[Mapping[str, Any]], bool] = lambda _: False
        self._thread = LoopThread("atoll-objects", self._serve)
        self._thread.start()

    # -- methods for publishers

    def publish(self, packed: Packed, cut: Cut, *, expires_s: float) -> TensorRef:
        """Write an object to disk, serve it, and return its reference.

        Args:
            packed: the object, as `pack_object` returns it.
            cut: how the object is divided into parts.
            expires_s: seconds until the object expires.

        Raises:
            UsageError: `cut.inline` is set (the object's bytes are sent inside its manifest), but the object is too
                large for that; the object is too large for any manifest; or `close` was called.
            DiskFull: the disk is full.
            StoreError: the disk fails.
        """
        draft = outgoing(packed, cut, self._folder, "The object")
        try:
            return self._put(draft.fd, draft.manifest, cut.inline, expires_s)
        except BaseException:
            draft.close()
            raise

    def serve(self, fd: int, manifest: Manifest, on_bytes: Callable[[int], None] = lambda _: None) -> TensorRef:
        """Serve an existing file, and return its reference. The file must not change until `withdraw` is called.

        Args:
            fd: descriptor of the file. It is duplicated, so the caller still has to close it.
            manifest: manifest of the file.
            on_bytes: callback with the number of bytes sent.
        """
        own = os.dup(fd)
        try:
            return self._put(own, manifest, False, LONGEST_S, on_bytes)
        except BaseException:
            os.close(own)
            raise

    def _put(
        self,
        fd: int,
        manifest: Manifest,
        inline: bool,
        expires_s: float,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> TensorRef:
        secret, object_id = new_id(), new_id()
        way_out().serve(manifest.part_digests)
        served = ServedBlob(hash_of_secret(secret), manifest, inline, fd, time.monotonic() + expires_s, on_bytes)
        self._on_loop(lambda: self._begin(object_id, served, expires_s))
        expires_at = int(time.time() + expires_s)
        return TensorRef(self.name, self.port, self._context is not None, object_id, secret, manifest.id, expires_at)

    @property
    def address(self) -> str:
        """The URL of this host for other processes."""
        return address_of(self.name, self.port, secure=self._context is not None)

    def withdraw(self, ref: TensorRef) -> bool:
        """Stop serving an object. Running downloads of it end with an error.

        Returns:
            False if this host does not serve the object.

        Raises:
            AuthError: the reference's secret does not belong to the object.
        """

        def work() -> bool:
            served = self._objects.get(ref.object)
            if served is None:
                return False
            require_secret(ref.secret, served.sealed, ref.object)
            self._drop(ref.object)
            return True

        return self._on_loop(work)

    def opened(self, ref: TensorRef, on_read: Callable[[int], None]) -> LocalBlob | None:
        """Open an object of this host for reading in this process, without the network.

        Args:
            ref: reference of the object.
            on_read: callback with the number of bytes read.

        Returns:
            The reader, which the caller closes; None if this host does not serve the object.

        Raises:
            AuthError: the reference's secret does not belong to the object.
        """

        def work() -> LocalBlob | None:
            served = self._objects.get(ref.object)
            if served is None:
                return None
            require_secret(ref.secret, served.sealed, ref.object)
            return LocalBlob(os.dup(served.fd), served.manifest, served.removed, on_read)

        return self._on_loop(work)

    def close(self) -> None:
        """Stop serving, and free the disk space of all objects. Idempotent."""
        self._thread.stop()

    def _on_loop(self, work: Callable[[], T]) -> T:
        closed = UsageError("The publisher is closed.", "Create a new one.")

        def call() -> T:
            if self._thread.stopping.is_set():  # an object that is added now would never be closed
                raise closed
            return work()

        return self._thread.call(call, closed)

    # -- methods that run on the loop

    def _begin(self, object_id: str, served: ServedBlob, expires_s: float) -> None:
        self._objects[object_id] = served
        asyncio.get_running_loop().call_later(min(expires_s, LONGEST_S), self._drop, object_id)

    def _drop(self, object_id: str) -> None:
        served = self._objects.pop(object_id, None)
        if served is not None:
            served.removed.set()
            served.close_if_unread()

    def _find(self, request: web.Request) -> ServedBlob:
        object_id = request.match_info["object"]
        served = self._objects.get(object_id)
        if served is None or served.until_s <= time.monotonic():
            raise Gone(
                f"Object {object_id[:8]} is not published here: it has expired, was withdrawn, or never existed.",
                "Publish it again. Pass a longer expires_s if it is fetched late.",
            )
        require_secret(request.headers.get(routes.SECRET_HEADER), served.sealed, object_id)
        if self._is_refused(request):
            text = (
                "The certificate of this connection has ended: it has expired, or its site was revoked, or has "
                "enrolled again."
            )
            raise AuthError(text, ANEW)
        return served

    def _is_refused(self, request: web.Request) -> bool:
        return self.refuses(request.get_extra_info("peercert") or {})

    async def _manifest(self, request: web.Request) -> web.StreamResponse:
        served = self._find(request)
        inline: bytearray | None = None
        if served.inline:
            inline = bytearray(served.manifest.nbytes)
            read_at(served.fd, memoryview(inline), 0)
            await asyncio.get_running_loop().run_in_executor(
                self._pool, way_out().served, served.manifest.id, len(inline)
            )
        message = messages.BlobManifest.of(served.manifest, inline)
        return web.Response(body=message.model_dump_json().encode(), content_type="application/json")

    async def _data(self, request: web.Request) -> web.StreamResponse:
        served, way = self._find(request), way_out()
        served.readers += 1
        try:
            return await serve_file(
                request,
                served.fd,
                served.manifest.nbytes,
                served.manifest.id,
                pool=self._pool,
                idle_timeout_s=self._idle_timeout_s,
                revoked=lambda: served.removed.is_set() or self._is_refused(request),
                on_bytes=served.on_bytes,
                before=partial(way.served, served.manifest.id) if way.log is not None else None,
            )
        finally:
            served.readers -= 1
            served.close_if_unread()

    async def _remove(self, request: web.Request) -> web.StreamResponse:
        self._find(request)
        self._drop(request.match_info["object"])
        return web.Response(status=204)

    async def _serve(self) -> None:
        try:
            app = web.Application(client_max_size=routes.CONTROL_BODY_BYTES, middlewares=[_guard])
            app.router.add_get(routes.OBJECT, self._manifest)
            app.router.add_get(routes.OBJECT_DATA, self._data)
            app.router.add_delete(routes.OBJECT, self._remove)
            app.router.add_get(routes.HEALTH, _health)
            runner = runner_of(app, LOG, read_bytes=2**16, linger_s=0.5)
            door = await start_listener(
                self._listener, runner, self._context, files=files_limit(), idle_timeout_s=self._idle_timeout_s
            )
            self._thread.ready()
            try:
                await self._thread.stopping.wait()
            finally:
                for object_id in list(self._objects):
                    self._drop(object_id)
                await door.close()
                await runner.cleanup()
        finally:
            self._listener.close()
            self._pool.shutdown(wait=True)  # its threads may still call the loop


async def _health(_: web.Request) -> web.StreamResponse:
    return web.Response(text="ok\n")


@web.middleware
async def _guard(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except AtollError as error:
        return problem(error.code, error.message, error.remedy, error.retry_after_s)
    except web.HTTPException as error:
        return problem("not_found" if error.status == 404 else "method", "Only published objects are served here.")
    except ConnectionError as error:
        LOG.debug("%s %r: %s", request.method, request.path, error)
        break_off(request)
        return web.Response()  # never sent: the connection is closed
