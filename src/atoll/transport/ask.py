"""One question to a server, for those that have to answer before torch would be imported."""

from __future__ import annotations

import http.client
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel, ValidationError

from atoll.config import DEFAULT_PORT, Settings
from atoll.config.run_file import require_known
from atoll.errors import BY_CODE, AtollError, PeerError, UsageError, VersionSkew
from atoll.protocol import messages
from atoll.transport.http_client import Response
from atoll.transport.tls import client_context, read_token
from atoll.transport.unreachable import no_atoll, unreachable

Reply = TypeVar("Reply", bound=BaseModel)

DEFAULT_SERVER = f"http://127.0.0.1:{DEFAULT_PORT}"


def server_address(given: str | None) -> str:
    """The server that a command means: its flag, else ATOLL_SERVER, else the default port on this machine.

    Raises:
        ConfigError: the environment has an ATOLL_ variable that is none.
    """
    require_known(os.environ, Settings.model_fields)
    return given or os.environ.get("ATOLL_SERVER") or DEFAULT_SERVER


def ask(
    server: str,
    path: str,
    reply: type[Reply],
    *,
    timeout_s: float = 10.0,
    environ: Mapping[str, str] = os.environ,
) -> Reply:
    """GET a typed message.

    Args:
        environ: where ATOLL_TOKEN or ATOLL_TOKEN_FILE, and ATOLL_TLS_CA are looked for.

    Raises:
        UsageError: `server` is no address.
        ServerUnreachable: nobody answers within `timeout_s`, or its certificate is not accepted.
        AuthError: the token is missing or wrong.
        VersionSkew: something else than this version of Atoll answers.
    """
    status, body = _get(server, path, timeout_s, environ)
    if (stranger := no_atoll(server, status, body)) is not None:
        raise stranger
    if status >= 400:
        raise _problem(server, status, body)
    try:
        return reply.model_validate_json(body)
    except ValidationError:
        raise VersionSkew(
            f"What {server} answered is no {reply.__name__}.",
            "Look whether an Atoll server of this version runs there.",
        ) from None


def _get(server: str, path: str, timeout_s: float, environ: Mapping[str, str]) -> tuple[int, bytes]:
    url = urlsplit(server)
    try:
        host, port = url.hostname, url.port
    except ValueError:
        host = port = None
    if url.scheme not in ("http", "https") or not host:
        raise UsageError(f"{server!r} is not the address of a server.", f"Write it as {DEFAULT_SERVER}.")
    token_file = environ.get("ATOLL_TOKEN_FILE")
    token = read_token(Path(token_file) if token_file else None)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connection = (
        http.client.HTTPConnection(host, port, timeout=timeout_s)
        if url.scheme == "http"
        else http.client.HTTPSConnection(
            host, port, timeout=timeout_s, context=client_context(environ.get("ATOLL_TLS_CA"))
        )
    )
    connection.response_class = Response
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        raise unreachable(server, str(error), why.lower(), " (--server, ATOLL_SERVER)") from error
    finally:
        connection.close()


def _problem(server: str, status: int, body: bytes) -> AtollError:
    try:
        problem = messages.Problem.model_validate_json(body)
    except ValidationError:
        return PeerError(f"{server} answered with HTTP status {status}.", "Look whether an Atoll server runs there.")
    return BY_CODE.get(problem.code, PeerError)(problem.message, problem.remedy)
