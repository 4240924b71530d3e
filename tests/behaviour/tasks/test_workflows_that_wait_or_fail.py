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
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.wire import WireSite
from kit.workflows import AnsweringSites, run_workflow, workflow_server

from atoll.errors import DiskFull, RunFailed, UsageError
from atoll.filters import Drop
from atoll.objects import register

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
def test_meaningless_arguments_of_broadcast_are_refused(tmp_path: Path) -> None:
    """`broadcast` refuses meaningless arguments at once, without waiting for a site."""

    def workflow(controller: Any) -> None:
        for arguments, what in ARGUMENTS:
            with pytest.raises(UsageError, match=what):
                controller.broadcast("train", None, **{"timeout_s": 5, **arguments})

    run_workflow(tmp_path, workflow, {}, "")


def refusal(folder: Path, ask: Callable[[Any], object], names: list[str]) -> UsageError:
    """What a call raises once these sites take part, in a run of two; the workflow goes on after it."""

    def workflow(controller: Any) -> UsageError:
        with pytest.raises(UsageError) as raised:
            ask(controller)
        return raised.value

    return run_workflow(folder, workflow, {"echo": echo}, names, **{"rounds.sites": 2})


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
def test_an_unknown_site_of_a_task_is_refused(tmp_path: Path, ask: Callable[[Any], object]) -> None:
    """A task for a site that does not exist is refused, and the error suggests the nearest name of a site."""
    error = refusal(tmp_path, ask, ["clinic-a", "clinic-b"])
    assert "'clinc-b'" in error.message
    assert "'clinic-b'" in error.remedy


def test_sending_to_an_absent_site_fails_at_the_timeout(tmp_path: Path) -> None:
    """`send` waits until its timeout for a site to join. Then it raises an error with this site and the sites that
    joined.
    """
    error = refusal(tmp_path, lambda controller: controller.send("late", "echo", timeout_s=0.2), ["a"])
    assert "'late'" in error.message
    assert "a" in error.remedy


def test_a_site_that_joins_late_gets_its_task(tmp_path: Path) -> None:
    """If a task is sent before a site has joined, the site gets it when it joins."""
    came: list[Any] = []

    def main(controller: Any) -> None:
        came.extend(controller.broadcast("echo", 7, sites=["a", "b"], timeout_s=60))

    with workflow_server(tmp_path, main, **{"rounds.sites": 2}) as server:
        sites = AnsweringSites(server.url, "ab", {"echo": echo})
        server.run()
        sites.join()
    assert [(each.site, each.payload) for each in came] == [("a", 7), ("b", 7)]


def test_waiting_for_an_unknown_site_causes_a_warning(tmp_path: Path) -> None:
    """While a workflow waits for a site that never joined, the status warns and suggests the nearest name. The warning
    ends once all expected sites are there.
    """
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


# -- what ends badly


@pytest.mark.covers("T14")
@pytest.mark.parametrize("end", [KeyError, SystemExit, asyncio.CancelledError])
def test_a_failing_workflow_ends_the_run(tmp_path: Path, end: type[BaseException]) -> None:
    """If the workflow raises or exits, the run ends with its error."""

    def main(controller: Any) -> None:
        raise end(3)

    # it may have failed before `start` returns, which then says so
    with (
        pytest.raises(RunFailed, match=f"The workflow main failed: {end.__name__}: 3"),
        workflow_server(tmp_path, main) as server,
    ):
        server.run()


@pytest.mark.covers("T14", "X3")
@pytest.mark.parametrize(("bug", "state"), [("progress_of_run", "failed"), ("TaskQueue.finish", "done")])
def test_a_bug_in_the_server_is_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bug: str, state: str
) -> None:
    """If the server's own code fails while it watches a workflow or after it, the run ends. The log has the error
    once.
    """

    def raises(*_: Any) -> None:
        raise KeyError("w")

    module = "workflow_schedule" if state == "failed" else "task_queue"
    monkeypatch.setattr(f"atoll.server.tasks.{module}.{bug}", raises)
    with (
        pytest.raises(RunFailed, match=r"The server failed: KeyError\('w'\)"),
        workflow_server(tmp_path, lambda controller: None) as server,
    ):
        server.wait(30)
    assert [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR] == [
        "The server failed",
        "The server failed: KeyError('w').",
    ]
    assert server.status().workflows[0].state == state


@pytest.mark.covers("T14", "X3")
def test_a_site_reports_a_refused_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the server would not accept an answer, the site sends an error in its place and goes on."""
    # One error has a file's name that is not UTF-8. One answer is larger than all that the server keeps.
    caplog.set_level(logging.CRITICAL, "atoll")  # what collects the tests' output takes no such name, either

    def named(_: Any) -> None:
        raise FileNotFoundError("scan-\udcff")

    handlers = {"named": named, "large": lambda _: torch.zeros(2**20), "small": lambda _: 1}
    name, large, small = run_workflow(
        tmp_path,
        lambda controller: [controller.send("a", task, timeout_s=30) for task in handlers],
        handlers,
        **{"disk.objects_max_bytes": 2**20},
    )
    assert name.error == r"FileNotFoundError: scan-\udcff"
    assert "keeps at most 1048576 bytes of objects" in large.error
    assert small.payload == 1


@pytest.mark.covers("T14", "X3")
def test_a_site_with_a_full_disk_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a site's disk is full, its answer is an error that says so, and the site goes on with the next task."""
    pwrite = os.pwrite

    def full(fd: int, data: memoryview, offset: int) -> int:
        if not os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)):  # a site's, not the server's
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return pwrite(fd, data, offset)

    def workflow(controller: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            large = controller.send("a", "large", timeout_s=30)
        return large.error, controller.send("a", "large", timeout_s=30).payload

    error, payload = run_workflow(tmp_path, workflow, {"large": lambda _: torch.zeros(2**20)})
    assert "StoreError: A file in the folder of temporary files cannot be written: File too large." in error
    assert len(payload) == 2**20


class Slow:
    """A type of the user's own; see below for what makes one of what came."""


@pytest.mark.covers("T14")
def test_an_answers_payload_is_read_once(tmp_path: Path) -> None:
    """If two threads read the payload of a task's answer, it is loaded once, and both get the same object."""
    made: list[Slow] = []
    asked = threading.Barrier(2)

    def make(_: Any) -> Slow:
        asked.wait(30)
        made.append(Slow())
        return made[-1]

    register(Slow, "tests.slow", lambda _: None, make)

    def workflow(controller: Any) -> Any:
        result = controller.send("a", "give", timeout_s=30)

        def second() -> Any:
            asked.wait(30)
            return result.payload

        with ThreadPoolExecutor(2) as pool:
            first, other = pool.submit(lambda: result.payload), pool.submit(second)
            return first.result(30), other.result(30)

    first, other = run_workflow(tmp_path, workflow, {"give": lambda _: Slow()})
    assert [first, other] == made * 2


# -- full disks of the server


class LowDisk:
    """While it is `low`, a file system has 10 bytes left for those that ask."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.low = threading.Event()
        self.asked = 0
        self.once = False
        self._real = os.statvfs
        monkeypatch.setattr(os, "statvfs", self.measured)

    def measured(self, path: Any) -> Any:
        if not self.low.is_set():
            return self._real(path)
        self.asked += 1
        if self.once:
            self.low.clear()
        return SimpleNamespace(f_bavail=10, f_frsize=1)


@pytest.mark.covers("T2", "X3")
def test_a_payload_waits_for_free_disk_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the server's disk is too full for a payload, the task waits, and the status says so."""
    # Once there is space, the payload is sent. 256 MB must stay free.
    disk = LowDisk(monkeypatch)
    disk.low.set()
    came: list[Any] = []

    def main(controller: Any) -> None:
        (result,) = controller.broadcast("train", TREE, timeout_s=60)
        came.append(result.payload["w"].tolist())

    settings = {"disk.min_free_bytes": 256 * 10**6, "workflow.streamed_tasks": ("train",)}
    told = (
        "The server has 10 B of disk left, but must keep 256.0 MB free (disk.min_free_bytes). "
        "Free some space: the run then continues by itself, and nothing is lost."
    )
    with workflow_server(tmp_path, main, **settings) as server:
        sites = AnsweringSites(server.url, "a", {"train": echo})
        wait_until(lambda: server.status().warnings == [told], "a warning")
        disk.low.clear()
        server.run()
        sites.join()
        assert server.status().warnings == []
    assert came == [[1.0] * 3]
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"task 'train' is not sent yet: {told}"
    ]


@pytest.mark.covers("T2", "X3")
def test_a_full_disk_fails_a_task_at_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk stays full, the task fails at its timeout. A payload without tensors needs no disk and is sent."""
    disk = LowDisk(monkeypatch)

    def workflow(controller: Any) -> Any:
        disk.low.set()
        with pytest.raises(DiskFull, match="10 B of disk left"):
            controller.broadcast("train", TREE, timeout_s=0.1)
        return controller.broadcast("train", {"plain": 1}, timeout_s=30)[0].payload

    assert run_workflow(tmp_path, workflow, {"train": echo}, **{"disk.min_free_bytes": 20}) == {"plain": 1}


@pytest.mark.covers("T8", "X3")
def test_a_filtered_answer_waits_for_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the server's disk is full when it would filter an answer, the site sends the answer's message again, and it
    counts then.

    The tensors of the answer are already at the server.
    """
    disk, came = LowDisk(monkeypatch), list[Any]()
    disk.once = True

    def main(controller: Any) -> None:
        came.append(controller.send("a", "train", None, timeout_s=60).payload)

    settings = {"filters": [Drop("b")], "workflow.streamed_tasks": ("train",), "disk.min_free_bytes": 20}
    message = Fault("POST /v1/tasks/.*/answer", "up", at=BEFORE_HEADER, action="hold", wait=disk.low.set)
    with workflow_server(tmp_path, main, **settings) as server, Proxy(server.port) as proxy:
        proxy.faults.append(message)
        AnsweringSites(proxy.url, "a", {"train": lambda _: TREE | {"b": torch.ones(2)}}).join()
        server.run()
        assert (proxy.count("POST /v1/objects "), proxy.count("POST /v1/tasks/.*/answer")) == (1, 2)
    assert disk.asked == 1
    assert came[0]["w"].tolist() == [1.0] * 3
    assert came[0]["b"] is None


@pytest.mark.covers("T8")
def test_filters_for_unknown_names_cause_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a filter is for a site that did not take part, or for a task that was not sent, the log warns. It suggests the
    nearest name.
    """

    def workflow(controller: Any) -> None:
        for _ in range(2):
            controller.broadcast("train", TREE, timeout_s=30)

    entries = ({"path": "drop", "args": ["b"], "sites": ["clinic-b"], "tasks": ["train"]},)
    settings = {"workflow.payload_filters": entries, "filters": {"clinic-a": {"trian": [Drop("b")]}}}
    run_workflow(tmp_path, workflow, {"train": echo}, ["clinic-a"], **settings)
    told = [record for record in caplog.records if (record.name, record.levelno) == ("atoll.server", logging.WARNING)]
    assert [record.getMessage() for record in told] == [
        "workflow.payload_filters contains a filter for site 'clinic-b', which has not taken part. "
        "Did you mean 'clinic-a'?",
        "workflow.result_filters contains a filter for task 'trian', which was not sent. Did you mean 'train'?",
    ]


# -- two processes of one site


@pytest.mark.covers("F19", "T14")
def test_a_superseded_process_gets_no_task(tmp_path: Path) -> None:
    """If a second process joins under a site's name while the first waits for a task, the first gets an error. The
    second gets the task.
    """
    go = threading.Event()

    def main(controller: Any) -> None:
        assert go.wait(30)
        controller.send("a", "train", timeout_s=30)

    with workflow_server(tmp_path, main) as server, Proxy(server.port) as proxy, ThreadPoolExecutor() as pool:
        first = WireSite(proxy.url, "a", process="1" * 32)
        waiting = pool.submit(first.post, "/v1/tasks", {"wait_s": 20.0})
        wait_until(lambda: proxy.count("POST /v1/tasks "), "a process that waits")
        first.beat()  # over another connection; the server has had time to begin with the other request
        second = WireSite(server.url, "a", process="2" * 32)
        go.set()
        status, refused = waiting.result(30)
        assert (status, refused["code"]) == (409, "superseded")
        task = second.post("/v1/tasks", {"wait_s": 20.0})[1]["task"]
        assert second.post(f"/v1/tasks/{task['task']}/answer", {"error": "done"})[0] == 204
        assert server.wait(30)
        second.leave()
