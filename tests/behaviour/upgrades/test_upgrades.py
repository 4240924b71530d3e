"""State directories and workers of earlier commits, at today's server. `record.py` has made what is in `recorded/`."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import old_run
import pytest
from conversation import load, replayed, require_readable
from harness.processes import Nursery
from kit.processes import command
from record import COMMITS, RECORDED, checked_out, environment

import atoll
from atoll.errors import BadRequest, StateCorrupt, StoreError, VersionSkew
from atoll.protocol import messages, routes
from atoll.protocol.openapi import OPERATIONS, openapi
from atoll.protocol.served_versions import in_protocol, protocol_of, since_of
from atoll.store.journal import JOURNAL
from atoll.store.journal_tables import SCHEMA_VERSION
from atoll.store.migrations import back_up
from atoll.store.reader import checked_audit, open_state
from atoll.store.store import Store
from atoll.testing.run import failpoints, serve

VERSIONS = sorted(COMMITS.values())
OLD = [version for version in VERSIONS if version < SCHEMA_VERSION]
DIGESTS = json.loads((RECORDED / "digests.json").read_text())
HERE = Path(__file__).parent


def unpacked(version: int, folder: Path) -> Path:
    """Return a copy of the state directory that a server with this version of the journal has left."""
    with tarfile.open(RECORDED / f"state-{version}.tar.xz") as tar:
        tar.extractall(folder, filter="data")
    return folder / "state"


def version_of(journal: Path) -> int:
    with closing(sqlite3.connect(journal)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


def rows(journal: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(journal)) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {name: sorted(map(repr, db.execute(f"SELECT * FROM {name}"))) for name in names}


# -- state directories


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_goes_on_to_the_same_bits_after_an_upgrade(version: int, tmp_path: Path) -> None:
    """A run whose server and sites of an earlier version were killed goes on to the model of an undisturbed run."""
    unpacked(version, tmp_path)
    assert old_run.run(tmp_path, {}) == DIGESTS[str(version)]
    assert version_of(tmp_path / "state" / JOURNAL) == SCHEMA_VERSION
    checked_audit(tmp_path / "state", 1)


@pytest.mark.parametrize("version", OLD)
def test_the_old_journal_is_kept_before_it_is_migrated(version: int, tmp_path: Path, caplog) -> None:
    """Before a journal is migrated, it is copied: with its old version and rows, for its owner alone. The log names the
    copy.
    """
    state = unpacked(version, tmp_path)
    before = rows(state / JOURNAL)
    with caplog.at_level(logging.INFO, "atoll.server"):
        Store(state).close()
    backup = state / f"journal.version-{version}.sqlite"
    assert (version_of(backup), rows(backup)) == (version, before)
    assert backup.stat().st_mode & 0o777 == 0o600
    assert f"was of journal version {version}, and is of version {SCHEMA_VERSION} now" in caplog.text
    assert f"it is kept as {backup}" in caplog.text
    assert not list(state.glob("*.partial"))
    after = rows(state / JOURNAL)
    # the directory is from another machine, where power may have been lost: its start skips numbers of tickets
    after["counters"].remove("('skipped ticket numbers', 1000000000)")
    assert {name: after[name] for name in before if name != "meta"} | {"meta": 0} == before | {"meta": 0}


def test_a_journal_of_today_is_not_copied(tmp_path: Path) -> None:
    """No backup is written where nothing is migrated."""
    state = unpacked(VERSIONS[-1], tmp_path)
    Store(state).close()
    for copy in state.glob("*version-*"):
        copy.unlink()
    Store(state).close()
    assert not list(state.glob("*version-*"))


@pytest.mark.parametrize("place", ["journal.backup", "journal.migrate"])
def test_a_killed_migration_leaves_the_old_journal(place: str, tmp_path: Path) -> None:
    """After SIGKILL at any step, the journal is of the old version with its rows, and the next start migrates it."""
    state = unpacked(11, tmp_path)
    before = rows(state / JOURNAL)
    code = f"from atoll.store.store import Store; Store(__import__('pathlib').Path({str(state)!r}))"
    ended = subprocess.run([sys.executable, "-c", code], env=environment(HERE) | {"ATOLL_FAILPOINTS": f"{place}=kill"})
    assert ended.returncode == -signal.SIGKILL
    assert (version_of(state / JOURNAL), rows(state / JOURNAL)) == (11, before)
    Store(state).close()
    assert version_of(state / JOURNAL) == SCHEMA_VERSION
    assert rows(state / "journal.version-11.sqlite") == before


@pytest.mark.parametrize("place", ["journal.backup", "journal.migrate"])
def test_a_full_disk_leaves_the_old_journal(place: str, tmp_path: Path) -> None:
    """If the disk is full, the start is refused, and nothing has changed."""
    state = unpacked(12, tmp_path)
    before = rows(state / JOURNAL)
    with failpoints(f"{place}=enospc"), pytest.raises(atoll.AtollError, match="full"):
        Store(state)
    assert (version_of(state / JOURNAL), rows(state / JOURNAL)) == (12, before)


def test_a_copy_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """A full disk leaves no part of the copy; any other error of the disk names the file."""
    state = unpacked(12, tmp_path)
    with failpoints("journal.backup=enospc"), pytest.raises(atoll.AtollError, match="full"):
        Store(state)
    assert not list(state.glob("*.partial"))

    def fails(_: int, __: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with (
        closing(sqlite3.connect(state / JOURNAL)) as db,
        pytest.raises(StoreError, match=r"12\.sqlite\.partial cannot"),
    ):
        back_up(db, state / JOURNAL, 12, fails)
    assert not list(state.glob("*version-*"))


def test_pause_of_an_old_run_says_that_it_is_migrated(nursery: Nursery, tmp_path: Path) -> None:
    """A command that writes into an old directory says so, and where the old journal is."""
    unpacked(12, tmp_path)
    ended = command(nursery, tmp_path, "pause", "--dir", "state")
    assert "paused from the next start" in ended.stdout, ended.stderr
    assert f"was of journal version 12, and is of version {SCHEMA_VERSION} now" in ended.stderr
    assert "kept as state/journal.version-12.sqlite" in ended.stderr


@pytest.mark.parametrize("damage", ["UPDATE meta SET epoch = 77", "DROP INDEX one_ticket", "DROP TABLE shapes"])
def test_a_damaged_journal_is_not_migrated(damage: str, tmp_path: Path) -> None:
    """A changed row or table of an old journal is refused, as in one of today: it gets no new checksum."""
    state = unpacked(11, tmp_path)
    with closing(sqlite3.connect(state / JOURNAL)) as db, db:
        db.execute(damage)
    with pytest.raises(StateCorrupt, match="does not match its checksum"):
        Store(state)
    assert version_of(state / JOURNAL) == 11


@pytest.mark.parametrize("version", OLD)
def test_commands_read_an_old_directory_and_leave_it_so(version: int, tmp_path: Path) -> None:
    """Commands that read a state directory migrate a copy, which ends with them."""
    state = unpacked(version, tmp_path)
    before = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    with open_state(state) as reader:
        reader.require_unchanged()
        assert [row.version for row in reader.heads()] == [2]
    after = {path: path.read_bytes() for path in state.rglob("*") if path.is_file()}
    assert {path: data for path, data in after.items() if not path.name.endswith("-shm")} == {
        path: data for path, data in before.items() if not path.name.endswith("-shm")
    }


@pytest.mark.parametrize(
    ("version", "remedy"),
    [(99, "A newer Atoll wrote it. Upgrade Atoll here; nothing was changed."), (10, "Start its server once with an")],
)
def test_a_journal_out_of_reach_names_the_versions(version: int, remedy: str, tmp_path: Path) -> None:
    """A journal that is too new or too old is refused with its version, those that are read, and the remedy."""
    state = unpacked(13, tmp_path)
    with closing(sqlite3.connect(state / JOURNAL)) as db:
        db.execute(f"PRAGMA user_version = {version}")
    before = rows(state / JOURNAL)
    with pytest.raises(StateCorrupt) as caught:
        Store(state)
    reads = f"has journal version {version}, but this Atoll reads versions 11 to {SCHEMA_VERSION}. {remedy}"
    assert reads in str(caught.value)
    assert rows(state / JOURNAL) == before


# -- workers


@pytest.mark.covers("F32")
@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_worker_reads_every_answer(version: int, tmp_path: Path) -> None:
    """The recorded requests of a worker get the same statuses, and answers without a field that it does not know."""
    exchanges, document = load(RECORDED / f"wire-{version}.json.xz")
    names = set()
    with serve(old_run.build(), tmp_path / "state", old_run.SETTINGS | old_run.ALONE) as server:
        for exchange, status, message in replayed(exchanges, server.url):
            assert status == exchange.status, (exchange.method, exchange.path, message)
            require_readable(exchange, status, message, document)
            names.add(f"{exchange.method} {exchange.path}")
            if exchange.path == routes.TICKETS:
                assert message["status"] == exchange.message["status"]
            if exchange.path == routes.RUN:
                assert message["protocol"] == exchange.message["protocol"]
        server.run()
    assert {"GET /v1/run", "POST /v1/workers", "POST /v1/tickets", "POST /v1/workers/leave"} < names


@pytest.mark.long
@pytest.mark.covers("F32")
@pytest.mark.parametrize("commit", COMMITS)
def test_workers_of_a_recorded_commit_take_part(commit: str, tmp_path: Path) -> None:
    """Workers of an earlier commit train with today's server, and the result has the bits recorded at that commit."""
    if shutil.which("git") is None or subprocess.run(["git", "cat-file", "-e", commit], cwd=HERE).returncode:
        pytest.skip("needs the history of the repository")
    src = checked_out(commit, tmp_path / "old")
    with serve(old_run.build(), tmp_path / "state", old_run.SETTINGS) as server:
        script = str(HERE / "old_run.py")
        workers = [
            subprocess.Popen([sys.executable, script, "site", str(tmp_path), server.url, name], env=environment(src))
            for name in old_run.WEIGHTS
        ]
        assert [each.wait(60) for each in workers] == [0, 0]
        server.run()
    assert old_run.result(tmp_path) == DIGESTS[str(COMMITS[commit])]


OF_SITES = [each for each in OPERATIONS if "site" in each.callers and "reader" not in each.callers]
RUN = next(each for each in OPERATIONS if each.name == "get_run")


def kinds_in(schemas: dict[str, Any], schema: Any, found: set[str]) -> set[str]:
    """Return the names of the messages in a schema, and in those."""
    for ref in {text.rpartition("/")[2] for text in _refs(schema)} - found:
        found.add(ref)
        kinds_in(schemas, schemas[ref], found)
    return found


def _refs(value: Any) -> list[str]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    own = [value["$ref"]] if isinstance(value, dict) and "$ref" in value else []
    return own + [ref for each in inner for ref in _refs(each)]


@pytest.mark.covers("F32")
def test_messages_only_grow_and_mark_what_is_new() -> None:
    """Since protocol 1, answers have lost no field, each new one is marked, and requests need nothing new.

    If this fails for a field that you have added to an answer: mark it with `json_schema_extra=since(routes.PROTOCOL)`.
    """
    _, old = load(RECORDED / "wire-12.json.xz")
    now, before = openapi("")["components"]["schemas"], old["components"]["schemas"]
    paths = {each["operationId"]: each for path in old["paths"].values() for each in path.values()}
    answers, requests = set[str](), set[str]()
    for operation in OF_SITES:
        if operation.name in paths:
            kinds_in(before, paths[operation.name]["responses"], answers)
            kinds_in(before, paths[operation.name].get("requestBody", {}), requests)
    assert {"TicketReply", "Outcome", "RunInfo"} < answers
    assert {"Join", "Complete"} < requests
    for kind in answers:
        new = now[kind].get("properties", {})
        known = before[kind].get("properties", {})
        assert {name for name in known if name in before[kind].get("required", [])} <= {*new}, kind
        unmarked = {name for name in new if name not in known and since_of(new[name]) < 2}
        assert not unmarked, f"{kind}: {unmarked}"
    for kind in requests:
        assert {*before[kind].get("properties", {})} <= {*now[kind].get("properties", {})}, kind
        assert {*now[kind].get("required", [])} <= {*before[kind].get("required", [])}, kind


@pytest.mark.covers("F32")
def test_an_answer_leaves_out_what_its_worker_does_not_know() -> None:
    """Fields that came later are left out for a worker of protocol 1, also in messages within messages."""
    outcome = messages.Outcome(ticket=1, state="accepted", base_version=0)
    state = messages.TicketState(outcome=outcome, parts=[], part_digests=[])
    assert b"receipt" in in_protocol(state, 2)
    assert b"receipt" not in in_protocol(state, 1)
    for operation in OF_SITES:  # every answer has an older form
        if isinstance(operation.reply, type) and issubclass(operation.reply, messages.Message):
            in_protocol(operation.reply.model_construct(protocol=2), 1)


@pytest.mark.covers("F32")
def test_a_request_is_answered_in_the_protocol_of_its_sender() -> None:
    """Without the header, a site is of protocol 1; a newer one than the server's gets the server's."""
    status = next(each for each in OPERATIONS if each.name == "get_status")
    assert [protocol_of(RUN, header) for header in (None, "1", "2", "3")] == [1, 1, 2, 2]
    assert protocol_of(status, None) == routes.PROTOCOL
    for header in ("", "x", "-1", "1" * 10, "²"):
        with pytest.raises(BadRequest, match="which is no protocol"):
            protocol_of(RUN, header)


@pytest.mark.covers("F32")
def test_a_worker_that_is_too_old_has_to_upgrade(tmp_path: Path, monkeypatch) -> None:
    """A server that no longer serves a worker's protocol says so at the first request, and names the remedy."""
    with serve(old_run.build(), tmp_path / "state", old_run.SETTINGS) as server:
        monkeypatch.setattr(routes, "OLDEST_PROTOCOL", 2)
        monkeypatch.setattr("atoll.transport.http_client._PROTOCOL", {})  # as workers of protocol 1
        with pytest.raises(VersionSkew) as caught:
            atoll.join(server.url, site="a", folder=tmp_path)
    assert "This worker uses protocol 1, but this server serves protocols 2 to 2." in str(caught.value)
    assert "Upgrade Atoll at the worker." in str(caught.value)


@pytest.mark.covers("F32")
@pytest.mark.parametrize(("protocol", "side"), [(0, "worker a"), (3, "the server")])
def test_a_join_in_another_protocol_names_the_side_to_upgrade(protocol: int, side: str, tmp_path: Path) -> None:
    """If a site joins with a protocol that the server does not serve, the error says which side to upgrade."""
    from atoll.transport.http_client import Http

    with serve(old_run.build(), tmp_path / "state", old_run.SETTINGS) as server:
        with pytest.raises(VersionSkew) as caught:
            Http(server.url).post(routes.WORKERS, messages.Join(protocol=protocol, site="a"), messages.Joined)
    assert f"Worker a uses protocol {protocol}, but this server serves protocols 1 to 2." in str(caught.value)
    assert f"Upgrade Atoll at {side}." in str(caught.value)
