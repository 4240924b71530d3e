"""The caller of a request, made once from its connection and headers; and the one place that refuses a caller.

Each operation of `protocol/openapi.py` declares the kinds of callers that it takes.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from blake3 import blake3

from atoll.errors import AuthError, BadRequest, Forbidden
from atoll.protocol import messages, routes
from atoll.protocol.openapi import CallerKind, Operation, callers_at
from atoll.server.coordinator.roster import Lease, Presence
from atoll.store.caller_tokens import TokenKind
from atoll.transport.tls import MOST_TOKEN_CHARS


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes:
        kind: what its credential makes it. A request has one kind: that of its token, if this is one of the server's.
        address: IP address of the connection; empty if it is closed already.
        site: name of the site, if the request proves with the secret of the site's newest lease that it is from there;
            else empty.
        lease: the lease that the request states, of which only the form was checked. `LeaseChecks.require_lease` tells
            whether it is valid. None if the request has none, or a malformed one.
        secret: secret of an object, of which only the form was checked; empty if there is none.
        has_token: whether the request has an Authorization header, be it a wrong token or of another scheme.
    """

    kind: CallerKind
    address: str = ""
    site: str = ""
    lease: Lease | None = None
    secret: str = field(default="", repr=False)
    has_token: bool = False

    def stated_lease(self) -> Lease:
        """Return the lease that the request states.

        Raises:
            BadRequest: it has none, or a malformed one.
        """
        return self.lease or Lease.parse(None)

    def stated_secret(self) -> str:
        """Return the secret of an object that the request states.

        Raises:
            BadRequest: it has none, or a malformed one.
        """
        if not self.secret:
            raise BadRequest("The secret is not from this server.", "Send the 32 hex digits from its answer.")
        return self.secret


class Tokens:
    """The tokens of a server. They are compared by their BLAKE3, in constant time.

    Args:
        of_sites: the run's token; None: the server is open, and needs no token of its sites.
    """

    def __init__(self, of_sites: str | None) -> None:
        self.is_open = not of_sites
        self._hashes: dict[CallerKind, bytes] = {}
        if of_sites:
            self._hashes["site"] = _hash(of_sites)

    def accept(self, tokens: Mapping[TokenKind, str]) -> None:
        """Accept these tokens: kind of caller → its token."""
        for kind, token in tokens.items():
            self._hashes[kind] = _hash(token)

    def kind_of(self, token: str) -> CallerKind | None:
        """Return the kind of caller that a token makes; None if the server does not know the token."""
        if not token or len(token) > MOST_TOKEN_CHARS:
            return None
        sent = _hash(token)
        found = [kind for kind, known in self._hashes.items() if hmac.compare_digest(sent, known)]
        return found[0] if found else None


def _hash(token: str) -> bytes:
    # with `surrogateescape`, a header with invalid UTF-8 is a wrong token, and not an error of `encode`
    return blake3(token.encode(errors="surrogateescape")).digest()


_SECRET = re.compile("[0-9a-f]{32}")


def caller_of(
    address: str | None, headers: Mapping[str, str], tokens: Tokens, roster: Mapping[str, Presence]
) -> Caller:
    """Return the caller of a request.

    Args:
        address: IP address of the connection; None if it is closed already.
        headers: headers of the request. Their names are compared without case.
        tokens: the tokens of the server.
        roster: site → record of its worker.
    """
    scheme, _, sent = headers.get("Authorization", "").partition(" ")
    token = sent if scheme.lower() == "bearer" else ""
    lease, site = None, ""
    with suppress(BadRequest):  # a malformed lease is refused where one is needed
        lease = Lease.parse(headers.get(routes.LEASE_HEADER))
        presence = roster.get(lease.site)
        site = lease.site if presence is not None and lease.opens(presence) else ""
    secret = headers.get(routes.SECRET_HEADER, "")
    secret = secret if _SECRET.fullmatch(secret) else ""
    kind = tokens.kind_of(token)
    if kind is None:
        kind = "site" if tokens.is_open and site else "peer" if secret else "stranger"
    return Caller(kind, address or "", site, lease, secret, bool(sent))


_SHOWN: dict[CallerKind, tuple[str, str]] = {
    "stranger": ("a stranger", "no token"),
    "site": ("a site", "the run's token, or no token if the run has none"),
    "peer": ("a holder of an object's secret", "no token"),
    "reader": ("a reader", "the token in reader.token of the server's state directory"),
    "admin": ("the admin", "the token in admin.token of the server's state directory"),
}
"""Kind of caller → its name, and its token, in messages."""


def require_caller(caller: Caller, operation: Operation, *, is_open: bool) -> None:
    """Refuse a caller that an operation does not take.

    Args:
        caller: the caller of the request.
        operation: the operation.
        is_open: whether the server has no token.

    Raises:
        AuthError: the request has no credential that the server knows.
        Forbidden: it has one of another kind.
    """
    if caller.kind in callers_at(operation, is_open=is_open):
        return
    if caller.kind == "stranger" or (caller.kind == "peer" and caller.has_token):
        raise AuthError(
            messages.WRONG_TOKEN if caller.has_token else "The server requires a token, but the request has none.",
            "Set ATOLL_TOKEN to the token, or ATOLL_TOKEN_FILE to a file with it, of mode 0600.",
        )
    names, tokens = zip(*(_SHOWN[kind] for kind in operation.callers), strict=True)
    raise Forbidden(
        f"The request is that of {_SHOWN[caller.kind][0]}, but only {' or '.join(names)} may send it.",
        f"Send {', or '.join(dict.fromkeys(tokens))}.",
    )
