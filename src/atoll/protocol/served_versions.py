"""Which protocols a server serves, and its answers in the form of an older one.

A protocol only adds: fields with a default, operations, error codes. A field of an answer that `PROTOCOL` has added is
marked with `since(PROTOCOL)`. A worker refuses fields that it does not know, so a server leaves out what came after the
worker's protocol. `tests/behaviour/upgrades` compares the messages with those that released workers read.
"""

from __future__ import annotations

import functools
from typing import Any, get_args

from pydantic import BaseModel

from atoll.errors import BadRequest, VersionSkew
from atoll.protocol import messages, routes
from atoll.protocol.openapi import Operation


def protocol_of(operation: Operation, header: str | None) -> int:
    """Return the protocol in which a request is answered: that of its sender, at most `routes.PROTOCOL`.

    Args:
        operation: the operation.
        header: value of the header `Atoll-Protocol`. Workers of protocol 1 send none; of others, such as a browser, no
            answer depends on it.

    Raises:
        BadRequest: the header is no number.
        VersionSkew: the server does not serve the worker's protocol any more.
    """
    if "site" not in operation.callers or "reader" in operation.callers:
        return routes.PROTOCOL
    if header is not None and not (header.isascii() and header.isdigit() and len(header) <= 9):
        raise BadRequest(f"{routes.PROTOCOL_HEADER} is {header[:40]!r}, which is no protocol.", "Send a number.")
    protocol = 1 if header is None else int(header)
    if protocol < routes.OLDEST_PROTOCOL:
        raise skew("This worker", protocol, "the worker")
    return min(protocol, routes.PROTOCOL)


def skew(worker: str, protocol: int, name: str) -> VersionSkew:
    """Return the error for a worker of a protocol that this server does not serve. It says which side to upgrade."""
    return VersionSkew(
        f"{worker} uses protocol {protocol}, but this server serves protocols {routes.OLDEST_PROTOCOL} to "
        f"{routes.PROTOCOL}.",
        f"Upgrade Atoll at {name if protocol < routes.PROTOCOL else 'the server'}.",
    )


def in_protocol(message: BaseModel, protocol: int, *, exclude_defaults: bool = False) -> bytes:
    """Return the JSON text of an answer for a worker of this protocol."""
    if isinstance(message, messages.RunInfo) and message.protocol != protocol:
        message = message.model_copy(update={"protocol": protocol})
    left_out = _left_out(type(message), protocol) if protocol < routes.PROTOCOL else None
    return message.model_dump_json(exclude=left_out, exclude_defaults=exclude_defaults).encode()


@functools.cache
def _left_out(kind: type[BaseModel], protocol: int) -> dict[str, Any]:
    """Return the fields of a message, and of the messages in it, that came after a protocol: pydantic's `exclude`."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if since_of(field.json_schema_extra) > protocol:
            found[name] = True
            continue
        for inner, is_list in _kinds_in(field.annotation):
            if more := _left_out(inner, protocol):
                found[name] = {"__all__": more} if is_list else more
    return found


def since_of(extra: object) -> int:
    """Return the protocol that has added a field, from its `json_schema_extra`."""
    return int(extra[messages.SINCE]) if isinstance(extra, dict) and messages.SINCE in extra else 1


def _kinds_in(annotation: Any, is_list: bool = False) -> list[tuple[type[BaseModel], bool]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, is_list)]
    inside = is_list or getattr(annotation, "__origin__", None) is list
    return [each for inner in get_args(annotation) for each in _kinds_in(inner, inside)]
