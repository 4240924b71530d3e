"""Filters of tasks while something else happens: the same answer again, the end of a task, another payload."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from task_filter_world import Broken, Halved, left, model, serving, sites
from torch import Tensor

import atoll
from atoll.filters import CHUNK_ELEMENTS, Filter, NormClip, Outgoing
from atoll.protocol import task_messages as tm


@pytest.mark.covers("T8", "T6")
@pytest.mark.parametrize("broken", [False, True])
def test_memory_of_what_was_filtered_is_given_back_at_once(tmp_path: Path, broken: bool) -> None:
    """At the server when the task is over, at the site when the answer is, or when its filter has failed."""
    came: dict[str, Any] = {}
    sent: list[weakref.ref[Tensor]] = []
    answered: list[weakref.ref[Tensor]] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        payload = model()
        sent.append(weakref.ref(payload["model"]["w"]))
        results = controller.broadcast("train", payload, timeout_s=30)
        del payload
        came["ok"] = [result.ok for result in results]
        came["sent"] = sent[0]()
        del results
        controller.broadcast("measure", None, timeout_s=30)

    def train(payload: Any) -> Any:
        result = {"model": {"w": torch.ones(5)}}
        answered.append(weakref.ref(result["model"]["w"]))
        return result

    def measure(_: Any) -> Any:
        return all(each() is None for each in answered)

    filters = [Broken() if broken else NormClip(1.0)]
    gc.disable()
    try:
        with serving(tmp_path, main, data_filters={"a": filters}, filters={"b": [Halved()]}) as server:
            with sites(server, {"train": train, "measure": measure}, b=filters):
                assert server.wait(60)
                came["measured"] = [each() for each in answered]
    finally:
        gc.enable()
    assert came["ok"] == [not broken, not broken]
    assert came["sent"] is None
    assert came["measured"] == [None] * len(answered)
    assert len(answered) == (1 if broken else 2)


@pytest.mark.covers("T8", "T2")
def test_an_answer_that_comes_again_while_it_is_filtered_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that got no word in time says it again: it waits for the same, and the filter works once."""
    begun, go = threading.Event(), threading.Event()
    begins: list[str] = []

    class Slow(Filter):
        def begin(self, update: Outgoing) -> None:
            begins.append(update.about.site)
            begun.set()
            assert go.wait(30)

    came: dict[str, Any] = {}
    kept: list[tuple[str, tm.TaskAnswer]] = []

    def main(controller: Any) -> None:
        came["w"] = controller.send("a", "train", None, timeout_s=60).payload["w"].tolist()

    with serving(tmp_path, main, filters=[Slow(), Halved()]) as server, atoll.tasks(server.url, "a") as worker:
        task = next(iter(worker.tasks()))
        queue, http = server._run.task_queue, task._connection.http  # type: ignore[union-attr]
        send, is_taken, asked = http.send, queue.is_taken, list[str]()

        def counted(*which: str) -> bool:
            asked.append(which[0])
            return is_taken(*which)

        def noted(path: str, message: Any, **options: Any) -> None:
            if isinstance(message, tm.TaskAnswer):
                kept.append((path, message))
            send(path, message, **options)

        monkeypatch.setattr(http, "send", noted)
        monkeypatch.setattr(queue, "is_taken", counted)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(task.answer, {"w": torch.tensor([2.0, 4.0])})
            assert begun.wait(30)
            again = pool.submit(send, *kept[0])
            wait_until(lambda: len(asked) == 2, "that both wait")
            go.set()
            assert first.result(30) is True
            again.result(30)
    assert begins == ["a"]
    assert came["w"] == [1.0, 2.0]


@pytest.mark.covers("T8", "T7")
def test_a_task_that_ends_while_its_answer_is_filtered_leaves_nothing(tmp_path: Path) -> None:
    begun, go = threading.Event(), threading.Event()

    class Slow(Filter):
        def begin(self, update: Outgoing) -> None:
            begun.set()
            assert go.wait(30)

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        assert controller.broadcast("train", None, timeout_s=3.0) == []
        go.set()
        assert over.wait(30)

    over = threading.Event()
    with serving(tmp_path, main, filters=[Slow()]) as server, atoll.tasks(server.url, "a") as worker:
        for task in worker.tasks():
            if not over.is_set():
                assert task.answer({"w": torch.ones(5)}) is False
                assert begun.is_set()
                wait_until(lambda: left(tmp_path) == [], "the end of what was being filtered")  # by another thread
                over.set()


@pytest.mark.covers("T8", "T10")
def test_what_is_pulled_ahead_is_the_sites_own(tmp_path: Path) -> None:
    """Several tasks are open for the site: each is behind its filters, whenever its tensors come."""
    came: list[float] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        with ThreadPoolExecutor(3) as pool:
            sent = [{"w": torch.full((3,), 2.0 * number)} for number in (1, 2, 3)]
            done = pool.map(lambda each: controller.send("a", "train", each, timeout_s=30), sent)
            came.extend(result.payload for result in done)

    with serving(tmp_path, main, data_filters={"a": [Halved()]}) as server:
        with atoll.tasks(server.url, "a", request_task_tensors=False) as worker:
            worker.task("train")(lambda payload: payload["w"].mean().item())
            worker.run()
    assert came == [1.0, 2.0, 3.0]


@pytest.mark.covers("T8")
def test_two_payloads_of_one_site_do_not_meet_in_its_filter(tmp_path: Path) -> None:
    """A filter keeps state from the begin of a payload to its end; a workflow may send from several threads."""
    size = 2 * CHUNK_ELEMENTS
    entered: list[float] = []

    class First(Filter):
        """Divides by the first value that it saw."""

        def begin(self, update: Outgoing) -> None:
            (name,) = update.tensors
            self.by = update.changes(name, 0, 1).item()
            entered.append(self.by)

        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            return values.div_(self.by)

    came: list[Tensor] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        with ThreadPoolExecutor(4) as pool:
            payloads = [{"w": torch.full((size,), float(number))} for number in range(1, 9)]
            done = pool.map(lambda each: controller.send("a", "train", each, timeout_s=60), payloads)
            came.extend(result.payload["w"] for result in done)

    with serving(tmp_path, main, data_filters={"a": [First()]}, **{"workflow.streamed_tasks": ("train",)}) as server:
        with atoll.tasks(server.url, "a") as worker:
            worker.task("train")(lambda payload: payload)
            worker.run()
    assert sorted(entered) == [float(number) for number in range(1, 9)]
    assert all(torch.equal(each, torch.ones(size)) for each in came)
