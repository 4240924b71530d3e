"""A swarm over TLS: workers show each other certificates, and the server's token stays between each and the server."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import trustme
from swarm_run import SITES
from swarm_world import Result, Sites, serve_swarm

import atoll
from atoll.errors import ConfigError


@pytest.fixture
def secured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Certificate and key for localhost; the environment names them, their authority and a token."""
    authority = trustme.CA()
    cert = authority.issue_cert("localhost", "127.0.0.1")
    ca, chain, key = tmp_path / "ca.pem", tmp_path / "cert.pem", tmp_path / "key.pem"
    ca.write_bytes(authority.cert_pem.bytes())
    chain.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    key.touch(mode=0o600)
    key.write_bytes(cert.private_key_pem.bytes())
    monkeypatch.setenv("ATOLL_TOKEN", "a-token-of-the-run")
    monkeypatch.setenv("ATOLL_TLS_CA", str(ca))
    monkeypatch.setenv("ATOLL_PEER_NAME", "localhost")
    monkeypatch.setenv("ATOLL_PEER_TLS_CERT", str(chain))
    monkeypatch.setenv("ATOLL_PEER_TLS_KEY", str(key))
    return chain, key


@pytest.mark.covers("P10", "X2")
def test_workers_and_server_over_tls(tmp_path: Path, secured: tuple[Path, Path]) -> None:
    chain, key = secured
    with serve_swarm(tmp_path, **{"network.tls_cert": chain, "network.tls_key": key}) as server:
        sites = Sites(server.url.replace("127.0.0.1", "localhost"), tmp_path)
        sites.join()
        server.run()
        peers = server._require_run().swarm
        assert peers is not None
        assert all(peer.address.startswith("https://localhost:") for peer in peers.view.peers.values())
    assert len(set(Result(tmp_path).aggregators)) > 1
    states = [model.state_dict() for model in sites.models.values()]
    assert len(states) == len(SITES)
    assert all(torch.equal(value, states[0][name]) for state in states for name, value in state.items())


@pytest.mark.covers("P10", "X3")
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"ATOLL_PEER_PORT": "http"}, "ATOLL_PEER_PORT is 'http'"),
        (
            {"ATOLL_PEER_HOST": "0.0.0.0"},
            "Worker a cannot listen .* without TLS.* Set ATOLL_PEER_HOST .* ATOLL_PEER_TLS_CERT and ",
        ),
        (
            {"ATOLL_PEER_HOST": "192.0.2.1", "ATOLL_PEER_INSECURE": "1"},
            "Worker a cannot listen for the other workers: host '192.0.2.1' is not an address of this machine. Set",
        ),
        (
            {"ATOLL_PEER_TLS_KEY": "a.key"},
            "Only one of tls_cert and tls_key is set.* ATOLL_PEER_TLS_CERT and ATOLL_PEER_TLS_KEY",
        ),
    ],
    ids=["port", "without-tls", "address", "one-of-two"],
)
def test_where_a_worker_cannot_listen_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with serve_swarm(tmp_path) as server:
        with pytest.raises(ConfigError, match=said):
            with atoll.join(server.url, site="a", folder=tmp_path / "w"):
                pass
