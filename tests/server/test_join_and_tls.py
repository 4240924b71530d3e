"""Who may join, and which TLS both ends speak."""

import os
import socket
import ssl
from pathlib import Path

import pytest
import trustme
from torch import nn

import atoll
from atoll.errors import ConfigError, SchemaMismatch
from atoll.transport.client import Http
from atoll.transport.tls import client_context, read_token, server_context
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
def test_a_token_that_is_no_text_is_refused_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    with atoll.Server(nn.Linear(2, 1), port=0, algorithm="fedavg", state_dir=tmp_path / "s") as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as raw:
            raw.sendall(f"GET {routes.RUN} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ".encode() + b"\xff\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 401 ")
        http = Http(server.url, token="secret")
        http.get(routes.RUN, messages.RunInfo)
        http.close()


@pytest.mark.covers("X3")
@pytest.mark.parametrize("token", [b"two words", b"two\nlines", "tök".encode(), b"\xff"])
def test_a_token_that_no_header_can_carry_is_refused_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(token)
    with pytest.raises(ConfigError, match=r"token file .* one word"):
        read_token(path)
    monkeypatch.setenv("ATOLL_TOKEN", os.fsdecode(token))
    with pytest.raises(ConfigError, match="ATOLL_TOKEN is not"):
        read_token(path)
    monkeypatch.setenv("ATOLL_TOKEN", " secret\n")
    assert read_token(path) == "secret"
