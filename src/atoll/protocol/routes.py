"""The paths of the HTTP interface, each in one place, and the limits that hold for all of them."""

from __future__ import annotations

from collections.abc import Callable

PROTOCOL = 1
"""Raised when a peer of the version before could not follow. Both sides name theirs when a worker joins."""

RUN = "/v1/run"
SCHEMA = "/v1/schema"
WORKERS = "/v1/workers"
LEAVE = "/v1/workers/leave"
HEARTBEAT = "/v1/heartbeat"
TICKETS = "/v1/tickets"
TICKET = "/v1/tickets/{ticket}"
PART = "/v1/tickets/{ticket}/parts/{part}"
COMPLETE = "/v1/tickets/{ticket}/complete"
MANIFEST = "/v1/fragments/{fragment}/versions/{version}"
VERSION_DATA = "/v1/fragments/{fragment}/versions/{version}/{digest}"
DELTA_DATA = "/v1/fragments/{fragment}/versions/{version}/delta/{digest}"
MODEL_PART = "/v1/fragments/{fragment}/versions/{version}/model/{part}"
OBJECTS = "/v1/objects"
OBJECT = "/v1/objects/{object}"
OBJECT_PART = "/v1/objects/{object}/parts/{part}"
OBJECT_COMPLETE = "/v1/objects/{object}/complete"
OBJECT_DATA = "/v1/objects/{object}/data"
TASKS = "/v1/tasks"
TASK_ANSWER = "/v1/tasks/{task}/answer"
EVALUATION = "/v1/evaluation"
SWARM = "/v1/swarm"
SWARM_PLAN = "/v1/swarm/plan"
STATUS = "/v1/status"
OPENAPI = "/openapi.json"
METRICS = "/metrics"
HEALTH = "/healthz"

LEASE_HEADER = "Atoll-Lease"
SECRET_HEADER = "Atoll-Secret"
"""Of an object's reference: a request with it may pull the object, and needs no token."""

CONTROL_BODY_BYTES = 64 * 2**10
"""The most a control message may have; more is refused before it is read."""
REPORT_BODY_BYTES = 16 * 2**20
"""The most that a worker of a swarm may report: the digests of every part of a version are in it."""

HEADER_BYTES = 16 * 2**10
DIGEST_BYTES = 32
"""A part's body is its bytes, then their BLAKE3."""

MANIFEST_BYTES = 32 * 2**20
"""The most that the manifest of an object may have; a receiver reads no more."""

INLINE_BYTES = 16 * 2**20
"""The most that an object may have which travels within its manifest."""

LONG_POLL_S = 20.0
"""The longest a request for a ticket waits before it answers "wait"; below the idle timeout of common proxies."""


def parts_of(ticket: int) -> Callable[[int], str]:
    """Number of a part → its path, under a ticket."""
    return lambda part: PART.format(ticket=ticket, part=part)


def parts_of_object(object_id: str) -> Callable[[int], str]:
    """Number of a part → its path, under an object."""
    return lambda part: OBJECT_PART.format(object=object_id, part=part)
