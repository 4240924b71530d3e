"""The credentials of this machine's sites: files that `atoll enrol` makes, and that a worker finds by its server.

    $XDG_DATA_HOME/atoll/sites/HOST_PORT/SITE/     default: ~/.local/share/atoll/sites/…
        credential.json     server, site, kind and times; written last, so its change says that the others changed
        identity.pem        key and certificate of the site
        authority.pem       the authority of the server's certificate
        token               in place of identity.pem: the site's token, behind a proxy that ends TLS

A running worker renews its credential. Each new connection reads the files again if they have changed, so all
processes of a site go on with the new one.
"""

from __future__ import annotations

import difflib
import os
import re
import ssl
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from atoll.errors import ConfigError, UsageError
from atoll.format_text import listed
from atoll.json_files import NoteDamaged, note_from, seal
from atoll.posix import file_error, own_folder, read_own, replace_file
from atoll.transport.tls import ContextMaker, Token, client_context, peer_context, read_token_file, with_identity

NOTE, IDENTITY, AUTHORITY, TOKEN = "credential.json", "identity.pem", "authority.pem", "token"
MOST_SITES = 1000
"""Number of credentials of this machine that are looked at."""
ANEW = "Ask the admin of the server for a new invitation (atoll invite SITE --again), and run: atoll enrol INVITATION"

ISSUED_ANEW = "Get a new certificate from the authority that has issued it, and run: atoll enrol --certificate FILE"


@dataclass(frozen=True)
class CredentialNote:
    """What `credential.json` says.

    Attributes:
        server: address of the server, as `Http.server` has it.
        site: name of the site.
        kind: `certificate` or `token`.
        renew_at_s: Unix time from which it should be renewed; 0: it need not be.
        expires_at_s: Unix time; 0: it does not expire.
    """

    server: str
    site: str
    kind: str
    renew_at_s: float
    expires_at_s: float

    @property
    def anew(self) -> str:
        """How the site gets another credential, as advice."""
        is_issued_elsewhere = self.kind == "certificate" and not self.renew_at_s
        return ISSUED_ANEW if is_issued_elsewhere else ANEW


@dataclass
class _Files:
    """The files of a credential, as they were read."""

    note: CredentialNote
    stamp: tuple[int, int]
    token: Token | None
    contexts: dict[str, ssl.SSLContext] = field(default_factory=dict)


class SiteCredential:
    """A site's credential at one server. It follows changes of its files. Thread-safe.

    Args:
        folder: the folder with the files.

    Raises:
        ConfigError: the files are missing, damaged, or readable by other users.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock = folder, threading.Lock()
        self._files = self._read()

    @property
    def note(self) -> CredentialNote:
        """What the file says now."""
        return self._current().note

    @property
    def token(self) -> Token | None:
        """The site's token; None if the credential is a certificate."""
        return self._current().token

    def client_context(self, ca: str | None) -> ssl.SSLContext:
        """Return the TLS context of a connection to the server: it trusts its authority, and shows the certificate.

        Args:
            ca: path of a PEM file with other authorities to trust in place of the stored one; None: the stored one.
        """
        authority = self.folder / AUTHORITY
        trusted = ca if ca is not None else str(authority) if authority.exists() else None
        return self._context(f"client {trusted}", lambda: client_context(trusted))

    def context_to_peer(self, site: str) -> ssl.SSLContext:
        """Return the TLS context of a connection to a swarm's worker: it has to have the certificate of this site."""
        return self._context(f"to {site}", lambda: peer_context(self.folder / AUTHORITY, site))

    def context_for_peers(self) -> ssl.SSLContext:
        """Return the TLS context with which a worker of a swarm accepts connections, of certificates of this run."""
        return self._context("for peers", lambda: peer_context(self.folder / AUTHORITY))

    def is_due(self) -> bool:
        """Return whether the credential should be renewed now."""
        note = self.note
        return bool(note.renew_at_s) and time.time() >= note.renew_at_s

    def has_expired(self) -> bool:
        """Return whether the credential has expired, by the clock of this machine."""
        note = self.note
        return bool(note.expires_at_s) and time.time() >= note.expires_at_s

    def _context(self, key: str, make: ContextMaker) -> ssl.SSLContext:
        files = self._current()
        with self._lock:
            if key not in files.contexts:
                context = make()
                if files.note.kind == "certificate":
                    with_identity(context, self.folder / IDENTITY, files.note.anew)
                files.contexts[key] = context
            return files.contexts[key]

    def _current(self) -> _Files:
        """Return the files, read again if they have changed. If they were removed, go on with what was read."""
        with self._lock:
            try:
                if _stamp(self.folder) != self._files.stamp:
                    self._files = self._read()
            except FileNotFoundError:
                pass
            return self._files

    def _read(self) -> _Files:
        path = self.folder / NOTE
        try:
            stamp = _stamp(self.folder)
            note: CredentialNote = note_from(read_own(path), CredentialNote)
        except FileNotFoundError:
            raise ConfigError(f"{self.folder} has no credential: {path.name} is missing.", ANEW) from None
        except (OSError, NoteDamaged) as error:
            raise ConfigError(f"The credential {path} cannot be used: {error}.", ANEW) from error
        token = read_token_file(self.folder / TOKEN) if note.kind == "token" else None
        return _Files(note, stamp, token)


def _stamp(folder: Path) -> tuple[int, int]:
    found = os.stat(folder / NOTE)
    return found.st_ino, found.st_mtime_ns


def store(folder: Path, note: CredentialNote, *, secret: bytes, authority: bytes | None = None) -> None:
    """Write a credential, each file in one step and the note last.

    Args:
        folder: the folder for it; made if it is missing.
        note: what it is.
        secret: key and certificate as PEM, or the token.
        authority: authority of the server, PEM; empty: those of the system, so an earlier file is removed; None: the
            file stays as it is.

    Raises:
        StoreError: a file cannot be written.
    """
    try:
        own_folder(folder)
        if authority:
            replace_file(folder / AUTHORITY, [authority])
        elif authority is not None:
            (folder / AUTHORITY).unlink(missing_ok=True)
        name, other = (IDENTITY, TOKEN) if note.kind == "certificate" else (TOKEN, IDENTITY)
        replace_file(folder / name, [secret])
        replace_file(folder / NOTE, [seal(asdict(note)).encode()])
        (folder / other).unlink(missing_ok=True)
    except OSError as error:
        raise file_error(error, error.filename or folder) from error


# -- Where they are.


def credentials_folder() -> Path | None:
    """Return the folder with all credentials of this user; None if the user has no home."""
    if data := os.environ.get("XDG_DATA_HOME"):
        return Path(data, "atoll", "sites")
    try:
        return Path.home() / ".local" / "share" / "atoll" / "sites"
    except RuntimeError:
        return None


def folder_for(server: str, site: str) -> Path:
    """Return the folder of a site's credential at a server.

    Args:
        server: address, as `Http.server` has it.
        site: name of the site.

    Raises:
        UsageError: this user has no home.
    """
    base = credentials_folder()
    if base is None:
        raise UsageError("This user has no home folder for credentials.", "Set XDG_DATA_HOME, or give --dir.")
    return base / _folder_name(server) / site


def _folder_name(server: str) -> str:
    return re.sub(r"[^A-Za-z0-9.-]+", "_", server.partition("://")[2]).strip("_.")[:200]


def notes_at(server: str = "") -> list[CredentialNote]:
    """Return the credentials of this machine, sorted; damaged ones are left out.

    Args:
        server: only those at this server, as `Http.server` has it; empty: all.
    """
    base, found = credentials_folder(), list[CredentialNote]()
    pattern = f"{_folder_name(server) if server else '*'}/*/{NOTE}"
    paths = sorted(base.glob(pattern)) if base is not None and base.is_dir() else []
    for path in paths[:MOST_SITES]:
        try:
            note: CredentialNote = note_from(read_own(path), CredentialNote)
        except (OSError, NoteDamaged):
            continue
        if not server or note.server == server:
            found.append(note)
    return found


def chosen() -> SiteCredential | None:
    """Return the credential in the folder that ATOLL_CREDENTIAL names; None if the variable is not set."""
    folder = os.environ.get("ATOLL_CREDENTIAL")
    return SiteCredential(Path(folder)) if folder else None


def _own_notes(server: str = "") -> list[CredentialNote]:
    """Return the note of the chosen credential, at whatever server; without one, those of `notes_at`."""
    own = chosen()
    return [own.note] if own is not None else notes_at(server)


def credential_at(server: str, site: str | None) -> SiteCredential | None:
    """Return the credential of a site at a server.

    A credential that ATOLL_CREDENTIAL names is also used at another address of its server, if TLS can prove that it is
    the same one; a token is not, since that would tell it.

    Args:
        server: address, as `Http.server` has it.
        site: name of the site; None: of the only one that has a credential there.

    Returns:
        The credential; None if there is none.

    Raises:
        ConfigError: it is damaged, or readable by other users.
    """
    own = chosen()
    if own is not None:
        note = own.note
        fits = note.server == server or (note.kind == "certificate" and server.startswith("https://"))
        return own if fits and site in (None, note.site) else None
    notes = notes_at(server)
    names = [note.site for note in notes]
    if site is None and len(names) == 1:
        site = names[0]
    return SiteCredential(folder_for(server, site)) if site in names and site is not None else None


def certificate_at(server: str) -> SiteCredential | None:
    """Return any credential of this machine at a server with which workers of its swarm take connections; else None."""
    own = chosen()
    found = [own] if own is not None else [SiteCredential(folder_for(server, each.site)) for each in notes_at(server)]
    return next(
        (each for each in found if each.note.kind == "certificate" and (each.folder / AUTHORITY).exists()), None
    )


def authority_at(server: str) -> str | None:
    """Return the path of the authority that a credential of this machine stores for a server; None if none does."""
    own = chosen()
    folders = [own.folder] if own is not None else [folder_for(server, note.site) for note in notes_at(server)]
    return next((str(path / AUTHORITY) for path in folders if (path / AUTHORITY).exists()), None)


def site_at(server: str) -> str | None:
    """Return the name of the only site of this machine that has a credential at a server; None if there is none.

    Raises:
        UsageError: there are several.
    """
    names = [note.site for note in _own_notes(server)]
    if len(names) > 1:
        raise UsageError(
            f"This machine has credentials of {len(names)} sites at {server}: {listed(names)}.",
            "Say which one: --site NAME, or ATOLL_SITE.",
        )
    return names[0] if names else None


def enrolled_server() -> str | None:
    """Return the address of the only server at which this machine has credentials; None if there is none.

    Raises:
        UsageError: there are several.
    """
    servers = list(dict.fromkeys(note.server for note in _own_notes()))
    if len(servers) > 1:
        raise UsageError(
            f"This machine has credentials at {len(servers)} servers: {listed(servers)}.",
            "Say which one: --server ADDRESS, or ATOLL_SERVER.",
        )
    return servers[0] if servers else None


def why_none(server: str, site: str | None) -> str:
    """Return a sentence that says which credentials this machine has instead of one for a site; empty if it has none.

    Args:
        server: address, as `Http.server` has it.
        site: name of the site; None: not known.
    """
    notes = _own_notes()
    if not notes:
        return ""
    at = [note.site for note in notes if note.server == server]
    named = f"site {site!r}" if site else "a site"
    if not at:
        places = listed([f"{note.site} at {note.server}" for note in notes])
        return (
            f"This machine has no credential of {named} at {server}, but of {places}. If this is another address of "
            "that server, set ATOLL_CREDENTIAL to the credential's folder."
        )
    close = difflib.get_close_matches(site or "", at, n=1)
    advice = f" Did you mean {close[0]!r}?" if close else ""
    return f"This machine has no credential of {named} at {server}, but of {listed(at)}.{advice}"
