"""The HTTP proxy between this machine and a server, from the environment: HTTPS_PROXY, HTTP_PROXY, ALL_PROXY, NO_PROXY.

The variables mean what they mean to curl and to Python's urllib, also in lower case, which comes first. A request to a
server without TLS goes to the proxy with the server's whole address in its first line. For a server with TLS, the
proxy is asked with CONNECT for a connection that it only passes on, so that it sees neither messages nor tokens.

As in Go, an address of this machine itself (loopback) is never reached through a proxy, whatever the variables say: a
proxy on another machine would look for it there. Workers of a swarm connect to each other directly.
"""

from __future__ import annotations

import base64
import http.client
import ipaddress
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from urllib3.exceptions import LocationParseError
from urllib3.util import parse_url

from atoll.errors import ConfigError, ServerUnreachable
from atoll.format_text import visible
from atoll.tensors.reference import authority_of
from atoll.transport.answer import SHOWN_CHARS, BadAnswer, Response
from atoll.transport.tls import is_loopback

PORT = 80
"""Port of a proxy without one in its address."""

_ENTRY = re.compile(r"(\[[^\]]*\]|[^:\[\]]+)(?::([0-9]+))?")
_REFUSED = (403, 407)
"""Statuses with which a proxy refuses. With 500 and above it says that the server does not answer now."""


class ProxyFailed(OSError):
    """The proxy is not there, or does not lead to the server.

    Args:
        message: what happened.
        remedy: what to do about it.
        is_final: whether further attempts are pointless.
    """

    def __init__(self, message: str, remedy: str, *, is_final: bool = False) -> None:
        super().__init__(message)
        self.message, self.remedy, self.is_final = message, remedy, is_final

    def error(self) -> ServerUnreachable:
        """Return the error to raise for this failure."""
        error = ServerUnreachable(self.message, self.remedy)
        error.is_other = self.is_final
        return error


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy, and the server behind it.

    Attributes:
        host, port: address of the proxy; an IPv6 address has no brackets.
        variable: name of the environment variable that names the proxy.
        server_host: host of the server.
        server_port: port of the server.
        tunnels: whether the proxy passes on connections (CONNECT) instead of requests.
        headers: headers for the proxy alone, with user name and password if its address has them; never logged.
    """

    host: str
    port: int
    variable: str
    server_host: str
    server_port: int
    tunnels: bool
    headers: Mapping[str, str] = field(repr=False)

    def __str__(self) -> str:
        return f"the proxy http://{authority_of(self.host, self.port)} of {self.variable}"

    @property
    def _server(self) -> str:
        return authority_of(self.server_host, self.server_port)

    @property
    def _bypass(self) -> str:
        return f"to connect directly, set NO_PROXY={self.server_host}"

    def connect(self, timeout_s: float | None) -> socket.socket:
        """Return a socket for requests to the server: a connection to the proxy, or through it if the proxy tunnels.

        Args:
            timeout_s: timeout of each step, in seconds.

        Raises:
            ProxyFailed: the proxy does not answer, or refuses the connection to the server.
        """
        try:
            sock = socket.create_connection((self.host, self.port), timeout_s)
        except OSError as error:
            raise self.unreachable(error) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.open_tunnel(sock)
        except BaseException:
            sock.close()
            raise
        return sock

    def unreachable(self, error: OSError) -> ProxyFailed:
        """Return the error to raise if the proxy itself cannot be reached."""
        return ProxyFailed(
            _sentence(f"{self} does not answer ({_reason(error)})."),
            f"Check {self.variable} and that the proxy runs; {self._bypass}.",
        )

    def open_tunnel(self, sock: socket.socket) -> None:
        """Ask for a connection to the server over a new connection to the proxy; do nothing if it does not tunnel.

        Raises:
            ProxyFailed: the proxy refuses the connection, or ends it.
        """
        if not self.tunnels:
            return
        lines = [f"CONNECT {self._server} HTTP/1.1", f"Host: {self._server}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        try:
            sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
            response = Response(sock, method="CONNECT")
            try:
                response.begin()
            finally:
                response.close()
        except BadAnswer as error:
            raise ProxyFailed(_sentence(f"{self} {error.text}."), self._check(), is_final=True) from error
        except (OSError, http.client.HTTPException) as error:
            text = f"{self} does not lead to {self._server} ({_reason(error)})."
            raise ProxyFailed(_sentence(text), self._check()) from error
        if not 200 <= response.status < 300:
            raise self.refusal(response.status)

    def answered_itself(self, status: int) -> bool:
        """Return whether the answer to a request, if it is not in Atoll's format, is that of the proxy."""
        return not self.tunnels and (status in _REFUSED or status >= 500)

    def refusal(self, status: int) -> ProxyFailed:
        """Return the error to raise if the proxy does not lead to the server.

        Args:
            status: HTTP status with which the proxy answers.
        """
        told = f"HTTP status {status}"
        if status == 407 and self.headers:
            text, remedy = f"{self} refuses the user name and password ({told}).", f"Correct them in {self.variable}."
        elif status == 407:
            text = f"{self} asks for a user name and a password ({told})."
            address = f"http://USER:PASSWORD@{authority_of(self.host, self.port)}"
            remedy = f"Set {self.variable}={address}, with %XX for special characters."
        elif status >= 500:
            text = f"{self} does not reach {self._server} ({told})."
            remedy = f"Check the server's address, and that the server runs and lets the proxy in; {self._bypass}."
        else:
            text = f"{self} refuses to lead to {self._server} ({told})."
            remedy = f"Let the proxy allow this host and port; {self._bypass}."
        return ProxyFailed(_sentence(text), remedy, is_final=status < 500)

    def _check(self) -> str:
        return f"Check that {self.variable} names an HTTP proxy that leads to this host and port; {self._bypass}."


def proxy_of(host: str, port: int, *, secure: bool, environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy through which a server is reached; None if this machine connects directly.

    Args:
        host: host of the server.
        port: port of the server.
        secure: whether the server has TLS.
        environ: environment with the variables.

    Raises:
        ConfigError: a variable does not name an HTTP proxy.
    """
    for variable in ("HTTPS_PROXY" if secure else "HTTP_PROXY", "ALL_PROXY"):
        if value := _value_of(variable, environ):
            break
    else:
        return None
    if is_loopback(host) or _is_exempt(host.lower().rstrip("."), port, _value_of("NO_PROXY", environ).lower()):
        return None
    scheme, _, rest = value.rpartition("://")
    if scheme.lower() not in ("", "http"):
        raise ConfigError(
            f"{variable} names a proxy with the scheme {visible(scheme, SHOWN_CHARS)}://, and Atoll uses only HTTP "
            "proxies (http://).",
            f"Name an HTTP proxy in {variable}, as http://host:port; to connect directly, set NO_PROXY={host}.",
        )
    try:
        url = parse_url(f"http://{rest}")
    except LocationParseError:
        url = parse_url("")
    if not url.host or url.path not in (None, "/") or url.query is not None or url.fragment is not None:
        shown = visible(rest.rpartition("@")[2], SHOWN_CHARS)
        raise ConfigError(
            f"{variable} is not the address of a proxy: '{shown}'.",
            "Use the form http://host:port or http://USER:PASSWORD@host:port, with %XX for special characters.",
        )
    headers = {"Proxy-Authorization": _basic(url.auth)} if url.auth else {}
    return Proxy(url.host.strip("[]"), url.port or PORT, variable, host, port, secure, headers)


def _value_of(variable: str, environ: Mapping[str, str]) -> str:
    """Return the value of a variable: in lower case if that is set, else in upper case; empty if neither is set."""
    return environ.get(variable.lower(), environ.get(variable, "")).strip()


def _is_exempt(host: str, port: int, no_proxy: str) -> bool:
    """Return whether NO_PROXY names a host: by name, by a domain above it, by address or network, or with `*`.

    An entry may have a port; then it is for this port alone.
    """
    for entry in re.split(r"[,\s]+", no_proxy):
        match = _ENTRY.fullmatch(entry)
        name, of_port = match.groups() if match else (entry, None)
        if name and (of_port is None or int(of_port) == port) and _covers(name.strip("[]"), host):
            return True
    return False


def _covers(name: str, host: str) -> bool:
    if name == "*":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = name.removeprefix("*").strip(".")
        return bool(name) and f".{host}".endswith(f".{name}")
    try:
        return address in ipaddress.ip_network(name, strict=False)
    except ValueError:
        return False


def _basic(auth: str) -> str:
    user, _, password = auth.partition(":")
    return f"Basic {base64.b64encode(f'{unquote(user)}:{unquote(password)}'.encode()).decode()}"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return visible(str(error) or type(error).__name__, SHOWN_CHARS)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
