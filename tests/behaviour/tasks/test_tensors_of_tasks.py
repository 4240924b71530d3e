"""Tensors and the messages they belong to: asked for or pulled ahead, matched by task id; and what never comes."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import together
from kit.payloads import plain
from kit.wire import WireSite
from kit.workflows import AnsweringSites, kept_objects, run_workflow, workflow_server

import atoll
from atoll.errors import RunFailed

pytestmark = pytest.mark.covers("T2")

SHARED = torch.arange(300_000.0)
FIRST = {
    "w": SHARED,
    "again": SHARED,
    "bf16": torch.ones(5, dtype=torch.bfloat16),
    "array": np.arange(7, dtype=np.int8),
}
SECOND = {
    "w": torch.full((70_000,), -0.0),
    "deep": [{"x": torch.eye(3, dtype=torch.float64)}, (np.ones(2), b"b", None)],
}


def pulled(proxy: Proxy) -> list[str]:
    """Ids of the objects whose manifests were asked for, once for each time."""
    return [found[1] for line in list(proxy.requests) if (found := re.match(r"GET /v1/objects/(\w+) ", line))]


@pytest.mark.covers("T10", "P13")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"workflow.streamed_tasks": ("echo",)},
        {"workflow.streamed_tasks": ("echo",), "workflow.tensor_part_bytes": 0},
        {"workflow.streamed_tasks": ("echo",), "workflow.array_part_bytes": 0},
    ],
    ids=["inline", "streamed", "torch inline", "numpy inline"],
)
@pytest.mark.parametrize("request_task_tensors", [True, False], ids=["asked", "ahead"])
def test_tensors_are_downloaded_ahead_or_on_request(
    tmp_path: Path, request_task_tensors: bool, settings: dict[str, Any]
) -> None:
    """A site gets the same tensors, each once, whether it downloads them on request or ahead."""
    # Two tasks are open for the site. While it works at the first, the second's tensors come only if it downloads
    # ahead.
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        with ThreadPoolExecutor(2) as pool:
            sent = [pool.submit(controller.send, "a", "echo", tree, timeout_s=60) for tree in (FIRST, SECOND)]
            came["results"] = [future.result().payload for future in sent]

    with workflow_server(tmp_path, main, **settings) as server, Proxy(server.port) as proxy:
        with atoll.tasks(proxy.url, "a", request_task_tensors=request_task_tensors) as worker:
            for number, task in enumerate(worker.tasks()):
                if number == 0:
                    wait_until(lambda: len(kept_objects(tmp_path)) == 2, "both tasks at the server")
                    if not request_task_tensors:
                        wait_until(lambda: len(pulled(proxy)) == 2, "the second task's tensors")
                    assert len(pulled(proxy)) == (1 if request_task_tensors else 2)
                if "again" in task.payload:
                    assert task.payload["again"] is task.payload["w"]
                task.answer(task.payload)
        server.run()
        assert len(pulled(proxy)) == len(set(pulled(proxy))) == 2  # each once
    assert plain(came["results"]) == plain([FIRST, SECOND])
    assert kept_objects(tmp_path) == []


@pytest.mark.covers("T10")
def test_a_stalled_download_ends_with_its_task(tmp_path: Path) -> None:
    """If a site downloads a later task's tensors in advance and the download stalls, it ends when that task is over."""
    # Otherwise, nothing more would be downloaded ahead until the network times out, after a minute.
    over, came = threading.Event(), dict[Any, Any]()

    def main(controller: Any) -> None:
        def echo(number: float) -> Any:
            return controller.send("a", "echo", {"w": torch.full((3,), number)}, timeout_s=60).payload

        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(echo, 1.0)
            wait_until(lambda: 1 in came, "the first task at the site")
            with pytest.raises(RunFailed, match="did not answer"):
                controller.send("a", "echo", {"w": torch.full((3,), 2.0)}, timeout_s=1.0)
            over.set()
            third = pool.submit(echo, 3.0)
            wait_until(lambda: 3 in came, "the third task at the site")
            came["fourth"] = echo(4.0)
            first.result()
            third.result()

    with (
        workflow_server(tmp_path, main, **{"workflow.streamed_tasks": ("echo",)}) as server,
        Proxy(server.port) as proxy,
    ):
        with atoll.tasks(proxy.url, "a", request_task_tensors=False) as worker:
            stall = Fault("GET /v1/objects/", "down", at=60, action="stall")
            for task in worker.tasks():
                number = int(task.payload["w"][0])
                if number == 1:
                    proxy.faults.append(stall)
                came[number] = task.payload
                if number == 1:
                    assert stall.reached.wait(30)
                    assert over.wait(30)
                    wait_until(lambda: len(kept_objects(tmp_path)) == 2, "the third task at the server")
                if number == 3:
                    wait_until(lambda: len(set(pulled(proxy))) == 4, "the fourth task's tensors, ahead")
                task.answer(task.payload)
        server.run()
    assert came["fourth"]["w"].tolist() == [4.0, 4.0, 4.0]
    assert set(came) == {1, 3, 4, "fourth"}
    assert kept_objects(tmp_path) == []


CANNOT_DOWNLOAD = r"TransferStalled: The tensors of task 'train' \(\w{8}\) cannot be downloaded from URL to site a: "
UPLOAD_FAILED = r"TransferError: The upload of the answer to task 'train' \(\w{8}\) of site a to URL failed: "


@pytest.mark.parametrize(
    ("request_line", "direction", "stream", "ahead", "error"),
    [
        ("GET", "down", (), False, CANNOT_DOWNLOAD),
        ("GET", "down", (), True, CANNOT_DOWNLOAD),
        ("GET", "down", ("train",), False, CANNOT_DOWNLOAD),
        ("GET", "down", ("train",), True, CANNOT_DOWNLOAD),
        ("PUT", "up", (), False, UPLOAD_FAILED),
    ],
    ids=["inline", "inline ahead", "streamed", "streamed ahead", "answer"],
)
@pytest.mark.parametrize("stalls", [60, 1], ids=["for good", "once"])
def test_tensors_that_never_arrive_cause_an_error(
    tmp_path: Path, request_line: str, direction: Any, stream: tuple[str, ...], ahead: bool, error: str, stalls: int
) -> None:
    """If a payload's or an answer's tensors never arrive, the task's result is an error with the site, the task and the
    server.
    """
    # The task has no time limit: it ends after the transfer stalls twice. The site and the workflow go on. One stall
    # alone does no harm.
    faults = [Fault(f"{request_line} /v1/objects/", direction, at=60, action="stall") for _ in range(stalls)]
    came: list[Any] = []

    def main(controller: Any) -> None:
        came.extend((controller.send("a", "train", {"w": torch.ones(100_000)}), controller.send("a", "validate", 7)))

    settings: dict[str, Any] = {"workflow.streamed_tasks": stream, "network.idle_timeout_s": 0.3}
    with workflow_server(tmp_path, main, **settings) as server, Proxy(server.port) as proxy:
        proxy.faults += faults
        handlers = {"train": lambda payload: {"w": payload["w"] * 2}, "validate": lambda payload: payload + 1}
        AnsweringSites(proxy.url, "a", handlers, {"a": {"request_task_tensors": not ahead}}).join()
        server.run()
        first, after = came
        assert after.payload == 8
        if stalls == 1:
            assert faults[0].reached.is_set()
            assert torch.equal(first.payload["w"], torch.full((100_000,), 2.0))
        else:
            assert len(proxy.faults) < stalls
            assert re.match(error.replace("URL", proxy.url), first.error), first.error
    assert kept_objects(tmp_path) == []


def test_tensors_of_an_answer_arrive_before_its_message(tmp_path: Path) -> None:
    """A site uploads the tensors of an answer before the message that names them."""
    # If the message is lost, it is sent again alone. Site `a` and site `b` have a task each. The tensors of `a` are at
    # the server, and its message is held back until `b` has answered.
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=60)

        def ask(site: str, tree: Any) -> None:
            came[site] = controller.send(site, "train", tree, timeout_s=60).payload

        with ThreadPoolExecutor(2) as pool:
            for sent in [pool.submit(ask, "a", FIRST), pool.submit(ask, "b", SECOND)]:
                sent.result()

    uploaded = threading.Event()

    def held() -> None:
        """As the message of a's answer is about to come: its object is here, with a note, which those of tasks lack."""
        came["before"] = (sum(name.endswith(".json") for name in kept_objects(tmp_path)), "a" in came)
        uploaded.set()
        wait_until(lambda: "b" in came, "b's answer")
        came["meanwhile"] = "a" in came

    def site(url: str, name: str) -> None:
        with atoll.tasks(url, name) as worker:
            for task in worker.tasks():
                if name == "b":
                    assert uploaded.wait(30)
                came[f"task of {name}"] = task.id
                assert task.answer(task.payload)

    message = Fault("/v1/tasks/.*/answer", "up", at=BEFORE_HEADER, action="reset", wait=held)
    with workflow_server(tmp_path, main) as server, Proxy(server.port) as slow:
        slow.faults.append(message)
        together(lambda: site(slow.url, "a"), lambda: site(server.url, "b"))
        server.run()
        lines = [line.split()[1] for line in slow.requests if re.match(r"(PUT|POST) /v1/(objects/|tasks/)", line)]
    assert message.reached.is_set()
    assert came["before"] == (1, False)
    assert not came["meanwhile"]
    assert plain([came["a"], came["b"]]) == plain([FIRST, SECOND])
    answers = [line for line in lines if line.endswith("/answer")]
    assert answers == [f"/v1/tasks/{came['task of a']}/answer"] * 2  # what was broken is sent again, alone
    assert max(lines.index(line) for line in lines if line.startswith("/v1/objects/")) < lines.index(answers[0])
    assert kept_objects(tmp_path) == []


@contextmanager
def answered_after_a_refusal(folder: Path) -> Iterator[tuple[atoll.Server, WireSite, dict[str, Any]]]:
    """A server, and its site a with a task; the block sends a wrong answer. Then the task still takes a right one."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        came["payload"] = controller.send("a", "train", FIRST, timeout_s=60).payload

    with workflow_server(folder, main) as server:
        site = WireSite(server.url, "a")
        yield server, site, site.post("/v1/tasks", {"wait_s": 20.0})[1]["task"]
        assert "payload" not in came
        AnsweringSites(server.url, "a", {"train": lambda payload: payload}).join()
        server.run()
    assert plain(came["payload"]) == plain(FIRST)
    assert kept_objects(folder) == []


def test_an_answer_without_tensors_is_refused(tmp_path: Path) -> None:
    """If an answer's message comes while its tensors are still being uploaded, the server refuses it."""
    # The task stays open. No worker of Atoll does this.
    with answered_after_a_refusal(tmp_path) as (_, site, task):
        sizes = {"head_bytes": 64, "nbytes": 4096, "part_bytes": 2**20}
        _, opened = site.post("/v1/objects", sizes | {"expires_s": 60})
        key = {"object": opened["object"], "secret": opened["secret"], "digest": "0" * 64, "expires_at": 2**31}
        status, refused = site.post(f"/v1/tasks/{task['task']}/answer", {"body": {"object": key}})
        assert (status, refused["message"]) == (409, f"Object {opened['object'][:8]} is still being uploaded.")


def test_an_answer_with_a_wrong_digest_is_refused(tmp_path: Path) -> None:
    """If the digest in an answer differs from that of its object, the server refuses the answer and removes the object.
    The task stays open.
    """
    with answered_after_a_refusal(tmp_path) as (server, site, task):
        ref = atoll.objects.publish(SECOND, server=server.url)
        key = {"object": ref.object, "secret": ref.secret, "digest": "0" * 64, "expires_at": ref.expires_at}
        status, refused = site.post(f"/v1/tasks/{task['task']}/answer", {"body": {"object": key}})
        assert (status, refused["message"]) == (409, "The answer of site a does not match its digest.")


class Closed(dict[str, Any]):
    """A mapping that cannot be read any more."""

    def items(self) -> Any:
        raise OSError("the file behind it is closed")


@pytest.mark.parametrize(
    ("answer", "error"),
    [(Closed(w=1), "OSError: the file behind it is closed"), ({"w": object()}, "is of type object")],
)
def test_an_answer_that_cannot_be_packed_fails_alone(tmp_path: Path, answer: Any, error: str) -> None:
    """If an answer cannot be packed, its task has failed, with the reason, and the site answers the next one."""

    def two_tasks(controller: Any) -> list[str]:
        return [controller.broadcast("train", number)[0].error for number in range(2)]

    found = run_workflow(tmp_path, two_tasks, {"train": lambda number: 1 if number else answer})
    assert error in found[0]
    assert not found[1]
