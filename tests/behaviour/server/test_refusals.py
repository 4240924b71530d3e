"""What the server says no to: each refusal has a test that fails without it."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from harness.processes import wait_until
from kit.by_hand import formed, note_of, push
from kit.requests import post
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import Conflict, Gone, TicketClosed, UpdateRefused
from atoll.protocol import messages, routes
from atoll.protocol.values import Accepted, Refused
from atoll.transport.part_transfer import HttpTransfer
from atoll.worker.exchange.participation import Participation, take_part


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, nn.Linear(8, 4), **{"rounds.sites": 2}) as server:
        yield server


@pytest.fixture
def pair(server: atoll.Server, tmp_path: Path) -> Iterator[tuple[Participation, Participation]]:
    a, b = (take_part(server.url, site, folder=tmp_path / "w") for site in "ab")
    formed(a, moved(1.0))
    yield a, b
    a.leave()
    b.leave()


def moved(by: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Training after which each of the 36 elements of the update is −`by`."""

    def train_(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor += by

    return train_


def complete(place: Participation, ticket: int, message: messages.Complete) -> messages.Receipt:
    return place.session.http.post(routes.COMPLETE.format(ticket=ticket), message, messages.Receipt)


@pytest.mark.covers("F18")
def test_parts_that_do_not_make_up_the_digest_are_not_accepted(pair: tuple[Participation, Participation]) -> None:
    """Guards against `complete` that accepts whatever digest it is told."""
    a, _ = pair
    message, ticket = push(a), note_of(a).ticket
    with pytest.raises(Conflict, match="do not make up the digest"):
        complete(a, ticket, message.model_copy(update={"digest": "0" * 64}))
    assert a.session.outcome(ticket).state == "open"
    assert complete(a, ticket, message).digest == message.digest


@pytest.mark.covers("F19")
def test_a_ticket_is_completed_by_its_own_site_only(pair: tuple[Participation, Participation]) -> None:
    """Guards against `complete` that does not look whose ticket it is, before and after the acceptance."""
    a, b = pair
    message, ticket = push(a), note_of(a).ticket
    for _ in range(2):
        with pytest.raises(TicketClosed, match="not issued to 'b'"):
            complete(b, ticket, message)
        complete(a, ticket, message)


@pytest.mark.parametrize(
    ("limit", "most", "weight", "by", "told"),
    [
        ("max_update_norm", 5.9, 1.0, 1.0, r"norm is 6, above aggregation.max_update_norm 5\.9"),  # √(36 · 1²) = 6
        ("max_update_norm", 6.1, 1.0, 1.0, None),
        ("max_update_norm", 1e12, 1.0, 1e12, r"norm is 6e\+12, above aggregation.max_update_norm 1e\+12"),
        ("max_update_norm", 0.0, 1.0, 1e12, None),
        ("max_weight", 10.0, 11.0, 1.0, "weight is 11, above aggregation.max_weight 10"),
        ("max_weight", 10.0, 10.0, 1.0, None),
    ],
)
@pytest.mark.covers("F31")
def test_an_absurd_norm_or_weight_is_refused(
    tmp_path: Path, limit: str, most: float, weight: float, by: float, told: str | None
) -> None:
    """Guards against `complete` without `require_plausible`; either comparison turned round."""
    with plain_server(tmp_path, nn.Linear(8, 4), **{f"aggregation.{limit}": most}) as server:
        assert atoll.Settings().aggregation.max_update_norm == 1e12
        place = take_part(server.url, "a", folder=tmp_path / "w")
        formed(place, moved(by), weight=weight)
        delivered = place.exchange.deliver()
        assert isinstance(delivered, Accepted if told is None else Refused)
        assert told is None or re.search(told, str(delivered.error))
        assert server.status().refused == (told is not None)
        place.leave()


@pytest.mark.covers("P3")
def test_a_version_is_served_under_its_own_digest_only(pair: tuple[Participation, Participation]) -> None:
    """Guards against `get_version` without the digest's comparison: after a fall back, other bytes at an old URL."""
    path = routes.VERSION_DATA.format(fragment=0, version=0, digest="0" * 64)
    parts = pair[0].exchange.layouts.version.parts
    with pytest.raises(Gone, match="no longer the one with digest"):
        HttpTransfer(pair[0].session.http, 1, 10.0).pull(path, [b""] * 9, parts, [])


@pytest.mark.covers("F19")
def test_a_void_lease_may_not_even_beat(
    pair: tuple[Participation, Participation], server: atoll.Server, tmp_path: Path
) -> None:
    """Guards against `require_lease` that only reads the header; a route that forgets `lease=True`."""
    a, b = pair
    a.session._closing.set()  # its heartbeat thread ends; the test beats by hand
    void, newer = a.session.http.lease, take_part(server.url, "a", folder=tmp_path / "newer")
    leased = (routes.HEARTBEAT, routes.LEAVE, routes.TICKETS, routes.COMPLETE.format(ticket=1))
    assert [post(server.url, path, {}, void)[1]["code"] for path in leased[:2]] == ["superseded"] * 2
    left = b.session.http.lease
    assert post(server.url, routes.LEAVE, {}, left)[0] == 204
    assert [post(server.url, path, {}, left)[1]["code"] for path in leased[::2]] == ["lease_lost"] * 2
    assert all("Atoll-Lease header" in post(server.url, path, {})[1]["message"] for path in leased)
    newer.leave()


@pytest.mark.covers("L9")
def test_a_heartbeat_is_a_sign_of_life(tmp_path: Path) -> None:
    """Guards against a heartbeat that does not reach the round machine."""
    settings = {"network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 1.0}
    with plain_server(tmp_path, nn.Linear(8, 4), **settings) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        lease = place.session.http.lease
        begin_s = server.status().uptime_s
        wait_until(lambda: server.status().uptime_s > begin_s + 2.5, "twice the timeout to pass")
        assert server.status().deaths == 0
        assert place.session.http.lease == lease
        place.leave()


@pytest.mark.covers("P3")
def test_ranges_are_of_the_version_that_was_asked_for(
    server: atoll.Server, pair: tuple[Participation, Participation]
) -> None:
    """Guards against an ETag that is not the digest; If-Range ignored."""
    note = pair[0].exchange.base.note
    assert note is not None
    url = server.url + routes.VERSION_DATA.format(fragment=0, version=0, digest=note.digest)
    etag = f'"{note.digest}"'
    for known, status in ((etag, 206), ('"other"', 200)):
        with urllib.request.urlopen(
            urllib.request.Request(url, headers={"Range": "bytes=0-9", "If-Range": known})
        ) as reply:
            assert (reply.status, reply.headers["ETag"]) == (status, etag)


@pytest.mark.covers("X3", "F31")
def test_whatever_of_a_refused_update_comes_later_is_told_that_it_is_refused(tmp_path: Path) -> None:
    """Several parts are on their way at once, and from several ranks: which answer comes first must not decide whether
    the worker goes back to the global model, or trains on from what was refused.
    """
    with plain_server(tmp_path, nn.Linear(2000, 20), **{"network.part_bytes": 2**16}) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        ticket = formed(place, lambda tensors: tensors["weight"][0, 0].fill_(float("nan"))).id
        assert len(place.exchange.outbox.layout.parts) == 3
        said = set()
        for part in (0, 2, 1, 0):
            with pytest.raises(UpdateRefused, match="of a is refused: weight holds NaN or Inf") as refused:
                push(place, part)
            said.add(refused.value.message)
        with pytest.raises(UpdateRefused) as refused:
            complete(place, ticket, messages.Complete(digest=note_of(place).digest, weight=1.0, steps=1))
        assert said == {refused.value.message}
        assert server.status().refused == 1
        place.leave()
