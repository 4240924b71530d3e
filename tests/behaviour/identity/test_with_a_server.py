"""Sites that enrolled take part in runs of a real server: they renew, leave when revoked, and form a swarm."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import pytest
from harness.processes import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))

from kit.credentials import Trusted
from kit.servers import serve
from kit.sites import FederatedSites, Gate, run_to_end
from swarm_world import SITES, serve_swarm
from swarm_world import Sites as SwarmSites

import atoll
from atoll.cli.export import from_server
from atoll.errors import AtollError, AuthError, Gone
from atoll.protocol import routes
from atoll.tensors.reference import TensorRef
from atoll.transport.authority_files import authority_file
from atoll.transport.credential_store import SiteCredential
from atoll.transport.enrolment import enrol
from atoll.transport.http_client import http_to
from atoll.transport.object_client import object_http


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


def test_certificate_is_renewed_in_a_run_without_heartbeats(tmp_path: Path) -> None:
    """Where `network.heartbeat_interval_s` is 0, a worker renews its credential all the same."""
    settings = {"network.heartbeat_interval_s": 0.0, "network.heartbeat_timeout_s": 0.0, "trust.certificate_s": 6.0}
    with serve(tmp_path, **settings | {"trust.required": True, "rounds.sites": 1}) as server:
        credential = enrolled(tmp_path, server, "a")
        first = credential.note

        def outlive(_: str, number: int) -> None:
            if number == 2:
                wait_until(lambda: time.time() > first.expires_at_s + 0.5, "the end of the first certificate", 30)

        sites = FederatedSites(server.url, tmp_path, ["a"], during=outlive)
        run_to_end(server, sites)
        assert credential.note.expires_at_s > first.expires_at_s
        assert sites.trained == {("a", number): 1 for number in (1, 2, 3)}


def export_from_swarm(folder: Path, server: atoll.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the admin's token and the certificate of a site of this machine, a version comes from the workers."""
    with monkeypatch.context() as patch:
        patch.setenv("ATOLL_TOKEN", Trusted(folder, server).admin)
        assert from_server(server.url, folder / "out.safetensors", 1) == 1
        patch.setenv("XDG_DATA_HOME", str(folder / "elsewhere"))
        patch.setenv("ATOLL_TLS_CA", str(authority_file(folder / "state")))
        with pytest.raises(Gone, match="cannot be downloaded") as raised:
            from_server(server.url, folder / "none.safetensors", 1)
    assert "only certificates of the run's sites" in raised.value.remedy


def test_workers_of_a_swarm_learn_of_a_revocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After `atoll revoke`, other workers serve nothing to the site's certificate, though it has a reference. Until
    then, `atoll export` gets a version from them with the certificate of any site.
    """
    gate = Gate(2)
    with serve_swarm(tmp_path, **{"trust.required": True, "rounds.min_sites": 2}) as server:
        own = {site: enrolled(tmp_path, server, site) for site in SITES}
        sites = SwarmSites(server.url, tmp_path, during=gate)
        gate.wait()
        export_from_swarm(tmp_path, server, monkeypatch)
        place = server._require_served().place
        assert place is not None
        address = place.view.peers["a"].address
        held = {each.source.version for each in place.view.peers["a"].held.values()}
        ref = TensorRef.parse(next(each for each in held if TensorRef.parse(each).server == address))

        def answer() -> str:
            http = object_http(ref, require_ip=lambda _: None, context=lambda: own["c"].context_to_peer("a"))
            with contextlib.closing(http):
                try:
                    http.reach(routes.OBJECT.format(object=ref.object), timeout_s=10)
                except AtollError as error:
                    return error.code
            return "served"

        assert answer() == "served"
        Trusted(tmp_path, server).revoke("c")
        wait_until(lambda: answer() == "auth", "the refusal", 20)
        gate.open()
        with pytest.raises(AuthError, match="was revoked"):
            sites.join()
        server.run()


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
    """Each refusal names its reason: a used invitation, one of another run, a wrong name, a revoked site."""
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
