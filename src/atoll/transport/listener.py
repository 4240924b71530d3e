"""Accepts connections, but only so many that file descriptors are left for the server's own files.

A server without free descriptors cannot close a round. asyncio itself accepts any number of connections, so even
clients without a token could stop a run by opening many connections. Where clients show credentials, a connection that
has shown none yet can be closed for a newer one, so that such connections keep no site out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import socket
import ssl
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from atoll.errors import ConfigError, PortInUse
from atoll.posix import return_free_memory
from atoll.protocol import routes
from atoll.system_calls import files_limits, set_files_limit
from atoll.transport.accept_tls import accept_tls
from atoll.transport.rates import Rates, network_of
from atoll.transport.request_body import NO_INNER, BodyInterceptor
from atoll.transport.tls import ContextMaker

LOG = logging.getLogger("atoll.server")

MOST_FILES = 2**16
"""Highest limit of open files that Atoll sets. With a higher limit, each child process would take long to close all
descriptors up to the limit."""
RESERVED_FILES = 256
"""Number of descriptors reserved for tensor files, journal and exports, and for the program that embeds the server."""
FILES_OF_ONE = 2
"""Number of descriptors per connection: its socket, and a duplicate while a thread receives tensor bytes."""
KEEPALIVE_S = 75.0
"""Seconds after which a connection without a request is closed."""
STARTS_PER_S, STARTS_AT_ONCE, START_WAIT_S = 100.0, 500.0, 10.0
"""Connections without a credential of one address that are begun a second, those at once after a pause, and the longest
wait of one. A flood of TLS handshakes would otherwise take all of the server's time."""
TIME_TO_SHOW_S = 1.0
"""Seconds for which a connection without a credential is not closed for a newer one."""
TRIM_AFTER = 250
"""Number of ended connections after which free memory is returned to the system: the C library would keep it."""
PAUSE_S = 0.2
"""Seconds before the next attempt to accept a connection, if no descriptor is free."""
SAY_S = 60.0
"""Minimum seconds between two log lines about refused connections."""


def raise_files_limit() -> int:
    """Raise this process's limit of open files to `MOST_FILES`, or to the hard limit if that is lower.

    Return the limit that is now in effect.
    """
    soft, hard = files_limits()
    wanted = min(hard, MOST_FILES)
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            set_files_limit(wanted)
    return files_limit()


def files_limit() -> int:
    """Return the number of files that this process may open."""
    soft, _ = files_limits()
    return MOST_FILES if soft == sys.maxsize else soft


def connections_within(files: int) -> int:
    """Return the maximum number of simultaneous connections for a process that may open `files` files."""
    return max(16, (files - RESERVED_FILES) // FILES_OF_ONE)


def listen(host: str, ports: Sequence[int], *, setting: str, remedy: str) -> socket.socket:
    """Return a socket that listens on the first free port.

    Args:
        host: an address of this machine.
        ports: the ports to try, in this order; 0: any free port.
        setting: name of the setting or argument that `host` comes from, for error messages.
        remedy: advice for the error message if no port is free.

    Raises:
        PortInUse: none of the ports can be used: other programs use them, or this user is not allowed to.
        ConfigError: the address does not belong to this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"{setting} {host!r} is not a known address: {error.strerror}.", "Use an address of this machine."
        ) from error
    reason = ""
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart takes the same port at once
        try:
            listener.bind((address[0], port, *address[2:]))
            listener.listen(1024)
            return listener
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"{setting} {host!r} is not an address of this machine.", "Use an address of this machine."
                ) from error
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
    tried = f"{ports[0]} to {ports[-1]}" if len(ports) > 1 else ports[0]
    raise PortInUse(f"Port {tried} on {host} {reason}.", remedy)


def runner_of(app: web.Application, logger: logging.Logger, *, read_bytes: int, linger_s: float) -> web.AppRunner:
    """Return the aiohttp runner that answers requests with an application's handlers.

    Args:
        app: the aiohttp application with the routes.
        logger: logger for errors in handlers.
        read_bytes: size of aiohttp's read buffer for a request.
        linger_s: maximum seconds to wait for open requests when the runner is stopped.
    """
    app.on_response_prepare.append(_without_server_name)
    return web.AppRunner(
        app,
        access_log=None,
        logger=logger,
        handler_cancellation=True,
        read_bufsize=read_bytes,
        max_line_size=routes.HEADER_BYTES // 2,
        max_field_size=routes.HEADER_BYTES // 2,
        auto_decompress=False,  # no worker compresses bodies; an invalid one would put a traceback into the log
        keepalive_timeout=KEEPALIVE_S,
        shutdown_timeout=linger_s,
    )


async def _without_server_name(_: web.Request, response: web.StreamResponse) -> None:
    """Remove the header in which aiohttp tells every caller its version and that of Python."""
    response.headers.popall("Server", None)


async def start_listener(
    listener: socket.socket,
    runner: web.AppRunner,
    secure: ContextMaker | None,
    *,
    files: int,
    idle_timeout_s: float,
    most: int | None = None,
    most_of_address: int | None = None,
) -> Listener:
    """Begin to accept connections for a runner.

    Args:
        listener: socket that listens already.
        runner: runner that answers the requests.
        secure: returns the TLS context for a new connection; None for plain TCP.
        files: number of files that this process may open; it limits the number of connections.
        idle_timeout_s: seconds after which a peer that reads no bytes of an answer is disconnected.
        most, most_of_address: as for `Listener`; `files` limits `most`.
    """
    if runner.server is None:
        await runner.setup()
    protocol = runner.server
    assert protocol is not None

    def make() -> BodyInterceptor:
        options: dict[str, Any] = {"direct": secure is None, "idle_timeout_s": idle_timeout_s}
        if most_of_address is None:
            return BodyInterceptor(protocol(), **options)
        return BodyInterceptor(NO_INNER, **options, later=protocol)

    most = min(most or MOST_FILES, connections_within(files))
    accepting = Listener(listener, make, secure, most, most_of_address)
    accepting.open()
    return accepting


class Unproven(NamedTuple):
    """A connection that has shown no credential: when it may begin, or began, and what ends it before that."""

    since_s: float
    cancel: Callable[[], object]


class Listener:
    """Accepts connections on a listening socket, up to a maximum number at a time.

    Args:
        listener: the listening socket; `close` closes it.
        make: function that creates the asyncio protocol of a new connection.
        secure: returns the TLS context for a new connection; None for plain TCP.
        most: maximum number of connections at a time. Further connections are accepted and closed immediately.
        most_of_address: maximum number of connections of one address that have not shown a credential: for those,
            the application calls `BodyInterceptor.prove`. None: no client shows any, so all are treated alike.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], BodyInterceptor],
        secure: ContextMaker | None,
        most: int,
        most_of_address: int | None = None,
    ) -> None:
        self._listener, self._make, self._secure, self._most = listener, make, secure, most
        self._most_of_address = most_of_address
        self._unproven: dict[str, dict[BodyInterceptor, Unproven]] = {}  # address → its connections, oldest first
        self._starts = Rates(STARTS_PER_S, STARTS_AT_ONCE, START_WAIT_S)
        self._open_count = self._ended_count = 0
        self._said_s = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin to accept connections."""
        self._listener.setblocking(False)
        self._start(self._accept())

    async def close(self) -> None:
        """Stop accepting and close the listening socket. Established connections stay open."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for front in [front for mine in self._unproven.values() for front in mine if not front.has_begun]:
            front.abort()  # the runner does not know of them
        self._listener.close()

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _connection_waits(self) -> None:
        """Wait until a connection can be accepted.

        `loop.sock_accept` is not used: if cancelled, it can lose a connection.
        """
        loop = asyncio.get_running_loop()
        heard = asyncio.Event()
        loop.add_reader(self._listener, heard.set)
        try:
            await heard.wait()
        finally:
            loop.remove_reader(self._listener)

    async def _accept(self) -> None:
        while True:
            try:
                await self._connection_waits()
                sock, peer = self._listener.accept()
                sock.setblocking(False)
            except (ConnectionError, BlockingIOError, InterruptedError):  # the peer closed before the accept
                continue
            except OSError as error:  # no descriptor left, or the system can watch no more of them
                self._say("a connection could not be accepted: %s", error.strerror)
                await asyncio.sleep(PAUSE_S)
                continue
            address = network_of(str(peer[0])) if peer else ""
            if self._open_count >= self._most and not self._end_oldest(self._unproven):
                sock.close()
                self._say(
                    "there are %d connections, the most that the limit of open files (ulimit -n) or limits.connections "
                    "allows, so new ones are closed. Raise the limit, and check what connects",
                    self._open_count,
                )
                continue
            wait_s = 0.0
            if self._most_of_address is not None:
                is_full = len(self._unproven.get(address, ())) >= self._most_of_address
                fits = not is_full or self._end_oldest([address])
                if fits:  # a refused connection uses up none of its address's rate
                    wait_s, fits = self._starts.use(address)
                if not fits:
                    sock.close()
                    self._say(
                        "%s opens many connections without a credential (limits.address_connections), so new ones of "
                        "it are closed",
                        address,
                    )
                    continue
            self._open_count += 1
            front = self._make()
            task = self._start(self._serve(front, sock, wait_s))
            front.on_lost = functools.partial(self._count_end, front, address)
            if self._most_of_address is not None:
                front.on_proven = functools.partial(self._note_proof, front, address)
                self._unproven.setdefault(address, {})[front] = Unproven(time.monotonic() + wait_s, task.cancel)

    def _end_oldest(self, addresses: Iterable[str]) -> bool:
        """End the oldest connection without a credential of these addresses. Return False if none is old enough."""
        address = min(addresses, key=lambda each: next(iter(self._unproven[each].values())).since_s, default=None)
        if address is None:
            return False
        front, oldest = next(iter(self._unproven[address].items()))
        if time.monotonic() - oldest.since_s < TIME_TO_SHOW_S:
            return False
        self._forget(front, address)
        front.abort() if front.is_connected else oldest.cancel()
        return True

    def _note_proof(self, front: BodyInterceptor, address: str) -> None:
        self._forget(front, address)
        self._starts.give_back(address)

    def _forget(self, front: BodyInterceptor, address: str) -> None:
        """Count a connection no longer among those without a credential."""
        mine = self._unproven.get(address, {})
        mine.pop(front, None)
        if not mine:
            self._unproven.pop(address, None)

    async def _serve(self, front: BodyInterceptor, sock: socket.socket, wait_s: float) -> None:
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(sock.close)
                await asyncio.sleep(wait_s)
                stack.pop_all()
            if self._secure is not None:
                front.on_widen = await accept_tls(front, sock, self._secure())
                if self._most_of_address is None or front.is_proven:
                    front.on_widen()
            else:
                await asyncio.get_running_loop().connect_accepted_socket(lambda: front, sock)
        except ssl.SSLCertVerificationError as error:
            self._say("a client was refused, because its certificate is not accepted: %s", error.verify_message)
        except (OSError, EOFError) as error:  # the peer closed, or does not speak TLS
            LOG.debug("a connection failed before its first request: %s", error)
        finally:
            if not front.is_connected:
                front.on_lost()

    def _count_end(self, front: BodyInterceptor, address: str) -> None:
        self._open_count -= 1
        self._ended_count += 1
        self._forget(front, address)
        if self._ended_count >= TRIM_AFTER:
            self._ended_count = 0
            with contextlib.suppress(RuntimeError):  # the loop is closing
                asyncio.get_running_loop().run_in_executor(None, return_free_memory)

    def _say(self, text: str, value: object) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            LOG.warning(text, value)
