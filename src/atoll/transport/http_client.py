"""The client end of the HTTP interface: typed requests. Parts of tensors travel by `part_transfer.py`.

An error that the server names is raised here as the same class; a failure of the network becomes `ServerUnreachable`
or `TransferStalled`. Nothing is retried here: the caller knows what a failure means.

Commands that answer before torch is loaded use this module, too, so it imports neither torch nor aiohttp.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

import urllib3
from pydantic import BaseModel, ValidationError

from atoll.config import DEFAULT_PORT, FIELDS, require_known
from atoll.errors import (
    BY_CODE,
    AtollError,
    BadRequest,
    Busy,
    ConfigError,
    DiskFull,
    PeerError,
    ServerUnreachable,
    StoreError,
    TransferStalled,
    UsageError,
    VersionSkew,
)
from atoll.protocol import messages, routes
from atoll.transport.tls import client_context, read_token

# -- An HTTP response that must have complete headers.
#
# The standard library takes the end of a connection for the end of the headers. A response that is cut off inside them
# then looks like one without a body, and a part of a status line like a shorter one.


class Response(http.client.HTTPResponse):
    """Raises `IncompleteRead` where the connection ends before the blank line after the headers.

    Use it as `response_class` of a connection.
    """

    def begin(self) -> None:
        """Read the status line and the headers by whole lines; the body is then read from the stream itself."""
        stream = self.fp
        lines: Any = _HeaderLines(stream)
        self.fp = lines
        try:
            super().begin()
        finally:
            self.fp = stream


class _HeaderLines:
    """Gives whole lines only. An end before the first byte is left to the caller: nothing was answered."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._begun = stream, False

    def readline(self, limit: int) -> bytes:
        line: bytes = self._stream.readline(limit)
        if len(line) < limit and not line.endswith(b"\n") and (line or self._begun):
            raise http.client.IncompleteRead(line)
        self._begun = True
        return line

    def close(self) -> None:
        self._stream.close()


# -- End calls that a silent network would hold up: packets are dropped, no connection is refused or reset.
#
# While a call is unanswered, heartbeats are sent. As long as they are answered, the call may wait: the server waits for
# other sites. Two in a row that stay unanswered mean that the network is lost; every call that began before them ends.
#
# One unanswered heartbeat is enough to distrust every older connection: the network may be back and have forgotten
# it, as a firewall does. Heartbeats on new connections are answered then, and the old call never would be. So a call
# that began before an unanswered heartbeat ends with the next answered one, and is tried again on a new connection.


class Call(Protocol):
    """One call, or one transfer."""

    @property
    def moved_s(self) -> float:
        """When it began, or when a byte of it moved last; by `time.monotonic`."""
        ...

    def give_up(self) -> None:
        """End it with an error, from another thread."""
        ...


class Watch:
    """Watches the calls to one server. Without `begin` it does nothing.

    Attributes:
        is_lost: two heartbeats in a row stayed unanswered, and nothing was answered since.
        losses: how many heartbeats stayed unanswered. A connection from before one may be half-open.
    """

    def __init__(self) -> None:
        self.is_lost, self.losses = False, 0
        self._changed = threading.Condition()
        self._calls: set[Call] = set()
        self._heard_s = time.monotonic()
        self._missed_s = -math.inf  # when a heartbeat was given up last
        self._answers: Callable[[], bool] = lambda: True
        self._every_s = 0.0
        self._thread: threading.Thread | None = None
        self._closed = False

    def begin(self, answers: Callable[[], bool], every_s: float) -> None:
        """Begin to watch.

        Args:
            answers: sends a heartbeat; returns whether it was answered, after `every_s` at the latest. Calls `missed`
                where it was not.
            every_s: how long a call may be unanswered before that.
        """
        if self._thread is None:
            self._answers, self._every_s = answers, every_s
            self._thread = threading.Thread(target=self._run, name="atoll-watch", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop watching; returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def answered(self) -> None:
        """Note that the server has answered something."""
        self._heard_s, self.is_lost = time.monotonic(), False

    def missed(self) -> None:
        """Note that a heartbeat was not answered: connections from before are no longer trusted."""
        with self._changed:
            self._missed_s = time.monotonic()
            self.losses += 1
            self._changed.notify()

    def is_back(self) -> bool:
        """Return whether the network is up; a lost one is tried with one heartbeat."""
        if self.is_lost and self._answers():
            self.answered()
        return not self.is_lost

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Within, the call is watched."""
        with self._changed:
            self._calls.add(call)
            if len(self._calls) == 1:
                self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._calls.discard(call)

    def _run(self) -> None:
        while self._wait_for_quiet():
            begin_s = time.monotonic()
            if self._try(begin_s) or self._try(begin_s):
                self._give_up(min(self._missed_s, time.monotonic() - self._every_s))
                continue
            self.is_lost = True
            self._give_up(begin_s)

    def _wait_for_quiet(self) -> bool:
        """Wait until a call has been unanswered for `every_s`; False once this is closed."""
        with self._changed:
            while not self._closed:
                if not self._calls:
                    self._changed.wait()
                    continue
                since_s = min(call.moved_s for call in self._calls)
                if since_s > self._missed_s:
                    since_s = max(self._heard_s, since_s)  # else answers on new connections say nothing of this one
                left_s = since_s + self._every_s - time.monotonic()
                if left_s <= 0:
                    return True
                self._changed.wait(left_s)
        return False

    def _try(self, begin_s: float) -> bool:
        """Send a heartbeat; returns whether it was answered, or no call waits for it any more."""
        end_s = time.monotonic() + self._every_s
        if self._answers():
            self.answered()
            return True
        with self._changed:
            self._changed.wait_for(lambda: self._closed, max(0.0, end_s - time.monotonic()))  # it may fail at once
            if self._closed:
                return True
        return self._heard_s > begin_s or not self._quiet_since(begin_s)

    def _give_up(self, since_s: float) -> None:
        """End the calls of which nothing has moved since then."""
        calls = self._quiet_since(since_s)
        with self._changed:
            self._calls.difference_update(calls)  # one that still connects ends later, and is waited for no more
        for call in calls:
            call.give_up()

    def _quiet_since(self, begin_s: float) -> list[Call]:
        with self._changed:
            return [call for call in self._calls if call.moved_s <= begin_s]


Reply = TypeVar("Reply", bound=BaseModel)

CONNECT_TIMEOUT_S = 10.0

_JSON = {"Content-Type": "application/json"}
_NETWORK_ERRORS = (urllib3.exceptions.HTTPError, OSError)


class Counters:
    """Bytes and retries of a client, for status and summaries; written by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_up = 0
        self.bytes_down = 0
        self.retries = 0

    def add(self, *, up: int = 0, down: int = 0, retries: int = 0) -> None:
        """Add bytes sent, bytes received, and attempts that were repeated; safe from any thread."""
        with self._lock:
            self.bytes_up += up
            self.bytes_down += down
            self.retries += retries


class _Waiting(threading.local):
    """The call that a thread waits for."""

    call: _Call | None = None


_waiting = _Waiting()


class _Call:
    """A call that another thread can end."""

    def __init__(self) -> None:
        self.moved_s = time.monotonic()
        self.is_given_up = False
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def hold(self, sock: socket.socket | None) -> None:
        """Note the socket that the answer comes over; None: the answer is there."""
        with self._lock:
            self._socket = sock
            self._end()

    def give_up(self) -> None:
        with self._lock:
            self.is_given_up = True
            self._end()

    def _end(self) -> None:
        if self.is_given_up and self._socket is not None:
            with suppress(OSError):
                # not a TLS socket's own method, which takes the keys away from the thread that uses them
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _HeldResponse(Response):
    """A response that lets another thread end the call that waits for it."""

    def __init__(self, sock: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        if _waiting.call is not None:
            _waiting.call.hold(sock)


class _Connection(urllib3.connection.HTTPConnection):
    response_class = _HeldResponse


class _SecureConnection(urllib3.connection.HTTPSConnection):
    response_class = _HeldResponse


class Http:
    """Control connections to one server, and what its other connections need to know.

    Args:
        server: `http://host:port` or `https://host:port`.
        token: bearer token; sent with every request, never logged.
        ca: PEM file with the server's authority.
    """

    def __init__(self, server: str, *, token: str | None = None, ca: str | None = None) -> None:
        try:
            url = urllib3.util.parse_url(server)
        except urllib3.exceptions.LocationParseError:
            url = urllib3.util.Url()
        if url.scheme not in ("http", "https") or not url.host:
            raise UsageError(
                f"{server!r} is not the address of a server.",
                "Write it as http://host:8512 or https://host:8512.",
            )
        self.host = url.host.strip("[]")
        self.port = url.port or (443 if url.scheme == "https" else 80)
        self.server = f"{url.scheme}://{url.host}:{self.port}"
        self.secure = client_context(ca) if url.scheme == "https" else None
        self.counters = Counters()
        self.lease = self.secret = ""
        self.watch = Watch()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._pool = self._new_pool()

    def close(self) -> None:
        """End the watch, and close the idle connections; one in use is closed once its call has ended."""
        self.watch.close()
        self._pool.close()

    def drop_idle(self) -> None:
        """Connect anew: a heartbeat was not answered, and a connection that was kept may be half-open."""
        self.watch.missed()
        self._pool = self._new_pool()  # the old one is not closed: a call may be about to use it

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        secure = {"ssl_context": self.secure} if self.secure else {}
        pool = urllib3.connection_from_url(self.server, maxsize=16, retries=False, **secure)
        pool.ConnectionCls = _SecureConnection if self.secure else _Connection
        return pool

    def headers(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """Return the headers of a request: the token, the lease or the secret of an object, and `more`."""
        lease = {routes.LEASE_HEADER: self.lease} if self.lease else {}
        secret = {routes.SECRET_HEADER: self.secret} if self.secret else {}
        return {**self._headers, **lease, **secret, **(more or {})}

    def get(self, path: str, reply: type[Reply], *, timeout_s: float = 30.0) -> Reply:
        """GET a typed message."""
        return self._read(self._request("GET", path, timeout_s=timeout_s), reply)

    def post(self, path: str, message: BaseModel, reply: type[Reply], *, timeout_s: float = 30.0) -> Reply:
        """POST a typed message and read the typed answer."""
        body = message.model_dump_json(exclude_defaults=True).encode()
        response = self._request("POST", path, body=body, timeout_s=timeout_s, headers=_JSON)
        return self._read(response, reply)

    def send(self, path: str, message: BaseModel, *, timeout_s: float = 30.0) -> None:
        """POST a message that is answered without a body."""
        body = message.model_dump_json(exclude_defaults=True).encode()
        self._request("POST", path, body=body, timeout_s=timeout_s, headers=_JSON)

    def reach(self, path: str, *, timeout_s: float) -> None:
        """GET a path and drop the body; an answer of 400 and above raises its error."""
        self._request("GET", path, timeout_s=timeout_s)

    def delete(self, path: str, *, timeout_s: float = 30.0) -> None:
        """DELETE what is at a path."""
        self._request("DELETE", path, timeout_s=timeout_s)

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        timeout_s: float = 30.0,
        headers: dict[str, str] | None = None,
    ) -> urllib3.BaseHTTPResponse:
        call = _waiting.call = _Call()
        try:
            with self.watch.waiting(call):
                response = self._pool.request(
                    method,
                    path,
                    body=body,
                    headers=self.headers(headers),
                    timeout=urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, timeout_s), read=timeout_s),
                )
        except _NETWORK_ERRORS as error:
            if call.is_given_up:
                raise unanswered(self.server) from error
            if path in (routes.HEARTBEAT, routes.HEALTH):
                self.drop_idle()
            raise network_error(self.server, timeout_s, error) from error
        finally:
            _waiting.call = None
            call.hold(None)
        if path in (routes.RUN, routes.STATUS):
            require_atoll(self.server, response.status, response.data)
        if response.status >= 400:
            raise problem_of(response.status, response.data)
        return response

    def _read(self, response: urllib3.BaseHTTPResponse, reply: type[Reply]) -> Reply:
        try:
            return reply.model_validate_json(response.data)
        except ValidationError as error:
            raise VersionSkew(
                f"{self.server} answered with something that is not a {reply.__name__}: {error.errors()[0]['msg']}.",
                "Look whether an Atoll server runs there, of the same version as this worker.",
            ) from error


def problem_of(status: int, body: bytes) -> AtollError:
    """Return the error that the server named, as the same class."""
    try:
        problem = messages.Problem.model_validate_json(body)
    except ValidationError:
        said = f"The server answered {status}: {body[:200].decode(errors='replace')!r}."
        if status in (502, 503, 504):  # a proxy in front of a server that is being started again
            return ServerUnreachable(said, "Look whether the server behind this address runs.")
        return PeerError(said)
    kind = BY_CODE.get(problem.code, BadRequest if status < 500 else PeerError)
    if issubclass(kind, StoreError) and kind is not DiskFull:
        kind = Busy  # its disk failed, not ours: it ends, and is there again
    error = kind(problem.message, problem.remedy)
    if problem.retry_after_s is not None:
        error.retry_after_s = problem.retry_after_s
    return error


def unanswered(server: str) -> TransferStalled:
    """Return the error of a call that was given up because heartbeats were not answered, either."""
    return TransferStalled(
        f"{server} answers neither this call nor heartbeats.", "Look at the network between the two."
    )


def network_error(server: str, timeout_s: float, error: Exception) -> AtollError:
    """Return the error that a failed connection means."""
    if isinstance(error, (urllib3.exceptions.ReadTimeoutError, TimeoutError)) and not isinstance(
        error, urllib3.exceptions.ConnectTimeoutError
    ):
        return TransferStalled(f"{server} moved no byte for {timeout_s:g} s.", "Look at the network between the two.")
    return unreachable(server, str(error), _plain(error))


def _plain(error: Exception) -> str:
    """Return the innermost cause of a urllib3 error, in a few words."""
    cause: BaseException = error
    while cause.__cause__ or cause.__context__:
        cause = cause.__cause__ or cause.__context__ or cause
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return str(cause) or type(cause).__name__


# -- Which server, by flags and environment; and one question to it, for commands.


DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"


def server_address(given: str | None) -> str:
    """Return the address of the server that a command means: its flag, else ATOLL_SERVER, else this machine.

    Raises:
        ConfigError: the environment has an unknown ATOLL_ variable.
    """
    require_known(os.environ, FIELDS)
    return given or os.environ.get("ATOLL_SERVER") or DEFAULT_SERVER


def server_of(given: str | None, *, require_server: bool = False) -> str | None:
    """Return the server that a script joins: as given, else ATOLL_SERVER; None where it trains alone.

    Raises:
        ConfigError: the environment has an unknown ATOLL_ variable, or there is no server and one is required.
    """
    require_known(os.environ, FIELDS)
    server = given or os.environ.get("ATOLL_SERVER")
    if not server and require_server:
        raise ConfigError(
            "No server is configured, and the script must not train alone (require_server).",
            "Set ATOLL_SERVER, give server=, or start the script with `atoll worker`.",
        )
    return server or None


def http_to(server: str, environ: Mapping[str, str] = os.environ) -> Http:
    """Return a client with the token and the authority that the environment names.

    Args:
        environ: where ATOLL_TOKEN_FILE and ATOLL_TLS_CA are looked up.

    Raises:
        UsageError: `server` is no address.
        ConfigError: the token or the authority cannot be read.
    """
    token_file = environ.get("ATOLL_TOKEN_FILE")
    return Http(server, token=read_token(Path(token_file) if token_file else None), ca=environ.get("ATOLL_TLS_CA"))


def ask(
    server: str, path: str, reply: type[Reply], *, timeout_s: float = 10.0, environ: Mapping[str, str] = os.environ
) -> Reply:
    """GET one typed message.

    Args:
        environ: as for `http_to`.

    Raises:
        UsageError: `server` is no address.
        ServerUnreachable: no answer within `timeout_s`, or the server's certificate is not accepted.
        AuthError: the token is missing or wrong.
        PeerError: another web server answers there. VersionSkew: another version of Atoll does.
    """
    http = http_to(server, environ)
    try:
        return http.get(path, reply, timeout_s=timeout_s)
    except TransferStalled as error:
        raise unreachable(server, "", f"no answer within {timeout_s:g} s") from error
    finally:
        http.close()


# -- Why a server cannot be reached, and what to do.


_NO_AUTHORITY = "Set ATOLL_TLS_CA to a PEM file with the authority of its certificate."
_CERTIFICATES = {
    "has expired": "Renew the certificate at the server, or check the clock of this machine.",
    "not yet valid": "Check the clocks of this machine and of the server.",
    "ostname mismatch": "Use a name that is in its certificate, or check whether this is the right server.",
    "IP address mismatch": "Use a name that is in its certificate, or check whether this is the right server.",
}
"""Part of OpenSSL's message about a certificate that it refuses → what to do; by default the authority is unknown."""


def require_atoll(server: str, status: int, body: bytes) -> None:
    """Refuse the answer of another web server; that of Atoll, or of a proxy in front of it, passes.

    Raises:
        PeerError: nothing of Atoll answers at this address.
    """
    if status in (502, 503, 504) or (status < 400 and not body):  # a proxy without its server; an answer cut off
        return
    try:
        message = json.loads(body)
    except ValueError:
        message = None
    if not isinstance(message, dict) or (status >= 400 and not {"code", "message"} <= message.keys()):
        raise PeerError(
            f"There is no Atoll server at {server}: the web server there answered with HTTP status {status}, and with "
            "nothing that Atoll knows.",
            "Check the address and its port, and whether the server runs.",
        )


def unreachable(server: str, text: str, why: str) -> ServerUnreachable:
    """Return the error that says why a server cannot be reached.

    Args:
        text: all that the failed connection said.
        why: the same in a few words.
    """
    if "CERTIFICATE_VERIFY_FAILED" in text:
        remedy = next((remedy for part, remedy in _CERTIFICATES.items() if part in text), _NO_AUTHORITY)
        return _other(f"{server} cannot prove that it is the server: {why}.", remedy)
    if "WRONG_VERSION_NUMBER" in text:
        return _other(
            f"{server} does not speak TLS.",
            "Write its address with http:// if the network is your own, or set network.tls_cert and network.tls_key at "
            "the server.",
        )
    return ServerUnreachable(
        f"{server} does not answer ({why}).",
        "Check whether the server runs and whether the address is right (--server, ATOLL_SERVER)."
        + (
            " A server with TLS needs https://." if server.startswith("http://") and "Remote end closed" in text else ""
        ),
    )


def _other(message: str, remedy: str) -> ServerUnreachable:
    error = ServerUnreachable(message, remedy)
    error.is_other = True
    return error
