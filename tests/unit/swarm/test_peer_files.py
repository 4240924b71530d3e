"""What a worker of a swarm pulls from another, which may have something else than it says; and where it is kept."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit import SETTINGS
from kit.models import wide_model

from atoll import Settings
from atoll.aggregation.plan import Plan
from atoll.blobs.manifest import Manifest, state_id
from atoll.errors import Gone, PartCorrupt, StoreError
from atoll.posix import write_at
from atoll.protocol import messages
from atoll.protocol.swarm_messages import Collect, Hold, Source, SwarmPlan
from atoll.server.startup import plan_of
from atoll.store.file_slots import SPOOL, STATE, VERSION, FileShape, Slot, region_digest
from atoll.tensors.layout import Layout, Part
from atoll.transport import object_server
from atoll.transport.http_client import Http
from atoll.transport.object_server import LocalBlob, ObjectHost
from atoll.transport.part_transfer import HttpTransfer
from atoll.worker.peer.agent import plan_of as plan_of_worker
from atoll.worker.peer.peer_store import PeerStore
from atoll.worker.peer.peer_transfers import PeerServer, PeerTransfers, Version

pytestmark = pytest.mark.covers("P10")

SWARM = SETTINGS | {"swarm.enabled": True, "rounds.sites": 3}


class Peer:
    """One worker: its files, what it serves, and what it pulls."""

    def __init__(self, folder: Path) -> None:
        self.plan: Plan = plan_of(Settings.build(SWARM | {"disk.state_dir": folder}), wide_model(), None)
        self.planned, self.folder, self.moved = self.plan.fragments[0], folder, 0
        folder.mkdir()
        self.http = Http("http://127.0.0.1:1")  # of the server, of which nothing is asked here
        self.host = ObjectHost(
            "127.0.0.1", 0, name=None, tls_cert=None, tls_key=None, insecure=False, idle_timeout_s=10.0, folder=None
        )
        self.server = PeerServer(self.host, self.http.counters, None)
        self.transfers = PeerTransfers(self.plan, self.http, self.server, 10.0, self._move)
        self.open()

    def open(self) -> None:
        self.store = PeerStore(self.plan, self.folder, "run", self.server)

    def start_again(self) -> None:
        self.store.close()
        self.open()

    def _move(self, count: int) -> None:
        self.moved += count

    def close(self) -> None:
        for each in (self.store, self.host, self.http):
            each.close()

    def slot(self, kind: str) -> Slot:
        with self.store.new_slots(0, kind) as (slot,):
            assert slot is not None
        return slot

    def filled(self, kind: str, shape: FileShape | None) -> Slot:
        """A file with bytes of its own."""
        assert shape is not None
        slot = self.slot(kind)
        write_at(slot.fd, os.urandom(shape.nbytes), 0)
        write_at(slot.fd, shape.header, 0)
        return slot

    def version(self, number: int = 1, *, with_state: bool = True) -> Version:
        """A version of bytes of its own, which is not kept yet."""
        shapes, layout = self.planned.shapes(), self.planned.version
        slot, state = self.filled(VERSION, shapes.version), self.filled(STATE, shapes.state) if with_state else None
        digests = digests_of(slot, layout)
        regions = shapes.state.regions if shapes.state and state else ()
        states = tuple(region_digest(state.fd, region) for region in regions) if state else ()
        return Version(0, number, layout.blob_id(digests), slot, state, digests, states)

    def serve(self, version: Version) -> Source:
        source = self.store.served(version).source
        assert source is not None
        return source

    def pull(self, version: Version, *sources: Source) -> Version:
        digest = state_id(version.state_digests)
        hold = Hold(fragment=0, version=1, digest=version.digest, state_digest=digest, sources=list(sources))
        return self.transfers.version(hold, self.slot(VERSION), self.slot(STATE) if version.state else None)

    def update(self) -> tuple[Slot, tuple[bytes, ...], str]:
        """An encoded update, the digests of its parts, and its own."""
        slot, layout = self.slot(SPOOL), self.planned.update
        for part in layout.parts:
            write_at(slot.fd, bytes(range(256)) * (part.nbytes // 256), part.start)
        digests = digests_of(slot, layout)
        return slot, digests, layout.blob_id(digests)


def digests_of(slot: Slot, layout: Layout) -> tuple[bytes, ...]:
    return tuple(region_digest(slot.fd, ((part.start, part.nbytes),)) for part in layout.parts)


def collect(digest: str, source: object) -> Collect:
    return Collect(ticket=1, fragment=0, site="b", digest=digest, source=str(source))


@pytest.fixture
def theirs(tmp_path: Path) -> Iterator[Peer]:
    with contextlib.closing(Peer(tmp_path / "theirs")) as peer:
        yield peer


@pytest.fixture
def mine(tmp_path: Path, theirs: Peer) -> Iterator[Peer]:
    """Knows the worker `theirs`."""
    with contextlib.closing(Peer(tmp_path / "mine")) as peer:
        peer.server.learn([theirs.server.address])
        yield peer


@pytest.mark.covers("D10")
def test_an_initial_model_must_match_its_digest(mine: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker refuses an initial model with parts that do not belong to its digest.

    The server names the announced digest and lists the parts of another file.
    """
    wanted, other = mine.version(0, with_state=False), mine.version(0, with_state=False)
    digests = [digest.hex() for digest in other.part_digests]
    listed = messages.VersionManifest(version=0, digest=wanted.digest, part_digests=digests)
    monkeypatch.setattr(Http, "get", lambda *_: listed)
    monkeypatch.setattr(HttpTransfer, "pull", lambda *_, **__: None)  # as if the parts of that file arrived
    hold = Hold(fragment=0, version=0, digest=wanted.digest, state_digest="", sources=[])
    with pytest.raises(PartCorrupt, match="version 0 is not the expected one"):
        mine.transfers.version(hold, mine.slot(VERSION), None)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("damage", ["version", "state", "cut otherwise"])
def test_wrong_bytes_are_requested_from_another_worker(mine: Peer, theirs: Peer, damage: str) -> None:
    """If a worker sends wrong bytes of a version or its outer state, the version is downloaded from the next worker."""
    wanted, other = theirs.version(), theirs.version()
    honest = theirs.serve(wanted)
    lies = {
        "version": lambda: theirs.serve(replace(wanted, slot=other.slot, part_digests=other.part_digests)),
        "state": lambda: theirs.serve(replace(wanted, state=other.state)),
        "cut otherwise": lambda: honest.model_copy(update={"state": honest.version}),
    }[damage]()
    with pytest.raises(PartCorrupt):
        mine.pull(wanted, lies)
    got = mine.pull(wanted, lies, honest)
    assert got.slot.path.read_bytes() == wanted.slot.path.read_bytes()
    assert got.state_parts == theirs.store.served(wanted).state_parts
    assert replace(got, slot=wanted.slot, state=wanted.state, state_parts=()) == wanted


@pytest.mark.covers("D10")
def test_an_update_with_wrong_bytes_is_refused(mine: Peer, theirs: Peer) -> None:
    """An aggregator refuses an update with bytes that do not belong to its digest, whatever the manifest of the source
    says.
    """
    slot, digests, digest = theirs.update()
    layout = theirs.planned.update
    ref = theirs.server.serve(slot.fd, Manifest.of_layout(layout, digests))
    target = mine.slot(SPOOL)
    mine.transfers.update(collect(digest, ref), target)
    assert digests_of(target, layout) == digests
    write_at(slot.fd, b"\1" * 4, layout.parts[0].start)
    other = theirs.server.serve(slot.fd, Manifest.of_layout(layout, digests_of(slot, layout)))
    for source in (other, ref):  # honest about other bytes, and not
        with pytest.raises(PartCorrupt):
            mine.transfers.update(collect(digest, source), mine.slot(SPOOL))


def test_an_aggregator_checks_its_own_update(mine: Peer) -> None:
    """The aggregator reads its own update from its file, without the network, and notices damage."""
    layout, (outbox, digests, digest) = mine.planned.update, mine.update()
    ref = mine.server.serve(outbox.fd, Manifest.of_layout(layout, digests))
    own, target = collect(digest, ref), mine.slot(SPOOL)
    mine.transfers.update(own, target)
    assert digests_of(target, layout) == digests
    assert mine.moved == sum(part.nbytes for part in layout.parts)
    assert (mine.http.counters.bytes_up, mine.http.counters.bytes_down, mine.server.served) == (0, 0, 0)
    write_at(outbox.fd, b"damaged", layout.parts[0].start)
    with pytest.raises(PartCorrupt, match="which this process serves, is damaged"):
        mine.transfers.update(own, target)
    mine.server.withdraw(ref)
    with pytest.raises(Gone):
        mine.transfers.update(own, target)


@pytest.mark.parametrize("when", ["between parts", "within a part"])
def test_a_withdrawn_file_is_reported_as_gone(mine: Peer, when: str) -> None:
    """If a worker's own file is withdrawn and rewritten while it is read, the error is `Gone`, and no part is reported
    as damaged.
    """
    version, layout, read = mine.version(with_state=False), mine.planned.version, list[int]()
    ref = mine.server.serve(version.slot.fd, Manifest.of_layout(layout, version.part_digests))

    def rewrite() -> None:
        mine.server.withdraw(ref)
        write_at(version.slot.fd, bytes(layout.nbytes), 0)

    def on_bytes(nbytes: int) -> None:
        if when == "within a part":
            rewrite()

    def on_part(part: Part) -> None:
        read.append(part.index)
        rewrite()

    parts = sorted(layout.parts, key=lambda part: -part.nbytes)
    with mine.server.connected(str(ref), 10.0) as (_, transfer):
        assert isinstance(transfer, LocalBlob)
        with pytest.raises(Gone, match="This process no longer serves"):
            transfer.pull("it", version.part_digests, parts, [], on_bytes=on_bytes, on_part=on_part)
    assert len(read) == (1 if when == "between parts" else 0)


@pytest.mark.covers("D10")
@pytest.mark.parametrize("how", ["cut", "unreadable"])
def test_another_worker_supplies_an_unreadable_file(
    mine: Peer, theirs: Peer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """If a worker cannot read its own file of a version, it downloads the version from another worker."""
    version, theirs_slot = mine.version(with_state=False), theirs.slot(VERSION)
    whole = version.slot.path.read_bytes()
    write_at(theirs_slot.fd, whole, 0)
    own, other = mine.serve(version), theirs.serve(replace(version, slot=theirs_slot))
    if how == "cut":
        os.ftruncate(version.slot.fd, 10)
    else:

        def broken(fd: int, memory: memoryview, offset: int) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        monkeypatch.setattr(object_server, "read_at", broken)
    assert mine.pull(version, own, other).slot.path.read_bytes() == whole


def test_a_worker_uses_its_own_file_first(mine: Peer, theirs: Peer) -> None:
    """If several workers hold a version, a worker that holds it too uses its own file first."""
    version = theirs.version(with_state=False)
    others = [theirs.serve(version).version for _ in range(3)]
    own = mine.serve(version).version
    ordered = mine.server.in_order([*others, own])
    assert ordered[0] == own
    assert sorted(ordered) == sorted([*others, own])


def test_a_version_without_its_note_is_not_kept(mine: Peer) -> None:
    """If the note of a version cannot be written, the worker does not keep the version."""
    # The folder is gone, so no note can be written. The files of the version stay with the caller.
    kept, version = mine.version(0, with_state=False), mine.version(with_state=False)
    mine.store.put(kept)
    shutil.rmtree(mine.folder)
    with pytest.raises(StoreError):
        mine.store.put(version)
    assert mine.store.get(0, 1) is None
    assert version.slot.holds.total() == 1  # the caller's, which gives it back
    mine.store.drop(kept)
    assert mine.store.get(0, 0) is None
    assert kept.slot.free
    mine.slot(VERSION)  # the free one
    with pytest.raises(StoreError, match=r"version-0-\d\.safetensors cannot be used \(No such file or directory\)"):
        mine.slot(VERSION)


@pytest.mark.covers("F41")
@pytest.mark.parametrize("damage", ["none", "version", "state", "header", "cut", "another"])
def test_a_restart_keeps_only_undamaged_versions(mine: Peer, damage: str) -> None:
    """After a restart, a worker keeps a version if its files are undamaged. Damaged files are removed."""
    version = mine.version()
    mine.store.put(replace(version, digest="0" * 64) if damage == "another" else version)
    mine.store.close()
    assert version.state is not None
    file, at = {"state": (version.state, -1), "header": (version.state, 9)}.get(damage, (version.slot, -1))
    content = bytearray(file.path.read_bytes())
    if damage in ("version", "state", "header"):
        content[at] ^= 1
    elif damage == "cut":
        del content[-10:]
    file.path.write_bytes(content)
    mine.open()
    found = mine.store.get(0, 1)
    assert (found is not None) == (damage == "none")
    assert file.path.exists() == (damage == "none")
    if found is not None:
        assert found.source is not None
        for name in ("digest", "part_digests", "state_digests"):
            assert getattr(found, name) == getattr(version, name)


@pytest.mark.covers("F41")
def test_a_damaged_version_does_not_harm_another(mine: Peer) -> None:
    """After a damaged version, another version can be kept over a restart.

    A restart removes the files of the damaged version, and the next version gets other files.
    """
    damaged = mine.version(1, with_state=False)
    mine.store.put(damaged)
    write_at(damaged.slot.fd, b"damaged", 5000)
    mine.start_again()
    assert mine.store.versions() == []
    mine.store.put(mine.version(2, with_state=False))
    mine.start_again()
    assert [version.version for version in mine.store.versions()] == [2]


@pytest.mark.covers("D10", "X8")
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"algorithm.name": "scaffold"},
        {"algorithm.name": "fedadam", "algorithm.outer_optimizer.betas": [0.8, 0.99]},
        {"algorithm.name": "fednova", "disk.in_files": False},
        {"aggregation.reducer": {"name": "trimmed_mean", "trim": 0.25}, "network.part_bytes": 2**17},
        {"aggregation.upload_codec": {"name": "topk", "density": 0.1}, "disk.keep_versions": 5},
        {"algorithm.name": "diloco", "algorithm.outer_lr_of": {"2.*": 0.5}, "diloco.num_fragments": 2},
        {"async.enabled": True, "async.momentum_every": 3, "async.sync_rounds_first": 2},
    ],
)
def test_a_worker_derives_the_servers_plan(tmp_path: Path, chosen: dict[str, Any]) -> None:
    """The server sends its plan as JSON. From this plan, a worker derives all values that decide the bits of a round,
    equal to those of the server.
    """
    plain = {key: value for key, value in SWARM.items() if not key.startswith("algorithm.")}
    named = plain | {"algorithm.name": "fedavg", "disk.state_dir": tmp_path} | chosen
    ours = plan_of(Settings.build(named), wide_model(), None)
    message = SwarmPlan.model_validate_json(ours.values.message().model_dump_json(exclude_defaults=True))
    theirs = plan_of_worker(message, ours.split)
    assert theirs.fragments == ours.fragments
    assert theirs.codecs.keys() == ours.codecs.keys()
    assert theirs.rule.describe() == ours.rule.describe()
    assert theirs.reducers == ours.reducers
    assert theirs.values.versions == ours.values.versions == named.get("disk.keep_versions", 2) + 4 + 2
    assert theirs.values.in_files is ours.settings.disk.in_files
