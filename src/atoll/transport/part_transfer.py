"""Parts of tensors between a worker and its server, resumed uploads too: over a few parallel connections.

Only the parts that the caller names move; of an upload `worker/exchange/exchange` says which the server lacks.

Ctrl-C reaches the main thread alone, and most often while it waits here. The threads must then neither go on with
files that are about to be closed, nor keep the process alive until a network that stands still has timed out. A call
that is interrupted leaves no thread behind that moves bytes; a thread that a second interrupt leaves behind has a
descriptor of its own, so it never reads another file than the one it was given.

A part that arrives damaged, or loses its connection, is sent again, alone; an error that lasts is raised.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

from blake3 import blake3

from atoll.errors import BadRequest, PartCorrupt, ServerUnreachable, TransferAborted, TransferStalled
from atoll.posix import Descriptor
from atoll.runtime import failpoint
from atoll.tensors.layout import Part
from atoll.transport.http_client import Http, network_error, problem_of, unanswered
from atoll.transport.part_connection import PartConnection

P = ParamSpec("P")
R = TypeVar("R")

Digests = Mapping[int, bytes] | Sequence[bytes]
"""Index of a part → its BLAKE3."""

PART_ATTEMPTS = 4
_NETWORK_ERRORS = (OSError, http.client.HTTPException)


# -- The threads of one transfer.


class TransferPool:
    """The threads of one transfer, made by `transfer_pool`.

    Attributes:
        ended: no part is begun once it is set.
        is_given_up: the network was lost while the transfer waited.
        moved_s: when a byte moved last; by `time.monotonic`.
    """

    def __init__(self, size: int) -> None:
        self.ended = threading.Event()
        self.is_given_up = False
        self.moved_s = time.monotonic()
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="atoll-part")
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._in_use: set[PartConnection] = set()
        self._cut = False

    def moved(self) -> None:
        """Note that bytes of the transfer have moved."""
        self.moved_s = time.monotonic()

    def is_silent(self, idle_timeout_s: float) -> bool:
        """Return whether no byte has moved for so long, over any connection."""
        return time.monotonic() - self.moved_s >= idle_timeout_s

    def submit(self, work: Callable[P, R], *args: P.args, **more: P.kwargs) -> Future[R]:
        """Run `work` in a thread."""
        future = self._pool.submit(work, *args, **more)
        self._futures.append(future)
        return future

    @contextmanager
    def using(self, connection: PartConnection) -> Iterator[None]:
        """Within, the connection ends when the pool is cut."""
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
        """Wait until everything that was submitted is done."""
        # not by the threads' `join`: once interrupted, it takes a thread that still runs for one that has ended
        wait([future for future in self._futures if not future.cancelled()])
        self._pool.shutdown()

    def break_off(self) -> None:
        """Begin no part, and break off those under way; from any thread, without waiting for them."""
        self.ended.set()
        with self._lock:
            self._cut = True
            for connection in self._in_use:
                connection.cut()

    def give_up(self) -> None:
        """Break off because the network is lost."""
        self.is_given_up = True
        self.break_off()

    def cut(self) -> None:
        """Break off, and return when every thread has ended."""
        self.break_off()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.wait()


@contextmanager
def transfer_pool(size: int) -> Iterator[TransferPool]:
    """Give threads for the block, which ends when they are done; left by an exception, they are cut off."""
    pool = TransferPool(size)
    try:
        yield pool
        pool.wait()
    except BaseException:
        pool.cut()
        raise


# -- Where the bytes of parts go.


class Sink(Protocol):
    """Takes the bytes of a file at their offsets, from several threads."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data` at the file's byte `offset`; its memory is used again once this has returned."""
        ...


class Memory(Sink, Protocol):
    """A sink in memory, most of which can be filled in place."""

    def room(self, offset: int, nbytes: int) -> memoryview | None:
        """Return where at most `nbytes` of the file belong from `offset` on, in whole elements; None: `write` them."""
        ...


@dataclass(frozen=True)
class Delivery:
    """Where the bytes of parts go, whichever way they come.

    Attributes:
        digests: BLAKE3 of every part of the file, by index.
        sinks: each gets the same bytes at their file offsets, whole elements at a time.
        into: gets them, too, before the others, and large runs without a copy.
        on_bytes: called with the count of what came.
        on_part: called with every part that is complete, from several threads.
    """

    digests: Sequence[bytes]
    sinks: Sequence[Sink]
    into: Memory | None = None
    on_bytes: Callable[[int], None] = lambda _: None
    on_part: Callable[[Part], None] = lambda _: None


@dataclass
class PulledPart:
    """One part on its way to where a delivery goes: `room`, fill it, `take`, until it is complete; then `finish`."""

    delivery: Delivery
    part: Part
    offset: int = 0
    _in_place: bool = False
    _hasher: Any = field(default_factory=blake3)

    def __post_init__(self) -> None:
        self.offset = self.part.start

    @property
    def is_complete(self) -> bool:
        """Whether all of its bytes were taken; only `finish` checks them."""
        return self.offset == self.part.stop

    def room(self, scratch: memoryview) -> memoryview:
        """Return the memory to fill with the next bytes: in place, or some of the scratch."""
        most, into = min(len(scratch), self.part.stop - self.offset), self.delivery.into
        memory = into.room(self.offset, most) if into is not None else None
        self._in_place = memory is not None
        return scratch[:most] if memory is None else memory

    def take(self, run: memoryview) -> None:
        """Pass on what was filled in."""
        self._hasher.update(run)
        if self.delivery.into is not None and not self._in_place:
            self.delivery.into.write(self.offset, run)
        for sink in self.delivery.sinks:
            sink.write(self.offset, run)
        self.offset += len(run)
        self.delivery.on_bytes(len(run))

    def finish(self, damaged: str, remedy: str) -> None:
        """Check the part against its digest.

        Raises:
            PartCorrupt: it is damaged, or less came than it has.
        """
        if self._hasher.digest() != self.delivery.digests[self.part.index]:
            raise PartCorrupt(damaged, remedy)
        failpoint("pull.part")
        self.delivery.on_part(self.part)


# -- Parts over HTTP.


class Pushing:
    """Parts that are sent while the file is still being written. `HttpTransfer.pushing` gives it.

    Attributes:
        sent: indices of the parts that the server has.
        error: what ended the sending; None while nothing has.
        ended: nothing more is sent once it is set.
    """

    def __init__(self, pool: TransferPool, send: Callable[[Part, bytes], bool]) -> None:
        self.sent: set[int] = set()
        self.error: BaseException | None = None
        self.ended = pool.ended
        self._pool, self._do = pool, send

    def add(self, part: Part, digest: bytes) -> None:
        """Send `part`, which is in the file and will not change; `digest` is its BLAKE3. Never waits."""
        if not self.ended.is_set():
            self._pool.submit(self._send, part, digest)

    def _send(self, part: Part, digest: bytes) -> None:
        try:
            if self._do(part, digest):
                self.sent.add(part.index)
        except BaseException as error:  # kept for the thread that asks
            self.error = self.error or error


Work = Callable[[PartConnection, Part], None]
"""Moves a part over a connection."""


class HttpTransfer:
    """Pulls and pushes parts for one worker.

    Args:
        http: the server, the credentials, the counters.
        connections: how many in parallel.
        idle_timeout_s: a transfer that moves no byte for so long has failed.
    """

    def __init__(self, http: Http, connections: int, idle_timeout_s: float) -> None:
        self._http, self._connections, self._idle_timeout_s = http, connections, idle_timeout_s
        self._idle: list[PartConnection] = []
        self._losses = 0
        self._pools: set[TransferPool] = set()
        self._broken = False
        self._lock = threading.Lock()

    def break_off(self) -> None:
        """End what is under way, and all that comes later, with `TransferAborted`; from another thread."""
        with self._lock:
            self._broken = True
            pools = list(self._pools)
        for pool in pools:
            pool.break_off()

    def close(self) -> None:
        """Close the connections that are kept."""
        with self._lock:
            connections, self._idle = self._idle, []
        for connection in connections:
            connection.close()

    def read(self, path: str, most_bytes: int) -> bytearray:
        """GET a message that may be long, over a connection for parts.

        Raises:
            BadRequest: it has more than `most_bytes`; no more of it was read.
            TransferStalled, ServerUnreachable: the network.
        """
        body = bytearray()

        def fetch(connection: PartConnection, _: Part) -> None:
            body.clear()
            status, problem, runs = connection.get(path, self._http.headers())
            if status >= 300:
                raise problem_of(status, problem)
            for run in runs:
                if len(body) + len(run) > most_bytes:
                    raise BadRequest(f"{self._http.server} sends a message of more than {most_bytes} bytes.")
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
        """Fetch parts of a file by byte range; one that arrives damaged is fetched again, alone.

        Args:
            path: of the bytes of a version or an object; it never means other bytes.
            parts: those wanted.
            digests, sinks, into, on_bytes, on_part: as in `Delivery`.

        Raises:
            Gone: the server no longer keeps it; of a version, ask for the head again.
            TransferStalled, ServerUnreachable: the network; parts that are complete stay written.
        """

        def count(nbytes: int) -> None:
            self._http.counters.add(down=nbytes)
            on_bytes(nbytes)

        delivery = Delivery(digests, sinks, into, count, on_part)

        def fetch(connection: PartConnection, part: Part) -> None:
            arriving = PulledPart(delivery, part)
            asked = self._http.headers({"Range": f"bytes={part.start}-{part.stop - 1}"})
            status, problem, runs = connection.get(path, asked, arriving.room)
            if status >= 300:
                raise problem_of(status, problem)
            if status != 206:
                raise BadRequest(f"{self._http.server} sends whole files only.", "A proxy drops the Range header.")
            for run in runs:
                arriving.take(run)
            arriving.finish(
                f"Part {part.index} from {self._http.server} arrived damaged {PART_ATTEMPTS} times.",
                "Look at the network.",
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
        """Send parts of the file `fd`, each followed by its BLAKE3; what did not arrive is sent again.

        The file must not change before the server has said that it has all of it.

        Args:
            path_of: index of a part → its path.
        """
        with _copy_of(fd) as file:
            self._spread(
                lambda connection, part: self._send(
                    connection, path_of(part.index), file, part, digests[part.index], on_bytes
                ),
                parts,
            )

    @contextmanager
    def pushing(
        self, path_of: Callable[[int], str], fd: int, *, on_bytes: Callable[[int], None] = lambda _: None
    ) -> Iterator[Pushing]:
        """Send parts of the file `fd` while it is still being written.

        A failure is not raised: it ends the sending, and `Pushing.error` has it. On leaving the block, what was added
        is sent; left by an exception, nothing more is.
        """
        with _copy_of(fd) as file, transfer_pool(self._connections) as pool:

            def send(part: Part, digest: bytes) -> bool:
                return self._attempt(
                    lambda connection, part: self._send(connection, path_of(part.index), file, part, digest, on_bytes),
                    part,
                    pool,
                )

            pushing = Pushing(pool, send)
            with self._http.watch.waiting(pool):
                yield pushing
                pool.wait()
        if pool.is_given_up:
            pushing.error = pushing.error or unanswered(self._http.server)

    def _send(
        self,
        connection: PartConnection,
        path: str,
        file: Descriptor,
        part: Part,
        digest: bytes,
        on_bytes: Callable[[int], None],
    ) -> None:
        def count(nbytes: int) -> None:
            self._http.counters.add(up=nbytes)
            on_bytes(nbytes)

        headers = self._http.headers({"Content-Type": "application/octet-stream"})
        with file.used() as fd:
            status, problem = connection.put(path, headers, fd, (part.start, part.stop), digest, count)
        if status >= 300:
            raise problem_of(status, problem)
        failpoint("push.part")

    def _spread(self, work: Work, parts: Sequence[Part]) -> None:
        """Run `work` for all parts over the connections; the first lasting failure ends it, and is raised."""
        with transfer_pool(max(1, min(self._connections, len(parts)))) as pool, self._breakable(pool):
            if len(parts) <= 1:
                for part in parts:
                    self._attempt(work, part, pool)
                return
            futures = [pool.submit(self._attempt, work, part, pool) for part in parts]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception())]
            if errors:
                pool.ended.set()  # those under way may still arrive, and need not be sent again
                for future in futures:
                    future.cancel()
        if errors:
            raise errors[0]

    @contextmanager
    def _breakable(self, pool: TransferPool) -> Iterator[None]:
        """Within, `break_off` or a lost network ends this pool; left so, it is an error, for parts are missing."""
        with self._lock:
            self._pools.add(pool)
            if self._broken:
                pool.break_off()
        try:
            with self._http.watch.waiting(pool):
                yield
        except (ServerUnreachable, TransferStalled):
            if not self._broken:
                raise
        finally:
            with self._lock:
                self._pools.discard(pool)
        if self._broken:
            raise TransferAborted(f"The transfer with {self._http.server} was told to stop.")
        if pool.is_given_up:
            raise unanswered(self._http.server)

    def _attempt(self, work: Work, part: Part, pool: TransferPool) -> bool:
        """Do one part, in a few attempts; return False where another part has failed for good.

        A connection that stands still is tried again as long as others move. What it moves then counts only once it
        has brought the part: buffers take bytes for a silent peer, too.
        """
        failures, stood_still = 0, False

        def on_move() -> None:
            if not stood_still:
                pool.moved()

        while not pool.ended.is_set():
            try:
                self._once(work, part, pool, on_move)
                return True
            except (PartCorrupt, ServerUnreachable, TransferStalled) as error:
                if pool.ended.is_set():  # a consequence of what has failed elsewhere
                    return False
                self._http.counters.add(retries=1)
                is_stall = isinstance(error, TransferStalled)
                if is_stall and pool.is_silent(self._idle_timeout_s):  # no connection is tried any more
                    pool.break_off()
                    raise
                failures += 1
                if failures == PART_ATTEMPTS:
                    pool.ended.set()
                    raise
                stood_still = stood_still or is_stall
            except BaseException:
                pool.ended.set()
                raise
        return False

    def _once(self, work: Work, part: Part, pool: TransferPool, on_move: Callable[[], None]) -> None:
        """One attempt on a connection, which is kept only if all went well: else its state is not known."""
        connection, losses = self._idle_connection(), self._http.watch.losses
        if connection is None:
            connection = PartConnection(self._http.host, self._http.port, self._http.secure, self._idle_timeout_s)
        try:
            connection.on_move = on_move
            with pool.using(connection):
                work(connection, part)
            pool.moved()
        except _NETWORK_ERRORS as error:
            connection.close()
            raise network_error(self._http.server, self._idle_timeout_s, error) from error
        except BaseException:
            connection.close()
            raise
        if connection.is_cut or losses != self._http.watch.losses:
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)

    def _idle_connection(self) -> PartConnection | None:
        """A connection that was kept, and none from before the network was lost."""
        with self._lock:
            losses, self._losses = self._losses, self._http.watch.losses
            if losses != self._losses:
                for connection in self._idle:
                    connection.close()
                self._idle.clear()
            return self._idle.pop() if self._idle else None


@contextmanager
def _copy_of(fd: int) -> Iterator[Descriptor]:
    """A descriptor of one's own: its owner may close `fd` while a part is still on its way."""
    file = Descriptor(os.dup(fd))
    try:
        yield file
    finally:
        file.close()
