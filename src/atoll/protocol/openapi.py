"""The table of all operations of the HTTP interface, and the OpenAPI document that is made from this table.

The server finds its handlers by `Operation.name`, and fails at start if a handler is missing. So the document describes
exactly the operations that are served.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from atoll.protocol import (
    admin_messages,
    identity_messages,
    messages,
    routes,
    run_events,
    site_curves,
    status_messages,
    swarm_messages,
    task_messages,
)

STATUS_OF: dict[str, int] = {
    "bad_request": 400,
    "usage": 400,
    "config": 400,
    "auth": 401,
    "forbidden": 403,
    "not_found": 404,
    "method": 405,
    "schema_mismatch": 409,
    "lease_lost": 409,
    "server_lost": 409,
    "server_failed": 409,
    "superseded": 409,
    "conflict": 409,
    "gone": 410,
    "ticket_closed": 410,
    "too_large": 413,
    "range": 416,
    "part_corrupt": 422,
    "update_refused": 422,
    "version_skew": 426,
    "busy": 429,
    "not_ready": 503,
    "disk_full": 507,
}
"""Error code → HTTP status. Other codes get status 500."""


CallerKind = Literal["stranger", "site", "peer", "reader", "admin"]
"""The kind of sender of a request, as its token, lease or secret shows.

A `site` has a credential of its own; where none is needed, the run's token or a lease. A `peer` has the secret of a
published object, a `reader` and the `admin` the token in their file of the server's state directory. A `stranger` has
none of these.
"""

EVERYONE: tuple[CallerKind, ...] = ("stranger", "site", "peer", "reader", "admin")
SITES: tuple[CallerKind, ...] = ("site",)
READERS: tuple[CallerKind, ...] = ("site", "reader", "admin")
"""For what is shown of a run: its sites, their metrics, and its versions as model files."""
EXPORTERS: tuple[CallerKind, ...] = ("site", "admin")
"""For what `atoll export --server` needs: parts of versions, and what a worker is told of the run."""
ADMIN: tuple[CallerKind, ...] = ("admin",)
HOLDERS: tuple[CallerKind, ...] = ("site", "peer")
"""For an object; the request has its secret."""


@dataclass(frozen=True)
class Operation:
    """An operation of the HTTP interface: one method on one path.

    Attributes:
        name: name of the handler, and the `operationId`.
        method: HTTP method.
        path: path, with parameters in braces.
        summary: summary for the OpenAPI document.
        callers: the kinds of callers that may use the operation. See also `callers_at`.
        request: type of the JSON body; `bytes` for a part; None for no body.
        query: message with the parameters of the query, which all have a default; None for no parameters.
        reply: type of the JSON answer; `bytes` for a file; `str` for text; None for status 204.
        lease: whether the `Atoll-Lease` header is required.
        problems: error codes of this operation, besides `COMMON_PROBLEMS`.
        secret: whether the `Atoll-Secret` header of an object is required.
        body_bytes: maximum size of a JSON body, in bytes.
        streams: whether a request that accepts `text/event-stream` gets server-sent events, each a `reply`.
        media: type of an answer that is bytes or text, if it is not the usual one.
        identity: whether the handler is told the identity that the caller's credential proves.
    """

    name: str
    method: str
    path: str
    summary: str
    callers: tuple[CallerKind, ...]
    request: type[BaseModel] | type[bytes] | None = None
    reply: type[BaseModel] | type[bytes] | type[str] | type[dict[str, Any]] | None = None
    query: type[BaseModel] | None = None
    lease: bool = False
    problems: tuple[str, ...] = ()
    secret: bool = False
    body_bytes: int = routes.CONTROL_BODY_BYTES
    streams: bool = False
    media: str = ""
    identity: bool = False


def callers_at(operation: Operation, *, is_open: bool) -> tuple[CallerKind, ...]:
    """Return the kinds of callers that may use an operation at a server.

    Args:
        operation: the operation.
        is_open: whether the server has no token. It then takes strangers and peers, too, unless the operation is for
            the admin alone.
    """
    if not is_open or set(operation.callers) == {"admin"}:
        return operation.callers
    return tuple(kind for kind in EVERYONE if kind in operation.callers or kind in ("stranger", "peer"))


_LEASED = ("lease_lost", "superseded")

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "get_run",
        "GET",
        routes.RUN,
        "What a worker must know before it joins.",
        callers=EXPORTERS,
        reply=messages.RunInfo,
    ),
    Operation(
        "get_schema", "GET", routes.SCHEMA, "The model's tensors.", callers=EXPORTERS, reply=messages.SchemaMessage
    ),
    Operation(
        "join",
        "POST",
        routes.WORKERS,
        "Take part in the run; an older process of the same site loses its lease.",
        callers=SITES,
        request=messages.Join,
        reply=messages.Joined,
        identity=True,
        problems=("server_lost", "schema_mismatch", "version_skew", "config"),
    ),
    Operation(
        "leave",
        "POST",
        routes.LEAVE,
        "Leave the run.",
        callers=SITES,
        request=messages.Leave,
        lease=True,
        problems=_LEASED,
    ),
    Operation(
        "heartbeat",
        "POST",
        routes.HEARTBEAT,
        "Report that the worker is alive, and its progress.",
        callers=SITES,
        request=messages.Heartbeat,
        reply=messages.HeartbeatReply,
        lease=True,
        problems=_LEASED,
    ),
    Operation(
        "request_ticket",
        "POST",
        routes.TICKETS,
        "Get the ticket of the open round; wait up to wait_s for the round to open.",
        callers=SITES,
        request=messages.TicketRequest,
        reply=messages.TicketReply,
        lease=True,
        problems=(*_LEASED, "gone", "config"),
    ),
    Operation(
        "get_ticket",
        "GET",
        routes.TICKET,
        "Get the state of a ticket, and the parts of its update that the server has.",
        callers=SITES,
        reply=messages.TicketState,
        problems=("gone",),
    ),
    Operation(
        "put_part",
        "PUT",
        routes.PART,
        "Send one part of an update: its bytes, then their BLAKE3 (32 bytes). Content-Length must be exact. The "
        "message Complete may follow, as its length in 4 bytes (big-endian) and its JSON text: it submits the "
        "update, as complete does, and the answer is the Receipt.",
        callers=SITES,
        request=bytes,
        lease=True,
        problems=(
            *_LEASED,
            "gone",
            "ticket_closed",
            "part_corrupt",
            "update_refused",
            "conflict",
            "disk_full",
            "too_large",
        ),
    ),
    Operation(
        "complete",
        "POST",
        routes.COMPLETE,
        "Submit the update after all parts were sent. A repeated request gets the same receipt.",
        callers=SITES,
        request=messages.Complete,
        reply=messages.Receipt,
        lease=True,
        problems=(*_LEASED, "gone", "ticket_closed", "update_refused", "conflict", "disk_full"),
    ),
    Operation(
        "sit_out",
        "POST",
        routes.SIT_OUT,
        "Sit out the round of a ticket: no update is sent, and the round does not wait for one. May be repeated.",
        callers=SITES,
        request=messages.SitOut,
        lease=True,
        problems=(*_LEASED, "gone", "ticket_closed", "update_refused", "disk_full"),
    ),
    Operation(
        "get_manifest",
        "GET",
        routes.MANIFEST,
        "Get the parts of a version and their digests.",
        callers=EXPORTERS,
        reply=messages.VersionManifest,
        problems=("gone",),
    ),
    Operation(
        "get_version",
        "GET",
        routes.VERSION_DATA,
        "Get a version as a safetensors file. Honours Range, If-Range and If-None-Match; the ETag is the digest.",
        callers=EXPORTERS,
        reply=bytes,
        problems=("gone", "range"),
    ),
    Operation(
        "get_delta",
        "GET",
        routes.DELTA_DATA,
        "Get the difference from the previous version. Honours Range, If-Range and If-None-Match; the ETag is "
        "the digest.",
        callers=SITES,
        reply=bytes,
        problems=("gone", "range"),
    ),
    Operation(
        "get_model_part",
        "GET",
        routes.MODEL_PART,
        "Get one part of a version for an export, with parameters cast from full precision: its bytes, then "
        "their BLAKE3 (32 bytes). The parts are those of the version's file.",
        callers=EXPORTERS,
        reply=bytes,
        problems=("gone",),
    ),
    Operation(
        "open_object",
        "POST",
        routes.OBJECTS,
        "Ask the server to keep an object; its parts follow. The answer has the object's secret.",
        callers=SITES,
        request=messages.ObjectOpen,
        identity=True,
        reply=messages.ObjectOpened,
        problems=("disk_full",),
    ),
    Operation(
        "put_object_part",
        "PUT",
        routes.OBJECT_PART,
        "Send one part of an object: its bytes, then their BLAKE3 (32 bytes). Content-Length must be exact.",
        callers=SITES,
        request=bytes,
        secret=True,
        problems=("gone", "conflict", "part_corrupt", "disk_full", "too_large"),
    ),
    Operation(
        "complete_object",
        "POST",
        routes.OBJECT_COMPLETE,
        "Complete the object after all parts were sent. The request may be repeated.",
        callers=SITES,
        request=messages.ObjectComplete,
        secret=True,
        problems=("gone", "conflict", "disk_full"),
    ),
    Operation(
        "get_object",
        "GET",
        routes.OBJECT,
        "Get the manifest of an object: its sizes and the digests of its parts.",
        callers=HOLDERS,
        reply=messages.BlobManifest,
        secret=True,
        problems=("gone", "conflict"),
    ),
    Operation(
        "get_object_data",
        "GET",
        routes.OBJECT_DATA,
        "Get an object as a safetensors file. Honours Range, If-Range and If-None-Match; the ETag is the digest.",
        callers=HOLDERS,
        reply=bytes,
        secret=True,
        problems=("gone", "conflict", "range"),
    ),
    Operation(
        "remove_object",
        "DELETE",
        routes.OBJECT,
        "Delete an object. Running downloads of it end with an error.",
        callers=HOLDERS,
        secret=True,
        problems=("gone",),
    ),
    Operation(
        "request_task",
        "POST",
        routes.TASKS,
        "Get the site's next open task; wait up to wait_s for one. The task is sent again until it is answered.",
        callers=SITES,
        request=task_messages.TaskRequest,
        reply=task_messages.TaskReply,
        lease=True,
        problems=(*_LEASED, "config"),
    ),
    Operation(
        "answer_task",
        "POST",
        routes.TASK_ANSWER,
        "Answer a task. The request may be repeated. The server then owns the object in the answer.",
        callers=SITES,
        request=task_messages.TaskAnswer,
        lease=True,
        problems=(*_LEASED, "gone", "conflict", "ticket_closed", "config"),
    ),
    Operation(
        "get_evaluation",
        "GET",
        routes.EVALUATION,
        "Get the results of the last cross-site evaluation, complete or so far.",
        callers=READERS,
        reply=task_messages.Evaluation,
        problems=("gone",),
    ),
    Operation(
        "get_swarm_plan",
        "GET",
        routes.SWARM_PLAN,
        "Get what a worker must know to aggregate rounds of a swarm.",
        callers=SITES,
        reply=swarm_messages.SwarmPlan,
        problems=("config",),
    ),
    Operation(
        "work_in_swarm",
        "POST",
        routes.SWARM,
        "Report what a worker of a swarm stores and has done, and get its orders; wait up to wait_s for new ones.",
        callers=SITES,
        request=swarm_messages.PeerReport,
        reply=swarm_messages.PeerWork,
        lease=True,
        body_bytes=routes.REPORT_BODY_BYTES,
        problems=(*_LEASED, "config"),
    ),
    Operation(
        "pause_run",
        "POST",
        routes.PAUSE,
        "Pause the run, or let it go on. Updates under way still count.",
        callers=ADMIN,
        request=admin_messages.PauseRun,
        reply=admin_messages.Controlled,
        problems=("conflict", "disk_full"),
    ),
    Operation(
        "stop_run",
        "POST",
        routes.STOP,
        "End the run after the present round, or at once.",
        callers=ADMIN,
        request=admin_messages.StopRun,
        reply=admin_messages.Controlled,
        problems=("conflict", "disk_full"),
    ),
    Operation(
        "roll_back",
        "POST",
        routes.ROLLBACK,
        "Let the run go on from an earlier version that the server still has. The server begins again meanwhile.",
        callers=ADMIN,
        request=admin_messages.RollBack,
        reply=admin_messages.Controlled,
        problems=("conflict", "gone", "disk_full"),
    ),
    Operation(
        "get_authority",
        "GET",
        routes.AUTHORITY,
        "Get the certificate of the run's authority (PEM). Compare its fingerprint with that of the invitation.",
        callers=EVERYONE,
        reply=str,
        problems=("gone",),
    ),
    Operation(
        "enrol",
        "POST",
        routes.ENROL,
        "Use an invitation: its secret is the credential. The answer has the site's own one.",
        callers=EVERYONE,
        request=identity_messages.Enrol,
        reply=identity_messages.Credential,
        problems=("disk_full",),
    ),
    Operation(
        "renew",
        "POST",
        routes.RENEW,
        "Get a new credential. The present one stays valid until the new one was used.",
        callers=SITES,
        request=identity_messages.Renew,
        reply=identity_messages.Credential,
        identity=True,
        problems=("disk_full",),
    ),
    Operation(
        "invite",
        "POST",
        routes.INVITE,
        "Invite a site: it can enrol once with the invitation in the answer.",
        callers=ADMIN,
        request=identity_messages.Invite,
        reply=identity_messages.Invited,
        problems=("config", "conflict", "disk_full"),
    ),
    Operation(
        "revoke",
        "POST",
        routes.REVOKE,
        "Revoke a site's credential and invitation. Its lease ends, and its connections are closed.",
        callers=ADMIN,
        request=identity_messages.Revoke,
        reply=identity_messages.SiteRecord,
        problems=("disk_full",),
    ),
    Operation(
        "get_sites",
        "GET",
        routes.SITES,
        "Get the sites that were invited, enrolled, named or revoked.",
        callers=ADMIN,
        reply=identity_messages.SiteRecords,
    ),
    Operation(
        "get_status", "GET", routes.STATUS, "Get the status of the run.", callers=READERS, reply=status_messages.Status
    ),
    Operation(
        "get_events",
        "GET",
        routes.EVENTS,
        "Get what happened after an event; wait up to wait_s for the next one. With Accept: text/event-stream, pages "
        "of events follow as server-sent events until the run ends; the id of each is its last event.",
        callers=READERS,
        streams=True,
        query=run_events.EventQuery,
        reply=run_events.EventPage,
        problems=("gone",),
    ),
    Operation(
        "get_site_curves",
        "GET",
        routes.SITE_CURVES,
        "Get one number of each site's updates over the rounds, decimated for a chart.",
        callers=READERS,
        query=site_curves.SiteCurvesQuery,
        reply=site_curves.SiteCurves,
    ),
    Operation(
        "get_updates_table",
        "GET",
        routes.UPDATES_TABLE,
        "Get all updates of all rounds as CSV: one row a site, and one of the round, without a site.",
        callers=READERS,
        reply=bytes,
        media="text/csv",
    ),
    Operation(
        "get_model",
        "GET",
        routes.MODEL,
        "Get the model of a version as a safetensors file, as atoll export writes it.",
        callers=READERS,
        reply=bytes,
        media="application/octet-stream",
        problems=("gone",),
    ),
    Operation(
        "get_settings",
        "GET",
        routes.SETTINGS,
        "Get the settings in effect, with their sources.",
        callers=READERS,
        reply=status_messages.SettingsInEffect,
    ),
    Operation(
        "get_page", "GET", routes.PAGE, "The page that shows the run.", callers=EVERYONE, reply=str, media="text/html"
    ),
    Operation(
        "get_page_file",
        "GET",
        routes.PAGE_FILE,
        "A script or style of the page.",
        callers=EVERYONE,
        reply=str,
        media="*/*",
        problems=("not_found",),
    ),
    Operation("get_metrics", "GET", routes.METRICS, "Prometheus metrics.", callers=READERS, reply=str),
    Operation("get_health", "GET", routes.HEALTH, "Check whether the server answers.", callers=EVERYONE, reply=str),
    Operation(
        "get_readiness",
        "GET",
        routes.READY,
        "Check whether sites may join: the run is open, and has neither ended nor failed.",
        callers=EVERYONE,
        reply=str,
        problems=("not_ready",),
    ),
    Operation("get_openapi", "GET", routes.OPENAPI, "This document.", callers=READERS, reply=dict[str, Any]),
)

COMMON_PROBLEMS = ("bad_request", "auth", "forbidden", "busy", "server_failed")

HEX_DIGITS = {"digest": 64, "object": 32, "task": 32}
"""Hexadecimal parameter of a path → number of its digits. All other parameters are decimal numbers, but `file`."""
FILE_PATTERN = "^[a-z-]{1,40}[.](css|js|svg|txt)$"
"""Pattern of the parameter `file`."""


def openapi(version: str, *, is_open: bool = False, more: Sequence[Operation] = ()) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the interface.

    Args:
        version: version of Atoll.
        is_open: whether the server has no token.
        more: the operations of the server's extensions.
    """
    operations = (*OPERATIONS, *more)
    kinds: list[Any] = [kind for operation in operations for kind in (operation.request, operation.reply)]
    models = sorted({kind for kind in kinds if _is_message(kind)} | {messages.Problem}, key=lambda kind: kind.__name__)
    _, definitions = models_json_schema(
        [(kind, "validation") for kind in models], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _describe(operation, is_open=is_open)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Atoll",
            "version": version,
            "description": (
                f"Protocol {routes.PROTOCOL}. Workers connect to the server; tensors are sent as byte ranges and parts."
            ),
        },
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                **{kind: {"type": "http", "scheme": "bearer", "description": text} for kind, text in _TOKENS.items()},
                "peer": {
                    "type": "apiKey",
                    "in": "header",
                    "name": routes.SECRET_HEADER,
                    "description": "The secret of the object, from its reference.",
                },
            },
        },
    }


_TOKENS = {
    "site": "A token of the site's own; or instead a client certificate. Where sites need none: the run's token.",
    "reader": "The token in the file reader.token of the server's state directory.",
    "admin": "The token in the file admin.token of the server's state directory.",
}


def _is_message(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _describe(operation: Operation, *, is_open: bool) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    for name in re.findall(r"{(\w+)}", operation.path):
        schema: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": messages.NUMBER_BELOW - 1}
        if name in HEX_DIGITS:
            schema = {"type": "string", "pattern": f"^[0-9a-f]{{{HEX_DIGITS[name]}}}$"}
        elif name == "file":
            schema = {"type": "string", "pattern": FILE_PATTERN}
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    for name, schema in operation.query.model_json_schema()["properties"].items() if operation.query else ():
        parameters.append({"name": name, "in": "query", "required": False, "schema": schema})
    for needed, header, header_schema in (
        (operation.lease, routes.LEASE_HEADER, {"type": "string", "pattern": messages.LEASE_PATTERN}),
        (operation.secret, routes.SECRET_HEADER, {"type": "string", "pattern": "^[0-9a-f]{32}$"}),
    ):
        if needed:
            parameters.append({"name": header, "in": "header", "required": True, "schema": header_schema})
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "security": [{} if kind == "stranger" else {kind: []} for kind in callers_at(operation, is_open=is_open)],
        "parameters": parameters,
        "responses": _responses(operation),
    }
    if operation.request is not None:
        content = (
            {"application/json": {"schema": _ref(operation.request)}}
            if _is_message(operation.request)
            else {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        )
        described["requestBody"] = {"required": True, "content": content}
    return described


def _responses(operation: Operation) -> dict[str, Any]:
    reply = operation.reply
    answers: dict[str, Any] = {}
    if reply is None:
        answers["204"] = {"description": "Done."}
    elif _is_message(reply):
        content = {"application/json": {"schema": _ref(reply)}}
        if operation.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        answers["200"] = {"description": "OK", "content": content}
    elif reply is bytes and operation.media:
        content = {operation.media: {"schema": {"type": "string", "format": "binary"}}}
        answers["200"] = {"description": "The whole file.", "content": content}
    elif reply is bytes:
        binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
        answers["200"] = {"description": "The whole file.", "content": binary}
        answers["206"] = {"description": "The requested range.", "content": binary}
        answers["304"] = {"description": "The digest equals the one in If-None-Match."}
    elif reply is str:
        media = operation.media or "text/plain"
        answers["200"] = {"description": "OK", "content": {media: {"schema": {"type": "string"}}}}
    else:
        answers["200"] = {
            "description": "OK",
            "content": {"application/json": {"schema": {"type": "object"}}},
        }
    problem = {"application/json": {"schema": _ref(messages.Problem)}}
    codes: dict[int, list[str]] = {}
    for code in (*COMMON_PROBLEMS, *operation.problems):
        codes.setdefault(STATUS_OF[code], []).append(code)
    for status, names in sorted(codes.items()):
        answers[str(status)] = {"description": ", ".join(names), "content": problem}
    answers["500"] = {"description": "The server failed; see its log.", "content": problem}
    return answers


def _ref(kind: Any) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
