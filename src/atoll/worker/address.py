"""Requests to a server, as the environment says how."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.transport.client import Http
from atoll.transport.tls import read_token


def http_to(server: str) -> Http:
    """Requests to a server, with the token and the authority that the environment names.

    Raises:
        ConfigError: one of them cannot be read, or `server` is no address.
    """
    return Http(server, token=read_token(_token_file()), ca=os.environ.get("ATOLL_TLS_CA"))


def _token_file() -> Path | None:
    path = os.environ.get("ATOLL_TOKEN_FILE")
    return Path(path) if path else None
