"""What a worker of a swarm pulls from another, which may have something else than it says; and where it is kept."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from swarm_run import build

from atoll import Settings, TensorRef
from atoll.aggregation.plan import PLACED, Plan, placed_settings
from atoll.blobs.manifest import Manifest, state_id
from atoll.config import FIELDS, GROUPS
from atoll.config.settings import Group
from atoll.errors import Gone, PartCorrupt, StoreError
from atoll.posix import write_at
from atoll.protocol.swarm_messages import Collect, Hold, Source
from atoll.server.startup import plan_of
from atoll.store.file_slots import SPOOL, STATE, VERSION, Slot, region_digest
from atoll.tensors.layout import Layout, Part
from atoll.transport import object_server
from atoll.transport.http_client import Http
from atoll.transport.object_server import LocalBlob, ObjectHost
from atoll.worker.peer.peer_store import PeerStore, Version
from atoll.worker.peer.peer_transfers import PeerServer, PeerTransfers, state_cuts

SETTINGS = {
    "algorithm.outer_optimizer.name": "sgd",
    "algorithm.outer_optimizer.lr": 0.7,
    "algorithm.outer_optimizer.momentum": 0.9,
    "rounds.sites": 3,
    "network.part_bytes": 2**16,
}


class Peer:
    """A worker that serves files, and the store of one that pulls them."""

    def __init__(self, folder: Path) -> None:
        settings = Settings.build(
            {"algorithm.name": "fedavg", "swarm.enabled": True, "disk.state_dir": folder, **SETTINGS}
        )
        self.plan: Plan = plan_of(settings, build(), None)
        self.planned = self.plan.fragments[0]
        self.folder = folder / "store"
        self.folder.mkdir()
        self.store = PeerStore(self.plan, self.folder, "run")
        self.host, self.own_host = listening(), listening()
        self.http = Http("http://127.0.0.1:1")  # of the server, of which nothing is asked here
        self.peer_server = PeerServer(self.own_host, self.http.counters, None)
        self.moved = 0
        self.transfers = PeerTransfers(self.plan, self.http, self.peer_server, 10.0, self._move)

    def _move(self, count: int) -> None:
        self.moved += count

    def close(self) -> None:
        self.store.close()
        self.host.close()
        self.own_host.close()
        self.http.close()

    def slot(self, kind: str) -> Slot:
        slot = self.store.take(kind, 0)
        assert slot is not None
        return slot

    def version(self) -> tuple[Slot, list[bytes], str]:
        """A file with bytes of its own, the digests of its parts, and what they make up."""
        layout, slot = self.planned.version, self.slot(VERSION)
        for part in layout.parts:
            write_at(slot.fd, os.urandom(part.nbytes), part.start)
        digests = digests_of(slot, layout.parts)
        return slot, digests, layout.blob_id(digests)

    def state(self) -> tuple[Slot, list[bytes], str]:
        shape, slot = self.planned.shapes().state, self.slot(STATE)
        assert shape is not None
        for region in shape.regions:
            for start, nbytes in region:
                write_at(slot.fd, os.urandom(nbytes), start)
        write_at(slot.fd, shape.header, 0)
        digest = state_id([region_digest(slot.fd, region) for region in shape.regions])
        return slot, digests_of(slot, state_cuts(shape.nbytes).parts()), digest

    def serve(self, slot: Slot, digest: str, digests: list[bytes], layout: Layout | None = None) -> TensorRef:
        """Serve a version, or a file of another layout, under a reference that says it is what this digest names."""
        ref = self.host.serve(slot.fd, Manifest.of_layout(layout or self.planned.version, digests))
        return dataclasses.replace(ref, digest=digest)

    def serve_state(self, slot: Slot, digests: list[bytes]) -> TensorRef:
        return self.host.serve(slot.fd, Manifest.of_cuts(state_cuts(os.fstat(slot.fd).st_size), digests))


def listening() -> ObjectHost:
    return ObjectHost(
        "127.0.0.1", 0, name=None, tls_cert=None, tls_key=None, insecure=False, idle_timeout_s=10.0, folder=None
    )


def digests_of(slot: Slot, parts: list[Part] | tuple[Part, ...]) -> list[bytes]:
    return [region_digest(slot.fd, ((part.start, part.nbytes),)) for part in parts]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    peer = Peer(tmp_path)
    yield peer
    peer.close()


def hold(digest: str, *sources: Source, state_digest: str = "") -> Hold:
    return Hold(fragment=0, version=1, digest=digest, state_digest=state_digest, sources=list(sources))


@pytest.mark.covers("P10", "D10")
def test_a_version_of_other_bytes_is_not_taken_and_the_next_worker_is_asked(peer: Peer) -> None:
    slot, digests, digest = peer.version()
    other, other_digests, _ = peer.version()
    lies = Source(version=str(peer.serve(other, digest, other_digests)))
    with pytest.raises(PartCorrupt):
        peer.transfers.version(hold(digest, lies), peer.slot(VERSION), None)
    honest = Source(version=str(peer.serve(slot, digest, digests)))
    target = peer.slot(VERSION)
    got, _ = peer.transfers.version(hold(digest, lies, honest), target, None)
    assert list(got.part_digests) == digests
    assert digests_of(target, peer.planned.version.parts) == digests


@pytest.mark.covers("P10", "D10")
def test_an_outer_state_of_other_bytes_is_not_taken(peer: Peer) -> None:
    slot, digests, digest = peer.version()
    state, state_digests, state_digest = peer.state()
    other, other_digests, _ = peer.state()
    at = str(peer.serve(slot, digest, digests))
    lies = Source(version=at, state=str(peer.serve_state(other, other_digests)))
    with pytest.raises(PartCorrupt):
        peer.transfers.version(hold(digest, lies, state_digest=state_digest), peer.slot(VERSION), peer.slot(STATE))
    honest = Source(version=at, state=str(peer.serve_state(state, state_digests)))
    wanted = hold(digest, honest, state_digest=state_digest)
    got, came_in = peer.transfers.version(wanted, peer.slot(VERSION), peer.slot(STATE))
    assert state_id(got.state_digests) == state_digest
    assert list(came_in) == state_digests
    cut_otherwise = Source(version=at, state=str(peer.serve(state, "0" * 64, state_digests)))
    with pytest.raises(PartCorrupt):
        peer.transfers.version(
            hold(digest, cut_otherwise, state_digest=state_digest), peer.slot(VERSION), peer.slot(STATE)
        )


@pytest.mark.covers("P10", "D10")
def test_an_update_of_other_bytes_is_not_collected(peer: Peer) -> None:
    layout = peer.planned.update
    slot, other = peer.slot(SPOOL), peer.slot(SPOOL)
    write_at(other.fd, b"\1" * 4, layout.parts[0].start)
    digests, other_digests = digests_of(slot, layout.parts), digests_of(other, layout.parts)
    digest = layout.blob_id(digests)

    def collect(ref: TensorRef) -> Collect:
        return Collect(ticket=1, fragment=0, site="b", digest=digest, source=str(ref))

    with pytest.raises(PartCorrupt):
        peer.transfers.update(collect(peer.serve(other, digest, other_digests, layout)), peer.slot(SPOOL))
    assert peer.transfers.update(collect(peer.serve(slot, digest, digests, layout)), peer.slot(SPOOL))[1:] == (0.0, "")


@pytest.mark.covers("P10")
def test_ones_own_update_is_read_where_it_lies_and_is_checked_there_too(peer: Peer) -> None:
    """Who aggregates collects the update that he has formed himself: nothing of it goes over a connection."""
    layout, outbox = peer.planned.update, peer.slot(SPOOL)
    for part in layout.parts:
        write_at(outbox.fd, bytes(range(256)) * (part.nbytes // 256), part.start)
    digests = digests_of(outbox, layout.parts)
    digest = layout.blob_id(digests)
    ref = peer.peer_server.serve(outbox.fd, Manifest.of_layout(layout, digests))
    own = Collect(ticket=1, fragment=0, site="a", digest=digest, source=str(ref))
    target = peer.slot(SPOOL)
    peer.transfers.update(own, target)
    assert digests_of(target, layout.parts) == digests
    assert peer.moved == sum(part.nbytes for part in layout.parts)
    assert (peer.http.counters.bytes_up, peer.http.counters.bytes_down, peer.peer_server.served) == (0, 0, 0)
    write_at(outbox.fd, b"damaged", layout.parts[0].start)
    with pytest.raises(PartCorrupt, match="served here, is damaged"):
        peer.transfers.update(own, target)
    peer.peer_server.withdraw(ref)
    with pytest.raises(Gone):
        peer.transfers.update(own, target)


@pytest.mark.covers("P10")
def test_what_is_withdrawn_while_it_is_read_here_is_gone(peer: Peer) -> None:
    """Its file may be rewritten from then on: what was read of it is worth nothing."""
    slot, digests, _ = peer.version()
    layout, read = peer.planned.version, list[int]()
    ref = peer.peer_server.serve(slot.fd, Manifest.of_layout(layout, digests))
    with peer.peer_server.connected(str(ref), 10.0) as (_, parts):
        assert isinstance(parts, LocalBlob)

        def on_part(part: Part) -> None:
            read.append(part.index)
            peer.peer_server.withdraw(ref)

        with pytest.raises(Gone, match="no longer served here"):
            parts.pull("it", digests, layout.parts, [], on_part=on_part)
    assert read == [0]


@pytest.mark.covers("P10")
def test_what_is_rewritten_while_it_is_read_is_gone_not_damaged(peer: Peer) -> None:
    """Asked before the reading, it would be said of a disk that it damages what was written on purpose."""
    slot, digests, _ = peer.version()
    layout = peer.planned.version
    ref = peer.peer_server.serve(slot.fd, Manifest.of_layout(layout, digests))

    def rewritten(nbytes: int) -> None:
        peer.peer_server.withdraw(ref)
        write_at(slot.fd, bytes(layout.nbytes), 0)

    part = max(layout.parts, key=lambda part: part.nbytes)
    with peer.peer_server.connected(str(ref), 10.0) as (_, parts):
        with pytest.raises(Gone, match="no longer served here"):
            parts.pull("it", [b"other"] * len(digests), [part], [], on_bytes=rewritten)


@pytest.mark.covers("P10", "D10")
@pytest.mark.parametrize("how", ["cut", "unreadable"])
def test_ones_own_file_that_cannot_be_read_is_asked_of_another_worker(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    mine, digests, digest = peer.version()
    layout, theirs, into = peer.planned.version, peer.slot(VERSION), peer.slot(VERSION)
    whole = mine.path.read_bytes()
    write_at(theirs.fd, whole, 0)
    own = Source(version=str(peer.peer_server.serve(mine.fd, Manifest.of_layout(layout, digests))))
    other = Source(version=str(peer.serve(theirs, digest, digests)))
    if how == "cut":
        os.ftruncate(mine.fd, 10)
    else:

        def broken(fd: int, memory: memoryview, offset: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(object_server, "read_at", broken)
    peer.transfers.version(hold(digest, own, other), into, None)
    assert into.path.read_bytes() == whole


@pytest.mark.covers("P10")
def test_asks_itself_first_among_several_holders(peer: Peer) -> None:
    slot, digests, digest = peer.version()
    others = [str(peer.serve(slot, digest, digests)) for _ in range(3)]
    own = str(peer.peer_server.serve(slot.fd, Manifest.of_layout(peer.planned.version, digests)))
    assert peer.peer_server.in_order([*others, own])[0] == own
    assert sorted(peer.peer_server.in_order([*others, own])) == sorted([*others, own])


@pytest.mark.covers("P10")
def test_a_version_that_cannot_be_noted_is_not_there_and_its_files_are_the_callers(peer: Peer) -> None:
    slot, digests, digest = peer.version()
    shutil.rmtree(peer.folder)
    version = Version(0, 1, digest, slot, None, tuple(digests), ())
    with pytest.raises(StoreError):
        peer.store.put(version)
    assert peer.store.get(0, 1) is None
    assert slot.holds.total() == 1  # the caller's, who gives it back
    peer.store.give_back(VERSION, 0, slot)
    assert slot.free


@pytest.mark.covers("P10")
def test_a_version_that_is_dropped_gives_its_files_back_where_that_cannot_be_noted(peer: Peer) -> None:
    slot, digests, digest = peer.version()
    version = Version(0, 1, digest, slot, None, tuple(digests), ())
    peer.store.put(version)
    shutil.rmtree(peer.folder)
    peer.store.drop(version)
    assert peer.store.get(0, 1) is None
    assert slot.free


@pytest.mark.covers("P10")
def test_a_file_that_cannot_be_made_is_an_error_of_the_disk(peer: Peer) -> None:
    shutil.rmtree(peer.folder)
    with pytest.raises(StoreError, match=r"version-0-0\.safetensors: No such file or directory"):
        peer.store.take(VERSION, 0)


@pytest.mark.covers("P10", "F41")
@pytest.mark.parametrize("damage", ["none", "version", "state", "header", "cut", "another"])
def test_what_an_earlier_process_held_is_believed_where_it_is_whole(peer: Peer, damage: str) -> None:
    slot, _, _ = peer.version()
    write_at(slot.fd, peer.planned.shapes().version.header, 0)
    digests = digests_of(slot, peer.planned.version.parts)
    digest = peer.planned.version.blob_id(digests)
    state, _, _ = peer.state()
    shape = peer.planned.shapes().state
    assert shape is not None
    states = tuple(region_digest(state.fd, region) for region in shape.regions)
    named = "0" * 64 if damage == "another" else digest
    peer.store.put(Version(0, 1, named, slot, state, tuple(digests), states))
    peer.store.close()
    file, at = {"state": (state, -1), "header": (state, 9)}.get(damage, (slot, -1))
    content = bytearray(file.path.read_bytes())
    if damage in ("version", "state", "header"):
        content[at] ^= 1
    elif damage == "cut":
        del content[-10:]
    file.path.write_bytes(content)
    peer.store = PeerStore(peer.plan, peer.folder, "run")
    found = peer.store.get(0, 1)
    assert (found is not None) == (damage == "none")
    if found is not None:
        assert (found.digest, found.part_digests, found.state_digests) == (digest, tuple(digests), states)
    assert file.path.exists() == (damage == "none")  # what is not believed goes


@pytest.mark.covers("P10", "F41")
def test_what_comes_after_a_damaged_version_survives_the_next_start(peer: Peer) -> None:
    """Its files are other ones than those that were removed."""

    def held(version: int) -> Slot:
        slot, _, _ = peer.version()
        write_at(slot.fd, peer.planned.shapes().version.header, 0)
        digests = digests_of(slot, peer.planned.version.parts)
        digest = peer.planned.version.blob_id(digests)
        peer.store.put(Version(0, version, digest, slot, None, tuple(digests), ()))
        return slot

    def start_again() -> None:
        peer.store.close()
        peer.store = PeerStore(peer.plan, peer.folder, "run")

    damaged = held(1)
    write_at(damaged.fd, b"damaged", 5000)
    start_again()
    assert peer.store.versions() == []
    held(2)
    start_again()
    assert [version.version for version in peer.store.versions()] == [2]


@pytest.mark.covers("P10", "D10")
def test_all_settings_that_a_plan_is_made_of_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"algorithm.name": "fedavg", "swarm.enabled": True, "disk.state_dir": tmp_path, **SETTINGS}
    plan = plan_of(Settings.build(given), build(), None)
    settings = Settings.build(given | {"async.enabled": True, "async.staleness_weight": "inverse_sqrt"})
    groups, asked = {kind: group for group, kind in GROUPS.items()}, set[str]()

    def noted(self: Group, name: str) -> object:
        asked.add(f"{groups.get(type(self))}.{name}")
        return object.__getattribute__(self, name)

    monkeypatch.setattr(Group, "__getattribute__", noted)
    Plan.make(settings, plan.split)
    monkeypatch.undo()
    of_this_machine = {"run.threads", "disk.state_dir"}
    refused = {"aggregation.aggregator", "aggregation.download_codec", "model.ranks", "diloco.dynamic_local_steps"}
    algorithm = {key for key in FIELDS if key.startswith("algorithm.")}
    assert asked & FIELDS.keys() <= {*PLACED, *algorithm, *of_this_machine, *refused}
    assert asked & {"rounds.sites", "diloco.num_fragments", "aggregation.reducer"}
    assert placed_settings(settings).keys() == set(PLACED)
