"""The file server of a swarm's worker, for tests that play the worker."""

from __future__ import annotations

from atoll.transport.http_client import Counters
from atoll.transport.object_server import ObjectHost
from atoll.worker.peer.peer_transfers import PeerServer


def peer_server(name: str | None = None) -> PeerServer:
    """At any free port of this machine, whose name for other workers is `name`."""
    host = ObjectHost(
        "127.0.0.1", 0, name=name, tls_cert=None, tls_key=None, insecure=False, idle_timeout_s=10.0, folder=None
    )
    return PeerServer(host, Counters(), None)
