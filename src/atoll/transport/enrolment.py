"""How a site gets its credential from a server, and renews it.

    authority_of(invitation)   GET  /v1/authority    over unverified TLS; the invitation's fingerprint proves it
    enrol(invitation, folder)  POST /v1/enrol        over verified TLS; the secret of the invitation proves the site
    renew(http, credential)    POST /v1/enrol/renew  with the present credential
    store_issued(…)            sends nothing: a certificate of another authority is checked and stored

The site makes each key itself and never sends it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from atoll.errors import AuthError, ConfigError, PeerError, ServerUnreachable, UsageError
from atoll.posix import (
    FolderTaken,
    file_error,
    own_folder,
    read_named,
    read_own,
    replace_file,
    require_writable_folder,
    take_lock,
)
from atoll.protocol import routes
from atoll.protocol.identity_messages import Credential, Enrol, Renew
from atoll.protocol.invitation import Invitation
from atoll.transport.certificates import (
    fingerprint,
    first_certificate,
    issued_elsewhere,
    new_key,
    signing_request,
    validity,
    why_unfit,
)
from atoll.transport.credential_store import CredentialNote, SiteCredential, folder_for, store
from atoll.transport.http_client import Http, damaged
from atoll.transport.tls import client_context, is_loopback, require_private, unverified_context

TIMEOUT_S = 20.0
PENDING = "pending.pem"
"""File with the key and the signing request of an enrolment that is not complete."""


def enrol(invitation: Invitation, folder: Path | None = None) -> SiteCredential:
    """Use an invitation: make a key, get a certificate or a token, and store it.

    Before the invitation is used, the folder was written and the server was recognised.

    Args:
        invitation: the invitation.
        folder: folder for the credential; None: where workers of this user find it.

    Returns:
        The stored credential.

    Raises:
        AuthError: the server refuses the invitation, or is not the one that has made it.
        ServerUnreachable: it does not answer.
        PeerError: its answer does not fit.
        StoreError: the folder cannot be written.
    """
    server = _address_of(invitation)
    folder = folder or folder_for(server, invitation.site)
    try:
        own_folder(folder)
    except OSError as error:
        raise file_error(error, error.filename or folder) from error
    require_writable_folder(folder, "Give another folder with --dir.")
    authority = authority_of(invitation) if invitation.fingerprint else b""
    key, request = _key_and_request(folder, invitation.site)
    with _ca(authority) as ca, contextlib.closing(Http(invitation.server, ca=ca)) as http:
        message = Enrol(secret=invitation.secret, request=request)
        answer = http.post(routes.ENROL, message, Credential, timeout_s=TIMEOUT_S)
    _store(folder, server, invitation.site, key, answer, authority)
    (folder / PENDING).unlink(missing_ok=True)
    return SiteCredential(folder)


def store_issued(
    server: str, certificate: Path, key: Path, authority: Path | None = None, folder: Path | None = None
) -> SiteCredential:
    """Store a certificate that another authority (`trust.authority` of the server) has issued to a site.

    Nothing is sent. Store the next one in the same way: running workers go on with it. They do not renew it.

    Args:
        server: address of the server.
        certificate: PEM file with the certificate, then those of intermediate authorities.
        key: PEM file with its key, of mode 0600; may be the same file.
        authority: PEM file with the authority of the server's certificate; None: those of the system.
        folder: as for `enrol`.

    Returns:
        The stored credential.

    Raises:
        ConfigError: a file cannot be used, or they do not fit.
        UsageError: the address is not that of a server with TLS.
        StoreError: the folder cannot be written.
    """
    with contextlib.closing(Http(server, context=unverified_context)) as http:
        address, secure = http.server, http.secure
    if not secure:
        raise UsageError(f"{address} has no TLS, so it takes no certificate.", "Give its https:// address.")
    require_private(key, "The site's key")
    try:
        chain, secret, trusted = (read_named(path) if path else b"" for path in (certificate, key, authority))
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.", "Give a PEM file.") from error
    try:
        site, end, identity = issued_elsewhere(chain, secret, datetime.now(UTC))
    except ValueError as error:
        raise ConfigError(
            f"The certificate {str(certificate)!r} with the key {str(key)!r} cannot be a site's: {error}.",
            "Give both as PEM, as the authority has issued them. If the clock of this machine is wrong, correct it.",
        ) from None
    if authority is not None:
        client_context(str(authority))
    folder = folder or folder_for(address, site)
    store(
        folder,
        CredentialNote(address, site, "certificate", 0.0, end.timestamp()),
        secret=identity,
        authority=trusted,
    )
    return SiteCredential(folder)


def _key_and_request(folder: Path, site: str) -> tuple[bytes, str]:
    """Return a key and its signing request, stored until the credential is.

    If the answer of the server is lost, the invitation is used, but the same request gets the certificate again.
    """
    path, begin = folder / PENDING, b"-----BEGIN CERTIFICATE REQUEST-----"
    try:
        with contextlib.suppress(FileNotFoundError):
            key, found, rest = read_own(path).partition(begin)
            if found:
                return key, (begin + rest).decode()
        key = new_key()
        request = signing_request(key, site)
        replace_file(path, [key, request])
    except OSError as error:
        raise file_error(error, error.filename or path) from error
    return key, request.decode()


def _address_of(invitation: Invitation) -> str:
    """Return the address of an invitation's server, as `Http.server` has it.

    Raises:
        UsageError: the address is malformed, or the secret would travel without TLS.
    """
    http = Http(invitation.server, context=unverified_context)
    if not http.secure and (invitation.fingerprint or not is_loopback(http.host)):
        raise UsageError(
            f"The invitation is for {http.server}, without TLS: its secret could be read on the way.",
            "Ask the admin for an invitation with the https:// address of the server.",
        )
    return http.server


def authority_of(invitation: Invitation) -> bytes:
    """Return the authority (PEM) of the server that has made an invitation.

    Raises:
        AuthError: the server has another authority.
        ServerUnreachable: it does not answer.
    """
    with contextlib.closing(Http(invitation.server, context=unverified_context)) as http:
        try:
            text = http.fetch(routes.AUTHORITY, bytes, "authority", timeout_s=TIMEOUT_S)
        except ServerUnreachable as error:
            moved = (
                "Check that it runs. If the server has moved, ask its admin for a new invitation: it has the address."
            )
            raise ServerUnreachable(error.message, moved) from error
        where = http.where
    try:
        authority = first_certificate(text)
        found = fingerprint(authority)
    except ValueError:
        found = ""
    if not hmac.compare_digest(found, invitation.fingerprint):
        raise AuthError(
            f"{where} is not the server that has made this invitation: its authority is "
            f"{found[:16] or 'unreadable'}, not {invitation.fingerprint[:16]}.",
            "Nothing was sent. Check the address with the admin. A proxy that opens TLS has an authority of its own; a "
            "server with a new state directory has to invite the site again.",
        )
    return authority


def renew(http: Http, credential: SiteCredential, timeout_s: float) -> bool:
    """Renew a credential if it is due and no other process does so. Return whether it was renewed.

    The files are replaced, so that every later connection of each process of the site uses the new one.

    Args:
        http: connections to the server, with this credential.
        credential: the credential.
        timeout_s: seconds without a byte after which the call fails.

    Raises:
        PeerError, TransferError: the server does not renew it, or does not answer. The old one stays.
        StoreError: it cannot be written.
    """
    try:
        lock = take_lock(credential.folder / "lock")
    except FolderTaken:
        return False
    except OSError as error:
        raise file_error(error, error.filename or credential.folder) from error
    try:
        note = credential.note
        if not credential.is_due():
            return False
        key = new_key() if note.kind == "certificate" else b""
        request = signing_request(key, note.site).decode() if key else ""
        answer = http.post(routes.RENEW, Renew(request=request), Credential, timeout_s=timeout_s)
        _store(credential.folder, note.server, note.site, key, answer)
        return True
    finally:
        lock.close()


def _store(
    folder: Path, server: str, site: str, key: bytes, answer: Credential, authority: bytes | None = None
) -> None:
    """Check and store what a server has answered; `authority` is as for `store`."""
    why, secret = "", answer.token.encode()
    now_s, expires_at_s = time.time(), answer.expires_at
    if answer.site != site:
        why = f"it is for site {answer.site}, not {site}"
    elif answer.kind == "token" and authority:
        why = "it is a token, but the server has an authority"
    elif answer.kind == "certificate":
        secret = key + answer.certificate.encode()
        why = why_unfit(answer.certificate.encode(), key, site)
        expires_at_s = 0.0 if why else validity(answer.certificate.encode())[1].timestamp()
    elif not secret:
        why = "it is empty"
    if why:
        raise damaged(
            PeerError(f"The credential that {server} gave does not fit: {why}.", "Use one Atoll release on both sides.")
        )
    renew_at_s = now_s + answer.renew_after_s if answer.renew_after_s else 0.0
    note = CredentialNote(server, site, answer.kind, min(renew_at_s, expires_at_s or renew_at_s), expires_at_s)
    store(folder, note, secret=secret, authority=authority)


@contextlib.contextmanager
def _ca(authority: bytes) -> Iterator[str | None]:
    """Yield the path of a PEM file with an authority; of ATOLL_TLS_CA if there is none to write."""
    if not authority:
        yield os.environ.get("ATOLL_TLS_CA")
        return
    with tempfile.NamedTemporaryFile(prefix="atoll-authority-") as file:
        file.write(authority)
        file.flush()
        yield file.name


def until(note: CredentialNote) -> str:
    """Return until when a credential is valid, as text; empty if it does not expire."""
    return f"{datetime.fromtimestamp(note.expires_at_s, UTC):%Y-%m-%d %H:%M} UTC" if note.expires_at_s else ""
