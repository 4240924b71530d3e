"""What goes wrong with invitations, credentials and policies: message and exit code of each, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from harness.processes import Nursery
from kit.credentials import Trusted, trusted
from kit.processes import Outcome, command

from atoll.errors import AuthError, ConfigError, Conflict, ServerUnreachable, UsageError
from atoll.protocol.invitation import Invitation
from atoll.testing.run import free_port

DAY_S = 86_400.0
SCRIPT = "import atoll\nwith atoll.join() as worker:\n    next(iter(worker))\n"


class Site:
    """A machine of a site, and the server's admin.

    Attributes:
        at: the server.
        run: runs `atoll …` on the machine.
    """

    def __init__(self, at: Trusted, run: Callable[..., Outcome], folder: Path) -> None:
        self.at, self.run, self.folder = at, run, folder

    def enrol(self, invitation: object, **environment: str) -> Outcome:
        return self.run("enrol", str(invitation), **environment)

    def work(self, **environment: str) -> Outcome:
        """A worker of the site a, which gives up at once."""
        (self.folder / "train.py").write_text(SCRIPT)
        more = {"ATOLL_SERVER": self.at.server.url, "ATOLL_SITE": "a", "ATOLL_GIVE_UP_S": "0.1"} | environment
        return self.run("worker", "--", "python", "train.py", **more)


@pytest.fixture
def site(nursery: Nursery, tmp_path: Path) -> Iterator[Site]:
    with trusted(tmp_path) as at:
        yield Site(at, partial(command, nursery, tmp_path, XDG_DATA_HOME=str(tmp_path / "data")), tmp_path)


def used_twice(site: Site) -> Outcome:
    invitation = site.at.invite("a")
    assert site.enrol(invitation).returncode == 0
    return site.enrol(invitation, XDG_DATA_HOME=str(site.folder / "elsewhere"))


def of_an_enrolled_name(site: Site) -> Outcome:
    assert site.enrol(site.at.invite("a")).returncode == 0
    return site.run("invite", "a", "--dir", str(site.at.state))


def expired(site: Site) -> Outcome:
    invitation = site.at.invite("a")
    site.at.set_clock(2 * DAY_S)
    return site.enrol(invitation)


def replaced(site: Site) -> Outcome:
    invitation = site.at.invite("a")
    site.at.invite("a")
    return site.enrol(invitation)


def cut_off(site: Site) -> Outcome:
    return site.enrol(str(site.at.invite("a"))[:-20])


def moved(site: Site) -> Outcome:
    """The server was at another address when it made the invitation. None answers there any more."""
    made = site.at.invite("a")
    return site.enrol(Invitation(f"https://127.0.0.1:{free_port()}", made.site, made.secret, made.fingerprint))


def another_server(site: Site) -> Outcome:
    """At the address of the invitation, another server answers."""
    made = site.at.invite("a")
    return site.enrol(Invitation(made.server, made.site, made.secret, "0" * 64))


def revoked(site: Site) -> Outcome:
    assert site.enrol(site.at.invite("a")).returncode == 0
    site.at.revoke("a")
    return site.work()


def replayed(site: Site) -> Outcome:
    """A copy of a credential, after its site has enrolled once more."""
    assert site.enrol(site.at.invite("a")).returncode == 0
    (site.folder / "data").rename(site.folder / "copy")
    assert site.enrol(site.at.invite("a", again=True)).returncode == 0
    return site.work(XDG_DATA_HOME=str(site.folder / "copy"))


def renewed_elsewhere(site: Site) -> Outcome:
    """A credential of another run; its server was at this address before."""
    site.at.certificates["a"] = site.at.signed("a")
    own = site.at.certificates["a"]
    enrolled = site.run(
        "enrol", "--certificate", str(own), "--server", site.at.server.url,
        "--ca", str(authority_of(site)),
    )  # fmt: skip
    assert enrolled.returncode == 0, enrolled.stderr
    return site.work()


def authority_of(site: Site) -> Path:
    path = site.folder / "authority.pem"
    path.write_text(site.at.ok("GET", "/v1/authority"))
    return path


def server_moved(site: Site) -> Outcome:
    """An enrolled site, whose server now has another address."""
    assert site.enrol(site.at.invite("a")).returncode == 0
    return site.work(ATOLL_SERVER=site.at.server.url.replace("127.0.0.1", "localhost"))


def policy_typo(site: Site) -> Outcome:
    assert site.enrol(site.at.invite("a")).returncode == 0
    (site.folder / "policy.toml").write_text("[tensors]\nmax_nrom = 1.0\n")
    (site.folder / "policy.toml").chmod(0o600)
    return site.work(ATOLL_POLICY=str(site.folder / "policy.toml"))


@pytest.mark.parametrize(
    ("happens", "error", "said"),
    [
        (used_twice, AuthError, "was used on"),
        (of_an_enrolled_name, Conflict, "is enrolled since"),
        (expired, AuthError, "expired on"),
        (replaced, AuthError, "was replaced by a newer one"),
        (cut_off, UsageError, "The invitation is not whole"),
        (moved, ServerUnreachable, "If the server has moved, ask its admin for a new invitation"),
        (another_server, AuthError, "is not the server that has made this invitation"),
        (revoked, AuthError, "was revoked on"),
        (replayed, AuthError, "is not its newest one"),
        (renewed_elsewhere, AuthError, "is not from this run"),
        (server_moved, ServerUnreachable, "set ATOLL_CREDENTIAL to the credential's folder"),
        (policy_typo, ConfigError, "policy.toml:2: the policy has no key 'tensors.max_nrom'"),
    ],
)
def test_bad_input_has_a_message_and_an_exit_code(
    site: Site, happens: Callable[[Site], Outcome], error: type[Exception], said: str
) -> None:
    """Each wrong input ends a command with one line, which has cause and remedy, and with the exit code of its error.

    An invitation of another site still works afterwards.
    """
    other = site.at.invite("other")
    outcome = happens(site)
    site.at.set_clock(0.0)
    shown = " ".join(outcome.stderr.split())
    assert said in shown
    assert outcome.returncode == error.exit_code, outcome.stderr  # type: ignore[attr-defined]
    assert "Traceback" not in shown
    assert site.enrol(other).returncode == 0
