"""Requests to a server, as the environment says how."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.config import Settings
from atoll.config.run_file import require_known
from atoll.errors import ConfigError
from atoll.transport.http_client import Http
from atoll.transport.tls import read_token


def server_of(given: str | None, *, require_server: bool = False) -> str | None:
    """The server that a script takes part at: as given, else `ATOLL_SERVER`. None: it trains alone.

    Raises:
        ConfigError: the environment has an ATOLL_ variable that is none; or there is no server, and one is required.
    """
    require_known(os.environ, Settings.model_fields)
    server = given or os.environ.get("ATOLL_SERVER")
    if not server and require_server:
        raise ConfigError(
            "No server is configured, and the script must not train alone (require_server).",
            "Set ATOLL_SERVER, give server=, or start the script with `atoll worker`.",
        )
    return server or None


def http_to(server: str) -> Http:
    """Requests to a server, with the token and the authority that the environment names.

    Raises:
        ConfigError: one of them cannot be read, or `server` is no address.
    """
    return Http(server, token=read_token(_token_file()), ca=os.environ.get("ATOLL_TLS_CA"))


def _token_file() -> Path | None:
    path = os.environ.get("ATOLL_TOKEN_FILE")
    return Path(path) if path else None
