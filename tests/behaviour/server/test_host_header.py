"""A server on loopback without a token answers only requests for this machine: a web page whose name was rebound to
127.0.0.1 reads nothing."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import FederatedSites, serve

from atoll.errors import AuthError

LOCAL = [
    "127.0.0.1",
    "127.0.0.1:8512",
    "127.0.0.1:1",
    "127.8.9.10",
    "localhost",
    "LocalHost:9000",
    "localhost.",
    "[::1]",
    "[::1]:8512",
    "[0:0:0:0:0:0:0:1]:1",
]

FOREIGN = [
    "evil.example",
    "evil.example:8512",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "notlocalhost",
    "192.168.0.7:8512",
    "0.0.0.0",
    "[2001:db8::1]:8512",
    "[::]:8512",
    "evil@localhost",
    "localhost@evil.example",
    "127.0.0.1:8512:evil",
    "127.0.0.1/evil.example",
    "127.0.0.1, evil.example",
    "2130706433",
    "[::1",
    "",
    None,
]
"""None: the request has no Host."""


def asked(
    port: int, host: str | None, path: str = "/v1/status", method: str = "GET", address: str = "127.0.0.1", **more: str
) -> tuple[int, str]:
    """Status and code of a request with exactly this Host."""
    connection = http.client.HTTPConnection(address, port, timeout=30)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    for name, value in ({"Host": host} if host is not None else {}).items() | more.items():
        connection.putheader(name, value)
    connection.endheaders()
    reply = connection.getresponse()
    body = reply.read()
    connection.close()
    is_problem = reply.status != 200 and reply.headers.get_content_type() == "application/json"
    return reply.status, json.loads(body)["code"] if is_problem else ""


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server on loopback without a token, in which no site takes part."""
    with serve(tmp_path_factory.mktemp("host")) as server:
        yield server.port


@pytest.mark.parametrize("host", LOCAL + FOREIGN)
def test_the_gate_itself_tells_loopback_names_from_others(host: str | None) -> None:
    """Also what no HTTP library passes on, such as several hosts."""
    from atoll.server.http.auth import Gate

    gate, named = Gate(None, local=True), [] if host is None else [host]
    for hosts in (named, ["localhost", *named]):
        if host in LOCAL:
            gate.require_host(hosts)
        elif hosts != ["localhost"]:
            with pytest.raises(AuthError):
                gate.require_host(hosts)
    Gate(None, local=False).require_host(named)
    Gate("t0ken", local=True).require_host(named)


def test_answers_requests_for_a_loopback_name_and_refuses_all_others(port: int) -> None:
    for host in LOCAL:
        assert asked(port, host)[0] == 200, host
    for host in FOREIGN:
        assert asked(port, host) in ((401, "auth"), (400, "")), host  # 400: HTTP knows no such host
    assert asked(port, "evil.example") == (401, "auth")


@pytest.mark.parametrize("path", ["/v1/run", "/v1/schema", "/metrics", "/openapi.json", "/healthz", "/nothing"])
def test_refuses_a_foreign_name_at_every_path(port: int, path: str) -> None:
    assert asked(port, "evil.example", path) == (401, "auth")
    assert asked(port, "evil.example", path, "POST") == (401, "auth")


def test_a_foreign_name_cannot_join_and_sites_still_do(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        assert asked(server.port, "evil.example", "/v1/workers", "POST") == (401, "auth")
        assert server.status().workers == []
        FederatedSites(server.url, tmp_path).join()
        assert server.status().finished


def test_with_a_token_the_token_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of another name does not know it, and a proxy in front of the server may pass on any name."""
    monkeypatch.setenv("ATOLL_TOKEN", "t0ken")
    with serve(tmp_path) as server:
        assert asked(server.port, "runs.example", Authorization="Bearer t0ken")[0] == 200
        assert asked(server.port, "evil.example") == (401, "auth")
        assert asked(server.port, "localhost") == (401, "auth")


def test_two_host_headers_are_not_taken_for_a_local_one(port: int) -> None:
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


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_a_server_on_ipv6_loopback_takes_its_own_address(tmp_path: Path) -> None:
    with serve(tmp_path, **{"network.host": "::1"}) as server:
        assert asked(server.port, f"[::1]:{server.port}", address="::1")[0] == 200
        assert asked(server.port, "evil.example", address="::1") == (401, "auth")


def test_beyond_loopback_any_name_is_taken(tmp_path: Path) -> None:
    """There a token and TLS are needed, or `insecure`, which says that the network is trusted."""
    with serve(tmp_path, **{"network.host": "0.0.0.0", "network.insecure": True}) as server:
        assert asked(server.port, "runs.example")[0] == 200
