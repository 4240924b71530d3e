"""Sites that enrolled take part in runs of a real server: they renew, leave when revoked, and form a swarm."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from harness.processes import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))

from kit.credentials import Trusted
from kit.servers import serve
from kit.sites import FederatedSites, run_to_end
from swarm_world import SITES, serve_swarm
from swarm_world import Sites as SwarmSites

import atoll
from atoll.errors import AtollError, AuthError
from atoll.transport.credential_store import SiteCredential
from atoll.transport.enrolment import enrol
from atoll.transport.http_client import http_to


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def enrolled(folder: Path, server: atoll.Server, site: str) -> SiteCredential:
    return enrol(Trusted(folder, server).invite(site))


def test_session_renews_its_certificate_without_a_pause(tmp_path: Path) -> None:
    """A run that lasts longer than the certificate of its site ends well: the heartbeats have renewed it."""
    with serve(tmp_path, **{"trust.required": True, "trust.certificate_s": 4.0, "rounds.sites": 1}) as server:
        credential = enrolled(tmp_path, server, "a")
        first = credential.note

        def outlive(_: str, number: int) -> None:
            if number == 2:
                wait_until(lambda: time.time() > first.expires_at_s + 0.5, 30)
                assert credential.note.expires_at_s > first.expires_at_s

        sites = FederatedSites(server.url, tmp_path, ["a"], during=outlive)
        run_to_end(server, sites)
        assert sites.trained == {("a", number): 1 for number in (1, 2, 3)}


def test_swarm_needs_no_certificates_but_those_of_its_sites(tmp_path: Path) -> None:
    """Workers of a swarm, and the server that checks their addresses, use TLS with the certificates of the run."""
    with serve_swarm(tmp_path, **{"trust.required": True}) as server:
        for site in SITES:
            enrolled(tmp_path, server, site)
        sites = SwarmSites(server.url, tmp_path)
        run_to_end(server, sites)
        peers = server._require_served().place
        assert peers is not None
        assert all(peer.address.startswith("https://") for peer in peers.view.peers.values())
    assert (len(sites.models), len(sites.digests)) == (len(SITES), 1)


def refusal(server: atoll.Server, site: str) -> AtollError:
    http = http_to(server.url, site=site)
    with pytest.raises(AtollError) as raised:
        http.reach("/v1/run", timeout_s=10)
    http.close()
    return raised.value


def test_refused_sites_are_told_why(tmp_path: Path) -> None:
    """Messages of a revoked site, of an invitation that was used, of one for another run, and of a wrong name."""
    with serve(tmp_path / "one", **{"trust.required": True}) as server, serve(tmp_path / "two") as other:
        trusted = Trusted(tmp_path / "one", server)
        invitation = trusted.invite("hospital-a")
        enrol(invitation)
        (tmp_path / "elsewhere").mkdir()
        with pytest.raises(AuthError, match="was used") as raised:
            enrol(invitation, tmp_path / "elsewhere")
        assert "atoll invite hospital-a" in raised.value.remedy
        assert "Did you mean 'hospital-a'?" in refusal(server, "hospital-b").message
        with pytest.raises(AtollError, match="invitation"):
            enrol(type(invitation)(other.url, "hospital-a", invitation.secret))
        trusted.revoke("hospital-a")
        assert "revoked" in refusal(server, "hospital-a").message
