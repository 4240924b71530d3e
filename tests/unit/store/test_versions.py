"""Versions: the commit, pins, what is durable, exports, and the difference that a site pulls in place of a version."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from blake3 import blake3
from store_world import (
    HEADER,
    SHAPES,
    WITH_DELTA,
    begin,
    content,
    delta_content,
    digests,
    export,
    flip,
    freeze,
    kill_during,
    lose,
    new_run,
    read,
    reopen,
    run_round,
    run_rounds,
    slot_files,
    state_content,
    submit,
    write_version,
)

from atoll.errors import ConfigError, DiskFull, Gone, StoreError, SyncFailed, UsageError
from atoll.store.file_slots import PULL, VERSION, WRITER, FileShape, SlotPool
from atoll.store.journal import Journal
from atoll.store.store import Files, Store
from atoll.store.versions import VersionDigests


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the system was asked to bring to disk, in order: kinds of slots, and folders."""
    asked, fsync = list[str](), os.fsync

    def noted(fd: int) -> None:
        fsync(fd)
        asked.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name.partition("-")[0])

    monkeypatch.setattr(os, "fsync", noted)
    return asked


def test_a_commit_moves_the_head(store: Store) -> None:
    """A commit makes its version the newest one, counts its tickets, and frees their spools."""
    assert (store.versions.state_file(), store.versions.head().state_slot) == (None, None)  # of version 0
    run_round(store, 0)
    head = store.versions.head()
    assert (head.version, head.digest) == (1, blake3(content(1)).hexdigest())
    assert read(store.versions.state_file()) == state_content(1)
    assert [(store.tickets.get(t).state, store.tickets.get(t).version, store.tickets.get(t).slot) for t in (1, 2)] == [
        ("counted", 1, None)
    ] * 2
    assert store.run_log.rounds() == ()
    assert [member.rounds_counted for member in store.run_log.members()] == [1, 1]
    assert [held for name, held in store.slots.holds().items() if name.startswith("spool")] == [{}, {}]
    assert [row.version for row in store.run_log.history()] == [0, 1]
    assert (store.run_log.totals().versions, store.run_log.totals().counted, store.run_log.totals().bytes) == (2, 2, 48)


def test_a_version_is_invisible_before_its_commit(store: Store) -> None:
    """Nothing can be seen of a version before its commit, and an abandoned one frees its file."""
    # Nothing of a draft can be seen; an abandoned draft frees its slot.
    tickets = run_round(store, 0, commit=False)
    draft = store.versions.begin(0, 1)
    os.pwrite(draft.slot.fd, content(1), 0)
    assert store.versions.head().version == 0
    with pytest.raises(Gone, match=r"Version 1 does not exist\. The newest version is 0"):
        store.versions.get(0, 1)
    draft.abandon()
    draft.abandon()
    assert store.slots.holds()["version-0-1.safetensors"] == {}
    write_version(store, 1, tickets)


@pytest.mark.parametrize("version", [0, 2])
def test_only_the_next_version_can_begin(store: Store, version: int) -> None:
    """The store refuses to write any version other than the next one."""
    with pytest.raises(StoreError, match="the newest version is 0, and the next one is 1"):
        store.versions.begin(0, version)


@pytest.mark.covers("F25")
@pytest.mark.parametrize("nth", [1, 2])
def test_a_full_disk_leaves_no_incomplete_slot(store: Store, arm: Callable[[str], object], nth: int) -> None:
    """If the disk is full while a slot is created, its file does not stay, and the version can be written later."""
    # The first new slot is for the version, the second for the outer state.
    run_round(store, 0)
    tickets = run_round(store, 1, commit=False)
    before = slot_files(store.directory)
    arm(f"slot.create=enospc@{nth}")
    with pytest.raises(DiskFull):
        write_version(store, 2, tickets)
    held = [name for name, holders in store.slots.holds().items() if "writer" in holders]
    assert held == []
    assert set(before) <= set(slot_files(store.directory))
    assert len(slot_files(store.directory)) == len(before) + nth - 1
    assert write_version(store, 2, tickets).version == 2


def test_a_slots_space_is_allocated_before_writing(tmp_path: Path) -> None:
    """A slot gets its disk space before it is written.

    So a full disk is found before anything is lost, and not in the middle of an update or a version.
    """
    pool = SlotPool(tmp_path, VERSION, 0, FileShape(2**20, HEADER, ()), threading.RLock())
    slot = pool.take(WRITER)
    assert os.fstat(slot.fd).st_size == 2**20
    assert os.fstat(slot.fd).st_blocks * 512 >= 2**20
    pool.close()


def test_old_versions_are_dropped(store: Store) -> None:
    """Old versions are dropped, and their files are written again. The error for a dropped version has the number of
    the newest version.
    """
    run_rounds(store, range(4), durable=True)
    assert [row.version for row in store.versions.kept()] == [3, 4]
    with pytest.raises(Gone, match=r"Version 1 .* The newest version is 4"):
        store.versions.pin(0, 1)
    inodes = {path: path.stat().st_ino for path in store.slots.folder.iterdir()}
    run_rounds(store, range(4, 10), durable=True)
    assert {path: path.stat().st_ino for path in store.slots.folder.iterdir()} == inodes


def test_a_slow_reader_never_sees_another_version(tmp_path: Path) -> None:
    """A slow reader sees only the version that it began to read, even long after the server would have deleted it."""
    store = new_run(tmp_path, 1, keep_versions=1, max_pins=2)
    pin = store.versions.pin(0, 1)
    seen = b""
    for base in range(1, 31):
        run_rounds(store, [base], durable=True)
        seen += os.pread(pin.fd, 1, len(seen))
    assert seen == content(1)[:30]
    assert not pin.revoked.is_set()
    with store.versions.pin(0, 1) as another:  # a resumed pull finds it as long as it is read
        assert read(another.fd) == content(1)
    pin.release()
    pin.release()
    with pytest.raises(Gone, match="Version 1 is no longer kept"):
        store.versions.get(0, 1)


def test_the_oldest_pull_is_revoked(tmp_path: Path) -> None:
    """If downloads hold too many versions, that of the oldest version is cut off, and its file stays until it is
    released.
    """
    # One version is kept and two may be pinned. Versions 0, 1 and 2 are pinned and 3 is the newest, so version 4 needs
    # the place of version 0.
    store = new_run(tmp_path, keep_versions=1, max_pins=2)
    pins = []
    for base in range(3):
        pins.append(store.versions.pin(0, base))
        run_rounds(store, [base], durable=True)
    assert not any(pin.revoked.is_set() for pin in pins)
    run_round(store, 3)
    assert [pin.revoked.is_set() for pin in pins] == [True, False, False]
    with pytest.raises(Gone, match="The newest version is 4"):
        store.versions.pin(0, 0)
    assert read(pins[0].fd) == content(0)  # it still holds its bytes
    (slot,) = pins[0].slots
    pins[0].release()
    assert slot.free
    run_round(store, 4)  # version 1 has lost its outer state meanwhile
    assert [pin.revoked.is_set() for pin in pins] == [True, True, False]
    assert [read(pin.fd) for pin in pins[1:]] == [content(1), content(2)]


def test_a_cut_off_download_keeps_its_slot(tmp_path: Path) -> None:
    """If the server takes an old version away from a download, its file is not overwritten before the download has let
    it go.
    """
    store = new_run(tmp_path, keep_versions=1, max_pins=1)
    pin = store.versions.pin(0, 0)
    other = None
    for base in range(6):
        run_rounds(store, [base], durable=True)
        other = other or store.versions.pin(0, 1)
    assert pin.revoked.is_set()
    assert read(pin.fd) == content(0)
    (revoked,) = pin.slots
    pin.release()
    assert revoked.free
    run_rounds(store, range(6, 9))
    assert read(other.fd) == content(1)
    # Head, the held one and the one that was written last or comes next: keep 1 + pins 1 + 1.
    assert len([name for name in slot_files(tmp_path) if name.startswith("version")]) == 3


def test_a_pinned_version_stays_readable_after_closing(store: Store) -> None:
    """A pinned version can still be read after the store is closed."""
    pin = store.versions.pin(0, 0)
    store.close()
    assert read(pin.fd) == content(0)
    pin.release()


def test_the_newest_wanted_versions_are_kept(tmp_path: Path) -> None:
    """Of the versions that workers will still pull, the newest are kept."""
    # One version is kept and two may be pinned. At the last commit, version 4 is the newest and 3 is durable, so there
    # is room for one wanted version.
    store = new_run(tmp_path, keep_versions=1, max_pins=2)
    store.versions.wanted = lambda fragment: {0, 1, 2}
    run_rounds(store, range(4), durable=True)
    assert [row.version for row in store.versions.kept()] == [2, 4]


def test_outer_state_is_kept_for_two_versions(store: Store) -> None:
    """The outer state is kept for the newest version and the one before."""
    # Version 3 is still being read, but no run would go on from it, so its outer state is dropped.
    run_rounds(store, range(4), durable=True)
    with store.versions.pin(0, 3):
        run_round(store, 4)
        store.versions.write_durable()
        # Version 3 is being read, but nothing would ever go on from it.
        kept = [(row.version, row.state_slot is not None) for row in store.versions.kept()]
        assert kept == [(3, False), (4, True), (5, True)]
        with pytest.raises(Gone, match=r"cannot go back to version 3: .* It can go back to: 4\."):
            store.versions.require_whole(3)
    assert [row.version for row in store.versions.kept()] == [4, 5]


def test_a_version_to_go_back_to_is_kept(store: Store) -> None:
    """A version that the admin asked to go back to is kept, even if a newer one becomes durable before the server does
    it.
    """
    run_rounds(store, range(2), durable=True)
    run_rounds(store, [2, 3])
    store.versions.require_whole(2)
    store.run_log.ask_back_to(2)
    store.versions.write_durable()
    store.versions.require_whole(2)
    store.run_log.ask_back_to(None)
    run_round(store, 4)
    assert [row.version for row in store.versions.kept()] == [4, 5]


def test_a_durable_version_is_kept(store: Store) -> None:
    """The durable version is kept until a newer version is recorded as durable."""
    assert store.versions.durable() is None
    run_round(store, 0)
    assert store.versions.write_durable() == 1
    run_rounds(store, range(1, 5))
    assert [row.version for row in store.versions.kept()] == [1, 4, 5]
    assert store.versions.get(0, 1).state_slot is not None
    assert store.versions.write_durable() == 5
    assert [row.version for row in store.versions.kept()] == [4, 5]


def test_a_durable_version_is_synced_first(store: Store, synced: list[str]) -> None:
    """A version is recorded as durable after its files are synced. The journal is synced with this record."""
    run_round(store, 0)
    store.journal._db.set_trace_callback(
        lambda sql: (
            synced.append(" ".join(sql.split()[:4])) if "synchronous" in sql or "durable_version =" in sql else None
        )
    )
    store.versions.write_durable()
    store.journal._db.set_trace_callback(None)
    order = [each for each, before in zip(synced, ["", *synced], strict=False) if each != before]  # triggers repeat it
    assert order == [
        "version",
        "state",
        "slots",
        "PRAGMA synchronous = FULL",
        "UPDATE heads SET durable_version",
        "PRAGMA synchronous = NORMAL",
    ]


def test_a_durable_version_empties_the_log(store: Store, tmp_path: Path) -> None:
    """A durable version copies SQLite's write-ahead log into the journal once 1,000 rows have changed, not before."""
    # Without this, SQLite would copy 64 MB at once, in a commit on the event loop.

    def heads_without_log() -> list[tuple[int]]:
        alone = tmp_path / "alone.sqlite"
        shutil.copyfile(store.journal.path, alone)
        with contextlib.closing(sqlite3.connect(alone)) as db:
            return db.execute("SELECT version FROM heads").fetchall()

    store.journal.checkpoint()
    run_round(store, 0)
    store.versions.write_durable()
    assert heads_without_log() != [(1,)]
    with store.journal.transaction():
        store.journal.execute_many("UPDATE meta SET failed = ?", [("",)] * 1000)
    store.versions.write_durable()
    assert heads_without_log() == [(1,)]


@pytest.mark.covers("F26")
def test_a_failed_fsync_is_fatal(store: Store, arm: Callable[[str], object]) -> None:
    """After a failed fsync, the store refuses every further write and never tries the fsync again. A restart goes on
    with the newest version.
    """
    run_round(store, 0)
    arm("fsync=eio")
    with pytest.raises(SyncFailed, match="fsync of"):
        store.versions.write_durable()
    assert store.versions.durable() is None
    for action in (store.versions.write_durable, lambda: run_round(store, 1), store.run_log.finish):
        with pytest.raises(SyncFailed):
            action()
    store, _ = reopen(store)
    assert store.versions.head().version == 1  # the bytes were there after all, as their digests say


@pytest.mark.covers("F26")
def test_durability_power_syncs_first(tmp_path: Path, synced: list[str], arm: Callable[[str], object]) -> None:
    """With durability `power`, an update or a version is synced to disk before it is acknowledged. If an fsync fails,
    the update is not accepted.
    """
    with new_run(tmp_path, durability="power") as store:
        assert store.journal.value("PRAGMA synchronous") == 2  # FULL
        assert store.versions.durable() == 0
        store.run_log.open_round(0, 0, ("a",))
        synced.clear()
        submit(store, 1, "a", 0)
        assert synced == ["spool"] * 3 + ["slots"]  # each part, the whole before it is accepted, and its name
        store.run_log.freeze(0, 0, (1,))
        synced.clear()
        write_version(store, 1, (1,))
        assert synced == ["version", "state", "slots"]
        assert store.versions.durable() == 1
        store.run_log.open_round(0, 1, ("a",))
        arm("fsync=eio@3")
        with pytest.raises(SyncFailed):
            submit(store, 2, "a", 1)
        assert store.tickets.get(2).state == "open"


def test_an_export_is_a_separate_file(store: Store, tmp_path: Path) -> None:
    """An export is a separate file, which later versions do not change. If another export replaces it, an open reader
    keeps the old file.
    """
    run_round(store, 0)
    target = tmp_path / "out" / "model.safetensors"
    target.parent.mkdir()
    assert export(store, target) == target
    run_rounds(store, range(1, 5))
    assert target.read_bytes() == content(1)
    slot_inodes = {path.stat().st_ino for path in store.slots.folder.iterdir()}
    assert target.stat().st_ino not in slot_inodes
    with target.open("rb") as reader:
        before = target.stat().st_ino
        export(store, target)
        assert target.stat().st_ino != before
        assert reader.read() == content(1)  # a reader that had it open keeps what it had
    assert target.read_bytes() == content(5)
    assert list(target.parent.iterdir()) == [target]


def test_an_export_is_synced_before_its_renaming(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of an export is synced to disk before it gets its name."""
    target = tmp_path / "model"
    seen: list[tuple[str, bool]] = []
    monkeypatch.setattr(Journal, "sync", lambda self, fd, what: seen.append((Path(what).name, target.exists())))
    export(store, target)
    (file, named), folder = seen
    assert (file.startswith(".model."), named) == (True, False)
    assert folder == (tmp_path.name, True)


def test_an_export_has_header_and_chosen_bytes(store: Store, tmp_path: Path) -> None:
    """An export has its header and then the chosen ranges of a version and of its outer state, in order.

    The version is not the newest one, and one range comes twice.
    """

    def contents(files: Files) -> Iterator[memoryview]:
        ((version, state),) = files
        assert state is not None
        for fd, offset, nbytes in ((version, 8, 4), (version, 0, 8), (state, 6, 2), (version, 8, 4)):
            yield memoryview(os.pread(fd, nbytes, offset))

    run_round(store, 0)
    run_round(store, 1)
    target = store.export(tmp_path / "tied", (1,), b"tied:", contents, with_state=True)
    assert target.read_bytes() == b"tied:" + b"BBBB" + HEADER + b"bb" + b"BBBB"


@pytest.mark.covers("D4", "F25")
def test_a_failed_export_changes_nothing(store: Store, tmp_path: Path, arm: Callable[[str], object]) -> None:
    """If an export fails, the old file stays as it was, and there is no other file."""
    target = tmp_path / "out" / "model.safetensors"
    target.parent.mkdir()
    target.write_bytes(b"before")
    arm("export.write=enospc")
    with pytest.raises(DiskFull):
        export(store, target)
    assert list(target.parent.iterdir()) == [target]
    assert target.read_bytes() == b"before"


@pytest.mark.covers("D4")
def test_a_killed_export_is_removed(tmp_path: Path) -> None:
    """The next start removes the incomplete file of a killed export."""
    new_run(tmp_path / "state").close()
    (tmp_path / "out").mkdir()
    kill_during(
        tmp_path / "state", "export.write=kill", "export(begin(directory)[0], directory.parent / 'out' / 'model')"
    )
    assert len(list((tmp_path / "out").iterdir())) == 1
    begin(tmp_path / "state")[0].close()
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.covers("D4")
def test_a_finished_run_keeps_only_its_result(store: Store) -> None:
    """A finished run keeps only its journal, its last version and the outer state."""
    run_rounds(store, range(3))
    store.versions.write_durable()
    store.run_log.finish()
    store.close()
    names = [name.partition("-")[0] for name in slot_files(store.directory)]
    assert names == ["state", "version"]
    store, _ = begin(store.directory)
    assert (store.run_log.finished, store.versions.head().version) == (True, 3)


@pytest.mark.covers("F26")
def test_a_version_is_held_while_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A version is held while it is synced to disk, so that its slot is not rewritten."""
    # Two commits happen during the fsync, and one version is kept. Without a hold, its slot would be used again.
    store = new_run(tmp_path, 1, keep_versions=1)
    sync, rounds = Journal.sync, iter((1, 2))

    def slow(self: Journal, fd: int, what: str) -> None:
        run_rounds(store, rounds)
        sync(self, fd, what)

    monkeypatch.setattr(Journal, "sync", slow)
    assert store.versions.write_durable() == 1
    row = store.versions.get(0, 1)  # still there to fall back to
    assert row.state_slot is not None
    slot = store.slots.pool(VERSION, 0)[row.slot]
    assert slot.path.read_bytes() == content(1)
    assert PULL not in slot.holds


@pytest.mark.covers("F26")
def test_an_epoch_survives_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start syncs its new epoch to disk first, so that a power loss does not undo it."""
    order: list[str] = []
    transaction, sync = Journal.transaction, Journal.sync

    def noted(self: Journal, *, synced: bool = False):
        order.append(f"synced={synced}")
        return transaction(self, synced=synced)

    monkeypatch.setattr(Journal, "transaction", noted)
    monkeypatch.setattr(Journal, "sync", lambda self, fd, what: (order.append(what), sync(self, fd, what))[1])
    Store(tmp_path / "s").close()
    assert order[:2] == ["synced=True", str(tmp_path / "s")]


@pytest.mark.covers("F41")
def test_a_fall_back_lowers_the_durable_version(tmp_path: Path) -> None:
    """If the durable version is damaged, the run falls back to a version before, which then counts as durable and is
    kept.
    """
    store = new_run(tmp_path)
    run_rounds(store, (0, 1))
    assert store.versions.write_durable() == 2
    store, _ = lose(store, 2)
    assert store.versions.durable() == 1
    for base, version in ((1, 3), (3, 4)):
        freeze(store, base, {10 * version: "a"})
        write_version(store, version, (10 * version,))
    assert [row.version for row in store.versions.kept()] == [1, 3, 4]
    store, _ = lose(store, 3, 4)
    assert (store.versions.head().version, store.run_log.rounds()) == (1, ())
    assert reopen(store)[1] == ()  # nothing more is lost


@pytest.mark.covers("F27", "F41")
@pytest.mark.parametrize("durable", [False, True])
def test_a_finished_run_keeps_its_durable_version(tmp_path: Path, durable: bool) -> None:
    """A finished run drops its earlier durable version only if its last version is durable. If the last version is not
    durable, the run can fall back to the earlier one.
    """
    store = new_run(tmp_path, 1)
    store.versions.write_durable()
    run_rounds(store, (1, 2))
    if durable:
        store.versions.write_durable()
    store.run_log.finish()
    store, _ = reopen(store)
    assert [row.version for row in store.versions.kept()] == ([3] if durable else [1, 2, 3])
    if not durable:
        store, _ = lose(store, 2, 3)
        assert (store.versions.head().version, store.run_log.finished) == (1, False)


# -- differences


def test_a_difference_names_its_base(tmp_path: Path) -> None:
    """The difference of a version has the number and the digest of the version that it is based on. The first version
    has no difference.
    """
    with new_run(tmp_path, 1, shapes=WITH_DELTA) as store:
        assert store.versions.delta(0, 0) is None  # the first version has no base
        row = store.versions.delta(0, 1)
        assert (row.base_version, row.base_digest) == (0, blake3(content(0)).hexdigest())
        unread = store.slots.holds()
        pin = store.versions.pin_delta(0, 1)
        assert read(pin.fd) == delta_content(1)
        pin.release()
        pin.release()
        assert store.slots.holds() == unread
        with pytest.raises(Gone, match="Version 0 has no delta"):
            store.versions.pin_delta(0, 0)
    assert store.slots.holds() == {}


@pytest.mark.parametrize("opened", [0, 1])
def test_a_failed_pull_keeps_no_slot_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: int) -> None:
    """If a download lacks a file descriptor, it fails and leaves no slot in use."""
    # Such a pull needs two descriptors, one for the version and one for the difference.
    with new_run(tmp_path, 1, shapes=WITH_DELTA) as store:
        unread, dup, calls = store.slots.holds(), os.dup, itertools.count()

        def lacking(fd: int) -> int:
            if next(calls) == opened:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return dup(fd)

        monkeypatch.setattr(os, "dup", lacking)
        with pytest.raises(OSError, match="Too many open files"):
            store.versions.pin_delta(0, 1)
        assert store.slots.holds() == unread
        with store.versions.pin_delta(0, 1) as pin:
            assert read(pin.fd) == delta_content(1)


def test_a_difference_is_dropped_with_its_version(tmp_path: Path) -> None:
    """A difference is dropped with its version, unless it is being read."""
    # With `keep_versions` = 2, version 3 drops version 1 when the difference of version 1 is no longer read.
    with new_run(tmp_path, 2, shapes=WITH_DELTA) as store:
        store.versions.write_durable(0)
        pin = store.versions.pin_delta(0, 1)
        run_rounds(store, (2, 3), durable=True)
        assert [version for version in range(5) if store.versions.delta(0, version)] == [1, 3, 4]
        assert read(pin.fd) == delta_content(1)
        pin.release()
        assert store.versions.delta(0, 1) is None
        names = [name for name in store.slots.holds() if name.startswith("delta")]
        run_round(store, 4)
        assert [name for name in store.slots.holds() if name.startswith("delta")] == names  # the slot is written again


def test_a_damaged_difference_is_removed(tmp_path: Path) -> None:
    """If a difference is damaged, a start removes it and keeps its version. The next version has a difference again."""
    with new_run(tmp_path, 2, shapes=WITH_DELTA) as store:
        row = store.versions.delta(0, 2)
    flip(tmp_path / "slots" / f"delta-0-{row.slot}.bin", 9)
    with begin(tmp_path, WITH_DELTA)[0] as store:
        assert store.versions.head().version == 2
        assert store.versions.delta(0, 1) is not None
        assert store.versions.delta(0, 2) is None
        assert f"delta-0-{row.slot}.bin" not in slot_files(tmp_path)
        run_round(store, 2)
        found = store.versions.delta(0, 3)
        assert found.base_version == 2


def test_a_lost_versions_difference_is_removed(tmp_path: Path) -> None:
    """If a version is lost, its difference is removed too. The next difference is based on the version before the lost
    one.
    """
    with new_run(tmp_path, 2, shapes=WITH_DELTA) as store:
        slot = store.versions.head().slot
    flip(tmp_path / "slots" / f"version-0-{slot}.safetensors", 30)
    with begin(tmp_path, WITH_DELTA)[0] as store:
        assert store.versions.head().version == 1
        assert store.versions.delta(0, 2) is None
        freeze(store, 1, {11: "a", 12: "b"})
        write_version(store, 3, (11, 12))
        found = store.versions.delta(0, 3)  # over the number that was lost
        assert (found.base_version, found.base_digest) == (1, blake3(content(1)).hexdigest())


def test_differences_need_their_digests(tmp_path: Path) -> None:
    """In a run that sends differences, each version needs the digests of its difference. The run refuses to go on
    without differences.
    """
    with new_run(tmp_path, shapes=WITH_DELTA) as store:
        draft = store.versions.begin(0, 1)
        with pytest.raises(UsageError, match="The draft of version 1 got the wrong number of digests"):
            store.versions.finish(
                draft,
                VersionDigests(
                    digest="00" * 32,
                    part_digests=digests(content(1), SHAPES.version),
                    state_digests=digests(state_content(1), SHAPES.state),
                ),
            )
        draft.abandon()
    with Store(tmp_path) as store, pytest.raises(ConfigError, match="'delta': 12 bytes"):
        store.slots.shape([SHAPES])
