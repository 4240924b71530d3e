"""Parts of tensors between a worker and its server: over a few parallel connections, only what is missing.

Ctrl-C reaches the main thread alone, and most often while it waits here. The threads must then neither go on with
files that are about to be closed, nor keep the process alive until a network that stands still has timed out.

A part that arrives damaged, or whose connection breaks, is sent again, alone; what lasts is raised to the caller.
Whoever is interrupted in here leaves no thread behind that still moves bytes; and one that a second interrupt leaves
behind has a descriptor of its own: it never reads another file than the one it was given.
"""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import Any, ParamSpec, Protocol, TypeVar

from blake3 import blake3

from atoll.errors import AtollError, BadRequest, PartCorrupt, ServerUnreachable, TransferAborted, TransferStalled
from atoll.failpoints import failpoint
from atoll.posix import Descriptor
from atoll.protocol import routes
from atoll.tensors.layout import Part
from atoll.transport.http_client import Http, network_error, problem_of, unanswered
from atoll.transport.part_connection import PartConnection

P = ParamSpec("P")
R = TypeVar("R")


class TransferPool:
    """The threads of one transfer. Made by `transfer_pool`.

    Attributes:
        ended: no part is begun once it is set.
        is_given_up: the network was lost while it waited.
    """

    def __init__(self, size: int) -> None:
        self.ended = threading.Event()
        self._pool = ThreadPoolExecutor(size, thread_name_prefix="atoll-part")
        self._futures: list[Future[Any]] = []
        self._lock = threading.Lock()
        self._in_use: set[PartConnection] = set()
        self._cut = False
        self.is_given_up = False
        self.moved_s = time.monotonic()

    def moved(self) -> None:
        """Something of the transfer has moved."""
        self.moved_s = time.monotonic()

    def is_silent(self, idle_timeout_s: float) -> bool:
        """Whether nothing of the transfer has moved for so long, over any connection."""
        return time.monotonic() - self.moved_s >= idle_timeout_s

    def submit(self, work: Callable[P, R], *args: P.args, **more: P.kwargs) -> Future[R]:
        future = self._pool.submit(work, *args, **more)
        self._futures.append(future)
        return future

    @contextmanager
    def using(self, connection: PartConnection) -> Iterator[None]:
        """Within, the connection ends when this pool is cut."""
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
        """Until everything that was submitted is done."""
        # not by the threads' `join`: once interrupted, it takes a thread that still runs for one that has ended
        wait([future for future in self._futures if not future.cancelled()])
        self._pool.shutdown()

    def break_off(self) -> None:
        """No part is begun, those on their way break off; from any thread, and without waiting for them."""
        self.ended.set()
        with self._lock:
            self._cut = True
            for connection in self._in_use:
                connection.cut()

    def give_up(self) -> None:
        """As `break_off`, because the network is lost."""
        self.is_given_up = True
        self.break_off()

    def cut(self) -> None:
        """End at once: no part is begun, those on their way break off; returns when every thread has ended."""
        self.break_off()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.wait()


@contextmanager
def transfer_pool(size: int) -> Iterator[TransferPool]:
    """Threads for the block; it is left when they are done, or cut off where it is left by an exception."""
    pool = TransferPool(size)
    try:
        yield pool
        pool.wait()
    except BaseException:
        pool.cut()
        raise


Digests = Mapping[int, bytes] | Sequence[bytes]
"""Index of a part → its BLAKE3."""

Look = Callable[[list[Part]], None]
"""Takes from the list what has arrived, before what is left is tried again."""

Recorded = Callable[[Mapping[int, bytes]], Collection[int]]
"""Asks the server which of these parts it has, with these digests."""


class Pushing:
    """Parts on their way while the file is still being written. `HttpTransfer.pushing` gives it.

    Attributes:
        sent: indices of the parts that the server has.
        error: what ended the sending; None while nothing has.
        ended: nothing more is sent once it is set.
    """

    def __init__(self, pool: TransferPool, send: Callable[[list[Part], dict[int, bytes]], bool], most: int) -> None:
        self.sent: set[int] = set()
        self.error: BaseException | None = None
        self.ended = pool.ended
        self._pool, self._do, self._most = pool, send, most
        self._waiting: list[Part] = []  # for those that follow, to go in one request
        self._digests: dict[int, bytes] = {}  # of those

    def add(self, part: Part, digest: bytes) -> None:
        """`part` is in the file and will not change; `digest` is its BLAKE3."""
        if self._waiting and self._waiting[-1].index + 1 != part.index:
            self.flush()
        self._waiting.append(part)
        self._digests[part.index] = digest
        if len(self._waiting) == self._most:
            self.flush()

    def flush(self) -> None:
        """Send what waits for more."""
        run, self._waiting = self._waiting, []
        digests, self._digests = self._digests, {}
        if run and not self.ended.is_set():
            self._pool.submit(self._send, run, digests)

    def _send(self, run: list[Part], digests: dict[int, bytes]) -> None:
        try:
            if self._do(run, digests):
                self.sent.update(digests)
        except BaseException as error:  # whoever asks finds it in `error`
            self.error = self.error or error


def lacking(recorded: Recorded | None, digests: Digests) -> Look | None:
    """Leaves in a list what the server lacks, of parts whose request failed somewhere in it."""
    if recorded is None:
        return None

    def look(todo: list[Part]) -> None:
        with suppress(AtollError):  # the next attempt tells the same
            has = recorded({part.index: digests[part.index] for part in todo})
            todo[:] = [part for part in todo if part.index not in has]

    return look


PART_ATTEMPTS = 4
_NETWORK_ERRORS = (OSError, http.client.HTTPException)

Work = Callable[[PartConnection, list[Part]], None]
"""Moves parts over a connection, and takes from the list what has arrived."""


class Sink(Protocol):
    """Takes the bytes of a file at their offsets, from several threads."""

    def write(self, offset: int, data: memoryview) -> None: ...


class Memory(Sink, Protocol):
    """A sink in memory, of which much can be filled without a scratch."""

    def room(self, offset: int, nbytes: int) -> memoryview | None:
        """Where at most `nbytes` of the file belong from `offset` on, in whole elements; None: `write` them."""
        ...


class HttpTransfer:
    """Pulls and pushes parts for one worker.

    Args:
        http: says where the server is, who asks, and counts.
        connections: parallel ones.
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
        """From another thread: what is on its way ends with `TransferAborted`, and so does all that comes later."""
        with self._lock:
            self._broken = True
            pools = list(self._pools)
        for pool in pools:
            pool.break_off()

    def close(self) -> None:
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
        held = bytearray()

        def fetch(connection: PartConnection, todo: list[Part]) -> None:
            held.clear()
            status, body, runs = connection.get(path, self._http.headers())
            if status >= 300:
                raise problem_of(status, body)
            for run in runs:
                if len(held) + len(run) > most_bytes:
                    raise BadRequest(f"{self._http.server} sends a message of more than {most_bytes} bytes.")
                held.extend(run)
            todo.clear()

        self._spread(fetch, [[Part(0, 0, 0, ())]])
        return held

    def pull(
        self,
        path: str,
        digests: Sequence[bytes],
        parts: Sequence[Part],
        sinks: Sequence[Sink],
        *,
        into: Memory | None = None,
        on_bytes: Callable[[int], None] | None = None,
        on_part: Callable[[Part], None] | None = None,
    ) -> None:
        """Fetch parts of a file by byte range into every sink; one that arrives damaged is fetched again, alone.

        Args:
            path: of the bytes of a version or an object; it never means anything else.
            digests: BLAKE3 of every part of it, by index.
            parts: those wanted.
            sinks: each gets the same bytes at their file offsets, whole elements at a time.
            into: gets them too, before the others, and large runs without a copy.
            on_part: told of every part that is whole, from several threads.

        Raises:
            Gone: the server no longer keeps it; of a version, ask for the head again.
            TransferStalled, ServerUnreachable: the network; parts that are complete stay written.
        """

        def fetch(connection: PartConnection, todo: list[Part]) -> None:
            first, last = todo[0], todo[-1]
            offset, received = first.start, False  # whether the run is where it belongs

            def room(scratch: memoryview) -> memoryview:
                nonlocal received
                most = min(len(scratch), todo[0].stop - offset)
                memory = into.room(offset, most) if into is not None else None
                received = memory is not None
                return scratch[:most] if memory is None else memory

            asked = self._http.headers({"Range": f"bytes={first.start}-{last.stop - 1}"})
            status, body, runs = connection.get(path, asked, room)
            if status >= 300:
                raise problem_of(status, body)
            if status != 206:
                raise TransferStalled(f"{self._http.server} sends whole files only.", "A proxy drops the Range header.")
            hasher = blake3()

            def end_part() -> None:
                nonlocal hasher
                part = todo[0]
                if hasher.digest() != digests[part.index]:
                    raise PartCorrupt(
                        f"Part {part.index} from {self._http.server} arrived damaged {PART_ATTEMPTS} times.",
                        "Look at the network.",
                    )
                failpoint("pull.part")
                del todo[0]
                if on_part:
                    on_part(part)
                hasher = blake3()

            for run in runs:
                hasher.update(run)
                if into is not None and not received:
                    into.write(offset, run)
                for sink in sinks:
                    sink.write(offset, run)
                offset += len(run)
                self._http.counters.add(down=len(run))
                if on_bytes:
                    on_bytes(len(run))
                if offset == todo[0].stop:
                    end_part()
            if todo:  # less came than was asked for
                end_part()

        self._spread(fetch, self._runs(parts))

    def push(
        self,
        path_of: Callable[[int], str],
        fd: int,
        parts: Sequence[Part],
        digests: Digests,
        *,
        on_bytes: Callable[[int], None] | None = None,
        recorded: Recorded | None = None,
    ) -> None:
        """Send parts of the file `fd`, each followed by its BLAKE3; what did not arrive is sent again.

        The file must not change before the server has said that it has all of it.

        Args:
            recorded: where it can be asked, parts that follow each other go in one request; one that fails is followed
                by the question, and only what the server lacks is sent again. None: each goes alone.
        """
        with _copy_of(fd) as file:
            self._spread(
                lambda connection, todo: self._send(connection, path_of, file, todo, digests, on_bytes),
                self._runs(parts) if recorded else [[part] for part in parts],
                lacking(recorded, digests),
            )

    @contextmanager
    def pushing(
        self,
        path_of: Callable[[int], str],
        fd: int,
        count: int,
        recorded: Recorded,
        *,
        on_bytes: Callable[[int], None] | None = None,
    ) -> Iterator[Pushing]:
        """Send parts of the file `fd` while it is still being written; to add one never waits.

        What fails is not raised: it ends the sending, and `Pushing.error` has it. On leaving, what was added is sent;
        left by an exception, nothing more is.

        Args:
            count: parts that will be added.
            recorded: as for `push`.
        """
        with _copy_of(fd) as file, transfer_pool(self._connections) as pool:

            def send(run: list[Part], digests: dict[int, bytes]) -> bool:
                return self._attempt(
                    lambda connection, todo: self._send(connection, path_of, file, todo, digests, on_bytes),
                    run,
                    pool,
                    lacking(recorded, digests),
                )

            pushing = Pushing(pool, send, self._at_once(count))
            with self._http.watch.waiting(pool):
                yield pushing
                pushing.flush()
                pool.wait()
        if pool.is_given_up:
            pushing.error = pushing.error or unanswered(self._http.server)

    def _send(
        self,
        connection: PartConnection,
        path_of: Callable[[int], str],
        file: Descriptor,
        todo: list[Part],
        digests: Digests,
        on_bytes: Callable[[int], None] | None,
    ) -> None:
        def sent(count: int) -> None:
            self._http.counters.add(up=count)
            if on_bytes:
                on_bytes(count)

        spans = [(part.start, part.stop, digests[part.index]) for part in todo]
        headers = self._http.headers({"Content-Type": "application/octet-stream"})
        with file.used() as fd:
            status, body = connection.put(path_of(todo[0].index), headers, fd, spans, sent)
        if status >= 300:
            raise problem_of(status, body)
        failpoint("push.part")
        todo.clear()

    def _at_once(self, count: int) -> int:
        """Parts of one request, out of so many; so few that every connection has its turn twice."""
        return max(1, min(routes.PARTS_AT_ONCE, count // (2 * self._connections)))

    def _runs(self, parts: Sequence[Part]) -> list[list[Part]]:
        """Parts that follow each other in the file, together."""
        most = self._at_once(len(parts))
        runs: list[list[Part]] = []
        for part in parts:
            if runs and runs[-1][-1].stop == part.start and len(runs[-1]) < most:
                runs[-1].append(part)
            else:
                runs.append([part])
        return runs

    def _spread(self, work: Work, runs: Sequence[list[Part]], look: Look | None = None) -> None:
        """Run `work` for all parts over the connections; the first lasting failure ends it, and is raised."""
        with transfer_pool(max(1, min(self._connections, len(runs)))) as pool, self._breakable(pool):
            if len(runs) <= 1:
                for todo in runs:
                    self._attempt(work, todo, pool, look)
                return
            futures: list[Future[bool]] = [pool.submit(self._attempt, work, todo, pool, look) for todo in runs]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            errors = [error for future in done if (error := future.exception())]
            if errors:
                pool.ended.set()  # those on their way may still arrive, and need not be sent again
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

    def _attempt(self, work: Work, todo: list[Part], pool: TransferPool, look: Look | None = None) -> bool:
        """Do these parts, with a few attempts for each; False, and not all done, where another has failed for good.

        A connection that stands still is tried again as long as others move. What it moves then counts once it has
        brought a part: buffers take bytes for a peer that is silent, too.
        """
        failures, stood_still, left = 0, False, len(todo)

        def on_move() -> None:
            if not stood_still or len(todo) < left:
                pool.moved()

        while todo and not pool.ended.is_set():
            left = len(todo)
            try:
                self._once(work, todo, pool, on_move)
            except (PartCorrupt, ServerUnreachable, TransferStalled) as error:
                if pool.ended.is_set():  # a consequence of what has failed elsewhere
                    return False
                self._http.counters.add(retries=1)
                stalled = isinstance(error, TransferStalled)
                if stalled and pool.is_silent(self._idle_timeout_s):  # it is asked nothing more
                    pool.break_off()
                    raise
                if look is not None and len(todo) > 1:
                    look(todo)
                failures = failures + 1 if len(todo) == left else 1
                if failures == PART_ATTEMPTS:
                    pool.ended.set()
                    raise
                stood_still = stalled or (stood_still and len(todo) == left)
            except BaseException:
                pool.ended.set()
                raise
        return not todo

    def _once(self, work: Work, todo: list[Part], pool: TransferPool, on_move: Callable[[], None]) -> None:
        """One attempt on a connection, which is kept only if all went well: else its state is not known."""
        connection, losses = self._idle_connection(), self._http.watch.losses
        if connection is None:
            connection = PartConnection(self._http.host, self._http.port, self._http.secure, self._idle_timeout_s)
        try:
            connection.on_move = on_move
            with pool.using(connection):
                work(connection, todo)
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
