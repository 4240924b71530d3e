"""A workflow that is killed with its server goes on after a restart: to the same bits, and no task is done twice."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import Nursery, Process, RestartedProcess, free_port, wait_until
from kit.processes import toml
from kit.workflows import AnsweringSites, workflow_server

from atoll.errors import RunFailed
from atoll.server.tasks import workflow_journal

FLOWS = Path(__file__).with_name("flows.py")
AT_EVERY_FACT = ["workflow.fact=kill@1"] * 40
"""Failpoints of the starts: each dies as soon as it has recorded one more fact than the start before it."""
BEFORE_EVERY_FACT = ["workflow.before=kill@2"] * 40
"""Each dies before its second fact is in the journal, so the site has had no word that its answer arrived."""


class Flow:
    """`atoll server` with one workflow of `flows.py`, and its sites, in a folder."""

    def __init__(self, nursery: Nursery, folder: Path, function: str, **settings: Any) -> None:
        folder.mkdir(exist_ok=True)
        shutil.copy(FLOWS, folder)
        self.nursery, self.folder, self.port = nursery, folder, free_port()
        self.write(function, **settings)

    def write(self, function: str, **settings: Any) -> None:
        args = settings.pop("args", {})
        values = {
            "network.port": self.port,
            "disk.state_dir": "state",
            "disk.min_free_bytes": 0,
            "workflow.streamed_tasks": ["train"],
            "workflow.steps": [{"path": f"flows.py:{function}", "args": args}],
        } | settings
        (self.folder / "run.toml").write_text("".join(f"{key} = {toml(value)}\n" for key, value in values.items()))

    def start(self, failpoints: str = "") -> Process:
        log = self.folder / "server.log"
        return self.nursery.start("atoll", "server", "run.toml", cwd=self.folder, failpoints=failpoints, log=log)

    def sites(self, names: Iterable[str]) -> list[Process]:
        url = f"http://127.0.0.1:{self.port}"
        return [self.nursery.start("flows.py", url, name, cwd=self.folder) for name in names]

    def run(self, names: str, lives: list[str]) -> int:
        """Run to the end. Return how often the server was killed."""
        server = RestartedProcess(self.start, lives)
        sites = self.sites(names)
        assert server.wait(150) == 0, self.log
        for name, site in zip(names, sites, strict=True):
            assert name == "d" or site.wait(60) == 0, site.output()  # d hangs in its task
        return server.deaths

    @property
    def log(self) -> str:
        return (self.folder / "server.log").read_text()

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    @property
    def final(self) -> bytes:
        return np.load(self.folder / "final.npy").tobytes()


def means(rounds: int) -> bytes:
    """What `loop` ends with, from sites a and b."""
    w = np.arange(2000, dtype=np.float32) / np.float32(7)
    for _ in range(rounds):
        a, b = (w * np.float32(1.1) + np.float32(ord(site) / 3) for site in "ab")
        w = (a + b) / np.float32(2)
    return w.tobytes()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.covers("T14")
@pytest.mark.parametrize("lives", [AT_EVERY_FACT, BEFORE_EVERY_FACT], ids=["after", "before"])
def test_a_loop_killed_at_every_message_ends_with_the_same_bits(
    nursery: Nursery, tmp_path: Path, lives: list[str]
) -> None:
    """If the server is killed at each message, a loop of broadcasts ends as an undisturbed one. No site does a task
    twice, and random numbers and times are those of the first start.
    """
    flow = Flow(nursery, tmp_path, "loop")
    # begin, seed, time, sites; for each of 3 rounds: the task, 2 answers, its end
    facts = 4 + 3 * 4
    assert flow.run("ab", lives) == (facts if lives is AT_EVERY_FACT else facts - 1)
    assert flow.final == means(3)
    assert flow.lines("done-a.txt") == flow.lines("done-b.txt") == ["train 0", "train 1", "train 2"]
    drawn = flow.lines("drawn.txt")
    assert len(drawn) > 10
    assert len(set(drawn)) == 1
    assert not list((tmp_path / "state" / "answers").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_results_as_they_come_are_replayed_in_their_order(nursery: Nursery, tmp_path: Path) -> None:
    """A workflow with `on_result`, `min_responses` and `timeout_s` that is killed at each message hears each result in
    the order in which it came, and its errors again.
    """
    flow = Flow(nursery, tmp_path, "as_they_come")
    # begin, sites; the first task, its 3 answers and its end; the second, its answer and its end; the third with its 2
    assert flow.run("abcd", AT_EVERY_FACT) == 2 + 5 + 3 + 3
    a, b = (np.ones(2000, np.float32) * np.float32(ord(site)) / np.float32(3) for site in "ab")
    assert flow.final == ((a + b) * np.float32(1.1) + np.float32(ord("a") / 3)).tobytes()
    assert flow.lines("done-a.txt") == ["late", "train 9"]
    assert flow.lines("done-b.txt") == flow.lines("done-d.txt") == ["late"]
    assert flow.lines("done-c.txt") == ["late", "late"]
    orders = flow.lines("order.txt")
    assert len(orders) > 5
    assert len(set(orders)) == 1
    assert set(flow.lines("error.txt")) == {
        "Task 'late' got 0 of 1 answer: c failed: ValueError: no data here; d did not answer. See the logs of these "
        "sites."
    }


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_threads_of_a_workflow_get_what_they_asked_for(nursery: Nursery, tmp_path: Path) -> None:
    """Threads of a function that send tasks at the same time get the answers to what each of them asks."""
    flow = Flow(nursery, tmp_path, "side_by_side")
    assert flow.run("ab", AT_EVERY_FACT) >= 2 + 4
    ones = np.ones(4, np.float32) * np.float32(1.1)
    a, b = ones + np.float32(ord("a") / 3), ones + np.float32(ord("b") / 3)
    assert flow.final == (a + a + b + b).tobytes()
    assert flow.lines("done-a.txt") == flow.lines("done-b.txt") == ["train 0", "train 1"]


# -- a function that asks otherwise

Function = Callable[[Any], None]
KEPT = {"payload": {"w": torch.ones(2000)}, "sites": ["a"]}


def stopped_after(folder: Path, first: Function, **settings: Any) -> list[str]:
    """Run a workflow until `first` has returned, and stop the server. The files of answers that it has kept."""
    reached = threading.Event()

    def main(controller: Any) -> None:
        first(controller)
        reached.set()
        controller.sites(at_least=9)  # until the server stops

    with workflow_server(folder, main, **settings) as server:
        sites = AnsweringSites(server.url, "a", {"train": lambda payload: payload})
        wait_until(reached.is_set, "the end of the first part")
        kept = sorted(path.name for path in (folder / "state" / "answers").glob("*"))
        server.stop()
        del sites
    return kept


def trained(controller: Any, **changed: Any) -> Any:
    given = KEPT | {"task": "train"} | changed
    return controller.broadcast(given.pop("task"), **given)


def second_start(folder: Path, function: Function, **settings: Any) -> None:
    with workflow_server(folder, function, **settings) as server:
        assert server.wait(60), "the workflow has not ended"
        server.run()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"payload": {"w": torch.zeros(2000)}}, r"call 1 is task 'train' to a with the payload \w{8}, but was task"),
        ({"payload": "text"}, "call 1 is task 'train' to a with the payload"),
        ({"task": "validate"}, "call 1 is task 'validate' to a .*, but was task 'train' to a"),
        ({"sites": ["a", "b"]}, "call 1 is task 'train' to a and b .*, but was task 'train' to a with"),
    ],
    ids=["payload", "without-tensors", "task", "sites"],
)
def test_a_function_that_asks_otherwise_is_ended(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    """After a restart, a function with another call is ended with the first difference and the remedy, even if it
    catches every error. The journal stays, so the function of before goes on.
    """

    def catches(controller: Any) -> None:
        with contextlib.suppress(Exception):
            trained(controller, **changed)
        raise AssertionError("not ended")

    kept = stopped_after(tmp_path, trained)
    assert len(kept) == 1
    for _ in range(2):
        with pytest.raises(RunFailed, match=f"The workflow catches asks otherwise .*: {message}.*--fresh"):
            second_start(tmp_path, catches)
    found: list[Any] = []
    second_start(tmp_path, lambda controller: found.extend(trained(controller)))
    assert torch.equal(found[0].payload["w"], KEPT["payload"]["w"])
    assert not list((tmp_path / "state" / "answers").glob("*"))


def test_another_order_of_calls_is_named(tmp_path: Path) -> None:
    stopped_after(tmp_path, lambda controller: (controller.sites(at_least=1), trained(controller)))
    with pytest.raises(RunFailed, match=r"call 1 is task 'train' to a .*, but was sites\(at_least=1\)"):
        second_start(tmp_path, trained)


def test_a_call_that_no_longer_comes_is_named(tmp_path: Path) -> None:
    """A function that ends before it has asked all that it had asked is refused at its end."""
    stopped_after(tmp_path, trained)
    with pytest.raises(RunFailed, match="it has ended without task 'train' to a with the payload"):
        second_start(tmp_path, lambda controller: None)


def test_another_task_of_a_thread_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread's task that the journal lacks waits for those that it has. If they do not come, the error names both."""
    monkeypatch.setattr(workflow_journal, "ASKED_S", 0.2)

    def in_thread(controller: Any, **changed: Any) -> None:
        def ask() -> None:
            with contextlib.suppress(BaseException):  # what ends the workflow
                trained(controller, **changed)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()

    stopped_after(tmp_path, in_thread)
    with pytest.raises(RunFailed, match=r"a thread of it asks task 'train' to a .*, but none asks task 'train' to a"):
        second_start(tmp_path, lambda controller: in_thread(controller, payload=None))
    second_start(tmp_path, in_thread)


def test_a_workflow_that_failed_begins_again(tmp_path: Path) -> None:
    """A function that raises is not replayed into the same error: the next start begins it from its beginning."""

    def fails(controller: Any) -> None:
        trained(controller)
        raise ValueError("wrong")

    with workflow_server(tmp_path, fails) as server:
        AnsweringSites(server.url, "a", {"train": lambda payload: payload})
        with pytest.raises(RunFailed, match="wrong"):
            server.run()
    second_start(tmp_path, lambda controller: None)


# -- the room


def test_beyond_its_room_nothing_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If answers take more than `disk.workflow_max_bytes`, the run goes on without them, and says what a restart does.
    The restart begins the workflow again, and says why.
    """

    def twice(controller: Any) -> None:
        trained(controller)
        assert len(list((tmp_path / "state" / "answers").glob("*"))) == 1
        trained(controller)
        (warning,) = [each for each in controller.queue.warnings() if "no longer kept" in each]
        assert "take more than 30000 bytes (disk.workflow_max_bytes)" in warning
        trained(controller)

    room = {"disk.workflow_max_bytes": 30_000}  # 17 kB of random states, 8 kB an answer
    with caplog.at_level(logging.WARNING, "atoll.server"):
        assert stopped_after(tmp_path, twice, **room) == []
    assert "A restart of the server would begin the workflow from its beginning" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "atoll.server"):
        second_start(tmp_path, lambda controller: None, **room)
    assert "begins again from its beginning: what it has got is no longer kept" in caplog.text


def test_answers_make_room_on_a_full_disk(tmp_path: Path) -> None:
    """What is kept for a restart is removed before the disk gets too full for uploads."""

    def main(controller: Any) -> None:
        trained(controller)
        facts = controller.run.store.facts
        free = controller.run.store.free_bytes
        controller.run.store.free_bytes = lambda: free() if facts.why_dropped else 0
        trained(controller)
        assert "the disk has too little space" in facts.why_dropped

    assert stopped_after(tmp_path, main, **{"disk.min_free_bytes": 1}) == []


@pytest.mark.parametrize("damage", ["remove", "cut"])
def test_a_damaged_answer_is_named(tmp_path: Path, damage: str) -> None:
    (name,) = stopped_after(tmp_path, trained)
    path = tmp_path / "state" / "answers" / name
    path.unlink() if damage == "remove" else path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(RunFailed, match=rf"The answer of a site in .*{name} (cannot be read|has \d+ bytes instead)"):
        second_start(tmp_path, trained)


def test_files_that_no_fact_names_are_removed(tmp_path: Path) -> None:
    """A file that a killed server left before the answer was in the journal goes away at the next start."""
    (name,) = stopped_after(tmp_path, trained)
    (tmp_path / "state" / "answers" / "left").touch()
    assert stopped_after(tmp_path, trained) == [name]
