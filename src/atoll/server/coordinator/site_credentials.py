"""The operations by which sites get, renew and lose credentials of their own."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

from atoll.config.settings import Trust
from atoll.errors import ConfigError, DiskFull, Forbidden, Gone
from atoll.protocol import identity_messages as messages
from atoll.protocol.invitation import Invitation
from atoll.registry import nearest
from atoll.rounds import events
from atoll.server.coordinator.run_core import RunCore
from atoll.store.identities import Identities, KnownSites
from atoll.store.journal_tables import IdentityRow
from atoll.tensors.reference import hash_of_secret
from atoll.transport.certificates import Keyed, SiteIdentity, fingerprint, site_certificate, validity

LOG = logging.getLogger("atoll.server")

SECRET_BYTES = 32
"""Number of random bytes of an invitation's secret, and of a site's token."""


@dataclass(frozen=True)
class Issuing:
    """How a server issues credentials.

    Attributes:
        address: address of the server in invitations; empty: where it listens.
        authority: the run's own authority; None: sites get tokens.
        is_trusted_by_it: whether it vouches for the server, too: then invitations have its fingerprint.
    """

    address: str = ""
    authority: Keyed | None = None
    is_trusted_by_it: bool = False


class SiteCredentials:
    """Carries out the operations of `protocol/openapi.py` on credentials of sites.

    Args:
        run: the run.

    Attributes:
        issuing: how this server issues credentials; set before it accepts connections.
        on_end: called with the name of a site after its credential has ended; it closes the site's connections.
    """

    def __init__(self, run: RunCore) -> None:
        self._run, self._identities = run, run.store.identities
        self.issuing = Issuing()
        self.on_end: Callable[[str], None] = lambda _: None

    async def get_authority(self) -> str:
        """Return the certificate of the run's own authority, as PEM.

        Raises:
            Gone: the run has none.
        """
        if self.issuing.authority is None:
            raise Gone("The run has no authority of its own: its sites get tokens.", "Enrol without its certificate.")
        return self.issuing.authority.certificate.decode()

    async def invite(self, message: messages.Invite) -> messages.Invited:
        """Invite a site.

        Raises:
            ConfigError: the run's settings do not allow the name.
            Conflict: the site has enrolled already.
        """
        invited = invite(self._identities, message, self.issuing, self._run.address, self._run.settings.trust)
        LOG.info("site %s is invited", message.site)
        return invited

    async def enrol(self, message: messages.Enrol) -> messages.Credential:
        """Let a site use its invitation, and return its credential.

        Raises:
            AuthError: the invitation has expired, was used, or is not one of this run.
            Forbidden: the name of the invitation is not in `trust.sites`.
            BadRequest: the signing request is not valid.
        """
        row = self._identities.find_invitation(message.secret, message.request)
        allowed = self._run.settings.trust.sites
        if allowed and row.site not in allowed:
            raise Forbidden(f"Site {row.site!r} is not in trust.sites.", nearest(row.site, allowed))
        made, credential = self._make(row.site, message.request)
        before, is_new = row.credential, row.state == "enrolled"
        self._identities.enrol(
            row, made.kind, credential, made.expires_at, secret=message.secret, request=message.request
        )
        if is_new and before:
            self._ended(row.site)
        LOG.info("site %s has enrolled: it has a %s of its own", row.site, made.kind)
        return made

    async def renew(self, message: messages.Renew, identity: SiteIdentity | None) -> messages.Credential:
        """Return a new credential for a site.

        Raises:
            Forbidden: its credential is not of this run.
            BadRequest: the signing request is not valid.
        """
        row = self._identities.rows.get(identity.site) if identity is not None else None
        if identity is None or row is None or identity.serial not in (row.credential, row.previous):
            raise Forbidden(
                "The request has no credential that this run has issued, so it cannot be renewed here.",
                "Renew it where it is from.",
            )
        made, credential = self._make(row.site, message.request)
        self._identities.renew(row.site, identity.serial, made.kind, credential, made.expires_at)
        LOG.debug("site %s has renewed its %s", row.site, made.kind)
        return made

    def note_use(self, identity: SiteIdentity | None) -> None:
        """Note that a request was admitted by this credential; None: it has none."""
        if identity is not None and identity.site in self._identities.rows:
            with contextlib.suppress(DiskFull):  # a later request notes it
                self._identities.note_use(identity.site, identity.serial)

    async def revoke(self, message: messages.Revoke) -> messages.SiteRecord:
        """End a site's credential and invitation, its lease, and its connections. May be repeated."""
        row = self._identities.revoke(message.site)
        self._ended(message.site)
        LOG.warning("site %s is revoked", message.site)
        return self._record(row)

    def _ended(self, site: str) -> None:
        """End what a site does with a credential that is not valid any more."""
        member = self._run.state.members.get(site)
        if member is not None and member.alive:
            self._run.ledger.record(events.WorkerLeft(site, member.lease))
        self.on_end(site)

    async def get_sites(self) -> messages.SiteRecords:
        """Return all sites that were invited, enrolled, named or revoked, or that take part."""
        return messages.SiteRecords(sites=records(self._identities, self._run.settings.trust.sites, self._alive()))

    def _alive(self) -> Mapping[str, bool]:
        return {site: member.alive for site, member in self._run.state.members.items()}

    def _record(self, row: IdentityRow) -> messages.SiteRecord:
        return record(row, is_alive=self._alive().get(row.site, False))

    def _make(self, site: str, request: str) -> tuple[messages.Credential, str]:
        """Return a new credential, and what the journal keeps of it: a serial number, or the hash of a token."""
        lasts_s, authority = self._run.settings.trust.certificate_s, self.issuing.authority
        expires_at = self._identities.clock() + lasts_s
        if not request or authority is None:
            token = secrets.token_urlsafe(SECRET_BYTES)
            made = messages.Credential(
                site=site, kind="token", token=token, renew_after_s=lasts_s / 2, expires_at=expires_at
            )
            return made, hash_of_secret(token)
        certificate, identity = site_certificate(authority, request, site, timedelta(seconds=lasts_s))
        made = messages.Credential(
            site=site,
            kind="certificate",
            certificate=certificate.decode(),
            authority=authority.certificate.decode(),
            renew_after_s=lasts_s / 2,
            expires_at=validity(certificate)[1].timestamp(),
        )
        return made, identity.serial


def invite(
    identities: Identities, message: messages.Invite, issuing: Issuing, address: str, trust: Trust
) -> messages.Invited:
    """Record an invitation, and return it.

    Args:
        identities: the credentials of the run's sites.
        message: which site to invite.
        issuing: how the server issues credentials.
        address: where the server listens.
        trust: the settings of this group.

    Raises:
        ConfigError: the name is not in `trust.sites`.
        Conflict: the site has enrolled already.
    """
    if trust.sites and message.site not in trust.sites:
        raise ConfigError(
            f"Site {message.site!r} is not in trust.sites.",
            nearest(message.site, trust.sites, "Add the name there, and start the server again."),
        )
    secret = secrets.token_urlsafe(SECRET_BYTES)
    row = identities.invite(message.site, secret, message.lasts_s or trust.invitation_s, again=message.again)
    mark = fingerprint(issuing.authority.certificate) if issuing.authority and issuing.is_trusted_by_it else ""
    text = str(Invitation(issuing.address or address, message.site, secret, mark))
    return messages.Invited(site=message.site, invitation=text, expires_at=row.invited_until)


def record(row: IdentityRow, *, is_alive: bool = False) -> messages.SiteRecord:
    """Return the row of a site as a message."""
    return messages.SiteRecord(
        site=row.site,
        state=row.state,
        kind="certificate" if row.kind == "certificate" else "token" if row.kind else "",
        since=row.since,
        expires_at=row.expires_at if row.state == "enrolled" else row.invited_until if row.invitation else 0.0,
        used=row.enrolments,
        is_alive=is_alive,
    )


def records(
    identities: Identities | KnownSites, named: tuple[str, ...], alive: Mapping[str, bool] | None = None
) -> list[messages.SiteRecord]:
    """Return all sites with a row, and those without one that the run file names or that have joined, by name.

    Args:
        identities: the credentials of the run's sites.
        named: the setting `trust.sites`.
        alive: site that has joined → whether it takes part.
    """
    alive = alive or {}
    found = [record(row, is_alive=alive.get(row.site, False)) for row in identities.rows.values()]
    others = {*named, *alive} - identities.rows.keys()
    found += [messages.SiteRecord(site=site, state="external", is_alive=alive.get(site, False)) for site in others]
    return sorted(found, key=lambda each: each.site)
