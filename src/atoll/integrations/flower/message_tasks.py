"""Flower's messages as tasks: what of a message travels, and which number Flower knows a site by.

A message is a task of its type's name, such as `train`. Messages with the same content are one task for several sites,
so the site itself makes the message's id and number of the destination.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from flwr.app import DEFAULT_TTL, Error, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from atoll.errors import BadRequest
from atoll.integrations.flower.records import from_payload, to_payload

RUN_ID = 1
"""Number of the run for Flower: an Atoll server has one run."""


_MESSAGE: Any = Message
"""Its argument `metadata` is for Flower's own use."""


def node_id_of(site: str) -> int:
    """Return the number by which an app knows a site: always the same for a name, 63 bits."""
    return int.from_bytes(hashlib.blake2b(site.encode(), digest_size=8).digest()) >> 1


def identify(node_id: int) -> None:
    """Set the sender of the messages of this process: Flower reads it when an app makes one."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = RUN_ID, 1, node_id


def to_task(message: Message) -> dict[str, Any]:
    """Return the payload of a task with a message of the ServerApp. The same content makes the same payload."""
    about = message.metadata
    return {
        "message_type": about.message_type,
        "group_id": about.group_id,
        "ttl": about.ttl,
        "records": to_payload(message.content),
    }


def from_task(task: str, payload: Any, node_id: int) -> Message:
    """Return the message of a task, as the ClientApp at this site gets it.

    Args:
        task: id of the task.
        payload: what `to_task` returned at the server.
        node_id: number of this site.

    Raises:
        BadRequest: it is no such payload.
    """
    try:
        about = str(payload["group_id"]), float(payload["ttl"])
        return received(task, str(payload["message_type"]), from_payload(payload["records"]), node_id, *about)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(
            f"The task holds no message of a Flower app: {error}.", "Start the server with an app, too: --flower APP."
        ) from None


def received(
    message_id: str, kind: str, content: RecordDict, node_id: int, group_id: str = "", ttl: float = DEFAULT_TTL
) -> Message:
    """Return a message as a ClientApp gets it.

    Args:
        message_id: its id.
        kind: its type, such as `train`.
        content: its records.
        node_id: number of the site.
        group_id, ttl: what the ServerApp says of it.
    """
    metadata = Metadata(
        run_id=RUN_ID,
        message_id=message_id,
        src_node_id=SUPERLINK_NODE_ID,
        dst_node_id=node_id,
        reply_to_message_id="",
        group_id=group_id,
        created_at=time.time(),
        ttl=ttl,
        message_type=kind,
    )
    message: Message = _MESSAGE(content=content, metadata=metadata)
    return message


def to_answer(reply: Message) -> dict[str, Any]:
    """Return the answer of a site: the records of its reply, or the error that it replied with."""
    if reply.has_error():
        return {"error": [reply.error.code, str(reply.error.reason)]}
    return {"records": to_payload(reply.content)}


def from_answer(message: Message, payload: Any, message_id: str) -> Message:
    """Return a site's reply to a message.

    Args:
        message: the message, with its id.
        payload: what `to_answer` returned at the site.
        message_id: id of the reply.

    Raises:
        BadRequest: it is no such payload.
    """
    try:
        if "error" in payload:
            code, reason = payload["error"]
            return identified(Message(Error(int(code), str(reason)), reply_to=message), message_id)
        return identified(Message(from_payload(payload["records"]), reply_to=message), message_id)
    except (KeyError, TypeError, ValueError) as error:
        raise BadRequest(
            f"The answer holds no reply of a Flower app: {error}.", "Start the site with the app: --flower APP."
        ) from None


def failed(message: Message, reason: str, message_id: str = "") -> Message:
    """Return the reply to a message for which the ClientApp raised, or that its site cannot answer."""
    return identified(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message), message_id)


def identified(message: Message, message_id: str) -> Message:
    """Give a message its id, and return it."""
    message.metadata.__dict__["_message_id"] = message_id  # Flower has no setter: its server assigns the ids
    return message


def without_content(message: Message) -> Message:
    """Return a message that a reply can refer to, without its records."""
    envelope: Message = _MESSAGE(content=RecordDict(), metadata=message.metadata)
    return envelope
