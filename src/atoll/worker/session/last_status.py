"""What the server says to a site that leaves, kept for the program that started it: the server may be gone by then."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.protocol import routes
from atoll.protocol.status_messages import Status
from atoll.transport.http_client import Http

VARIABLE = "ATOLL_LAST_STATUS"
"""Set by a recipe's `ServerEnv`: the file that this goes to."""


def keep(http: Http) -> None:
    """Ask the server, where a program wants to know.

    Raises:
        AtollError: it does not answer.
    """
    if place := os.environ.get(VARIABLE):
        text = http.get(routes.STATUS, Status).model_dump_json()
        beside = Path(f"{place}.{os.getpid()}")  # ranks of one site leave at the same time
        beside.write_text(text, encoding="utf-8")
        beside.replace(place)
