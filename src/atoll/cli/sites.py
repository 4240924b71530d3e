"""`atoll invite`, `sites` and `revoke`: which sites have credentials of their own.

A command asks the server of the run, with the admin's token. If no server runs, it works on the journal.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from atoll.cli.control import ANSWER_S, AsJson, Server, Target, TokenFile
from atoll.cli.stored_status import stored_status
from atoll.cli.text import fitting, width_of_output
from atoll.cli.which_run import RunArgument, RunDir
from atoll.config.settings import Trust
from atoll.errors import ConfigError, UsageError
from atoll.format_text import duration, visible
from atoll.protocol import identity_messages as messages
from atoll.protocol import routes

if TYPE_CHECKING:
    from atoll.store.identities import Identities

SiteName = Annotated[str, typer.Argument(help="Name of the site.", metavar="SITE")]


def invite(
    site: SiteName,
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Server = None,
    token_file: TokenFile = None,
    lasts_s: Annotated[
        float | None,
        typer.Option(
            "--lasts", help="Seconds for which it can be used. Default: trust.invitation_s.", show_default=False
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Let a site that has enrolled do so once more: its credential ends then.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Invite a site: it enrols once with what this prints, and then has a credential of its own.

    Send the invitation to the site on a way that others cannot read: with it, any machine can enrol as this site.
    """
    target = Target(run, state_dir, server, token_file)
    with _readable(site):
        message = messages.Invite(site=site, again=again, lasts_s=lasts_s)

    def in_journal(folder: Path) -> messages.Invited:
        from atoll.server.coordinator.site_credentials import Issuing
        from atoll.server.coordinator.site_credentials import invite as invite_site
        from atoll.transport.authority_files import SERVER, stored_authority

        status, _ = stored_status(folder)
        authority = None if status.public_address else stored_authority(folder)
        issuing = Issuing(status.public_address, authority, (folder / SERVER).exists())
        with _identities(folder) as identities:
            return invite_site(identities, message, issuing, status.address, Trust())

    answer = target.ask(
        lambda http: http.post(routes.INVITE, message, messages.Invited, timeout_s=ANSWER_S), in_journal
    )
    if json:
        print(answer.model_dump_json(indent=2))
    else:
        left_s = max(0.0, answer.expires_at - time.time())
        print(
            f"Site {site} can enrol once, within {duration(round(left_s))}. Send it this line; any machine with it can "
            f"enrol as {site}:\n\n    atoll enrol {visible(answer.invitation)}"
        )


def sites(
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Server = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """List the sites that were invited, enrolled or revoked, and until when their credentials are valid."""
    target = Target(run, state_dir, server, token_file)

    def in_journal(folder: Path) -> messages.SiteRecords:
        from atoll.server.coordinator.site_credentials import records
        from atoll.store.identities import KnownSites
        from atoll.store.reader import open_state

        with open_state(folder) as state:
            joined = dict.fromkeys((each.site for each in state.members()), False)
            return messages.SiteRecords(sites=records(KnownSites(state.identities()), (), joined))

    found = target.ask(lambda http: http.get(routes.SITES, messages.SiteRecords, timeout_s=ANSWER_S), in_journal)
    if json:
        print(found.model_dump_json(indent=2))
    elif not found.sites:
        print(f"No site was invited. To invite one: atoll invite SITE{target.named}")
    else:
        print("\n".join(_table(found.sites)))


def revoke(
    site: SiteName,
    run: RunArgument = None,
    state_dir: RunDir = None,
    server: Server = None,
    token_file: TokenFile = None,
    json: AsJson = False,
) -> None:
    """Revoke a site's credential and invitation, at once: its connections are closed.

    Its updates that were accepted still count. To let it take part again: atoll invite SITE.
    """
    target = Target(run, state_dir, server, token_file)
    with _readable(site):
        message = messages.Revoke(site=site)

    def in_journal(folder: Path) -> messages.SiteRecord:
        from atoll.server.coordinator.site_credentials import record

        with _identities(folder) as identities:
            return record(identities.revoke(site))

    answer = target.ask(
        lambda http: http.post(routes.REVOKE, message, messages.SiteRecord, timeout_s=ANSWER_S), in_journal
    )
    if json:
        print(answer.model_dump_json(indent=2))
    else:
        print(f"Site {site} is revoked. To let it take part again: atoll invite {site}{target.named}")


@contextmanager
def _identities(folder: Path) -> Iterator[Identities]:
    """Open the credentials in the journal of a run that no server serves.

    Raises:
        StateLocked: a server has the directory.
    """
    from atoll.store.store import Store  # it locks the directory

    with closing(Store(folder)) as store:
        yield store.identities


@contextmanager
def _readable(site: str) -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        if first["loc"] == ("site",):
            raise UsageError(
                f"{site!r} cannot be the name of a site.",
                "Use 1 to 64 letters, digits, dots, underscores and hyphens, beginning with a letter or a digit.",
            ) from None
        raise ConfigError(f"--lasts: {first['msg']}.", "Give seconds, at most 30 days: 2592000.") from None


def _table(found: list[messages.SiteRecord]) -> list[str]:
    from atoll.store.identities import shown_time

    rows = [
        (
            each.site,
            each.state,
            each.kind,
            visible(each.since).partition(".")[0].replace("T", " "),
            shown_time(each.expires_at) if each.expires_at else "",
            str(each.used),
            "yes" if each.is_alive else "",
        )
        for each in found
    ]
    titles = ("site", "state", "credential", "since", "valid until", "enrolments", "takes part")
    return fitting(titles, rows, width_of_output())
