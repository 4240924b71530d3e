"""TLS on connections that a server has accepted. Clients do without asyncio, a slow import, so it is not in `tls`."""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable


class SmallBuffer(SSLProtocol):
    """asyncio's TLS protocol with a smaller read buffer: `max_size` bytes instead of 256 KiB, then `FULL_SIZE`.

    asyncio keeps the buffer until the connection closes. At 256 KiB, a thousand connections would take 290 MB. Buffers
    of 64 KiB are as fast; with 16 KiB, rounds take a fifth longer. A peer that has shown no credential yet needs less.
    """

    max_size = 2**10
    FULL_SIZE = 2**16

    def widen(self) -> None:
        """Read with the full buffer from now on: the peer has shown a credential."""
        vars(self)["max_size"] = self.FULL_SIZE  # typeshed has it as the class's, but asyncio reads the object's

    def _on_handshake_complete(self, handshake_exc: BaseException | None) -> None:
        """Send the alert of a failed handshake, which asyncio drops: it tells the peer why it was refused."""
        transport, outgoing = getattr(self, "_transport", None), getattr(self, "_outgoing", None)
        if handshake_exc is not None and transport is not None and outgoing is not None:
            transport.write(outgoing.read())
        super()._on_handshake_complete(handshake_exc)


HANDSHAKE_S = 10
"""Maximum seconds of a TLS handshake."""


async def accept_tls(
    protocol: asyncio.BaseProtocol, sock: socket.socket, context: ssl.SSLContext
) -> Callable[[], None]:
    """Do the TLS handshake on an accepted socket, then connect `protocol` to the decrypted stream.

    Return a function to be called when the peer has shown a credential: the connection then takes more memory.

    Raises:
        OSError, EOFError: the peer closed the connection, or does not speak TLS. The socket is closed.
    """
    loop = asyncio.get_running_loop()
    shaken: asyncio.Future[None] = loop.create_future()
    front = SmallBuffer(
        loop, protocol, context, shaken, server_side=True, ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=2.0
    )
    transport, _ = await loop.connect_accepted_socket(lambda: front, sock)
    try:
        await shaken
    except BaseException:
        transport.close()
        raise
    return front.widen
