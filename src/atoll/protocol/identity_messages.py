"""Messages by which a site gets a credential of its own, and the admin invites and revokes sites."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from atoll.protocol.messages import Count, Many, Message, Shown, Site

Pem = Annotated[str, StringConstraints(max_length=8192, pattern=r"^[A-Za-z0-9+/=\n\r -]*$")]
"""A certificate, a chain of two, or a signing request, as PEM."""
CredentialKind = Literal["certificate", "token"]
"""How a site proves its name: by a client certificate; behind a proxy that ends TLS, by a token of its own."""
LONGEST_INVITATION_S = 30 * 86_400.0


class Invite(Message):
    """Invite a site. An earlier invitation of the same name, if it was not used, is no longer valid."""

    site: Site
    lasts_s: float | None = Field(
        None,
        gt=0,
        le=LONGEST_INVITATION_S,
        description="Seconds for which it can be used; null: the setting trust.invitation_s.",
    )
    again: bool = Field(False, description="Let an enrolled site enrol again; its credential is revoked when it does.")


class Invited(Message):
    """An invitation. It is shown only now: the server keeps only the hash of the secret."""

    site: Site
    invitation: Annotated[str, StringConstraints(max_length=2048)] = Field(description="An `Invitation` as text.")
    expires_at: float = Field(description="Unix time.")


class Enrol(Message):
    """Use an invitation. The request needs no other credential."""

    secret: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{43}$")]
    request: Pem = Field("", description="Signing request of the site's key; empty: a token is asked for.")


class Renew(Message):
    """Ask for a new credential before the present one expires."""

    request: Pem = ""


class Credential(Message):
    """A site's new credential: a certificate or a token."""

    site: Site
    kind: CredentialKind
    certificate: Pem = ""
    authority: Pem = Field("", description="Certificate of the authority that signed it.")
    token: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{0,43}$")] = ""
    renew_after_s: float = Field(0.0, ge=0, description="Seconds until it should be renewed; 0: it need not be.")
    expires_at: float = Field(0.0, description="Unix time; 0: it does not expire.")


class Revoke(Message):
    """Revoke a site's credential and its open invitation, at once. May be repeated."""

    site: Site


class SiteRecord(Message):
    """What the server knows of a site's credential."""

    site: Site
    state: Literal["invited", "enrolled", "revoked", "external"] = Field(
        description="external: the run file names it, or another authority vouches for it; this server has no record."
    )
    kind: CredentialKind | Literal[""] = ""
    since: Shown = Field("", description="ISO 8601, UTC.")
    expires_at: float = 0.0
    used: Count = Field(0, description="Number of its enrolments.")
    is_alive: bool = Field(False, description="Whether it takes part at the moment.")


class SiteRecords(Message):
    """All sites that were invited, enrolled, named or revoked."""

    sites: Many[SiteRecord]
