"""Downloads and uploads of parts of files over a few parallel connections.

The caller chooses the parts: for example, a resumed upload sends only the parts that the server lacks. If a part is
damaged on the way or its connection breaks, only this part is transferred again. After `PART_ATTEMPTS` failures of a
part, the error is raised.

Ctrl-C interrupts only the main thread, usually while it waits in this module. An interrupted call ends all its
transfer threads before it returns: they must not use files that the caller is about to close, and must not keep the
process alive on a stalled network. After a second interrupt, a thread may remain. Such a thread has its own copy
of the file descriptor, so it never reads a file that was opened later and got the same descriptor number.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from blake3 import blake3
from pydantic import BaseModel

from atoll.errors import AtollError, BadRequest, PartCorrupt, ServerUnreachable, TransferAborted, TransferStalled
from atoll.posix import Descriptor
from atoll.protocol import routes
from atoll.protocol.read_message import framed
from atoll.runtime import failpoint
from atoll.tensors.chunks import CHUNK_BYTES
from atoll.tensors.layout import Part
from atoll.transport.http_client import NETWORK_ERRORS, Http, damaged, is_silence
from atoll.transport.part_connection import PartConnection

P = ParamSpec("P")
R = TypeVar("R")

Digests = Mapping[int, bytes] | Sequence[bytes]
"""Index of a part → BLAKE3 of the part."""

PART_ATTEMPTS = 4
"""Number of attempts to transfer a part before the error is raised."""
DAMAGED = "Check the network, and the disk of the sending machine."
"""Remedy if bytes arrive damaged at every attempt."""


# -- The threads of one transfer.


class TransferPool:
    """The threads of one transfer. Create it with `transfer_pool`.

    Attributes:
        ended: event. After it is set, no further part is begun.
        moved_s: time at which a byte was last sent or received, by `time.monotonic`.
    """

    def __init__(self, size: int) -> None:
        self.ended = threading.Event()
        self.moved_s = time.monotonic()
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="atoll-part")
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._in_use: set[PartConnection] = set()
        self._cut = False

    def moved(self) -> None:
        """Record that bytes were sent or received now."""
        self.moved_s = time.monotonic()

    def is_silent(self, idle_timeout_s: float) -> bool:
        """Return whether no connection of the transfer has sent or received a byte for `idle_timeout_s` seconds."""
        return time.monotonic() - self.moved_s >= idle_timeout_s

    def submit(self, work: Callable[P, R], *args: P.args, **more: P.kwargs) -> Future[R]:
        """Run `work` in a thread of the pool."""
        future = self._pool.submit(work, *args, **more)
        self._futures.append(future)
        return future

    @contextmanager
    def using(self, connection: PartConnection) -> Iterator[None]:
        """Register a connection while the `with` block runs, so that `break_off` can end it."""
        with self._lock:
            self._in_use.add(connection)
            if self._cut:
                connection.cut()
        try:
            yield
        finally:
            with self._lock:
                self._in_use.discard(connection)

    def wait(self) -> None:
        """Wait until all submitted work is done."""
        # `Thread.join` would not do: after an interrupt, it reports a running thread as ended.
        wait([future for future in self._futures if not future.cancelled()])
        self._pool.shutdown()

    def break_off(self) -> None:
        """End the transfer: begin no further part, and end the connections in use. Do not wait.

        Any thread may call this.
        """
        self.ended.set()
        with self._lock:
            self._cut = True
            for connection in self._in_use:
                connection.cut()

    def cut(self) -> None:
        """End the transfer, and wait until every thread has ended."""
        self.break_off()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.wait()


@contextmanager
def transfer_pool(size: int) -> Iterator[TransferPool]:
    """Yield a pool of `size` transfer threads.

    At the end of the `with` block, wait until the threads have ended. If the block raises, break off the transfer.
    """
    pool = TransferPool(size)
    try:
        yield pool
        pool.wait()
    except BaseException:
        pool.cut()
        raise


# -- Destinations of the bytes of parts.


class Sink(Protocol):
    """A destination for the bytes of a file. Several threads write to it, each at its own offsets."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at the file's byte `offset`. The caller reuses the memory of `data` afterwards."""
        ...


class Memory(Sink, Protocol):
    """A sink in memory. The caller can fill most of this memory in place, instead of calling `write`."""

    def room(self, offset: int, nbytes: int) -> memoryview | None:
        """Return the sink's memory for the file's bytes from `offset` on; None if the caller must use `write`.

        The memory has at most `nbytes` bytes, and its size is a whole number of elements.
        """
        ...


@dataclass(frozen=True)
class Delivery:
    """The destinations of downloaded parts.

    Attributes:
        digests: BLAKE3 of every part of the file, by index.
        sinks: destinations. Each gets all bytes with their file offsets, whole elements at a time.
        into: destination in memory, or None. It gets each piece before `sinks` do, if possible without a copy.
        on_bytes: callback with the number of bytes received.
        on_part: callback with every complete part. Several threads call it.
    """

    digests: Sequence[bytes]
    sinks: Sequence[Sink]
    into: Memory | None = None
    on_bytes: Callable[[int], None] = lambda _: None
    on_part: Callable[[Part], None] = lambda _: None


@dataclass
class PulledPart:
    """A part that is being received. It passes the received bytes to their destinations, and checks the part's digest.

    Until the part is complete, get a buffer from `room`, fill it, and pass it to `take`. Then call `finish`.

    Attributes:
        delivery: destinations of the bytes.
        part: the part.
        offset: file offset of the next byte.
    """

    delivery: Delivery
    part: Part
    offset: int = 0
    _in_place: bool = False
    _hasher: Any = field(default_factory=blake3)

    def __post_init__(self) -> None:
        self.offset = self.part.start

    @property
    def is_complete(self) -> bool:
        """Whether all bytes of the part have arrived. `finish` then checks them."""
        return self.offset == self.part.stop

    def room(self, scratch: memoryview) -> memoryview:
        """Return the buffer for the next bytes: memory of `delivery.into` if possible, else the start of `scratch`."""
        most, into = min(len(scratch), self.part.stop - self.offset), self.delivery.into
        memory = into.room(self.offset, most) if into is not None else None
        self._in_place = memory is not None
        return scratch[:most] if memory is None else memory

    def take(self, run: memoryview) -> None:
        """Hash the bytes in a buffer that `room` returned, and pass them to the destinations."""
        self._hasher.update(run)
        if self.delivery.into is not None and not self._in_place:
            self.delivery.into.write(self.offset, run)
        for sink in self.delivery.sinks:
            sink.write(self.offset, run)
        self.offset += len(run)
        self.delivery.on_bytes(len(run))

    def finish(self, damaged: str, remedy: str) -> None:
        """Compare the part with its digest; if they agree, call `on_part`.

        Args:
            damaged: message of the error `PartCorrupt`.
            remedy: remedy of this error.

        Raises:
            PartCorrupt: the digest differs: the part is damaged or incomplete.
        """
        if self._hasher.digest() != self.delivery.digests[self.part.index]:
            raise PartCorrupt(damaged, remedy)
        failpoint("pull.part")
        self.delivery.on_part(self.part)


def read_parts(
    parts: Sequence[Part],
    delivery: Delivery,
    read: Callable[[memoryview, int, Part], None],
    damaged: str,
    remedy: str,
    require_whole: Callable[[], None] = lambda: None,
) -> None:
    """Pass parts of a file that this process has to their destinations, and check them.

    Args:
        parts: the parts.
        delivery: digests and destinations.
        read: fills memory with the file's bytes from an offset on, for a part.
        damaged: message of the error `PartCorrupt`, with a place for the number of the part.
        remedy: remedy of this error.
        require_whole: called after a part was read; raises an error if the file has changed meanwhile.

    Raises:
        PartCorrupt: a part does not match its digest.
    """
    scratch = memoryview(bytearray(CHUNK_BYTES))
    for part in parts:
        arriving = PulledPart(delivery, part)
        while not arriving.is_complete:
            run = arriving.room(scratch)
            read(run, arriving.offset, part)
            arriving.take(run)
        require_whole()
        arriving.finish(damaged.format(part.index), remedy)


# -- Parts over HTTP.


class Pushing:
    """An upload of parts while their file is still being written. `HttpTransfer.pushing` returns it.

    Attributes:
        sent: indices of the parts that the server has received.
        error: first error of the upload; None if there is none.
        ended: event. After it is set, no further part is sent.
    """

    def __init__(self, pool: TransferPool, send: Callable[[Part, bytes], bool]) -> None:
        self.sent: set[int] = set()
        self.error: BaseException | None = None
        self.ended = pool.ended
        self._pool, self._do = pool, send

    def add(self, part: Part, digest: bytes) -> None:
        """Queue a part for upload, without waiting.

        Args:
            part: part of the file. Its bytes must not change any more.
            digest: BLAKE3 of the part.
        """
        if not self.ended.is_set():
            self._pool.submit(self._send, part, digest)

    def _send(self, part: Part, digest: bytes) -> None:
        try:
            if self._do(part, digest):
                self.sent.add(part.index)
        except BaseException as error:  # the owner of the upload reads `error`
            self.error = self.error or error


Work = Callable[[PartConnection, Part], object]
"""Function that transfers one part over one connection."""


class HttpTransfer:
    """A client that downloads and uploads parts over parallel connections to one server.

    Args:
        http: client with the server's address, the credentials and the counters.
        connections: maximum number of parallel connections.
        idle_timeout_s: seconds without a byte after which a transfer fails.
        first_timeout_s: the same, if it is shorter, for a transfer that follows a complete one. A silent network is
            then noticed soon, and behind a slow server or proxy, the next attempt still has `idle_timeout_s`.
    """

    def __init__(self, http: Http, connections: int, idle_timeout_s: float, first_timeout_s: float = math.inf) -> None:
        self._http, self._connections = http, connections
        self._idle_timeout_s = min(idle_timeout_s, http.patience_s)
        self._first_timeout_s = min(self._idle_timeout_s, first_timeout_s)
        self._has_stalled = False
        self._idle: list[PartConnection] = []
        self._losses = 0
        self._pools: set[TransferPool] = set()
        self._broken = False
        self._lock = threading.Lock()

    @property
    def _timeout_s(self) -> float:
        return self._idle_timeout_s if self._has_stalled else self._first_timeout_s

    def break_off(self) -> None:
        """Make all running and later transfers raise `TransferAborted`. Call it from another thread."""
        with self._lock:
            self._broken = True
            pools = list(self._pools)
        for pool in pools:
            pool.break_off()

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            connections, self._idle = self._idle, []
        for connection in connections:
            connection.close()

    def read(self, path: str, most_bytes: int) -> bytearray:
        """GET a message that may be long, such as a manifest, and return its body.

        Raises:
            BadRequest: the message has more than `most_bytes` bytes.
            TransferStalled, ServerUnreachable: the network failed.
        """
        body = bytearray()

        def fetch(connection: PartConnection, _: Part) -> None:
            body.clear()
            status, problem, runs = connection.get(self._http.target(path), self._http.headers(), most_bytes)
            self._require(status, 200, problem)
            for run in runs:
                body.extend(run)

        self._spread(fetch, [Part(0, 0, 0, ())])
        return body

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
        """Download parts of a file. A part is requested again if it arrives damaged or its connection breaks.

        Args:
            path: URL path of the file: a version or an object, which never changes.
            digests: BLAKE3 of every part of the file, by index.
            parts: the parts to download.
            sinks: destinations that each get all bytes (see `Delivery`).
            into: destination in memory that gets each piece before `sinks` do; None if there is none.
            on_bytes: callback with the number of bytes received.
            on_part: callback with every complete part. Several threads call it.

        Raises:
            Gone: the server no longer has the file. If it was a version, ask the server which version is the newest.
            PartCorrupt: a part arrived damaged in the last of `PART_ATTEMPTS` attempts.
            TransferStalled, ServerUnreachable: the network failed. `on_part` was called for all complete parts.
        """

        def count(nbytes: int) -> None:
            self._http.counters.add(down=nbytes)
            on_bytes(nbytes)

        delivery = Delivery(digests, sinks, into, count, on_part)

        def fetch(connection: PartConnection, part: Part) -> None:
            arriving = PulledPart(delivery, part)
            headers = self._http.headers({"Range": f"bytes={part.start}-{part.stop - 1}"})
            status, problem, runs = connection.get(self._http.target(path), headers, part.nbytes, arriving.room)
            self._require(status, 206, problem)
            for run in runs:
                arriving.take(run)
            arriving.finish(
                f"Part {part.index} from {self._http.where} arrived damaged {PART_ATTEMPTS} times in a row.",
                DAMAGED,
            )

        self._spread(fetch, parts)

    def push(
        self,
        path_of: Callable[[int], str],
        fd: int,
        parts: Sequence[Part],
        digests: Digests,
        *,
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Upload parts of a file, each followed by its BLAKE3. Send a part again if it did not arrive intact.

        The file must not change until the server has confirmed the whole upload.

        Args:
            path_of: function of a part's index that returns the part's URL path.
            fd: descriptor of the file.
            parts: the parts to send.
            digests: BLAKE3 of the parts, by index.
            on_bytes: callback with the number of bytes sent.
        """
        with _copy_of(fd) as file:
            self._spread(
                lambda connection, part: self._send(
                    connection, path_of(part.index), file, part, digests[part.index], on_bytes
                ),
                parts,
            )

    def push_whole(
        self,
        path: str,
        fd: int,
        part: Part,
        digest: bytes,
        message: BaseModel,
        *,
        has_arrived: Callable[[], bool],
        on_bytes: Callable[[int], None] = lambda _: None,
    ) -> bytearray | None:
        """Upload a file of one part, followed by its BLAKE3 and a message. Return the answer to the message.

        If the connection breaks, the server may have the part without this side knowing. So the bytes are sent again
        only if they have not arrived.

        Args:
            path: URL path of the part.
            fd: descriptor of the file.
            part: the only part of the file.
            digest: its BLAKE3.
            message: message to send after the digest, framed.
            has_arrived: asks the server whether it has the part. If so, return None.
            on_bytes: callback with the number of bytes sent.
        """
        answers: list[bytearray | None] = []
        tries, text = itertools.count(), framed(self._http.allowed(path, message))

        def send(connection: PartConnection, part: Part) -> None:
            is_there = next(tries) > 0 and has_arrived()
            answers[:] = [None if is_there else self._send(connection, path, file, part, digest + text, on_bytes)]

        with _copy_of(fd) as file:
            self._spread(send, [part])
        return answers[0]

    @contextmanager
    def pushing(
        self, path_of: Callable[[int], str], fd: int, *, on_bytes: Callable[[int], None] = lambda _: None
    ) -> Iterator[Pushing]:
        """Upload parts of a file while the file is still being written. Inside the `with` block, call `Pushing.add`.

        The end of the block waits until the added parts are sent. If the block raises, no more parts are sent. An error
        of the upload is not raised: it ends the upload, and is stored in `Pushing.error`.

        Args:
            path_of: function of a part's index that returns the part's URL path.
            fd: descriptor of the file.
            on_bytes: callback with the number of bytes sent.
        """
        with _copy_of(fd) as file, transfer_pool(self._connections) as pool:

            def send(part: Part, digest: bytes) -> bool:
                return self._attempt(
                    lambda connection, part: self._send(connection, path_of(part.index), file, part, digest, on_bytes),
                    part,
                    pool,
                )

            pushing = Pushing(pool, send)
            yield pushing
            pool.wait()

    def _send(
        self,
        connection: PartConnection,
        path: str,
        file: Descriptor,
        part: Part,
        trailer: bytes,
        on_bytes: Callable[[int], None],
    ) -> bytearray:
        def count(nbytes: int) -> None:
            self._http.counters.add(up=nbytes)
            on_bytes(nbytes)

        http = self._http
        http.way_out.part(http.server, path, trailer[: routes.DIGEST_BYTES], part.nbytes, http.site)
        headers = http.headers({"Content-Type": "application/octet-stream"})
        with file.used() as fd:
            status, answer = connection.put(
                self._http.target(path), headers, fd, (part.start, part.stop), trailer, count
            )
        self._require(status, 204, answer)
        failpoint("push.part")
        return answer

    def _require(self, status: int, expected: int, problem: bytearray) -> None:
        """Raise an error if an answer does not have the expected status.

        Args:
            status: status of the answer.
            expected: status of success; a server may also answer 200 to a part that is not a range.
            problem: body of the answer if it is an error.
        """
        if status >= 300:
            raise self._http.problem_of(status, problem)
        if expected == 206 and status == 200:
            raise BadRequest(f"{self._http.where} ignores the header Range.", "Check for a proxy that drops it.")
        if status not in (200, expected):
            raise damaged(
                BadRequest(
                    f"{self._http.where} answered with HTTP status {status}, not {expected}.",
                    "Check which program answers at this address, and any proxy in between.",
                )
            )

    def _spread(self, work: Work, parts: Sequence[Part]) -> None:
        """Run `work` for all parts over parallel connections. Raise the first error that remains after the retries."""
        with transfer_pool(max(1, min(self._connections, len(parts)))) as pool, self._breakable(pool):
            if len(parts) <= 1:
                for part in parts:
                    self._attempt(work, part, pool)
                return
            futures = [pool.submit(self._attempt, work, part, pool) for part in parts]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception())]
            if errors:
                pool.ended.set()  # let running parts finish, so that they need not be sent again
                for future in futures:
                    future.cancel()
        if errors:
            raise errors[0]

    @contextmanager
    def _breakable(self, pool: TransferPool) -> Iterator[None]:
        """During the `with` block, end the pool's transfers if `break_off` is called.

        Raises:
            TransferAborted: `break_off` was called.
        """
        with self._lock:
            self._pools.add(pool)
            if self._broken:
                pool.break_off()
        try:
            yield
        except (ServerUnreachable, TransferStalled):
            if not self._broken:
                raise
        finally:
            with self._lock:
                self._pools.discard(pool)
        if self._broken:
            raise TransferAborted(f"The transfer with {self._http.where} was aborted.")

    def _attempt(self, work: Work, part: Part, pool: TransferPool) -> bool:
        """Transfer one part. Give up if it arrives damaged, or its connection fails, `PART_ATTEMPTS` times.

        The two are counted apart: a server that was away must not make two damaged parts end a site.

        Return False if the transfer has ended meanwhile, for example because another part has failed. If this
        connection stalls, make the next attempt only if another connection still sends or receives bytes; if all
        connections stall, end the transfer. After a stall, the bytes of this part count as progress only when the part
        is complete: the operating system accepts bytes to send even if the other side receives none.
        """
        failures, stood_still = Counter[bool](), False

        def on_move() -> None:
            if not stood_still:
                pool.moved()

        while not pool.ended.is_set():
            try:
                self._once(work, part, pool, on_move)
                return True
            except AtollError as error:
                is_damaged = isinstance(error, PartCorrupt) or error.is_damaged
                if not is_damaged and not isinstance(error, ServerUnreachable | TransferStalled):
                    pool.ended.set()
                    raise
                if pool.ended.is_set():  # this error is a consequence of another part's failure
                    return False
                self._http.counters.add(retries=1)
                is_stall = isinstance(error, TransferStalled)
                if is_stall and pool.is_silent(self._timeout_s):  # all connections stalled: end the transfer
                    pool.break_off()
                    self._has_stalled = True
                    raise
                failures[is_damaged] += 1
                if failures[is_damaged] == PART_ATTEMPTS:
                    pool.ended.set()
                    raise
                stood_still = stood_still or is_stall
            except BaseException:
                pool.ended.set()
                raise
        return False

    def _once(self, work: Work, part: Part, pool: TransferPool, on_move: Callable[[], None]) -> None:
        """Make one attempt to transfer a part. If it succeeds, keep the connection for later parts."""
        connection, losses, timeout_s = self._idle_connection(), self._http.losses, self._timeout_s
        if connection is None:
            http = self._http
            connection = PartConnection(http.host, http.port, http.context, timeout_s, http.proxy, http.require_ip)
        try:
            connection.on_move = on_move
            with pool.using(connection):
                work(connection, part)
            pool.moved()
        except NETWORK_ERRORS as error:
            connection.close()
            if is_silence(error):
                self._http.drop_idle()
            raise self._http.network_error(timeout_s, error) from error
        except BaseException:
            connection.close()
            raise
        is_patient, self._has_stalled = self._has_stalled, False
        if connection.is_cut or is_patient or losses != self._http.losses:
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)

    def _idle_connection(self) -> PartConnection | None:
        """Return a connection that is not in use; None if there is none.

        If a connection to the server has timed out since the last call, first close all unused ones: they may be dead.
        """
        with self._lock:
            losses, self._losses = self._losses, self._http.losses
            if losses != self._losses:
                for connection in self._idle:
                    connection.close()
                self._idle.clear()
            return self._idle.pop() if self._idle else None


@contextmanager
def _copy_of(fd: int) -> Iterator[Descriptor]:
    """Yield a duplicate of `fd`, so that the owner may close `fd` while a part is still being sent."""
    file = Descriptor(os.dup(fd))
    try:
        yield file
    finally:
        file.close()
