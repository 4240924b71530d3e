"""An invitation as text: what the admin sends to a site, which enrols with it."""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field

from atoll.errors import UsageError

PREFIX = "atoll1_"
MOST_CHARS = 2048
_SECRET = re.compile(r"[A-Za-z0-9_-]{43}")
_FINGERPRINT = re.compile(r"[0-9a-f]{64}|")


@dataclass(frozen=True)
class Invitation:
    """An invitation.

    Attributes:
        server: address of the server.
        site: name of the site that may enrol.
        secret: proves at the server that the sender has the invitation. It can be used once.
        fingerprint: SHA-256 of the server's authority, hex; empty: the system's authorities (or those of ATOLL_TLS_CA)
            vouch for the server, or for the proxy before it.
    """

    server: str
    site: str
    secret: str = field(repr=False)
    fingerprint: str = ""

    def __str__(self) -> str:
        """Return the text that `Invitation.parse` reads: one word, to be copied."""
        values = [self.server, self.site, self.secret, self.fingerprint]
        return PREFIX + base64.urlsafe_b64encode(json.dumps(values).encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Invitation:
        """Return the invitation that a text contains.

        Raises:
            UsageError: the text is no invitation, or only a part of one. The message does not repeat it.
        """
        text = text.strip()
        try:
            if not text.startswith(PREFIX) or len(text) > MOST_CHARS:
                raise ValueError("no invitation")
            body = text.removeprefix(PREFIX)
            values = json.loads(base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True))
            server, site, secret, fingerprint = values
            if not all(isinstance(each, str) for each in values):
                raise ValueError("not of texts")
            if not _SECRET.fullmatch(secret) or not _FINGERPRINT.fullmatch(fingerprint):
                raise ValueError("a damaged part")
        except (ValueError, TypeError, RecursionError):
            raise UsageError(
                f"The invitation is not whole: it has {len(text)} characters, and has to begin with {PREFIX}.",
                "Copy it again, in one piece, from the output of `atoll invite`.",
            ) from None
        return cls(server, site, secret, fingerprint)
