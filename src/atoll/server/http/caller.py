"""The caller of a request, made once from its connection and headers; and the one place that refuses a caller.

Each operation of `protocol/openapi.py` declares the kinds of callers that it takes.
"""

from __future__ import annotations

import hmac
import re
import ssl
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from atoll.errors import AuthError, BadRequest, Forbidden
from atoll.protocol import messages, routes
from atoll.protocol.openapi import CallerKind, Operation, callers_at
from atoll.registry import nearest
from atoll.server.coordinator.roster import Lease, Presence
from atoll.store.caller_tokens import TokenKind
from atoll.store.identities import KnownSites
from atoll.tensors.reference import hash_of_secret
from atoll.transport.certificates import SiteIdentity, identity_in
from atoll.transport.rates import network_of
from atoll.transport.tls import MOST_TOKEN_CHARS


@dataclass(frozen=True)
class Caller:
    """The sender of a request.

    Attributes:
        kind: what its credential makes it. A request has one kind: that of its token, if this is one of the server's.
        address: IP address of the connection; empty if it is closed already.
        site: name of the site, if the request proves that it is from there: by a credential of the site's own, else by
            the secret of the site's newest lease; else empty.
        identity: what a credential of the site's own proves; None if the request has none that is accepted.
        by_certificate: whether that is the certificate of the connection: then the whole connection is the site's.
        fault: why a credential of a site's own is not accepted, and what to do; empty if there is none, or it is.
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
    identity: SiteIdentity | None = None
    by_certificate: bool = False
    fault: tuple[str, str] = ("", "")

    @property
    def key(self) -> str:
        """What is counted for this caller: its site, or else its address."""
        return f"site {self.site}" if self.site else network_of(self.address)

    @property
    def payer(self) -> str:
        """What pays for joins and objects: as `key`, but of a site only if it has a credential. Leases are free."""
        return self.key if self.identity is not None else network_of(self.address)

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


CALLER: ContextVar[Caller] = ContextVar("caller")
"""The caller of the request that the present task handles: `_guard` of `app` sets it."""


class Tokens:
    """The tokens of a server. They are compared by their BLAKE3, in constant time.

    Args:
        of_sites: the run's token; None: the server is open, and needs no token of its sites.
        own_credentials: whether each site needs a credential of its own. Then the run's token makes no site.
    """

    def __init__(self, of_sites: str | None, *, own_credentials: bool = False) -> None:
        self.own_credentials = own_credentials
        self.is_open = not of_sites and not own_credentials
        self._hashes: dict[CallerKind, bytes] = {}
        if of_sites and not own_credentials:
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
    address: str | None,
    headers: Mapping[str, str],
    tokens: Tokens,
    roster: Mapping[str, Presence],
    shown: ShownCredentials | None = None,
) -> Caller:
    """Return the caller of a request.

    Args:
        address: IP address of the connection; None if it is closed already.
        headers: headers of the request. Their names are compared without case.
        tokens: the tokens of the server.
        roster: site → record of its worker.
        shown: what the server knows of credentials, and the connection's certificate; None: there is neither.
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
    identity, fault, by_certificate = (None, ("", ""), False) if shown is None else shown.identity(token)
    if kind is None or (kind == "site" and (identity or any(fault))):
        if identity is not None:
            kind, site = "site", identity.site
        else:
            kind = "site" if tokens.is_open and site and not any(fault) else "peer" if secret else "stranger"
    return Caller(kind, address or "", site, lease, secret, bool(sent), identity, by_certificate, fault)


@dataclass(frozen=True)
class ShownCredentials:
    """What decides which site a request is from.

    Attributes:
        known: what the server knows of credentials.
        now_s: Unix time.
        certificate: the certificate of the connection, as `ssl.SSLSocket.getpeercert` returns it. TLS has checked its
            signature and its dates.
        authority: common name of the run's own authority; empty if it has none.
    """

    known: KnownSites
    now_s: float
    certificate: Mapping[str, Any] | None = None
    authority: str = ""

    def identity(self, token: str) -> tuple[SiteIdentity | None, tuple[str, str], bool]:
        """Return the site that the credentials of a request prove, why not, and whether the certificate does.

        Args:
            token: the bearer token of the request; empty if it has none.
        """
        found: list[tuple[SiteIdentity, str | None]] = []
        if self.certificate:
            stated = identity_in(self.certificate)
            if stated is None:
                return None, ("The client certificate names no site.", _NAMES), True
            end_s = ssl.cert_time_to_seconds(self.certificate["notAfter"])
            if self.now_s >= end_s:  # the connection is older
                text = f"The certificate of site {stated.site!r} expired on {self.certificate['notAfter']}."
                return None, (text, _CLOCKS), True
            own = bool(self.authority) and stated.issuer == self.authority
            found.append((stated, stated.serial if own else None))
        if token and len(token) <= MOST_TOKEN_CHARS:
            hashed = hash_of_secret(token)
            if site := self.known.site_of_token(hashed):
                found.append((SiteIdentity(site, hashed), hashed))
        for each, credential in found:
            fault = self.known.fault(each.site, credential, self.now_s)
            if any(fault):
                return None, fault, bool(self.certificate)
        names = list(dict.fromkeys(each.site for each, _ in found))
        if len(names) > 1:
            text = f"The certificate is that of site {names[0]!r}, but the token is that of site {names[1]!r}."
            return None, (text, "Send only one of them."), True
        return (found[0][0] if found else None), ("", ""), bool(self.certificate)


_NAMES = "Its name is in a SPIFFE URI, such as spiffe://example.org/site/NAME, or else the common name."
_CLOCKS = "Enrol again with a new invitation. If the clock of one of the machines is wrong, correct it."


def require_own(caller: Caller, named: str, known: KnownSites, tokens: Tokens, allowed: Sequence[str]) -> None:
    """Refuse a request that names a site which its credential does not prove.

    Args:
        caller: the caller of the request.
        named: the site that the request names: by its lease, ticket, object, or in its message.
        known: what the server knows of credentials.
        tokens: the tokens of the server.
        allowed: the setting `trust.sites`; empty: each site may take part.

    Raises:
        Forbidden: it names another site, or one that may not take part; or it needs a credential, and has none.
    """
    if allowed and named not in allowed:
        raise Forbidden(
            f"Site {named!r} is not in trust.sites.",
            nearest(named, allowed, "Ask the admin of the run which names may take part."),
        )
    if caller.identity is not None and caller.identity.site != named:
        raise Forbidden(
            f"The credential is that of site {caller.identity.site!r}, but the request is for site {named!r}.",
            f"Send it with the credential of {named!r}, or leave the name out.",
        )
    if caller.identity is None and (tokens.own_credentials or known.has_credential(named)):
        raise Forbidden(
            f"The request is for site {named!r}, but has no credential of this site.",
            f"Enrol it: `atoll enrol INVITATION`. The admin of the run makes one: `atoll invite {named}`.",
        )


_SHOWN: dict[CallerKind, tuple[str, str]] = {
    "stranger": ("a stranger", "no token"),
    "site": ("a site", "the site's credential, or where sites need none the run's token"),
    "peer": ("a holder of an object's secret", "no token"),
    "reader": ("a reader", "the token in reader.token of the server's state directory"),
    "admin": ("the admin", "the token in admin.token of the server's state directory"),
}
"""Kind of caller → its name, and its token, in messages."""


def require_caller(caller: Caller, operation: Operation, tokens: Tokens) -> None:
    """Refuse a caller that an operation does not take.

    Args:
        caller: the caller of the request.
        operation: the operation.
        tokens: the tokens of the server.

    Raises:
        AuthError: the request has no credential that the server knows.
        Forbidden: it has one of another kind.
    """
    if any(caller.fault) and "stranger" not in operation.callers and caller.kind not in ("reader", "admin"):
        raise AuthError(*caller.fault)
    if caller.kind in callers_at(operation, is_open=tokens.is_open):
        return
    if caller.kind == "stranger" or (caller.kind == "peer" and caller.has_token):
        if tokens.own_credentials and "site" in operation.callers:
            raise AuthError(
                "The server requires a credential of the site's own, but the request has none that it knows.",
                "Enrol the site: `atoll enrol INVITATION`. The admin of the run makes one: `atoll invite SITE`.",
            )
        raise AuthError(
            messages.WRONG_TOKEN if caller.has_token else "The server requires a token, but the request has none.",
            "Set ATOLL_TOKEN to the token, or ATOLL_TOKEN_FILE to a file with it, of mode 0600.",
        )
    names, needed = zip(*(_SHOWN[kind] for kind in operation.callers), strict=True)
    raise Forbidden(
        f"The request is that of {_SHOWN[caller.kind][0]}, but only {' or '.join(names)} may send it.",
        f"Send {', or '.join(dict.fromkeys(needed))}.",
    )
