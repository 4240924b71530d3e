"""What the server says no to: each refusal has a test that fails without it."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.processes import wait_until
from kit.requests import get, post
from kit.servers import plain_server
from kit.wire import WireSite, WireUpdate
from torch import nn

import atoll

VERSION_0 = "/v1/fragments/0/versions/0"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, nn.Linear(8, 4), **{"rounds.sites": 2}) as server:
        yield server


@pytest.fixture
def a(server: atoll.Server) -> WireSite:
    return WireSite(server.url, "a", process="one")


@pytest.fixture
def b(server: atoll.Server, a: WireSite) -> WireSite:
    """Has joined, too, so that the round begins."""
    return WireSite(server.url, "b")


@pytest.fixture
def pushed(a: WireSite, b: WireSite) -> WireUpdate:
    """An update of a whose parts are all at the server."""
    return a.train(1.0).push()


@pytest.mark.covers("F18")
def test_parts_that_do_not_make_up_the_digest_are_not_accepted(pushed: WireUpdate) -> None:
    """Guards against `complete` that accepts whatever digest it is told."""
    status, told = pushed.complete(digest="0" * 64)
    assert (status, told["code"]) == (409, "conflict")
    assert "does not match its parts" in told["message"]
    assert pushed.state()["outcome"]["state"] == "open"
    assert pushed.complete()[1]["digest"] == pushed.message["digest"]


@pytest.mark.covers("F19")
def test_a_ticket_is_completed_by_its_own_site_only(b: WireSite, pushed: WireUpdate) -> None:
    """Guards against `complete` that does not look whose ticket it is, before and after the acceptance."""
    for _ in range(2):
        _, told = b.post(f"/v1/tickets/{pushed.ticket}/complete", pushed.message)
        assert told["code"] == "ticket_closed"
        assert "not issued to 'b'" in told["message"]
        assert pushed.complete()[0] == 200


@pytest.mark.parametrize(
    ("limit", "most", "weight", "by", "told"),
    [
        ("max_update_norm", 5.9, 1.0, 1.0, "norm is 6, above aggregation.max_update_norm 5.9"),  # √(36 · 1²) = 6
        ("max_update_norm", 6.1, 1.0, 1.0, ""),
        ("max_update_norm", 1e12, 1.0, 1e12, "norm is 6e+12, above aggregation.max_update_norm 1e+12"),
        ("max_update_norm", 0.0, 1.0, 1e12, ""),
        ("max_weight", 10.0, 11.0, 1.0, "weight is 11, above aggregation.max_weight 10"),
        ("max_weight", 10.0, 10.0, 1.0, ""),
    ],
)
@pytest.mark.covers("F31")
def test_an_absurd_norm_or_weight_is_refused(
    tmp_path: Path, limit: str, most: float, weight: float, by: float, told: str
) -> None:
    """Guards against `complete` without `require_plausible`; either comparison turned round."""
    assert atoll.Settings().aggregation.max_update_norm == 1e12
    with plain_server(tmp_path, nn.Linear(8, 4), **{f"aggregation.{limit}": most}) as server:
        status, reply = WireSite(server.url).train(by, weight=weight).push().complete()
        assert status == (422 if told else 200)
        assert told in reply.get("message", "")
        assert server.status().refused == bool(told)


@pytest.mark.covers("P3")
def test_a_version_is_served_under_its_own_digest_only(server: atoll.Server) -> None:
    """Guards against `get_version` without the digest's comparison: after a fall back, other bytes at an old URL."""
    status, told = get(server.url, f"{VERSION_0}/{'0' * 64}")
    assert (status, told["code"]) == (410, "gone")
    assert "no longer has the digest" in told["message"]


@pytest.mark.covers("F19")
def test_a_void_lease_may_not_even_beat(server: atoll.Server, a: WireSite, b: WireSite) -> None:
    """Guards against `require_lease` that only reads the header; a route that forgets `lease=True`."""
    WireSite(server.url, "a", process="two")
    leased = ("/v1/heartbeat", "/v1/workers/leave", "/v1/tickets", "/v1/tickets/1/complete")
    assert [a.post(path, {})[1]["code"] for path in leased[:2]] == ["superseded"] * 2
    b.leave()
    assert [b.post(path, {})[1]["code"] for path in leased[::2]] == ["lease_lost"] * 2
    assert all("Atoll-Lease header" in post(server.url, path, {})[1]["message"] for path in leased)


@pytest.mark.covers("L9")
def test_a_heartbeat_is_a_sign_of_life(tmp_path: Path) -> None:
    """Guards against a heartbeat that does not reach the round machine."""
    settings = {"network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 1.0}
    with (
        plain_server(tmp_path, nn.Linear(8, 4), **settings) as server,
        atoll.join(server.url, site="a", folder=tmp_path / "w"),
    ):
        begin_s = server.status().uptime_s
        wait_until(lambda: server.status().uptime_s > begin_s + 2.5, "twice the timeout to pass")
        assert server.status().deaths == 0


@pytest.mark.covers("P3")
def test_ranges_are_of_the_version_that_was_asked_for(server: atoll.Server) -> None:
    """Guards against an ETag that is not the digest; If-Range ignored."""
    digest = get(server.url, VERSION_0)[1]["digest"]
    etag = f'"{digest}"'
    for known, status in ((etag, 206), ('"other"', 200)):
        request = urllib.request.Request(f"{server.url}{VERSION_0}/{digest}")
        request.headers = {"Range": "bytes=0-9", "If-Range": known}
        with urllib.request.urlopen(request) as reply:
            assert (reply.status, reply.headers["ETag"]) == (status, etag)


@pytest.mark.covers("X3", "F31")
def test_whatever_of_a_refused_update_comes_later_is_told_that_it_is_refused(tmp_path: Path) -> None:
    """Several parts are on their way at once, and from several ranks: which answer comes first must not decide whether
    the worker goes back to the global model, or trains on from what was refused.
    """
    with plain_server(tmp_path, nn.Linear(2000, 20), **{"network.part_bytes": 2**16}) as server:
        site = WireSite(server.url)
        update = site.train(lambda tensors: tensors["weight"].fill_(float("nan")))
        assert len(update.parts) == 3
        replies = [update.put(part) for part in (0, 2, 1, 0)] + [update.complete()]
        assert {told["code"] for _, told in replies} == {"update_refused"}
        (message,) = {told["message"] for _, told in replies}
        assert "of a was refused: weight contains NaN or Inf" in message
        assert server.status().refused == 1
