"""What the status says of tasks: how each one's payload and answers travelled, and who is awaited."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.workflows import workflow_server

import atoll

SCRIPT = Path(__file__).with_name("task_process.py")


def shown(nursery: Nursery, folder: Path, url: str) -> list[str]:
    """What `atoll status` prints of a server."""
    command = nursery.start("atoll", "status", "--server", url, cwd=folder)
    assert command.wait() == 0, command.output()
    return command.output().splitlines()


@pytest.mark.covers("T11")
def test_each_task_says_how_it_and_its_answers_travelled(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """train is streamed both ways; validate has tensors, answers a number at a and fails at b; echo has nothing to
    be streamed, twice: that is said, and it goes inline. 4 tasks: 1 streamed, 1 inline, 2 skipped.
    """

    lines: list[str] = []

    def main(controller: Any) -> None:
        controller.sites(2, timeout_s=30)
        state = {"w": torch.ones(3)}
        for task, payload in (("train", state), ("validate", state), ("echo", None), ("echo", "words")):
            controller.broadcast(task, payload, timeout_s=30)
        lines.extend(shown(nursery, tmp_path, server.url))

    with workflow_server(tmp_path, main, **{"workflow.streamed_tasks": ("train", "echo")}) as server:
        with caplog.at_level(logging.WARNING, "atoll.server"):
            workers = [nursery.start(str(SCRIPT), server.url, name, cwd=tmp_path) for name in "ab"]
            assert server.wait(60)
        server.run()
        status = server.status()
    assert [worker.wait() for worker in workers] == [0, 0]
    found = [(task.number, task.name, task.way, task.answers, task.missing, task.open) for task in status.sent]
    assert found == [
        (1, "train", "streamed", {"streamed": 2}, [], False),
        (2, "validate", "inline", {"failed": 1, "skipped": 1}, [], False),
        (3, "echo", "skipped", {"skipped": 2}, [], False),
        (4, "echo", "skipped", {"skipped": 2}, [], False),
    ]
    assert all(task.sites == ["a", "b"] for task in status.sent)
    assert status.tasks == {"streamed": 1, "inline": 1, "skipped": 2}
    warning = "workflow.streamed_tasks has task 'echo', but its payload has no tensors: sent inside the message"
    assert status.warnings == [warning]
    assert caplog.messages.count(warning) == 1
    assert "4 tasks sent: 1 streamed, 1 inline, 2 skipped" in lines
    assert lines[-3].startswith("task 2 validate: inline to a, b; 2 of 2 answers (1 failed, 1 skipped), ")
    assert f"warning: {warning}" in lines


@pytest.mark.covers("T11")
def test_an_open_task_names_awaited_sites_and_warns_of_answers_without_tensors(
    nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two rounds of train, streamed; the site's answers are None: said once, and taken."""
    answers: list[Any] = []

    def main(controller: Any) -> None:
        for _ in range(2):
            answers.append(controller.send("a", "train", {"w": torch.ones(3)}, timeout_s=30).payload)

    with workflow_server(tmp_path, main) as server:
        with caplog.at_level(logging.WARNING, "atoll"), atoll.tasks(server.url, "a") as worker:
            for task in worker.tasks():
                (*_, sent) = server.status().sent
                assert (sent.name, sent.way, sent.sites, sent.missing) == ("train", "streamed", ["a"], ["a"])
                assert sent.open
                line = shown(nursery, tmp_path, server.url)[-1]
                assert f"task {sent.number} train: streamed to a; 0 of 1 answers; waiting for a, " in line
                task.answer(None)
        server.run()
        assert [task.answers for task in server.status().sent] == [{"skipped": 1}] * 2
    assert answers == [None, None]
    warned = [text for text in caplog.messages if "its answer has no tensors: sent inside the message" in text]
    assert warned == [
        "a: workflow.streamed_tasks has task 'train', but its answer has no tensors: sent inside the message"
    ]


@pytest.mark.covers("T14", "X3")
def test_a_run_that_has_workflows_alone_shows_no_training_and_exports_nothing(nursery: Nursery, tmp_path: Path) -> None:
    def main(controller: Any) -> None:
        controller.send("a", "echo", 1, timeout_s=30)

    def export(*where: str) -> str:
        command = nursery.start("atoll", "export", "model.safetensors", *where, cwd=tmp_path)
        assert command.wait() == 2, command.output()
        return " ".join(command.output().split())

    with workflow_server(tmp_path, main) as server:
        with atoll.tasks(server.url, "a") as worker:
            for task in worker.tasks():
                lines = shown(nursery, tmp_path, server.url)
                run = server.status().run[:8]
                assert lines[0].startswith(f"atoll at {server.url}: no model, run {run}, epoch 1, up ")
                of_the_run = "\n".join(lines).partition("\nsite ")[0]  # and not of its sites
                assert not any(word in of_the_run for word in ("diloco", "outer optimizer", "version", "codec"))
                told = export("--server", server.url)
                assert f"The run at {server.url} has only workflows, no model" in told
                task.answer(task.payload)
        server.run()
    assert "state has only workflows, no model" in export("--dir", "state")
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.covers("T11")
def test_the_status_shows_the_last_tasks_and_counts_them_all(nursery: Nursery, tmp_path: Path) -> None:
    """23 tasks: the last 20 are 4 to 23. The last one is for a site that has left, and has no answer."""

    lines: list[str] = []

    def main(controller: Any) -> None:
        for number in range(22):
            controller.send("a", "echo", number, timeout_s=30)
        controller.broadcast("echo", sites=["gone"], timeout_s=0.01)
        lines.extend(shown(nursery, tmp_path, server.url))

    with workflow_server(tmp_path, main, **{"rounds.sites": 2}) as server:
        with atoll.tasks(server.url, "gone"):
            pass
        with atoll.tasks(server.url, "a") as worker:
            worker.task("echo")(lambda payload: payload)
            worker.run()
        server.run()
        status = server.status()
    assert [task.number for task in status.sent] == list(range(4, 24))
    assert status.tasks == {"streamed": 0, "inline": 0, "skipped": 23}
    assert "23 tasks sent: 0 streamed, 0 inline, 23 skipped" in lines
    assert lines[-1].startswith("task 23 echo: skipped to gone; 0 of 1 answers; none from gone, 0.0 s")
