"""References: where an object can be pulled from, what it must be, and the secret that opens it.

    atoll-ref://HOST:PORT/OBJECT?expires=SECONDS#SECRET.DIGEST        atoll-refs:// where TLS is spoken

A reference is a key: a program that has it can pull the object, no other can. So `str` gives all of it, to be sent, and
`repr` and error messages leave the secret out.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime

from blake3 import blake3

from atoll.errors import AuthError, UsageError, public_api

_TEXT = re.compile(
    r"atoll-(?P<scheme>refs?)://(?P<host>\[[0-9a-fA-F:.]{2,45}\]|[0-9A-Za-z](?:[0-9A-Za-z._-]{0,251}[0-9A-Za-z])?)"
    r":(?P<port>[1-9][0-9]{0,4})/(?P<object>[0-9a-f]{32})\?expires=(?P<expires>[0-9]{1,12})"
    r"#(?P<secret>[0-9a-f]{32})\.(?P<digest>[0-9a-f]{64})"
)


@public_api
@dataclass(frozen=True, slots=True)
class TensorRef:
    """Where to pull an object from, with `atoll.objects.fetch(ref)`. It travels inside payloads, and as text in JSON.

    Attributes:
        host, port: of the process that serves the object; an IPv6 address without brackets.
        secure: whether it speaks TLS.
        object: id of the object there, 32 hex digits.
        secret: shown with every request, 32 hex digits.
        digest: of the object's bytes: what is pulled is checked against it.
        expires_at: seconds since 1970 by the publisher's clock, for people; the process that serves it decides.
    """

    host: str
    port: int
    secure: bool
    object: str
    secret: str = field(repr=False)
    digest: str
    expires_at: int

    def __post_init__(self) -> None:
        if not _TEXT.fullmatch(str(self)) or self.port > 65535:
            raise UsageError(
                "A TensorRef was made of parts that no reference has.", "Take one from atoll.objects.publish."
            )

    @classmethod
    def parse(cls, text: str) -> TensorRef:
        """Return the reference that `str` wrote.

        Raises:
            UsageError: it is none.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= 512 else None
        if match is None:
            raise UsageError(
                "The text is no reference to tensors.",
                "Pass on str(ref) of what atoll.objects.publish gave: atoll-ref://HOST:PORT/OBJECT?expires=…#SECRET.DIGEST.",
            )
        return cls(
            match["host"].strip("[]"),
            int(match["port"]),
            match["scheme"] == "refs",
            match["object"],
            match["secret"],
            match["digest"],
            int(match["expires"]),
        )

    @property
    def server(self) -> str:
        """Address of the process that serves it: http://host:port."""
        return address_of(self.host, self.port, secure=self.secure)

    @property
    def name(self) -> str:
        """What messages call it: no secret in it."""
        return f"{self.object[:8]} at {self._place}"

    @property
    def expires(self) -> str:
        """When it expires, for people."""
        return datetime.fromtimestamp(min(self.expires_at, 2**37), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    def __str__(self) -> str:
        scheme = "atoll-refs" if self.secure else "atoll-ref"
        return f"{scheme}://{self._place}/{self.object}?expires={self.expires_at}#{self.secret}.{self.digest}"

    @property
    def _place(self) -> str:
        return _place(self.host, self.port)


def address_of(host: str, port: int, *, secure: bool) -> str:
    """How an address is written: http://host:port, or https."""
    return f"{'https' if secure else 'http'}://{_place(host, port)}"


def _place(host: str, port: int) -> str:
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def new_id() -> str:
    """Return an id, or a secret, that cannot be guessed."""
    return secrets.token_hex(16)


def seal(secret: str) -> str:
    """Return what is kept of a secret: enough to check it, not to use it."""
    return blake3(secret.encode()).hexdigest()


def require_secret(sent: str | None, sealed: str, object_id: str) -> None:
    """Refuse a request without the object's secret.

    Raises:
        AuthError: another secret was sent, or none.
    """
    given = (sent or "").encode(errors="surrogateescape")
    if not hmac.compare_digest(blake3(given).hexdigest(), sealed):
        raise AuthError(
            f"The secret that was sent does not open object {object_id[:8]}.",
            "Use the reference as its publisher gave it; a reference from elsewhere opens nothing here.",
        )
