"""`atoll status --dir`, `atoll audit` and `atoll export --dir` read a state directory, and change nothing in it."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until
from kit import FederatedSites, ForkedServer, Gate, Halfway, ask_journal, copy_folder, flip_column, halfway_run, serve
from kit.processes import command, without_permission

from atoll.cli import main
from atoll.errors import StateCorrupt, UsageError
from atoll.store.reader import open_state

JOURNAL = "journal.sqlite"
COMMANDS = {
    "status": "status --dir state --json",
    "audit": "audit state --json",
    "export": "export out.safetensors --dir state",
}


def look(folder: Path) -> dict[Path, tuple[object, ...]]:
    """All that a reader could change in a folder: names, modes, times and contents of files."""
    return {
        path: (path.stat().st_mode, path.stat().st_mtime_ns, path.is_file() and path.read_bytes())
        for path in (folder, *folder.rglob("*"))
    }


@pytest.fixture(scope="module")
def halfway(tmp_path_factory: pytest.TempPathFactory) -> Halfway:
    return halfway_run(tmp_path_factory.mktemp("halfway"))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    with serve(folder) as server:
        FederatedSites(server.url, folder).join()
        server.run()
    return folder


@pytest.fixture
def folder_of(halfway: Halfway, ended: Path, tmp_path: Path) -> Callable[[str], tuple[Path, int, int]]:
    """A run's folder, its newest version, and the number of entries in its audit log."""

    def make(kind: str) -> tuple[Path, int, int]:
        folder = copy_folder(ended if kind == "ended" else halfway.later, tmp_path / "run")
        if kind == "killed, without the index":
            (folder / "state" / f"{JOURNAL}-shm").unlink()
        for path in (each for each in folder.rglob("*") if each.suffix != ".token"):
            path.chmod(0o755 if path.is_dir() else 0o644)  # an earlier release, or an owner that lets others read
        # version 0 and the rules; in each round, two updates and a version
        return folder, *((3, 12) if kind == "ended" else (1, 6))

    return make


def require_read(folder: Path, version: int, entries: int, ask: Callable[..., Any]) -> None:
    """What the three commands print is true, and they leave nothing with the temporary files."""
    said, temporary = {}, folder.with_name("temporary")
    temporary.mkdir()
    for name, words in COMMANDS.items():
        outcome = ask(folder, *words.split(), TMPDIR=str(temporary))
        assert outcome.returncode == 0, outcome.stderr
        said[name] = outcome.stdout
    assert list(temporary.iterdir()) == []
    assert [each["version"] for each in json.loads(said["status"])["fragments"]] == [version]
    assert json.loads(said["audit"])["entries"] == entries
    assert said["export"] == f"version {version}: out.safetensors\n"


@pytest.mark.covers("L13", "P8")
@pytest.mark.parametrize("kind", ["ended", "killed", "killed, without the index"])
def test_reading_commands_change_no_file(nursery: Nursery, folder_of, kind: str) -> None:
    """`atoll status`, `atoll audit` and `atoll export` leave contents, modes and times in a state directory unchanged.

    They leave no file in the state directory and no temporary file.
    """
    folder, version, entries = folder_of(kind)
    before = look(folder / "state")
    require_read(folder, version, entries, partial(command, nursery))
    assert look(folder / "state") == before


@pytest.mark.slow
@pytest.mark.covers("L13", "P8")
@pytest.mark.parametrize("kind", ["ended", "killed", "killed, without the index"])
def test_a_read_only_state_directory_can_be_read(folder_of, kind: str) -> None:
    """The reading commands work on a state directory in which they have no permission to write."""
    folder, version, entries = folder_of(kind)
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o400 if path.suffix == ".token" else 0o444)
    before = look(folder / "state")
    require_read(folder, version, entries, without_permission)
    assert look(folder / "state") == before


@pytest.fixture
def living(nursery: Nursery, tmp_path: Path) -> Iterator[tuple[Path, Gate, FederatedSites]]:
    """A server in its own process, in the middle of round 2 of 3: a's update is accepted, b trains."""
    gates = {site: Gate(2, site) for site in "ab"}
    folder = tmp_path / "run"
    folder.mkdir()
    with ForkedServer(nursery, folder) as server:
        sites = FederatedSites(server.url, folder, during=lambda site, number: gates[site](site, number))
        for gate in gates.values():
            gate.wait()
        gates["a"].open()
        accepted = "SELECT count(*) FROM tickets WHERE state = 'accepted'"
        wait_until(lambda: ask_journal(folder, accepted) == [(1,)], "an accepted update of a")
        yield folder, gates["b"], sites
        gates["b"].open()
        sites.join()


@pytest.mark.slow
@pytest.mark.covers("L13", "P8")
@pytest.mark.parametrize("index", ["usable", "for the server alone"])
def test_a_running_run_can_be_read_during_a_round(living, index: str) -> None:
    """Another user can read the state directory during a round, with or without permission to use SQLite's index."""
    # Without this permission, the reading command copies the journal and its log.
    folder, *_ = living
    if index != "usable":
        (folder / "state" / f"{JOURNAL}-shm").chmod(0)
    journal = sorted((folder / "state").glob(f"{JOURNAL}*"))
    before = [path.read_bytes() for path in journal]
    require_read(folder, 1, 6, without_permission)
    assert [path.read_bytes() for path in journal] == before


@pytest.mark.slow
def test_a_reader_sees_one_consistent_state(living) -> None:
    """A command that reads a state directory sees the state at its start, while the server goes on. A later command
    sees the end.
    """
    folder, gate, sites = living
    with open_state(folder / "state") as state:
        before = state.heads()
        gate.open()
        sites.join()
        assert state.heads() == before
        assert [head.version for head in before] == [1]
    with open_state(folder / "state") as state:
        assert [head.version for head in state.heads()] == [3]


# -- damage


def changed_by(*statements: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path, isolation_level=None)) as db:
            for statement in statements:
                db.execute(statement)

    return change


def of_another_program(path: Path) -> None:
    path.unlink()
    changed_by("CREATE TABLE notes (text)")(path)


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (Path.unlink, "There is no run in 'state'."),
    "empty": (lambda path: path.write_bytes(b""), f"state/{JOURNAL} is empty."),
    "no database": (
        lambda path: path.write_bytes(b"x" * 24_000),
        f"state/{JOURNAL} cannot be read: file is not a database.",
    ),
    "another program's": (
        of_another_program,
        f"state/{JOURNAL} belongs to another program: it has the table 'notes'.",
    ),
    "another version's": (
        changed_by("PRAGMA user_version = 99"),
        f"state/{JOURNAL} has journal version 99, but this Atoll reads versions ",
    ),
    "changed row": (
        lambda path: flip_column(path, "tickets", "digest"),
        f"state/{JOURNAL} is damaged: the content of tickets (ticket = ",
    ),
    "changed table": (
        changed_by("DROP INDEX tickets_of_site"),
        f"state/{JOURNAL} is damaged: the content of index tickets_of_site does not match",
    ),
}


@pytest.mark.covers("F41", "X3")
@pytest.mark.parametrize("damage", DAMAGED)
def test_reading_commands_report_a_damaged_journal(nursery: Nursery, ended: Path, tmp_path: Path, damage: str) -> None:
    """The reading commands report a journal that is missing, damaged or foreign, and leave it unchanged.

    If only a row or an index was changed, `atoll audit` and `atoll export` report it.
    """
    (change, words), folder = DAMAGED[damage], copy_folder(ended, tmp_path / "run")
    code = (UsageError if damage == "missing" else StateCorrupt).exit_code
    change(folder / "state" / JOURNAL)
    before, temporary = look(folder / "state"), tmp_path / "temporary"
    temporary.mkdir()
    for name in ("audit", "export") if damage.startswith("changed") else COMMANDS:
        outcome = command(nursery, folder, *COMMANDS[name].split(), TMPDIR=str(temporary))
        assert (outcome.returncode, outcome.stderr[: len(words) + 7]) == (code, f"atoll: {words}"), name
        assert len(outcome.stderr.splitlines()) == 1
    assert look(folder / "state") == before
    assert list(temporary.iterdir()) == []


# -- every command names the next one

NEXT = {
    "runs": ("runs",),
    "status": ("status", "state"),
    "logs": ("logs", "state"),
    "verify": ("verify", "--dir", "state"),
    "pause": ("pause", "state"),
    "resume": ("resume", "state"),
    "stop": ("stop", "state"),
    "rollback": ("rollback", "0", "state"),
    "compare": ("compare", "state"),
    "export": ("export", "out.safetensors", "state"),
    "audit": ("audit", "state"),
    "new": ("new", "mine"),
    "config": ("config", "show"),
    "doctor": ("doctor", "--port", "0"),
}
"""Command → a line with it that ends well on a run without a server."""
ELSEWHERE = {"run", "server", "worker", "simulate", "page", "evaluate", "enrol", "invite", "sites", "revoke", "egress"}
"""Commands that need a server, sites or a script: their own tests read their last lines."""
WITHOUT_JSON = {"server", "worker", "page", "export", "new", "config", "enrol", "egress"}
"""Commands that read nothing, or whose output is a format of its own."""


def options(command: Any) -> list[str]:
    return [each for parameter in command.params for each in parameter.opts]


def test_each_command_has_a_line_in_the_tables() -> None:
    assert {*NEXT} | ELSEWHERE == {*main.COMMANDS}
    without = {name for name in main.COMMANDS if "--json" not in options(main.loaded(name))}
    assert without - WITHOUT_JSON == set()


@pytest.mark.parametrize("words", NEXT.values(), ids=NEXT)
def test_a_reading_command_ends_with_the_next_one(
    halfway: Halfway,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    """On a terminal, the last line of a reading command is a command to copy."""
    monkeypatch.chdir(copy_folder(halfway.later, tmp_path / "run"))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    main.app([*words], standalone_mode=False)
    shown = capsys.readouterr()
    last = (shown.err.splitlines() or shown.out.splitlines())[-1]
    assert re.search(r"atoll [a-z]+|load_file", last), last
