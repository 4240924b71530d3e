"""Filters of tasks, at the server and at a site: what a site is sent, what is taken of its answer, and what fails."""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import wait_until
from harness.proxy import Proxy
from kit.filters import Broken, Halved, Hanging, Infinite, Leaving, Shorter, Undecided
from kit.wire import WireSite
from kit.workflows import (
    AnsweringSites,
    files_of_objects,
    kept_objects,
    run_workflow,
    run_workflow_to_status,
    workflow_server,
)
from torch import Tensor

import atoll
from atoll import Settings
from atoll.errors import Busy, ConfigError, RunFailed, UsageError
from atoll.filters import CHUNK_ELEMENTS, Drop, Filter, NormClip, Outgoing

STREAMS = pytest.mark.parametrize("stream", [(), ("train",)], ids=["inline", "streamed"])
TREE = {"w": torch.ones(3)}


def echo(payload: Any) -> Any:
    return payload


def model() -> dict[str, Any]:
    return {"model": {"w": torch.tensor([3.0, 4.0]), "head": np.zeros(2)}, "n": torch.tensor(9), "lr": 0.5}


def numbers(tree: Any) -> Any:
    """With lists for tensors and arrays."""
    if isinstance(tree, dict):
        return {key: numbers(value) for key, value in tree.items()}
    return tree.tolist() if isinstance(tree, Tensor | np.ndarray) else tree


# -- what passes them


@pytest.mark.covers("T8", "T3", "T7")
@STREAMS
def test_the_run_file_chooses_filters(tmp_path: Path, stream: tuple[str, ...]) -> None:
    """Filters in the run file apply to the payload that a site is sent, or to the answer that the
    server takes from it.
    """
    # Site `a` is sent half of (3, 4) without the head to train, and everything to measure. Site `b` is sent everything.
    # The sites answer with what they were sent. The answers of `b` are clipped to a norm of 2.5, which is half of (3,
    # 4).
    (tmp_path / "run.toml").write_text(
        """
        workflow.payload_filters = [
            {path = "norm_clip", args = {max_norm = 2.5}, sites = ["a"], tasks = ["train"]},
            {path = "drop", args = ["*.head"], sites = ["a"], tasks = ["train"]},
        ]
        workflow.result_filters = [{path = "norm_clip", args = {max_norm = 2.5}, sites = ["b"]}]
        """
    )
    given = Settings.read(tmp_path / "run.toml", environ={})
    settings = {key: given.at(key) for key in ("workflow.payload_filters", "workflow.result_filters")}
    objects = []

    def workflow(controller: Any) -> dict[str, Any]:
        tasks = {task: controller.broadcast(task, model(), min_responses=2, timeout_s=30) for task in handlers}
        came: dict[str, Any] = {task: {each.site: each.payload for each in tasks[task]} for task in tasks}
        return came | {"text": controller.send("b", "measure", "no tensors", timeout_s=30).payload}

    def answer(payload: Any) -> Any:
        objects.append(sum(name.endswith(".safetensors") for name in kept_objects(tmp_path)))
        return payload

    handlers = {"train": answer, "measure": answer}
    came = run_workflow(tmp_path, workflow, handlers, "ab", **{"workflow.streamed_tasks": stream}, **settings)
    whole = {"model": {"w": [3.0, 4.0], "head": [0.0, 0.0]}, "n": 9, "lr": 0.5}
    half = {"model": {"w": [1.5, 2.0], "head": [0.0, 0.0]}, "n": 9, "lr": 0.5}
    assert numbers(came["train"]) == {"a": half | {"model": {"w": [1.5, 2.0], "head": None}}, "b": half}
    assert numbers(came["measure"]) == {"a": whole, "b": half}
    assert isinstance(came["measure"]["b"]["model"]["head"], np.ndarray)
    assert came["measure"]["b"]["n"].dtype == torch.int64
    assert came["text"] == "no tensors"
    assert max(objects) <= 2  # one for a, one for all others


@pytest.mark.covers("T8", "T3")
def test_unfiltered_sites_share_one_object(tmp_path: Path) -> None:
    """The sites without a filter share one object of a broadcast payload. The filtered object of site `a` is deleted
    once `a` has answered.
    """

    def main(controller: Any) -> None:
        controller.broadcast("train", model(), sites=["a", "b", "c"], timeout_s=30)

    with workflow_server(tmp_path, main, data_filters={"a": [Halved()]}) as server, ExitStack() as stack:
        workers = {name: stack.enter_context(atoll.tasks(server.url, name)) for name in "abc"}
        tasks = {name: next(iter(worker.tasks())) for name, worker in workers.items()}
        sent = {name: task.payload["model"]["w"].tolist() for name, task in tasks.items()}
        assert sent == {"a": [1.5, 2.0], "b": [3.0, 4.0], "c": [3.0, 4.0]}
        assert len({task.id for task in tasks.values()}) == 1
        left = [len(kept_objects(tmp_path))]
        for task in tasks.values():
            assert task.answer(1)
            left.append(len(kept_objects(tmp_path)))
    assert left[:3] == [2, 1, 1]


@pytest.mark.covers("T8")
@STREAMS
def test_a_sites_filters_come_first(tmp_path: Path, stream: tuple[str, ...]) -> None:
    """A site's own filters are applied before any byte leaves the site."""
    # The server's filter sees only the result. Site `a` drops its head and halves the rest for the task `train`.
    seen: dict[str, Any] = {}

    class Looking(Filter):
        def begin(self, update: Outgoing) -> None:
            if update.about.site == "a":
                seen[update.about.task] = {name: update.tensor(name).tolist() for name in list(update.tensors)[:-1]}

    def workflow(controller: Any) -> Any:
        tasks = {task: controller.broadcast(task, None, min_responses=2, timeout_s=30) for task in handlers}
        return {task: {each.site: numbers(each.payload["model"]) for each in tasks[task]} for task in tasks}

    handlers = dict.fromkeys(("train", "measure"), lambda _: model())
    mine = {"a": {"filters": {"train": [Drop("*.head"), Halved()]}}}
    settings = {"workflow.streamed_tasks": stream, "filters": [Looking()]}
    came = run_workflow(tmp_path, workflow, handlers, "ab", mine, **settings)
    whole = {"w": [3.0, 4.0], "head": [0.0, 0.0]}
    assert came == {"train": {"a": {"w": [1.5, 2.0], "head": None}, "b": whole}, "measure": {"a": whole, "b": whole}}
    assert seen == {"train": {"model.w": [1.5, 2.0]}, "measure": {"model.w": [3.0, 4.0], "model.head": [0.0, 0.0]}}


@pytest.mark.covers("T8", "T4")
def test_inline_arrays_are_filtered(tmp_path: Path) -> None:
    """Small arrays that are sent inline are filtered like streamed ones: when sent, answered and taken."""
    # 8 and 16 become 1 and 2.
    tree = {"w": torch.full((3,), 8.0), "b": np.full(2, 16.0), "n": np.arange(2)}
    came = run_workflow(
        tmp_path,
        lambda controller: controller.send("a", "train", tree, timeout_s=30).payload,
        {"train": echo},
        options={"a": {"filters": [Halved()]}},
        data_filters=[Halved()],
        filters=[Halved()],
        **{"workflow.streamed_tasks": ("train",), "workflow.array_part_bytes": 0},
    )
    assert numbers(came) == {"w": [1.0] * 3, "b": [2.0] * 2, "n": [0, 1]}
    assert isinstance(came["b"], np.ndarray)


@pytest.mark.covers("T8", "T6")
@pytest.mark.parametrize("broken", [False, True])
def test_filtered_memory_is_freed(tmp_path: Path, broken: bool) -> None:
    """The server frees a filtered payload when its task is over. A site frees its answer when it has been sent, or when
    its filter failed.
    """
    answered: list[weakref.ref[Tensor]] = []

    def workflow(controller: Any) -> Any:
        payload = model()
        sent = weakref.ref(payload["model"]["w"])
        results = controller.broadcast("train", payload, timeout_s=30)
        del payload
        ok = [result.ok for result in results]
        del results
        still = sent()
        return ok, still, [result.payload for result in controller.broadcast("measure", None, timeout_s=30)]

    def train(_: Any) -> Any:
        result = {"head": torch.ones(5)}
        answered.append(weakref.ref(result["head"]))
        return result

    handlers = {"train": train, "measure": lambda _: all(each() is None for each in answered)}
    filters = [Broken() if broken else NormClip(1.0)]
    gc.disable()
    try:
        came = run_workflow(
            tmp_path,
            workflow,
            handlers,
            "ab",
            {"b": {"filters": filters}},
            data_filters={"a": filters},
            filters={"b": [Halved()]},
        )
    finally:
        gc.enable()
    assert came == ([not broken] * 2, None, [True, True])
    assert len(answered) == (1 if broken else 2)


@pytest.mark.covers("T8", "T10")
def test_payloads_pulled_ahead_are_filtered(tmp_path: Path) -> None:
    """If a site downloads the tensors of several open tasks ahead, each payload has passed the filters for this
    site.
    """

    def workflow(controller: Any) -> list[float]:
        with ThreadPoolExecutor(3) as pool:
            sent = [{"w": torch.full((3,), 2.0 * number)} for number in (1, 2, 3)]
            done = pool.map(lambda each: controller.send("a", "train", each, timeout_s=30), sent)
            return [result.payload for result in done]

    handlers = {"train": lambda payload: payload["w"].mean().item()}
    ahead = {"a": {"request_task_tensors": False}}
    assert run_workflow(tmp_path, workflow, handlers, "a", ahead, data_filters={"a": [Halved()]}) == [1.0, 2.0, 3.0]


@pytest.mark.covers("T8")
def test_a_filter_handles_one_payload_at_a_time(tmp_path: Path) -> None:
    """If a workflow sends several payloads to one site from several threads, its filter handles them one after the
    other, because a filter keeps state.
    """
    size, entered = 2 * CHUNK_ELEMENTS, list[float]()

    class First(Filter):
        """Divides by the first value that it saw."""

        def begin(self, update: Outgoing) -> None:
            (name,) = update.tensors
            self.by = update.changes(name, 0, 1).item()
            entered.append(self.by)

        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            return values.div_(self.by)

    def workflow(controller: Any) -> list[Tensor]:
        with ThreadPoolExecutor(4) as pool:
            payloads = [{"w": torch.full((size,), float(number))} for number in range(1, 9)]
            done = pool.map(lambda each: controller.send("a", "train", each, timeout_s=60), payloads)
            return [result.payload["w"] for result in done]

    settings = {"data_filters": {"a": [First()]}, "workflow.streamed_tasks": ("train",)}
    came = run_workflow(tmp_path, workflow, {"train": echo}, **settings)
    assert sorted(entered) == [float(number) for number in range(1, 9)]
    assert all(torch.equal(each, torch.ones(size)) for each in came)


@pytest.mark.covers("T8")
def test_a_filter_keeps_sites_apart(tmp_path: Path) -> None:
    """Each site has its own copy of a filter, so that a filter keeps nothing of one site for another. Only objects that
    cannot be copied are shared.
    """
    seen: dict[str, list[Any]] = {"a": [], "b": []}

    class Noted(Filter):
        """Keeps what it knows of a payload in a dict, beside a lock."""

        def __init__(self) -> None:
            self.norms: dict[str, float] = {}
            self.lock = threading.Lock()
            self.pair = [self.norms, self.lock]  # half of it can be copied

        def begin(self, update: Outgoing) -> None:
            self.norms[update.about.site] = 1.0
            seen[update.about.site].append(self)

    def workflow(controller: Any) -> None:
        for _ in range(2):
            controller.broadcast("train", TREE, sites=["a", "b"], timeout_s=30)

    given = Noted()
    run_workflow(tmp_path, workflow, {"train": echo}, "ab", data_filters=[given])
    (a, again), (b, _) = seen["a"], seen["b"]
    assert a is again
    assert (a.norms, b.norms, given.norms) == ({"a": 1.0}, {"b": 1.0}, {})
    assert a.lock is b.lock
    assert a.pair is b.pair


# -- what fails: where a filter of site b works × how it fails → what b's result says

FAILURES = {
    Broken: r"the filter Broken\(\) failed at 'model\.head': KeyError: 'salt'",
    Undecided: r"the filter Undecided\(\) failed at 'model\.\w+': KeyError: 'model\.\w+'",
    Shorter: r"the filter Shorter\(\) changed 'model\.\w+' from torch\.float\d\d \[2\] to torch\.float\d\d \[1\]",
    Infinite: r"the filter Infinite\(\) returned NaN or Inf in 'model\.\w+'",
}
PLACES = {
    "data": "The payload of task '{task}' for site b was not sent",
    "result": "The answer of site b to task '{task}' was not used",
    "site": "The answer of site b to task '{task}' was not sent",
}
ROWS: list[tuple[str, type[Filter], str]] = [
    *((place, kind, f"{begin}: {failure}") for place, begin in PLACES.items() for kind, failure in FAILURES.items()),
    ("data", Leaving, r"^The server's filters for the payload of task '{task}' to b ended with SystemExit\(3\)\."),
    ("result", Leaving, r"^The server's filters for this answer failed: SystemExit: 3$"),
]
"""Each row has a task of its own."""


def task_of(place: str, kind: type[Filter]) -> str:
    return f"{place}.{kind.__name__}"


@pytest.fixture(scope="module")
def broadcasts(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Task → its results from a and b, in one run; the last task has no filters."""
    names = [task_of(place, kind) for place, kind, _ in ROWS]

    def workflow(controller: Any) -> dict[str, list[Any]]:
        came = {name: controller.broadcast(name, model(), min_responses=1, timeout_s=30) for name in names}
        for good, _ in came.values():
            assert good.payload["model"]["w"].tolist() == [3.0, 4.0]
        with pytest.raises(RunFailed, match=r"got 1 of 2 answers: b failed: .*filter"):
            controller.broadcast(names[0], model(), min_responses=2, timeout_s=30)
        return came | {"measure": controller.broadcast("measure", 7, timeout_s=30)}

    def of(place: str) -> dict[str, Any]:
        return {task_of(where, kind): [kind()] for where, kind, _ in ROWS if where == place}

    handlers: dict[str, Any] = dict.fromkeys(names, echo) | {"measure": lambda payload: payload + 1}
    filters = {"data_filters": {"b": of("data")}, "filters": {"b": of("result")}}
    return run_workflow(
        tmp_path_factory.mktemp("rows"), workflow, handlers, "ab", {"b": {"filters": of("site")}}, **filters
    )


@pytest.mark.covers("T8", "T7", "X3")
@pytest.mark.parametrize(("place", "kind", "error"), ROWS, ids=[task_of(place, kind) for place, kind, _ in ROWS])
def test_a_failing_filter_fails_only_its_site(
    broadcasts: dict[str, list[Any]], place: str, kind: type[Filter], error: str
) -> None:
    """If a filter fails, the answer of its site is an error. The other sites and the following tasks are not
    affected.
    """
    task = task_of(place, kind)
    good, bad = broadcasts[task]
    assert (good.site, good.ok, bad.site, bad.ok) == ("a", True, "b", False)
    assert re.search(error.replace("{task}", re.escape(task)), bad.error), bad.error
    with pytest.raises(RunFailed, match=f"Site b failed at task '{task}'"):
        bad.payload  # noqa: B018
    assert [result.payload for result in broadcasts["measure"]] == [8, 8]


@pytest.mark.covers("T8", "X3")
def test_an_unsendable_task_fails_at_once(tmp_path: Path) -> None:
    """If no site can be sent a task because its filter fails, the task has errors at once. No site is awaited."""

    def workflow(controller: Any) -> Any:
        return controller.send("a", "train", model()), controller.send("a", "measure", 1, timeout_s=30)

    (train, measure), status = run_workflow_to_status(tmp_path, workflow, {"measure": echo}, data_filters=[Broken()])
    assert "The payload of task 'train' for site a was not sent: the filter Broken()" in train.error
    assert measure.payload == 1
    assert (status.sent[0].answers, status.sent[0].missing) == ({"failed": 1}, [])


@pytest.mark.covers("T8", "T7")
@pytest.mark.parametrize("where", ["data_filters", "filters"])
def test_a_full_disk_is_reported_during_filtering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """If the disk is full while a filter writes, the error says so."""
    # For a payload, the workflow's call raises; for an answer, its site has failed. The next call succeeds.

    filtering, pwrite = threading.Event(), os.pwrite

    class Filling(Halved):
        def begin(self, update: Outgoing) -> None:
            filtering.set()

    def full(fd: int, data: memoryview, offset: int) -> int:
        if filtering.is_set() and os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    def workflow(controller: Any) -> tuple[str, bool]:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            try:
                told = controller.send("a", "train", model(), timeout_s=30).error
            except atoll.AtollError as error:
                told = str(error)
        return told, controller.send("a", "train", model(), timeout_s=30).ok

    told, goes_on = run_workflow(tmp_path, workflow, {"train": echo}, **{where: [Filling()]})
    assert filtering.is_set()
    assert "is full" in told
    assert goes_on


@pytest.mark.covers("T8", "T7")
def test_a_filtered_broadcast_without_space_leaves_no_file(tmp_path: Path) -> None:
    """If the objects' limit has no room for the filtered payload, `broadcast` raises and leaves no file."""
    # The filter of site `a` needs a second payload of 80 kB, and the limit is 100 kB.

    def workflow(controller: Any) -> Any:
        payload = {"w": torch.ones(20_000)}
        with pytest.raises(Busy, match="no space for a payload"):
            controller.broadcast("train", payload, timeout_s=30)
        return files_of_objects(tmp_path), controller.send("b", "train", payload, timeout_s=30).payload

    handlers = {"train": lambda payload: payload["w"].sum().item()}
    settings = {"disk.objects_max_bytes": 100_000, "data_filters": {"a": [Halved()]}}
    assert run_workflow(tmp_path, workflow, handlers, "ab", **settings) == ([], 20_000.0)


def test_an_object_that_is_no_filter_is_refused() -> None:
    """An object or a table that is not a filter is refused before any site is asked."""
    with pytest.raises(UsageError, match="is not a filter"):
        atoll.tasks("http://127.0.0.1:1", "a", filters={"train": ["drop"]})
    with pytest.raises(UsageError, match=r"filters is Halved\(\), not a list"):
        atoll.tasks("http://127.0.0.1:1", "a", filters=Halved())
    entry = {"path": "drop", "args": ["w"], "tasks": "train"}
    with pytest.raises(ConfigError, match=r"workflow.payload_filters has .* not a valid filter table"):
        atoll.Server(workflow=print, settings={"workflow.payload_filters": [entry]})


# -- what hangs, and what comes twice


@pytest.mark.covers("T8", "T2")
def test_a_repeated_answer_counts_once(tmp_path: Path) -> None:
    """If a site sends its answer again while the first is being filtered, both requests wait for the same result."""
    # The filter works once.
    begun, go, begins = threading.Event(), threading.Event(), list[str]()
    came: list[Any] = []

    class Slow(Filter):
        def begin(self, update: Outgoing) -> None:
            begins.append(update.about.site)
            begun.set()
            assert go.wait(30)

    def main(controller: Any) -> None:
        came.extend(controller.send("a", "train", None, timeout_s=60).payload["w"].tolist())

    with (
        workflow_server(tmp_path, main, filters=[Slow(), Halved()]) as server,
        Proxy(server.port) as proxy,
        ThreadPoolExecutor(2) as pool,
    ):
        site = WireSite(proxy.url, "a")
        task = site.post("/v1/tasks", {"wait_s": 20.0})[1]["task"]
        ref = atoll.objects.publish({"w": torch.tensor([2.0, 4.0])}, server=server.url)
        key = {name: getattr(ref, name) for name in ("object", "secret", "digest", "expires_at")}
        answers = [pool.submit(site.post, f"/v1/tasks/{task['task']}/answer", {"body": {"object": key}})]
        assert begun.wait(30)
        answers.append(pool.submit(site.post, f"/v1/tasks/{task['task']}/answer", {"body": {"object": key}}))
        wait_until(lambda: proxy.count("POST .*/answer") == 2, "that both wait")
        site.beat()  # over another connection; the server has had time to begin with the other request
        go.set()
        assert [answer.result(30)[0] for answer in answers] == [204, 204]
        assert server.wait(30)
        site.leave()
    assert begins == ["a"]
    assert came == [1.0, 2.0]


@pytest.mark.covers("T8", "T3")
def test_a_hanging_filter_delays_only_its_site(tmp_path: Path) -> None:
    """If the filter for a site hangs, this site gets no payload and an error after the timeout."""
    # The other sites are served. When the filter ends after all, its result is removed.
    go = threading.Event()

    def workflow(controller: Any) -> Any:
        try:
            results = controller.broadcast("train", TREE, timeout_s=1.0)
            return {each.site: each.payload["w"].tolist() if each.ok else each.error for each in results}
        finally:
            go.set()
            wait_until(lambda: kept_objects(tmp_path) == [], "that nothing is left")

    settings = {"data_filters": {"a": [Hanging(go, bool)]}, "workflow.streamed_tasks": ("train",)}
    assert run_workflow(tmp_path, workflow, {"train": echo}, "ab", **settings) == {
        "a": "The server's filters for the payload of task 'train' to a did not finish within 1 s, so the payload was "
        "not sent. Check the code of the filters, or raise the timeout.",
        "b": [1.0] * 3,
    }


HANG = "acdefghi"
"""As many sites as the server runs the code of users for at a time: eight. It has a filter of b's, too."""


@pytest.mark.covers("T8")
def test_hanging_filters_do_not_block_other_sites(tmp_path: Path) -> None:
    """While the filters for eight sites hang, another site is still sent its task. A site whose filter hangs gets no
    second task.
    """
    go, begun = threading.Event(), list[int]()

    def workflow(controller: Any) -> Any:
        try:
            tried = controller.broadcast("train", TREE, sites=list(HANG), timeout_s=1.0)
            again = controller.send("a", "train", TREE, timeout_s=0.3)
            sent = controller.send("b", "train", TREE, timeout_s=30)
            return [each.ok for each in (*tried, again)], len(begun), sent.payload["w"].tolist()
        finally:
            go.set()

    filters = {site: [Hanging(go, lambda: begun.append(1))] for site in HANG} | {"b": [Filter()]}
    came = run_workflow(tmp_path, workflow, {"train": echo}, HANG + "b", data_filters=filters)
    assert came == ([False] * 9, 8, [1.0] * 3)


@pytest.mark.covers("T8", "T7")
def test_hanging_answers_end_with_their_task(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If filters hang at the answers of eight sites, these sites are told when their task is over. The answer of
    another site is then filtered.
    """
    go, begun = threading.Event(), list[int]()

    def workflow(controller: Any) -> Any:
        try:
            assert controller.broadcast("train", TREE, sites=list(HANG), timeout_s=2.0) == []
            wait_until(lambda: caplog.text.count("it is over") == len(HANG), "that they are told")
            assert begun
            return controller.send("b", "train", TREE, timeout_s=30).payload["w"].tolist()
        finally:
            go.set()
            wait_until(lambda: files_of_objects(tmp_path) == [], "the end of what was being filtered")

    filters = {site: [Hanging(go, lambda: begun.append(1))] for site in HANG} | {"b": [Filter()]}
    settings = {"filters": filters, "workflow.streamed_tasks": ("train",)}
    with caplog.at_level(logging.WARNING, "atoll"):
        assert run_workflow(tmp_path, workflow, {"train": echo}, HANG + "b", **settings) == [1.0] * 3


@pytest.mark.covers("T8", "T3")
def test_a_hanging_filter_does_not_block_stop(tmp_path: Path) -> None:
    """A server stops while a filter hangs."""
    begun, go = threading.Event(), threading.Event()

    def main(controller: Any) -> None:
        controller.broadcast("train", sites=["a"])  # for ever

    server = workflow_server(tmp_path, main, filters={"a": [Hanging(go, begun.set)]}).start()
    try:
        AnsweringSites(server.url, "a", {"train": lambda _: torch.ones(2)})
        assert begun.wait(30)
        stopping = threading.Thread(target=server.stop, daemon=True)
        stopping.start()
        stopping.join(30)
        assert not stopping.is_alive()
    finally:
        go.set()
        server.stop()
