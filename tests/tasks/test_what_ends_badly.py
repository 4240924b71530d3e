"""Workflows, filters and sites that end badly: it is told, nobody hangs, and the others go on."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.workflows import AnsweringSites, workflow_server
from torch import Tensor

from atoll import Settings
from atoll.errors import RunFailed, Superseded
from atoll.filters import Filter, Outgoing
from atoll.protocol import routes
from atoll.protocol import task_messages as tm
from atoll.server.filter_table import SiteFilters
from atoll.transport.http_client import http_to
from atoll.worker.session.http_channel import HttpChannel
from atoll.worker.session.session import Session

SCRIPT = Path(__file__).with_name("small_disk_process.py")


@pytest.mark.covers("T14")
@pytest.mark.parametrize("end", [SystemExit, asyncio.CancelledError])
def test_a_workflow_that_leaves_by_no_exception_ends_the_run_too(tmp_path: Path, end: type[BaseException]) -> None:
    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        raise end(3)

    server = workflow_server(tmp_path, main).start()
    try:
        AnsweringSites(server.url, ["a"], {"train": print})
        with pytest.raises(RunFailed, match=f"The workflow main failed: {end.__name__}: 3"):
            server.wait(30)
    finally:
        server.stop()


@pytest.mark.covers("T14", "X3")
@pytest.mark.parametrize(
    ("sites", "what"),
    [
        ("a", r"sites is the string 'a'\. Give a list: \['a'\]"),
        (["a", 3], r"3 in sites is not the name of a site"),
        (["a", "b/c"], r"'b/c' in sites is not the name of a site"),
    ],
    ids=["a string", "a number", "a path"],
)
def test_refuses_sites_that_are_no_names_and_awaits_none(tmp_path: Path, sites: Any, what: str) -> None:
    def main(controller: Any) -> None:
        controller.broadcast("train", None, sites=sites, timeout_s=5)

    with pytest.raises(RunFailed, match=what), workflow_server(tmp_path, main) as server:
        server.run()


@pytest.mark.covers("T14", "X3")
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("timeout_s", float("nan")),
        ("timeout_s", -1.0),
        ("timeout_s", "soon"),
        ("progress_timeout_s", "soon"),
        ("min_responses", -1),
        ("min_responses", "two"),
    ],
)
@pytest.mark.parametrize("named", [True, False], ids=["to a site", "to whoever is there"])
def test_an_argument_that_means_nothing_is_refused(tmp_path: Path, argument: str, value: Any, named: bool) -> None:
    def main(controller: Any) -> None:
        controller.broadcast("train", None, sites=["a"] if named else None, **{argument: value})

    with (
        pytest.raises(RunFailed, match=rf"UsageError: {argument} is {value!r}"),
        workflow_server(tmp_path, main) as server,
    ):
        server.run()


@pytest.mark.covers("T14", "X3")
def test_a_site_tells_what_its_server_would_not_take_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error with a file's name that is no UTF-8; an answer larger than all that the server keeps."""
    caplog.set_level(logging.CRITICAL, "atoll")  # what collects the tests' output takes no such name, either
    came: list[Any] = []

    def main(controller: Any) -> None:
        came.extend(controller.send("a", task, timeout_s=30) for task in ("named", "large", "small"))

    def named(_: Any) -> None:
        raise FileNotFoundError("scan-\udcff")

    handlers = {"named": named, "large": lambda _: torch.zeros(2**20), "small": lambda _: 1}
    with workflow_server(tmp_path, main, **{"disk.objects_max_bytes": 2**20}) as server:
        site = AnsweringSites(server.url, ["a"], handlers)
        assert server.wait(60)
        server.run()
    site.join(30)
    named_, large, small = came
    assert named_.error == r"FileNotFoundError: scan-\udcff"
    assert "keeps at most 1048576 of objects" in large.error
    assert small.payload == 1


@pytest.mark.covers("T14", "T13", "X3")
def test_a_site_with_a_full_disk_says_so_and_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    """4 MiB of an answer, 8 MiB of a payload that belongs on disk; a file has 1 MiB at most."""
    import small_disk_process

    came: list[Any] = []

    def main(controller: Any) -> None:
        sent = (("large", None), ("small", small_disk_process.Zeros()), ("small", None))
        came.extend(controller.send("a", task, payload, timeout_s=30) for task, payload in sent)

    with workflow_server(tmp_path, main) as server:
        site = nursery.start(str(SCRIPT), server.url, "a", cwd=tmp_path)
        assert server.wait(60)
        server.run()
    assert site.wait() == 0
    large, kept, small = came
    assert "StoreError: A file in the folder of temporary files failed: File too large." in large.error
    assert "StoreError: A file in the folder of temporary files failed: File too large." in kept.error
    assert small.payload == 1


class Noted(Filter):
    """Keeps what it knows of a payload in a dict, beside a lock."""

    def __init__(self) -> None:
        self.norms: dict[str, float] = {}
        self.lock = threading.Lock()
        self.pair = [self.norms, self.lock]  # half of it can be copied

    def begin(self, update: Outgoing) -> None:
        self.norms["w"] = float(update.tensor("w").norm())


@pytest.mark.covers("T8")
def test_a_filter_keeps_nothing_of_one_site_for_another(tmp_path: Path) -> None:
    """Copies do not share a dict; a lock, which nobody can copy, they do, and what holds it."""
    given = Noted()
    filters = SiteFilters(Settings.build({"disk.state_dir": tmp_path}), [given])
    (a,), (b,) = filters.of("a"), filters.of("b")
    assert isinstance(a, Noted)
    assert isinstance(b, Noted)
    a.norms["w"] = 1.0
    assert b.norms == {}
    assert given.norms == {}
    assert a.lock is b.lock
    assert a.pair is b.pair
    assert filters.of("a") == (a,)


@pytest.mark.covers("T8", "T3")
def test_a_filter_that_hangs_holds_up_neither_other_sites_nor_the_end_of_the_server(tmp_path: Path) -> None:
    """a's filter never returns: b's answers are taken, and the server ends."""
    begun, go = threading.Event(), threading.Event()

    class Hanging(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            begun.set()
            go.wait()
            return values

    came: list[Any] = []
    measured = threading.Event()

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        with ThreadPoolExecutor() as pool:
            pool.submit(controller.broadcast, "train", sites=["a"])  # for ever
            assert begun.wait(30)
            came.append(controller.send("b", "measure", timeout_s=30).payload)
            measured.set()

    handlers = {"train": lambda _: torch.ones(2), "measure": lambda _: torch.ones(3)}
    server = workflow_server(tmp_path, main, filters={"a": [Hanging()]}).start()
    try:
        for name in "ab":
            AnsweringSites(server.url, [name], handlers)
        assert measured.wait(30)
        assert came[0].tolist() == [1.0] * 3
        stopping = threading.Thread(target=server.stop, daemon=True)
        stopping.start()
        stopping.join(30)
        assert not stopping.is_alive()
    finally:
        go.set()
        server.stop()


@pytest.mark.covers("F19", "T14")
def test_a_process_that_another_has_replaced_is_given_no_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one waits for a task when the second one joins under its name; the task is the second one's."""
    looked, go = threading.Event(), threading.Event()

    def main(controller: Any) -> None:
        assert go.wait(30)
        controller.send("a", "train", timeout_s=30)

    with workflow_server(tmp_path, main) as server, ThreadPoolExecutor() as pool:
        first, second = (Session(HttpChannel(http_to(server.url)), "a") for _ in range(2))
        first.join()
        queue = server._run.task_queue  # type: ignore[union-attr]
        next_for = queue.next_for

        def noted(*which: Any) -> Any:
            looked.set()
            return next_for(*which)

        monkeypatch.setattr(queue, "next_for", noted)
        waiting = pool.submit(first.http.post, routes.TASKS, tm.TaskRequest(wait_s=20.0), tm.TaskReply)
        assert looked.wait(30)
        second.join()
        go.set()
        with pytest.raises(Superseded):
            waiting.result(30)
        task = second.http.post(routes.TASKS, tm.TaskRequest(wait_s=20.0), tm.TaskReply).task
        assert task is not None
        second.http.send(routes.TASK_ANSWER.format(task=task.task), tm.TaskAnswer(error="done"))
        assert server.wait(30)
        first.leave()
        second.leave()
