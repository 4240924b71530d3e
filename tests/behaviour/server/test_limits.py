"""What one site, address or stranger may take of a server: one more is refused, and the others are served."""

from __future__ import annotations

import contextlib
import http.client
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from harness.processes import wait_until
from kit.credentials import Trusted, trusted
from kit.local_run import LocalRun
from kit.requests import begin_request, get, joined, post, send
from kit.servers import plain_server
from kit.tls import write_certificate
from kit.wire import WireSite
from kit.world import World
from torch import nn

import atoll
from atoll.protocol import messages, routes
from atoll.transport import listener, request_body

TOKEN, WRONG_TOKEN = "right", messages.WRONG_TOKEN


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals come at once, and requests over a rate do not wait."""
    monkeypatch.setattr("atoll.server.http.caller_limits.REFUSED_S", 0.0)
    monkeypatch.setattr("atoll.server.http.caller_limits.REQUEST_WAIT_S", 0.0)


def asked(url: str, path: str, token: str, method: str = "GET") -> tuple[int, str]:
    """Status of the answer, and its Retry-After."""
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {token}"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, ""
    except urllib.error.HTTPError as refused:
        return refused.code, refused.headers.get("Retry-After", "")


def status_over(connection: http.client.HTTPConnection, path: str, **headers: str) -> int:
    """Status of the answer to a request over this connection."""
    connection.request("GET", path, headers=headers)
    with connection.getresponse() as reply:
        reply.read()
        return reply.status


# -- rounds


@pytest.mark.covers("F34", "F36")
async def test_a_site_that_only_sends_heartbeats_holds_one_round_for_its_limit(tmp_path: Path) -> None:
    """A round waits for a site that never contributes for `limits.first_update_s`, the next ones not at all. The status
    says so until the site contributes.
    """
    zeros, ones = {"w": torch.zeros(3)}, {"w": torch.ones(3)}
    async with LocalRun(tmp_path, zeros, {"rounds.sites": 2, "rounds.total": 9, "limits.first_update_s": 60}) as run:
        a, b, ghost = [await run.join(name) for name in ("a", "b", "ghost")]
        for site in (a, b):
            await run.submit(site, site.open_round().ticket, ones)
        await run.settle()
        held = ghost.open_round()
        for site in (a, b):
            await run.submit(site, site.open_round().ticket, ones)
        for _ in range(3):
            await run.advance(19)
            await run.served.sites.heartbeat(ghost.lease, messages.Heartbeat(step=1))
            assert run.head == 1
        await run.advance(3)
        assert run.head == 2
        told = (
            "ghost has never sent an update, so rounds that can close without it do not wait for it "
            "(limits.first_update_s = 60)."
        )
        assert [text[: len(told)] for text in run.served.warnings.now()] == [told]
        for site in (a, b):
            await run.submit(site, site.open_round().ticket, ones)
        await run.settle()
        assert run.head == 3
        await run.submit(ghost, ghost.open_round().ticket, ones)
        assert held.ticket.round == 2
        assert run.served.warnings.now() == []


# -- credentials


@pytest.mark.covers("F38")
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/run"), ("DELETE", "/v1/nothing"), ("GET", "/v1/status")])
def test_wrong_tokens_of_an_address_are_slowed(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, path: str
) -> None:
    """After `limits.wrong_credentials` in a minute, an address with one more wrong token gets 429 with Retry-After.
    From the same address, a site with the right token is answered.
    """
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.wrong_credentials": 3}) as server:
        url = server.url
        assert [asked(url, path, f"wrong-{n}", method)[0] for n in range(3)] == [401] * 3
        for n in range(5):
            status, retry = asked(url, path, f"wronger-{n}", method)
            assert (status, 1 <= int(retry) <= 20) == (429, True)  # one more each 20 s
            told = get(url, path, Authorization="Bearer wronger")[1] if method == "GET" else {"message": WRONG_TOKEN}
            assert told["message"].startswith(WRONG_TOKEN)  # the site that has it learns why
            assert asked(url, "/v1/run", TOKEN)[0] == 200
            assert asked(url, "/healthz", "")[0] == 200


def test_the_answer_to_many_wrong_tokens_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal of one wrong token too many comes after a pause, and ends the connection."""
    monkeypatch.setattr("atoll.server.http.caller_limits.REFUSED_S", 0.3)
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.wrong_credentials": 1}) as server:
        asked(server.url, "/v1/run", "wrong")
        begun_s = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        connection.request("GET", "/v1/run", headers={"Authorization": "Bearer wrong"})
        reply = connection.getresponse()
        assert (reply.status, reply.headers["Connection"]) == (429, "close")
        assert time.monotonic() - begun_s >= 0.3


def test_wrong_invitations_of_an_address_are_slowed(quick: None, tmp_path: Path) -> None:
    """Wrong invitations count like wrong tokens. A site with a right one enrols all the same."""
    with trusted(tmp_path, **{"limits.wrong_credentials": 2}) as run:
        wrong = {"secret": "s" * 43, "request": ""}
        assert [run.send("POST", "/v1/enrol", wrong)[0] for _ in range(3)] == [401, 401, 429]
        run.enrol("a")
        assert run.join("a")


# -- requests


def test_a_site_over_its_rate_is_refused_and_no_other(quick: None, tmp_path: Path) -> None:
    """A site that sends more than `limits.site_requests_per_s` gets 429, whatever it asks for. Another site at the same
    address does not.
    """
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.site_requests_per_s": 5}) as server:
        a, b = joined(server.url, "a"), joined(server.url, "b")
        found = [post(server.url, "/v1/heartbeat", {}, a) for _ in range(40)]
        assert {status for status, _ in found[:10]} == {200}  # twice the rate at once
        refused = [told for status, told in found if status == 429]
        assert refused
        assert refused[0]["message"] == "site a sends too many requests (limits.site_requests_per_s)."
        assert get(server.url, "/v1/nothing", a)[0] == 429
        assert post(server.url, "/v1/heartbeat", {}, b)[0] == 200


def test_requests_over_the_rate_wait(tmp_path: Path) -> None:
    """A request that is a little over the rate is answered later, not refused."""
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.site_requests_per_s": 5}) as server:
        a, begun_s = joined(server.url, "a"), time.monotonic()
        assert {post(server.url, "/v1/heartbeat", {}, a)[0] for _ in range(12)} == {200}
        assert time.monotonic() - begun_s >= 0.3  # the last two wait for 0.2 s each; the join has used up one


def test_joins_are_limited(quick: None, tmp_path: Path) -> None:
    """An address may send `limits.joins_per_minute` joins where sites need no credentials."""
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.joins_per_minute": 3}) as server:
        found = [post(server.url, "/v1/workers", {"protocol": 1, "site": f"s{n}"}) for n in range(4)]
        assert [status for status, _ in found] == [200, 200, 200, 429]
        assert found[3][1]["retry_after_s"] > 1


def test_a_lease_does_not_allow_more_joins(quick: None, tmp_path: Path) -> None:
    """Without credentials, joins count for their address, also if each shows the lease of the one before."""
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.joins_per_minute": 3}) as server:
        lease = ""
        for n in range(3):
            status, told = post(server.url, "/v1/workers", {"protocol": 1, "site": f"s{n}"}, lease)
            assert status == 200
            lease = told["lease"]
        status, told = post(server.url, "/v1/workers", {"protocol": 1, "site": "s3"}, lease)
        assert (status, told["message"]) == (429, "127.0.0.1 sends too many joins (limits.joins_per_minute).")
        assert told["remedy"] == "Send fewer joins; requests of other callers are answered."


@pytest.mark.parametrize("path", ["/v1/run", "/healthz"])
def test_requests_without_a_token_keep_out_no_right_one(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """An address that floods the server without a token gets 429. A right token, and the secret of an object, of the
    same address are answered.
    """
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.site_requests_per_s": 2}) as server:
        opened = open_object(server.url, Authorization=f"Bearer {TOKEN}")[1]
        stranger = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        wait_until(lambda: status_over(stranger, path) == 429, "a refusal", 20)
        assert asked(server.url, "/v1/run", TOKEN)[0] == 200
        secret = {"secret": opened["secret"]}
        assert send(server.url, "GET", f"/v1/objects/{opened['object']}", **secret)[0] == 409  # still empty
        assert send(server.url, "GET", f"/v1/objects/{'0' * 32}", **secret)[0] == 429


# -- registrations


def test_the_number_of_new_names_is_limited(tmp_path: Path) -> None:
    """A run with `limits.sites` takes no further name, but names in `trust.sites` and those that it knows."""
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.sites": 3, "rounds.sites": 9}) as server:
        leases = {name: joined(server.url, name) for name in "abc"}
        status, told = post(server.url, "/v1/workers", {"protocol": 1, "site": "d"})
        assert (status, told["message"]) == (429, "The run has 3 sites, and takes no new name.")
        joined(server.url, "a")
        assert post(server.url, "/v1/workers/leave", {}, leases["b"])[0] == 204
        joined(server.url, "d")  # b has never contributed
        assert sorted(each.site for each in server.status().workers) == ["a", "c", "d"]


def test_invited_sites_are_not_counted(tmp_path: Path) -> None:
    """A site with a credential of its own joins beyond `limits.sites`: the admin has invited it."""
    with trusted(tmp_path, **{"limits.sites": 1, "rounds.sites": 9}) as run:
        run.enrol("a", "b")
        assert run.join("a")
        assert run.join("b")


def test_labels_are_short(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of labels with more than 2,000 characters in all, the last ones are left out with a warning."""
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        labels = {f"label{n}": "x" * 244 for n in range(8)}  # 6 + 244 each
        joined(server.url, "a", labels=labels)
        assert "characters in all" not in caplog.text
        joined(server.url, "b", labels=labels | {"l": ""})
        assert "the labels of b have 2001 characters in all, more than 2000" in caplog.text
        shown = {each.site: each.labels for each in server.status().workers}
        assert shown == {"a": labels, "b": labels}


def test_the_status_of_many_sites_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many metrics and warnings each site sends, the status shows a bounded number of them."""
    monkeypatch.setattr("atoll.server.coordinator.build_status.MOST_METRICS", 40)
    monkeypatch.setattr("atoll.server.coordinator.run_warnings.MOST_OF_SITES", 10)
    beat = {"metrics": {f"metric-{n}": 1.0 for n in range(256)}, "warnings": [f"warning {n}" for n in range(8)]}
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        for name in "abcd":
            assert post(server.url, "/v1/heartbeat", beat, joined(server.url, name))[0] == 200
        status = server.status()
        assert [len(each.metrics) for each in status.workers] == [10] * 4
        assert sum("warning " in text for text in status.warnings) == 10


def test_new_names_of_metrics_are_limited(tmp_path: Path) -> None:
    """A site may use 256 names of metrics in a run. Further names are left out, with a warning; known ones count on."""
    with World(tmp_path, {"w": nn.Linear(1, 1).weight.detach()}, "a", rounds=0) as world:
        for number, name in ((1, "x"), (2, "y")):
            world.pull(number=number)
            world.submit("a", 0.0, metrics={f"{name}{n}": 1.0 for n in range(255)} | {"loss": 0.5})
            world.wait(number)
        assert len(world.status.history[-2].metrics) == 256
        assert world.status.history[-1].metrics == {"loss": 0.5}
        told = [text for text in world.status.warnings if text.startswith("a reports more than 256 different metrics")]
        assert len(told) == 1
        roster = world.server._require_served().run.roster
        forgotten = roster.pop("a")
        assert not [text for text in world.status.warnings if "different metrics" in text]
        roster["a"] = forgotten  # the site still has to leave


# -- connections


def ended(raw: socket.socket, within_s: float = 20.0) -> bool:
    """Whether the server ends a connection, with or without an answer."""
    raw.settimeout(within_s)
    with contextlib.suppress(ConnectionError):
        try:
            while raw.recv(1 << 16):
                pass
        except TimeoutError:
            return False
    return True


def healthy(connection: http.client.HTTPConnection, **headers: str) -> bool:
    connection.request("GET", "/v1/run" if headers else "/healthz", headers=headers)
    reply = connection.getresponse()
    reply.read()
    return reply.status == 200


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[atoll.Server]:
    """A server with a token; an address may have 3 connections without one."""
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.address_connections": 3}) as server:
        yield server


def test_a_new_connection_replaces_the_oldest_without_a_credential(
    guarded: atoll.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address with its most connections without a credential gets a further one: the oldest of them is closed, but
    none that has shown a credential.
    """
    monkeypatch.setattr(listener, "TIME_TO_SHOW_S", 0.0)
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    with contextlib.ExitStack() as stack:
        site = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
        stack.callback(site.close)
        assert healthy(site, **bearer)
        scanner = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
        stack.callback(scanner.close)
        assert healthy(scanner)  # the health of the server is no secret, so this proves nothing
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", guarded.port))) for _ in range(3)]
        assert ended(scanner.sock)
        silent.append(stack.enter_context(socket.create_connection(("127.0.0.1", guarded.port))))
        assert ended(silent[0])
        late = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
        stack.callback(late.close)
        assert healthy(late, **bearer)
        assert healthy(site, **bearer)


def test_a_connection_has_time_to_show_a_credential(guarded: atoll.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of new connections does not close one that is younger than a second: the newest is refused."""
    monkeypatch.setattr(listener, "TIME_TO_SHOW_S", 3600.0)
    with contextlib.ExitStack() as stack:
        first = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
        first.connect()
        stack.callback(first.close)
        flood = [stack.enter_context(socket.create_connection(("127.0.0.1", guarded.port))) for _ in range(9)]
        assert all(map(ended, flood[2:]))
        assert healthy(first, Authorization=f"Bearer {TOKEN}")


@pytest.mark.covers("F24")
def test_silent_connections_keep_no_site_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a server has `limits.connections`, a new one replaces the oldest that has shown no credential."""
    monkeypatch.setattr(listener, "TIME_TO_SHOW_S", 0.0)
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with (
        plain_server(tmp_path, nn.Linear(2, 2), **{"limits.connections": 10}) as server,
        contextlib.ExitStack() as stack,
    ):
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(10)]
        assert asked(server.url, "/v1/run", TOKEN)[0] == 200
        assert ended(silent[0])


def test_the_connections_of_a_site_are_limited(tmp_path: Path) -> None:
    """A site with `limits.site_connections` gets 429 over a further one. Another site is answered."""
    with trusted(tmp_path, **{"limits.site_connections": 2}) as run, contextlib.ExitStack() as stack:
        run.enrol("a", "b")
        connections = [run.connect("a") for _ in range(3)]
        for each in connections:
            stack.callback(each.close)
        assert [run.send("GET", "/v1/run", site="a", over=each)[0] for each in connections] == [200, 200, 429]
        assert connections[2].sock is None  # `Connection: close`
        assert run.send("GET", "/v1/run", site="b")[0] == 200
        connections[0].close()
        wait_until(lambda: run.send("GET", "/v1/run", site="a", over=connections[2])[0] == 200, "a free place", 20)


def test_connections_with_a_lease_count_until_they_end(tmp_path: Path) -> None:
    """Where sites need no credential, a connection counts for the site of its last lease, also between requests."""
    with (
        plain_server(tmp_path, nn.Linear(2, 2), **{"limits.site_connections": 2}) as server,
        contextlib.ExitStack() as s,
    ):
        a, b = joined(server.url, "a"), joined(server.url, "b")
        connections = [http.client.HTTPConnection("127.0.0.1", server.port, timeout=30) for _ in range(3)]
        for each in connections:
            s.callback(each.close)
        shown = {routes.LEASE_HEADER: a}
        assert [healthy(each, **shown) for each in connections] == [True, True, False]
        assert connections[2].sock is None  # `Connection: close`
        assert healthy(connections[0])  # a request of no site frees no place
        assert not healthy(connections[2], **shown)
        assert healthy(connections[0], **{routes.LEASE_HEADER: b})  # such as behind a proxy
        assert healthy(connections[2], **shown)


def patch_starts(monkeypatch: pytest.MonkeyPatch, **values: float) -> None:
    """Set how a listener begins connections of one address."""
    for name, value in values.items():
        monkeypatch.setattr(listener, name, value)


def test_a_connection_that_waits_for_its_turn_keeps_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second in which a connection can show a credential begins when the rate of its address lets it begin."""
    patch_starts(monkeypatch, TIME_TO_SHOW_S=0.0, STARTS_PER_S=1e-3, STARTS_AT_ONCE=1.0, START_WAIT_S=1e9)
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with (
        plain_server(tmp_path, nn.Linear(2, 2), **{"limits.address_connections": 2}) as server,
        contextlib.ExitStack() as stack,
    ):
        begun, *waiting = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(4)]
        assert ended(begun)
        assert ended(waiting[2])  # and not waiting[0], which waits for 1,000 s
        assert not ended(waiting[0], 0.1)


def test_refused_connections_use_up_no_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is refused because its address has too many is not counted among those that have begun."""
    patch_starts(monkeypatch, TIME_TO_SHOW_S=3600.0, STARTS_PER_S=1e-3, STARTS_AT_ONCE=2.0, START_WAIT_S=0)
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    with plain_server(tmp_path, nn.Linear(2, 2), **{"limits.address_connections": 1}) as server:
        with socket.create_connection(("127.0.0.1", server.port)):
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", server.port)) as refused:
                    assert ended(refused)

        def answered() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                return asked(server.url, "/healthz", "")[0] == 200
            return False

        wait_until(answered, "a connection", 20)


HEADS = {
    "unusual method": b"PROPFINDPROPFINDPROPFIND / HTTP/1.1\r\nHost: ",
    "lower case": b"get / HTTP/1.1\r\nHost: ",
    "version": b"GET / HTTP/9.9\r\n",
    "only a line feed": b"GET / HTTP/1.1\nHost: x\n",
    "after a POST": b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\r\nHo",
    "after a GET": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\nHo",
    "after a chunked body": b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET",
    "within a chunked body": b"POST /v1/workers HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    "nothing": b"",
}


@pytest.mark.covers("F24", "F38")
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("secure", [False, True], ids=["http", "tls"])
def test_an_incomplete_request_ends_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, secure: bool
) -> None:
    """A connection is closed if a request on it is not complete in time, even if its bytes keep coming slowly."""
    import ssl

    monkeypatch.setattr(request_body, "HEAD_S", 0.3)
    monkeypatch.setattr("atoll.server.http.app.BODY_S", 0.3)
    monkeypatch.setenv("ATOLL_TOKEN", TOKEN)
    context = ssl._create_unverified_context()
    with plain_server(tmp_path, nn.Linear(2, 2), **(write_certificate(tmp_path) if secure else {})) as server:
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        raw = context.wrap_socket(raw) if secure else raw
        with raw:
            raw.sendall(HEADS[kind])
            if kind in ("unusual method", "lower case"):
                with contextlib.suppress(OSError):
                    begun_s = time.monotonic()
                    trickle(raw, lambda: time.monotonic() - begun_s > 20)
            assert ended(raw)


def test_an_idle_connection_stays_open_after_requests_of_every_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit for heads does not close a connection between two requests."""
    monkeypatch.setattr(request_body, "HEAD_S", 0.1)
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        for _ in range(3):
            for method, path, body in (
                ("GET", "/healthz", None),
                ("POST", "/v1/workers", b"{}"),
                ("PUT", "/", b"x" * 9),
            ):
                connection.request(method, path, body, {"Content-Type": "application/json"})
                connection.getresponse().read()
                local = connection.sock.getsockname()
                with socket.create_connection(("127.0.0.1", server.port), timeout=30) as later:
                    later.sendall(b"GET /healthz HTTP/1.1\r\n")
                    assert ended(later)  # so the limit has passed for all that came before, too
                connection.request("GET", "/healthz")
                assert connection.getresponse().read() == b"ok\n"
                assert connection.sock.getsockname() == local


def test_a_head_has_at_most_64_kib(tmp_path: Path) -> None:
    """A head that grows beyond its limit ends the connection, in whatever lines it comes."""
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as raw, contextlib.suppress(OSError):
            raw.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\n")
            for number in range(9000):
                raw.sendall(b"h%d: 123456789\r\n" % number)
            assert ended(raw)
        assert get(server.url, "/v1/run")[0] == 200


def trickle(raw: socket.socket, until: Callable[[], bool]) -> None:
    """Send a byte every now and then."""
    raw.settimeout(0.02)
    while not until():
        with contextlib.suppress(TimeoutError):
            if raw.recv(1) == b"":
                return
        try:
            raw.sendall(b"x")
        except ConnectionError:
            return


@pytest.mark.covers("F24")
@pytest.mark.parametrize("way", ["past the parser", "through aiohttp"])
def test_a_trickling_part_is_broken_off(tmp_path: Path, way: str) -> None:
    """An upload of a byte now and then ends after the idle timeout, though it is never silent."""
    settings = {"network.idle_timeout_s": 0.5, "network.part_bytes": 2**16}
    with plain_server(tmp_path, nn.Linear(300, 300), **settings) as server:
        update = WireSite(server.url).train()
        headers = {} if way == "past the parser" else {"Connection": "keep-alive"}
        with update.begin(0, b"x", **headers) as raw:
            begun_s = time.monotonic()
            trickle(raw, lambda: time.monotonic() - begun_s > 30)
            assert time.monotonic() - begun_s < 20
        update.submit()


# -- objects


def open_object(url: str, nbytes: int = 128, key: str | None = None, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"head_bytes": 64, "nbytes": nbytes, "part_bytes": 65536, "expires_s": 3600.0, "key": key}
    return post(url, "/v1/objects", body, **more)


def open_of(run: Trusted, site: str, nbytes: int = 128) -> tuple[int, Any]:
    body = {"head_bytes": 64, "nbytes": nbytes, "part_bytes": 65536, "expires_s": 3600.0}
    return run.send("POST", "/v1/objects", body, site=site)


def test_one_site_with_unfilled_objects_stops_no_other(tmp_path: Path) -> None:
    """A site may have 16 objects that are still arriving; another site publishes meanwhile."""
    with trusted(tmp_path) as run:
        run.enrol("a", "b")
        found = [open_of(run, "a") for _ in range(17)]
        assert [status for status, _ in found] == [200] * 16 + [429]
        assert found[-1][1]["message"].startswith("The server keeps 16 objects of site a with 131072 bytes on disk (16")
        assert open_of(run, "b")[0] == 200


def test_one_site_does_not_take_the_room_of_all(tmp_path: Path) -> None:
    """An object above `limits.site_object_bytes` is refused, and several that are above it together."""
    # on disk, 128 bytes take a block of 4096 bytes, and a second one for the note
    with trusted(tmp_path, **{"limits.site_object_bytes": 20_000}) as run:
        run.enrol("a", "b")
        status, told = open_of(run, "a", 20_000)
        assert (status, "keeps at most 20000 bytes of one site" in told["message"]) == (400, True)
        assert [open_of(run, "a")[0] for _ in range(3)] == [200, 200, 429]
        assert open_of(run, "b")[0] == 200


def test_small_objects_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A site has at most `MOST_OBJECTS_OF_ONE` objects, however small. When it withdraws one, it can publish again."""
    monkeypatch.setattr("atoll.store.kept_objects.MOST_OBJECTS_OF_ONE", 2)
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        opened = [open_object(server.url) for _ in range(3)]
        assert [status for status, _ in opened] == [200, 200, 429]
        first = opened[0][1]
        assert send(server.url, "DELETE", f"/v1/objects/{first['object']}", None, "", first["secret"])[0] == 204
        assert open_object(server.url)[0] == 200


def test_attempts_to_open_one_object_take_one_place(tmp_path: Path) -> None:
    """If the answers that an object is open are lost, the publisher's attempts leave one object, not one each."""
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        assert open_object(server.url, key="b" * 32)[0] == 200
        first, *others = [open_object(server.url, key="a" * 32) for _ in range(20)]
        assert {status for status, _ in (first, *others)} == {200}
        gone = f"/v1/objects/{first[1]['object']}"
        assert send(server.url, "DELETE", gone, None, "", first[1]["secret"])[0] == 410
        names = {path.stem for path in (tmp_path / "state" / "objects").iterdir()}
        assert len(names) == 2
        assert others[-1][1]["object"] in names


def test_a_lease_makes_no_room_for_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials, objects count for their address: leases of other names bring no further ones."""
    monkeypatch.setattr("atoll.store.kept_objects.MOST_OBJECTS_OF_ONE", 2)
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        leases = [joined(server.url, name) for name in "abc"]
        assert [open_object(server.url, lease=lease)[0] for lease in leases] == [200, 200, 429]


def test_a_trickling_object_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object of which hardly a byte arrives is removed, also if each of many requests brings a little."""
    monkeypatch.setattr(routes, "LEAST_BYTES_PER_S", 10**7)  # requests of 64 bytes do not reach it
    with plain_server(tmp_path, nn.Linear(2, 2), **{"network.idle_timeout_s": 0.5}) as server:
        opened = open_object(server.url)[1]
        path, part = f"/v1/objects/{opened['object']}/parts/0", bytes(64)
        body = part + blake3(part).digest()

        def is_gone() -> bool:
            return send(server.url, "PUT", path, body, "", opened["secret"])[0] == 410

        wait_until(is_gone, "its end", 20)


# -- followers


def test_one_caller_gets_a_quarter_of_the_streams(tmp_path: Path) -> None:
    """A site that follows the events with a quarter of `limits.event_streams` gets 429 for one more; others follow."""
    with trusted(tmp_path, **{"limits.event_streams": 8}) as run, contextlib.ExitStack() as stack:
        run.enrol("a", "b")

        def follow(site: str) -> int:
            connection = run.connect(site)
            stack.callback(connection.close)
            connection.request("GET", "/v1/events", headers={"Accept": "text/event-stream"})
            return connection.getresponse().status

        assert [follow("a") for _ in range(3)] == [200, 200, 429]
        assert follow("b") == 200


def test_a_lease_does_not_allow_more_streams(tmp_path: Path) -> None:
    """Without credentials, streams count for their address: leases, old and new ones, bring no further ones."""
    limit = {"limits.event_streams": 8}
    with plain_server(tmp_path, nn.Linear(2, 2), **limit) as server, contextlib.ExitStack() as stack:

        def follow(site: str) -> int:
            headers = {"Accept": "text/event-stream", "Atoll-Lease": joined(server.url, site)}
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
            stack.callback(connection.close)
            connection.request("GET", "/v1/events", headers=headers)
            return connection.getresponse().status

        assert [follow(site) for site in "abca"] == [200, 200, 429, 429]


# -- messages


@pytest.mark.covers("F38")
def test_deep_and_large_json_is_refused(tmp_path: Path) -> None:
    """A message that is nested deeply gets 400, one above 64 KiB 413, and the server answers the next request."""
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        url = server.url
        for deep in (b"[" * 30_000, b'{"site":' * 5_000, b'{"labels":' + b"[" * 30_000 + b"]" * 30_000 + b"}"):
            assert send(url, "POST", "/v1/workers", deep)[0] == 400
        assert send(url, "POST", "/v1/workers", b'{"site":"' + b"x" * 2**16 + b'"}')[0] == 413
        raw = begin_request(
            server.port, "POST /v1/workers", Transfer_Encoding="chunked", Content_Type="application/json"
        )
        with raw, contextlib.suppress(OSError):
            for _ in range(40):
                raw.sendall(b"1000\r\n" + b"[" * 4096 + b"\r\n")
            assert b" 413 " in raw.recv(4096)
        assert get(url, "/v1/run")[0] == 200
