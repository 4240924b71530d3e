"""Who may join, and which TLS both ends speak."""

import os
import re
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from kit.servers import plain_server
from kit.tls import write_certificate
from torch import nn

from atoll.errors import AuthError, ConfigError, SchemaMismatch, ServerUnreachable
from atoll.protocol import messages, routes
from atoll.server.http.auth import Gate
from atoll.tensors.module_tensors import schema_of
from atoll.transport.http_client import Http, network_error
from atoll.transport.tls import client_context, read_token, server_context


@pytest.mark.covers("F30")
def test_the_server_itself_refuses_a_site_that_does_not_fit(tmp_path: Path) -> None:
    with plain_server(tmp_path, nn.Linear(2, 1), **{"algorithm.name": "diloco", "diloco.sync_every": 5}) as server:
        http = Http(server.url)
        join = messages.Join(protocol=routes.PROTOCOL, site="a")
        with pytest.raises(ConfigError, match="every 6 steps, the run every 5"):
            http.post(routes.WORKERS, join.model_copy(update={"sync_every": 6}), messages.Joined)
        mine = schema_of(nn.Linear(2, 1)).digest[:12]
        with pytest.raises(
            SchemaMismatch,
            match=f"has the schema 000000000000, the run's {mine}: 2 tensors, .* weight F32.*Build the same",
        ):
            http.post(routes.WORKERS, join.model_copy(update={"schema_digest": "0" * 64}), messages.Joined)
        assert server.status().workers == []
        http.post(routes.WORKERS, join.model_copy(update={"sync_every": 5}), messages.Joined)
        http.close()


@pytest.mark.covers("F30")
def test_a_model_without_controls_fits_a_run_that_has_them(tmp_path: Path) -> None:
    """A worker may name the schema of its own model, or the run's as it has read it."""
    model = nn.Linear(2, 1)
    with plain_server(tmp_path, model, **{"algorithm.name": "scaffold"}) as server:
        http = Http(server.url)
        run = http.get(routes.RUN, messages.RunInfo).schema_digest
        own = schema_of(model).digest
        assert own != run
        for digest in (own, run):
            join = messages.Join(protocol=routes.PROTOCOL, site="a", schema_digest=digest)
            http.post(routes.WORKERS, join, messages.Joined)
        http.close()


@pytest.mark.covers("X2")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666])
def test_a_secret_that_more_than_its_owner_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == "secret"


@pytest.mark.covers("X2")
def test_both_ends_speak_tls_1_3_only(tmp_path: Path) -> None:
    tls = write_certificate(tmp_path)
    context = server_context(tls["network.tls_cert"], tls["network.tls_key"])
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert client_context(None).minimum_version == ssl.TLSVersion.TLSv1_3


@pytest.mark.covers("X2")
@pytest.mark.parametrize("sent", [None, "", "Bearer", "Bearer ", "Bearer secre", "Bearer secret1", "Basic secret"])
def test_nothing_but_the_whole_token_opens_the_gate(sent: str | None) -> None:
    gate = Gate("secret")
    with pytest.raises(AuthError):
        gate.admit(sent)
    gate.admit("Bearer secret")


@pytest.mark.covers("X2")
def test_a_token_that_is_no_text_is_refused_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as raw:
            raw.sendall(
                f"GET {routes.RUN} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer ".encode() + b"\xff\r\n\r\n"
            )
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


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def said_to(address: str, folder: Path, ca: trustme.CA) -> str:
    ca.cert_pem.write_to_path(folder / "ca.pem")
    http = Http(address, ca=str(folder / "ca.pem"))
    with pytest.raises(ServerUnreachable) as refused:
        http.get(routes.RUN, messages.RunInfo)
    http.close()
    return str(refused.value)


@pytest.mark.covers("X3", "F38")
@pytest.mark.parametrize(
    ("name", "days", "said"),
    [
        ("localhost", -1, "certificate has expired.*Renew the certificate at the server"),
        ("elsewhere.org", 1, "ostname mismatch.*Use a name that is in its certificate"),
    ],
)
def test_a_certificate_that_is_refused_comes_with_its_own_remedy(
    tmp_path: Path, authority: trustme.CA, name: str, days: int, said: str
) -> None:
    tls = write_certificate(tmp_path, name, authority, not_after=datetime.now(UTC) + timedelta(days=days))
    with plain_server(tmp_path, nn.Linear(2, 1), **tls) as server:
        assert re.search(said, said_to(f"https://localhost:{server.port}", tmp_path, authority))


@pytest.mark.covers("X3", "F38")
def test_the_wrong_authority_and_the_wrong_scheme_are_told_apart(tmp_path: Path, authority: trustme.CA) -> None:
    with plain_server(tmp_path, nn.Linear(2, 1), **write_certificate(tmp_path, authority=authority)) as server:
        assert "Set ATOLL_TLS_CA" in said_to(f"https://localhost:{server.port}", tmp_path, trustme.CA())
        assert "needs https://" in said_to(f"http://localhost:{server.port}", tmp_path, authority)
    with plain_server(tmp_path / "plain", nn.Linear(2, 1)) as server:
        said = said_to(f"https://localhost:{server.port}", tmp_path, authority)
        assert "does not speak TLS. Write its address with http://" in said
        assert "set network.tls_cert and network.tls_key at the server" in said


def test_a_tls_connection_that_ends_early_is_no_matter_of_certificates() -> None:
    """What every worker sees when its server is killed."""
    error = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    assert "does not answer (eof occurred in violation of protocol)" in str(network_error("https://here", 1.0, error))
