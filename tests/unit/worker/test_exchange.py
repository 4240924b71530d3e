"""A worker's exchange with a real server, taken apart: notes, leases, residuals, parts and heartbeats."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.by_hand import formed, note_of, push, put_part
from kit.servers import plain_server
from kit.sites import together
from torch import Tensor, nn

import atoll
from atoll import posix
from atoll.errors import Conflict, LeaseLost, StoreError, VersionSkew
from atoll.protocol import messages, routes
from atoll.protocol.messages import Report
from atoll.protocol.values import Accepted
from atoll.tensors.module_tensors import named_tensors
from atoll.transport.http_client import Http
from atoll.worker.exchange import base_and_outbox
from atoll.worker.exchange.base_and_outbox import BaseNote, OutboxNote, ScratchFile
from atoll.worker.exchange.exchange import resend_note
from atoll.worker.exchange.participation import Participation, take_part
from atoll.worker.exchange.server_carrier import MAX_CONFLICTS
from atoll.worker.session import session as session_module
from atoll.worker.session.session import Session


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    torch.manual_seed(0)
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        yield server


@contextlib.contextmanager
def taking_part(server: atoll.Server, folder: Path) -> Iterator[Participation]:
    """Site a, which leaves at the end of the block."""
    place = take_part(server.url, "a", folder=folder / "w")
    yield place
    place.leave()


@pytest.fixture
def place(server: atoll.Server, tmp_path: Path) -> Iterator[Participation]:
    with taking_part(server, tmp_path) as place:
        yield place


@pytest.mark.covers("L25")
def test_a_changed_base_is_not_its_old_version(place: Participation) -> None:
    """After a site has added its update to its base file, a pull of the version from before restores its weights."""
    # Guards against `advance_base` without `begin_local`: a pull of version 0 found base − update under the digest of
    # version 0.
    ticket = place.exchange.ask().ticket
    tensors = named_tensors(nn.Linear(8, 4))[0]
    place.exchange.pull(ticket.base, tensors)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor += 1.0
    place.exchange.form(ticket, tensors, Report(steps=1))
    place.exchange.advance_base()
    place.exchange.pull(ticket.base, tensors)
    assert all(torch.equal(tensors[name], before[name]) for name in before)


@pytest.mark.covers("L10")
def test_a_lost_lease_is_renewed_once(place: Participation) -> None:
    """If several callers notice one lost lease, the site joins again only once."""
    # Guards against `rejoin` without the comparison: heartbeat and transfers would void each other's lease for ever.
    lost = place.session.http.lease
    for _ in range(3):
        place.session.rejoin(lost)
    assert place.session.reconnections == 1
    assert int(place.session.http.lease.split(":")[1]) == int(lost.split(":")[1]) + 1


@pytest.mark.covers("L10", "F19")
def test_a_late_request_ends_no_worker(server: atoll.Server, place: Participation) -> None:
    """A late request under the worker's own old lease fails, and the worker goes on."""
    # Guards against taking such a request for that of a process which another one has replaced. This would end the
    # worker.
    late = Http(server.url)
    late.lease = place.session.http.lease
    place.session.rejoin(late.lease)
    with pytest.raises(LeaseLost):
        late.post(routes.HEARTBEAT, messages.Heartbeat(), messages.HeartbeatReply)
    late.close()
    place.session.http.post(routes.HEARTBEAT, messages.Heartbeat(), messages.HeartbeatReply)


@pytest.mark.covers("L10")
def test_two_threads_join_once(place: Participation, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two threads of a site find its lease lost at the same time, the site joins again only once."""
    # Guards against `rejoin` without its lock: the second thread would see the old lease while the first still joins.
    lost, join = place.session.http.lease, place.session._join
    both = threading.Barrier(2)

    def slow_join(*_: object) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.5)  # until the other one is here too, which it must not be
        join()

    monkeypatch.setattr(place.session, "_join", slow_join)
    together(*2 * [lambda: place.session.rejoin(lost)])
    assert place.session.reconnections == 1


@pytest.mark.covers("F3", "L10")
def test_a_part_with_other_bytes_is_not_counted(place: Participation) -> None:
    """A part at the server counts as sent only if its digest is that of the site's own part.

    An attempt before may have sent other bytes under this ticket, and the update has been formed again since.
    """
    ticket = formed(place)
    push(place)
    digests = [bytes.fromhex(text) for text in note_of(place).part_digests]
    assert place.session.parts_at_server(ticket.id, dict(enumerate(digests)), note_of(place).digest) == {0}
    assert place.session.parts_at_server(ticket.id, {0: bytes(32)}, note_of(place).digest) == set()


def add_one(tensors: dict[str, Tensor]) -> None:
    for tensor in tensors.values():
        tensor += 1.0


@pytest.mark.covers("F19")
def test_an_update_is_too_late_if_another_process_used_its_ticket(server: atoll.Server, tmp_path: Path) -> None:
    """A site whose outbox has an update for a ticket that another of its processes has used goes on without it."""
    # Both were given the ticket, in different folders. `Conflict` would end each further process of the first folder.
    first = take_part(server.url, "a", folder=tmp_path / "first")
    ticket = formed(first, weight=1.0)
    with taking_part(server, tmp_path) as second:
        assert formed(second, add_one, weight=2.0).id == ticket.id
        assert isinstance(second.exchange.deliver(), Accepted)
    first.leave()
    again = take_part(server.url, "a", folder=tmp_path / "first")
    assert not again.exchange.recover()
    assert again.exchange.outbox.note is not None  # the server may need it if it goes back
    again.leave()


@pytest.mark.covers("F3")
def test_a_note_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note is replaced as a whole or not at all, even if the disk is full."""
    # Guards against `write_note` that writes into the existing note.
    path = tmp_path / "base.json"
    note = BaseNote("run", 0, 1, "0" * 64, [], True)
    base_and_outbox.write_note(path, note)

    def half(fd: int, data: bytes, offset: int) -> None:
        os.pwrite(fd, data[:10], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(posix, "write_at", half)
    with pytest.raises(StoreError, match="No space left"):
        base_and_outbox.write_note(path, BaseNote("run", 0, 2, "1" * 64, [], True))
    assert base_and_outbox.read_note(path, BaseNote) == note


@pytest.mark.covers("F41")
def test_an_intact_base_is_not_pulled(server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base file that matches its note is read once and not downloaded."""
    with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
        next(iter(worker)).load_into(nn.Linear(8, 4))
    digest, read = ScratchFile.digest, []

    def counted(self, part):
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


@pytest.mark.parametrize("adopted", [False, True])
def test_a_rounding_error_is_not_added_twice(tmp_path: Path, adopted: bool) -> None:
    """If an update counted but its answer was lost, the site sends the rounding error of the codec only once."""
    # 0.4, and not 0.8. This holds whether or not the site had heard that the update counted before it lost the server.
    with feeding_back(tmp_path) as server, taking_part(server, tmp_path) as place:
        reply = place.exchange.ask_and_resend()
        weights = {"w": torch.zeros(2)}
        place.exchange.pull(reply.ticket.base, weights)
        weights["w"] -= torch.tensor([127.0, 0.4])
        info = Report(steps=1)
        place.exchange.submit(reply.ticket, weights, info)
        following = place.exchange.ask()
        assert following.ticket is not None
        assert place.exchange.local.residuals is not None
        if adopted:
            place.exchange.local.state.adopt_if_counted()
            assert place.exchange.local.residuals.read("w", 0, 2).tolist() == [0.0, pytest.approx(0.4)]
        place.exchange.advance_base()
        weights["w"] -= torch.tensor([127.0, 0.0])
        place.exchange.form(following.ticket, weights, info)
        place.exchange.local.state.adopt_if_counted()  # it is not in
        left = place.exchange.local.residuals._files[1 - place.exchange.local.residuals.note.current]
        assert left.values(place.exchange.local.residuals._segments["w"], 0, 2).tolist() == [0.0, pytest.approx(0.4)]


def test_an_earlier_rounding_error_is_added_first(tmp_path: Path) -> None:
    """Before a site forms an update, it adds what the codec lost in its last update that counted."""
    # The tickets come from `ask`. 0.4 and the 0.4 left before make 0.8, which is rounded to 1.

    def move_(tensors: dict[str, Tensor]) -> None:
        tensors["w"] -= torch.tensor([127.0, 0.4])

    with feeding_back(tmp_path) as server, taking_part(server, tmp_path) as place:
        for _ in range(2):
            formed(place, move_)
            place.exchange.deliver()
        weights = {"w": torch.zeros(2)}
        ticket = place.exchange.ask().ticket
        place.exchange.pull(ticket.base, weights)
        assert weights["w"].tolist() == [-254.0, -1.0]


def test_a_kill_keeps_update_and_rounding_error_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill while a stored update gets a new ticket, update and rounding error have the same ticket."""
    # Guards against `_takes` that names the new ticket in the outbox first: the residual would stay pending under the
    # old one.
    with feeding_back(tmp_path) as server, taking_part(server, tmp_path) as place:
        formed(place, lambda tensors: tensors["w"].sub_(torch.tensor([127.0, 0.4])))
        residuals, again = place.exchange.local.residuals, replace(note_of(place), ticket=7)
        assert residuals is not None
        writes = [0]

        def killed_in_the_second(write: Callable[..., None]) -> Callable[..., None]:
            def counted(*args: Any) -> None:
                writes[0] += 1
                if writes[0] == 2:
                    raise KeyboardInterrupt
                write(*args)

            return counted

        monkeypatch.setattr(place.exchange.outbox, "seal", killed_in_the_second(place.exchange.outbox.seal))
        monkeypatch.setattr(residuals, "passes_to", killed_in_the_second(residuals.passes_to))
        with pytest.raises(KeyboardInterrupt):
            place.exchange._takes(again, check=False)
        monkeypatch.undo()
        assert place.exchange._takes(again, check=False)
        assert (note_of(place).ticket, residuals.note.pending) == (7, 7)


@pytest.mark.covers("F30")
def test_another_layout_or_schema_is_refused_first(tmp_path: Path) -> None:
    """A layout or schema other than the server's is refused before any byte is sent."""
    # Guards against `form` without the comparison of layouts, and `_fetch_schema` without that of schemas.
    with plain_server(tmp_path, nn.Linear(2, 1), rounds=0) as server, taking_part(server, tmp_path) as place:
        ticket = place.exchange.ask().ticket
        tensors = named_tensors(nn.Linear(2, 1))[0]
        place.exchange.pull(ticket.base, tensors)
        with pytest.raises(VersionSkew, match="another file layout"):
            place.exchange.form(ticket.model_copy(update={"layout_digest": "0" * 64}), tensors, Report())
        info = place.session.info.model_copy(update={"schema_digest": "0" * 64})
        with pytest.raises(VersionSkew, match="does not match the digest"):
            info.require_split(place.session.split)


# -- an attempt at a part that arrives after its repetition was recorded
#
# The last sender of a part has it, so the server forgets what was recorded. The worker then sends that part once more.


@pytest.fixture
def large_place(tmp_path: Path) -> Iterator[Participation]:
    """Its update has two parts."""
    with plain_server(tmp_path, nn.Linear(300, 100), sites=1, part_bytes=2**16) as server:
        with taking_part(server, tmp_path) as place:
            yield place


class Late:
    """Half of part 1, which arrives just before each of the first `times` words that the update is complete."""

    def __init__(self, place: Participation, ticket: int, times: int) -> None:
        self.completions = 0
        self._place, self._ticket, self._times = place, ticket, times
        self._sockets: list[socket.socket] = []
        self._post = place.session.http.post
        place.session.http.post = self._posted

    def _posted(self, path: str, *args: Any, **more: Any) -> Any:
        if path == routes.COMPLETE.format(ticket=self._ticket):
            self.completions += 1
            if self.completions <= self._times:
                self._arrive()
        return self._post(path, *args, **more)

    def _arrive(self) -> None:
        http, part = self._place.session.http, self._place.exchange.outbox.layout.parts[1]
        late = put_part(http.port, http.lease, self._ticket, 1, part.nbytes + 32, bytes(part.nbytes // 2))
        self._sockets.append(late)
        path = routes.TICKET.format(ticket=self._ticket)
        wait_until(lambda: 1 not in http.get(path, messages.TicketState).parts, "the loss of part 1")

    def close(self) -> None:
        for late in self._sockets:
            late.close()


@pytest.mark.covers("F14")
@pytest.mark.parametrize("times", [1, MAX_CONFLICTS])
def test_an_undone_part_is_sent_again(large_place: Participation, times: int) -> None:
    """If a late duplicate of a request makes the server forget a part, the site sends only this part again."""
    late = Late(large_place, formed(large_place).id, times)
    assert isinstance(large_place.exchange.deliver(), Accepted)
    assert late.completions == times + 1
    layout = large_place.exchange.outbox.layout
    assert large_place.session.counters.bytes_up == layout.nbytes + times * layout.parts[1].nbytes
    late.close()


def test_a_conflict_that_lasts_is_raised(large_place: Participation) -> None:
    """If the server forgets the same part of an update again and again, the site raises the error after
    a few attempts.
    """
    late = Late(large_place, formed(large_place).id, MAX_CONFLICTS + 1)
    with pytest.raises(Conflict, match="lacks 1 of 2 parts"):
        large_place.exchange.deliver()
    assert late.completions == MAX_CONFLICTS + 1
    late.close()


# -- a carrier that the package does not have


class FromFile:
    """A carrier with the versions of a file. It is the source of their parts, too."""

    def __init__(self, path: Path) -> None:
        self._bytes = bytearray(path.read_bytes())

    def fetch(self, fragment: int, version: int, path: str, pull: Callable[[Any, str], None]) -> None:
        pull(self, "no path")

    def pull(self, path: str, digests: Any, parts: Any, sinks: Any, *, into: Any, on_bytes: Any, on_part: Any) -> None:
        for part in parts:
            data = memoryview(self._bytes)[part.start : part.stop]
            for sink in (into, *sinks):
                sink.write(part.start, data)
            on_part(part)


@pytest.mark.usefixtures("pulled_apart")
def test_a_version_can_be_loaded_from_a_file(large_place: Participation, tmp_path: Path) -> None:
    """A site can take a version from a local file instead of downloading it from the server."""
    exchange = large_place.exchange
    ticket, tensors = exchange.ask().ticket, named_tensors(nn.Linear(300, 100))[0]
    assert ticket is not None
    (slot,) = tmp_path.rglob("version-0-0.safetensors")
    carrier: Any = FromFile(slot)
    replace(exchange, carrier=carrier).pull(ticket.base, tensors)
    assert large_place.session.counters.bytes_down == 0
    assert exchange.base.path.read_bytes() == slot.read_bytes()
    assert torch.equal(tensors["weight"], exchange.base.values_of("weight", 0, 30_000).view(100, 300))


# -- updates that are sent again


A, B, LAYOUT = "a" * 64, "b" * 64, "c" * 64
LOST = messages.Outcome(ticket=8, state="expired", base_version=3)


def note(*, sent: bool = True) -> OutboxNote:
    """An update from version 3 with the bits A, under ticket 8."""
    return OutboxNote(
        run="r", ticket=8, fragment=0, base_version=3, base_digest=A, layout_digest=LAYOUT, digest=B,
        part_digests=[], report=Report(steps=2), sent=sent,
    )  # fmt: skip


def ticket_from(version: int, digest: str) -> messages.Ticket:
    return messages.Ticket(id=9, fragment=0, round=4, base_version=version, base_digest=digest, layout_digest=LAYOUT)


def info(mode: str) -> messages.RunInfo:
    return messages.RunInfo.model_construct(run="r", mode=mode)


@pytest.mark.covers("F41")
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("version", "bits", "fate", "base"),
    [
        pytest.param(3, A, "expired", 3, id="the same version: it is for this round"),
        pytest.param(5, A, "expired", 3, id="its version under another number: the server fell back"),
        pytest.param(5, A, "counted", None, id="it counts, and left the bits as they were"),
        pytest.param(5, B, "counted", None, id="it counts"),
    ],
)
def test_only_forgotten_updates_are_sent_again(mode: str, version: int, bits: str, fate: str, base: int | None) -> None:
    """A site sends an update again under a new ticket if the earlier ticket has expired and the new ticket has the base
    of the update. It never sends an update again that has counted.
    """
    ticket = ticket_from(version, bits)
    again = resend_note(note(), ticket, LOST, info(mode), lambda _: LOST.model_copy(update={"state": fate}))
    assert (again and (again.ticket, again.base_version, again.sent)) == (base and (9, base, False))


@pytest.mark.covers("F41")
@pytest.mark.parametrize(("mode", "sent"), [("async", True), ("async", False), ("sync", True)])
def test_async_runs_accept_forgotten_updates(mode: str, sent: bool) -> None:
    """In an asynchronous run, a site sends a forgotten update again to the newest version, if the server had
    acknowledged the update.

    An update that never arrived is part of the site's local progress.
    """
    ticket = ticket_from(2, B)
    again = resend_note(note(sent=sent), ticket, LOST, info(mode), lambda _: LOST)
    assert (again and again.base_version) == (2 if mode == "async" and sent else None)


# -- heartbeats, and a server that stands still


@pytest.fixture
def quiet_server(tmp_path: Path) -> Iterator[atoll.Server]:
    """Its heartbeat interval is far longer than a test."""
    with plain_server(
        tmp_path, nn.Linear(8, 4), **{"network.heartbeat_interval_s": 600.0, "network.heartbeat_timeout_s": 0}
    ) as server:
        yield server


def test_heartbeats_keep_a_smallest_gap(
    quiet_server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a site's state changes, its heartbeats are at least `HEARTBEAT_GAP_S` apart."""
    monkeypatch.setattr(session_module, "HEARTBEAT_GAP_S", 0.1)
    sent: list[float] = []
    send = Session._send_heartbeat

    def counted(self: Session, *more: float) -> None:
        if self.http.server == quiet_server.url:  # a place of an earlier test may still be ending
            sent.append(time.monotonic())
        send(self, *more)

    monkeypatch.setattr(Session, "_send_heartbeat", counted)
    place = take_part(quiet_server.url, "a", folder=tmp_path / "w")

    def changed() -> bool:
        place.session.tell(state=f"state {time.monotonic()}")
        return len(sent) >= 5

    wait_until(changed, "five heartbeats")
    assert min(later - earlier for earlier, later in pairwise(sent[:5])) > 0.09
    place.leave()


@pytest.mark.covers("L13")
def test_a_silent_server_is_left_soon(
    quiet_server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server does not answer, a site leaves the run within a short time."""
    # Guards against a goodbye of half a minute or more after Ctrl-C. The server learns of the end by the silence.
    monkeypatch.setattr(session_module, "GOODBYE_S", 0.2)
    with Proxy(int(quiet_server.url.rpartition(":")[2])) as proxy:
        place = take_part(proxy.url, "a", folder=tmp_path / "w")
        wait_until(lambda: proxy.count("POST .*heartbeat"), "a heartbeat")
        proxy.faults += [Fault("POST .*heartbeat", "up", BEFORE_HEADER, "stall") for _ in range(2)]
        proxy.faults.append(Fault("POST .*leave", "up", BEFORE_HEADER, "stall"))
        begin = time.monotonic()
        place.leave()
        assert time.monotonic() - begin < 10.0
