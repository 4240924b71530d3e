"""A site's folder does not grow with every run: what earlier runs left is removed, but never an update not yet sent."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import flip_bit, rewrite_note
from kit.servers import plain_server
from pydantic import ValidationError
from torch import nn

import atoll
from atoll.errors import StateLocked, StoreError
from atoll.protocol import messages
from atoll.worker.exchange.base_and_outbox import folder_of, locked, remove_earlier


def one_run(folder: Path, name: str, **settings: Any) -> Path:
    """Take part as `a` in a run of one round; returns the site's folder of this run."""
    with plain_server(folder / name, nn.Linear(8, 4), rounds=1, **settings) as server:
        with atoll.join(server.url, site="a", folder=folder / "w") as worker:
            mine: Path = worker._backend.place.folder
            worker.evaluates(lambda model: {"loss": 0.0})
            for fl_round in worker:
                model = fl_round.load_into(nn.Linear(8, 4))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with fl_round.correct(model, optimizer):
                    model(torch.ones(8)).sum().backward()
                    optimizer.step()
                fl_round.submit(model, weight=1)
    return mine


@pytest.mark.covers("D4")
@pytest.mark.parametrize(
    ("kept", "settings"),
    [
        ("outbox.bin", {}),
        ("algorithm-0.bin", {"algorithm.name": "scaffold"}),
        ("residual-0.bin", {"aggregation.upload_codec.name": "topk"}),
        ("local.safetensors", {"workflow.steps": [{"kind": "train"}, {"kind": "cross_site_evaluation"}]}),
    ],
)
def test_the_files_of_a_finished_run_go_when_the_next_one_is_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: str, settings: dict[str, Any]
) -> None:
    caplog.set_level(logging.INFO, "atoll")
    first = one_run(tmp_path, "first", **settings)
    assert (first / kept).exists()
    second = one_run(tmp_path, "second")
    assert list(second.parent.iterdir()) == [second]
    told = [line for line in caplog.messages if "removed the files" in line]
    assert len(told) == 1
    assert told[0].startswith("a: removed the files of an earlier run, ")


def unsent(folder: Path) -> None:
    rewrite_note(folder / "outbox.json", sent=False)


def note_of_another_version_of_atoll(folder: Path) -> None:
    rewrite_note(folder / "outbox.json", sent=None, sent_at=3)


def damaged_note(folder: Path) -> None:
    flip_bit(folder / "outbox.json", 40)


def a_file_of_the_user(folder: Path) -> None:
    (folder / "model.pt").touch()


def not_a_workers_folder(folder: Path) -> None:
    (folder / "lock").unlink()


@pytest.mark.covers("D4")
@pytest.mark.parametrize(
    "change", [unsent, note_of_another_version_of_atoll, damaged_note, a_file_of_the_user, not_a_workers_folder]
)
def test_what_may_still_be_needed_or_is_not_ours_stays(tmp_path: Path, change: Callable[[Path], None]) -> None:
    first = one_run(tmp_path, "first")
    change(first)
    before = sorted(first.iterdir())
    one_run(tmp_path, "second")
    assert sorted(first.iterdir()) == before


def moved_away(folder: Path) -> Path:
    """The folder lies elsewhere, and is a link to there; returns where."""
    elsewhere = folder.parents[2] / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    return elsewhere


@pytest.mark.covers("D4")
@pytest.mark.parametrize("name", ["", "lock", "base.safetensors", "outbox.json"])
def test_nothing_is_removed_or_written_by_way_of_a_link(tmp_path: Path, name: str) -> None:
    """Guards against a link to a folder, or in one: its target was emptied: it is not in the site's folder."""
    first = one_run(tmp_path, "first")
    target = moved_away(first / name) if name else moved_away(first)
    files = sorted(target.iterdir()) if target.is_dir() else [target]
    before = [(file, file.read_bytes()) for file in files]
    one_run(tmp_path, "second")
    assert [(file, file.read_bytes()) for file in files] == before
    assert (first / name).is_symlink()


def test_a_link_in_place_of_ones_own_lock_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    folder.mkdir(parents=True)
    (tmp_path / "other.csv").write_text("a row")
    (folder / "lock").symlink_to(tmp_path / "other.csv")
    with pytest.raises(StoreError, match=r"lock cannot be opened .*plain file"), locked(folder, "a"):
        pass
    assert (tmp_path / "other.csv").read_text() == "a row"


@pytest.mark.parametrize("run", ["", ".", "..", "../b", "/tmp/b", "a/b", "a\n"])
def test_refuses_a_run_id_that_leads_out_of_the_sites_folder(run: str) -> None:
    """The id comes from the server, and names the folder beside which others are removed."""
    with pytest.raises(ValidationError) as caught:
        messages.RunInfo.model_validate({"run": run})
    assert ("run",) in [error["loc"] for error in caught.value.errors()]


@pytest.mark.covers("D4")
def test_no_process_begins_in_a_folder_that_is_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder itself is locked until it is gone, and the file that names the lock goes last."""
    first = one_run(tmp_path, "first")
    unlink, removed = os.unlink, []

    def begun_anew(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        if dir_fd is not None:
            removed.append(path)
            with pytest.raises(StateLocked), locked(first, "a"):
                pass

    monkeypatch.setattr(os, "unlink", begun_anew)
    one_run(tmp_path, "second")
    assert removed[-1] == "lock"
    assert set(removed) > {"lock", "base.safetensors", "outbox.bin"}
    assert not first.exists()
    with locked(first, "a"):  # anew, in a folder of its own
        assert first.exists()


@pytest.mark.covers("D4")
def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    first = one_run(tmp_path, "first")
    with locked(first, "a"):
        one_run(tmp_path, "second")
        assert (first / "base.safetensors").exists()
    third = one_run(tmp_path, "third")
    assert list(third.parent.iterdir()) == [third]


def test_takes_a_lock_anew_when_its_folder_is_removed_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against holding the lock of a file that is no longer there, beside a process that holds the new one."""
    folder = tmp_path / "a" / "run"
    flock, removals = fcntl.flock, iter([True])

    def removed_before(fd: int, how: int) -> None:
        if next(removals, False):
            (folder / "lock").unlink()
            folder.rmdir()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with locked(folder, "a"):
        assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(StateLocked), locked(folder, "a"):
            pass


@pytest.mark.covers("D4")
@pytest.mark.parametrize(
    ("share", "stays"),
    [
        (None, {"run"}),
        ((0, 2), {"rank-0-of-2/run", "rank-1-of-2/run", "rank-1-of-2/old", "rank-1-of-3/old", "rank-1-of-3/run"}),
        (
            (1, 2),
            {"rank-0-of-2/run", "rank-1-of-2/run", "rank-0-of-2/old", "run", "old"}
            | {f"rank-{rank}-of-3/{run}" for rank in (0, 2) for run in ("old", "run")},
        ),
    ],
    ids=["whole", "first-of-two", "second-of-two"],
)
def test_files_of_another_number_of_ranks_go_each_by_one_rank(
    tmp_path: Path, share: tuple[int, int] | None, stays: set[str]
) -> None:
    """Whole, two ranks and three, in an earlier run and in this one; what a rank leaves, another one takes."""
    homes = ["", *(f"rank-{rank}-of-{ranks}/" for ranks in (2, 3) for rank in range(ranks))]
    for each in (tmp_path / "a" / f"{home}{run}" for home in homes for run in ("old", "run")):
        each.mkdir(parents=True)
        (each / "lock").touch()
        (each / "base.safetensors").write_bytes(b"x" * 100)
    remove_earlier(folder_of(tmp_path / "a", "run", share), "a", share)
    left = {str(path.parent.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("lock")}
    assert left == stays
    assert {path.name for path in (tmp_path / "a").iterdir()} == {name.partition("/")[0] for name in stays}
