"""Filters of tasks, at the server and at a site: what one site is sent, and what is taken of its answer."""

from __future__ import annotations

import gc
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_filters import Infinite, Shorter, Undecided
from torch import Tensor

import atoll
from atoll.config import Settings
from atoll.errors import Busy, ConfigError, RunFailed, UsageError
from atoll.filters import Drop, Filter, NormClip, Outgoing
from atoll.tensors.chunks import CHUNK_ELEMENTS
from atoll.testing.processes import wait_until
from atoll.wire import task_messages as tm

STREAMS = pytest.mark.parametrize("stream", [(), ("train",)], ids=["inline", "streamed"])


@contextmanager
def serving(folder: Path, workflow: Callable[[Any], None], **options: Any) -> Iterator[atoll.Server]:
    """To the workflow's end; then nothing is left of what was sent and answered."""
    server = atoll.Server(workflow=workflow, state_dir=folder / "state", **{"port": 0, "min_free_bytes": 0, **options})
    with server:
        yield server
        assert server.wait(60)
        server.run()
        assert left(folder) == []


def left(folder: Path) -> list[str]:
    """Files of objects that the server has, with a name or without."""
    found = [str(path) for path in (folder / "state" / "objects").glob("*")]
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(str(folder / "state" / "objects")):
                found.append(target)
    return found


@contextmanager
def sites(server: atoll.Server, handlers: dict[str, Callable[[Any], Any]], **filters: Any) -> Iterator[None]:
    """Sites a and b, in threads: each answers with the handler of a task's name."""
    with ExitStack() as stack:
        threads = []
        for name in "ab":
            worker = stack.enter_context(atoll.tasks(server.url, name, filters=filters.get(name, ())))
            for task, handler in handlers.items():
                worker.task(task)(handler)
            threads.append(threading.Thread(target=worker.run))
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join(60)


def model() -> dict[str, Any]:
    return {"model": {"w": torch.tensor([3.0, 4.0]), "head": np.zeros(2)}, "n": torch.tensor(9), "lr": 0.5}


def plain(tree: Any) -> Any:
    """With lists for tensors and arrays."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return tree.tolist() if isinstance(tree, Tensor | np.ndarray) else tree


class Halved(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        assert len(values) <= CHUNK_ELEMENTS
        return values.div_(2)


@pytest.mark.covers("T8", "T3", "T7")
@STREAMS
def test_the_run_file_says_what_a_site_is_sent_and_what_is_taken_of_its_answer(
    tmp_path: Path, stream: tuple[str, ...]
) -> None:
    """a is sent half of (3, 4), without the head, to train, and everything to measure; b is sent all it is, shared.

    They answer with what they were sent; of b's answers the norm is at most 2.5, which is half of (3, 4).
    """
    (tmp_path / "run.toml").write_text(
        """
        task_data_filters = [
            {path = "norm_clip", args = {max_norm = 2.5}, sites = ["a"], tasks = ["train"]},
            {path = "drop", args = ["*.head"], sites = ["a"], tasks = ["train"]},
        ]
        task_result_filters = [{path = "norm_clip", args = {max_norm = 2.5}, sites = ["b"]}]
        """
    )
    given = Settings.read(tmp_path / "run.toml", environ={})
    filters = {key: getattr(given, key) for key in ("task_data_filters", "task_result_filters")}
    came: dict[str, Any] = {}
    objects = []

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        for task in ("train", "measure"):
            results = controller.broadcast(task, model(), min_responses=2, timeout_s=30)
            came[task] = {result.site: result.payload for result in results}
        came["text"] = controller.send("b", "measure", "no tensors", timeout_s=30).payload

    def answer(payload: Any) -> Any:
        objects.append(len(list((tmp_path / "state" / "objects").glob("*.safetensors"))))
        return payload

    with serving(tmp_path, main, stream_tasks=stream, **filters) as server:
        with sites(server, {"train": answer, "measure": answer}):
            assert server.wait(60)
    whole = {"model": {"w": [3.0, 4.0], "head": [0.0, 0.0]}, "n": 9, "lr": 0.5}
    half = {"model": {"w": [1.5, 2.0], "head": [0.0, 0.0]}, "n": 9, "lr": 0.5}
    assert plain(came["train"]) == {"a": half | {"model": {"w": [1.5, 2.0], "head": None}}, "b": half}
    assert plain(came["measure"]) == {"a": whole, "b": half}
    assert isinstance(came["measure"]["b"]["model"]["head"], np.ndarray)
    assert came["measure"]["b"]["n"].dtype == torch.int64
    assert came["text"] == "no tensors"
    assert max(objects) <= 2  # one for a, one for everybody else


@pytest.mark.covers("T8", "T3")
def test_sites_without_filters_share_one_object_and_one_with_filters_does_not_keep_its_own(tmp_path: Path) -> None:
    """Three sites, one object for b and c; a's goes with a's answer, while the others are still at work."""

    def main(controller: Any) -> None:
        controller.broadcast("train", model(), sites=["a", "b", "c"], timeout_s=30)

    def files() -> int:
        return len(list((tmp_path / "state" / "objects").glob("*.safetensors")))

    with serving(tmp_path, main, data_filters={"a": [Halved()]}) as server, ExitStack() as stack:
        workers = {name: stack.enter_context(atoll.tasks(server.url, name)) for name in "abc"}
        tasks = {name: next(iter(worker.tasks())) for name, worker in workers.items()}
        assert {name: task.payload["model"]["w"].tolist() for name, task in tasks.items()} == {
            "a": [1.5, 2.0],
            "b": [3.0, 4.0],
            "c": [3.0, 4.0],
        }
        assert files() == 2
        assert len({task.id for task in tasks.values()}) == 1
        assert tasks["a"].answer(1)
        assert files() == 1
        assert tasks["b"].answer(1)
        assert files() == 1
        assert tasks["c"].answer(1)


@pytest.mark.covers("T8")
@STREAMS
def test_a_sites_own_filters_come_before_any_byte_leaves(tmp_path: Path, stream: tuple[str, ...]) -> None:
    """a drops its head and halves the rest, by the name of the task; the server's filter sees no more than that."""
    seen: dict[str, Any] = {}

    class Looking(Filter):
        def begin(self, update: Outgoing) -> None:
            about = update.about
            seen[about.site, about.task] = {name: update.tensor(name).tolist() for name in list(update.tensors)[:1]}
            seen["names", about.site, about.task] = sorted(update.tensors)

    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        for task in ("train", "measure"):
            results = controller.broadcast(task, None, min_responses=2, timeout_s=30)
            came[task] = {result.site: plain(result.payload["model"]) for result in results}

    def answer(_: Any) -> Any:
        return model()

    mine = {"a": {"train": [Drop("*.head"), Halved()]}}
    with serving(tmp_path, main, stream_tasks=stream, filters=[Looking()]) as server:
        with sites(server, {"train": answer, "measure": answer}, **mine):
            assert server.wait(60)
    whole = {"w": [3.0, 4.0], "head": [0.0, 0.0]}
    assert came == {"train": {"a": {"w": [1.5, 2.0], "head": None}, "b": whole}, "measure": {"a": whole, "b": whole}}
    assert seen["names", "a", "train"] == ["model.w", "n"]
    assert seen["a", "train"] == {"model.w": [1.5, 2.0]}
    assert seen["names", "a", "measure"] == ["model.head", "model.w", "n"]


class Broken(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        if name == "model.w":
            raise KeyError("salt")
        return values


FAILURES = {
    Broken: r"the filter Broken\(\) failed at 'model\.w': KeyError: 'salt'",
    Undecided: r"the filter Undecided\(\) failed at 'model\.\w+': KeyError: 'model\.\w+'",
    Shorter: r"the filter Shorter\(\) made torch\.float\d\d \[1\] where 'model\.\w+' had torch\.float\d\d \[2\]",
    Infinite: r"the filter Infinite\(\) left NaN or Inf in 'model\.\w+'",
}

WHOSE = {
    "data": "The payload of task 'train' for site b is not sent",
    "result": "The answer of site b to task 'train' is not used",
    "site": "The answer of site b to task 'train' is not sent",
}


@pytest.mark.covers("T8", "T7", "X3")
@pytest.mark.parametrize("where", WHOSE)
@pytest.mark.parametrize("kind", FAILURES)
def test_the_workflow_sees_a_site_fail_whose_filter_fails_and_the_others_go_on(
    tmp_path: Path, where: str, kind: type[Filter]
) -> None:
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        came["results"] = controller.broadcast("train", model(), min_responses=1, timeout_s=30)
        came["good"] = came["results"][0].payload
        with pytest.raises(RunFailed, match=r"got 1 of 2 answers: b failed: .*filter"):
            controller.broadcast("train", model(), min_responses=2, timeout_s=30)
        came["next"] = controller.send("b", "measure", 7, timeout_s=30).payload

    server_filters = {"data": "data_filters", "result": "filters"}
    options = {server_filters[where]: {"b": {"train": [kind()]}}} if where != "site" else {}
    mine = {"b": {"train": [kind()]}} if where == "site" else {}
    with serving(tmp_path, main, **options) as server:
        with sites(server, {"train": lambda payload: payload, "measure": lambda payload: payload + 1}, **mine):
            assert server.wait(60)
    good, bad = came["results"]
    assert good.ok
    assert plain(came["good"]["model"]["w"]) == [3.0, 4.0]
    assert not bad.ok
    assert re.search(f"{WHOSE[where]}: {FAILURES[kind]}", bad.error), bad.error
    with pytest.raises(RunFailed, match="Site b failed at task 'train'"):
        bad.payload  # noqa: B018
    assert came["next"] == 8


@pytest.mark.covers("T8", "X3")
def test_a_name_that_no_tensor_has_is_told_with_the_nearest(tmp_path: Path) -> None:
    """What it was to hold back would leave. In a loop of one's own the error is raised, and nothing was sent."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        came["error"] = controller.send("a", "train", None, timeout_s=30).error

    with serving(tmp_path, main) as server, atoll.tasks(server.url, "a", filters=[Drop("model.haed")]) as worker:
        for task in worker.tasks():
            with pytest.raises(UsageError, match=r"no tensor of the payload is called 'model.haed'") as raised:
                task.answer(model())
            task.fail(raised.value)
    assert "The answer of site a to task 'train' is not sent" in came["error"]
    assert "Did you mean 'model.head'?" in came["error"]


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
        desk, http = server._run.desk, task._connection.http  # type: ignore[union-attr]
        send, is_taken, asked = http.send, desk.is_taken, list[str]()

        def counted(*which: str) -> bool:
            asked.append(which[0])
            return is_taken(*which)

        def noted(path: str, message: Any, **options: Any) -> None:
            if isinstance(message, tm.TaskAnswer):
                kept.append((path, message))
            send(path, message, **options)

        monkeypatch.setattr(http, "send", noted)
        monkeypatch.setattr(desk, "is_taken", counted)
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
def test_an_answer_whose_task_ends_while_it_is_filtered_leaves_nothing(tmp_path: Path) -> None:
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
                assert left(tmp_path) == []
                over.set()


@pytest.mark.covers("T8", "T4")
def test_arrays_in_the_head_of_an_object_are_filtered_like_what_is_streamed(tmp_path: Path) -> None:
    """On all three ways: sent, answered, taken. 8 and 16 become 1 and 2."""
    came: dict[str, Any] = {}
    tree = {"w": torch.full((3,), 8.0), "b": np.full(2, 16.0), "n": np.arange(2)}

    def main(controller: Any) -> None:
        came["payload"] = controller.send("a", "train", tree, timeout_s=30).payload

    sizes = {"stream_tasks": ("train",), "np_download_chunk_size": 0}
    with serving(tmp_path, main, data_filters=[Halved()], filters=[Halved()], **sizes) as server:
        with atoll.tasks(server.url, "a", filters=[Halved()]) as worker:
            worker.task("train")(lambda payload: payload)
            worker.run()
    assert plain(came["payload"]) == {"w": [1.0] * 3, "b": [2.0] * 2, "n": [0, 1]}
    assert isinstance(came["payload"]["b"], np.ndarray)


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


@pytest.mark.covers("T8", "X3")
def test_a_task_that_no_site_can_be_sent_has_its_errors_at_once(tmp_path: Path) -> None:
    """Nobody is asked, so nobody is waited for; the site may not answer what it was not given."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        came["failed"] = controller.send("a", "train", model())
        came["next"] = controller.send("a", "measure", 1, timeout_s=30).payload

    with serving(tmp_path, main, data_filters=[Broken()]) as server, atoll.tasks(server.url, "a") as worker:
        worker.task("measure")(lambda payload: payload)
        worker.run()
        row = server._run.desk.status()[0]  # type: ignore[union-attr]
    assert "The payload of task 'train' for site a is not sent: the filter Broken()" in came["failed"].error
    assert came["next"] == 1
    assert (row.answers, row.missing) == ({"failed": 1}, [])


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

    with serving(tmp_path, main, data_filters={"a": [First()]}, stream_tasks=("train",)) as server:
        with atoll.tasks(server.url, "a") as worker:
            worker.task("train")(lambda payload: payload)
            worker.run()
    assert sorted(entered) == [float(number) for number in range(1, 9)]
    assert all(torch.equal(each, torch.ones(size)) for each in came)


@pytest.mark.covers("T8", "T7")
@pytest.mark.parametrize("where", ["data", "result"])
def test_a_disk_that_is_full_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """What a site is sent ends the workflow's call, as without filters; what it answered is that site's failure."""
    came: dict[str, Any] = {}

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        module = {"data": "parcels", "result": "task_filters"}[where]
        with monkeypatch.context() as patched:
            patched.setattr(f"atoll.server.{module}.write_object", full)
            try:
                came["told"] = controller.send("a", "train", model(), timeout_s=30).error
            except atoll.AtollError as error:
                came["told"] = str(error)
        came["next"] = controller.send("a", "train", model(), timeout_s=30).ok

    options = {"data_filters" if where == "data" else "filters": [Halved()]}
    with serving(tmp_path, main, **options) as server, atoll.tasks(server.url, "a") as worker:
        worker.task("train")(lambda payload: payload)
        worker.run()
    assert "is full" in came["told"]
    assert came["next"]


@pytest.mark.covers("T8", "T7")
def test_a_server_without_room_for_a_sites_own_payload_says_so_and_keeps_none(tmp_path: Path) -> None:
    """There is room for one object of 80 kB, not for that of b and, beside it, that of a."""
    came: list[Any] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        payload = {"w": torch.ones(20_000)}
        with pytest.raises(Busy, match="no room for a payload"):
            controller.broadcast("train", payload, timeout_s=30)
        came.append(left(tmp_path))
        came.append(controller.send("b", "train", payload, timeout_s=30).payload)

    options = {"objects_max_bytes": 100_000, "data_filters": {"a": [Halved()]}}
    with serving(tmp_path, main, **options) as server:
        with sites(server, {"train": lambda payload: payload["w"].sum().item()}):
            assert server.wait(60)
    assert came == [[], 20_000.0]


def test_what_is_no_filter_is_refused_before_anybody_is_asked() -> None:
    with pytest.raises(UsageError, match="is not a filter"):
        atoll.tasks("http://127.0.0.1:1", "a", filters={"train": ["drop"]})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"filters is Halved\(\) alone"):
        atoll.tasks("http://127.0.0.1:1", "a", filters=Halved())  # type: ignore[arg-type]
    entry = {"path": "drop", "args": ["w"], "tasks": "train"}
    with pytest.raises(ConfigError, match=r"task_data_filters has .* not understood"):
        atoll.Server(workflow=print, task_data_filters=[entry])
