"""What a workflow waits for, what it is refused, and what ends badly: it is told, and the others go on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit import build_model, together
from kit.servers import plain_server
from kit.workflows import AnsweringSites, play, workflow_server

import atoll
from atoll.blobs import object_file
from atoll.errors import DiskFull, RunFailed, Superseded, UsageError
from atoll.filters import Drop
from atoll.protocol import routes
from atoll.protocol import task_messages as tm
from atoll.server.coordinator.build_status import status_of
from atoll.server.tasks import task_payloads
from atoll.server.tasks.task_queue import Answer
from atoll.server.tasks.workflow_controller import Result
from atoll.transport.http_client import http_to
from atoll.worker.session.channel import HttpChannel
from atoll.worker.session.session import Session

TREE = {"w": torch.ones(3)}


def echo(payload: Any) -> Any:
    return payload


# -- what a call is refused


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"sites": "a"}, r"sites is the string 'a'\. Give a list: \['a'\]"),
    ({"sites": ["a", 3]}, r"3 in sites is not the name of a site"),
    ({"sites": ["a", "b/c"]}, r"'b/c' in sites is not the name of a site"),
    *(
        ({"sites": sites, name: value}, rf"^{name} is {value!r}")
        for sites in (["a"], None)
        for name, value in (
            ("timeout_s", float("nan")),
            ("timeout_s", -1.0),
            ("timeout_s", "soon"),
            ("progress_timeout_s", "soon"),
            ("min_responses", -1),
            ("min_responses", "two"),
        )
    ),
]


@pytest.mark.covers("T14", "X3")
def test_an_argument_that_means_nothing_is_refused_and_no_site_awaited(tmp_path: Path) -> None:
    def workflow(controller: Any) -> None:
        for arguments, what in ARGUMENTS:
            with pytest.raises(UsageError, match=what):
                controller.broadcast("train", None, **{"timeout_s": 5, **arguments})

    play(tmp_path, workflow, {}, "")


def refusal(folder: Path, ask: Callable[[Any], object], names: list[str]) -> UsageError:
    """What a call raises once these sites take part, in a run of two; the workflow goes on after it."""

    def workflow(controller: Any) -> UsageError:
        with pytest.raises(UsageError) as raised:
            ask(controller)
        return raised.value

    found: UsageError = play(folder, workflow, {"echo": echo}, names, **{"rounds.sites": 2})
    return found


@pytest.mark.parametrize(
    "ask",
    [
        lambda controller: controller.broadcast("echo", 1, sites=["clinic-a", "clinc-b"], timeout_s=0.5),
        lambda controller: controller.broadcast("echo", 1, sites=["clinc-b"], min_responses=1),
        lambda controller: controller.send("clinc-b", "echo", 1),
    ],
    ids=["one of several", "with min_responses", "without a timeout"],
)
@pytest.mark.covers("T14")
def test_refuses_a_task_for_an_unknown_site_and_names_the_nearest(tmp_path: Path, ask: Callable[[Any], object]) -> None:
    error = refusal(tmp_path, ask, ["clinic-a", "clinic-b"])
    assert "'clinc-b'" in error.message
    assert "'clinic-b'" in error.remedy


def test_waits_for_a_named_site_that_has_not_joined_yet_and_refuses_it_at_the_timeout(tmp_path: Path) -> None:
    error = refusal(tmp_path, lambda controller: controller.send("late", "echo", timeout_s=0.2), ["a"])
    assert "'late'" in error.message
    assert "a" in error.remedy


def test_a_named_site_that_joins_late_gets_its_task(tmp_path: Path) -> None:
    came: list[Any] = []

    def main(controller: Any) -> None:
        came.extend(controller.broadcast("echo", 7, sites=["a", "b"], timeout_s=60))

    with workflow_server(tmp_path, main, **{"rounds.sites": 2}) as server:
        sites = AnsweringSites(server.url, "ab", {"echo": echo})
        server.run()
        sites.join()
    assert [(each.site, each.payload) for each in came] == [("a", 7), ("b", 7)]


def test_a_wait_for_a_site_that_has_never_joined_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    told: list[list[str]] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        with pytest.raises(UsageError):
            controller.send("clinic_a", "echo", timeout_s=60)

    with workflow_server(tmp_path, main, **{"rounds.sites": 2}) as server:
        AnsweringSites(server.url, ["clinic-a"], {"echo": echo})
        wait_until(lambda: any("clinic_a" in each for each in server.status().warnings), "a warning")
        told.append(server.status().warnings)
        AnsweringSites(server.url, ["clinic-b"], {"echo": echo})  # now as many have joined as the run expects
        server.run()
        assert server.status().warnings == []
    ((warning,),) = told
    assert "'clinic-a'" in warning


def test_an_evaluation_names_the_nearest_of_a_site_that_has_never_joined(tmp_path: Path) -> None:
    def take_part(site: str) -> None:
        with atoll.tasks(server.url, site) as worker:
            worker.evaluates(lambda model: {"loss": 1.0}, model=build_model())
            worker.run()

    steps = [{"kind": "cross_site_evaluation", "sites": ["clinic-a", "clinc-b"], "site_models": False}]
    with plain_server(tmp_path, build_model(), **{"workflow.steps": steps, "rounds.sites": 2}) as server:
        together(*(lambda site=site: take_part(site) for site in ("clinic-a", "clinic-b")))
        server.run()
        evaluation = server.evaluation
    assert evaluation is not None
    (empty,) = [cell for cell in evaluation.cells if cell.error]
    assert empty.site == "clinc-b"
    assert "'clinic-b'" in empty.error


# -- what ends badly


@pytest.mark.covers("T14")
@pytest.mark.parametrize("end", [KeyError, SystemExit, asyncio.CancelledError])
def test_a_workflow_that_raises_ends_the_run_with_its_error(tmp_path: Path, end: type[BaseException]) -> None:
    def main(controller: Any) -> None:
        raise end(3)

    # it may have failed before `start` returns, which then says so
    with (
        pytest.raises(RunFailed, match=f"The workflow main failed: {end.__name__}: 3"),
        workflow_server(tmp_path, main) as server,
    ):
        server.run()


@pytest.mark.covers("T14", "X3")
def test_a_site_tells_what_its_server_would_not_take_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error with a file's name that is no UTF-8; an answer larger than all that the server keeps."""
    caplog.set_level(logging.CRITICAL, "atoll")  # what collects the tests' output takes no such name, either

    def named(_: Any) -> None:
        raise FileNotFoundError("scan-\udcff")

    handlers = {"named": named, "large": lambda _: torch.zeros(2**20), "small": lambda _: 1}
    name, large, small = play(
        tmp_path,
        lambda controller: [controller.send("a", task, timeout_s=30) for task in handlers],
        handlers,
        **{"disk.objects_max_bytes": 2**20},
    )
    assert name.error == r"FileNotFoundError: scan-\udcff"
    assert "keeps at most 1048576 of objects" in large.error
    assert small.payload == 1


@pytest.mark.covers("T14", "X3")
def test_a_site_with_a_full_disk_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, *_: Any) -> None:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):  # a site's, not the server's
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    def workflow(controller: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(object_file, "write_at", full)
            large = controller.send("a", "large", timeout_s=30)
        return large.error, controller.send("a", "large", timeout_s=30).payload

    error, payload = play(tmp_path, workflow, {"large": lambda _: torch.zeros(2**20)})
    assert "StoreError: A file in the folder of temporary files failed: File too large." in error
    assert len(payload) == 2**20


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


# -- full disks of the server


@pytest.mark.covers("T2", "X3")
def test_a_payload_waits_for_space_and_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """256 MB are to be kept free. Three times less is, then more; status says so meanwhile."""
    monkeypatch.setattr(task_payloads, "RETRY_S", 0.01)
    free = iter([10, 10, 10])
    warned: list[list[str]] = []

    def workflow(controller: Any) -> Any:
        def measured() -> int:
            warned.append(status_of(controller.run).warnings)
            return next(free, 2**40)

        monkeypatch.setattr(controller.run.store, "free_bytes", measured)
        (result,) = controller.broadcast("train", TREE, timeout_s=30)
        warned.append(status_of(controller.run).warnings)
        return result.payload["w"].tolist()

    settings = {"disk.min_free_bytes": 256 * 10**6, "workflow.streamed_tasks": ("train",)}
    assert play(tmp_path, workflow, {"train": echo}, **settings) == [1.0] * 3
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
    """A payload without tensors takes no disk."""
    monkeypatch.setattr(task_payloads, "RETRY_S", 0.01)

    def workflow(controller: Any) -> Any:
        monkeypatch.setattr(controller.run.store, "free_bytes", lambda: 0)
        with pytest.raises(DiskFull, match="0 MB of disk left"):
            controller.broadcast("train", TREE, timeout_s=0.1)
        return controller.broadcast("train", {"plain": 1}, timeout_s=30)[0].payload

    assert play(tmp_path, workflow, {"train": echo}, **{"disk.min_free_bytes": 1}) == {"plain": 1}


@pytest.mark.covers("T8", "X3")
def test_an_answer_that_is_filtered_waits_for_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site is told to come back, and what it has sent is still there: it is sent once."""
    asked, opened = list[int](), list[int]()

    def workflow(controller: Any) -> Any:
        run, begin = controller.run, controller.run.objects.open

        def required() -> None:
            asked.append(1)
            if len(asked) == 1:
                run.store.require_space(2**60)

        monkeypatch.setattr(run.task_queue, "_require_space", required)
        monkeypatch.setattr(run.objects, "open", lambda *a, **k: opened.append(1) or begin(*a, **k))  # type: ignore[func-returns-value]
        return controller.send("a", "train", None, timeout_s=30).payload

    settings = {"filters": [Drop("b")], "workflow.streamed_tasks": ("train",)}
    payload = play(tmp_path, workflow, {"train": lambda _: TREE | {"b": torch.ones(2)}}, **settings)
    assert payload["w"].tolist() == [1.0] * 3
    assert payload["b"] is None
    assert (len(asked), len(opened)) == (2, 1)


@pytest.mark.covers("T8")
def test_warns_of_filters_for_no_site_with_the_nearest_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def workflow(controller: Any) -> None:
        for _ in range(2):
            controller.broadcast("train", TREE, timeout_s=30)

    entries = ({"path": "drop", "args": ["b"], "sites": ["clinic-b"], "tasks": ["train"]},)
    settings = {"workflow.payload_filters": entries, "filters": {"clinic-a": {"trian": [Drop("b")]}}}
    play(tmp_path, workflow, {"train": echo}, ["clinic-a"], **settings)
    told = [record for record in caplog.records if (record.name, record.levelno) == ("atoll.server", logging.WARNING)]
    assert [record.getMessage() for record in told] == [
        "workflow.payload_filters are for site 'clinic-b', which has not taken part. Did you mean 'clinic-a'?",
        "workflow.result_filters are for task 'trian', which was not sent. Did you mean 'train'?",
    ]


# -- two processes of one site


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
