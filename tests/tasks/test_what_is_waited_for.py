"""What a workflow waits for before a site has its payload: the site's filters, and a disk that has no space."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit import Threads
from kit.workflows import AnsweringSites, kept_objects, workflow_server
from torch import Tensor

import atoll
from atoll.errors import DiskFull
from atoll.filters import Drop, Filter
from atoll.server.coordinator.build_status import status_of
from atoll.server.tasks import task_payloads, user_code
from atoll.server.tasks.task_queue import Answer
from atoll.server.tasks.workflow_controller import Result

TREE = {"w": torch.ones(3)}


def played(server: atoll.Server, names: str, handler: Callable[[Any], Any] = lambda payload: payload) -> None:
    """These sites answer until the workflow has ended."""
    with server:
        answering = AnsweringSites(server.url, names, {"train": handler})
        assert server.wait(60)
        answering.join()


@pytest.mark.covers("T8", "T3")
def test_sends_no_payload_through_a_filter_that_hangs_and_serves_the_others(tmp_path: Path) -> None:
    """When the filter ends after all, what it has left is removed: nobody waits for it."""
    go, came = threading.Event(), dict[str, Any]()

    class Hanging(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            assert go.wait(60)
            return values

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        try:
            results = controller.broadcast("train", TREE, timeout_s=1.0)
            came.update({each.site: each.payload["w"].tolist() if each.ok else each.error for each in results})
        finally:
            go.set()
        wait_until(lambda: kept_objects(tmp_path) == [], "that nothing is left")

    options: dict[str, Any] = {"data_filters": {"a": [Hanging()]}, "workflow.streamed_tasks": ("train",)}
    played(workflow_server(tmp_path, main, **options), "ab")
    assert came == {
        "a": "The server's filters at the payload of task 'train' for a were not done after 1 s: it is not sent. "
        "Look at their code, or give more time.",
        "b": [1.0] * 3,
    }


class Waiting(Filter):
    """Hangs until the event is set."""

    def __init__(self, go: threading.Event, began: Callable[[], None]) -> None:
        self.go, self.began = go, began

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        self.began()
        assert self.go.wait(60)
        return values


@pytest.mark.covers("T8")
def test_a_filter_that_hangs_at_every_task_leaves_room_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for two at a time. a has been sent three tasks in vain before b is sent one; its filter, which is
    at the first, begins none of the others.
    """
    monkeypatch.setattr(user_code, "AT_ONCE", 2)
    go, came, begun = threading.Event(), list[Any](), list[int]()

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        try:
            for _ in range(3):
                assert not controller.send("a", "train", TREE, timeout_s=0.3).ok
            assert begun == [1]
            came.append(controller.send("b", "train", TREE, timeout_s=30).payload["w"].tolist())
        finally:
            go.set()

    played(
        workflow_server(tmp_path, main, data_filters={"a": [Waiting(go, lambda: begun.append(1))], "b": [Filter()]}),
        "ab",
    )
    assert came == [[1.0] * 3]


@pytest.mark.covers("T8")
def test_hanging_filters_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """a's filter ends when c's begins, and c's when a's has begun."""
    one, other = threading.Event(), threading.Event()

    class Meeting(Filter):
        def __init__(self, mine: threading.Event, theirs: threading.Event) -> None:
            self.mine, self.theirs = mine, theirs

        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            self.mine.set()
            assert self.theirs.wait(30)
            return values

    came: dict[str, bool] = {}

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        came.update({each.site: each.ok for each in controller.broadcast("train", TREE, timeout_s=60)})

    played(workflow_server(tmp_path, main, data_filters={"a": [Meeting(one, other)], "c": [Meeting(other, one)]}), "ac")
    assert came == {"a": True, "c": True}


@pytest.mark.covers("T8")
def test_answers_that_hang_in_filters_are_let_go_with_their_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one at a time. a is told that its tasks are over, and b's answer is filtered then."""
    monkeypatch.setattr(user_code, "AT_ONCE", 1)
    go, came, taken, begun = threading.Event(), list[Any](), list[bool](), list[int]()
    waiting = Waiting(go, lambda: begun.append(1))

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        try:
            for number in (1, 2):
                assert controller.broadcast("train", TREE, sites=["a"], timeout_s=1.0) == []
                wait_until(lambda number=number: len(taken) == number, "that a is told")  # type: ignore[misc]
            assert begun == [1]
            came.append(controller.send("b", "train", TREE, timeout_s=30).payload["w"].tolist())
        finally:
            go.set()

    server = workflow_server(
        tmp_path, main, filters={"a": [waiting], "b": [Filter()]}, **{"workflow.streamed_tasks": ("train",)}
    )

    def a() -> None:
        with atoll.tasks(server.url, "a") as worker:
            for task in worker.tasks():
                taken.append(task.answer(task.payload))

    with server:
        running = Threads(a), AnsweringSites(server.url, "b", {"train": lambda payload: payload})
        assert server.wait(60)
        for sites in running:
            sites.join()
    assert (taken, came) == ([False, False], [[1.0] * 3])


@pytest.mark.covers("T2", "X3")
def test_a_payload_waits_for_space_and_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """256 MB are to be kept free. Three times less is, then more; status says so meanwhile."""
    monkeypatch.setattr(task_payloads, "RETRY_S", 0.01)
    free = iter([10, 10, 10])
    came: list[Any] = []
    warned: list[list[str]] = []

    def measured() -> int:
        assert server._run is not None
        warned.append(status_of(server._run).warnings)
        return next(free, 2**40)

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        monkeypatch.setattr(server._run.store, "free_bytes", measured)  # type: ignore[union-attr]
        came.extend(controller.broadcast("train", TREE, timeout_s=30))
        warned.append(status_of(server._run).warnings)  # type: ignore[arg-type]

    server = workflow_server(
        tmp_path, main, **{"disk.min_free_bytes": 256 * 10**6, "workflow.streamed_tasks": ("train",)}
    )
    played(server, "a")
    assert came[0].payload["w"].tolist() == [1.0] * 3
    told = "The server has 0 MB of disk left, and keeps 256 MB free. It goes on when there is space; nothing is lost."
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"task 'train' cannot be sent: {told}"
    ]
    assert warned[:4] == [[], [told], [told], [told]]
    assert warned[-1] == []


@pytest.mark.covers("T2", "X3")
def test_a_disk_that_stays_full_is_waited_for_no_longer_than_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_payloads, "RETRY_S", 0.01)
    raised: list[BaseException] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        monkeypatch.setattr(server._run.store, "free_bytes", lambda: 0)  # type: ignore[union-attr]
        with pytest.raises(DiskFull) as caught:
            controller.broadcast("train", TREE, timeout_s=0.1)
        raised.append(caught.value)
        assert controller.broadcast("train", {"plain": 1}, timeout_s=30)[0].payload == {"plain": 1}  # takes no disk

    server = workflow_server(tmp_path, main, **{"disk.min_free_bytes": 1})
    played(server, "a")
    assert "0 MB of disk left" in str(raised[0])


@pytest.mark.covers("T8", "X3")
def test_an_answer_that_is_filtered_waits_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site is told to come back, and what it has sent is still there: it is sent once."""
    came: list[Any] = []
    asked, opened = list[int](), list[int]()

    def required() -> None:
        asked.append(1)
        if len(asked) == 1:
            server._run.store.require_space(2**60)  # type: ignore[union-attr]

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        objects = server._run.objects  # type: ignore[union-attr]
        monkeypatch.setattr(server._run.task_queue, "_require_space", required)  # type: ignore[union-attr]
        begin = objects.open
        monkeypatch.setattr(objects, "open", lambda *a, **k: opened.append(1) or begin(*a, **k))  # type: ignore[func-returns-value]
        came.extend(controller.broadcast("train", None, timeout_s=30))

    server = workflow_server(tmp_path, main, filters=[Drop("b")], **{"workflow.streamed_tasks": ("train",)})
    played(server, "a", lambda _: {"w": torch.ones(3), "b": torch.ones(2)})
    assert came[0].payload["w"].tolist() == [1.0] * 3
    assert came[0].payload["b"] is None
    assert (len(asked), len(opened)) == (2, 1)


@pytest.mark.covers("T14")
def test_a_payload_that_two_threads_ask_for_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    asked = threading.Barrier(2)
    text = Result._tree

    def slow(result: Result) -> Any:
        made.append(result)
        asked.wait(30)
        return text(result)

    monkeypatch.setattr(Result, "_tree", slow)
    result = Result("train", Answer("a", "key", text='{"kind":"plain"}'))

    def second() -> Any:
        asked.wait(30)
        return result.payload

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(lambda: result.payload), pool.submit(second)]
        assert found[0].result(30) is found[1].result(30)
    assert made == [result]


@pytest.mark.covers("T8")
def test_warns_of_filters_for_no_site_with_the_nearest_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        for _ in range(2):
            controller.broadcast("train", TREE, timeout_s=30)

    entries = ({"path": "drop", "args": ["b"], "sites": ["clinic-b"], "tasks": ["train"]},)
    options: dict[str, Any] = {"workflow.payload_filters": entries, "filters": {"clinic-a": {"trian": [Drop("b")]}}}
    server = workflow_server(tmp_path, main, **options)

    def site() -> None:
        with atoll.tasks(server.url, "clinic-a") as worker:
            worker.task("train")(lambda payload: payload)
            worker.run()

    with server:
        site()
        assert server.wait(60)
    told = [record for record in caplog.records if (record.name, record.levelno) == ("atoll.server", logging.WARNING)]
    assert [record.getMessage() for record in told] == [
        "workflow.payload_filters are for site 'clinic-b', which has not taken part. Did you mean 'clinic-a'?",
        "workflow.result_filters are for task 'trian', which was not sent. Did you mean 'train'?",
    ]
