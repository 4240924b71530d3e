"""HTTP client for messages that are pydantic models. Tensors are uploaded and downloaded by `part_transfer.py`.

If the server answers with an error, the client raises an error of the same class. A failure of the network becomes
`ServerUnreachable` or `TransferStalled`. This module never retries a request.

Commands that must answer before torch is loaded also use this module, so it imports neither torch nor aiohttp.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import urllib3
from pydantic import BaseModel

from atoll.config.bounds import DEFAULT_PORT
from atoll.errors import (
    BY_CODE,
    AtollError,
    AuthError,
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
from atoll.format_text import duration, shown, visible
from atoll.protocol import messages, routes
from atoll.protocol.read_message import read_framed, read_message
from atoll.tensors.reference import PATH, TensorRef, why_no_path
from atoll.transport.answer import SHOWN_CHARS, BadAnswer, NoHttp, Response, TooSlow
from atoll.transport.credential_store import (
    AUTHORITY,
    SiteCredential,
    authority_at,
    chosen,
    credential_at,
    enrolled_server,
    site_at,
    why_none,
)
from atoll.transport.http_proxy import Proxy, ProxyFailed, proxy_of
from atoll.transport.tls import OTHER_PEER, ContextMaker, Token, client_context, fixed, read_token, unverified_context

if TYPE_CHECKING:
    from atoll.transport.way_out import WayOut

Reply = TypeVar("Reply", bound=BaseModel)
Error = TypeVar("Error", bound=AtollError)
T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0

_JSON = {"Content-Type": "application/json"}
_PROTOCOL = {routes.PROTOCOL_HEADER: str(routes.PROTOCOL)}
NETWORK_ERRORS = (urllib3.exceptions.HTTPError, http.client.HTTPException, OSError)
"""All that is raised for a broken connection or a malformed answer. `network_error` makes an error of Atoll of it."""
THROUGH = "through "
"""What begins the name of the proxy in messages."""
TLS = "\x15\x03"
"""The first bytes of a server with TLS that answers a request without TLS."""


class Counters:
    """Counts a client's bytes and retries, for the status and summaries. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.bytes_up = 0
        self.bytes_down = 0
        self.retries = 0

    def add(self, *, up: int = 0, down: int = 0, retries: int = 0) -> None:
        """Add to the counts.

        Args:
            up: number of bytes sent.
            down: number of bytes received.
            retries: number of repeated attempts.
        """
        with self._lock:
            self.bytes_up += up
            self.bytes_down += down
            self.retries += retries


class _Connection(urllib3.connection.HTTPConnection):
    """Opens its sockets through a proxy, if there is one. urllib3's own proxies use unlimited answers.

    Attributes:
        answer: the last answer. Its body is read from here, past urllib3, which might decode it.
    """

    answer: Response

    def __init__(
        self,
        *args: Any,
        proxy_on_the_way: Proxy | None = None,
        require_ip: Callable[[str], None] = lambda _: None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._proxy_on_the_way, self._require_ip = proxy_on_the_way, require_ip

    @property
    def response_class(self) -> Callable[..., Response]:  # type: ignore[override]  # called as a class would be
        return self._begin_answer

    def _begin_answer(self, *args: Any, **options: Any) -> Response:
        self.answer = Response(*args, **options)
        return self.answer

    def _new_conn(self) -> socket.socket:
        if self._proxy_on_the_way is not None:
            return self._proxy_on_the_way.connect(self.timeout)
        sock = super()._new_conn()
        try:
            self._require_ip(sock.getpeername()[0])
        except BaseException:
            sock.close()
            raise
        return sock


class _SecureConnection(_Connection, urllib3.connection.HTTPSConnection):
    """The same with TLS. The context is that of the moment: a site's certificate may have been renewed."""

    def __init__(self, *args: Any, context: ContextMaker, **options: Any) -> None:
        super().__init__(*args, **options)
        self._context = context

    @property
    def is_connected(self) -> bool:
        """Whether it can be used again: it is open, and no newer certificate replaces the one that it has shown."""
        return super().is_connected and self._context() is self.ssl_context

    def connect(self) -> None:
        """Connect, and do the TLS handshake."""
        context = self._context()
        self.ssl_context, self.cert_reqs = context, context.verify_mode  # urllib3 would set the latter in the context
        self.assert_hostname = None if context.check_hostname else False
        super().connect()
        self.is_verified = True  # or deliberately not: without this, urllib3 prints a warning then


class Http:
    """A client that sends requests to one server.

    Args:
        server: address of the server, as `http://host:port` or `https://host:port`, with the path of a gateway if the
            server is behind one: `https://host/fl/run1`.
        token: sent with every request, never logged; None if the server needs none.
        ca: path of a PEM file with the certificate authority of the server; None: trust the system's authorities.
        environ: environment with HTTPS_PROXY and the like; if it has none, connect directly.
        require_ip: called with the IP address that a connection has reached, before the first byte is sent. If it
            raises an error, the connection is closed: a host name may lead elsewhere than when it was checked. With
            it, connect directly, because the address that a proxy reaches is not known. None: any address will do.
        credential: the site's own credential: its authority is trusted, its certificate shown, its token sent.
        context: returns the TLS context for a new connection; None: that of `credential`, or one that trusts `ca`.

    Attributes:
        server: address of the server.
        context: as the argument; None for plain HTTP.
        credential: as the argument.
        no_credential: which credentials this machine has in place of the one that is missing; empty if none is.
        require_ip: as the argument; without one, a function that does nothing.
        path: path of the server's address; empty if it has none.
        proxy: the proxy between this machine and the server; None if there is none.
        where: the server's address and the proxy, for messages.
        secure: whether connections use TLS.
        counters: counts of bytes and retries.
        lease: text of the lease (the right to act for a site) to send with every request; empty if there is none.
        secret: secret of a published object to send with every request; empty if there is none.
        date: the Date header of the last answer; empty if it had none.
        losses: number of times that a connection has timed out. Connections that are older than the last time may be
            dead, because a firewall may have forgotten them.
        on_problem: called with the error of every answer that is one, also of a part, before the error is raised.
        patience_s: upper bound of every timeout of a call or a transfer, whatever the server asks for.
    """

    def __init__(
        self,
        server: str,
        *,
        token: Token | None = None,
        ca: str | None = None,
        environ: Mapping[str, str] = os.environ,
        require_ip: Callable[[str], None] | None = None,
        credential: SiteCredential | None = None,
        context: ContextMaker | None = None,
    ) -> None:
        url = _parsed_address(server)
        self.require_ip = require_ip or (lambda _: None)
        self.secure = url.scheme == "https"
        self.host = (url.host or "").strip("[]")
        self.port = _port_of(url)
        self.path = (url.path or "").rstrip("/")
        self.where = self.server = server_in(url)
        is_direct = require_ip is not None
        self.proxy = None if is_direct else proxy_of(self.host, self.port, secure=self.secure, environ=environ)
        self.credential, self.no_credential, self.context = credential, "", context
        if self.secure and context is None:
            self.context = partial(credential.client_context, ca) if credential else fixed(client_context(ca))
        self._root, self._proxy_headers = self.path, {}
        if self.proxy is not None:
            self.where = f"{self.server} ({THROUGH}{self.proxy})"
            if not self.proxy.tunnels:
                self._root, self._proxy_headers = self.server, dict(self.proxy.headers)
        self.counters = Counters()
        self.lease = self.secret = self.date = ""
        self.patience_s = math.inf
        self.losses = 0
        self.on_problem: Callable[[AtollError], None] = lambda _: None
        self._headers = {"Authorization": f"Bearer {token.text}"} if token else {}
        self._token_origin = token.origin if token else ""
        self._way_out: WayOut | None = None
        self._pool = self._new_pool()

    def close(self) -> None:
        """Close the connections that are not in use. The others are closed when their calls end."""
        self._pool.close()

    def drop_idle(self) -> None:
        """Record that a connection has timed out, and use no idle connection any more: all of them may be dead."""
        self.losses += 1
        self._pool = self._new_pool()  # do not close the old pool: a call may be about to use it

    def _new_pool(self) -> urllib3.HTTPConnectionPool:
        options: dict[str, Any] = {"require_ip": self.require_ip}
        if self.secure:
            options["context"] = self.context
        if self.proxy is not None:
            options["proxy_on_the_way"] = self.proxy
        pool = urllib3.connection_from_url(self.server, maxsize=16, retries=False, **options)
        pool.ConnectionCls = _SecureConnection if self.secure else _Connection
        return pool

    @property
    def certificate(self) -> SiteCredential | None:
        """The site's own credential, if it is a certificate."""
        own = self.credential
        return own if own is not None and own.note.kind == "certificate" else None

    @property
    def peer_credential(self) -> SiteCredential | None:
        """The site's own certificate, if workers of a swarm know each other by it: its authority is the server's."""
        own = self.certificate
        return own if own is not None and (own.folder / AUTHORITY).exists() else None

    @property
    def way_out(self) -> WayOut:
        """What every message and part passes before it leaves this machine.

        Raises:
            ConfigError, StoreError: the site's policy or its log cannot be used.
        """
        if self._way_out is None:
            from atoll.transport.way_out import way_out  # its messages take a while, and commands that read send none

            self._way_out = way_out()
        return self._way_out

    @property
    def site(self) -> str:
        """The site of the lease; empty without one."""
        return self.lease.partition(":")[0]

    def allowed(self, path: str, message: BaseModel) -> bytes:
        """Return the text of a message for this server, as the site's policy lets it leave.

        Raises:
            ConfigError: the policy forbids it.
        """
        return self.way_out.message(self.server, path, message, getattr(message, "site", "") or self.site)

    @property
    def poll_s(self) -> float:
        """Seconds that the server may hold a long poll: well within `patience_s`."""
        return min(routes.LONG_POLL_S, self.patience_s / 2)

    def headers(self, more: dict[str, str] | None = None) -> dict[str, str]:
        """Return the headers of a request: `more`, and token, lease and object's secret if they are set."""
        lease = {routes.LEASE_HEADER: self.lease} if self.lease else {}
        secret = {routes.SECRET_HEADER: self.secret} if self.secret else {}
        own = self.credential.token if self.credential else None
        headers = {"Authorization": f"Bearer {own.text}"} if own else self._headers
        return {**_PROTOCOL, **headers, **self._proxy_headers, **lease, **secret, **(more or {})}

    def target(self, path: str) -> str:
        """Return what the first line of a request names: `path` behind the path of the server's address.

        If a proxy passes requests on, it is the whole address.
        """
        return self._root + path

    def reference(self, object_id: str, secret: str, digest: str, expires_at: int) -> TensorRef:
        """Return a reference to an object that this server keeps."""
        return TensorRef(self.host, self.port, self.secure, object_id, secret, digest, expires_at, self.path)

    def problem_of(self, status: int, body: bytes | bytearray) -> AtollError:
        """Return the error to raise for an answer with an error status, of the server or of the proxy before it."""
        if self.proxy is not None and self.proxy.answered_itself(status) and not _is_problem(body):
            return self.proxy.refusal(status).error()
        own = self.credential.token if self.credential else None
        error = problem_of(status, body, own.origin if own else self._token_origin)
        if isinstance(error, AuthError) and self.no_credential:
            error = type(error)(f"{error.message} {self.no_credential}", error.remedy)
        self.on_problem(error)
        return error

    def network_error(self, timeout_s: float, error: Exception) -> AtollError:
        """Return the error to raise for a failed connection: that of `network_error`, or one about certificates.

        Args:
            timeout_s: the timeout in seconds, for the message.
            error: one of `NETWORK_ERRORS`.
        """
        why = _why_no_tls(self, str(error)) if self.secure else None
        return why or network_error(self.where, timeout_s, error)

    def get(self, path: str, reply: type[Reply], *, timeout_s: float | None = None) -> Reply:
        """GET a path, and parse the answer as a message of class `reply`."""
        return self.fetch(path, partial(read_message, reply), reply.__name__, timeout_s=timeout_s)

    def fetch(self, path: str, read: Callable[[bytearray], T], what: str, *, timeout_s: float | None = None) -> T:
        """GET a path, and return what `read` makes of the body of the answer.

        Args:
            path: path of the request.
            read: reads the body; raises ValueError if the body is malformed.
            what: name of the message, for errors.
            timeout_s: seconds without a byte after which the call fails; None: `routes.CALL_TIMEOUT_S`.
        """
        return self._parsed(self._request("GET", path, timeout_s=timeout_s), read, what)

    def post(self, path: str, message: BaseModel, reply: type[Reply], *, timeout_s: float | None = None) -> Reply:
        """POST a message, and parse the answer as a message of class `reply`."""
        return self.message_in(self._posted(path, message, timeout_s), reply)

    def post_framed(self, path: str, message: BaseModel, reply: type[Reply]) -> tuple[Reply, memoryview]:
        """POST a message. Parse the framed answer: a message of class `reply`, and the bytes after it."""
        return self._parsed(self._posted(path, message), partial(read_framed, reply), reply.__name__)

    def message_in(self, answer: bytearray, reply: type[Reply]) -> Reply:
        """Parse the body of an answer as a message of class `reply`."""
        return self._parsed(answer, partial(read_message, reply), reply.__name__)

    def send(self, path: str, message: BaseModel, *, timeout_s: float | None = None) -> None:
        """POST a message, and ignore the body of the answer."""
        self._posted(path, message, timeout_s)

    def _posted(self, path: str, message: BaseModel, timeout_s: float | None = None) -> bytearray:
        body = self.allowed(path, message)
        return self._request("POST", path, body=body, timeout_s=timeout_s, headers=_JSON)

    def reach(self, path: str, *, timeout_s: float) -> None:
        """GET a path to check that the server answers. Ignore the body of the answer.

        If the answer is an error, raise it.
        """
        self._request("GET", path, timeout_s=timeout_s)

    def delete(self, path: str, *, timeout_s: float | None = None) -> None:
        """DELETE the resource at a path."""
        self._request("DELETE", path, timeout_s=timeout_s)

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        timeout_s: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> bytearray:
        """Make a request, and return the body of the answer. If the answer is an error, raise it."""
        timeout_s = min(timeout_s or routes.CALL_TIMEOUT_S, self.patience_s)
        try:
            status, answer = self._answer(method, path, body, headers, timeout_s)
        except NETWORK_ERRORS as error:
            if is_silence(error):
                self.drop_idle()
            raise self._named(path, self.network_error(timeout_s, error)) from error
        is_passed_on = self.proxy is None or not self.proxy.answered_itself(status)
        if path in (routes.RUN, routes.STATUS) and is_passed_on:
            require_atoll(self.where, status, answer)
        if status >= 400:
            raise self.problem_of(status, answer)
        return answer

    def _answer(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str] | None, timeout_s: float
    ) -> tuple[int, bytearray]:
        """Make a request, and return status and body of the answer. Keep the connection for later requests."""
        response = self._pool.request(
            method,
            self.target(path),
            body=body,
            headers=self.headers(headers),
            timeout=urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, timeout_s), read=timeout_s),
            preload_content=False,
        )
        try:
            connection = response.connection
            assert isinstance(connection, _Connection)
            self.date = response.headers.get("Date", "")
            most_bytes = routes.answer_bytes(path.partition("?")[0]) if response.status < 400 else routes.PROBLEM_BYTES
            answer = connection.answer.body(most_bytes)
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return response.status, answer

    @staticmethod
    def _named(path: str, error: AtollError) -> AtollError:
        """Return a malformed answer to a worker's first question as the error of a program that is not Atoll."""
        if path not in (routes.RUN, routes.STATUS) or not isinstance(error, BadRequest):
            return error
        other = PeerError(error.message, error.remedy)
        return damaged(other) if error.is_damaged else other

    def _parsed(self, body: bytearray, read: Callable[[bytearray], T], what: str) -> T:
        try:
            return read(body)
        except ValueError as error:
            raise damaged(
                VersionSkew(
                    f"The answer of {self.where} is not a valid {what}: {error}.",
                    "Check that the address is that of an Atoll server, and use the same version of Atoll on both "
                    "sides.",
                )
            ) from None  # it may quote the answer, which may be a lease


def _port_of(url: urllib3.util.Url) -> int:
    return url.port or (443 if url.scheme == "https" else 80)


def server_in(url: urllib3.util.Url) -> str:
    """Return a server's address in the form that `Http.server` has: with its port, without a slash at the end."""
    return f"{url.scheme}://{url.host}:{_port_of(url)}{(url.path or '').rstrip('/')}"


def _parsed_address(server: str) -> urllib3.util.Url:
    """Return the parts of a server's address, with its path as it is written.

    Raises:
        UsageError: it is not an address, or has a part that an address of a server cannot have.
    """
    if not isinstance(server, str):
        raise UsageError(f"The server address is {shown(server)}, which is not text.", _FORM)
    try:
        url = urllib3.util.parse_url(server)
    except urllib3.exceptions.LocationParseError:
        url = urllib3.util.Url()
    surplus = {
        "a user name or password": url.auth,
        "a query (?…)": url.query,
        "a fragment (#…)": url.fragment,
    }
    if url.scheme not in ("http", "https") or not url.host or url.port == 0:
        # what looks like a password is not shown
        raise UsageError(f"{re.sub('//[^/]*@', '//…@', server)!r} is not a valid server address.", _FORM)
    clean = url._replace(auth=None, query=None, fragment=None).url
    for what, value in surplus.items():
        if value is not None:
            raise UsageError(
                f"The server address has {what}, which a server address cannot have.",
                f"Use {clean}." + (" A token comes from ATOLL_TOKEN_FILE or ATOLL_TOKEN." if value == url.auth else ""),
            )
    path = "".join(server.partition("//")[2].partition("/")[1:]).rstrip("/")  # parse_url changes `/a/../b` to `/b`
    if not PATH.fullmatch(path):
        raise UsageError(
            f"The path of the server address {server!r} is not valid{why_no_path(path)}.",
            "A path has at most 128 characters: letters, digits and ._~@+=:,-%. No part of it is empty, or begins with "
            "a dot.",
        )
    return url._replace(path=path)


_FORM = "Use the form http://host:8512 or https://host:8512, and behind a gateway https://host/path."


def damaged(error: Error) -> Error:
    """Mark an error as caused by an answer that may have been damaged on the way, and return it."""
    error.is_damaged = True
    return error


def problem_of(status: int, body: bytes | bytearray, token_origin: str) -> AtollError:
    """Return the error to raise for an answer with an error status. The body names the class of the error.

    Args:
        status: HTTP status, 300 or above.
        body: body of the answer.
        token_origin: where the token of the request was read; empty if it had none.
    """
    try:
        problem = read_message(messages.Problem, body)
    except ValueError:
        text = f"The server answered {status}: {body[:200].decode(errors='replace')!r}."
        if status in (502, 503, 504):  # a proxy answers while the server behind it restarts
            return ServerUnreachable(text, "Check that the server behind this address runs.")
        too_large = "Let the gateway pass bodies of 32 MiB (nginx: client_max_body_size 32m)." if status == 413 else ""
        return PeerError(text, too_large)
    kind = BY_CODE.get(problem.code, BadRequest if status < 500 else PeerError)
    if issubclass(kind, StoreError) and kind is not DiskFull:
        kind = Busy  # the server's disk has failed, not this machine's; the server may be restarted
    message, remedy = problem.message, problem.remedy
    if message == messages.WRONG_TOKEN and token_origin:  # only this side knows where it has the token from
        message, remedy = f"{message} The one in {token_origin} is not the server's.", "Use the server's token there."
    error = kind(message, remedy)
    if problem.retry_after_s is not None:
        error.retry_after_s = problem.retry_after_s
    return error


def network_error(server: str, timeout_s: float, error: Exception) -> AtollError:
    """Return the error to raise for a failed connection, or for an answer that no server of Atoll sends.

    This is `TransferStalled` if a read or write has timed out, `BadRequest` if the answer is malformed or too long,
    else `ServerUnreachable`.

    Args:
        server: address of the server, and the proxy if there is one.
        timeout_s: the timeout in seconds, for the message.
        error: one of `NETWORK_ERRORS`.
    """
    for cause in _chain(error):
        if isinstance(cause, ProxyFailed):
            return cause.error()
        if isinstance(cause, NoHttp):
            tls = cause.first_line.startswith(TLS) and server.startswith("http://")
            remedy = "A server with TLS needs https:// in its address." if tls else cause.remedy
            return damaged(_wrong_server(f"There is no Atoll server at {server}: it {cause.text}.", remedy))
        if isinstance(cause, BadAnswer):
            refused = BadRequest(f"{server} {cause.text}.", cause.remedy)
            return damaged(refused) if cause.is_damaged else refused
        if isinstance(cause, TooSlow):
            return TransferStalled(f"{server} is too slow: {cause}.", "Check the network.")
    if isinstance(error, (urllib3.exceptions.ReadTimeoutError, TimeoutError)) and not isinstance(
        error, urllib3.exceptions.ConnectTimeoutError
    ):
        return TransferStalled(f"No byte came from or went to {server} for {timeout_s:g} s.", "Check the network.")
    return unreachable(server, str(error), _plain(error))


def is_silence(error: BaseException) -> bool:
    """Return whether an error means that the network may drop packets: no byte came, not even a refusal, in time."""
    return isinstance(error, TransferStalled) or any(isinstance(cause, TimeoutError) for cause in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the error that it was raised for, and so on."""
    cause: BaseException | None = error
    for _ in range(20):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _plain(error: Exception) -> str:
    """Return a short text for the innermost cause of a urllib3 error."""
    *_, cause = _chain(error)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror.lower()
    return visible(str(cause) or type(cause).__name__, SHOWN_CHARS)


# -- For commands: the server's address from flags and environment, and a single request to it.


DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"


def _require_known_variables() -> None:
    from atoll.config import FIELDS, require_known_variables  # a slow import, without which requests do

    require_known_variables(os.environ, FIELDS)


def server_address(given: str | None, *, enrolled: bool = False) -> str:
    """Return the address of a command's server: the flag `given`, or ATOLL_SERVER, or `DEFAULT_SERVER`.

    Args:
        given: the flag.
        enrolled: whether the server at which a site of this machine has enrolled comes before `DEFAULT_SERVER`.

    Raises:
        ConfigError: the environment has an unknown ATOLL_ variable.
        UsageError: sites of this machine have enrolled at several servers.
    """
    _require_known_variables()
    address = given or os.environ.get("ATOLL_SERVER")
    return address or (enrolled_server() if enrolled else None) or DEFAULT_SERVER


def server_of(given: str | None, *, require_server: bool = False) -> str | None:
    """Return the address of the server that a script joins: `given`, ATOLL_SERVER, or that of ATOLL_CREDENTIAL.

    With none, return None: the script trains alone.

    Raises:
        ConfigError: the environment has an unknown ATOLL_ variable, or there is no server and one is required.
    """
    _require_known_variables()
    server = given or os.environ.get("ATOLL_SERVER")
    if not server and (credential := chosen()) is not None:
        server = credential.note.server
    if not server and require_server:
        raise ConfigError(
            "No server address is set, and require_server forbids training alone.",
            "Set ATOLL_SERVER, pass server=…, or start the script with `atoll worker`.",
        )
    return server or None


def enrolled_site(server: str) -> str | None:
    """Return the name of the only site of this machine that has enrolled at a server; None if there is none.

    Raises:
        UsageError: there are several, or `server` is not an address.
    """
    return site_at(server_in(_parsed_address(server)))


def http_to(
    server: str, environ: Mapping[str, str] = os.environ, token: Token | None = None, site: str | None = None
) -> Http:
    """Return a client for a server, with the credential of this machine's site, or with the token of the environment.

    With `site`, the credential that `atoll enrol` has stored for it comes before the token of the environment. Without,
    a token comes first: the admin's commands may run at a site, too.

    Args:
        server: address of the server.
        environ: environment with ATOLL_TOKEN_FILE, ATOLL_TLS_CA and proxies. ATOLL_TOKEN is always read from
            `os.environ`.
        token: the token to send in place of the one from the environment.
        site: name of the site that asks; None: a command that is no site.

    Raises:
        UsageError: `server` is not an address.
        ConfigError: the token, the certificate authority or the credential cannot be read.
    """
    origin, ca = server_in(_parsed_address(server)), environ.get("ATOLL_TLS_CA")
    credential = credential_at(origin, site or environ.get("ATOLL_SITE") or None) if token is None else None
    if token is None and (site is None or credential is None):
        token_file = environ.get("ATOLL_TOKEN_FILE")
        token = read_token(Path(token_file) if token_file else None)
        credential = credential if token is None else None
    if credential is None:
        ca = ca or authority_at(origin)
    http = Http(server, token=token, ca=ca, environ=environ, credential=credential)
    if credential is None:
        http.no_credential = why_none(origin, site)
    return http


def ask(
    server: str,
    path: str,
    reply: type[Reply],
    *,
    timeout_s: float = 10.0,
    environ: Mapping[str, str] = os.environ,
    token: Token | None = None,
    site: str | None = None,
) -> Reply:
    """GET one message from a server, with a client that is used only once.

    Args:
        server: address of the server.
        path: path of the request.
        reply: class of the answer.
        timeout_s: seconds to wait for the answer.
        environ: environment with ATOLL_TOKEN_FILE, ATOLL_TLS_CA and proxies.
        token: the token to send in place of the one from the environment.
        site: name of the site that asks, as for `http_to`.

    Raises:
        UsageError: `server` is not an address.
        ServerUnreachable: no answer within `timeout_s`, or the server's certificate is not accepted.
        AuthError: the token is missing or wrong.
        PeerError: a web server that is not Atoll answers, or the answer is malformed or too long.
        VersionSkew: the answer is not a valid `reply`; the server may have another version of Atoll.
    """
    with contextlib.closing(http_to(server, environ, token, site)) as http:
        return answer_of(http, path, reply, timeout_s)


def answer_of(http: Http, path: str, reply: type[Reply], timeout_s: float) -> Reply:
    """GET one message from a server; a server that is silent for `timeout_s` seconds is one that cannot be reached."""
    try:
        return http.get(path, reply, timeout_s=timeout_s)
    except TransferStalled as error:
        raise unreachable(http.where, "", f"no answer within {timeout_s:g} s") from error


# -- Errors that say why a server cannot be reached, and what to do.


_NO_AUTHORITY = "Set ATOLL_TLS_CA to a PEM file with the authority that signed its certificate."
_CERTIFICATES = {
    "has expired": "Renew the certificate at the server, or check the clock of this machine.",
    "not yet valid": "Check the clocks of this machine and of the server.",
    "ostname mismatch": "Use a host name that its certificate contains, or check that this is the right server.",
    OTHER_PEER: "Check ATOLL_PEER_NAME and ATOLL_PEER_HOST of the worker at this address.",
    "IP address mismatch": "Use a host name that its certificate contains, or check that this is the right server.",
}
"""Part of OpenSSL's message about a refused certificate → remedy. For other messages, the remedy is `_NO_AUTHORITY`."""


_REFUSED = re.compile(r"ALERT[ _](CERTIFICATE[ _]EXPIRED|UNKNOWN[ _]CA|BAD[ _]CERTIFICATE|CERTIFICATE[ _]\w+)", re.I)
"""What OpenSSL says when the server refuses this machine's certificate."""
_ENDED = ("reset by peer", "EOF occurred", "Remote end closed", "Broken pipe")
"""What is seen in its place if the connection ended before the refusal was read."""
CLOCK_ERROR_S = 600.0
"""Difference of two clocks, in seconds, that certificates do not allow for."""
CLOCK_TIMEOUT_S = 3.0


def _why_no_tls(http: Http, text: str) -> ServerUnreachable | None:
    """Return the error of a connection that failed because of certificates; None: for another reason, or a plain one.

    Args:
        http: the client.
        text: full error text of the failed connection.
    """
    credential = http.certificate
    note = credential.note if credential is not None else None
    refused = _REFUSED.search(text)
    if "CERTIFICATE_VERIFY_FAILED" in text and re.search("has expired|not yet valid", text):
        clocks = clock_difference(http)
        return _wrong_server(
            f"{http.where} cannot prove its identity: its certificate "
            f"{'has expired' if 'has expired' in text else 'is not valid yet'}.{clocks}",
            "Set the clock that is wrong." if clocks else "Renew the certificate at the server.",
        )
    if credential is None or note is None:
        others = why_none(http.server, None) if re.search("issuer|self.signed", text) else ""  # not: another peer
        return _wrong_server(f"{http.where} cannot prove its identity. {others}", _NO_AUTHORITY) if others else None
    until = datetime.fromtimestamp(note.expires_at_s, UTC)
    has_expired = refused is not None and "expired" in refused[1].lower()
    if has_expired or (credential.has_expired() and any(each in text for each in _ENDED)):
        return _wrong_server(
            f"{http.where} refuses the certificate of site {note.site}: it has expired. It was valid until "
            f"{until:%Y-%m-%d %H:%M} UTC."
            f"{clock_difference(http)}",
            note.anew,
        )
    if refused is not None:
        return _wrong_server(
            f"{http.where} refuses the certificate of site {note.site}: its own authority has not signed it. Either "
            "the server has a new state directory, or another server answers at this address.",
            note.anew,
        )
    if "CERTIFICATE_VERIFY_FAILED" in text and ("issuer" in text or "self-signed" in text or "self signed" in text):
        return _wrong_server(
            f"{http.where} is not the server at which site {note.site} has enrolled: another authority has signed its "
            "certificate.",
            f"Check the address. If the server has a new state directory: {note.anew[0].lower()}{note.anew[1:]}",
        )
    return None


def clock_difference(http: Http) -> str:
    """Return a sentence that says how far the clocks of this machine and of a server differ; empty if they do not.

    The server is asked without a check of its certificate, so the answer is for a message only.
    """
    plain = Http(http.server, require_ip=http.require_ip, context=unverified_context) if http.proxy is None else None
    if plain is None:
        return ""
    with contextlib.closing(plain), contextlib.suppress(AtollError):
        plain.reach(routes.AUTHORITY, timeout_s=CLOCK_TIMEOUT_S)
    try:
        ahead_s = time.time() - parsedate_to_datetime(plain.date).timestamp()
    except ValueError:
        return ""
    if abs(ahead_s) < CLOCK_ERROR_S:
        return ""
    return (
        f" The clock of this machine is {duration(abs(ahead_s))} {'ahead of' if ahead_s > 0 else 'behind'} that of the "
        "server."
    )


def require_atoll(server: str, status: int, body: bytes | bytearray) -> None:
    """Raise an error if an answer is neither from Atoll nor from a proxy in front of Atoll.

    Raises:
        PeerError: another web server answered.
    """
    if status in (502, 503, 504) or (status < 400 and not body):  # a proxy without its server, or a truncated answer
        return
    text = body.strip()
    is_object = text.startswith(b"{") and text.endswith(b"}")
    if not is_object or (status >= 400 and not _is_problem(body)):
        other = PeerError(
            f"There is no Atoll server at {server}: a web server there answered with HTTP status {status}, "
            "and not in Atoll's format.",
            "Check the address and the port, and that the Atoll server runs.",
        )
        raise damaged(other) if status < 400 else other


def _is_problem(body: bytes | bytearray) -> bool:
    return body.lstrip().startswith(b"{") and b'"code"' in body and b'"message"' in body


def unreachable(server: str, text: str, why: str) -> ServerUnreachable:
    """Return the error to raise if a server cannot be reached, with the reason and a remedy.

    Args:
        server: address of the server, and the proxy if there is one.
        text: full error text of the failed connection.
        why: the reason in a few words.
    """
    has_proxy = f"({THROUGH}" in server
    if "CERTIFICATE_VERIFY_FAILED" in text:
        remedy = next((remedy for part, remedy in _CERTIFICATES.items() if part in text), _NO_AUTHORITY)
        remedy += " A proxy that opens TLS shows its own certificate, of an authority of its own." if has_proxy else ""
        return _wrong_server(f"{server} cannot prove its identity: {why}.", remedy)
    if "WRONG_VERSION_NUMBER" in text:
        return _wrong_server(
            f"{server} does not speak TLS.",
            "On a trusted network, use http:// in its address. Else set network.tls_cert and network.tls_key "
            "at the server.",
        )
    return ServerUnreachable(
        f"{server} does not answer ({why}).",
        "Check that the server runs and that the address is right (--server, ATOLL_SERVER)."
        + (" The proxy may have ended the connection; NO_PROXY exempts a host." if has_proxy else "")
        + (
            " A server with TLS needs https://." if server.startswith("http://") and "Remote end closed" in text else ""
        ),
    )


def _wrong_server(message: str, remedy: str) -> ServerUnreachable:
    error = ServerUnreachable(message, remedy)
    error.is_other = True
    return error
