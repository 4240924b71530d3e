"""What a start finds after a kill at any place, and after damage to any file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from store_world import (
    SHAPES,
    accept,
    audited,
    begin,
    content,
    flip,
    freeze,
    kill_during,
    lose,
    new_run,
    read,
    reopen,
    run_round,
    send_part,
    send_parts,
    slot_files,
    state_content,
    submit,
    update_of,
    write_version,
)

from atoll.errors import ConfigError, StateCorrupt, StoreError
from atoll.store import audit_log
from atoll.store.file_slots import verify
from atoll.store.journal import Durability
from atoll.store.store import FileShape, Store


def path_of(store: Store, kind: str, version: int) -> Path:
    row = store.versions.get(0, version)
    number = row.slot if kind == "version" else row.state_slot
    return store.directory / "slots" / f"{kind}-0-{number}.safetensors"


def test_a_new_state_directory_is_empty(tmp_path: Path) -> None:
    """The store of a new directory has no versions, rounds, members or tickets, and its numbers start at 1."""
    store, _ = begin(tmp_path / "new" / "state")
    assert (store.versions.heads(), store.run_log.rounds(), store.run_log.members()) == ((), (), ())
    assert store.tickets.to_go_on() == ()
    assert (store.tickets.next_number(), store.run_log.next_lease(), store.run_log.finished) == (1, 1, False)
    assert not store.run_log.has_begun(0)


def test_a_restart_finds_everything_again(tmp_path: Path) -> None:
    """After a restart, the store has the version, the open round, the tickets and their received parts as before, and
    the round can go on.
    """
    store = new_run(tmp_path, 1)
    store.run_log.open_round(0, 1, ("a", "b"))
    submit(store, 3, "a", 1)
    store.tickets.issue(4, "b", 0, 1)
    send_part(store, 4, 1, update_of("b", 1))
    store, lost = reopen(store)
    assert store.versions.head().version == 1
    assert [(row.state, row.base_version, row.expected) for row in store.run_log.rounds()] == [("open", 1, ("a", "b"))]
    assert [(row.ticket, row.state) for row in store.tickets.to_go_on()] == [(3, "accepted"), (4, "open")]
    assert (store.tickets.next_number(), store.run_log.next_lease()) == (5, 3)
    assert store.run_log.has_begun(0)
    assert lost == ()
    assert list(store.tickets.parts(4)) == [1]  # only part 0 has to be sent
    send_part(store, 4, 0, update_of("b", 1))
    accept(store, 4)
    assert [read(store.tickets.spool(ticket).fd) for ticket in (3, 4)] == [update_of("a", 1), update_of("b", 1)]
    store.run_log.freeze(0, 1, (3, 4))
    assert write_version(store, 2, (3, 4)).version == 2


def test_no_ticket_number_is_given_again_after_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss, later tickets get numbers that no ticket can have had which the journal has lost."""
    # With `process`, a power loss may take the newest tickets, which sites still know. A kill takes none.
    monkeypatch.setattr(audit_log, "_BOOT_ID", tmp_path / "boot_id")
    boot = audit_log._BOOT_ID

    def next_number(directory: Path, durability: Durability = "process") -> int:
        store, _ = begin(directory, durability=durability)
        number = store.tickets.next_number()
        store.close()
        return number

    boot.write_text("first")
    new_run(tmp_path / "run", 1).close()  # tickets 1 and 2
    assert next_number(tmp_path / "run") == 3
    boot.write_text("second")
    assert next_number(tmp_path / "run") == 10**9 + 1
    assert next_number(tmp_path / "run") == 10**9 + 1  # another start, after a kill
    boot.write_text("third")
    assert next_number(tmp_path / "run") == 2 * 10**9 + 1  # the tickets after the first loss may be lost, too
    (tmp_path / "run" / audit_log.NAME).unlink()  # so it is not known whether power was lost
    assert next_number(tmp_path / "run", "power") == 3 * 10**9 + 1
    boot.write_text("fourth")
    assert next_number(tmp_path / "run", "power") == 3 * 10**9 + 1  # each ticket was on the disk before its answer


def test_the_journal_knows_which_sites_sit_out_a_round(tmp_path: Path) -> None:
    """A site sits out the round that is open when it says so, whatever version its ticket starts from, until it gets
    another ticket or the round ends.
    """
    store = new_run(tmp_path)
    store.tickets.issue(3, "b", 0, 0)
    freeze(store, 0, {1: "a"})
    write_version(store, 1, [1])
    assert store.tickets.sitting_out(0) == ()
    with store.journal.transaction():
        store.tickets.sit_out(3, {})  # of version 0, in the round from version 1
    store, _ = reopen(store)
    assert [row.ticket for row in store.tickets.sitting_out(0)] == [3]
    store.tickets.issue(4, "b", 0, 1)
    assert store.tickets.sitting_out(0) == ()
    with store.journal.transaction():
        store.tickets.sit_out(4, {})
    assert [row.ticket for row in store.tickets.sitting_out(0)] == [4]
    freeze(store, 1, {5: "a"})
    write_version(store, 2, [5])
    assert store.tickets.sitting_out(0) == ()


@pytest.mark.covers("D4")
def test_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """A start removes the slots that a killed process has left and that no row refers to."""
    # Other files stay. The process was killed while it wrote version 1. Its draft and the spare slots are removed.
    kill_during(tmp_path, "head.before=kill@2", "run_round(new_run(directory), 0)")
    assert "version-0-1.safetensors" in slot_files(tmp_path)
    (tmp_path / "slots" / "spool-0-77.bin").write_bytes(b"left")
    (tmp_path / "slots" / "notes.txt").write_text("not ours")
    begin(tmp_path)
    assert slot_files(tmp_path) == ["notes.txt", "spool-0-0.bin", "spool-0-1.bin", "version-0-0.safetensors"]


@pytest.mark.covers("F41")
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "header", "state"])
def test_a_damaged_head_falls_back(tmp_path: Path, damage: str) -> None:
    """If the newest version is damaged, the run continues from the version before. The updates of the lost version
    expire.
    """
    store = new_run(tmp_path, 2)
    store.versions.write_durable()
    store.run_log.open_round(0, 2, ("a", "b"))
    submit(store, 5, "a", 2)
    path = path_of(store, "state" if damage == "state" else "version", 2)
    epoch = store.run_log.epoch
    store.close()
    match damage:
        case "truncate":
            os.truncate(path, 39)
        case "remove":
            path.unlink()
        case _:
            flip(path, 0 if damage == "header" else 10)
    store, lost = begin(tmp_path)
    assert store.versions.head().version == 1
    # Tickets 3 and 4 went into version 2, ticket 5 was based on it.
    assert lost[0].startswith("Version 2 was lost; the run continues from version 1: 3 updates")
    assert [store.tickets.get(ticket).state for ticket in (1, 2, 3, 4, 5)] == ["counted"] * 2 + ["expired"] * 3
    assert "was lost" in store.tickets.get(3).reason
    assert store.run_log.rounds() == ()
    assert store.run_log.has_begun(0)
    assert store.run_log.epoch == epoch + 2  # the start, and the fall back
    assert [row.version for row in store.run_log.history()] == [0, 1]
    assert [member.rounds_counted for member in store.run_log.members()] == [1, 1]
    assert audited(store)[-1].what == "fell back"
    assert (read(store.versions.pin(0, 1).fd), read(store.versions.state_file())) == (content(1), state_content(1))
    freeze(store, 1, {6: "a", 7: "b"})
    with pytest.raises(StoreError, match=r"Version 2 cannot be made: the newest version is 1, and the next one is 3\."):
        store.versions.begin(0, 2)
    assert write_version(store, 3, (6, 7)).version == 3


@pytest.mark.covers("F41")
def test_a_lost_versions_number_is_not_reused(tmp_path: Path) -> None:
    """The number of a lost version is not used again, so that no site confuses two versions."""
    # Versions 2 and 3 are lost, one after the other. The run has versions 0, 1 and 4, and keeps 1 and 4 as its newest
    # two. Guards against ranges of numbers such as `head − 1` and `head − keep_versions`, which are wrong where numbers
    # are missing.
    store = new_run(tmp_path, 1)
    for lost in (2, 3):
        freeze(store, 1, {10 * lost: "a", 10 * lost + 1: "b"})
        write_version(store, lost, (10 * lost, 10 * lost + 1))
        store, _ = lose(store, lost)
        assert (store.versions.head().version, store.run_log.lost_versions()) == (1, ())
    assert (store.versions.next_number(), store.run_log.lost_versions()) == (4, ())  # both are above the head
    freeze(store, 1, {41: "a", 42: "b"})
    write_version(store, 4, (41, 42))
    assert [(row.version, row.state_slot is not None) for row in store.versions.kept()] == [(1, True), (4, True)]
    store.versions.pin(0, 1).release()
    assert [row.version for row in store.versions.kept()] == [1, 4]
    store, lost = reopen(store)
    assert (store.versions.head().version, store.run_log.lost_versions()) == (4, (2, 3))
    assert [row.version for row in store.run_log.history()] == [0, 1, 4]
    assert store.versions.next_number() == 5


@pytest.mark.covers("F41")
def test_a_slots_header_is_verified(tmp_path: Path) -> None:
    """The header of a slot is verified, although no digest covers it."""
    path = tmp_path / "slot"
    path.write_bytes(b"header--data")
    shape = FileShape(12, b"header--", (((8, 4),),))
    with path.open("rb") as file:
        assert verify(file.fileno(), shape, (blake3(b"data").digest(),))
    flip(path, 2)
    with path.open("rb") as file:
        assert not verify(file.fileno(), shape, (blake3(b"data").digest(),))


@pytest.mark.covers("F41")
def test_a_run_without_intact_version_is_refused(tmp_path: Path) -> None:
    """If all versions of a run are damaged, the start is refused and removes no file. The error says to restore a
    backup.
    """
    store = new_run(tmp_path, 1)
    for version in (0, 1):
        flip(path_of(store, "version", version), 12)
    store.close()
    before = slot_files(tmp_path)
    for _ in range(2):
        with pytest.raises(StateCorrupt, match=r"All versions .* 1, 0\. Restore the whole directory from a backup"):
            begin(tmp_path)
    assert slot_files(tmp_path) == before


@pytest.mark.covers("F13")
def test_recovering_again_changes_nothing(tmp_path: Path) -> None:
    """A second recovery finds what the first one found, both without and after another start."""
    store = new_run(tmp_path)
    run_round(store, 0, commit=False)
    store, one = reopen(store)
    assert store.recover() == one
    store, two = reopen(store)
    assert one == two


@pytest.mark.covers("F41")
def test_a_damaged_part_is_sent_again(tmp_path: Path) -> None:
    """If a part of an open ticket is damaged on disk, a restart says so, and the site has to send this part again."""
    store = new_run(tmp_path)
    send_parts(store, 1, "a", 0)
    path = store.tickets.spool(1).slot.path
    flip(path, 18)  # part 1 begins at byte 16
    store, lost = reopen(store)
    assert list(store.tickets.parts(1)) == [0]
    assert lost == ("Parts [1] of ticket 1 of a were damaged; they are sent again.",)


@pytest.mark.covers("F41")
@pytest.mark.parametrize("damage", ["flip", "remove"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_damaged_accepted_update_expires(tmp_path: Path, damage: str, frozen: bool) -> None:
    """If an accepted update is damaged or gone, a restart lets its ticket expire and opens its round again. The site
    can submit another update.
    """
    store = new_run(tmp_path)
    store.run_log.open_round(0, 0, ("a", "b"))
    submit(store, 1, "a", 0)
    submit(store, 2, "b", 0)
    if frozen:
        store.run_log.freeze(0, 0, (1, 2))
    path = store.tickets.spool(2).slot.path
    store.close()
    if damage == "flip":
        flip(path, 3)
    else:
        path.unlink()
    store, lost = begin(tmp_path)
    (warning,) = lost
    assert warning.startswith("Ticket 2 of b has expired: its update was damaged")
    assert [(row.ticket, row.state) for row in store.tickets.to_go_on()] == [(1, "accepted"), (2, "expired")]
    assert [(row.state, row.expected, row.tickets) for row in store.run_log.rounds()] == [("open", ("a", "b"), ())]
    assert not path.exists()
    submit(store, 3, "b", 0)
    store.run_log.freeze(0, 0, (1, 3))
    write_version(store, 1, (1, 3))


def test_a_ticket_without_its_file_starts_again(tmp_path: Path) -> None:
    """If the file of an open ticket is gone, a restart keeps the ticket, and the site sends its parts from the first
    one.
    """
    store = new_run(tmp_path)
    store.tickets.issue(1, "a", 0, 0)
    store.tickets.spool(1).begin_part(0).write(b"half")
    path = store.tickets.spool(1).slot.path
    path.unlink()
    store, lost = reopen(store)
    assert (store.tickets.to_go_on()[0].slot, lost) == (None, ())
    send_part(store, 1, 0, update_of("a", 0))


@pytest.mark.parametrize(
    ("shapes", "complaint"),
    [
        (replace(SHAPES, update_bytes=23), "'spool': 24 bytes. With these settings: 23 bytes"),
        (replace(SHAPES, state=None), "'state': 20 bytes. With these settings: no file"),
        (replace(SHAPES, version=FileShape(40, b"other:::", SHAPES.version.regions)), "40 bytes, but other tensors"),
    ],
)
def test_files_of_another_model_are_refused(tmp_path: Path, shapes: object, complaint: str) -> None:
    """If the files of a state directory do not fit the sizes and tensors of the current model, the start is refused."""
    new_run(tmp_path).close()
    store = Store(tmp_path)
    with pytest.raises(ConfigError, match=f"started with another model.*{complaint}.*another disk.state_dir"):
        store.slots.shape([shapes])
