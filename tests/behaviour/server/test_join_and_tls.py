"""Who may join, and which TLS both ends speak."""

import os
import re
import socket
import ssl
import threading
import urllib.error
import urllib.request
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from kit.requests import get, post
from kit.servers import plain_server
from kit.tls import write_certificate
from torch import nn

import atoll
from atoll.errors import ConfigError, ServerUnreachable
from atoll.testing.run import status


def join(url: str, **fields: object) -> tuple[int, str]:
    """Status of a plain request to join, and what is wrong with it."""
    code, reply = post(url, "/v1/workers", {"protocol": 1, "site": "a"} | fields)
    return code, f"{reply.get('code')}: {reply.get('message')} {reply.get('remedy')}"


@pytest.mark.covers("F30")
def test_the_server_itself_refuses_a_site_that_does_not_fit(tmp_path: Path) -> None:
    with plain_server(tmp_path, nn.Linear(2, 1), **{"algorithm.name": "diloco", "diloco.sync_every": 5}) as server:
        assert re.search("^config: .*every 6 steps, but the run every 5", join(server.url, sync_every=6)[1])
        mine = get(server.url, "/v1/run")[1]["schema_digest"][:12]
        assert re.search(
            rf"^schema_mismatch: .*\(schema 0{{12}}\) differs .*\(schema {mine}\).* 2 tensors .*weight F32.*Build",
            join(server.url, schema_digest="0" * 64)[1],
        )
        assert server.status().workers == []
        assert join(server.url, sync_every=5)[0] == 200


@pytest.mark.covers("F30")
def test_a_model_without_controls_fits_a_run_that_has_them(tmp_path: Path) -> None:
    """A worker may name the schema of its own model, or the run's as it has read it."""
    digests = []
    for algorithm in ("fedavg", "scaffold"):
        with plain_server(tmp_path / algorithm, nn.Linear(2, 1), **{"algorithm.name": algorithm}) as server:
            digests.append(get(server.url, "/v1/run")[1]["schema_digest"])
            assert [join(server.url, schema_digest=digest)[0] for digest in digests] == [200] * len(digests)
    assert len(set(digests)) == 2


@pytest.mark.covers("X2")
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666])
def test_a_secret_that_more_than_its_owner_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        plain_server(tmp_path, nn.Linear(2, 1), **{"network.token_file": file}).start()
    file.chmod(0o600)
    with plain_server(tmp_path, nn.Linear(2, 1), **{"network.token_file": file}) as server:
        assert [asked(server.url, sent) for sent in (None, "Bearer secret")] == [401, 200]


@pytest.mark.covers("X2")
def test_both_ends_speak_tls_1_3_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = write_certificate(tmp_path)
    monkeypatch.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
    older = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    with plain_server(tmp_path, nn.Linear(2, 1), **tls) as server:
        assert status(f"https://localhost:{server.port}").version == 0
        with socket.create_connection(("localhost", server.port), timeout=20.0) as raw:
            with pytest.raises(ssl.SSLError):
                older.wrap_socket(raw, server_hostname="localhost")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls["network.tls_cert"], tls["network.tls_key"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    refused: list[str] = []

    def accept(listener: socket.socket) -> None:
        raw, _ = listener.accept()
        with raw, pytest.raises(ssl.SSLError) as error:
            context.wrap_socket(raw, server_side=True)
        refused.append(str(error.value.reason))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        with pytest.raises(ServerUnreachable):
            status(f"https://localhost:{listener.getsockname()[1]}")
        thread.join(20)
    assert refused == ["UNSUPPORTED_PROTOCOL"]


def asked(url: str, sent: str | None) -> int:
    """Status of a request with this Authorization."""
    request = urllib.request.Request(f"{url}/v1/run", headers={} if sent is None else {"Authorization": sent})
    try:
        with urllib.request.urlopen(request, timeout=20) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


@pytest.mark.covers("X2")
def test_nothing_but_the_whole_token_opens_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        wrong = [None, "", "Bearer", "Bearer ", "Bearer secre", "Bearer secret1", "Basic secret"]
        assert [asked(server.url, sent) for sent in wrong] == [401] * len(wrong)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as raw:
            raw.sendall(b"GET /v1/run HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 401 ")
        assert asked(server.url, "Bearer secret") == 200


@pytest.mark.covers("X3")
@pytest.mark.parametrize("token", [b"two words", b"two\nlines", "tök".encode(), b"\xff"])
def test_a_token_that_no_header_can_carry_is_refused_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(token)

    def server() -> atoll.Server:
        return plain_server(tmp_path, nn.Linear(2, 1), **{"network.token_file": path})

    with pytest.raises(ConfigError, match=r"token file .* one word"):
        server().start()
    monkeypatch.setenv("ATOLL_TOKEN", os.fsdecode(token))
    with pytest.raises(ConfigError, match="ATOLL_TOKEN is not"):
        server().start()
    monkeypatch.setenv("ATOLL_TOKEN", " secret\n")
    with server() as running:
        assert asked(running.url, "Bearer secret") == 200


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def said_to(address: str, folder: Path, ca: trustme.CA) -> str:
    """Why a site that trusts this authority does not reach the server."""
    ca.cert_pem.write_to_path(folder / "ca.pem")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATOLL_TLS_CA", str(folder / "ca.pem"))
        with pytest.raises(ServerUnreachable) as refused:
            status(address)
    return str(refused.value)


@pytest.mark.covers("X3", "F38")
@pytest.mark.parametrize(
    ("name", "days", "said"),
    [
        ("localhost", -1, "certificate has expired.*Renew the certificate at the server"),
        ("elsewhere.org", 1, "ostname mismatch.*Use a name in its certificate"),
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
        assert "does not speak TLS. On a trusted network, use http://" in said
        assert "set network.tls_cert and network.tls_key at the server" in said


def test_a_tls_connection_that_ends_early_is_no_matter_of_certificates() -> None:
    """What every worker sees when its server is killed."""
    from atoll.transport.http_client import network_error

    error = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    assert "does not answer (eof occurred in violation of protocol)" in str(network_error("https://here", 1.0, error))
