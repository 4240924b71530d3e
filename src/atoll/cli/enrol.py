"""`atoll enrol INVITATION`: get a credential for this machine's site, with which a worker takes part in a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.text import print_line
from atoll.errors import UsageError
from atoll.protocol.invitation import MOST_CHARS, Invitation
from atoll.transport.credential_store import SiteCredential, enrolled_server
from atoll.worker.arguments import require_site

_WHERE = (
    "Give the text that `atoll invite` has printed, or `-` to read it from standard input, or set ATOLL_INVITATION."
)


def command(
    invitation: Annotated[
        str | None,
        typer.Argument(
            help="What `atoll invite` has printed; -: read it from standard input. Default: ATOLL_INVITATION.",
            show_default=False,
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="Folder for the credential; workers find it by ATOLL_CREDENTIAL. Default: where workers of this user "
            "find it by themselves.",
            show_default=False,
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            help="In place of an invitation: the site's certificate of your own authority, PEM, with its chain.",
            show_default=False,
        ),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(help="Its key, PEM, mode 0600. Default: in the file of the certificate.", show_default=False),
    ] = None,
    server: Annotated[
        str | None, typer.Option(envvar="ATOLL_SERVER", help="With --certificate: address of the server.")
    ] = None,
    ca: Annotated[
        Path | None,
        typer.Option(
            help="With --certificate: the authority of the server's certificate, PEM. Default: those of the system.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Enrol a site at a server: make a key here, get a certificate, and store both for workers of this user.

    Other users of this machine may read a command line, and with it the invitation; it can be used only once.

    Raises:
        ConfigError: certificate and key cannot be used.
        UsageError: there is no invitation, or only a part of one.
        AuthError: the server refuses the invitation, or is not the one that has made it.
        ServerUnreachable: the server does not answer.
    """
    folder = directory.absolute() if directory is not None else None
    if certificate is not None:
        from atoll.transport.enrolment import store_issued

        if invitation is not None or server is None:
            raise UsageError(
                "--certificate takes the place of an invitation, and needs --server.",
                "For example: atoll enrol --certificate berlin.pem --key berlin.key --server https://HOST:PORT",
            )
        return _say(
            directory,
            store_issued(server, certificate, key or certificate, ca, folder),
            "before that, store the next one",
        )
    text = invitation or os.environ.get("ATOLL_INVITATION", "")
    if text == "-":
        text = sys.stdin.readline(2 * MOST_CHARS)
    if not text.strip():
        raise UsageError("There is no invitation.", _WHERE)
    invited = Invitation.parse(text)
    require_site(invited.site)
    from atoll.transport.enrolment import enrol

    return _say(directory, enrol(invited, folder), "a worker renews it")


def _say(directory: Path | None, credential: SiteCredential, then: str) -> None:
    from atoll.transport.enrolment import until

    note = credential.note
    lasts = f", valid until {until(note)}; {then}" if until(note) else ""
    print(f"Site {note.site} is enrolled at {note.server}.")
    print(f"Its {note.kind} is in {credential.folder}{lasts}.")
    print_line(f"next: {_next(directory, note.server, note.site)}")


def _next(directory: Path | None, server: str, site: str) -> str:
    """Return the command that takes part in the run with the new credential."""
    if directory is not None:
        return f"ATOLL_CREDENTIAL={directory.absolute()} atoll worker -- python train.py"
    try:
        is_only = enrolled_server() == server
    except UsageError:
        is_only = False
    return f"atoll worker {'' if is_only else f'--server {server} --site {site} '}-- python train.py"
