"""`atoll export` and `atoll audit`: from a running server, and from a state directory."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery
from kit.client import Client
from kit.damage import flip_bit
from kit.processes import command, export
from kit.servers import plain_server
from safetensors import safe_open
from torch import nn

from atoll import Server
from atoll.errors import AtollError, Gone, StateCorrupt, StoreError, UsageError


class Tied(nn.Module):
    """Two names for one tensor, an fp16 tensor, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.short = nn.Parameter(torch.randn(7).half())
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(3)
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


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


def require_refused(outcome: int | str, error: type[AtollError], words: str) -> None:
    assert re.search(f"^exit {error.exit_code}: .*{words}", str(outcome))


@pytest.mark.covers("P8")
def test_export_from_a_running_server_takes_no_part(atoll_command, server, model, tmp_path) -> None:
    outcome = atoll_command("export", "exports/model.safetensors", ATOLL_SERVER=server.url)
    assert outcome.stdout == "version 0: exports/model.safetensors\n", outcome.stderr
    require_same(tmp_path / "exports" / "model.safetensors", model)
    assert server.status().workers == []
    assert leftovers(tmp_path / "exports") == []


@pytest.mark.covers("P8")
def test_export_from_a_directory_beside_its_server_and_behind_it(nursery: Nursery, server, model, tmp_path) -> None:
    """An export of a folder takes no lock, so that a server that starts meanwhile finds the folder free."""
    before = server.status().epoch
    out = tmp_path / "model.safetensors"
    assert export(nursery, out, "--dir", str(tmp_path / "state")) == 0
    require_same(out, model)
    assert server.status().epoch == before
    server.stop()
    again = tmp_path / "again.safetensors"
    assert export(nursery, again, "--dir", str(tmp_path / "state")) == 0
    require_same(again, model)
    assert leftovers(tmp_path) == []


def test_what_a_server_may_have_rewritten_meanwhile_is_not_written(server, tmp_path, monkeypatch) -> None:
    from atoll.cli import export
    from atoll.posix import replace_file

    server.stop()

    def replaced_late(*args) -> None:
        with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite")) as db:
            db.execute("DELETE FROM versions")
            db.commit()
        replace_file(*args)

    monkeypatch.setattr(export, "replace_file", replaced_late)
    with pytest.raises(Gone, match="deleted this version during the export"):
        export.from_directory(tmp_path / "state", tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()
    assert leftovers(tmp_path) == []


def test_a_full_disk_is_named_and_not_taken_for_the_network(server, tmp_path, monkeypatch) -> None:
    from atoll.cli import export
    from atoll.transport import object_server

    def full(*args) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(object_server, "write_at", full)
    with pytest.raises(StoreError, match=r"The disk of .* is full"):
        export.from_server(server.url, tmp_path / "model.safetensors")
    assert list(tmp_path.glob("*.safetensors")) == []


@pytest.mark.parametrize("name", ["notes.txt", "model.pt", "model"])
def test_only_a_safetensors_file_is_written_over(atoll_command, tmp_path, name: str) -> None:
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
def test_a_folder_that_cannot_be_written_is_named(nursery, server, tmp_path, folder: str, reason: str) -> None:
    """In /proc not even root may make a file."""
    (tmp_path / "file").write_text("mine")
    for source in (("--server", server.url), ("--dir", str(tmp_path / "state"))):
        outcome = command(nursery, tmp_path, "export", f"{folder}/model.safetensors", *source)
        assert outcome.returncode == 7
        assert re.fullmatch(
            rf"atoll: The folder {folder} cannot be {reason}\. Give a file in a folder that this user may write\.\n",
            outcome.stderr,
        )


def without_permission(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`atoll WORDS` of a user for which the modes of files hold: root without the capabilities that override them."""
    if os.geteuid():
        plain = []
    elif shutil.which("setpriv"):
        plain = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    else:
        pytest.skip("root may read every file, and there is no setpriv to take that away")
    atoll = Path(sys.executable).with_name("atoll")
    return subprocess.run([*plain, atoll, *words], cwd=folder, capture_output=True, text=True, check=False)


OTHER_FILE = (
    "atoll: This user has no permission to read state/{}. Nothing is damaged. Run the command as the owner of the "
    "file, or give this user read permission.\n"
)
OTHER_FOLDER = (
    "atoll: SQLite cannot read state/journal.sqlite without permission to write into its folder. Nothing is damaged. "
    "Run the command as the owner of the folder, or on a copy of the folder.\n"
)


@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("path", "words", "expected"),
    [
        ("", "status --dir state", OTHER_FOLDER),
        ("journal.sqlite", "status --dir state", OTHER_FILE),
        ("audit.head", "audit state", OTHER_FILE),
        ("slots/version-0-0.safetensors", "export model.safetensors --dir state", OTHER_FILE),
    ],
    ids=["folder", "journal", "head", "version"],
)
def test_what_another_user_may_not_read_is_not_called_damaged(
    server, tmp_path, path: str, words: str, expected: str
) -> None:
    server.stop()
    (tmp_path / "state" / path).chmod(0 if path else 0o555)
    outcome = without_permission(tmp_path, *words.split())
    (tmp_path / "state" / path).chmod(0o755)
    assert (outcome.returncode, outcome.stderr) == (7, expected.format(path))


@pytest.mark.slow
@pytest.mark.covers("X3")
@pytest.mark.parametrize(
    ("path", "mode", "named"),
    [
        (
            "slots/version-0-0.safetensors",
            0o444,
            "state/slots/version-0-0.safetensors cannot be used (Permission denied). Run the ",
        ),
        ("slots", 0o555, "The folder state/slots cannot be written (Permission denied). Use a disk.state_dir "),
        (
            "objects",
            0,
            "state/objects cannot be used (Permission denied). Run the command as the owner of the files, or let this ",
        ),
        ("exports", 0, "state/exports/m"),
    ],
    ids=["version", "slots", "objects", "exports"],
)
def test_a_server_of_another_user_names_what_it_may_not_use(server, tmp_path, path: str, mode: int, named: str) -> None:
    server.stop()
    sets = ["algorithm.name=diloco", "disk.min_free_bytes=0"]
    (tmp_path / "state" / "objects").mkdir()
    (tmp_path / "state" / path).chmod(mode)
    outcome = without_permission(
        tmp_path, "server", "--dir", "state", "--port", "0", *(word for each in sets for word in ("--set", each))
    )
    (tmp_path / "state" / path).chmod(0o755)
    assert outcome.returncode == 7, outcome.stderr
    assert outcome.stderr.replace(f"{tmp_path}/", "").startswith(f"atoll: {named}")
    assert len(outcome.stderr.splitlines()) == 1


@pytest.mark.covers("X3", "F41")
@pytest.mark.parametrize("missing", ["version", "slots", "link"])
def test_an_export_names_the_file_that_is_missing(nursery: Nursery, server, tmp_path, missing: str) -> None:
    server.stop()
    slots = tmp_path / "state" / "slots"
    if missing == "version":
        (slots / "version-0-0.safetensors").unlink()
    else:
        shutil.rmtree(slots)
    if missing == "link":
        slots.symlink_to(tmp_path / "disk that is not there")
    out = tmp_path / "model.safetensors"
    refused = export(nursery, out, "--dir", str(tmp_path / "state"))
    words = r"version-0-0\.safetensors cannot be read \(No such file or directory\)\. Restore it from a backup"
    require_refused(refused, StateCorrupt, words)
    assert not out.exists()


def test_without_a_server_the_state_directory_is_named(atoll_command) -> None:
    outcome = atoll_command("export", "model.safetensors", "--server", "http://127.0.0.1:9")
    assert outcome.returncode == 5
    assert outcome.stderr.endswith("Without a server, use --dir STATE_DIRECTORY.\n")


def test_a_directory_without_a_run_is_refused_and_left_as_it_is(nursery: Nursery, tmp_path) -> None:
    (tmp_path / "empty").mkdir()
    refused = export(nursery, tmp_path / "model.safetensors", "--dir", str(tmp_path / "empty"))
    require_refused(refused, UsageError, "There is no run in")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_version_that_is_not_kept_leaves_the_old_file(nursery: Nursery, server, tmp_path) -> None:
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"old")
    for source in (("--server", server.url), ("--dir", str(tmp_path / "state"))):
        refused = export(nursery, out, *source, "--version", "7")
        require_refused(refused, Gone, r"newest version is 0; disk\.export_every")
    assert out.read_bytes() == b"old"
    assert leftovers(tmp_path) == []


def test_a_damaged_version_is_never_exported(nursery: Nursery, server, tmp_path) -> None:
    server.stop()
    (slot,) = (tmp_path / "state" / "slots").glob("version-*")
    flip_bit(slot, -1)
    refused = export(nursery, tmp_path / "model.safetensors", "--dir", str(tmp_path / "state"))
    require_refused(refused, StateCorrupt, "digest")
    assert leftovers(tmp_path) == []
    assert not (tmp_path / "model.safetensors").exists()


# -- the log of a run


def one_round(folder: Path) -> Server:
    """A server whose only round is done, still running."""
    server = plain_server(folder, {"w": torch.zeros(2)}, rounds=1).start()
    with Client(server.url, site="clinic-a", folder=folder / "w") as client:
        client.next_round()
        client.pull()
        client.submit({"w": torch.ones(2)}, weight=3)
        client.next_round()
    assert server.wait(60)
    return server


def test_audit_tells_what_was_decided_beside_a_running_server_and_behind_a_stopped_one(atoll_command, tmp_path) -> None:
    server = one_round(tmp_path)
    running = json.loads(atoll_command("audit", "state", "--json").stdout)
    assert [entry["what"] for entry in running["last"]] == ["committed", "accepted", "committed", "finished"]
    assert running["last"][1]["site"] == "clinic-a"
    server.stop()
    assert json.loads(atoll_command("audit", "state", "--json", "--last", str(10**30)).stdout) == running
    stopped = atoll_command("audit", "--dir", "state", "--last", "1")
    assert stopped.returncode == 0
    lines = stopped.stdout.splitlines()
    assert "finished" in lines[0]
    assert lines[1:] == [f"4 entries checked, none changed or removed; the last hash is {running['last_hash']}"]


def test_audit_finds_and_names_a_changed_entry(atoll_command, tmp_path) -> None:
    one_round(tmp_path).stop()
    with closing(sqlite3.connect(tmp_path / "state" / "journal.sqlite")) as db:
        db.execute("UPDATE audit SET detail_json = replace(detail_json, 'clinic-a', 'clinic-z') WHERE seq = 2")
        db.commit()
    outcome = atoll_command("audit", "state")
    assert outcome.returncode == StateCorrupt.exit_code
    assert "broken at entry 2" in outcome.stderr
    assert len(outcome.stderr.splitlines()) == 1
