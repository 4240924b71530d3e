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
    caplog.set_level(logging.INFO, "atoll")
    first = one_run(tmp_path, "first", **settings)
    assert (first / kept).exists()
    second = one_run(tmp_path, "second")
    assert list(second.parent.iterdir()) == [second]
    told = [line for line in caplog.messages if "removed the files" in line]
    assert len(told) == 1
    assert told[0].startswith("a: freed ")


@pytest.mark.covers("D4", "X3")
def test_changed_folders_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that changes the current folder does no harm.

    Both folders are relative to the one that the processes were started in.
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
    """What may still be needed, or is not Atoll's, stays."""
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
    """Nothing is removed or written by way of a link.

    Guards against a link to a folder, or in one: its target was emptied: it is not in the site's folder.
    """
    first = one_run(tmp_path, "first")
    target = moved_away(first / name) if name else moved_away(first)
    files = sorted(target.iterdir()) if target.is_dir() else [target]
    before = [(file, file.read_bytes()) for file in files]
    one_run(tmp_path, "second")
    assert [(file, file.read_bytes()) for file in files] == before
    assert (first / name).is_symlink()


def test_a_linked_lock_is_refused(tmp_path: Path) -> None:
    """A link in place of one's own lock is refused."""
    (tmp_path / "other.csv").write_text("a row")
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        folder = tmp_path / "w" / "a" / server.status().run
        folder.mkdir(parents=True)
        (folder / "lock").symlink_to(tmp_path / "other.csv")
        with pytest.raises(StoreError, match=r"lock cannot be opened .*plain file"):
            atoll.join(server.url, site="a", folder=tmp_path / "w")
    assert (tmp_path / "other.csv").read_text() == "a row"


@pytest.mark.covers("X3")
def test_an_impossible_folder_is_named(tmp_path: Path) -> None:
    """A folder that cannot be made is named with the remedy."""
    (tmp_path / "w").write_text("a file, in which no folder can be made")
    with plain_server(tmp_path, nn.Linear(8, 4)) as server:
        folder = tmp_path / "w" / "a" / server.status().run
        with pytest.raises(StoreError) as refused:
            atoll.join(server.url, site="a", folder=tmp_path / "w")
    assert str(refused.value) == (
        f"The folder {folder} cannot be made (Not a directory). Set ATOLL_DIR to a folder that this user may write."
    )


@pytest.mark.parametrize("run", ["", ".", "..", "../b", "/tmp/b", "a/b", "a\n"])
def test_refuses_run_ids_that_lead_out(tmp_path: Path, run: str) -> None:
    """A run id that leads out of the site's folder is refused.

    The id comes from the server, and names the folder beside which others are removed.
    """
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
    first = one_run(tmp_path, "first")
    with (first / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        one_run(tmp_path, "second")
        assert (first / "base.safetensors").exists()
    third = one_run(tmp_path, "third")
    assert list(third.parent.iterdir()) == [third]


@pytest.mark.covers("F29")
@pytest.mark.parametrize("lock", ["there", "removed", "another file"])
def test_a_folder_has_one_process(tmp_path: Path, lock: str) -> None:
    """Refuses a second process of a site on its folder."""
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
    """A site joins again beside a child of its killed script. The child, which the script has forked, still runs."""
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
    """a's folder is a copy of b's: b's update must not count once more as a's."""
    with World(tmp_path, {"w": torch.zeros(1)}, rounds=2) as world:
        world.pull(number=1)
        world.submit("b", 2.0)
        world.sites.pop("a").close()
        put_back(world.workers / "b", world.workers / "a")
        world.move("a", 1, 4.0)  # it is not served from b's outbox
        world.wait(1)
        world.pull("a", number=2)
        assert world.model["w"].tolist() == [3.0]
