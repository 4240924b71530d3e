"""Who may join, and which TLS both ends speak."""

import ssl
from pathlib import Path

import pytest
import trustme
from torch import nn

import atoll
from atoll.errors import AuthError, ConfigError, SchemaMismatch
from atoll.server.auth import Gate
from atoll.transport.client import Http
from atoll.transport.tls import client_context, server_context
from atoll.wire import messages, routes


@pytest.mark.covers("F30")
def test_who_does_not_fit_is_refused_by_the_server_itself(tmp_path: Path) -> None:
    with atoll.Server(nn.Linear(2, 1), port=0, algorithm="diloco", sync_every=5, state_dir=tmp_path / "s") as server:
        http = Http(server.url)
        join = messages.Join(protocol=routes.PROTOCOL, site="a")
        with pytest.raises(ConfigError, match="every 6 steps, the run every 5"):
            http.post(routes.WORKERS, join.model_copy(update={"sync_every": 6}), messages.Joined)
        with pytest.raises(SchemaMismatch, match="has the schema 000000000000"):
            http.post(routes.WORKERS, join.model_copy(update={"schema_digest": "0" * 64}), messages.Joined)
        assert server.status().workers == []
        http.post(routes.WORKERS, join.model_copy(update={"sync_every": 5}), messages.Joined)
        http.close()


@pytest.mark.covers("X2")
def test_both_ends_speak_tls_1_3_only(tmp_path: Path) -> None:
    cert = trustme.CA().issue_cert("localhost")
    chain, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    chain.write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    key.touch(mode=0o600)
    key.write_bytes(cert.private_key_pem.bytes())
    assert server_context(chain, key).minimum_version == ssl.TLSVersion.TLSv1_3
    assert client_context(None).minimum_version == ssl.TLSVersion.TLSv1_3


@pytest.mark.covers("X2")
@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer ", "Bearer secre", "Bearer secret1", "Basic secret"])
def test_nothing_but_the_whole_token_opens_the_gate(sent: str | None) -> None:
    gate = Gate("secret")
    with pytest.raises(AuthError):
        gate.admit(sent)
    assert gate.admit("Bearer secret").site is None
