"""References: the address of a published object, its digest, and the secret that is needed to pull the object.

    atoll-ref://HOST:PORT/PATH/OBJECT?expires=SECONDS#SECRET.DIGEST        with TLS: atoll-refs://

PATH is that of the server's address; most addresses have none.

Every program that has the reference can pull the object, and no other program can. `str` returns the whole reference,
for sending. `repr` and error messages omit the secret.
"""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime

from blake3 import blake3

from atoll.errors import AuthError, UsageError, public_api

_CHARACTER = r"(?:[0-9A-Za-z._~@+=:,-]|%(?!2[eEfF]|5[cC]|[01])[0-9A-Fa-f]{2})"
PATH = re.compile(rf"(?=.{{0,128}}\Z)(?:/(?!\.){_CHARACTER}+)*")
"""The path of a server's address, without a slash at its end: at most 128 characters, no part is empty or begins with a
dot."""
_TEXT = re.compile(
    r"atoll-(?P<scheme>refs?)://(?P<host>\[[0-9a-fA-F:.]{2,45}\]|[0-9A-Za-z](?:[0-9A-Za-z._-]{0,251}[0-9A-Za-z])?)"
    r":(?P<port>[1-9][0-9]{0,4})(?P<path>(?:/[^/?#]+)*)/(?P<object>[0-9a-f]{32})\?expires=(?P<expires>[0-9]{1,12})"
    r"#(?P<secret>[0-9a-f]{32})\.(?P<digest>[0-9a-f]{64})"
)


def why_no_path(path: str) -> str:
    """Return what of a path does not match `PATH`, to append to a sentence; an empty text for a valid path."""
    if PATH.fullmatch(path):
        return ""
    if len(path) > 128:
        return f": it has {len(path)} characters"
    parts = path.split("/")[1:]
    if "" in parts:
        return f": the part between two slashes is empty in {path!r}"
    wrong = next((part for part in parts if not PATH.fullmatch(f"/{part}")), path)
    return f", because of {wrong!r}"


@public_api
@dataclass(frozen=True, slots=True)
class TensorRef:
    """A reference to a published object. `atoll.objects.fetch(ref)` pulls the object.

    References can be sent inside payloads, and as text in JSON.

    Attributes:
        host, port: address of the process that serves the object; an IPv6 address has no brackets.
        secure: whether that process uses TLS.
        object: id of the object, 32 hex digits.
        secret: secret that is sent with every request for the object, 32 hex digits.
        digest: digest of the object's bytes, to check the pulled bytes.
        expires_at: expiry time in seconds since 1970, by the publisher's clock. For display only: the serving process
            decides when the object expires.
        path: path of the server's address, such as `/fl/run1` behind a gateway; empty for most.
    """

    host: str
    port: int
    secure: bool
    object: str
    secret: str = field(repr=False)
    digest: str
    expires_at: int
    path: str = ""

    def __post_init__(self) -> None:
        if not _TEXT.fullmatch(str(self)) or self.port > 65535 or not PATH.fullmatch(self.path):
            raise UsageError(
                "A TensorRef was built from invalid values.", "Use a reference that atoll.objects.publish returned."
            )

    @classmethod
    def parse(cls, text: str) -> TensorRef:
        """Return the reference that was converted to text with `str(reference)`.

        Raises:
            UsageError: the text is not a reference.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) and len(text) <= 640 else None
        if match is None:
            raise UsageError(
                "The text is not a reference to tensors.",
                "Use str(ref) of a reference that atoll.objects.publish returned: "
                "atoll-ref://HOST:PORT/OBJECT?expires=…#SECRET.DIGEST.",
            )
        return cls(
            match["host"].strip("[]"),
            int(match["port"]),
            match["scheme"] == "refs",
            match["object"],
            match["secret"],
            match["digest"],
            int(match["expires"]),
            match["path"],
        )

    @property
    def server(self) -> str:
        """Address of the process that serves the object: http://host:port and its path, or https with TLS."""
        return address_of(self.host, self.port, secure=self.secure) + self.path

    @property
    def name(self) -> str:
        """Short name for messages, without the secret."""
        return f"{self.object[:8]} at {self._authority}"

    @property
    def expires(self) -> str:
        """Expiry time as text in UTC, for display."""
        return datetime.fromtimestamp(min(self.expires_at, 2**37), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

    def __str__(self) -> str:
        scheme = "atoll-refs" if self.secure else "atoll-ref"
        where = f"{scheme}://{self._authority}{self.path}/{self.object}"
        return f"{where}?expires={self.expires_at}#{self.secret}.{self.digest}"

    @property
    def _authority(self) -> str:
        return authority_of(self.host, self.port)


def address_of(host: str, port: int, *, secure: bool) -> str:
    """Return a URL: http://host:port, or https if `secure`. An IPv6 address gets brackets."""
    return f"{'https' if secure else 'http'}://{authority_of(host, port)}"


def authority_of(host: str, port: int) -> str:
    """Return host:port. An IPv6 address gets brackets."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def new_id() -> str:
    """Return a new random id or secret: 128 bits as 32 hex digits."""
    return secrets.token_hex(16)


def hash_of_secret(secret: str) -> str:
    """Return the hash of a secret, which is stored instead of the secret."""
    return blake3(secret.encode(errors="surrogateescape")).hexdigest()


def require_secret(sent: str | None, sealed: str, object_id: str) -> None:
    """Check that a request for an object contains the object's secret.

    Args:
        sent: the secret in the request; None if there is none.
        sealed: hash of the object's secret, from `hash_of_secret`.
        object_id: id of the object, for the message.

    Raises:
        AuthError: the secret is wrong or missing.
    """
    if not hmac.compare_digest(hash_of_secret(sent or ""), sealed):
        raise AuthError(
            f"The secret in the request is not the secret of object {object_id[:8]}.",
            "Use the reference exactly as its publisher gave it.",
        )
