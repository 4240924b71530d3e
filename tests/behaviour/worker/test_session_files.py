"""What the notes beside base and outbox say at the moments a process may die."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kit.by_hand import formed, note_of, push
from kit.servers import plain_server
from kit.sites import together
from torch import Tensor, nn

import atoll
from atoll.errors import LeaseLost, UsageError
from atoll.protocol import messages, routes
from atoll.protocol.messages import Ticket
from atoll.protocol.values import UpdateInfo
from atoll.tensors.module_tensors import named_tensors
from atoll.transport.http_client import Http
from atoll.worker.exchange import encode_update
from atoll.worker.exchange.base_and_outbox import Outbox
from atoll.worker.exchange.participation import Participation, take_part


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


@pytest.mark.covers("F3")
def test_while_an_update_is_formed_no_note_names_the_one_before(
    server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against `form` without `outbox.clear()`: a kill in the middle left half of a new update under an old
    note.
    """
    place, ticket, tensors = pulled(server, tmp_path / "w")
    place.exchange.form(ticket, tensors, UpdateInfo(1.0, 1, {}))
    with monkeypatch.context() as patch:
        patch.setattr(encode_update.UpdateFormer, "form", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            place.exchange.form(ticket, tensors, UpdateInfo(1.0, 1, {}))
    assert Outbox(place.folder, place.exchange.outbox.layout).note is None
    place.leave()


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


@pytest.mark.parametrize("change", [{"complete": False}, {"digest": "0" * 64}])
@pytest.mark.covers("P6")
def test_a_round_is_not_submitted_against_a_base_that_is_not_its_own(
    server: atoll.Server, tmp_path: Path, change: dict[str, object]
) -> None:
    """Guards against `submit` without the look at `base.complete`, or at `base.digest`."""
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        round_ = next(iter(worker))
        model = round_.load_into(nn.Linear(8, 4))
        base = worker._backend.place.exchange.base
        base.begin(replace(base.note, **change))
        if "digest" in change:
            base.finish()
        with pytest.raises(UsageError, match="was not pulled"):
            round_.submit(model)


@pytest.mark.covers("F42")
def test_a_server_that_went_back_is_noticed_and_said(
    server: atoll.Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is at version 0; the worker has trained from version 5 of the same run, which no journal knows now."""
    place, ticket, tensors = pulled(server, tmp_path / "w")
    note = place.exchange.base.note
    assert note is not None
    place.exchange.base.begin(replace(note, version=5, digest="0" * 64))
    place.exchange.pull(ticket.base, tensors)
    assert "the server went back from version 5 to 0" in caplog.text
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
