"""Bits of the journal that change on disk, and a journal that has lost its end: refused, never another model."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import typer
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, Gate, Halfway, ask_journal, copy_folder, exported, halfway_run, serve
from kit import tensors_digest as digest_of
from kit.damage import columns, flip_bit, flip_column, log_frames, rewrite_note
from kit.halfway import ticket_states
from kit.processes import command
from typer.testing import CliRunner

from atoll.errors import ConfigError, StateCorrupt
from atoll.store.journal_tables import CHECKED_LATER

pytestmark = pytest.mark.covers("F41")

Audit = Callable[[Path], str]

JOURNAL, WAL, HEAD = "journal.sqlite", "journal.sqlite-wal", "audit.head"

FREE = {
    ("run", "torch_build"): "another one is said, and not refused",
    ("run", "cpu_capability"): "another one is said, and not refused",
    ("counters", "name"): "shown in status, and used for nothing",
    ("counters", "value"): "shown in status, and used for nothing",
    ("exports_under_way", "path"): "a file that a start removes",
}
"""Columns whose bits do not decide what the run comes to, and why."""


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Halfway:
    return halfway_run(tmp_path_factory.mktemp("halfway"))


@pytest.fixture(scope="module")
def powered(tmp_path_factory: pytest.TempPathFactory) -> Halfway:
    return halfway_run(tmp_path_factory.mktemp("powered"), **{"disk.durability": "power"})


@pytest.fixture
def later(halfway: Halfway, tmp_path: Path) -> Path:
    return copy_folder(halfway.later, tmp_path / "run")


@pytest.fixture(scope="module")
def without_log(halfway: Halfway, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`later`, with all that was in the journal's log in its database."""
    folder = copy_folder(halfway.later, tmp_path_factory.mktemp("without-log") / "run")
    with closing(sqlite3.connect(folder / "state" / JOURNAL)) as journal:
        journal.execute("PRAGMA journal_mode = DELETE")
    return folder


@pytest.fixture
def audited(nursery: Nursery) -> Audit:
    """What `atoll audit` says is wrong; empty where nothing is."""

    def audit(folder: Path) -> str:
        outcome = command(nursery, folder, "audit", str(folder / "state"))
        assert outcome.returncode == (7 if outcome.stderr else 0), outcome.stderr
        return outcome.stderr

    return audit


def database_of(without_log: Path, folder: Path) -> Path:
    """A copy in `folder` of the journal and the audit head alone; the journal's path."""
    (folder / "state" / "slots").mkdir(parents=True)
    for name in (JOURNAL, HEAD):
        shutil.copy(without_log / "state" / name, folder / "state" / name)
    return folder / "state" / JOURNAL


def audited_by(app: typer.Typer, folder: Path) -> bool:
    """Whether `atoll audit` says that something is wrong."""
    outcome = CliRunner().invoke(app, ["audit", str(folder / "state")], standalone_mode=False)
    assert outcome.exception is None or isinstance(outcome.exception, StateCorrupt)
    return outcome.exception is not None


def forge(folder: Path, write_checksums: Callable[[sqlite3.Connection], None], sql: str, *values: object) -> None:
    """Change the journal, and make the checksums of its rows right again, as `write_checksums` does."""
    with closing(sqlite3.connect(folder / "state" / JOURNAL, isolation_level=None)) as journal:
        write_checksums(journal)
        assert journal.execute(sql, values).rowcount == 1


def test_a_forged_weight_is_refused_at_the_start(tmp_path: Path, audited: Audit) -> None:
    """A server does not start if the weight of an accepted update was changed in the journal, even if the row's
    checksum fits.
    """
    # The audit log contains the weight, too.
    from atoll.store.journal_tables import write_checksums

    gate, settings = Gate(1, "d"), {"rounds.sites": 4, "rounds.total": 1}
    with serve(tmp_path / "run", **settings) as server:
        sites = FederatedSites(server.url, tmp_path / "run", "abcd", during=gate)
        accepted = "SELECT ticket FROM tickets WHERE state = 'accepted' ORDER BY ticket"
        wait_until(lambda: len(ask_journal(tmp_path / "run", accepted)) == 3, "three accepted updates")
        copy = copy_folder(tmp_path / "run", tmp_path / "copy")
        gate.open()
        sites.join()
    for (ticket,) in ask_journal(copy, accepted):
        folder = copy_folder(copy, tmp_path / str(ticket))
        forge(
            folder,
            write_checksums,
            "UPDATE tickets SET report = json_set(report, '$.weight', 99.0) WHERE ticket = ?",
            ticket,
        )
        with pytest.raises(StateCorrupt, match=rf"ticket {ticket} has the weight 99\.0"), serve(folder, **settings):
            pass
        assert "the weight 99.0" in audited(folder)


def test_refuses_a_journal_of_an_earlier_epoch(later: Path) -> None:
    """A server does not start if its journal is older than `audit.head`, as after copying back an old journal."""
    # A start adds no entry to the audit log, so only the epoch shows that the journal is older.
    from atoll.store.journal_tables import write_checksums

    forge(later, write_checksums, "UPDATE meta SET epoch = epoch - 1")
    with pytest.raises(StateCorrupt, match=r"lost its end.*epoch"), serve(later):
        pass


def test_notices_a_changed_bit_of_any_value(without_log: Path, tmp_path: Path) -> None:
    """If one bit of any column of any table is changed, the server does not start, and `atoll audit` reports the
    change.
    """
    from atoll.cli.main import app  # in this process: so often, a process each time takes long

    unnoticed, empty = [], []
    for number, (table, column) in enumerate(columns(without_log / "state" / JOURNAL)):
        folder = tmp_path / str(number)
        if not flip_column(database_of(without_log, folder), table, column):
            empty.append(table)
            continue
        try:
            with serve(folder):
                started = True
        except (StateCorrupt, ConfigError) as error:
            started = "All versions" in str(error)  # the journal is alone here
        if table == CHECKED_LATER:  # by the next test, and by the audit
            started = False
        checked = (table, column) == ("run", "settings_json") or audited_by(app, folder)
        if (table, column) not in FREE and (started or not checked):
            unnoticed.append((table, column, "started" if started else "refused", checked))
        shutil.rmtree(folder)
    assert unnoticed == []
    assert set(empty) <= {
        "exports_under_way",
        "deltas",
        "workflows",
        "workflow_facts",
        "sat_out_rounds",
        "generations",
        "configs",
        "identities",
    }


def test_reports_a_damaged_row_of_a_site(later: Path) -> None:
    """A server does not start if a site's row for one of the newest rounds is damaged."""
    # The error names the row. A start reads these rows only for the newest rounds, so that it takes no longer in a long
    # run.
    assert flip_column(later / "state" / JOURNAL, CHECKED_LATER, "summary_json")
    row = r"content of site_rounds \(fragment = 0, version = 1, site = 'b'\) does not match its checksum\. Restore"
    with pytest.raises(StateCorrupt, match=row), serve(later):
        pass


def test_a_changed_bit_of_the_journal_changes_no_model(without_log: Path, tmp_path: Path) -> None:
    """For any changed bit of the journal file, either `atoll audit` reports damage or all values that matter are
    unchanged.
    """
    # The test changes 53 bits spread over the pages of the file, one at a time.
    from atoll.cli.main import app  # in this process: so often, a process each time takes long

    path, free = without_log / "state" / JOURNAL, {table for table, _ in FREE}
    before = {
        table: ask_journal(without_log, f"SELECT * FROM {table}")
        for table in {table for table, _ in columns(path)} - free
    }
    refused = 0
    for offset in range(29, path.stat().st_size, path.stat().st_size // 53):
        folder = tmp_path / str(offset)
        flip_bit(database_of(without_log, folder), offset, offset % 8)
        if audited_by(app, folder):
            refused += 1
        else:
            found = {table: ask_journal(folder, f"SELECT * FROM {table}") for table in before}
            assert {table for table in before if found[table] != before[table]} == set(), offset
    assert refused


def test_a_changed_bit_of_the_journals_log_loses_nothing(halfway: Halfway, tmp_path: Path, audited: Audit) -> None:
    """If a bit of SQLite's write-ahead log is changed, the server refuses to start or keeps all
    acknowledged updates.
    """
    # SQLite silently drops the frames after a damaged one. The test changes each frame, in its header or in its page.
    frames = log_frames(halfway.later / "state" / WAL)
    assert frames
    refused = []
    for number, offset in enumerate([0, *frames]):
        folder = copy_folder(halfway.later, tmp_path / f"run-{offset}")
        flip_bit(folder / "state" / WAL, offset + (16 if number % 2 else 1000), number % 8)
        try:
            with serve(folder):
                pass
        except StateCorrupt:
            refused.append(offset)
            continue
        assert ticket_states(folder) == ticket_states(halfway.later), f"what was acknowledged is gone: {offset}"
        assert audited(folder) == ""
    assert frames[0] in refused


def test_starts_no_new_run_over_a_damaged_log(tmp_path: Path) -> None:
    """If the journal's log is damaged and holds the whole run, the server does not start a new run in its place."""
    # Without the log, the journal is empty.
    with serve(tmp_path / "run"):
        folder = copy_folder(tmp_path / "run", tmp_path / "copy")
    assert log_frames(folder / "state" / WAL)
    shutil.rmtree(folder / "state" / "slots")
    flip_bit(folder / "state" / WAL, 16)
    with pytest.raises(StateCorrupt, match="missing or empty"), serve(folder):
        pass


def test_goes_on_if_the_audit_head_is_behind(halfway: Halfway, later: Path, audited: Audit) -> None:
    """A run goes on if `audit.head` is older than the journal, as after a kill between the two writes."""
    shutil.copy(halfway.earlier / "state" / HEAD, later / "state" / HEAD)
    assert audited(later) == ""
    halfway.go_on(later)
    assert digest_of(exported(later)) == halfway.digest


def without_end(halfway: Halfway, folder: Path) -> Path:
    """A journal as it was before the accepted update, with the audit head that knows of it."""
    copy_folder(halfway.earlier, folder)
    shutil.copy(halfway.later / "state" / HEAD, folder / "state" / HEAD)
    shutil.rmtree(folder / "workers")
    copy_folder(halfway.later / "workers", folder / "workers")
    return folder


def test_refuses_a_journal_that_lost_its_end(halfway: Halfway, tmp_path: Path, audited: Audit) -> None:
    """A server does not start if the journal has lost its last entries and no power loss explains this.

    If the operator deletes `audit.head`, the run goes on to the same bits.
    """
    folder = without_end(halfway, tmp_path / "run")
    with pytest.raises(StateCorrupt, match="lost its end"), serve(folder):
        pass
    assert "lost its last" in audited(folder)
    (folder / "state" / HEAD).unlink()  # the operator's way to go on
    halfway.go_on(folder)
    assert digest_of(exported(folder)) == halfway.digest


@pytest.mark.covers("F42")
def test_goes_on_if_power_loss_cut_the_journal(
    halfway: Halfway, tmp_path: Path, caplog: pytest.LogCaptureFixture, audited: Audit
) -> None:
    """If a power loss cut the end of the journal, the server logs the loss and the run goes on in a later epoch."""
    folder = without_end(halfway, tmp_path / "run")
    rewrite_note(folder / "state" / HEAD, boot="of the start before the power loss", epoch=7)
    with serve(folder, **{"network.port": halfway.port}) as server:
        assert any("lost its end" in line for line in caplog.messages)
        assert server.status().epoch == 8
        FederatedSites(server.url, folder).join()
    assert digest_of(exported(folder)) == halfway.digest, "a submits again from its outbox"
    assert ask_journal(folder, "SELECT count(*) FROM audit WHERE what = 'lost'") == [(1,)]
    assert audited(folder) == ""


@pytest.mark.covers("F42")
def test_logs_that_power_loss_took_the_last_start(later: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a power loss took the record of the server's last start, the log says that `audit.head` has a later epoch than
    the journal.
    """
    ((entries,),) = ask_journal(later, "SELECT count(*) FROM audit")
    rewrite_note(later / "state" / HEAD, boot="of the start before the power loss", epoch=7)
    with serve(later) as server:
        assert server.status().epoch == 8
    (told,) = [line for line in caplog.messages if HEAD in line]
    assert f"has {entries} entries (epoch 1), but audit.head says that it had {entries} (epoch 7)" in told


@pytest.mark.covers("F42")
@pytest.mark.parametrize("lost", [1, 2])
def test_a_start_after_power_loss_may_be_killed(
    halfway: Halfway, tmp_path: Path, nursery: Nursery, lost: int, audited: Audit
) -> None:
    """If the server is killed during its start after a power loss, the next start records the loss only once."""
    # The entry about the loss takes the number of a lost entry, and `audit.head` still shows that this entry was lost.
    folder = without_end(halfway, tmp_path / "run")
    head = folder / "state" / HEAD
    entries = json.loads(head.read_text())["entries"]
    rewrite_note(head, boot="of the start before the power loss", entries=entries + lost - 1)
    with ForkedServer(nursery, folder, ("epoch.raised=kill",) * 2, port=halfway.port) as server:
        FederatedSites(server.url, folder).join()
        assert server.process.wait() == 0
    assert server.process.deaths == 2
    assert digest_of(exported(folder)) == halfway.digest
    assert ask_journal(folder, "SELECT count(*) FROM audit WHERE what = 'lost'") == [(1,)]
    assert audited(folder) == ""


def test_refuses_a_lost_end_under_power_durability(powered: Halfway, tmp_path: Path) -> None:
    """With `disk.durability = power`, a server refuses to start if its journal has lost its end, since a power loss
    cannot explain this.
    """
    folder = without_end(powered, tmp_path / "run")
    rewrite_note(folder / "state" / HEAD, boot="of the start before the power loss")
    for durability in ("power", "process"):
        with pytest.raises(StateCorrupt, match="lost its end"), serve(folder, **{"disk.durability": durability}):
            pass


@pytest.mark.covers("F42")
def test_refuses_an_audit_head_of_another_run(halfway: Halfway, powered: Halfway, later: Path, audited: Audit) -> None:
    """A server does not start if the file `audit.head` in its state directory belongs to another run."""
    shutil.copy(powered.earlier / "state" / HEAD, later / "state" / HEAD)
    with pytest.raises(StateCorrupt, match=HEAD), serve(later):
        pass
    assert HEAD in audited(later)


@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.unlink(), "missing"),
        (lambda path: flip_bit(path, 20), "damaged"),
        (lambda path: path.write_bytes(b""), "damaged"),
    ],
)
def test_replaces_a_missing_or_damaged_audit_head(
    halfway: Halfway, later: Path, damage: Callable[[Path], None], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """If `audit.head` is missing or damaged, the server logs this once and writes a new one, which the next start
    accepts.
    """
    damage(later / "state" / HEAD)
    with serve(later):
        pass
    assert [word in line for line in caplog.messages if HEAD in line] == [True]
    ((entries,),) = ask_journal(later, "SELECT count(*) FROM audit")
    assert json.loads((later / "state" / HEAD).read_text())["entries"] == entries
    caplog.clear()
    with serve(later):
        pass
    assert not [line for line in caplog.messages if HEAD in line]


def test_starts_no_new_run_beside_an_old_audit_head(later: Path) -> None:
    """If the journal and the versions are lost but `audit.head` exists, the server does not start a new run.

    Nothing else then shows that there was a run.
    """
    state = later / "state"
    shutil.rmtree(state / "slots")
    for name in (JOURNAL, WAL, f"{JOURNAL}-shm"):
        (state / name).unlink(missing_ok=True)
    with pytest.raises(StateCorrupt, match="missing or empty"), serve(later):
        pass
