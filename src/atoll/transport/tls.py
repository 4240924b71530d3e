"""TLS 1.3 for clients and servers, the bearer token, and the test for loopback addresses."""

from __future__ import annotations

import ipaddress
import os
import ssl
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import ConfigError
from atoll.posix import read_named, require_regular

ContextMaker = Callable[[], ssl.SSLContext]
"""Returns the TLS context for a new connection: that of a site changes when its certificate is renewed."""


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address, which only this machine can reach."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def server_context(cert: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS context of a server (TLS 1.3 only).

    Raises:
        ConfigError: a file cannot be read, other users can read the key, or certificate and key do not match.
    """
    require_private(key, "The TLS key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # no client of Atoll resumes a session, and each ticket takes memory
    try:
        require_regular(cert)
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"The TLS certificate {str(cert)!r} cannot be used with the TLS key {str(key)!r}: {error}.",
            "Give a PEM file with a certificate chain, and the file with its private key.",
        ) from error
    return context


def client_context(ca: str | None) -> ssl.SSLContext:
    """Return the TLS context of a client (TLS 1.3 only).

    Args:
        ca: path of a PEM file with the only certificate authority to trust; None: trust those of the system.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        if ca is not None:
            require_regular(ca)
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ATOLL_TLS_CA {ca!r} cannot be used: {error}.",
            "Set this variable to a PEM file with the server's certificate authority.",
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def fixed(context: ssl.SSLContext) -> ContextMaker:
    """Return a function that returns this TLS context for each connection."""
    return lambda: context


def unverified_context() -> ssl.SSLContext:
    """Return the TLS context of a client that accepts any certificate. Nothing that comes over it may be believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


ANY_SITE = "*"
"""In place of a site's name: a connection may reach any site of the run."""
OTHER_PEER = "shows the certificate of"
"""Part of the message if another worker answers at the address of one."""


def peer_context(authority: Path, site: str | None = None) -> ssl.SSLContext:
    """Return the TLS context of a worker of a swarm: both ends need a certificate of the run's authority.

    Args:
        authority: PEM file with the run's authority.
        site: name of the site that a connection has to reach: a certificate of a site names no host; or `ANY_SITE`.
            None: the context is for accepting connections, of any site of the run.

    Raises:
        ConfigError: the file cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if site is None else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_REQUIRED
    if site is None:
        context.num_tickets = 0  # a resumed session could go on after its certificate has expired
    if site not in (None, ANY_SITE):
        context.sslsocket_class = _socket_to(site)
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"The authority {str(authority)!r} cannot be used: {error}.") from error
    return context


def _socket_to(site: str) -> type[ssl.SSLSocket]:
    """Return a class of sockets that end a connection, before its first byte, if it has reached another site."""

    class SiteSocket(ssl.SSLSocket):
        def do_handshake(self, block: bool = False) -> None:
            super().do_handshake(block)
            from atoll.transport.certificates import identity_in  # its library takes a while to load

            found = identity_in(self.getpeercert() or {})
            if found is None or found.site != site:
                shown = f"site {found.site}" if found else "no site"
                raise ssl.SSLCertVerificationError(
                    f"CERTIFICATE_VERIFY_FAILED: it {OTHER_PEER} {shown}, not of site {site}"
                )

    return SiteSocket


def with_identity(context: ssl.SSLContext, path: Path, remedy: str) -> None:
    """Let a TLS context show a certificate.

    Args:
        context: the context, which is changed.
        path: file of mode 0600 with the certificate and its key, PEM.
        remedy: advice for the error.

    Raises:
        ConfigError: the file cannot be read, others can read it, or key and certificate do not match.
    """
    require_private(path, "The site's key")
    try:
        context.load_cert_chain(path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"The key and certificate in {str(path)!r} cannot be used: {error}.", remedy) from error


def require_private(path: Path, what: str) -> None:
    """Check that only the owner can read a secret file.

    Args:
        path: path of the file.
        what: name of the file in messages, for example "The TLS key".

    Raises:
        ConfigError: the file is missing, a folder or no file, or its mode lets other users access it.
    """
    try:
        found = path.stat().st_mode
        if not stat.S_ISDIR(found):
            require_regular(path)
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error.strerror}.") from error
    mode = stat.S_IMODE(found)
    if stat.S_ISDIR(found):
        raise ConfigError(f"{what} {str(path)!r} is a folder.", "Give the path of a file with mode 0600.")
    if mode & 0o077:
        raise ConfigError(f"{what} {str(path)!r} has mode {mode:04o}: others can read it.", f"Run: chmod 600 {path}")


MOST_TOKEN_CHARS = 4096
"""Maximum length of a token. A server takes a longer one for a wrong one; proxies accept headers of 8 KiB."""


@dataclass(frozen=True)
class Token:
    """A bearer token.

    Attributes:
        text: the token.
        origin: where it was read, for messages: `ATOLL_TOKEN`, or a file.
    """

    text: str = field(repr=False)
    origin: str


def read_token(path: Path | None) -> Token | None:
    """Return the bearer token from ATOLL_TOKEN or, without that variable, from a file. Return None if there is neither.

    Args:
        path: path of the file; None if there is no file.

    Raises:
        ConfigError: as `read_token_file`.
    """
    if token := os.environ.get("ATOLL_TOKEN", "").strip():
        return _sendable(token, "ATOLL_TOKEN")
    return None if path is None else read_token_file(path)


def read_token_file(path: Path) -> Token:
    """Return the bearer token in a file.

    Raises:
        ConfigError: the file is missing, unreadable, empty, or readable by other users; or the token is too long, or
            contains a space, a line break, or a character that is not ASCII.
    """
    require_private(path, "The token file")
    origin = f"the token file {str(path)!r}"
    try:
        token = read_named(path).decode(errors="replace").strip()
    except OSError as error:
        raise ConfigError(f"The token file {str(path)!r} cannot be read: {error.strerror}.") from error
    if not token:
        raise ConfigError(f"The token file {str(path)!r} is empty.", "Write the token into it, on one line.")
    return _sendable(token, origin)


def _sendable(token: str, origin: str) -> Token:
    wrong = ""
    if not all("!" <= char <= "~" for char in token):
        wrong = "contains a space, a line break, or a character that is not ASCII"
    elif len(token) > MOST_TOKEN_CHARS:
        wrong = f"has {len(token)} characters, more than {MOST_TOKEN_CHARS}"
    if wrong:
        raise ConfigError(
            f"{origin[0].upper()}{origin[1:]} {wrong}.", "Use a token of letters and digits, on one line."
        )
    return Token(token, origin)
