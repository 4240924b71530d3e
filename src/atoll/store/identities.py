"""The credentials of a run's sites, which are invited, enrolled or revoked: the journal has one row for each site.

All rows are also in memory, so that a request is checked without the journal. The server keeps hashes of invitations
and tokens, never these themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from atoll.errors import AuthError, Conflict
from atoll.store.audit_log import AuditLog
from atoll.store.journal import Journal
from atoll.store.journal_tables import IDENTITIES, IdentityRow, utc_text
from atoll.tensors.reference import hash_of_secret

OVERLAP_S = 600.0
"""Seconds for which the credential before a renewal is still accepted once the new one was used: connections that were
opened with it, and other processes of the site, go on meanwhile."""
NEVER = 2**52
"""Unix time that no certificate is issued at."""
SIGNING_S = 2.0
"""Most seconds between the issue of a certificate and the row that says so."""
INVITE = "Ask the admin of the run for an invitation: `atoll invite {site}`."


class KnownSites:
    """What is known of the credentials of sites, in memory.

    Args:
        rows: the rows of the journal.

    Attributes:
        rows: site → its row.
    """

    def __init__(self, rows: Iterable[IdentityRow] = ()) -> None:
        self.rows: dict[str, IdentityRow] = {}
        self._of_token: dict[str, str] = {}  # hash of a token → its site
        for row in rows:
            self.put(row)

    def put(self, row: IdentityRow) -> None:
        """Replace what is known of a site."""
        self.rows[row.site] = row
        kept = {token: site for token, site in self._of_token.items() if site != row.site}
        tokens = (row.credential, row.previous) if row.kind == "token" else ()
        self._of_token = kept | {token: row.site for token in tokens if token}

    def site_of_token(self, hashed: str) -> str:
        """Return the site of a token, from the token's hash; empty if it is no site's."""
        return self._of_token.get(hashed, "")

    def fault(self, site: str, credential: str | None, now_s: float) -> tuple[str, str]:
        """Return why a site's credential is not accepted, and what to do. Both are empty if it is accepted.

        Args:
            site: name of the site.
            credential: serial number of the certificate, or hash of the token; None for the certificate of another
                authority, which has checked it.
            now_s: current Unix time.
        """
        row, remedy = self.rows.get(site), INVITE.format(site=site)
        if row is not None and row.state == "revoked":
            return f"The credential of site {site!r} was revoked on {_shown(row.since)}.", remedy
        if credential is None:
            if row is None or not row.credential:
                return "", ""
            return (
                f"Site {site!r} has a credential of this run; that of another authority counts no more.",
                f"Use the credential of its enrolment. {remedy}",
            )
        if row is None or not row.credential:
            return f"The credential of site {site!r} is not from this run.", remedy
        if credential not in (row.credential, row.previous):
            return (
                f"The credential of site {site!r} is not its newest one.",
                f"Use the credential of its newest enrolment. {remedy}",
            )
        until_s = row.expires_at if credential == row.credential else row.previous_until
        if now_s >= until_s:
            return (
                f"The credential of site {site!r} expired on {shown_time(until_s)}; by the server's clock it is "
                f"{shown_time(now_s)}.",
                f"If one of the clocks is wrong, correct it. {remedy}",
            )
        return "", ""

    def ended(self, most: int) -> dict[str, int]:
        """Return which certificates have ended before their time, for workers of a swarm, which see no journal.

        Args:
            most: largest number of sites; the newest ones.

        Returns:
            Site → Unix time: those issued before have ended. `NEVER`: all have, since the site was revoked.
        """
        rows = [row for row in self.rows.values() if row.state == "revoked" or row.enrolments > 1]
        rows = sorted(rows, key=lambda row: row.since)[-most:]
        return {
            row.site: NEVER
            if row.state == "revoked"
            else int(datetime.fromisoformat(row.since).timestamp() - SIGNING_S)
            for row in sorted(rows, key=lambda row: row.site)
        }

    def has_credential(self, site: str) -> bool:
        """Return whether a site has enrolled or was revoked: then a request without a credential cannot be its."""
        row = self.rows.get(site)
        return row is not None and row.state != "invited"


class Identities:
    """The credentials of sites in the journal, and in memory.

    Args:
        journal: the journal.
        audit: the audit log, with an entry for each invitation, enrolment, renewal and revocation.
        clock: returns the Unix time in seconds.

    Attributes:
        known: the rows in memory.
    """

    def __init__(self, journal: Journal, audit: AuditLog, clock: Callable[[], float] = time.time) -> None:
        self._journal, self._audit, self.clock = journal, audit, clock
        self.known = KnownSites(journal.select(IDENTITIES))

    @property
    def rows(self) -> Mapping[str, IdentityRow]:
        """Site → its row."""
        return self.known.rows

    def _put(self, row: IdentityRow, what: str, **detail: Any) -> IdentityRow:
        with self._journal.transaction():
            self._journal.execute("DELETE FROM identities WHERE site = ?", row.site)
            self._journal.insert(IDENTITIES, row)
            if what:
                self._audit.append(what, site=row.site, **detail)
            self._journal.after_commit(lambda: self.known.put(row))
        return row

    def invite(self, site: str, secret: str, lasts_s: float, *, again: bool) -> IdentityRow:
        """Record an invitation. It replaces an earlier one that was not used.

        Args:
            site: name of the site.
            secret: secret of the invitation, of which the hash is kept.
            lasts_s: seconds for which it can be used.
            again: whether the site may have a credential already, which the invitation then replaces.

        Raises:
            Conflict: the site has enrolled already, and `again` is false.
        """
        row = self.rows.get(site) or IdentityRow(site, "invited", utc_text())
        if row.state == "enrolled" and not again:
            raise Conflict(
                f"Site {site!r} is enrolled since {_shown(row.since)}.",
                "With --again it may enrol once more, and its present credential ends then. For another site, use "
                "another name.",
            )
        until_s = self.clock() + lasts_s
        row = replace(row, invitation=hash_of_secret(secret), invited_until=until_s)
        return self._put(row, "invited", until=until_s)

    def find_invitation(self, secret: str, request: str) -> IdentityRow:
        """Return the row of the site for which an invitation can be used.

        An invitation can be used once. If the answer was lost, it can be used again for the same signing request.

        Args:
            secret: secret of the invitation.
            request: signing request of the site's key; empty: the site wants a token.

        Raises:
            AuthError: the invitation has expired, was used, or is not one of this run.
        """
        hashed, now_s = hash_of_secret(secret), self.clock()
        row = next((each for each in self.rows.values() if hashed in (each.invitation, each.used)), None)
        if row is None:
            raise AuthError(
                "This run does not know the invitation: it is one of another run, was replaced by a newer one, or was "
                "revoked.",
                "Check the address, and ask the admin of the run for a new invitation.",
            )
        remedy = INVITE.format(site=row.site)
        if row.invitation != hashed:
            is_same = row.state == "enrolled" and bool(request) and row.used_request == hash_of_secret(request)
            if not is_same or row.previous or now_s >= row.invited_until:
                raise AuthError(
                    f"The invitation of site {row.site!r} was used on {_shown(row.used_at)}: it can be used once.",
                    f"If that was not you, let the admin run `atoll revoke {row.site}`. {remedy}",
                )
        elif now_s >= row.invited_until:
            raise AuthError(
                f"The invitation of site {row.site!r} expired on {shown_time(row.invited_until)}; by the server's "
                f"clock it is {shown_time(now_s)}.",
                remedy,
            )
        return row

    def enrol(
        self, row: IdentityRow, kind: str, credential: str, expires_at: float, *, secret: str, request: str
    ) -> None:
        """Record that a site has used its invitation, and its new credential, which replaces all earlier ones.

        Args:
            row: what `find_invitation` has returned.
            kind: `certificate` or `token`.
            credential: serial number of the certificate, or hash of the token.
            expires_at: Unix time at which it expires.
            secret, request: as for `find_invitation`.
        """
        now, hashed = utc_text(), hash_of_secret(secret)
        if row.invitation == hashed:
            row = replace(row, invitation="", enrolments=row.enrolments + 1)
        row = replace(row, used=hashed, used_request=hash_of_secret(request) if request else "", used_at=now)
        row = replace(row, state="enrolled", since=now, kind=kind, credential=credential, expires_at=expires_at)
        self._put(replace(row, previous="", previous_until=0.0), "enrolled", kind=kind, credential=credential)

    def renew(self, site: str, shown: str, kind: str, credential: str, expires_at: float) -> None:
        """Record a site's new credential. The one that it has shown stays valid until the new one is used.

        Args:
            site: name of the site.
            shown: the credential with which it has asked: `IdentityRow.credential` or `previous`.
            kind, credential, expires_at: as for `enrol`.
        """
        row = self.rows[site]
        until_s = row.expires_at if shown == row.credential else row.previous_until
        new = replace(row, kind=kind, credential=credential, expires_at=expires_at)
        self._put(replace(new, previous=shown, previous_until=until_s), "renewed", kind=kind, credential=credential)

    def note_use(self, site: str, credential: str) -> None:
        """Note that a credential was used. The first use of a new one ends the one before it, after `OVERLAP_S`."""
        row = self.rows[site]
        if row.previous and credential == row.credential:
            until_s = self.clock() + OVERLAP_S
            if row.previous_until > until_s:
                self._put(replace(row, previous_until=until_s), "")

    def revoke(self, site: str) -> IdentityRow:
        """Record that a site's credential and its open invitation are not valid any more. May be repeated.

        A site without a credential can be revoked, too: then it cannot take part with the certificate of another
        authority.
        """
        row = self.rows.get(site) or IdentityRow(site, "revoked", "")
        if row.state == "revoked" and row.since and not row.invitation:
            return row
        # its credential stays in the row, so that a request with it is told why it is refused; a certificate of another
        # authority counts as its first enrolment, so that `ended` still names the site after the next one
        row = replace(row, enrolments=max(1, row.enrolments))
        return self._put(replace(row, state="revoked", since=utc_text(), invitation="", used=""), "revoked")


def shown_time(at_s: float) -> str:
    """Return a Unix time as text for messages: date and time, UTC."""
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


def _shown(iso: str) -> str:
    return shown_time(datetime.fromisoformat(iso).timestamp())
