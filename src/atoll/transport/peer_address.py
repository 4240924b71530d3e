"""Check the addresses of other workers in a swarm before this process connects to them.

A worker that joins names an address, and the others connect to it. Without a check, a site could make all other sites
call any address. So the server checks each address before it names it to others (`why_unreachable`), and every process
that connects checks its class (`why_no_peer`). The name of a host may lead elsewhere a moment later. So the IP address
that a connection has reached is checked again, before the first byte is sent (`require_peer`).
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from collections.abc import Callable
from functools import partial

from atoll.errors import AtollError, ServerUnreachable
from atoll.protocol import messages, routes
from atoll.tensors.reference import TensorRef
from atoll.transport.object_client import object_http
from atoll.transport.tls import fixed, is_loopback

CHECK_S = 5.0
"""Timeout of one attempt to check an address, in seconds."""
ATTEMPTS = 2
NO_PATH = "the address of a worker has no path"


_THIS_NETWORK = ipaddress.ip_network("0.0.0.0/8")


def why_no_peer(host: str, *, loopback: bool) -> str:
    """Return why no worker of a swarm can have this host; an empty text if one can, or if its name has no IP address.

    Link-local addresses are refused: clouds serve the secrets of a machine there. Multicast, unspecified and reserved
    addresses are no address of a single machine.

    Args:
        host: a name or an IP address.
        loopback: whether an address of this machine itself is allowed.
    """
    for address in _addresses_of(host):
        is_bad = address.is_link_local or address.is_multicast or address.is_unspecified
        if is_bad or (address.version == 4 and (address.is_reserved or address in _THIS_NETWORK)):
            return f"{address} cannot be the address of a worker"
        if address.is_loopback and not loopback:
            return f"{address} leads to this machine itself, not to another worker"
    return ""


def require_peer(ip: str, *, loopback: bool) -> None:
    """Raise an error if the IP address that a connection has reached cannot be that of a worker of a swarm.

    Raises:
        ServerUnreachable: it cannot.
    """
    if why := why_no_peer(ip, loopback=loopback):
        raise ServerUnreachable(f"{why}.", "Check the names of hosts in the swarm, and ATOLL_PEER_HOST.")


def is_this_machine(host: str) -> bool:
    """Return whether a host is loopback: only processes of the same machine can connect to it."""
    return is_loopback(host) or any(address.is_loopback for address in _addresses_of(host))


def _addresses_of(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = {str(entry[4][0]).partition("%")[0] for entry in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return []  # the attempt to connect fails in the same way, with a message
    addresses = [ipaddress.ip_address(text) for text in sorted(found)]
    return [getattr(address, "ipv4_mapped", None) or address for address in addresses]


ANY_PEER: Callable[[str], None] = partial(require_peer, loopback=True)
"""The check of a process that may have workers of a swarm on its own machine."""


def why_unreachable(proof: TensorRef, context: ssl.SSLContext | None = None) -> str:
    """Return why the process that made a reference does not answer at its address; an empty text if it does.

    Pull the manifest of the object: only the process that made the reference has an object with this digest.

    Args:
        proof: the reference, from a message.
        context: TLS context for the connection; None: one that trusts ATOLL_TLS_CA.
    """
    why = why_no_peer(proof.host, loopback=True) or (NO_PATH if proof.path else "")
    for _ in range(ATTEMPTS if not why else 0):
        try:
            with contextlib.closing(
                object_http(proof, require_ip=ANY_PEER, context=fixed(context) if context else None)
            ) as http:
                path = routes.OBJECT.format(object=proof.object)
                manifest = http.get(path, messages.BlobManifest, timeout_s=CHECK_S).manifest()
            return "" if manifest.id == proof.digest else "another process answers there"
        except AtollError as error:
            why = error.message.rstrip(".")
    return why
