"""What goes down in place of a version: there with it, gone with it, and never needed."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3
from store_world import RUN, SHAPES, SITES, content, digests, flip, read, slot_files, state_content, submit

from atoll.errors import ConfigError, Gone, UsageError
from atoll.store.store import FileShape, Store

DELTA = FileShape(12, b"", (((0, 8),), ((8, 4),)))
BOTH = replace(SHAPES, delta=DELTA)


def delta_content(version: int) -> bytes:
    return bytes([48 + version]) * 12


def begin(directory: Path) -> Store:
    store = Store.open(directory)
    if store.run_log.run is None:
        store.run_log.create_run(RUN)
    store.slots.shape([BOTH])
    store.recover()
    return store


def commit(store: Store, version: int, tickets: tuple[int, ...] = ()) -> None:
    draft = store.versions.begin(0, version)
    os.pwrite(draft.version_fd, content(version), 0)
    assert draft.state_fd is not None
    assert SHAPES.state is not None
    os.pwrite(draft.state_fd, state_content(version), 0)
    if version:
        assert draft.delta_fd is not None
        os.pwrite(draft.delta_fd, delta_content(version), 0)
    store.versions.commit(
        draft,
        digest=blake3(content(version)).hexdigest(),
        part_digests=digests(content(version), SHAPES.version),
        state_digests=digests(state_content(version), SHAPES.state) if version else (),
        delta_digest=blake3(delta_content(version)).hexdigest(),
        delta_digests=digests(delta_content(version), DELTA) if version else (),
        tickets=tickets,
    )


def play(store: Store, base: int) -> None:
    tickets = (2 * base + 1, 2 * base + 2)
    store.run_log.open_round(0, base, SITES)
    for ticket, site in zip(tickets, SITES, strict=True):
        submit(store, ticket, site, base)
    store.run_log.freeze(0, base, tickets)
    commit(store, base + 1, tickets)


def first(directory: Path, rounds: int = 0) -> Store:
    store = begin(directory)
    for lease, site in enumerate(SITES, 1):
        store.run_log.put_member(site, lease)
    commit(store, 0)
    for base in range(rounds):
        play(store, base)
    return store


def test_it_is_there_with_its_version_and_names_its_base(tmp_path: Path) -> None:
    with first(tmp_path, rounds=1) as store:
        assert store.versions.delta(0, 0) is None  # the first version has no base
        row = store.versions.delta(0, 1)
        assert row is not None
        assert (row.base_version, row.base_digest) == (0, blake3(content(0)).hexdigest())
        pin = store.versions.pin_delta(0, 1)
        assert read(pin.fd) == delta_content(1)
        pin.release()
        pin.release()
        with pytest.raises(Gone, match="Version 0 of fragment 0 has no delta"):
            store.versions.pin_delta(0, 0)
    assert store.slots.holds() == {}


def test_it_goes_with_its_version_unless_it_is_being_read(tmp_path: Path) -> None:
    """With keep_versions = 2: version 1 is dropped by version 3, once nobody reads what goes down of it."""
    with first(tmp_path, rounds=2) as store:
        store.versions.write_durable(0)
        pin = store.versions.pin_delta(0, 1)
        play(store, 2)
        store.versions.write_durable(0)
        play(store, 3)
        store.versions.write_durable(0)
        assert [store.versions.delta(0, version) is not None for version in range(5)] == [
            False,
            True,
            False,
            True,
            True,
        ]
        assert read(pin.fd) == delta_content(1)
        pin.release()
        assert store.versions.delta(0, 1) is None
        names = [name for name in store.slots.holds() if name.startswith("delta")]
        play(store, 4)
        assert [name for name in store.slots.holds() if name.startswith("delta")] == names  # the slot is written again


def test_a_damaged_one_is_forgotten_at_a_start_and_its_version_stays(tmp_path: Path) -> None:
    with first(tmp_path, rounds=2) as store:
        row = store.versions.delta(0, 2)
        assert row is not None
    flip(tmp_path / "slots" / f"delta-0-{row.slot}.bin", 9)
    with begin(tmp_path) as store:
        assert store.versions.head().version == 2
        assert store.versions.delta(0, 1) is not None
        assert store.versions.delta(0, 2) is None
        assert f"delta-0-{row.slot}.bin" not in slot_files(tmp_path)
        play(store, 2)
        found = store.versions.delta(0, 3)
        assert found is not None
        assert found.base_version == 2


def test_one_of_a_version_that_was_lost_is_gone_with_it(tmp_path: Path) -> None:
    with first(tmp_path, rounds=2) as store:
        slot = store.versions.head().slot
    flip(tmp_path / "slots" / f"version-0-{slot}.safetensors", 30)
    with begin(tmp_path) as store:
        assert store.versions.head().version == 1
        assert store.versions.delta(0, 2) is None
        store.run_log.open_round(0, 1, SITES)
        for ticket, site in ((11, "a"), (12, "b")):
            submit(store, ticket, site, 1)
        store.run_log.freeze(0, 1, (11, 12))
        commit(store, 3, (11, 12))
        found = store.versions.delta(0, 3)  # over the number that was lost
        assert found is not None
        assert (found.base_version, found.base_digest) == (1, blake3(content(1)).hexdigest())


def test_its_digests_are_needed_and_the_run_keeps_its_way_down(tmp_path: Path) -> None:
    with first(tmp_path) as store:
        draft = store.versions.begin(0, 1)
        assert SHAPES.state is not None
        with pytest.raises(UsageError, match="Version 1 was given the wrong number of digests"):
            store.versions.commit(
                draft,
                digest="00" * 32,
                part_digests=digests(content(1), SHAPES.version),
                state_digests=digests(state_content(1), SHAPES.state),
            )
        draft.abandon()
    with Store.open(tmp_path) as store, pytest.raises(ConfigError, match="its delta files of fragment 0 have 12 bytes"):
        store.slots.shape([SHAPES])
