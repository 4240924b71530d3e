"""`atoll verify`: every file of a state directory against its journal, and the kept rounds computed again."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import sqlite3
from collections.abc import Callable
from contextlib import closing
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit import ForkedServer, ForkedSite, copy_folder
from kit.damage import flip_bit
from kit.halfway import ask_journal
from kit.models import SITES
from kit.processes import command
from kit.world import World

from atoll.errors import StateCorrupt, StoreError
from atoll.json_files import chain_hash
from atoll.server.verify_state import Verified, verify_state
from atoll.store import journal_tables

MOMENTUM = {"algorithm.outer_optimizer": {"name": "sgd", "lr": 0.7, "momentum": 0.9}}
KEPT = {"algorithm": "fedavg", "disk.keep_updates": 2, "network.part_bytes": 2**16, **MOMENTUM}


def run_world(folder: Path, rounds: int = 4, **settings: Any) -> Path:
    """A run with updates of two sites with different weights; its state directory."""
    model = {"w": torch.linspace(-1, 1, 6 * 4096).reshape(6, 4096), "b": torch.ones(5)}
    with World(folder, model, {"a": 1.0, "b": 3.0}, rounds=rounds, **KEPT | settings) as world:
        for number in range(1, rounds + 1):
            world.rounds(lambda site, k, state: {n: v + k * ord(site) for n, v in state.items()}, number)
        world.finish()
    return folder / "state"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_world(tmp_path_factory.mktemp("verified"))


@pytest.fixture
def state(finished: Path, tmp_path: Path) -> Path:
    return copy_folder(finished, tmp_path / "state")


def results(found: Verified) -> dict[int, str]:
    """Version → whether it was computed again, and to which result."""
    return {each.version: each.result for each in found.rounds}


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(folder.rglob("*")) if path.is_file()
    }


def test_kept_rounds_are_computed_again_to_their_digests(state: Path, atoll_command) -> None:
    """`atoll verify` makes the versions of the kept rounds again, gets their digests, and changes no file.

    Two rounds are kept (disk.keep_updates = 2): those of versions 3 and 4, with version 2, from which 3 was made.
    """
    before = contents(state)
    outcome = atoll_command("verify", "state", "--json")
    found = json.loads(outcome.stdout)
    assert outcome.returncode == 0
    assert contents(state) == before
    digests = dict(ask_journal(state.parent, "SELECT version, digest FROM history"))
    assert [(each["version"], each["result"], each["digest"], each["updates"]) for each in found["rounds"]] == [
        (2, "not computed", digests[2], 0),
        (3, "same", digests[3], 2),
        (4, "same", digests[4], 2),
    ]
    assert (found["changed"], found["unchecked"]) == ([], [])
    assert len(list((state / "updates").iterdir())) == 4
    said = atoll_command("verify", "state").stdout
    assert "round 4, version 4: computed again from 2 updates, the same digest\n" in said
    assert f"the last hash is {found['last_hash']}" in said


def version_file(state: Path, version: int, kind: str = "version") -> Path:
    column = "slot" if kind == "version" else "state_slot"
    ((slot,),) = ask_journal(state.parent, f"SELECT {column} FROM versions WHERE version = {version}")
    return state / "slots" / f"{kind}-0-{slot}.safetensors"


def update_file(state: Path, version: int) -> Path:
    (ticket, *_) = ask_journal(state.parent, f"SELECT ticket FROM tickets WHERE version = {version}")[0]
    return state / "updates" / f"update-0-{ticket}.bin"


@pytest.mark.covers("F41")
@pytest.mark.parametrize(
    ("file", "offset", "words", "exact"),
    [
        pytest.param(lambda s: version_file(s, 4), -1, "part 1 of version 4", True, id="a value of the newest version"),
        pytest.param(lambda s: version_file(s, 4), 9, "part 0 of version 4", True, id="a header"),
        pytest.param(lambda s: version_file(s, 2), -1, "part 1 of version 2", False, id="a base"),
        pytest.param(lambda s: version_file(s, 4, "state"), -9, "outer state of version 4", True, id="an outer state"),
        pytest.param(lambda s: update_file(s, 4), 100, "part 0 of the update of", False, id="an update"),
    ],
)
def test_a_changed_byte_is_named_with_its_file(
    state: Path, atoll_command, file: Callable[[Path], Path], offset: int, words: str, exact: bool
) -> None:
    """A flipped bit ends `atoll verify` with exit code 7. It names file, part and tensors, and exactly the byte where
    the round can be computed again.
    """
    path = file(state)
    flip_bit(path, offset)
    outcome = atoll_command("verify", "state", "--json")
    assert outcome.returncode == StateCorrupt.exit_code
    (changed,) = json.loads(outcome.stdout)["changed"]
    at, start = offset % path.stat().st_size, changed["offset"]
    assert changed["file"] == str(path.relative_to(state))
    assert words in changed["what"]
    assert start <= at < start + changed["nbytes"] or "state" in words  # a column of the state has several ranges
    assert (changed["tensors"] != []) == (changed["part"] is not None)
    assert changed["spans"] == ([[at, 1]] if exact else [])
    assert "1 change, 0 rounds with another result" in outcome.stderr


@pytest.mark.covers("F41")
def test_a_changed_byte_anywhere_is_noticed(state: Path) -> None:
    """Whichever byte of a version, an outer state or an update changes, its file is named."""
    chance = random.Random(35)
    for path in [*(state / "slots").iterdir(), *(state / "updates").iterdir()]:
        for offset in {0, path.stat().st_size - 1, chance.randrange(path.stat().st_size)}:
            flip_bit(path, offset, 3)
            found = verify_state(state)
            assert {each.file for each in found.changed} == {str(path.relative_to(state))}, offset
            flip_bit(path, offset, 3)
    assert verify_state(state).changed == []


@pytest.mark.covers("F41")
def test_missing_and_cut_files_are_named(state: Path) -> None:
    """A file that is missing, or has another size, is named, and the rounds that need it are not computed."""
    version_file(state, 3).unlink()
    os.truncate(update_file(state, 4), 100)
    found = verify_state(state)
    assert sorted(each.what for each in found.changed)[1] == "version 3 is missing"
    assert "has 100 bytes, not" in str(found.changed)
    assert results(found) == {2: "not computed", 3: "same", 4: "not computed"}


@pytest.mark.covers("F41")
@pytest.mark.parametrize(
    ("table", "column", "value"),
    [("tickets", "norm", 2.5), ("versions", "digest", "0" * 64), ("members", "host", "'other'"), ("audit", "at", "''")],
)
def test_every_changed_row_is_named(state: Path, table: str, column: str, value: object) -> None:
    """Rows of the journal that were changed past the server are named."""
    with closing(sqlite3.connect(state / "journal.sqlite")) as db, db:
        db.execute(f"UPDATE {table} SET {column} = {value!r} WHERE rowid = (SELECT max(rowid) FROM {table})")
    found = [each.what for each in verify_state(state).changed if each.file == "journal.sqlite"]
    assert any(text.startswith(f"{table} (") or "audit log" in text for text in found), found


def rewrite_weight(state: Path, version: int, weight: float) -> None:
    """Change the weight of an update with all that belongs to it: row, checksum, audit log and its chain."""
    with closing(sqlite3.connect(state / "journal.sqlite", isolation_level=None)) as db:
        db.execute("BEGIN")
        journal_tables.write_checksums(db)
        select = f"SELECT ticket, report FROM tickets WHERE version = {version}"
        ticket, report = db.execute(select).fetchone()
        changed = json.dumps(json.loads(report) | {"weight": weight}, separators=(",", ":"))
        db.execute("UPDATE tickets SET report = ? WHERE ticket = ?", (changed, ticket))
        previous = "0" * 64
        for seq, at, what, detail in db.execute("SELECT seq, at, what, detail_json FROM audit ORDER BY seq").fetchall():
            values = json.loads(detail)
            if what == "accepted" and values["ticket"] == ticket:
                detail = json.dumps(values | {"weight": weight}, sort_keys=True)
            digest = chain_hash(seq, at, what, detail, previous)
            db.execute(
                "UPDATE audit SET detail_json = ?, prev_hash = ?, hash = ? WHERE seq = ?",
                (detail, previous, digest, seq),
            )
            previous = digest
        db.execute("COMMIT")
    (state / "audit.head").unlink()


def test_a_rewritten_weight_changes_the_result(state: Path, atoll_command) -> None:
    """A rewritten weight is noticed when its round is computed again, even if all checksums and the audit log match."""
    rewrite_weight(state, 4, 2.0)
    outcome = atoll_command("verify", "state", "--json")
    found = json.loads(outcome.stdout)
    assert found["changed"] == []
    assert [each["result"] for each in found["rounds"]] == ["not computed", "same", "differs"]
    assert "version" in found["rounds"][-1]["why"]
    assert outcome.returncode == StateCorrupt.exit_code
    assert "1 round with another result" in outcome.stderr


def test_a_weight_that_no_round_can_have_is_another_result(state: Path, atoll_command) -> None:
    """A rewritten weight of 0 ends no check: its round has another result, and the rest is reported as well."""
    rewrite_weight(state, 4, 0.0)
    flip_bit(version_file(state, 2), -1)
    outcome = atoll_command("verify", "state", "--json")
    found = json.loads(outcome.stdout)
    assert [each["result"] for each in found["rounds"]] == ["not computed", "not computed", "differs"]
    assert "weight: Input should be greater than 0" in found["rounds"][-1]["why"]
    assert "part 1 of version 2" in found["changed"][0]["what"]
    assert outcome.returncode == StateCorrupt.exit_code


def test_another_result_names_the_versions_that_made_the_round(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another Atoll made the round, that is named beside torch and the CPU: its defaults may have been others."""
    rewrite_weight(state, 4, 2.0)
    assert "which may be why" not in verify_state(state).rounds[-1].why
    made_by = metadata.version("atoll")
    monkeypatch.setattr("atoll.server.recorded_rules.version", lambda package: "99.0")
    assert f"it was made by atoll {made_by} with torch {torch.__version__}" in verify_state(state).rounds[-1].why


@pytest.mark.parametrize("deleted", [True, False], ids=["the server deletes it", "it is still kept"])
@pytest.mark.parametrize("what", ["the base", "an update"])
def test_a_file_that_changes_during_its_round(state: Path, what: str, deleted: bool) -> None:
    """A file that the server deletes or reuses while its round is computed is left out. If its row still says that it
    is kept, its round has another result. What was found before is still reported.
    """
    path = version_file(state, 3) if what == "the base" else update_file(state, 4)
    rows = "versions WHERE version = 3" if what == "the base" else f"parts WHERE ticket = {path.stem.split('-')[-1]}"
    flip_bit(version_file(state, 2), -1)

    def tell(doing: str) -> None:
        if doing == "the round of version 4":
            path.unlink() if what == "an update" else path.write_bytes(bytes(path.stat().st_size))
            if deleted:
                with closing(sqlite3.connect(state / "journal.sqlite")) as db, db:
                    journal_tables.write_checksums(db)
                    db.execute(f"DELETE FROM {rows}")

    found = verify_state(state, tell)
    assert [each.what for each in found.changed] == ["part 1 of version 2"]
    assert results(found).get(4) == (None if deleted else "differs")


def test_files_are_not_kept_open(tmp_path: Path) -> None:
    """The number of files in a run may be larger than the number of files that the process may open."""
    state = run_world(tmp_path, 9, **{"disk.keep_updates": 9})
    assert len([*state.glob("slots/*"), *state.glob("updates/*")]) > 30
    limits, used = resource.getrlimit(resource.RLIMIT_NOFILE), set(map(int, os.listdir("/proc/self/fd")))
    free = [number for number in range(len(used) + 20) if number not in used]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[19], limits[1]))
    try:
        found = verify_state(state)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (found.changed, set(results(found).values())) == ([], {"same"})


def test_too_many_open_files_are_no_damage(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may open no more files says so; it does not call the run damaged."""

    def refuse(path: Path, **options: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr("atoll.server.verify_state.open_own", refuse)
    with pytest.raises(StoreError, match="Too many open files") as caught:
        verify_state(state)
    assert not isinstance(caught.value, StateCorrupt)
    assert "ulimit -n" in caught.value.remedy


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"}, id="codecs"),
        pytest.param(
            {"aggregation.reducer.name": "median", "algorithm.outer_optimizer": {"name": "adam"}}, id="median"
        ),
        pytest.param(
            {"rounds.changes": [{"from_round": 4, "algorithm": {"outer_optimizer": {"lr": 0.1}}}]}, id="another rate"
        ),
    ],
)
def test_rounds_of_many_kinds_are_computed_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Codecs in both directions, other reducers and optimizers, and changes within the run: the same digests."""
    found = verify_state(run_world(tmp_path, **settings))
    assert (found.changed, results(found)) == ([], {2: "not computed", 3: "same", 4: "same"})


def test_code_of_a_run_is_not_loaded(tmp_path: Path) -> None:
    """The rounds of a run with code of its own are not computed: a state directory never makes Atoll load code."""
    found = verify_state(run_world(tmp_path, **{"aggregation.reducer": {"path": "atoll.reducers.means:WeightedMean"}}))
    assert set(results(found).values()) == {"not computed"}
    assert all("atoll.reducers.means:WeightedMean" in each.why for each in found.rounds[1:])
    assert found.changed == []


def test_updates_are_deleted_without_the_setting(tmp_path: Path) -> None:
    """By default, updates are deleted with their round. A start without the setting deletes those that are kept."""
    world = World(tmp_path, {"w": torch.zeros(3)}, "ab", rounds=3, **KEPT)
    with world:
        world.rounds(1.0, 1)
        world.wait(1)
        assert len(list((tmp_path / "state" / "updates").iterdir())) == 2
        world.restart(**{"disk.keep_updates": 0})
        world.rounds(1.0, 2)
        world.wait(2)
        assert list((tmp_path / "state" / "updates").iterdir()) == []
        assert results(verify_state(tmp_path / "state"))[2] == "not computed"


@pytest.mark.covers("F12")
def test_a_kill_between_keeping_and_commit_loses_nothing(nursery: Nursery, tmp_path: Path) -> None:
    """A server that is killed after it has kept a round's updates, and before the version counts, goes on.

    All rounds can be computed again, and no other update is kept.
    """
    settings = {"model.source": "kit_model:wide_model", "disk.keep_updates": 9}
    script = Path(__file__).parents[1] / "faults" / "fault_site.py"
    with ForkedServer(nursery, tmp_path, ("head.before=kill@2", ""), **settings) as server:
        sites = [ForkedSite(nursery, tmp_path, server.url, site, script).start(LOOP="federated") for site in SITES]
        assert [site.wait(60) for site in sites] == [0, 0]
        assert server.process.wait() == 0
    assert server.process.deaths == 1
    found = verify_state(tmp_path / "state")
    assert (found.changed, results(found)) == ([], {1: "same", 2: "same", 3: "same"})
    assert len(list((tmp_path / "state" / "updates").iterdir())) == 6


def test_verify_reads_while_a_server_runs(nursery: Nursery, tmp_path: Path) -> None:
    """While a server makes versions and deletes old ones, `atoll verify` reports no fault."""
    model = {"w": torch.zeros(2**16)}
    with World(tmp_path, model, "ab", rounds=30, **KEPT) as world:
        for number in range(1, 31):
            world.rounds(1.0, number)
            if number % 10 == 5:
                assert command(nursery, tmp_path, "verify", "state").returncode == 0
        assert verify_state(tmp_path / "state").changed == []
        world.finish()
