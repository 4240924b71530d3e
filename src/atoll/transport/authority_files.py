"""The certificate authority of a run, and the certificate of its server: files of mode 0600 in the state directory.

<directory>/authority.key    its key and certificate, made at the first start that needs them
<directory>/authority.pem    a copy of the certificate, for clients
<directory>/server.key       key and certificate of the server; made anew if half of the life is over, or its names
                             change
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from atoll.errors import ConfigError, StoreError
from atoll.posix import keep_file, read_named, read_own, read_secret
from atoll.transport.certificates import Keyed, common_name, new_authority, server_certificate, validity
from atoll.transport.tls import peer_context, with_identity

AUTHORITY, SERVER = "authority.key", "server.key"
BEGIN = b"-----BEGIN CERTIFICATE-----"
RESTORE = (
    "Restore it from a backup. If you remove it, the next start makes another authority, and all sites enrol again."
)


def authority_file(directory: Path) -> Path:
    """Return the path of the certificate of the authority of the run in a state directory."""
    return directory / "authority.pem"


def stored_authority(directory: Path) -> Keyed | None:
    """Return the authority in a state directory; None if it has none.

    Raises:
        StoreError: its file cannot be read, belongs to another user, or is damaged.
    """
    found = _read(directory / AUTHORITY)
    if found is not None:
        try:
            common_name(found.certificate)
        except ValueError as error:
            raise StoreError(f"{directory / AUTHORITY} is damaged: {error}.", RESTORE) from error
    return found


def keep_authority(directory: Path, name: str) -> Keyed:
    """Return the authority of a state directory. Make one if there is none.

    Only the server that has locked the directory may call this.

    Args:
        directory: the state directory.
        name: name of a new authority.

    Raises:
        StoreError: its files cannot be read or written, or it is damaged.
        DiskFull: there is no space for them.
    """
    found = stored_authority(directory)
    if found is None:
        found = new_authority(name)
        keep_file(directory / AUTHORITY, found.key + found.certificate)
    copy = authority_file(directory)
    with suppress(OSError):
        if read_own(copy) == found.certificate:
            return found
    keep_file(copy, found.certificate)
    return found


def keep_server_certificate(directory: Path, authority: Keyed, names: Sequence[str]) -> Path:
    """Return the path of the file with the server's key and certificate. Make it anew if that is due.

    Args:
        directory: the state directory.
        authority: its authority.
        names: host names and addresses at which clients reach the server.

    Raises:
        StoreError, DiskFull: as for `keep_authority`.
    """
    path = directory / SERVER
    found = _read(path)
    if found is None or not _is_good(found.certificate, authority, names):
        made = server_certificate(authority, names)
        keep_file(path, made.key + made.certificate)
    return path


def context_to_worker(directory: Path, site: str) -> ssl.SSLContext | None:
    """Return the TLS context with which a server checks the address of a swarm's worker; None without an authority.

    The worker has to have the certificate of its site, and sees that of the server.

    Args:
        directory: the state directory.
        site: name of the worker's site.

    Raises:
        ConfigError: a file cannot be used.
    """
    if not (directory / SERVER).exists():
        return None
    context = peer_context(authority_file(directory), site)
    with_identity(context, directory / SERVER, RESTORE)
    return context


def accept_clients_of(context: ssl.SSLContext, own: Keyed | None, other: Path | None) -> None:
    """Let a server ask its clients for certificates of these authorities. A client may have none.

    Args:
        context: TLS context of the server.
        own: the run's own authority; None if it has none.
        other: path of a PEM file with further authorities (`trust.authority`); None if there are none.

    Raises:
        ConfigError: the file cannot be used.
    """
    if own is not None:
        context.load_verify_locations(cadata=own.certificate.decode())
    if other is not None:
        try:
            context.load_verify_locations(cadata=read_named(other).decode())
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"trust.authority {str(other)!r} cannot be used: {error}.",
                "Give a PEM file with the certificates of the authority.",
            ) from error
    context.verify_mode = ssl.CERT_OPTIONAL
    context.num_tickets = 0  # a resumed session would outlive the certificate; no client of Atoll resumes one


def _is_good(certificate: bytes, authority: Keyed, names: Sequence[str]) -> bool:
    try:
        begin, end = validity(certificate)
        found = x509.load_pem_x509_certificate(certificate)
        issuer = x509.load_pem_x509_certificate(authority.certificate)
        found.verify_directly_issued_by(issuer)
        alternative = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # whatever is wrong with it, it is made anew
        return False
    has = {str(each.value) for each in alternative}
    return has == set(names) and datetime.now(UTC) < begin + (end - begin) / 2


def _read(path: Path) -> Keyed | None:
    """Return a key and its certificate, which stand in one file; None if there is no file."""
    try:
        key, begin, rest = read_secret(path, RESTORE).partition(BEGIN)
    except FileNotFoundError:
        return None
    return Keyed(begin + rest, key)
