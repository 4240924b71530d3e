"""What a server admits: sites that fit the run, tokens, certificates, and requests for this machine's own name."""

from __future__ import annotations

import logging
import os
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from kit.requests import answer, begin_request, get, post
from kit.servers import plain_server
from kit.tls import write_certificate
from torch import nn

import atoll
from atoll.errors import AuthError, ConfigError, ServerUnreachable
from atoll.testing.run import status


def asked(
    port: int, host: str = "localhost", authorization: str | None = None, line: str = "GET /v1/status", **options: str
) -> tuple[int, str]:
    """Status and code of a request with exactly these headers."""
    shown = {} if authorization is None else {"Authorization": authorization}
    status, reply = answer(begin_request(port, line, Host=host, **shown, **options))
    return status, reply.get("code", "")


def join(url: str, **fields: object) -> tuple[int, str]:
    """Status of a plain request to join, and what is wrong with it."""
    code, reply = post(url, "/v1/workers", {"protocol": 1, "site": "a"} | fields)
    return code, f"{reply.get('code')}: {reply.get('message')} {reply.get('remedy')}"


@pytest.mark.covers("F30")
def test_refuses_a_site_that_does_not_fit(tmp_path: Path) -> None:
    """The server refuses a site with another model or another synchronisation interval, even if the site itself did not
    notice.
    """
    with plain_server(tmp_path, nn.Linear(2, 1), algorithm="diloco", H=5) as server:
        assert re.search("^config: .*every 6 steps, but the run every 5", join(server.url, sync_every=6)[1])
        mine = get(server.url, "/v1/run")[1]["schema_digest"][:12]
        assert re.search(
            rf"^schema_mismatch: .*\(schema 0{{12}}\) differs .*\(schema {mine}; .* 2 tensors.*weight F32.*Build",
            join(server.url, schema_digest="0" * 64)[1],
        )
        assert server.status().workers == []
        assert join(server.url, sync_every=5)[0] == 200


@pytest.mark.covers("F30")
def test_a_model_without_controls_fits_scaffold(tmp_path: Path) -> None:
    """In a SCAFFOLD run, a worker may join with the schema of its own model, although the run's schema also has
    SCAFFOLD's controls.
    """
    digests = []
    for algorithm in ("fedavg", "scaffold"):
        with plain_server(tmp_path / algorithm, nn.Linear(2, 1), algorithm=algorithm) as server:
            digests.append(get(server.url, "/v1/run")[1]["schema_digest"])
            assert [join(server.url, schema_digest=digest)[0] for digest in digests] == [200] * len(digests)
    assert len(set(digests)) == 2


@pytest.mark.covers("X2")
def test_refuses_a_token_file_that_others_can_access(tmp_path: Path) -> None:
    """The server refuses a token file that other users than its owner may read, write or execute."""
    file = tmp_path / "token"
    file.write_text("secret\n")
    for mode in (0o640, 0o604, 0o620, 0o602, 0o610, 0o601, 0o644, 0o666):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"{mode:04o}"):
            plain_server(tmp_path, nn.Linear(2, 1), **{"network.token_file": file}).start()
    file.chmod(0o600)
    with plain_server(tmp_path, nn.Linear(2, 1), **{"network.token_file": file}) as server:
        assert [asked(server.port, authorization=sent)[0] for sent in (None, "Bearer secret")] == [401, 200]


@pytest.mark.covers("X2")
def test_server_and_client_accept_only_tls_1_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.covers("X2")
def test_only_the_whole_token_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        wrong = [None, "", "Bearer", "Bearer ", "Bearer secre", "Bearer secret1", "Basic secret"]
        assert [asked(server.port, authorization=sent) for sent in wrong] == [(401, "auth")] * len(wrong)
        with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as raw:
            raw.sendall(b"GET /v1/run HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\r\n\r\n")
            assert raw.recv(100).startswith(b"HTTP/1.1 401 ")
        assert asked(server.port, authorization="Bearer secret")[0] == 200


@pytest.mark.covers("X2")
def test_a_compressed_body_leaves_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request without a token that claims a compressed body gets 401 and causes no traceback at the server."""
    monkeypatch.setenv("ATOLL_TOKEN", "secret")
    with plain_server(tmp_path, nn.Linear(2, 1)) as server:
        body = {"Content_Encoding": "gzip", "Content_Type": "application/json", "Content_Length": 2}
        with begin_request(server.port, "POST /v1/workers", b"{}", **body) as raw, raw.makefile("rb") as reply:
            raw.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert re.findall(rb"HTTP/1\.1 (\d+)", reply.read()) == [b"401", b"200"]
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []


@pytest.mark.covers("X3")
@pytest.mark.parametrize("token", [b"two words", b"two\nlines", "tök".encode(), b"\xff"])
def test_refuses_a_token_that_no_header_can_carry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    """The server refuses a token, from a file or a variable, with a character that an HTTP header cannot carry. Spaces
    around it are removed.
    """
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_bytes(token)

    def server() -> atoll.Server:
        return plain_server(tmp_path, nn.Linear(2, 1), **{"network.token_file": path})

    with pytest.raises(ConfigError, match=r"token file .* contains a space, a line break, or"):
        server().start()
    monkeypatch.setenv("ATOLL_TOKEN", os.fsdecode(token))
    with pytest.raises(ConfigError, match="ATOLL_TOKEN contains a space"):
        server().start()
    monkeypatch.setenv("ATOLL_TOKEN", " secret\n")
    with server() as running:
        assert asked(running.port, authorization="Bearer secret")[0] == 200


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
        ("elsewhere.org", 1, "ostname mismatch.*Use a host name that its certificate contains"),
    ],
)
def test_a_refused_certificate_gives_a_remedy(
    tmp_path: Path, authority: trustme.CA, name: str, days: int, said: str
) -> None:
    """If a site refuses the server's certificate, because it has expired or names another host, the error gives a
    remedy.
    """
    tls = write_certificate(tmp_path, name, authority, not_after=datetime.now(UTC) + timedelta(days=days))
    with plain_server(tmp_path, nn.Linear(2, 1), **tls) as server:
        assert re.search(said, said_to(f"https://localhost:{server.port}", tmp_path, authority))


@pytest.mark.covers("X3", "F38")
def test_a_wrong_authority_or_scheme_gives_a_remedy(tmp_path: Path, authority: trustme.CA) -> None:
    """If the certificate's authority is unknown or the URL has the wrong scheme, the site's error gives a remedy."""
    with plain_server(tmp_path, nn.Linear(2, 1), **write_certificate(tmp_path, authority=authority)) as server:
        assert "Set ATOLL_TLS_CA" in said_to(f"https://localhost:{server.port}", tmp_path, trustme.CA())
        assert "needs https://" in said_to(f"http://localhost:{server.port}", tmp_path, authority)
    with plain_server(tmp_path / "plain", nn.Linear(2, 1)) as server:
        said = said_to(f"https://localhost:{server.port}", tmp_path, authority)
        assert "does not speak TLS. On a trusted network, use http://" in said
        assert "set network.tls_cert and network.tls_key at the server" in said


def test_an_early_end_of_tls_blames_no_certificate() -> None:
    """If a TLS connection breaks off during the handshake, the error says that the server does not answer, and blames
    no certificate.
    """
    # Each worker sees this when its server is killed.
    from atoll.transport.http_client import network_error

    error = ssl.SSLEOFError(8, "EOF occurred in violation of protocol")
    assert "does not answer (eof occurred in violation of protocol)" in str(network_error("https://here", 1.0, error))


LOCAL = [
    *("127.0.0.1", "127.0.0.1:8512", "127.0.0.1:1", "127.8.9.10", "localhost", "LocalHost:9000", "localhost."),
    *("[::1]", "[::1]:8512", "[0:0:0:0:0:0:0:1]:1"),
]
FOREIGN = [
    *("evil.example", "evil.example:8512", "127.0.0.1.evil.example", "localhost.evil.example", "notlocalhost"),
    *("192.168.0.7:8512", "0.0.0.0", "[2001:db8::1]:8512", "[::]:8512", "2130706433", "[::1", "", None),
    *("evil@localhost", "localhost@evil.example", "127.0.0.1:8512:evil", "127.0.0.1/evil.example"),
    "127.0.0.1, evil.example",
]
"""None: the request has no Host."""


@pytest.mark.parametrize("host", LOCAL + FOREIGN)
def test_the_gate_accepts_only_loopback_host_names(host: str | None) -> None:
    """A local server without a token answers only requests for host names of the loopback interface."""
    # The test calls the gate directly, so that it can give headers that no HTTP library sends, such as several hosts.
    from atoll.server.http.gate import Gate

    gate, named = Gate(None, local=True), [] if host is None else [host]
    for hosts in (named, ["localhost", *named]):
        if host in LOCAL:
            gate.require_host(hosts)
        elif hosts != ["localhost"]:
            with pytest.raises(AuthError):
                gate.require_host(hosts)
    Gate(None, local=False).require_host(named)
    Gate("t0ken", local=True).require_host(named)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server on loopback without a token."""
    with plain_server(tmp_path_factory.mktemp("host"), nn.Linear(2, 1)) as server:
        yield server.port
        assert server.status().workers == []


PATHS = ["/v1/status", "/v1/run", "/v1/schema", "/v1/workers", "/metrics", "/openapi.json", "/healthz", "/nothing"]


@pytest.mark.parametrize("path", PATHS)
def test_refuses_a_foreign_host_name_at_every_path(port: int, path: str) -> None:
    for method in ("GET", "POST"):
        assert asked(port, "evil.example", line=f"{method} {path}") == (401, "auth")


def test_refuses_two_host_headers(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as raw:
        raw.sendall(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\nConnection: close\r\n\r\n")
        answer = raw.makefile("rb").readline()
    assert answer.split()[1] in (b"400", b"401")


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


IPV6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")


@pytest.mark.parametrize(
    ("settings", "token", "host", "authorization", "status"),
    [
        ({}, "", "127.0.0.1", None, 200),
        ({}, "", "LocalHost:9000", None, 200),
        # a page of another name does not know the token, and a proxy in front of the server may pass on any name
        ({}, "t0ken", "runs.example", "Bearer t0ken", 200),
        ({}, "t0ken", "evil.example", None, 401),
        # beyond loopback a token and TLS are needed, or `insecure`, which says that the network is trusted
        ({"network.host": "0.0.0.0", "network.insecure": True}, "", "runs.example", None, 200),
        pytest.param({"network.host": "::1"}, "", "[::1]:1", None, 200, marks=IPV6),
        pytest.param({"network.host": "::1"}, "", "evil.example", None, 401, marks=IPV6),
    ],
)
def test_host_names_matter_only_without_a_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    token: str,
    host: str,
    authorization: str | None,
    status: int,
) -> None:
    """Only a server on loopback without a token checks the host name of a request."""
    # With a token, only the token decides. With `network.insecure`, every host name is accepted.
    monkeypatch.setenv("ATOLL_TOKEN", token)
    address = "::1" if settings.get("network.host") == "::1" else "127.0.0.1"
    with plain_server(tmp_path, nn.Linear(2, 1), **settings) as server:
        assert asked(server.port, host, authorization, address=address) == (status, "auth" if status == 401 else "")
