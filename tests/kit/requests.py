"""Requests as any program may send them, which has only read the HTTP interface."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def post(url: str, path: str, body: dict[str, Any], lease: str = "") -> tuple[int, dict[str, Any]]:
    """Status and body of the answer."""
    headers = {"Content-Type": "application/json"} | ({"Atoll-Lease": lease} if lease else {})
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, json.loads(reply.read() or b"{}")
    except urllib.error.HTTPError as refused:
        return refused.code, json.loads(refused.read())


def joined(url: str, site: str, **more: Any) -> str:
    """The lease that the server gives to a new process of a site."""
    status, reply = post(url, "/v1/workers", {"protocol": 1, "site": site} | more)
    assert status == 200, reply
    return str(reply["lease"])
