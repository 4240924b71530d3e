"""What goes down in place of a version: there with it, gone with it, and never needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3
from store_world import (
    SHAPES,
    WITH_DELTA,
    begin,
    content,
    delta_content,
    digests,
    first,
    flip,
    freeze,
    play_round,
    read,
    slot_files,
    state_content,
    write_version,
)

from atoll.errors import ConfigError, Gone, UsageError
from atoll.store.store import Store
from atoll.store.versions import VersionDigests


def played(directory: Path, rounds: int = 0) -> Store:
    store = first(directory, shapes=WITH_DELTA)
    for base in range(rounds):
        play_round(store, base)
    return store


def test_it_is_there_with_its_version_and_names_its_base(tmp_path: Path) -> None:
    with played(tmp_path, rounds=1) as store:
        assert store.versions.delta(0, 0) is None  # the first version has no base
        row = store.versions.delta(0, 1)
        assert row is not None
        assert (row.base_version, row.base_digest) == (0, blake3(content(0)).hexdigest())
        pin = store.versions.pin_delta(0, 1)
        assert read(pin.fd) == delta_content(1)
        pin.release()
        pin.release()
        with pytest.raises(Gone, match="Version 0 of fragment 0 has no difference"):
            store.versions.pin_delta(0, 0)
    assert store.slots.holds() == {}


def test_it_goes_with_its_version_unless_it_is_being_read(tmp_path: Path) -> None:
    """With keep_versions = 2: version 1 is dropped by version 3, once nobody reads what goes down of it."""
    with played(tmp_path, rounds=2) as store:
        store.versions.write_durable(0)
        pin = store.versions.pin_delta(0, 1)
        play_round(store, 2)
        store.versions.write_durable(0)
        play_round(store, 3)
        store.versions.write_durable(0)
        assert [version for version in range(5) if store.versions.delta(0, version)] == [1, 3, 4]
        assert read(pin.fd) == delta_content(1)
        pin.release()
        assert store.versions.delta(0, 1) is None
        names = [name for name in store.slots.holds() if name.startswith("delta")]
        play_round(store, 4)
        assert [name for name in store.slots.holds() if name.startswith("delta")] == names  # the slot is written again


def test_a_damaged_one_is_forgotten_at_a_start_and_its_version_stays(tmp_path: Path) -> None:
    with played(tmp_path, rounds=2) as store:
        row = store.versions.delta(0, 2)
        assert row is not None
    flip(tmp_path / "slots" / f"delta-0-{row.slot}.bin", 9)
    with begin(tmp_path, WITH_DELTA)[0] as store:
        assert store.versions.head().version == 2
        assert store.versions.delta(0, 1) is not None
        assert store.versions.delta(0, 2) is None
        assert f"delta-0-{row.slot}.bin" not in slot_files(tmp_path)
        play_round(store, 2)
        found = store.versions.delta(0, 3)
        assert found is not None
        assert found.base_version == 2


def test_one_of_a_version_that_was_lost_is_gone_with_it(tmp_path: Path) -> None:
    with played(tmp_path, rounds=2) as store:
        slot = store.versions.head().slot
    flip(tmp_path / "slots" / f"version-0-{slot}.safetensors", 30)
    with begin(tmp_path, WITH_DELTA)[0] as store:
        assert store.versions.head().version == 1
        assert store.versions.delta(0, 2) is None
        freeze(store, 1, {11: "a", 12: "b"})
        write_version(store, 3, (11, 12))
        found = store.versions.delta(0, 3)  # over the number that was lost
        assert found is not None
        assert (found.base_version, found.base_digest) == (1, blake3(content(1)).hexdigest())


def test_its_digests_are_needed_and_the_run_keeps_its_way_down(tmp_path: Path) -> None:
    with played(tmp_path) as store:
        draft = store.versions.begin(0, 1)
        with pytest.raises(UsageError, match="Version 1 was given the wrong number of digests"):
            store.versions.commit(
                draft,
                VersionDigests(
                    digest="00" * 32,
                    part_digests=digests(content(1), SHAPES.version),
                    state_digests=digests(state_content(1), SHAPES.state),
                ),
            )
        draft.abandon()
    with Store(tmp_path) as store, pytest.raises(ConfigError, match="its delta files of fragment 0 have 12 bytes"):
        store.slots.shape([SHAPES])
