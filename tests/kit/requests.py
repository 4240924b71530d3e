"""Requests as any program may send them, which has only read the HTTP interface."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from typing import Any

from atoll.protocol import routes


def get(url: str, path: str, lease: str = "", **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    return send(url, "GET", path, None, lease, **headers)


def post(url: str, path: str, body: dict[str, Any], lease: str = "", **headers: str) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    return send(url, "POST", path, json.dumps(body).encode(), lease, **headers)


def send(
    url: str, method: str, path: str, body: bytes | None = None, lease: str = "", secret: str = "", **headers: str
) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer. `secret` is that of an object; an empty header is not sent."""
    shown = {"Atoll-Lease": lease, "Atoll-Secret": secret} | headers
    shown[routes.PROTOCOL_HEADER] = str(routes.PROTOCOL)
    sent = {"Content-Type": "application/json"} | {name: value for name, value in shown.items() if value}
    request = urllib.request.Request(url + path, body, sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


def joined(url: str, site: str, **more: Any) -> str:
    """The lease that the server gives to a new process of a site."""
    status, reply = post(url, "/v1/workers", {"protocol": routes.PROTOCOL, "site": site} | more)
    assert status == 200, reply
    return str(reply["lease"])


def version_path(url: str, version: int = 0) -> str:
    """The path of a version's file, which ends with its digest."""
    path = f"/v1/fragments/0/versions/{version}"
    return f"{path}/{get(url, path)[1]['digest']}"


def begin_request(
    port: int, line: str, body: bytes = b"", *, receive_bytes: int = 0, address: str = "127.0.0.1", **headers: object
) -> socket.socket:
    """Send the head of a request and what there is of its body; the answer is read from the socket.

    Args:
        line: method and path.
        receive_bytes: of the socket's buffer; 0: as large as usual.
        headers: with `_` for `-`.
    """
    raw = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    if receive_bytes:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    raw.settimeout(30.0)
    raw.connect((address, port))
    fields = {"Host": "localhost"} | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    raw.sendall(f"{line} HTTP/1.1\r\n{head}\r\n".encode() + body)
    return raw


def answer(raw: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer; the connection is closed."""
    with raw, raw.makefile("rb") as reply:
        status = int(reply.readline().split()[1])
        nbytes = 0
        while (line := reply.readline().strip()) and line:
            name, _, value = line.partition(b":")
            nbytes = int(value) if name.lower() == b"content-length" else nbytes
        return status, json.loads(reply.read(nbytes) or b"{}")
