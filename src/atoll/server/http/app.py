"""The aiohttp application of a server: one handler for each operation of `protocol/openapi.py`.

A request's limits are checked before its handler runs. Errors are sent as `Problem` messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from pydantic import BaseModel, ValidationError

from atoll.errors import (
    AtollError,
    AuthError,
    BadRequest,
    ConfigError,
    Forbidden,
    Gone,
    ServerFailed,
    StoreError,
    is_transient,
    no_more_files,
    out_of_memory,
    transient_reason,
)
from atoll.protocol import messages, routes, task_messages
from atoll.protocol.openapi import HEX_DIGITS, OPERATIONS, READERS, Operation
from atoll.protocol.read_message import framed, require_keys_once
from atoll.protocol.served_versions import in_protocol, protocol_of
from atoll.server.coordinator.roster import Lease, Presence
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.http.byte_routes import ByteRoutes, PartReceiver
from atoll.server.http.caller import CALLER, Caller, caller_of, require_caller
from atoll.server.http.caller_limits import TooManyConnections
from atoll.server.http.gate import Gate
from atoll.server.http.run_routes import RunRoutes
from atoll.store.journal import journal_failed
from atoll.store.store import directory_gone
from atoll.transport.request_body import break_off, interceptor_of, prove
from atoll.transport.serve_range import problem

LOG = logging.getLogger("atoll.server")
HTTP_LOG = logging.getLogger("atoll.server.http")
"""Logger of aiohttp's errors."""


class _OwnFaults(logging.Filter):
    """A log filter that drops errors that the other side caused: broken connections and invalid HTTP."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, (ConnectionError, HttpProcessingError))


HTTP_LOG.addFilter(_OwnFaults())

Message = TypeVar("Message", bound=BaseModel)
RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(served: ServedRun, gate: Gate, version: str) -> web.Application:
    """Return the application that serves a run.

    Args:
        served: the run.
        gate: the server's tokens, and the check of the Host header.
        version: version of Atoll, for the OpenAPI document.
    """
    gate.known, served.credentials.on_end = served.run.store.identities.known, gate.connections.close
    app = web.Application(client_max_size=routes.CONTROL_BODY_BYTES, middlewares=[_guard(gate, served)])
    owners = (
        RunRoutes(served, version, gate),
        ByteRoutes(served),
        PartReceiver(served),
        served.sites,
        served.tickets,
        served.updates,
        served.admin,
        served.credentials,
        *served.extensions.own,
        served.place,
        NoSwarm(),
    )
    for operation in served.extensions.operations:
        handler = _adapt(operation, served.extensions.method(operation), served, gate)
        app.router.add_route(operation.method, operation.path, handler, name=operation.name)
    for operation in OPERATIONS:
        method = next(getattr(owner, operation.name) for owner in owners if hasattr(owner, operation.name))
        handler = _adapt(operation, method, served, gate)
        app.router.add_route(operation.method, operation.path, handler, name=operation.name)
        if operation.path in (routes.HEALTH, routes.READY):  # load balancers ask with HEAD, too
            app.router.add_route("HEAD", operation.path, handler, name=f"{operation.name}_head")
    return app


def make_refusing_app(gate: Gate, error: ServerFailed, on_told: Callable[[Lease | None], None]) -> web.Application:
    """Return an application that answers every request with the failure of the run, which cannot even begin again.

    Args:
        gate: the server's tokens, and the check of the Host header.
        error: the failure.
        on_told: called with the lease in the header of each request that is answered so; None if it has none.
    """

    async def refuse(request: web.Request) -> web.StreamResponse:
        try:
            caller = admit(gate, request, None, {})
        except AuthError as refused:
            return problem(refused.code, refused.message, refused.remedy)
        on_told(caller.lease)
        return problem(error.code, error.message, error.remedy)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    return app


class NoSwarm:
    """Handlers of a swarm's requests at a server that aggregates itself."""

    async def get_swarm_plan(self, **_: object) -> None:
        """Refuse the request.

        Raises:
            ConfigError: the run is not a swarm.
        """
        raise ConfigError("The run is not a swarm: the server aggregates.", "Set swarm.enabled = true.")

    work_in_swarm = get_swarm_plan


BODY_S = 10.0
"""Maximum seconds that a client may take to send a message."""


def _adapt(
    operation: Operation, method: Callable[..., Awaitable[Any]], served: ServedRun, gate: Gate
) -> RequestHandler:
    """Return the aiohttp handler of an operation. It parses the request, calls `method`, and encodes the result.

    Args:
        operation: the operation.
        method: function that carries out the operation.
        served: the run.
        gate: tells whether the caller may act for the sites that the request names.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        caller, protocol = CALLER.get(), protocol_of(operation, request.headers.get(routes.PROTOCOL_HEADER))
        arguments = await _arguments(operation, request, caller, served, gate)
        if operation.path in (routes.STATUS, routes.EVENTS) and caller.lease is None:
            served.run.watched_s = time.monotonic()  # such as `atoll status --watch`; only sites send a lease
        result = await method(**arguments)
        if isinstance(result, web.StreamResponse):
            return result
        if result is None:
            return web.Response(status=204)
        if isinstance(result, str):
            return web.Response(text=result)
        if isinstance(result, tuple):
            message, data = result
            body = framed(in_protocol(message, protocol, exclude_defaults=True), data)
            return web.Response(body=body, content_type="application/octet-stream")
        return web.Response(body=in_protocol(result, protocol), content_type="application/json")

    return handle


async def _arguments(
    operation: Operation, request: web.Request, caller: Caller, served: ServedRun, gate: Gate
) -> dict[str, Any]:
    """Return the arguments for the method of an operation, from a request that names no site but the caller's own."""
    arguments = parameters(request)
    if operation.secret:
        arguments["secret"] = caller.stated_secret()
    for site in _named(served, operation, arguments, caller) if gate.may_refuse_names(caller) else ():
        gate.require_own(caller, site)
    if operation.lease:
        arguments["lease"] = served.leases.require_lease(caller.stated_lease())
    if operation.identity:
        arguments["identity"] = caller.identity
    if operation.path == routes.OBJECTS:
        arguments["payer"] = caller.payer
    if operation.query is not None:
        arguments["query"] = query_of(operation.query, request.query)
    if isinstance(operation.request, type) and issubclass(operation.request, BaseModel):
        message = await _read(request, operation.request, operation.body_bytes)
        for site in _named_in(served, message) if gate.may_refuse_names(caller) else ():
            gate.require_own(caller, site)
        if isinstance(message, messages.Join):
            served.sites.require_room(message.site, caller.identity)
        arguments["message"] = message
    if operation.request is bytes or operation.reply is bytes or operation.streams:
        arguments["request"] = request
    if operation.reply is bytes:
        arguments["caller"] = caller
    return arguments


def _named(served: ServedRun, operation: Operation, arguments: Mapping[str, Any], caller: Caller) -> Iterator[str]:
    """Return the sites that a request names before its message is read: by its lease, its ticket and its object.

    Others may read an object if they have its secret.
    """
    if operation.lease:
        yield caller.stated_lease().site
    if "ticket" in arguments:
        with contextlib.suppress(Gone):  # the handler says so
            yield served.run.store.tickets.get(arguments["ticket"]).site
    if "object" in arguments and operation.method != "GET":
        yield from served.objects.store.owners_of(arguments["object"])


def _named_in(served: ServedRun, message: BaseModel) -> Iterator[str]:
    """Return the sites that a message names."""
    if isinstance(message, messages.Join):
        yield message.site
    body = message.body if isinstance(message, task_messages.TaskAnswer) else None
    if body is not None and body.object is not None:
        yield from served.objects.store.owners_of(body.object.object)


async def _read(request: web.Request, kind: type[Message], most_bytes: int) -> Message:
    if request.content_type != "application/json":
        raise BadRequest(f"The body has the type {request.content_type}.", "Send application/json.")
    if (request.content_length or 0) > most_bytes:
        raise web.HTTPRequestEntityTooLarge(most_bytes, request.content_length or 0)
    async with asyncio.timeout(BODY_S):
        body = await request.clone(client_max_size=most_bytes).read()
    try:
        message = kind.model_validate_json(body)
        require_keys_once(body)
    except ValidationError as error:
        raise _readable(kind, error) from error
    except ValueError as error:
        raise BadRequest(f"{kind.__name__}: {error}.", "Send each field once.") from error
    return message


def _readable(kind: type[BaseModel], error: ValidationError) -> AtollError:
    first = error.errors()[0]
    where = ".".join(str(step) for step in first["loc"]) or "the body"
    if first["type"] == "extra_forbidden":
        return BadRequest(
            f"{kind.__name__} has the field {where!r}, which this server does not know.",
            "Use the same Atoll version on both sides.",
        )
    return BadRequest(f"{kind.__name__}: {where}: {first['msg']}.", "See the expected fields in /openapi.json.")


def query_of(kind: type[Message], parameters: Mapping[str, str]) -> Message:
    """Return the parameters of a query as a message: each at most once, as a text or as a JSON number.

    Raises:
        BadRequest: a parameter is unknown, stands twice, or has a wrong value.
    """
    numbers = {name for name, field in kind.model_fields.items() if field.annotation is not str}
    try:
        if len(parameters) != len(set(parameters)):
            raise BadRequest("A parameter stands twice in the query.", "Send each parameter once.")
        values = {name: json.loads(text[:40]) if name in numbers else text for name, text in parameters.items()}
        return kind.model_validate(values)
    except ValidationError as error:
        raise _readable(kind, error) from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The query is not of numbers: {error}.", "See the parameters in /openapi.json.") from error


def parameters(request: web.Request) -> dict[str, Any]:
    """Return the parameters in the path of a request: name → value.

    Raises:
        BadRequest: a parameter has a form that this server does not issue.
    """
    return {
        name: text
        if name == "file"
        else _hex(name, text, HEX_DIGITS[name])
        if name in HEX_DIGITS
        else _number(name, text)
        for name, text in request.match_info.items()
    }


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and int(text) < messages.NUMBER_BELOW):
        raise BadRequest(f"{name} is {text[:40]!r}, which is not a number that this server has issued.")
    return int(text)


def _hex(name: str, text: str, digits: int) -> str:
    if len(text) != digits or not re.fullmatch("[0-9a-f]+", text):
        raise BadRequest(
            f"{name} is {text[:80]!r}, not from this server.", f"Send the {digits} hex digits from its answer."
        )
    return text


PAGES = {operation.name for operation in OPERATIONS if hasattr(RunRoutes, operation.name)}
"""Operations that are answered even after the run has failed: `atoll status` shows why."""


def _guard(gate: Gate, served: ServedRun) -> Any:
    operations = {operation.name: operation for operation in (*OPERATIONS, *served.extensions.operations)}

    @web.middleware
    async def guard(request: web.Request, handler: RequestHandler) -> web.StreamResponse:
        name = request.match_info.route.name or ""
        # the whole name first: an operation of an extension may end in _head by itself
        operation = operations.get(name) or operations.get(name.removesuffix("_head"))

        def failure() -> ServerFailed | None:
            return None if operation and operation.name in PAGES else served.failure.failure_for(caller.lease)

        try:
            try:
                caller = admit(gate, request, operation, served.run.roster)
                CALLER.set(caller)
            except AuthError as refused:
                return await _refuse(gate, request, refused)
            held = _held(caller, request, served)
            with gate.connections.during(caller, request.transport):
                if held or gate.tokens.is_open or caller.kind not in ("stranger", "peer"):
                    prove(request)
                await gate.rates.admit(caller, "" if operation is None else operation.path, held)
                if (failed := failure()) is not None:
                    raise failed
                served.credentials.note_use(caller.identity)
                return await handler(request)
        except TimeoutError:
            raise
        except ConnectionError as error:  # the worker joins again, or is declared dead
            LOG.debug("%s %r: %s", request.method, request.path, error)
            break_off(request)
            return web.Response()  # never sent: the connection is closed
        except web.HTTPException as refused:
            return _refused(request, refused)
        except Exception as error:
            _note_refusal(gate, request, error)
            if isinstance(error, AuthError) and not isinstance(error, Forbidden):  # a wrong invitation or secret
                return await _refuse(gate, request, error)
            return _failed(served.run, request, failure() or error)  # the run may have failed meanwhile
        finally:
            interceptor = interceptor_of(request)
            if interceptor is not None and request.method == "PUT":
                interceptor.end_part()

    return guard


async def _refuse(gate: Gate, request: web.Request, refused: AuthError) -> web.Response:
    """Return the answer to a request without the right credential. After too many, it also ends the connection."""
    has_credential = "Authorization" in request.headers or request.match_info.route.name == "enrol"
    error = await gate.rates.refuse(request.remote or "", refused, has_credential=has_credential)
    response = problem(error.code, error.message, error.remedy, error.retry_after_s)
    if error is not refused:
        response.force_close()
    return response


def _held(caller: Caller, request: web.Request, served: ServedRun) -> str:
    """Return the object of which a request without another credential has the secret; empty if there is none."""
    name = request.match_info.get("object", "")
    with contextlib.suppress(AtollError):
        if caller.kind == "peer" and served.objects.store.find(name, caller.secret):
            return name
    return ""


def _note_refusal(gate: Gate, request: web.Request, error: Exception) -> None:
    """Count and log a refused request for another site, or of a site that may not join."""
    if isinstance(error, Forbidden):
        gate.refusals.note("caller", f"refused a request from {request.remote}: {error.message}")
    elif request.path == routes.WORKERS and isinstance(error, AtollError) and not is_transient(error):
        gate.refusals.note("join", f"refused to let a site join from {request.remote}: {error.message}")


NO_OPERATION = Operation("", "", "", "", callers=READERS)


def admit(gate: Gate, request: web.Request, operation: Operation | None, roster: Mapping[str, Presence]) -> Caller:
    """Return the caller of a request, if it may send it. A refusal is counted, and logged with its address.

    Args:
        gate: the server's tokens, and the check of the Host header.
        request: the request.
        operation: the requested operation; None if there is none, which only callers with a token get to know.
        roster: site → record of its worker.

    Raises:
        AuthError: the request is refused.
    """
    shown = gate.shown(request.get_extra_info("peercert"))
    caller = caller_of(request.remote, request.headers, gate.tokens, roster, shown)
    reason = "host"
    try:
        gate.require_host(request.headers.getall("Host", []))
        reason = "token"
        require_caller(caller, operation or NO_OPERATION, gate.tokens)
    except AuthError as error:
        reason = "caller" if isinstance(error, Forbidden) else reason
        gate.refusals.note(reason, f"refused a request from {caller.address}: {error.message}")
        raise
    return caller


def _refused(request: web.Request, refused: web.HTTPException) -> web.StreamResponse:
    """Return the answer to a request that aiohttp itself has refused, for example because its path is unknown."""
    match refused:
        case web.HTTPNotFound():
            return problem("not_found", f"This server has no path {request.path[:100]!r}.", "See /openapi.json.")
        case web.HTTPMethodNotAllowed():
            response = problem("method", f"The method {request.method[:20]} is not allowed here.", "See /openapi.json.")
            response.headers["Allow"] = ", ".join(sorted(refused.allowed_methods))
            return response
        case web.HTTPRequestEntityTooLarge():
            return problem("too_large", f"{str(refused.text).rstrip('.')}.", "Send a smaller message.")
    raise refused


def _failed(run: RunCore, request: web.Request, error: Exception) -> web.StreamResponse:
    """Return the answer to a request that failed. If the server cannot go on after the error, end the server."""
    if no_more_files(error):
        LOG.error("%s", transient_reason(error))
        return problem(
            "busy", "The server has too many files open.", "Try again: it accepts requests when fewer are open.", 2.0
        )
    gone = directory_gone(run.settings.disk.state_dir) if isinstance(error, StoreError | OSError) else None
    if isinstance(error, AtollError):
        if isinstance(error, StoreError) and (journal_failed(error) or gone):
            run.fail(error)
        response = problem(error.code, error.message, error.remedy, error.retry_after_s)
        if isinstance(error, TooManyConnections):
            response.force_close()
        return response
    if gone is not None:
        run.fail(gone)
    else:
        LOG.error("the request %s %r failed", request.method, request.path, exc_info=error)
    if isinstance(error, OSError):
        return problem("store", f"The server's disk failed: {os.strerror(error.errno or 0)}.")
    if (failed := out_of_memory(error)) is not None:
        run.fail(failed)
        return problem("busy", failed.message, "Try again after the server has restarted.", 2.0)
    return problem("error", "The server failed; see its log.")
