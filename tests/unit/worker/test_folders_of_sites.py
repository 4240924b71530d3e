"""The lock of a site's folder, and what is removed beside it, at the moments when two processes meet."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import StateLocked
from atoll.worker.exchange.base_and_outbox import folder_of, locked, remove_earlier


def one_run(folder: Path, name: str) -> Path:
    """Take part as `a` in a run of one round; returns the site's folder of this run."""
    with plain_server(folder / name, nn.Linear(8, 4), rounds=1) as server:
        with atoll.join(server.url, site="a", folder=folder / "w") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.load_into(nn.Linear(8, 4)))
        return folder / "w" / "a" / server.status().run


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
