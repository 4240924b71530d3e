"""A workflow at the server, handlers in worker processes: what is sent comes back, and what the status shows."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import Nursery, Process, free_port, wait_until
from kit.manual_site import ManualSite
from kit.payloads import plain
from kit.processes import command, url_of
from kit.servers import plain_server
from kit.wire import WireSite
from kit.workflows import kept_objects, run_workflow_as_processes, run_workflow_to_status, workflow_server
from typer.testing import CliRunner

import atoll
from atoll import TensorRef
from atoll.cli.main import app
from atoll.errors import ConfigError, Conflict, RunFailed, UsageError

SCRIPT = Path(__file__).with_name("task_process.py")

TREE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
    "list": [torch.tensor([True, False]), (np.arange(4, dtype=np.int16), b"\x00\xff", None)],
    "number": 0.5,
    "name": "task",
}


def site(nursery: Nursery, folder: Path, server: atoll.Server, name: str) -> Process:
    return nursery.start(str(SCRIPT), server.url, name, cwd=folder)


@pytest.mark.covers("T1", "T4", "T7", "T9", "T11", "T14")
@pytest.mark.parametrize("stream", [(), ("echo",)], ids=["inline", "streamed"])
def test_payloads_come_back_as_sent(tmp_path: Path, stream: tuple[str, ...]) -> None:
    """Payloads come back from the sites as they were sent, and leave no object behind."""
    # The status counts how they were sent. Five payloads go out: one with tensors, three plain ones, and a long text
    # that becomes an object.
    long, small = "x" * (24 * 2**10 + 1), (None, 0.1, [b"b", ()])

    def workflow(controller: Any) -> Any:
        assert controller.sites(at_least=2, timeout_s=30) == ["a", "b"]
        results = controller.broadcast("echo", TREE, min_responses=2, timeout_s=30)
        results += [controller.send("a", "echo", value, timeout_s=30) for value in small]
        results.append(controller.send("b", "echo", long, timeout_s=30))
        came = [(each.site, each.payload) for each in results]
        assert kept_objects(tmp_path) == []
        return came

    settings = {"workflow.streamed_tasks": stream}
    came, status = run_workflow_to_status(tmp_path, workflow, {"echo": lambda payload: payload}, "ab", **settings)
    assert plain(came) == plain([("a", TREE), ("b", TREE), *(("a", value) for value in small), ("b", long)])
    streamed = {"streamed": 1, "inline": 1, "without_tensors": 3}
    assert status.tasks == (streamed if stream else {"streamed": 0, "inline": 2, "without_tensors": 3})


@pytest.mark.covers("T9", "T14")
def test_a_failing_handler_gives_an_error_result(nursery: Nursery, tmp_path: Path) -> None:
    """If a site's task handler raises an error, the result of this site is an error with the handler's name, and the
    other sites go on.
    """
    # A task without a handler gives an error. The handler `validate` fails at `b`. At `a`, w is 1 + len(site) = 2, so
    # the sum of 3 is 6.

    def workflow(controller: Any) -> tuple[list[Any], str, str]:
        (trained, _) = controller.broadcast("train", {"w": torch.ones(3)}, min_responses=2, timeout_s=30)
        validated = controller.broadcast("validate", trained.payload, min_responses=1, timeout_s=30)
        unknown = controller.send("a", "unknown", timeout_s=30).error
        with pytest.raises(RunFailed) as refused:
            controller.broadcast("validate", trained.payload, min_responses=2, timeout_s=30)
        return validated, unknown, str(refused.value)

    ((good, bad), unknown, refused), _ = run_workflow_as_processes(nursery, SCRIPT, tmp_path, workflow, "ab")
    assert good.ok
    assert good.payload == {"accuracy": 6.0}
    assert not bad.ok
    with pytest.raises(RunFailed, match="Site b failed at task 'validate': ValueError: no data here"):
        bad.payload  # noqa: B018
    known = "echo, hang, submit_model, train, train_from, validate"
    assert unknown == f"this site has no handler for task 'unknown', only for: {known}"
    assert "got 1 of 2 answers: b failed: ValueError: no data here" in refused


@pytest.mark.covers("T14", "T7")
@pytest.mark.parametrize("stream", [(), ("hang",)], ids=["inline", "streamed"])
def test_a_killed_site_gets_its_task_again(nursery: Nursery, tmp_path: Path, stream: tuple[str, ...]) -> None:
    """If a site is killed at work on a task, its next process gets the same task with its payload."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        came["payload"] = controller.send("a", "hang", {"w": torch.arange(3)}, timeout_s=60).payload

    with workflow_server(tmp_path, main, **{"workflow.streamed_tasks": stream}) as server:
        first = site(nursery, tmp_path, server, "a")
        wait_until((tmp_path / "a.hung").exists, "the task at the site")
        first.kill()
        assert len(kept_objects(tmp_path)) == 1  # the task's payload, for the next process
        second = site(nursery, tmp_path, server, "a")
        assert server.wait(60)
        server.run()
    assert second.wait() == 0
    assert plain(came["payload"]) == plain({"again": True, "w": torch.arange(3)})
    assert kept_objects(tmp_path) == []


@pytest.mark.covers("T14")
def test_a_dead_site_gives_no_answer(nursery: Nursery, tmp_path: Path) -> None:
    """If a site dies, `send` to it raises after its timeout. `broadcast` returns the other answers if `min_responses`
    of them are there.
    """
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        controller.sites(2, timeout_s=30)
        try:  # it stands still until it is killed
            controller.send("b", "hang", {"w": torch.ones(1)}, timeout_s=0.5)
        except RunFailed as error:
            came["late"] = str(error)
        results = controller.broadcast("train", {"w": torch.ones(1)}, min_responses=1)
        came["sites"] = [result.site for result in results]

    with workflow_server(
        tmp_path, main, **{"network.heartbeat_interval_s": 0.5, "network.heartbeat_timeout_s": 2.0}
    ) as server:
        alive = site(nursery, tmp_path, server, "a")
        dying = site(nursery, tmp_path, server, "b")
        wait_until((tmp_path / "b.hung").exists, "the task at the site")
        dying.kill()
        assert server.wait(60)
        server.run()
    assert alive.wait() == 0
    assert came == {"late": "Site b did not answer task 'hang' in 0.5 s. See the site's log.", "sites": ["a"]}


@pytest.mark.covers("T7", "T14")
def test_a_late_answer_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If an answer comes after its task is over, the server refuses it and keeps no object of it."""
    over, come = threading.Event(), threading.Event()

    def main(controller: Any) -> None:
        controller.sites(1)
        assert controller.broadcast("train", {"w": torch.ones(2)}, sites=["a"], timeout_s=0.5) == []
        over.set()
        assert come.wait(30)

    with workflow_server(tmp_path, main) as server, atoll.tasks(server.url, "a") as worker:
        for task in worker.tasks():
            assert task.name == "train"
            assert over.wait(30)
            with caplog.at_level(logging.WARNING, "atoll"):
                assert task.answer({"w": task.payload["w"] * 2}) is False
            assert kept_objects(tmp_path) == []
            come.set()
        assert "is not open for site a: it is over" in caplog.text


def test_a_task_worker_reads_its_address_from_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker for tasks takes the server's address and the site's name from environment variables. If the address is
    missing, the error names `ATOLL_SERVER`.
    """
    monkeypatch.delenv("ATOLL_SERVER", raising=False)
    with pytest.raises(UsageError, match="set ATOLL_SERVER"):
        atoll.tasks()
    with workflow_server(tmp_path, lambda controller: controller.sites(at_least=1, timeout_s=30)) as server:
        monkeypatch.setenv("ATOLL_SERVER", server.url)
        monkeypatch.setenv("ATOLL_SITE", "clinic-a")
        with atoll.tasks() as worker:
            assert worker.site == "clinic-a"


@pytest.mark.covers("T12")
def test_a_site_fetches_a_reference_from_its_owner(nursery: Nursery, tmp_path: Path) -> None:
    """If a payload has a reference to tensors at another site, the receiving site fetches the tensors from there."""
    # They do not pass the server. Site `b` fetches 1 MB from site `a`. The server stores no object, and only text
    # passes it.
    elements = 250_000

    def workflow(controller: Any) -> dict[str, Any]:
        ref = controller.send("a", "submit_model", {"elements": elements}, timeout_s=30).payload["ref"]
        return {**controller.send("b", "train_from", {"ref": ref}, timeout_s=30).payload, "same": ref}

    came, status = run_workflow_as_processes(nursery, SCRIPT, tmp_path, workflow, "ab")
    assert (came["kind"], came["ref"]) == ("TensorRef", came["same"])
    assert came["ref"].port != int(status.address.rpartition(":")[2])
    assert came["sum"] == elements
    assert came["objects"] == []
    assert (status.bytes_up, status.bytes_down) == (0, 0)


@pytest.mark.covers("T14")
def test_without_room_a_restart_begins_the_workflow_again(nursery: Nursery, tmp_path: Path) -> None:
    """If a server without room for answers stops in the middle of its workflow, the next start begins it again."""
    begun: list[int] = []
    sent = threading.Event()

    def main(controller: Any) -> None:
        begun.append(len(begun) + 1)
        if len(begun) == 1:
            controller.send("a", "hang", {"w": torch.ones(1)})
        sent.set()

    no_room = {"disk.workflow_max_bytes": 0}
    server = workflow_server(tmp_path, main, **no_room).start()
    first = site(nursery, tmp_path, server, "a")
    wait_until((tmp_path / "a.hung").exists, "the task at the site")
    first.kill()
    server.stop()
    assert not sent.is_set()  # what it waited for ended it
    assert kept_objects(tmp_path) == []
    with workflow_server(tmp_path, main, **no_room) as again:
        assert again.wait(30)
        assert sent.is_set()
    assert begun == [1, 2]


@pytest.mark.covers("T14")
def test_rounds_and_tasks_do_not_mix(tmp_path: Path) -> None:
    """A run has either rounds or a workflow of tasks: both together are refused.

    A script for rounds cannot train in a run of tasks, and a script for tasks cannot work in a run of rounds.
    """
    with pytest.raises(ConfigError, match="a run has either a workflow or rounds"):
        workflow_server(tmp_path, print, **{"rounds.total": 2})
    with pytest.raises(ConfigError, match="a run has either a workflow or rounds"):
        atoll.Settings.build({"workflow.function": "flow.py:main", "rounds.total": 2})
    over = threading.Event()
    with workflow_server(tmp_path / "one", lambda _: over.wait(30) or None) as server:
        with (
            ManualSite(server.url, "a", folder=tmp_path) as client,
            pytest.raises(ConfigError, match=r"atoll\.tasks"),
        ):
            client.next_round()
        over.set()
    with plain_server(tmp_path / "two", torch.nn.Linear(1, 1)) as server, atoll.tasks(server.url, "a") as worker:
        with pytest.raises(ConfigError, match=r"atoll\.join"):
            next(worker.tasks())
        with pytest.raises(UsageError, match="has no task handler"):
            worker.run()


@pytest.mark.covers("T14")
def test_sites_outlive_a_restart(nursery: Nursery, tmp_path: Path) -> None:
    """A site that worked before a restart of the server gets the new server's tasks."""
    came: list[Any] = []

    def before(controller: Any) -> None:
        came.append(controller.send("a", "echo", 1, timeout_s=30).payload)
        controller.sites(at_least=2)  # until the server stops

    def after(controller: Any) -> None:
        came.append(controller.send("a", "train", {"w": torch.ones(2)}, timeout_s=30).payload)

    port = free_port()
    settings = {"network.port": port, "disk.workflow_max_bytes": 0}  # the next start has another function
    server = workflow_server(tmp_path, before, **settings).start()
    worker = site(nursery, tmp_path, server, "a")
    wait_until(lambda: came, "the first answer")
    server.stop()
    with workflow_server(tmp_path, after, **settings) as again:
        assert again.wait(60)
        again.run()
    assert worker.wait() == 0
    assert plain(came) == plain([1, {"w": torch.full((2,), 2.0), "site": "a"}])


@pytest.mark.covers("T4", "T11")
def test_status_shows_how_each_payload_was_sent(tmp_path: Path) -> None:
    """The status shows for each task whether its payload was sent inline, streamed or without tensors."""
    # It warns if this differs from the settings. An inline message holds 16 MiB, of which 1 MiB is for the head. With
    # their text, 15 MiB of tensors are too many.
    fits, large = torch.zeros(15 * 2**20 - 1000, dtype=torch.uint8), torch.zeros(15 * 2**20, dtype=torch.uint8)
    payloads = {"small": [fits], "large": [large], "streamed": [fits], "nothing": {"lr": 0.1}, "plain": {"lr": 0.1}}

    def workflow(controller: Any) -> None:
        for task, payload in payloads.items():
            controller.send("a", task, payload, timeout_s=60)

    handlers = dict.fromkeys(payloads, lambda _: None)
    settings = {"workflow.streamed_tasks": ("streamed", "nothing")}
    _, status = run_workflow_to_status(tmp_path, workflow, handlers, **settings)
    assert {task.name: task.way for task in status.sent} == {
        "small": "inline",
        "large": "streamed",
        "streamed": "streamed",
        "nothing": "without_tensors",
        "plain": "without_tensors",
    }
    of_large, of_nothing = status.warnings
    too_large = "the payload of task 'large' has 15728640 bytes of tensors, too many for one message: sent in parts"
    assert too_large in of_large
    assert "workflow.streamed_tasks has task 'nothing', but its payload has no tensors" in of_nothing


@pytest.mark.covers("T7", "T14")
def test_a_site_cannot_remove_a_shared_payload(tmp_path: Path) -> None:
    """A site cannot delete the payload that the server sent to several sites, or send it back as its own answer.

    Such an answer is refused, and the next one is accepted.
    """
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        came["error"] = controller.send("a", "train", {"w": torch.ones(2)}, timeout_s=30).error

    with workflow_server(tmp_path, main) as server:
        site = WireSite(server.url, "a")
        task = site.post("/v1/tasks", {"wait_s": 20.0})[1]["task"]
        key = task["body"]["object"]

        def answer(**message: Any) -> tuple[int, str]:
            """Status, and the message of a refusal."""
            status, reply = site.post(f"/v1/tasks/{task['task']}/answer", message)
            return status, reply.get("message", "")

        ref = TensorRef("127.0.0.1", server.port, False, **key)
        with pytest.raises(Conflict, match="belongs to the server"):
            atoll.objects.withdraw(ref)
        for message, status, words in (
            ({"body": {"object": key}}, 409, "belongs to the server"),
            ({}, 400, "a payload or an error"),
            ({"body": {"plain": "{"}}, 400, "not JSON"),
        ):
            assert answer(**message)[0] == status
            assert words in answer(**message)[1]
        assert torch.equal(atoll.objects.fetch(ref)["w"], torch.ones(2))
        for _ in range(2):  # the acknowledgement was lost: the same is taken once
            assert answer(error="no")[0] == 204
        assert answer(error="another")[0] == 409
        assert server.wait(30)
        site.leave()
    assert came == {"error": "no"}
    assert kept_objects(tmp_path) == []


# -- the example, and a workflow that a run file names


EXAMPLE = Path(__file__).parents[3] / "examples" / "scatter_and_gather.py"


def losses(text: str) -> list[float]:
    return [float(value) for value in re.findall(r"^round \d: loss ([0-9.]+)$", text, re.MULTILINE)]


@pytest.mark.slow
@pytest.mark.covers("T14")
def test_the_example_trains_across_two_sites(nursery: Nursery, tmp_path: Path) -> None:
    """The example trains with two sites, and its loss falls in every round, below a tenth of the first.

    The targets are a linear function of the inputs, so the loss goes towards 0.
    """
    done = command(nursery, tmp_path, program=str(EXAMPLE))
    assert done.returncode == 0, done.stderr[-3000:]
    values = losses(done.stdout)
    assert len(values) == 5
    assert values == sorted(values, reverse=True)
    assert values[-1] < 0.1 * values[0]


@pytest.mark.slow
@pytest.mark.covers("T14")
def test_a_run_file_can_set_the_workflow(nursery: Nursery, tmp_path: Path) -> None:
    """`atoll server` runs the workflow in the file that a run file names, with a process for each worker.

    The path is relative to the run file, not to the folder where the command starts.
    """
    folder, names = tmp_path / "run", ("clinic-a", "clinic-b")
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "flow.py")
    (folder / "run.toml").write_text('workflow.function = "flow.py:main"\nnetwork.port = 0\n')
    server = nursery.start("atoll", "server", "run/run.toml", cwd=tmp_path)
    url = url_of(server)
    told = [{"ATOLL_SERVER": url, "ATOLL_SITE": name} for name in names]
    workers = [nursery.start(str(EXAMPLE), cwd=tmp_path, env=each) for each in told]
    assert server.wait(60) == 0, server.output()
    assert [worker.wait() for worker in workers] == [0, 0]
    said = server.output()
    assert len(losses(said)) == 5, said
    assert "start workers with a script that uses atoll.tasks" in said
    assert re.search(r"finished after .*; 2 workers, 0 deaths$", said, re.MULTILINE), said
    for name, worker in zip(names, workers, strict=True):
        assert f"{name}: takes part in" in worker.output()
        assert f"{name}: the workflow has ended" in worker.output()


# -- what the status shows of tasks


def shown(url: str) -> list[str]:
    """What `atoll status` prints of a server."""
    outcome = CliRunner().invoke(app, ["status", "--server", url], env={"COLUMNS": "120"})
    assert outcome.exit_code == 0, outcome
    return outcome.output.splitlines()


@pytest.mark.covers("T11")
def test_each_task_shows_how_it_was_sent(nursery: Nursery, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The status and its command show for each task and its answers whether they were streamed, inline, without tensors
    or failed.
    """
    # The task `train` is streamed in both directions. `validate` has tensors, answers a number at `a` and fails at `b`.
    # `echo` has nothing to stream, twice, which the log says once. Of 4 tasks, 1 is streamed, 1 inline and 2 are
    # without tensors.

    lines: list[str] = []

    def main(controller: Any) -> None:
        controller.sites(2, timeout_s=30)
        state = {"w": torch.ones(3)}
        for task, payload in (("train", state), ("validate", state), ("echo", None), ("echo", "words")):
            controller.broadcast(task, payload, timeout_s=30)
        lines.extend(shown(server.url))

    with workflow_server(tmp_path, main, **{"workflow.streamed_tasks": ("train", "echo")}) as server:
        with caplog.at_level(logging.WARNING, "atoll.server"):
            workers = [site(nursery, tmp_path, server, name) for name in "ab"]
            assert server.wait(60)
        server.run()
        status = server.status()
    assert [worker.wait() for worker in workers] == [0, 0]
    found = [(task.number, task.name, task.way, task.answers, task.missing, task.open) for task in status.sent]
    assert found == [
        (1, "train", "streamed", {"streamed": 2}, [], False),
        (2, "validate", "inline", {"failed": 1, "without_tensors": 1}, [], False),
        (3, "echo", "without_tensors", {"without_tensors": 2}, [], False),
        (4, "echo", "without_tensors", {"without_tensors": 2}, [], False),
    ]
    assert all(task.sites == ["a", "b"] for task in status.sent)
    assert status.tasks == {"streamed": 1, "inline": 1, "without_tensors": 2}
    warning = "workflow.streamed_tasks has task 'echo', but its payload has no tensors: sent inside the message"
    assert status.warnings == [warning]
    assert caplog.messages.count(warning) == 1
    assert "4 tasks sent: 1 streamed, 1 inline, 2 without tensors" in lines
    assert lines[-3].startswith("task 2 validate: inline to a and b; 2 of 2 answers (1 failed, 1 without tensors), ")
    assert f"warning: {warning}" in lines


@pytest.mark.covers("T11")
def test_an_open_task_shows_awaited_sites(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The status of an open task shows the sites that have not answered.

    If a site answers two streamed tasks without tensors, the log warns once and the answers count.
    """
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
                line = shown(server.url)[-1]
                assert f"task {sent.number} train: streamed to a; 0 of 1 answer; waiting for a, " in line
                task.answer(None)
        server.run()
        assert [task.answers for task in server.status().sent] == [{"without_tensors": 1}] * 2
    assert answers == [None, None]
    warned = [text for text in caplog.messages if "its answer has no tensors: sent inside the message" in text]
    reason = "workflow.streamed_tasks has task 'train', but its answer has no tensors: sent inside the message"
    assert warned == [f"a: an answer is sent in another way: {reason}"]


@pytest.mark.covers("T14", "X3")
def test_a_run_of_workflows_has_no_model(nursery: Nursery, tmp_path: Path) -> None:
    """In a run that has only workflows, the status shows nothing about training, and `atoll export` refuses."""

    def main(controller: Any) -> None:
        controller.send("a", "echo", 1, timeout_s=30)

    def export(*where: str) -> str:
        outcome = command(nursery, tmp_path, "export", "model.safetensors", *where)
        assert outcome.returncode == 2, outcome
        return " ".join(outcome.stderr.split())

    with workflow_server(tmp_path, main) as server:
        with atoll.tasks(server.url, "a") as worker:
            for task in worker.tasks():
                lines = shown(server.url)
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
def test_the_status_counts_all_tasks(tmp_path: Path) -> None:
    """The status counts all tasks, and shows the last 20 of them."""
    # Of 23 tasks, the shown ones are 4 to 23. The last task is for a site that has left, and has no answer.

    lines: list[str] = []

    def main(controller: Any) -> None:
        for number in range(22):
            controller.send("a", "echo", number, timeout_s=30)
        controller.broadcast("echo", sites=["gone"], timeout_s=0.01)
        lines.extend(shown(server.url))

    with workflow_server(tmp_path, main, **{"rounds.sites": 2}) as server:
        with atoll.tasks(server.url, "gone"):
            pass
        with atoll.tasks(server.url, "a") as worker:
            worker.task("echo")(lambda payload: payload)
            worker.run()
        server.run()
        status = server.status()
    assert [task.number for task in status.sent] == list(range(4, 24))
    assert status.tasks == {"streamed": 0, "inline": 0, "without_tensors": 23}
    assert "23 tasks sent: 0 streamed, 0 inline, 23 without tensors" in lines
    assert lines[-1].startswith("task 23 echo: without tensors to gone; 0 of 1 answer; none from gone, 0.0 s")
