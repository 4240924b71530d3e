"""`atoll export` and `atoll audit`: from a running server, and from a state directory."""

from __future__ import annotations

import errno
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery
from kit.damage import flip_bit
from kit.models import Tied
from kit.processes import command, export, without_permission
from kit.servers import plain_server
from kit.sites import manual_sites, train_round
from safetensors import safe_open
from torch import nn

import atoll
from atoll.errors import AtollError, Gone, StateCorrupt, StoreError
from atoll.store.file_slots import Ranges

VERSION = "slots/version-0-0.safetensors"


@pytest.fixture
def model() -> Tied:
    return Tied()


@pytest.fixture
def server(model, tmp_path):
    with plain_server(tmp_path, model, algorithm="diloco") as running:
        yield running


def require_same(path: Path, model: nn.Module) -> None:
    with safe_open(path, framework="pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert set(json.loads(file.metadata()["atoll.buffers"])) == {name for name, _ in model.named_buffers()}
    wanted = model.state_dict()
    assert state.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(state[name], wanted[name])] == []
    assert Tied().load_state_dict(state, strict=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def require_refused(outcome: int | str, error: type[AtollError], words: str) -> None:
    assert re.search(f"^exit {error.exit_code}: .*{words}", str(outcome))


@pytest.mark.covers("P8")
def test_an_export_neither_joins_nor_starts_a_server(nursery: Nursery, atoll_command, server, model, tmp_path) -> None:
    """An export from a server does not join as a worker. An export from a state directory does not start the server."""
    # An export works beside a running server and after the server has stopped.
    epoch, exports = server.status().epoch, tmp_path / "exports"
    outcome = atoll_command("export", "exports/asked.safetensors", ATOLL_SERVER=server.url)
    assert outcome.stdout == "version 0: exports/asked.safetensors\n", outcome.stderr
    assert export(nursery, exports / "beside.safetensors", "--dir", "../state") == 0
    assert (server.status().workers, server.status().epoch) == ([], epoch)
    server.stop()
    assert export(nursery, exports / "behind.safetensors", "--dir", "../state") == 0
    files = sorted(exports.iterdir())
    assert [path.stem for path in files] == ["asked", "behind", "beside"]
    for path in files:
        require_same(path, model)


def test_a_version_deleted_during_an_export_is_not_exported(server, tmp_path, monkeypatch) -> None:
    """An export writes no file if the server has deleted the version before the export ends."""
    from atoll.cli import export
    from atoll.posix import replace_file

    server.stop()

    def replaced_late(*args, **how) -> None:
        with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite")) as db:
            db.execute("DELETE FROM versions")
            db.commit()
        replace_file(*args, **how)

    monkeypatch.setattr(export, "replace_file", replaced_late)
    with pytest.raises(Gone, match="deleted this version during the export"):
        export.from_directory(tmp_path / "state", tmp_path / "model.safetensors", 0)
    assert names(tmp_path) == ["state"]


@pytest.fixture
def overwritten(tmp_path, monkeypatch) -> Iterator[None]:
    """A server that overwrites version 0 after an export read its row in the journal, before it reads the file."""
    from atoll.store import reader

    read, rounds = reader.region_digest, iter(range(1, 6))
    with plain_server(tmp_path, {"w": torch.zeros(2)}, sites=1, rounds=0) as server:
        site = manual_sites(server, tmp_path, "a")

        def read_late(file: int, ranges: Ranges) -> bytes:
            for number in rounds:
                train_round(site, number, lambda _, pulled: {"w": pulled["w"] + 1})
            return read(file, ranges)

        monkeypatch.setattr(reader, "region_digest", read_late)
        yield
        site["a"].close()


@pytest.mark.covers("P8")
@pytest.mark.usefixtures("overwritten")
def test_exports_the_newest_version_during_rounds(tmp_path) -> None:
    """An export during rounds gets a newer version when the server overwrites the version that was newest at first."""
    from atoll.cli import export

    out = tmp_path / "model.safetensors"
    version = export.from_directory(tmp_path / "state", out)
    assert version > 0
    with safe_open(out, framework="pt") as file:
        assert torch.equal(file.get_tensor("w"), torch.full((2,), float(version)))


@pytest.mark.usefixtures("overwritten")
def test_an_overwritten_version_is_not_called_damaged(tmp_path) -> None:
    """If the server overwrites the requested version during an export, the error says it was deleted, not damaged."""
    from atoll.cli import export

    with pytest.raises(Gone, match="deleted this version during the export"):
        export.from_directory(tmp_path / "state", tmp_path / "model.safetensors", 0)
    assert "model.safetensors" not in names(tmp_path)


def test_an_export_reports_a_full_disk(server, tmp_path, monkeypatch) -> None:
    """When the disk is full, an export from a server says so, and does not report a network failure."""
    from atoll.cli import export
    from atoll.transport import object_server

    def full(*args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_server, "write_at", full)
    with pytest.raises(StoreError, match=r"The disk of .* is full"):
        export.from_server(server.url, tmp_path / "model.safetensors")
    assert names(tmp_path) == ["state"]


@pytest.mark.parametrize("name", ["notes.txt", "model.pt", "model"])
def test_an_export_overwrites_only_safetensors_files(atoll_command, tmp_path, name: str) -> None:
    """`atoll export` refuses a file name without the ending `.safetensors`, and an existing file keeps its content."""
    (tmp_path / name).write_text("mine")
    outcome = atoll_command("export", name, "--server", "http://127.0.0.1:9")
    assert outcome.returncode == 2
    assert outcome.stderr.startswith(f"atoll: {name!r} does not end in .safetensors")
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("folder", "reason"),
    [("file/out", r"made \(Not a directory\)"), ("/proc", r"written \(.+\)")],
)
def test_an_export_reports_an_unwritable_folder(nursery, server, tmp_path, folder: str, reason: str) -> None:
    """`atoll export` names the folder that it cannot create or write, and says why."""
    # The test uses `/proc`, in which not even root may create a file.
    (tmp_path / "file").write_text("mine")
    for source in (("--server", server.url), ("--dir", "state")):
        outcome = command(nursery, tmp_path, "export", f"{folder}/model.safetensors", *source)
        assert outcome.returncode == 7
        assert re.fullmatch(
            rf"atoll: The folder {folder} cannot be {reason}\. Give a file in a folder that this user may write\.\n",
            outcome.stderr,
        )


OTHER_FILE = (
    "This user has no permission to read state/{}. Nothing is damaged. Run the command as the owner of the file, or "
    "give this user read permission.\n"
)
SERVER = "server --dir state --port 0 --set algorithm.name=diloco --set disk.min_free_bytes=0"


@pytest.mark.slow
@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("path", "mode", "words", "said"),
    [
        ("journal.sqlite", 0, "status --dir state", OTHER_FILE.format("journal.sqlite")),
        ("audit.head", 0, "audit state", OTHER_FILE.format("audit.head")),
        (VERSION, 0, "export model.safetensors --dir state", OTHER_FILE.format(VERSION)),
        (VERSION, 0o444, SERVER, f"state/{VERSION} cannot be used (Permission denied). Run the "),
        ("slots", 0o555, SERVER, "The folder state/slots cannot be written (Permission denied). Use a disk.state_dir "),
        (
            "objects",
            0,
            SERVER,
            "state/objects cannot be used (Permission denied). Run the command as the owner of the files, or let this ",
        ),
        ("exports", 0, SERVER, "state/exports cannot be used (Permission denied). Run the command as the owner "),
    ],
)
def test_files_without_permission_are_not_called_damaged(
    server, tmp_path, path: str, mode: int, words: str, said: str
) -> None:
    """A command that lacks permission for a file or folder of a run names it and does not call it damaged."""
    server.stop()
    (tmp_path / "state" / "objects").mkdir()
    (tmp_path / "state" / path).chmod(mode)
    outcome = without_permission(tmp_path, *words.split())
    (tmp_path / "state" / path).chmod(0o755)
    assert outcome.returncode == 7, outcome.stderr
    assert outcome.stderr.replace(f"{tmp_path}/", "").startswith(f"atoll: {said}")
    assert len(outcome.stderr.splitlines()) == 1


def replace_by_dangling_link(path: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(path.with_name("disk that is not there"))


MISSING = r"version-0-0\.safetensors cannot be read \(No such file or directory\)\. Restore the file from a backup"


@pytest.mark.covers("X3", "F41")
@pytest.mark.parametrize(
    ("damage", "path", "words"),
    [
        (Path.unlink, VERSION, MISSING),
        (shutil.rmtree, "slots", MISSING),
        (replace_by_dangling_link, "slots", MISSING),
        (lambda path: flip_bit(path, -1), VERSION, "digest"),
    ],
    ids=["no version", "no folder", "dangling link", "flipped bit"],
)
def test_a_damaged_version_is_never_exported(
    nursery: Nursery, server, tmp_path, damage: Callable[[Path], object], path: str, words: str
) -> None:
    """`atoll export` refuses to export a version whose file is missing or damaged, and writes no file."""
    server.stop()
    damage(tmp_path / "state" / path)
    require_refused(export(nursery, tmp_path / "model.safetensors", "--dir", "state"), StateCorrupt, words)
    assert names(tmp_path) == ["state"]


def test_a_failed_export_suggests_the_state_directory(atoll_command) -> None:
    """If no server answers, the error of `atoll export` suggests to name the run."""
    outcome = atoll_command("export", "model.safetensors", "--server", "http://127.0.0.1:9")
    assert outcome.returncode == 5
    assert outcome.stderr.endswith("Without a server, name the run: atoll export model.safetensors RUN.\n")


def test_a_missing_version_leaves_the_old_file(nursery: Nursery, server, tmp_path) -> None:
    """If the server no longer keeps the requested version, the export fails and the file of an earlier export stays."""
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"old")
    for source in (("--server", server.url), ("--dir", "state")):
        refused = export(nursery, out, *source, "--version", "7")
        require_refused(refused, Gone, r"newest version is 0; disk\.export_every")
    assert out.read_bytes() == b"old"
    assert names(tmp_path) == ["model.safetensors", "state"]


# -- the log of a run


def test_audit_lists_decisions_and_detects_changed_entries(atoll_command, tmp_path) -> None:
    """`atoll audit` lists the server's decisions while the server runs and after it has stopped.

    If an entry of the audit log was changed, the command fails and gives the number of this entry.
    """
    with plain_server(tmp_path, {"w": torch.zeros(2)}, rounds=1) as server:
        with atoll.join(server.url, site="clinic-a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.state_dict(), weight=3)
        assert server.wait(60)
        running = json.loads(atoll_command("audit", "state", "--json").stdout)
    assert [entry["what"] for entry in running["last"]] == ["committed", "rules", "accepted", "committed", "finished"]
    assert running["last"][2]["site"] == "clinic-a"
    assert json.loads(atoll_command("audit", "state", "--json", "--last", str(10**30)).stdout) == running
    stopped = atoll_command("audit", "--dir", "state", "--last", "1")
    assert stopped.returncode == 0
    last, checked = stopped.stdout.splitlines()
    assert "finished" in last
    assert checked == f"5 entries checked, none changed or removed; the last hash is {running['last_hash']}"
    with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite")) as db, db:
        db.execute("UPDATE audit SET detail_json = replace(detail_json, 'clinic-a', 'clinic-z') WHERE seq = 3")
    changed = atoll_command("audit", "state")
    assert changed.returncode == StateCorrupt.exit_code
    assert "broken at entry 3" in changed.stderr
    assert len(changed.stderr.splitlines()) == 1
