"""What a worker checks of a server's answers before it takes part, and how it finds out whether the server answers."""

from __future__ import annotations

from collections.abc import Callable

from atoll.errors import AtollError, ServerUnreachable, TransferStalled, UsageError, VersionSkew
from atoll.protocol import messages, routes
from atoll.tensors.fragments import Split
from atoll.transport.http_client import Http
from atoll.worker.log_lines import LOG


def require_protocol(info: messages.RunInfo, server: str) -> None:
    """Refuse a server of another protocol.

    Raises:
        VersionSkew: the two sides speak different ones.
    """
    if info.protocol != routes.PROTOCOL:
        older = "this worker" if info.protocol > routes.PROTOCOL else "the server"
        raise VersionSkew(
            f"This worker speaks protocol {routes.PROTOCOL}, {server} speaks {info.protocol}.",
            f"Upgrade Atoll at {older}.",
        )


def require_joined(has_left: bool, site: str, again: str) -> None:
    """Refuse to go on with what has left its run.

    Args:
        again: the call that takes part again.

    Raises:
        UsageError: it has left.
    """
    if has_left:
        raise UsageError(f"Worker {site} has left its run.", f"Call {again} again, and use the new worker.")


def split_of(message: messages.SchemaMessage, info: messages.RunInfo) -> Split:
    """The fragments of a run.

    Raises:
        VersionSkew: they are not those that the run has named.
    """
    split = message.to_split()
    if split.count != info.fragments or split.schema.digest != info.schema_digest:
        raise VersionSkew("The server's schema does not have the digest that it names.", "Upgrade Atoll on both sides.")
    return split


def is_answered(http: Http, ask: Callable[[], object]) -> bool:
    """Send a heartbeat; return whether the server answered, with whatever."""
    try:
        ask()
    except (ServerUnreachable, TransferStalled):
        return False
    except AtollError as error:  # a lost lease, say; the calls that wait are told so, too
        LOG.debug("%s: %s", http.server, error)
    return True
