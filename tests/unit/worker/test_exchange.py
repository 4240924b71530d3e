"""A worker's exchange with a real server, taken apart: its notes, leases, residuals and parts."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kit.by_hand import formed, note_of, push
from kit.servers import plain_server
from kit.sites import together
from torch import Tensor, nn

import atoll
from atoll.errors import LeaseLost, StoreError, VersionSkew
from atoll.protocol import messages, routes
from atoll.protocol.messages import Ticket
from atoll.protocol.values import UpdateInfo
from atoll.tensors.module_tensors import named_tensors
from atoll.transport.http_client import Http
from atoll.worker.exchange import base_and_outbox
from atoll.worker.exchange.base_and_outbox import BaseNote, ScratchFile
from atoll.worker.exchange.participation import Participation, take_part
from atoll.worker.session.session import split_of


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        yield server


def pulled(server: atoll.Server, folder: Path) -> tuple[Participation, Ticket, dict[str, Tensor]]:
    place = take_part(server.url, "a", folder=folder)
    ticket = place.exchange.ask().ticket
    assert ticket is not None
    tensors = named_tensors(nn.Linear(8, 4))[0]
    place.exchange.pull(ticket.base, tensors)
    return place, ticket, tensors


@pytest.mark.covers("L25")
def test_a_base_that_was_advanced_is_not_taken_for_the_version_it_was(server: atoll.Server, tmp_path: Path) -> None:
    """Guards against `advance_base` without `begin_local`: a pull of version 0 found base − update under its digest."""
    place, ticket, tensors = pulled(server, tmp_path / "w")
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor += 1.0
    place.exchange.form(ticket, tensors, UpdateInfo(1.0, 1, {}))
    place.exchange.advance_base()
    place.exchange.pull(ticket.base, tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    place.leave()


@pytest.mark.covers("L10")
def test_a_lost_lease_is_taken_anew_once_however_many_notice(server: atoll.Server, tmp_path: Path) -> None:
    """Guards against `rejoin` without the comparison: heartbeat and transfers would void each
    other's lease for ever."""
    place = take_part(server.url, "a", folder=tmp_path / "w")
    lost = place.session.http.lease
    for _ in range(3):
        place.session.rejoin(lost)
    assert place.session.reconnections == 1
    assert int(place.session.http.lease.split(":")[1]) == int(lost.split(":")[1]) + 1
    place.leave()


@pytest.mark.covers("L10", "F19")
def test_a_late_request_under_its_own_old_lease_ends_no_worker(server: atoll.Server, tmp_path: Path) -> None:
    """Guards against taking it for that of a process that another one has replaced: that would end this one."""
    place = take_part(server.url, "a", folder=tmp_path / "w")
    late = Http(server.url)
    late.lease = place.session.http.lease
    place.session.rejoin(late.lease)
    with pytest.raises(LeaseLost):
        late.post(routes.HEARTBEAT, messages.Heartbeat(), messages.HeartbeatReply)
    late.close()
    place.session.http.post(routes.HEARTBEAT, messages.Heartbeat(), messages.HeartbeatReply)
    place.leave()


@pytest.mark.covers("L10")
def test_two_threads_that_find_the_lease_lost_at_once_join_once(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against `rejoin` without its lock: the second would see the old lease while the first still joins."""
    place = take_part(server.url, "a", folder=tmp_path / "w")
    lost, join = place.session.http.lease, place.session._join
    both = threading.Barrier(2)

    def slow_join(*_: object) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # until the other one is here too, which it must not be
        join()

    monkeypatch.setattr(place.session, "_join", slow_join)
    together(*2 * [lambda: place.session.rejoin(lost)])
    assert place.session.reconnections == 1
    place.leave()


@pytest.mark.covers("F3", "L10")
def test_a_part_of_other_bytes_at_the_server_is_not_taken_for_ours(server: atoll.Server, tmp_path: Path) -> None:
    """What an attempt before sent under the same ticket, and what has been formed anew since."""
    place = take_part(server.url, "a", folder=tmp_path / "w")
    ticket = formed(place)
    push(place)
    digests = [bytes.fromhex(text) for text in note_of(place).part_digests]
    assert place.session.parts_at_server(ticket.id, dict(enumerate(digests))) == {0}
    assert place.session.parts_at_server(ticket.id, {0: bytes(32)}) == set()
    place.leave()


@pytest.mark.covers("F3")
def test_a_note_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against `write_note` that writes into the note itself."""
    path = tmp_path / "base.json"
    note = BaseNote("run", 0, 1, "0" * 64, [], True)
    base_and_outbox.write_note(path, note)

    def half(self: Path, text: str, *_: object, **__: object) -> int:
        with open(self, "w") as file:
            file.write(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(StoreError, match="No space left"):
        base_and_outbox.write_note(path, BaseNote("run", 0, 2, "1" * 64, [], True))
    assert base_and_outbox.read_note(path, BaseNote) == note


@pytest.mark.covers("F41")
def test_a_base_that_is_what_its_note_says_is_read_once_and_not_pulled(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        next(iter(worker)).load_into(nn.Linear(8, 4))
    digest, read = ScratchFile.digest, []

    def counted(self, part):  # type: ignore[no-untyped-def]
        read.append(part.index)
        return digest(self, part)

    monkeypatch.setattr(ScratchFile, "digest", counted)
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        round_ = next(iter(worker))
        round_.load_into(nn.Linear(8, 4))
        round_.load_into(nn.Linear(8, 4))
        assert worker.bytes_down == 0
    assert read == [0]


def feeding_back(folder: Path) -> atoll.Server:
    """Three rounds of one site with int8, which rounds 0.4 to 0 beside 127."""
    return plain_server(folder, {"w": torch.zeros(2)}, codec="int8", sites=1, rounds=3)


@pytest.mark.parametrize("settled", [False, True])
def test_a_base_that_was_advanced_has_it_in_the_local_progress(tmp_path: Path, settled: bool) -> None:
    """The update counted, and the worker goes on from its own weights: 0.4 is sent once more, not 0.8.

    Whether it had heard that the update counted before it lost the server, or not.
    """
    with feeding_back(tmp_path) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        reply = place.exchange.ask_and_resend()
        assert reply.ticket is not None
        weights = {"w": torch.zeros(2)}
        place.exchange.pull(reply.ticket.base, weights)
        weights["w"] -= torch.tensor([127.0, 0.4])
        info = UpdateInfo(steps=1)
        place.exchange.submit(reply.ticket, weights, info)
        following = place.exchange.ask()
        assert following.ticket is not None
        assert place.exchange.local.residuals is not None
        if settled:
            place.exchange.local.state.settle()
            assert place.exchange.local.residuals.read("w", 0, 2).tolist() == [0.0, pytest.approx(0.4)]
        place.exchange.advance_base()
        weights["w"] -= torch.tensor([127.0, 0.0])
        place.exchange.form(following.ticket, weights, info)
        place.exchange.local.state.settle()  # it is not in
        left = place.exchange.local.residuals._files[1 - place.exchange.local.residuals.note.current]
        assert left.values(place.exchange.local.residuals._segments["w"], 0, 2).tolist() == [0.0, pytest.approx(0.4)]
        place.leave()


def test_settles_an_earlier_update_before_it_forms_the_next(tmp_path: Path) -> None:
    """Tickets that came by `ask`: 0.4 and 0.4 that was left make 0.8, which is rounded to 1."""

    def move_(tensors: dict[str, Tensor]) -> None:
        tensors["w"] -= torch.tensor([127.0, 0.4])

    with feeding_back(tmp_path) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        for _ in range(2):
            formed(place, move_)
            place.exchange.deliver()
        weights = {"w": torch.zeros(2)}
        ticket = place.exchange.ask().ticket
        assert ticket is not None
        place.exchange.pull(ticket.base, weights)
        assert weights["w"].tolist() == [-254.0, -1.0]
        place.leave()


@pytest.mark.covers("F30")
def test_a_layout_or_schema_that_is_not_the_servers_is_refused_before_a_byte_moves(tmp_path: Path) -> None:
    """Guards against `form` without the comparison of layouts; `_fetch_schema` without that of schemas."""
    with plain_server(tmp_path, nn.Linear(2, 1), rounds=0) as server:
        place = take_part(server.url, "a", folder=tmp_path / "w")
        ticket = place.exchange.ask().ticket
        assert ticket is not None
        tensors = named_tensors(nn.Linear(2, 1))[0]
        place.exchange.pull(ticket.base, tensors)
        with pytest.raises(VersionSkew, match="another layout of the update"):
            place.exchange.form(ticket.model_copy(update={"layout_digest": "0" * 64}), tensors, UpdateInfo(1.0, 0, {}))
        info = place.session.info.model_copy(update={"schema_digest": "0" * 64})
        with pytest.raises(VersionSkew, match="does not match the digest"):
            split_of(place.session.channel.schema(), info)
        place.leave()
