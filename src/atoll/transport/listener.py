"""Accept connections: as many as leave the server enough descriptors for its own files.

Connections that have shown no credential must not be able to end a run: a server that may not open another file
cannot close a round. asyncio itself accepts without a bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable, Coroutine

from aiohttp import web

from atoll.protocol import routes
from atoll.transport.receive_upload import BodyInterceptor
from atoll.transport.tls import accept_tls

LOG = logging.getLogger("atoll.server")

MOST_FILES = 2**16
"""What the limit is raised to where the system allows any number: a child that closes them all takes no time yet."""
RESERVED_FILES = 256
"""For slots, journal and exports, and for the program that the server is embedded in."""
FILES_OF_ONE = 2
"""Descriptors of a connection: its socket, and once more while a thread moves tensor bytes over it."""
KEEPALIVE_S = 75.0
"""A connection is kept for so long without a request."""
PAUSE_S = 0.2
"""Before it is tried again to accept, where the process or the system has no descriptor left."""
SAY_S = 60.0
"""In this time at most one line of the log is about refused connections."""


def raise_files_limit() -> int:
    """Let this process open as many files as the system allows; return how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return files_limit()


def files_limit() -> int:
    """Return how many files this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_FILES if soft == resource.RLIM_INFINITY else soft


def connections_within(files: int) -> int:
    """Return how many connections a process takes that may open so many files."""
    return max(16, (files - RESERVED_FILES) // FILES_OF_ONE)


def runner_of(app: web.Application, logger: logging.Logger, *, read_bytes: int, linger_s: float) -> web.AppRunner:
    """Return what answers the requests of a listener.

    Args:
        read_bytes: of a request, in memory at a time.
        linger_s: that requests have to end in, when it is stopped.
    """
    return web.AppRunner(
        app,
        access_log=None,
        logger=logger,
        handler_cancellation=True,
        read_bufsize=read_bytes,
        max_line_size=routes.HEADER_BYTES // 2,
        max_field_size=routes.HEADER_BYTES // 2,
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=linger_s,
    )


async def start_listener(
    listener: socket.socket, runner: web.AppRunner, secure: ssl.SSLContext | None, *, files: int, idle_timeout_s: float
) -> Listener:
    """Begin to accept connections for a runner, as many as go with so many open files."""
    if runner.server is None:
        await runner.setup()
    protocol = runner.server
    assert protocol is not None

    def make() -> BodyInterceptor:
        return BodyInterceptor(protocol(), direct=secure is None, idle_timeout_s=idle_timeout_s)

    accepting = Listener(listener, make, secure, connections_within(files))
    accepting.open()
    return accepting


class Listener:
    """Accepts connections on a listening socket, which it closes in the end.

    Args:
        make: the protocol of a connection.
        secure: TLS context; None for plain TCP.
        most: connections at once; one more is closed at once.
    """

    def __init__(
        self, listener: socket.socket, make: Callable[[], BodyInterceptor], secure: ssl.SSLContext | None, most: int
    ) -> None:
        self._listener, self._make, self._secure, self._most = listener, make, secure, most
        self._open_count = 0
        self._said_s = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._start(self._accept())

    async def close(self) -> None:
        """Accept no more connections; those that are open stay."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection_waits(self) -> None:
        """Wait for a connection. Not by `loop.sock_accept`, which loses a connection when it is cancelled."""
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        loop.add_reader(self._listener, heard.set)
        try:
            await heard.wait()
        finally:
            loop.remove_reader(self._listener)

    async def _accept(self) -> None:
        while True:
            await self._connection_waits()
            try:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
            except (ConnectionError, BlockingIOError, InterruptedError):  # it was closed before it was accepted
                continue
            except OSError as error:  # no descriptor left
                self._say("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE_S)
                continue
            if self._open_count >= self._most:
                sock.close()
                self._say(
                    "there are %d connections, all that the limit of open files allows: others are closed. "
                    "Raise it with ulimit -n, and check what connects.",
                    self._open_count,
                )
                continue
            self._open_count += 1
            self._start(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        front = self._make()
        front.on_lost = self._left
        try:
            if self._secure is not None:
                await accept_tls(front, sock, self._secure)
            else:
                await asyncio.get_running_loop().connect_accepted_socket(lambda: front, sock)
        except (OSError, EOFError) as error:  # it left, or does not speak TLS
            LOG.debug("a connection failed before its first request: %s", error)
        finally:
            if not front.made:
                self._left()

    def _left(self) -> None:
        self._open_count -= 1

    def _say(self, text: str, value: object) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            LOG.warning(text, value)
