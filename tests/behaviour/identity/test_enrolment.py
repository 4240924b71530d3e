"""A site enrols: it recognises the server, gets a credential, stores it, and every connection shows it."""

from __future__ import annotations

import contextlib
import stat
import time
from datetime import timedelta
from email.utils import formatdate
from pathlib import Path

import pytest
from kit.enrolling_server import SECRET, EnrollingServer

from atoll.errors import AtollError, AuthError, ServerUnreachable
from atoll.protocol import routes
from atoll.transport.certificates import new_authority
from atoll.transport.credential_store import credential_at
from atoll.transport.enrolment import enrol, renew
from atoll.transport.http_client import enrolled_site, http_to, server_address


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data"


def test_enrolled_site_shows_its_certificate(tmp_path: Path, own_home: Path) -> None:
    """After `enrol`, a worker's connection trusts the server and shows the site's certificate; its key was not sent."""
    with EnrollingServer(tmp_path / "server") as server:
        credential = enrol(server.invitation())
        assert isinstance(reach(server), AuthError)
        assert [(path, site) for path, site, _, _ in server.seen] == [
            (routes.AUTHORITY, ""),
            (routes.ENROL, ""),
            (routes.STATUS, "hospital-a"),
        ]
        assert credential.folder == own_home / "atoll" / "sites" / f"127.0.0.1_{server.port}" / "hospital-a"
        assert stat.S_IMODE(credential.folder.stat().st_mode) == 0o700
        for path in credential.folder.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        key = (credential.folder / "identity.pem").read_bytes().partition(b"-----BEGIN CERT")[0]
        assert b"PRIVATE KEY" in key
        assert key.splitlines()[1] not in server.bytes_seen
        assert server_address(None, enrolled=True) == server.url
        assert enrolled_site(server.url) == "hospital-a"


def reach(server: EnrollingServer, site: str | None = "hospital-a") -> AtollError:
    """The error of a connection; that of a server without a run is an AuthError."""
    with contextlib.closing(http_to(server.url, site=site)) as http, pytest.raises(AtollError) as raised:
        http.reach(routes.STATUS, timeout_s=10)
    return raised.value


def test_server_with_another_authority_learns_no_secret(tmp_path: Path) -> None:
    """A server gets no secret if its certificate is from another authority than the invitation names.

    This holds even if the server also sends the certificate of the right authority.
    """
    right = new_authority("a run")
    with EnrollingServer(tmp_path / "server") as server:
        server.extra = right.certificate
        with pytest.raises(AuthError, match="not the server that has made this invitation"):
            enrol(server.invitation(of=right.certificate))
        assert [path for path, *_ in server.seen] == [routes.AUTHORITY]
        assert SECRET.encode() not in server.bytes_seen
        assert credential_at(server.url, "hospital-a") is None


def test_only_the_authority_with_the_fingerprint_is_trusted(tmp_path: Path) -> None:
    """Another certificate behind the authority's is not stored: whoever is on the path could have added it."""
    with EnrollingServer(tmp_path / "server") as server:
        server.extra = new_authority("of an attacker").certificate
        credential = enrol(server.invitation())
        assert (credential.folder / "authority.pem").read_bytes() == server.authority.certificate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"site": "hospital-b"}, "it is for site hospital-b, not hospital-a"),
        ({"kind": "token", "token": "t" * 43}, "it is a token, but the server has an authority"),
        ({"certificate": new_authority("no site").certificate.decode()}, "it is for another key|it cannot be read"),
        ({"certificate": ""}, "it cannot be read"),
    ],
)
def test_unfit_credentials_are_not_stored(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    """A credential for another site, of another kind, or for another key ends enrolment; nothing is stored."""
    with EnrollingServer(tmp_path / "server") as server:
        server.answers[routes.ENROL] = changes
        with pytest.raises(AtollError, match=message):
            enrol(server.invitation())
        assert credential_at(server.url, "hospital-a") is None


def test_folder_that_cannot_be_written_keeps_the_invitation(tmp_path: Path) -> None:
    """If the credential cannot be stored, the invitation is not used: it still works afterwards."""
    (tmp_path / "file").touch()
    with EnrollingServer(tmp_path / "server") as server:
        with pytest.raises(AtollError, match="cannot be used"):
            enrol(server.invitation(), tmp_path / "file" / "folder")
        assert server.seen == []
        assert enrol(server.invitation()).note.site == "hospital-a"


def test_renewed_certificate_is_used_by_open_clients(tmp_path: Path) -> None:
    """After a renewal, new connections of each client, also of one that was opened before, show the new certificate."""
    with EnrollingServer(tmp_path / "server", renew_after_s=0.001) as server:
        credential = enrol(server.invitation())
        with contextlib.closing(http_to(server.url, site="hospital-a")) as other:
            assert isinstance(reach(server), AuthError)
            with contextlib.closing(http_to(server.url, site="hospital-a")) as http:
                assert renew(http, credential, 10)
            with pytest.raises(AuthError):
                other.reach(routes.STATUS, timeout_s=10)
        first, renewing, after = (serial for path, _, serial, _ in server.seen if path != routes.ENROL and serial)
        assert first == renewing != after


def test_expired_certificate_names_date_and_remedy(tmp_path: Path) -> None:
    """A server that refuses an expired certificate is shown as that, with its date and the way to a new one."""
    with EnrollingServer(tmp_path / "server", lasts=timedelta(minutes=-1)) as server:
        credential = enrol(server.invitation())
        error = reach(server)
        assert isinstance(error, ServerUnreachable)
        assert error.is_other
        ended = credential.note.expires_at_s
        assert "refuses the certificate of site hospital-a: it has expired" in error.message
        assert f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(ended))} UTC" in error.message
        assert "clock" not in error.message
        assert "atoll enrol" in error.remedy


def test_clock_that_is_wrong_by_a_day_is_named(tmp_path: Path) -> None:
    """If a certificate is refused as expired and the clocks differ by a day, the message says by how much."""
    with EnrollingServer(tmp_path / "server", lasts=timedelta(minutes=-1)) as server:
        enrol(server.invitation())
        server.date = formatdate(time.time() - 86_400, usegmt=True)
        assert "The clock of this machine is 24 h" in reach(server).message


def test_certificate_of_another_authority_is_named(tmp_path: Path) -> None:
    """A server that was made anew at the same address has another authority; the site is told to enrol again."""
    with EnrollingServer(tmp_path / "server") as server:
        enrol(server.invitation())
        port = server.port
    with EnrollingServer(tmp_path / "anew", port=port) as server:
        error = reach(server)
        assert "is not the server at which site hospital-a has enrolled" in error.message
        assert "new state directory" in error.remedy


def test_name_without_a_credential_names_the_nearest(tmp_path: Path) -> None:
    """A typo in the site's name is refused by the server, and the message names the site that has enrolled."""
    with EnrollingServer(tmp_path / "server") as server:
        enrol(server.invitation())
        assert "Did you mean 'hospital-a'?" in reach(server, "hospital-b").message


def test_behind_a_proxy_the_site_has_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invitation without a fingerprint brings a token; it is sent, in place of the token of the environment."""
    with EnrollingServer(tmp_path / "server") as server:
        monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "server" / "ca.pem"))
        monkeypatch.setenv("ATOLL_TOKEN", "of-the-run")
        server.answers[routes.ENROL] = {"kind": "token", "token": "t" * 43}
        invitation = server.invitation()
        enrol(type(invitation)(invitation.server, invitation.site, invitation.secret))
        reach(server)
        reach(server, None)
        assert [header for *_, header in server.seen[-2:]] == [f"Bearer {'t' * 43}", "Bearer of-the-run"]


def test_new_kind_of_credential_leaves_nothing_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token in place of a certificate, then a certificate again: the files of the other kind are gone; a renewal
    keeps the authority.
    """
    with EnrollingServer(tmp_path / "server", renew_after_s=0.001) as server:
        credential, invitation = enrol(server.invitation()), server.invitation()
        with contextlib.closing(http_to(server.url, site="hospital-a")) as http:
            assert renew(http, credential, 10.0)
        assert {"identity.pem", "authority.pem"} < {path.name for path in credential.folder.iterdir()}
        monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "server" / "ca.pem"))
        server.answers[routes.ENROL] = {"kind": "token", "token": "t" * 43}
        server.invited[SECRET] = "hospital-a"
        enrol(type(invitation)(invitation.server, invitation.site, invitation.secret))
        found = {path.name for path in credential.folder.iterdir()}
        assert found & {"identity.pem", "authority.pem", "token"} == {"token"}
        server.answers.clear()
        server.invited[SECRET] = "hospital-a"
        enrol(invitation)
        found = {path.name for path in credential.folder.iterdir()}
        assert found & {"identity.pem", "authority.pem", "token"} == {"identity.pem", "authority.pem"}


def test_lost_answer_is_asked_for_again_with_the_same_key(tmp_path: Path) -> None:
    """If the answer to an enrolment is lost, the next attempt sends the same request, so the server can repeat it."""
    with EnrollingServer(tmp_path / "server") as server:
        server.answers[routes.ENROL] = {"site": "damaged"}
        with pytest.raises(AtollError):
            enrol(server.invitation())
        first = server.bytes_seen
        server.answers, server.invited, server.bytes_seen = {}, {SECRET: "hospital-a"}, b""
        folder = enrol(server.invitation()).folder
        assert server.bytes_seen == first
        assert not (folder / "pending.pem").exists()


@pytest.mark.parametrize("address", ["http://example.org:8512", "http://127.0.0.1:8512"])
def test_secret_does_not_travel_without_tls(tmp_path: Path, address: str) -> None:
    """An invitation with a fingerprint, or for another machine, is not used over plain HTTP."""
    with EnrollingServer(tmp_path / "server") as server:
        invitation = server.invitation()
        with pytest.raises(AtollError, match="without TLS"):
            enrol(type(invitation)(address, invitation.site, invitation.secret, invitation.fingerprint))


def test_kept_connection_is_not_used_with_an_old_certificate(tmp_path: Path) -> None:
    """After a renewal, a kept connection is opened anew: the server would refuse it once its certificate has ended."""
    with EnrollingServer(tmp_path / "server", renew_after_s=0.001) as server:
        credential = enrol(server.invitation())
        with contextlib.closing(http_to(server.url, site="hospital-a")) as http:
            for _ in range(2):
                with pytest.raises(AuthError):
                    http.reach(routes.STATUS, timeout_s=10)
            assert renew(http, credential, 10)
            with pytest.raises(AuthError):
                http.reach(routes.STATUS, timeout_s=10)
        before, again, after = (serial for path, _, serial, _ in server.seen if path == routes.STATUS)
        assert before == again != after


def test_server_of_a_known_authority_gives_a_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An invitation without a fingerprint works if a known authority vouches for the server: the site gets a
    certificate.
    """
    with EnrollingServer(tmp_path / "server") as server:
        monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "server" / "ca.pem"))
        invitation = server.invitation()
        credential = enrol(type(invitation)(invitation.server, invitation.site, invitation.secret))
        reach(server)
        assert credential.note.kind == "certificate"
        assert server.seen[-1][1] == "hospital-a"
