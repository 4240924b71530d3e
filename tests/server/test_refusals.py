"""What the server says no to: each refusal has a test that fails without it."""

import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit.servers import new_server
from torch import nn

import atoll
from atoll.errors import AtollError, Conflict, Gone, LeaseLost, Superseded, TicketClosed, UpdateRefused
from atoll.protocol import messages, routes
from atoll.protocol.values import Accepted, Finished, Refused, UpdateInfo
from atoll.tensors.module_tensors import named_tensors
from atoll.transport.resumable_transfer import HttpTransfer
from atoll.worker.exchange.participation import Participation, take_part


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def serve(folder: Path, model: nn.Module | None = None, **settings: Any) -> atoll.Server:
    options: dict[str, Any] = {"algorithm.name": "fedavg", "rounds.sites": 2, "disk.min_free_bytes": 0}
    return new_server(
        model or nn.Linear(8, 4), **{"network.port": 0, "disk.state_dir": folder / "state"}, **(options | settings)
    )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with serve(tmp_path) as server:
        yield server


def formed(server: atoll.Server, folder: Path, site: str = "a", weight: float = 1.0, by: float = 1.0) -> Participation:
    """A place whose update lies in its outbox; every one of its 36 elements is −`by`."""
    place = take_part(server.url, site, folder=folder / "w")
    ticket = place.exchange.ask(wait_s=10.0).ticket
    assert ticket is not None
    tensors = named_tensors(nn.Linear(8, 4))[0]
    place.exchange.pull(ticket.base, tensors)
    for tensor in tensors.values():
        tensor += by
    place.exchange.form(ticket, tensors, UpdateInfo(weight, 1, {}))
    return place


def push(place: Participation) -> tuple[int, messages.Complete]:
    note = place.exchange.outbox.note
    assert note is not None
    digests = [bytes.fromhex(text) for text in note.part_digests]
    HttpTransfer(place.session.http, 1, 10.0).push(
        lambda part: routes.PART.format(ticket=note.ticket, part=part),
        place.exchange.outbox.fd, place.exchange.outbox.layout.parts, digests,
    )  # fmt: skip
    return note.ticket, messages.Complete(digest=note.digest, weight=note.weight, steps=1)


@pytest.fixture
def pair(server: atoll.Server, tmp_path: Path) -> Iterator[tuple[Participation, Participation]]:
    b = take_part(server.url, "b", folder=tmp_path / "w")
    a = formed(server, tmp_path)
    yield a, b
    a.leave(), b.leave()


@pytest.mark.covers("F18")
def test_parts_that_do_not_make_up_the_digest_are_not_accepted(pair: tuple[Participation, Participation]) -> None:
    """Guards against `complete` that accepts whatever digest it is told."""
    a, _ = pair
    ticket, complete = push(a)
    with pytest.raises(Conflict, match="do not make up the digest"):
        a.session.http.post(
            routes.COMPLETE.format(ticket=ticket), complete.model_copy(update={"digest": "0" * 64}), messages.Receipt
        )
    state = a.session.http.get(routes.TICKET.format(ticket=ticket), messages.TicketState)
    assert state.outcome.state == "open"
    assert (
        a.session.http.post(routes.COMPLETE.format(ticket=ticket), complete, messages.Receipt).digest == complete.digest
    )


@pytest.mark.covers("F19")
def test_a_ticket_is_completed_by_its_own_site_only(pair: tuple[Participation, Participation]) -> None:
    """Guards against `complete` that does not look whose ticket it is, before and after the acceptance."""
    a, b = pair
    ticket, complete = push(a)
    for _ in range(2):
        with pytest.raises(TicketClosed, match="not issued to 'b'"):
            b.session.http.post(routes.COMPLETE.format(ticket=ticket), complete, messages.Receipt)
        a.session.http.post(routes.COMPLETE.format(ticket=ticket), complete, messages.Receipt)


@pytest.mark.parametrize(
    ("settings", "weight", "by", "told"),
    [
        (
            {"aggregation.max_update_norm": 5.9},
            1.0,
            1.0,
            r"norm is 6, above aggregation.max_update_norm 5\.9",
        ),  # √(36 · 1²) = 6
        ({"aggregation.max_update_norm": 6.1}, 1.0, 1.0, None),
        ({}, 1.0, 1e12, r"norm is 6e\+12, above aggregation.max_update_norm 1e\+12"),
        ({"aggregation.max_update_norm": 0.0}, 1.0, 1e12, None),
        ({"aggregation.max_weight": 10.0}, 11.0, 1.0, "weight is 11, above aggregation.max_weight 10"),
        ({"aggregation.max_weight": 10.0}, 10.0, 1.0, None),
    ],
)
@pytest.mark.covers("F31")
def test_an_absurd_norm_or_weight_is_refused(
    tmp_path: Path, settings: dict[str, float], weight: float, by: float, told: str | None
) -> None:
    """Guards against `complete` without `_require_plausible`; either comparison turned round."""
    with serve(tmp_path, **{"rounds.sites": 1}, **settings) as server:
        place = formed(server, tmp_path, weight=weight, by=by)
        delivered = place.exchange.deliver()
        assert isinstance(delivered, Accepted if told is None else Refused)
        assert told is None or re.search(told, str(delivered.error))
        assert server.status().refused == (told is not None)
        place.leave()


@pytest.mark.covers("P3")
def test_a_version_is_served_under_its_own_digest_only(
    server: atoll.Server, pair: tuple[Participation, Participation]
) -> None:
    """Guards against `get_version` that does not compare the digest: after a fall back, other
    bytes under an old URL."""
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
    newer = take_part(server.url, "a", folder=tmp_path / "newer")
    for path, message in ((routes.HEARTBEAT, messages.Heartbeat()), (routes.LEAVE, messages.Leave())):
        with pytest.raises(Superseded):
            a.session.http.post(path, message, messages.HeartbeatReply)
    b.session.http.send(routes.LEAVE, messages.Leave())
    for path, message in ((routes.HEARTBEAT, messages.Heartbeat()), (routes.TICKETS, messages.TicketRequest())):
        with pytest.raises(LeaseLost):
            b.session.http.post(path, message, messages.HeartbeatReply)
    a.session.http.lease = ""
    for path in (routes.HEARTBEAT, routes.LEAVE, routes.TICKETS, routes.COMPLETE.format(ticket=1)):
        with pytest.raises(AtollError, match="Atoll-Lease header"):
            a.session.http.post(path, messages.Heartbeat(), messages.HeartbeatReply)
    newer.leave()


@pytest.mark.covers("L9")
def test_a_heartbeat_is_a_sign_of_life(tmp_path: Path) -> None:
    """Guards against a heartbeat that does not reach the round machine."""
    with serve(
        tmp_path, **{"rounds.sites": 1, "network.heartbeat_interval_s": 0.2, "network.heartbeat_timeout_s": 1.0}
    ) as server:
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

    def get(**headers: str) -> tuple[int, str]:
        request = urllib.request.Request(url, headers={key.replace("_", "-"): text for key, text in headers.items()})
        with urllib.request.urlopen(request) as response:
            response.read()
            return response.status, response.headers["ETag"]

    etag = f'"{note.digest}"'
    assert get(Range="bytes=0-9", If_Range=etag) == (206, etag)
    assert get(Range="bytes=0-9", If_Range='"other"') == (200, etag)


@pytest.mark.covers("P8")
def test_what_the_server_exports_has_every_name_of_a_tied_tensor(tmp_path: Path) -> None:
    """Guards against `export_ranges` without the aliases."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = Tied()
    with serve(tmp_path, model, **{"rounds.sites": 1, "rounds.total": 1}) as server:
        path = server.save_state(tmp_path / "model.safetensors")
    Tied().load_state_dict(load_file(path), strict=True)


@pytest.mark.covers("L15")
def test_metrics_are_averaged_by_weight(tmp_path: Path) -> None:
    """(1 · 10 + 3 · 2) / 4 = 4, not (10 + 2) / 2."""
    with serve(tmp_path, **{"rounds.total": 1}) as server:
        sites = {"a": (1.0, 10.0), "b": (3.0, 2.0)}
        sessions = {site: take_part(server.url, site, folder=tmp_path / "w") for site in sites}
        for site, place in sessions.items():
            weight, loss = sites[site]
            ticket = place.exchange.ask(wait_s=10.0).ticket
            assert ticket is not None
            tensors = named_tensors(nn.Linear(8, 4))[0]
            place.exchange.pull(ticket.base, tensors)
            place.exchange.form(ticket, tensors, UpdateInfo(weight, 1, {"loss": loss}))
            place.exchange.deliver()
        assert isinstance(sessions["a"].exchange.ask(wait_s=20.0), Finished)
        assert server.status().history[0].metrics == {"loss": pytest.approx(4.0)}
        for place in sessions.values():
            place.leave()


@pytest.mark.covers("X3", "F31")
def test_whatever_of_a_refused_update_comes_later_is_told_that_it_is_refused(tmp_path: Path) -> None:
    """Several parts are on their way at once, and from several ranks: which answer comes first must not decide whether
    the worker goes back to the global model, or trains on from what was refused.
    """
    with serve(tmp_path, nn.Linear(2000, 20), **{"network.part_bytes": 2**16, "rounds.sites": 1}) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        ticket = place.exchange.ask(wait_s=10.0).ticket
        assert ticket is not None
        tensors = named_tensors(nn.Linear(2000, 20))[0]
        place.exchange.pull(ticket.base, tensors)
        tensors["weight"][0, 0] = float("nan")
        place.exchange.form(ticket, tensors, UpdateInfo(1.0, 1, {}))
        note, parts = place.exchange.outbox.note, place.exchange.outbox.layout.parts
        assert note is not None
        assert len(parts) == 3
        digests = [bytes.fromhex(text) for text in note.part_digests]
        said = set()
        for part in (parts[0], parts[2], parts[1], parts[0]):
            with pytest.raises(UpdateRefused, match="of a is refused: weight holds NaN or Inf") as refused:
                HttpTransfer(place.session.http, 1, 10.0).push(
                    lambda part: routes.PART.format(ticket=note.ticket, part=part),
                    place.exchange.outbox.fd,
                    [part],
                    digests,
                )
            said.add(refused.value.message)
        complete = messages.Complete(digest=note.digest, weight=1.0, steps=1)
        with pytest.raises(UpdateRefused) as refused:
            place.session.http.post(routes.COMPLETE.format(ticket=note.ticket), complete, messages.Receipt)
        assert said == {refused.value.message}
        assert server.status().refused == 1
        place.leave()
