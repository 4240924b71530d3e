"""The tokens of a run's readers and of its admin: two files in the state directory.

    <directory>/reader.token     shows the run: its status, metrics and evaluations
    <directory>/admin.token      for commands with `--dir`, and for operations of the admin alone

A server writes them at its first start. If a file was deleted, the next start writes it again, with another token.
"""

from __future__ import annotations

import logging
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Literal

from atoll.posix import file_error, keep_file, read_own, read_secret

LOG = logging.getLogger("atoll.server")

TokenKind = Literal["reader", "admin"]
KINDS: tuple[TokenKind, ...] = ("reader", "admin")
BYTES = 32
"""Number of random bytes in a token."""
_FORM = re.compile(r"[A-Za-z0-9_-]{43}")
"""As `secrets.token_urlsafe` writes so many bytes."""


def stored_tokens(directory: Path) -> dict[TokenKind, str]:
    """Return the tokens in a state directory: kind of caller → token. A missing or damaged one is left out.

    Raises:
        StoreError: a file is a link, a folder or a named pipe, or this user may not read it.
    """
    found = {kind: _read(_file(directory, kind)) for kind in KINDS}
    return {kind: token for kind, token in found.items() if token is not None}


def keep_tokens(directory: Path) -> dict[TokenKind, str]:
    """Return the tokens of a state directory. Write those that are missing or damaged.

    Only the server that has locked the directory may call this.

    Raises:
        StoreError: a file is a link, a folder or a named pipe, or cannot be read or written. Or it belongs to another
            user, and so its token is known: that is possible in a folder like `/tmp`.
        DiskFull: there is no space for it.
    """
    return {kind: _kept(_file(directory, kind)) for kind in KINDS}


def _file(directory: Path, kind: TokenKind) -> Path:
    return directory / f"{kind}.token"


def _kept(path: Path) -> str:
    with suppress(FileNotFoundError):
        token = _token_in(read_secret(path, "Remove it; the next start writes another token."))
        if token is not None:
            return token
        LOG.warning("%s is damaged: writing another token", path)
    token = secrets.token_urlsafe(BYTES)
    keep_file(path, f"{token}\n".encode())
    return token


def _read(path: Path) -> str | None:
    """Return the token in a file; None if there is no file, or it is damaged."""
    try:
        return _token_in(read_own(path))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise file_error(error, path) from error


def _token_in(content: bytes) -> str | None:
    text = content.decode("latin-1").strip()
    return text if _FORM.fullmatch(text) else None
