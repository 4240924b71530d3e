"""Paths, headers and size limits of the HTTP interface."""

from __future__ import annotations

import re
from collections.abc import Callable

PROTOCOL = 2
"""Version of the protocol. It rises once in a release that adds fields to answers: see `served_versions`."""
OLDEST_PROTOCOL = 1
"""Oldest worker protocol that this server serves: two minor versions back."""
PROTOCOL_HEADER = "Atoll-Protocol"
"""Header with the worker's protocol. Workers of protocol 1 do not send it."""

RUN = "/v1/run"
SCHEMA = "/v1/schema"
WORKERS = "/v1/workers"
LEAVE = "/v1/workers/leave"
HEARTBEAT = "/v1/heartbeat"
TICKETS = "/v1/tickets"
TICKET = "/v1/tickets/{ticket}"
PART = "/v1/tickets/{ticket}/parts/{part}"
COMPLETE = "/v1/tickets/{ticket}/complete"
SIT_OUT = "/v1/tickets/{ticket}/sit-out"
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
PAUSE = "/v1/run/pause"
STOP = "/v1/run/stop"
ROLLBACK = "/v1/run/rollback"
AUTHORITY = "/v1/authority"
ENROL = "/v1/enrol"
RENEW = "/v1/enrol/renew"
SITES = "/v1/sites"
INVITE = "/v1/sites/invite"
REVOKE = "/v1/sites/revoke"
STATUS = "/v1/status"
EVENTS = "/v1/events"
SITE_CURVES = "/v1/site-curves"
SETTINGS = "/v1/settings"
UPDATES_TABLE = "/v1/updates.csv"
MODEL = "/v1/versions/{version}/model.safetensors"
PAGE = "/"
PAGE_FILE = "/page/{file}"
OPENAPI = "/openapi.json"
METRICS = "/metrics"
HEALTH = "/healthz"
READY = "/readyz"

LEASE_HEADER = "Atoll-Lease"
SECRET_HEADER = "Atoll-Secret"
"""Header with the secret of an object's reference. With it, a request may download the object without a token."""

CONTROL_BODY_BYTES = 64 * 2**10
"""Maximum size of a control message, in bytes. A longer message is refused before it is read."""
PROBLEM_BYTES = CONTROL_BODY_BYTES
"""Maximum size of an answer with an error, at every path, in bytes."""
REPORT_BODY_BYTES = 16 * 2**20
"""Maximum size of a swarm worker's report, in bytes. A report contains the digests of all parts of a version."""

LEAST_BYTES_PER_S = 1024
"""Bytes a second that a transfer has to bring forward, on average over its idle timeout. A peer that sends or reads a
byte now and then would otherwise keep its place for ever. A slower line carries no model."""
HEADER_BYTES = 16 * 2**10
DIGEST_BYTES = 32
"""Size of a BLAKE3 digest. The body of a part is the bytes of the part, then their digest."""

MANIFEST_BYTES = 24 * 2**20
"""Maximum size of an object's manifest, in bytes. A receiver refuses a longer one."""

INLINE_BYTES = 16 * 2**20
"""Maximum size, in bytes, of an object that is sent inline (within its manifest)."""

VERSION_BYTES = 2**20
"""Maximum size, in bytes, of a version that is sent with its ticket. A larger one is downloaded part by part."""
_MANIFEST_BYTES = 8 * 2**20
"""Maximum size of a version's manifest: 120,000 parts, of the version and its difference together: 2 TB in parts of 16
MiB."""

ANSWER_BYTES: dict[str, int] = {
    SCHEMA: 16 * 2**20,  # 130,000 tensors
    MANIFEST: _MANIFEST_BYTES,
    TICKETS: CONTROL_BODY_BYTES + _MANIFEST_BYTES + VERSION_BYTES,
    TICKET: 8 * 2**20,
    OBJECT: MANIFEST_BYTES,
    TASKS: INLINE_BYTES,
    SWARM: REPORT_BODY_BYTES,
    STATUS: 16 * 2**20,
    EVENTS: 2**20,
    SITE_CURVES: 2**20,
    SITES: 16 * 2**20,
    EVALUATION: 16 * 2**20,
    SETTINGS: 2**20,
}
"""Path → maximum size of an answer, in bytes, if it is not `CONTROL_BODY_BYTES`.

The same limit holds for a body of unknown length. A client decodes no compressed answer, so
this is the size before and after decoding. Answers with an error have at most `PROBLEM_BYTES`.
"""

_WITH_PARAMETERS = [
    (re.compile(re.sub(r"\{\w+\}", "[^/]+", path)), nbytes) for path, nbytes in ANSWER_BYTES.items() if "{" in path
]


def answer_bytes(path: str) -> int:
    """Return the maximum size of the answer to a request for this path, in bytes."""
    if path in ANSWER_BYTES:
        return ANSWER_BYTES[path]
    return next((most for route, most in _WITH_PARAMETERS if route.fullmatch(path)), CONTROL_BODY_BYTES)


LONG_POLL_S = 15.0
"""Maximum number of seconds that the server holds a request before it answers "wait".

Common proxies have a longer idle timeout.
"""
CALL_TIMEOUT_S = LONG_POLL_S + 10.0
"""Seconds without a byte after which a call fails: a server that waits answers in time, so the network is silent."""


def parts_of(ticket: int) -> Callable[[int], str]:
    """Return a function that takes the number of a part of the ticket's update and returns the part's URL path."""
    return lambda part: PART.format(ticket=ticket, part=part)


def parts_of_object(object_id: str) -> Callable[[int], str]:
    """Return a function that takes the number of a part of the object and returns the part's URL path."""
    return lambda part: OBJECT_PART.format(object=object_id, part=part)
