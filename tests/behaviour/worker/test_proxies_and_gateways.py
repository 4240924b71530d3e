"""Sites and commands that reach the server through an HTTP proxy of the environment, or under a path."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, free_port
from kit import FederatedSites, atoll_worker, run_to_end, serve
from kit.http_proxy import HttpProxy
from kit.models import wide_model
from kit.peers import Peer
from kit.processes import command
from kit.tls import write_certificate

import atoll
from atoll.errors import AtollError, ConfigError, ServerLost, ServerUnreachable, UsageError
from atoll.testing.run import status
from atoll.transport.http_client import Http

TOKEN = "a-token-of-the-tests"
PREFIX = "/fl/run1"
SCRIPT = """
import atoll
from kit.models import wide_model, train_
model = wide_model()
with atoll.join(site="a") as worker:
    for fl_round in worker:
        train_(fl_round.load_into(model), "a", fl_round.number)
        fl_round.submit(model)
print("trained")
"""
VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")

pytestmark = pytest.mark.covers("X12")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No proxy of the machine that runs the tests; a token, which a server needs to admit other names than its own."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "30")
    return monkeypatch


@contextmanager
def one_round(folder: Path, **settings: Any) -> Iterator[atoll.Server]:
    """A run of one site and one round, with updates of six parts."""
    with serve(folder, wide_model(), sites=1, rounds=1, codec="none", **settings) as server:
        yield server


def train_to_the_end(server: atoll.Server, url: str, folder: Path) -> None:
    """A site takes part at this address until the run is over, and has the bits that the run has exported."""
    sites = FederatedSites(url, folder, "a", build=wide_model)
    run_to_end(server, sites)
    assert server.status().version == 1


def parts_in(lines: list[str]) -> set[str]:
    return {line.split(" ")[1].rpartition("/")[2] for line in lines if line.startswith("PUT ")}


def test_a_proxy_gets_its_password(
    tmp_path: Path, environment: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages and parts go through the proxy, with its password."""
    # The log shows the proxy's address once. The password is neither in the log nor sent to the server.
    caplog.set_level(logging.INFO, "atoll")
    with one_round(tmp_path) as server, HttpProxy(server.port, login="me@here:p/ss") as proxy:
        environment.setenv("http_proxy", f"http://me%40here:p%2Fss@127.0.0.1:{proxy.port}")
        train_to_the_end(server, "http://fl.example:8512", tmp_path)
    assert all(line.split(" ")[1].startswith("http://fl.example:8512/") for line in proxy.lines)
    assert parts_in(proxy.lines) == {"0", "1", "2", "3", "4", "5"}
    said = [each for each in caplog.messages if f"through the proxy {proxy.url} of HTTP_PROXY" in each]
    assert said == [f"a: reaches http://fl.example:8512 (through the proxy {proxy.url} of HTTP_PROXY)"]
    assert not any("p%2Fss" in each or "p/ss" in each for each in caplog.messages)


def test_a_tls_server_is_reached_through_tunnels(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    """A server with TLS is reached through tunnels of the proxy, which see no token."""
    tls = write_certificate(tmp_path, "fl.example")
    environment.setenv("ATOLL_TLS_CA", str(tmp_path / "ca.pem"))
    with one_round(tmp_path, **tls) as server, HttpProxy(server.port, login="me:secret") as proxy:
        environment.setenv("HTTPS_PROXY", f"me:secret@127.0.0.1:{proxy.port}")
        train_to_the_end(server, "https://fl.example", tmp_path)
    assert set(proxy.lines) == {"CONNECT fl.example:443 HTTP/1.1"}
    assert len(proxy.lines) >= 2  # messages, and parts
    assert not any("authorization" in headers for headers in proxy.seen)


def test_objects_travel_through_the_proxy(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    """Publishing, fetching and withdrawing an object goes through the proxy."""
    with one_round(tmp_path) as server, HttpProxy(server.port) as proxy:
        environment.setenv("ALL_PROXY", proxy.url)
        ref = atoll.objects.publish({"w": torch.arange(50_000.0)}, server="http://fl.example", chunk_bytes=2**16)
        assert ref.server == "http://fl.example:80"
        assert torch.equal(atoll.objects.fetch(str(ref))["w"], torch.arange(50_000.0))
        assert atoll.objects.withdraw(ref)
    assert parts_in(proxy.lines) >= {"0", "1", "2", "3"}


EXEMPT = [
    *("*", "fl.example", "FL.Example", ".example", "example", "*.example", "other, fl.example", "fl.example:{port}"),
    *("[::1]:{port},fl.example:{port}", "other fl.example."),
]
NOT_EXEMPT = ["", "xample", "l.example", "fl.example:1", "fl.example.org", "10.0.0.0/8", "*:1", ",", "::1"]


@pytest.mark.parametrize(
    ("no_proxy", "exempt"), [*((each, True) for each in EXEMPT), *((each, False) for each in NOT_EXEMPT)]
)
def test_no_proxy_exempts_names_domains_and_ports(
    environment: pytest.MonkeyPatch, no_proxy: str, *, exempt: bool
) -> None:
    """If `NO_PROXY` has a name, a domain or a port that fits the server, requests do not go through the proxy."""
    # The proxy refuses with 403. Without the proxy, the name of the server is unknown.
    port = free_port()
    with HttpProxy(port, refuses=403) as proxy:
        environment.setenv("HTTP_PROXY", proxy.url)
        environment.setenv("NO_PROXY", no_proxy.format(port=port))
        with pytest.raises(ServerUnreachable) as refused:
            status(f"http://fl.example:{port}")
    assert bool(proxy.lines) is not exempt
    assert ("the proxy" in str(refused.value).lower()) is not exempt


@pytest.mark.parametrize(
    ("host", "no_proxy", "exempt"),
    [
        ("192.0.2.7", "192.0.2.0/24", True),
        ("192.0.2.7", "192.0.2.7", True),
        ("192.0.2.7", "192.0.3.0/24, 2.7, 192.0.2", False),
        ("[2001:db8::7]", "2001:db8::/32", True),
        ("[2001:db8::7]", "[2001:DB8:0::7]:8512", True),
        ("[2001:db8::7]", "2001:db9::/32", False),
        ("FL.example.", "fl.example", True),
    ],
)
def test_no_proxy_exempts_addresses_and_networks(
    environment: pytest.MonkeyPatch, host: str, no_proxy: str, *, exempt: bool
) -> None:
    """`no_proxy` exempts IP addresses and networks, IPv6 in any spelling, and a name in any case."""
    environment.setenv("http_proxy", "http://proxy.example:3128")
    environment.setenv("no_proxy", no_proxy)
    assert (Http(f"http://{host}:8512").proxy is None) is exempt


def test_a_proxy_without_a_port_uses_port_80(environment: pytest.MonkeyPatch) -> None:
    """A proxy address without a port means port 80. The proxy's password is sent to it, but not shown."""
    environment.setenv("HTTP_PROXY", "http://me:p%2Fss@proxy.example")
    proxy = Http("http://fl.example:8512").proxy
    assert proxy.headers == {"Proxy-Authorization": "Basic bWU6cC9zcw=="}  # me:p/ss
    assert str(proxy) == "the proxy http://proxy.example:80 of HTTP_PROXY"
    assert "bWU6cC9zcw" not in repr(proxy)


def test_lower_case_proxy_variables_take_precedence(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    """Proxy variables in lower case take precedence over those in upper case."""
    # This machine's own addresses need no proxy. An empty variable takes the proxy of `HTTP_PROXY` away, as with curl.
    away = f"http://127.0.0.1:{free_port()}"
    with one_round(tmp_path) as server, HttpProxy(server.port) as proxy:
        for name in VARIABLES[:3]:
            environment.setenv(name, away)
        assert status(server.url).version == 0
        environment.setenv("http_proxy", proxy.url)
        assert status("http://fl.example").version == 0
        environment.setenv("http_proxy", "")  # as with curl, this takes the proxy of HTTP_PROXY away
        environment.setenv("all_proxy", proxy.url)
        assert status("http://fl.example").version == 0
    assert len(proxy.lines) == 2


REFUSALS = [
    (
        407,
        "",
        r"The proxy {url} of {name} asks for a user name and a password \(HTTP status 407\)",
        "Set {name}=http://",
    ),
    (407, "me:wrong@", r"The proxy {url} of {name} refuses the user name and password", "Correct them in {name}."),
    (
        403,
        "",
        r"The proxy {url} of {name} refuses to lead to fl.example:\d+ \(HTTP status 403\)",
        "Let the proxy allow",
    ),
    (502, "", r"The proxy {url} of {name} does not reach fl.example:\d+ \(HTTP status 502\)", "NO_PROXY=fl.example"),
    (500, "", r"The proxy {url} of {name} does not reach fl.example:\d+ \(HTTP status 500\)", "that the server runs"),
    (504, "", r"The proxy {url} of {name} does not reach fl.example:\d+ \(HTTP status 504\)", "that the server runs"),
]


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(("refuses", "login", "said", "remedy"), REFUSALS)
def test_a_proxy_that_refuses_is_reported(
    environment: pytest.MonkeyPatch, scheme: str, refuses: int, login: str, said: str, remedy: str
) -> None:
    """If a proxy refuses a request, the error names the proxy and its variable and says what to do, without the
    password.
    """
    name = f"{scheme.upper()}_PROXY"
    with HttpProxy(free_port(), refuses=refuses) as proxy:
        environment.setenv(name, f"http://{login}127.0.0.1:{proxy.port}")
        with pytest.raises(ServerUnreachable, match=said.format(url=proxy.url, name=name)) as refused:
            status(f"{scheme}://fl.example")
        assert remedy.format(name=name) in refused.value.remedy
        assert "wrong" not in str(refused.value)
        assert refused.value.is_other == (refuses < 500)  # waiting does not help


@pytest.mark.parametrize("refuses", [403, 407, 502])
def test_a_site_reports_its_proxy_in_one_line(tmp_path: Path, environment: pytest.MonkeyPatch, refuses: int) -> None:
    """If a proxy refuses a site's requests, the site ends with one line that names the proxy, at once or after it has
    tried for a while.
    """
    environment.setenv("ATOLL_GIVE_UP_S", "0.5")
    with HttpProxy(free_port(), refuses=refuses) as proxy:
        environment.setenv("HTTP_PROXY", proxy.url)
        with pytest.raises(ServerUnreachable if refuses < 500 else ServerLost) as refused:
            atoll.join("http://fl.example", site="a", folder=tmp_path)
    assert f"he proxy {proxy.url} of HTTP_PROXY" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_site_that_gives_up_reports_the_cause(tmp_path: Path, environment: pytest.MonkeyPatch) -> None:
    """If a site gives up, its error repeats the last cause and its remedy.

    With a proxy that is away, it does not say to start the server, as that would not help.
    """
    environment.setenv("ATOLL_GIVE_UP_S", "0.2")
    proxy = f"http://127.0.0.1:{free_port()}"
    environment.setenv("HTTP_PROXY", proxy)
    with pytest.raises(ServerLost, match="The last attempt failed: ") as lost:
        atoll.join("http://fl.example", site="a", folder=tmp_path)
    with pytest.raises(ServerUnreachable) as refused:
        status("http://fl.example")
    assert refused.value.message in lost.value.message
    assert lost.value.remedy.startswith(refused.value.remedy)
    assert "Start the server" not in str(lost.value)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_broken_proxy_is_reported(environment: pytest.MonkeyPatch, scheme: str) -> None:
    """If a proxy is away, cuts the connection, speaks no HTTP or redirects, the error names the proxy and its
    variable.
    """
    name = f"{scheme.upper()}_PROXY"

    def said(port: int) -> str:
        environment.setenv(name, f"http://127.0.0.1:{port}")
        with pytest.raises(AtollError) as refused:
            status(f"{scheme}://fl.example")
        text = str(refused.value)
        assert f"the proxy http://127.0.0.1:{port} of {name}" in text[0].lower() + text[1:]
        return text

    assert "does not answer (connection refused)" in said(free_port())
    for answer, words in ((b"", "closed connection without response"), (b"SSH-2.0-OpenSSH\r\n", "not answer in HTTP")):
        with Peer(lambda connection, answer=answer: _say(connection.sock, answer)) as peer:
            assert words in said(peer.port)
    with HttpProxy(free_port(), redirects="https://login.example/") as proxy:
        assert "redirects to 'https://login.example/'" in said(proxy.port)


def _say(sock: socket.socket, answer: bytes) -> None:
    sock.recv(2**16)
    sock.sendall(answer)
    sock.close()


@pytest.mark.parametrize(
    ("proxy", "said"),
    [
        ("socks5://me:secret@proxy.example:1080", "names a proxy with the scheme socks5://"),
        ("https://me:secret@proxy.example", "names a proxy with the scheme https://"),
        ("http://me:secret@proxy.example:port", "is not the address of a proxy: 'proxy.example:port'"),
        ("http://me:sec/ret@proxy.example:1", "is not the address of a proxy: 'proxy.example:1'"),
        ("http://", "is not the address of a proxy: ''"),
        ("http://proxy.example/path", "is not the address of a proxy: 'proxy.example/path'"),
    ],
)
def test_an_unusable_proxy_is_refused(environment: pytest.MonkeyPatch, proxy: str, said: str) -> None:
    """A proxy address with an unsupported scheme, a wrong port or a path is refused. The error does not show its
    password.
    """
    environment.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(ConfigError, match=f"HTTPS_PROXY {said}") as refused:
        status("https://fl.example")
    assert "http://" in refused.value.remedy
    assert "sec" not in str(refused.value).replace("socks", "")


# -- a server under a path


def test_a_gateway_keeps_the_path(tmp_path: Path) -> None:
    """Behind a gateway, the path of the server's address is kept in all requests: messages, parts, objects and their
    references.
    """
    with one_round(tmp_path) as server, HttpProxy(server.port, prefix=PREFIX) as gateway:
        url = f"{gateway.url}{PREFIX}"
        ref = atoll.objects.publish({"w": torch.arange(50_000.0)}, server=url + "/", chunk_bytes=2**16)
        assert ref.server == url
        assert torch.equal(atoll.objects.fetch(str(ref))["w"], torch.arange(50_000.0))
        assert atoll.objects.withdraw(ref)
        train_to_the_end(server, url, tmp_path)
    assert all(line.split(" ")[1].startswith(f"{PREFIX}/") for line in gateway.lines)
    assert parts_in(gateway.lines) == {"0", "1", "2", "3", "4", "5"}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["proxy", "gateway"])
def test_commands_use_proxies_and_gateways_too(
    tmp_path: Path, environment: pytest.MonkeyPatch, nursery: Nursery, way: str
) -> None:
    """`atoll worker` with its script, `atoll status` and `atoll export` reach the server through a proxy or under a
    gateway's path.
    """
    prefix = PREFIX if way == "gateway" else None
    with one_round(tmp_path) as server, HttpProxy(server.port, prefix=prefix) as proxy:
        url = "http://fl.example" if prefix is None else f"{proxy.url}{prefix}/"
        chosen = {"HTTP_PROXY": proxy.url} if prefix is None else {}
        shown = command(nursery, tmp_path, "status", "--json", "--server", url, ATOLL_TOKEN=TOKEN, **chosen)
        assert json.loads(shown.stdout)["fragments"][0]["version"] == 0, shown.stderr
        out = tmp_path / "out.safetensors"
        made = command(nursery, tmp_path, "export", str(out), "--server", url, ATOLL_TOKEN=TOKEN, **chosen)
        assert made.stdout == f"version 0: {out}\n", made.stderr
        with atoll_worker(tmp_path, url, SCRIPT, env=chosen) as process:
            printed, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
        assert "trained" in printed
        assert server.status().version == 1
    assert any("/v1/status" in line for line in proxy.lines)
    assert parts_in(proxy.lines) == {"0", "1", "2", "3", "4", "5"}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("http://fl.example/run?x=1", r"has a query \(\?…\).*Use http://fl.example/run\."),
        ("http://fl.example:8512/?", r"has a query"),
        ("https://fl.example/run#top", r"has a fragment \(#…\).*Use https://fl.example/run\."),
        ("http://me:secret@fl.example:8512", r"has a user name or password.*Use http://fl.example:8512\. A token"),
        ("http://me@fl.example", "has a user name or password"),
        ("http://me:secret@fl.example:port", "is not a valid server address"),
        ("ftp://me:secret@fl.example", "is not a valid server address"),
        ("http://fl.example/.hidden", "The path of the server address .* is not valid"),
        (
            "http://fl.example/fl//atoll",
            "is not valid: the part between two slashes is empty in '/fl//atoll'.*empty, or",
        ),
        ("http://fl.example/a/../b", r"The path of the server address .*/a/\.\./b' is not valid, because of '\.\.'"),
        ("http://fl.example/a/./b", r"The path of the server address .* is not valid, because of '\.'"),
        ("http://fl.example/a/..", r"The path of the server address .* is not valid, because of '\.\.'"),
        ("http://fl.example/a b", "The path of the server address .* is not valid, because of 'a b'"),
        ("http://fl.example/ü", "The path of the server address .* is not valid, because of 'ü'"),
        ("http://127.0.0.1:0", "is not a valid server address"),
        ("https://fl.example:0/run", "is not a valid server address"),
        ("http://fl.example/a%2e%2e/b%2Fc", "The path of the server address .* is not valid"),
        (f"http://fl.example/{'a' * 128}", "The path of the server address .* is not valid: it has 129 characters"),
    ],
)
def test_refuses_impossible_addresses(tmp_path: Path, address: str, said: str) -> None:
    """A server address with a query, a user name, an invalid path or an invalid port is refused. The error shows no
    password.
    """
    for ask in (status, lambda url: atoll.join(url, site="a", folder=tmp_path)):
        with pytest.raises(UsageError, match=said) as refused:
            ask(address)
        assert "secret" not in str(refused.value)


def test_a_redirecting_gateway_is_reported(tmp_path: Path) -> None:
    """If a gateway redirects a request, a status request and `atoll.join` raise an error with the gateway's address and
    the target of the redirect.
    """
    with HttpProxy(free_port(), prefix=PREFIX, redirects="/fl/run1/login?next=x") as gateway:
        for ask in (status, lambda url: atoll.join(url, site="a", folder=tmp_path)):
            with pytest.raises(AtollError, match=rf"{gateway.url}{PREFIX} redirects to '/fl/run1/login\?next=x'"):
                ask(f"{gateway.url}{PREFIX}")


def test_a_wrong_server_path_is_reported() -> None:
    """If the path of a server's address is wrong, the error shows the whole address and the HTTP status 404."""
    with HttpProxy(free_port(), prefix=PREFIX) as gateway, pytest.raises(AtollError) as refused:
        status(f"{gateway.url}/fl/run2")
    assert f"There is no Atoll server at {gateway.url}/fl/run2: " in str(refused.value)
    assert "HTTP status 404" in str(refused.value)
