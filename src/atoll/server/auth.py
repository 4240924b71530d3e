"""Who may speak to the server. Identity comes from the credential, never from a body.

Today there is one bearer token for a run, bound to no site. Enrolment (a certificate or token per site) adds
credentials here; the handlers already ask `Identity.require_site`.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass

from aiohttp import web

from atoll.config import Settings
from atoll.errors import AuthError, ConfigError
from atoll.transport.tls import is_loopback, read_token


@dataclass(frozen=True)
class Identity:
    """What a credential proves. `site` None: any site may be named."""

    site: str | None = None

    def require_site(self, site: str) -> None:
        """Refuse a request in another site's name.

        Raises:
            AuthError: the credential belongs to another site.
        """
        if self.site is not None and self.site != site:
            raise AuthError(
                f"The credential belongs to {self.site!r}, not to {site!r}.", "Use the site's own credential."
            )


IDENTITY = web.RequestKey("identity", Identity)
"""Where a request carries who sent it."""


class Gate:
    """Checks the Authorization header of every request."""

    def __init__(self, token: str | None) -> None:
        self._token = token.encode() if token else None

    def admit(self, authorization: str | None) -> Identity:
        """The identity behind a request.

        Raises:
            AuthError: a token is needed and none, or another, was sent.
        """
        if self._token is None:
            return Identity()
        scheme, _, sent = (authorization or "").partition(" ")
        # whoever sends bytes that are no text must not get further than who sends a wrong token
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent.encode(errors="surrogateescape"), self._token):
            raise AuthError(
                "The request carries no valid token." if sent else "The server wants a token.",
                "Set ATOLL_TOKEN, or ATOLL_TOKEN_FILE to a file of mode 0600 that holds it.",
            )
        return Identity()


def open_gate(settings: Settings) -> Gate:
    """The gate for these settings.

    Raises:
        ConfigError: the address is not loopback, and TLS or a token is missing, without `insecure`.
    """
    token = read_token(settings.token_file)
    if not is_loopback(settings.host) and not settings.insecure:
        lacking = [
            name
            for name, there in (
                ("TLS (tls_cert, tls_key)", settings.tls_cert),
                ("a token (ATOLL_TOKEN or token_file)", token),
            )
            if not there
        ]
        if lacking:
            raise ConfigError(
                f"host is {settings.host}, which others can reach, without {' and without '.join(lacking)}.",
                "Give them, or listen on 127.0.0.1, or say --insecure if the network is your own.",
            )
    return Gate(token)
