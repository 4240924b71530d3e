"""TLS 1.3 for clients and servers, the bearer token, and the test for loopback addresses.

asyncio keeps a buffer of 256 KiB for each TLS connection until it closes, even without a valid token. A thousand
connections take 290 MB. Buffers of 64 KiB, as here, are as fast. With 16 KiB, rounds take a fifth longer.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import ssl
import stat
from asyncio.sslproto import SSLProtocol
from pathlib import Path

from atoll.errors import ConfigError


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
        ConfigError: a file is missing or unreadable, others can read the key, or certificate and key do not match.
    """
    require_private(key, "The TLS key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"network.tls_cert {str(cert)!r} and network.tls_key {str(key)!r} cannot be used: {error}.",
            "Set a PEM file with a certificate chain, and the file with its private key.",
        ) from error
    return context


def client_context(ca: str | None) -> ssl.SSLContext:
    """Return the TLS context of a client (TLS 1.3 only).

    Args:
        ca: path of a PEM file with the only certificate authority to trust; None trusts the system's authorities.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"ATOLL_TLS_CA {ca!r} cannot be used: {error}.",
            "Set it to a PEM file with the server's certificate authority.",
        ) from error
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def require_private(path: Path, what: str) -> None:
    """Check that only the owner can read a secret file.

    Args:
        path: path of the file.
        what: noun for the file in messages, for example "The TLS key".

    Raises:
        ConfigError: the file is missing, or its mode is wider than 0600.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"{what} {str(path)!r} cannot be read: {error.strerror}.") from error
    if mode & 0o077:
        raise ConfigError(f"{what} {str(path)!r} has mode {mode:04o}: others can read it.", f"Run chmod 600 {path}")


def read_token(path: Path | None) -> str | None:
    """Return the bearer token: from ATOLL_TOKEN, else from the file, else None.

    Raises:
        ConfigError: the file is missing, empty, or readable by others; or the token is not one word of ASCII.
    """
    if token := os.environ.get("ATOLL_TOKEN", "").strip():
        return _require_sendable(token, "ATOLL_TOKEN")
    if path is None:
        return None
    require_private(path, "The token file")
    token = path.read_text(encoding="utf-8", errors="replace").strip()
    if not token:
        raise ConfigError(f"The token file {str(path)!r} is empty.", "Write the token into it, on one line.")
    return _require_sendable(token, f"The token file {str(path)!r}")


def _require_sendable(token: str, where: str) -> str:
    if not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            f"{where} is not one word of ASCII characters.", "Use a token of letters and digits, on one line."
        )
    return token


class SmallBuffer(SSLProtocol):
    """asyncio's TLS protocol with a smaller buffer. `max_size` is the size of the read buffer in bytes."""

    max_size = 2**16


async def accept_tls(protocol: asyncio.BaseProtocol, sock: socket.socket, context: ssl.SSLContext) -> None:
    """Do the TLS handshake on an accepted socket, then connect `protocol` to the decrypted stream.

    Raises:
        OSError, EOFError: the peer closed the connection, or does not speak TLS. The socket is closed.
    """
    loop = asyncio.get_running_loop()
    shaken: asyncio.Future[None] = loop.create_future()
    front = SmallBuffer(loop, protocol, context, shaken, server_side=True)
    transport, _ = await loop.connect_accepted_socket(lambda: front, sock)
    try:
        await shaken
    except BaseException:
        transport.close()
        raise
