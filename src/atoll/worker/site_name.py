"""What a worker is called."""

from __future__ import annotations

import os
import socket

from atoll.errors import ConfigError
from atoll.protocol import messages


def default_site() -> str:
    """`ATOLL_SITE`, else a name made of host and process."""
    given = os.environ.get("ATOLL_SITE")
    if given:
        return given
    host = "".join(char if char.isalnum() or char in "-_" else "-" for char in socket.gethostname())
    return f"{host.lstrip('-_')[:40] or 'worker'}-{os.getpid()}"


def require_site(site: str) -> str:
    """A site name that every server accepts.

    Raises:
        ConfigError: it has other characters, or is too long.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(messages.Site).validate_python(site)
    except ValidationError:
        raise ConfigError(
            f"{site!r} is not a site name.", "Use 1 to 64 letters, digits, dots, hyphens and underscores."
        ) from None
