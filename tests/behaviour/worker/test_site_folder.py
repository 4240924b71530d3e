"""The folder of a site: one process at a time, nothing outside it, and no more of earlier runs than may be needed."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit import FederatedSites, ForkedSite, flip_bit, rewrite_note, serve
from kit.folders import put_back
from kit.peers import Connection, Peer, Request
from kit.processes import wait_for_words
from kit.requests import get
from kit.servers import plain_server
from kit.world import World
from torch import nn

import atoll
from atoll.errors import PeerError, StateLocked, StoreError


def one_run(folder: Path, name: str, **settings: Any) -> Path:
    """Take part as `a` in a run of one round; returns the site's folder of this run."""
    with World(folder / name, nn.Linear(8, 4), "a", rounds=1, **settings) as world:
        with world.worker(folder=folder / "w") as worker:
            worker.evaluates(lambda model: {"loss": 0.0})
            for fl_round in worker:
                model = fl_round.load_into(nn.Linear(8, 4))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with fl_round.correct(model, optimizer):
                    model(torch.ones(8)).sum().backward()
                    optimizer.step()
                fl_round.submit(model, weight=1)
        return folder / "w" / "a" / world.status.run


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
def test_joining_removes_files_of_finished_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: str, settings: dict[str, Any]
) -> None:
    """When a site joins a new run, it removes its folder of a finished run. The log says once how much space this has
    freed.
    """
    caplog.set_level(logging.INFO, "atoll")
    first = one_run(tmp_path, "first", **settings)
    assert (first / kept).exists()
    second = one_run(tmp_path, "second")
    assert list(second.parent.iterdir()) == [second]
    told = [line for line in caplog.messages if "removed the files" in line]
    assert len(told) == 1
    assert told[0].startswith("a: freed ")


@pytest.mark.covers("D4", "X3")
def test_changing_the_current_folder_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If training code changes the current folder, the server and the site still use the folders in which they started.

    Both folders are given relative to the folder in which the processes were started.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    world = World(Path(), nn.Linear(8, 4), "a", rounds=2)
    world.train_rounds(nn.Linear(8, 4), lambda _: monkeypatch.chdir(tmp_path / "elsewhere"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "state", "workers"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


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
def test_needed_and_foreign_files_stay(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """When a site joins a new run, it keeps an earlier folder that may still be needed or may not be Atoll's.

    Such a folder has an unsent update, an unreadable note, a file of the user, or no lock.
    """
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
def test_nothing_is_changed_through_a_link(tmp_path: Path, name: str) -> None:
    """A site removes and writes nothing through a symbolic link, neither in place of its folder nor in place of a file
    there.
    """
    # Guards against emptying the target of such a link, which is outside the site's folder.
    first = one_run(tmp_path, "first")
    target = moved_away(first / name) if name else moved_away(first)
    files = sorted(target.iterdir()) if target.is_dir() else [target]
    before = [(file, file.read_bytes()) for file in files]
    one_run(tmp_path, "second")
    assert [(file, file.read_bytes()) for file in files] == before
    assert (first / name).is_symlink()


def test_a_linked_lock_is_refused(tmp_path: Path) -> None:
    """If a site's lock file is a symbolic link, `join` is refused, and the target of the link stays unchanged."""
    (tmp_path / "other.csv").write_text("a row")
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        folder = tmp_path / "w" / "a" / server.status().run
        folder.mkdir(parents=True)
        (folder / "lock").symlink_to(tmp_path / "other.csv")
        with pytest.raises(StoreError, match=r"lock cannot be opened .*plain file"):
            atoll.join(server.url, site="a", folder=tmp_path / "w")
    assert (tmp_path / "other.csv").read_text() == "a row"


@pytest.mark.covers("X3")
def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    """If the site's folder cannot be created, the error names the folder and says to set `ATOLL_DIR`."""
    (tmp_path / "w").write_text("a file, in which no folder can be made")
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        folder = tmp_path / "w" / "a" / server.status().run
        with pytest.raises(StoreError) as refused:
            atoll.join(server.url, site="a", folder=tmp_path / "w")
    assert str(refused.value) == (
        f"The folder {folder} cannot be made (Not a directory). Set ATOLL_DIR to a folder that this user may write."
    )


@pytest.mark.parametrize("run", ["", ".", "..", "../b", "/tmp/b", "a/b", "a\n"])
def test_run_ids_that_leave_the_folder_are_refused(tmp_path: Path, run: str) -> None:
    """A site refuses a run id that leads out of the site's folder, and creates no folder."""
    # The run id comes from the server and names the folder. The site removes other folders beside this one.
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        answers = {path: get(server.url, path)[1] for path in ("/v1/run", "/v1/schema")}
    answers["/v1/run"]["run"] = run

    def answer(connection: Connection, request: Request) -> None:
        """A worker that takes the id goes on to join."""
        known = request.method == "GET"
        connection.answer(*((200, json.dumps(answers[request.path]).encode()) if known else (401,)))

    with Peer.answering(answer) as hostile, pytest.raises(PeerError, match="not a valid RunInfo"):
        atoll.join(hostile.url, site="a", folder=tmp_path / "w")
    assert not (tmp_path / "w").exists()


@pytest.mark.covers("D4")
def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    """If another process holds the lock of an earlier run's folder, a joining site keeps this folder. The next time it
    joins, the lock is free, and it removes the folder.
    """
    first = one_run(tmp_path, "first")
    with (first / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one_run(tmp_path, "second")
        assert (first / "base.safetensors").exists()
    third = one_run(tmp_path, "third")
    assert list(third.parent.iterdir()) == [third]


@pytest.mark.covers("F29")
@pytest.mark.parametrize("lock", ["there", "removed", "another file"])
def test_a_second_process_on_a_folder_is_refused(tmp_path: Path, lock: str) -> None:
    """A second worker of a site on the same folder is refused, even if the lock file was removed or replaced. After the
    first worker has left, the site can join again.
    """
    where = tmp_path / "workers"
    with serve(tmp_path) as server:
        with atoll.join(server.url, site="a", folder=where):
            (path,) = where.glob("a/*/lock")
            assert str(os.getpid()) in path.read_text()
            if lock != "there":
                path.unlink()
            if lock == "another file":
                path.write_text("process 1 on nowhere\n")
            with pytest.raises(StateLocked):
                atoll.join(server.url, site="a", folder=where)
        FederatedSites(server.url, tmp_path).join()  # the lock has ended with its worker


FORKS = """
import os, signal
import atoll
with atoll.join() as worker:
    if not os.fork():
        print("child", os.getpid(), flush=True)
    signal.pause()
"""


def test_a_site_joins_beside_an_orphan(tmp_path: Path, nursery: Nursery) -> None:
    """After a site's script was killed, the site can join again while a child that the script has forked still runs.

    While the script itself runs, the folder is locked.
    """
    with serve(tmp_path) as server:
        script = ForkedSite(nursery, tmp_path, server.url, "a", FORKS).start()
        child = int(wait_for_words(script, r"child (\d+)")[1])
        try:
            with pytest.raises(StateLocked, match=f"process {script.pid} on "):
                atoll.join(server.url, site="a", folder=tmp_path / "workers")
            script.kill()
            with atoll.join(server.url, site="a", folder=tmp_path / "workers"):
                os.kill(child, 0)  # it still runs
        finally:
            os.kill(child, signal.SIGKILL)


def test_an_outbox_of_another_site_is_not_sent(tmp_path: Path) -> None:
    """A site does not send an outbox that belongs to another site."""
    # The folder of `a` is a copy of the folder of `b`. The update of `b` must not count again as that of `a`: (2 + 4)/2
    # = 3.
    with World(tmp_path, {"w": torch.zeros(1)}, rounds=2) as world:
        world.pull(number=1)
        world.submit("b", 2.0)
        world.sites.pop("a").close()
        put_back(world.workers / "b", world.workers / "a")
        world.move("a", 1, 4.0)  # it is not served from b's outbox
        world.wait(1)
        world.pull("a", number=2)
        assert world.model["w"].tolist() == [3.0]
