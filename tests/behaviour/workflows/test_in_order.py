"""Workflows of a run file, one after the other, in the same run and processes; limits, and those that end badly."""

from __future__ import annotations

import re
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, Process, free_port, wait_until
from kit import FederatedSites, Threads, write_run_file
from kit.manual_site import ManualSite
from kit.processes import url_of
from kit.servers import DEFAULT_OUTER_OPTIMIZER, plain_server
from kit.workflows import workflow_server
from safetensors.torch import load_file, save_file

import atoll
from atoll.errors import ConfigError, RunFailed, ServerFailed, UsageError
from atoll.testing.run import status

SITE = str(Path(__file__).parent / "ordered_site.py")

FLOW = """
from pathlib import Path
import time

HERE = Path(__file__).parent


def tell(text):
    with (HERE / "written.txt").open("a") as file:
        file.write(text + "\\n")


def ask(controller, start=0):
    tell(f"{controller.name} begins")
    sites = controller.sites(at_least=2, timeout_s=60)
    answers = controller.broadcast("count", start, sites=sites, min_responses=2, timeout_s=60)
    tell(f"{controller.name} {[answer.payload for answer in answers]}")


def hold(controller):
    tell("hold begins")
    controller.broadcast("hold", sites=controller.sites(at_least=2, timeout_s=60), timeout_s=60)
    tell("hold ends")


def fail(controller):
    tell("fail begins")
    if not (HERE / "mended").exists():
        raise KeyError("w")


def never(controller):
    tell("never begins")
    while True:
        time.sleep(0.05)


def quick(controller):
    tell("quick begins")


def noted(controller):
    for number in range(8):
        controller.note(f"at {number}")
        time.sleep(0.25)


class Schedule:
    def __init__(self, first, more=()):
        self.first, self.more = first, more
        tell("a schedule is made")


def scheduled(controller, schedule, other=None):
    tell(f"scheduled {schedule.first} {[each.first for each in schedule.more]} {other}")
"""

TRAIN: dict[str, Any] = {"kind": "train"}


def step(function: str, **more: Any) -> dict[str, Any]:
    """A step of the run file that calls a function of FLOW."""
    return {"path": f"flow.py:{function}", **more}


BEFORE = step("ask", name="before", args={"start": 10})
ASK_TRAIN_ASK = [BEFORE, TRAIN, step("ask", name="after")]


class Run:
    """A run folder and its port; server and sites are processes. The sites, a and b, have a model of one weight, 0.

    Args:
        steps: of the run file, as are `settings`; None takes a key out.
    """

    def __init__(self, nursery: Nursery, folder: Path, *steps: dict[str, Any], **settings: Any) -> None:
        self.folder, self.port = folder, free_port()
        self._nursery = nursery
        save_file({"weight": torch.zeros(1, 1)}, folder / "zero.safetensors")
        (folder / "flow.py").write_text(FLOW)
        self.write(*steps, **settings)

    def write(self, *steps: dict[str, Any], **settings: Any) -> None:
        """Write the run file anew."""
        chosen = {"model.source": "zero.safetensors", "rounds.total": 2, "workflow.steps": steps} | settings
        write_run_file(self.folder, **DEFAULT_OUTER_OPTIMIZER, **chosen)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start_server(self, failpoints: str = "") -> Process:
        words = ("atoll", "server", "run.toml", "--port", str(self.port))
        return self._nursery.start(*words, cwd=self.folder, failpoints=failpoints)

    def start_sites(self, *words: str) -> list[Process]:
        return [self._nursery.start(SITE, self.url, name, *words, cwd=self.folder) for name in ("a", "b")]

    def until_held(self) -> None:
        """Wait until both sites are at the task `hold`."""
        held = [self.folder / f"{site}.holds" for site in "ab"]
        wait_until(lambda: all(path.exists() for path in held), "the task at both sites")

    def let_go(self) -> None:
        (self.folder / "hold.go").touch()

    @property
    def written(self) -> list[str]:
        """Lines that the functions of FLOW have written."""
        path = self.folder / "written.txt"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def exported(self) -> float:
        return load_file(self.folder / "state" / "exports" / "model.safetensors")["weight"].item()


def require_end(server: Process, code: int = 0) -> str:
    """The server ends with this exit status; what it said."""
    assert server.wait(60) == code, server.output()
    return server.output()


def submitted(sites: list[Process], exit_code: int = 0) -> list[list[str]]:
    """Numbers of the rounds that each site has submitted to, once it has ended with this code."""
    assert [site.wait() for site in sites] == [exit_code] * len(sites)
    return [re.findall(r"^submitted (.*)$", site.output(), re.MULTILINE) for site in sites]


ALL = [
    "before begins",
    "before [{'sum': 11, 'rounds': 0}, {'sum': 11, 'rounds': 0}]",
    "after begins",
    "after [{'sum': 1, 'rounds': 2}, {'sum': 1, 'rounds': 2}]",
]
BOTH = [["1", "2"]] * 2


@pytest.mark.covers("P12", "T14")
def test_tasks_and_rounds_reach_the_same_processes(nursery: Nursery, tmp_path: Path) -> None:
    """Tasks before and after the training reach the same site processes as its rounds."""
    # Each of two rounds adds 1 to a model of 0. A task's answer tells how many rounds the site has had.
    run = Run(nursery, tmp_path, *ASK_TRAIN_ASK)
    server, sites = run.start_server(), run.start_sites()
    said = require_end(server)
    assert (run.written, submitted(sites), run.exported) == (ALL, BOTH, 2.0)
    assert "workflows: before → train → after" in said
    events = ("workflow 2 of 3 begins: train", "training is finished at version 2", "workflow 3 of 3 begins: after")
    places = [said.index(event) for event in events]
    assert places == sorted(places)


@pytest.mark.covers("P12", "T14")
def test_a_loop_over_tasks_may_follow_rounds(nursery: Nursery, tmp_path: Path) -> None:
    """A script may run its own loop over tasks after its loop over rounds."""
    run = Run(nursery, tmp_path, TRAIN, step("ask"))
    server, sites = run.start_server(), run.start_sites("by hand")
    require_end(server)
    assert submitted(sites) == BOTH
    assert run.written[1].endswith("[{'sum': 1, 'rounds': 2}, {'sum': 1, 'rounds': 2}]")


@pytest.mark.covers("P12")
def test_status_shows_which_workflow_runs(nursery: Nursery, tmp_path: Path) -> None:
    """While a workflow of tasks runs before the training, the status shows this workflow as `running` and the training
    as `to come`.

    The rounds have not begun, and no site is awaited for them.
    """
    run = Run(nursery, tmp_path, step("hold", name="first"), TRAIN)
    server, sites = run.start_server(), run.start_sites()
    run.until_held()
    seen = status(run.url)
    assert [(each.name, each.kind, each.state) for each in seen.workflows] == [
        ("first", "", "running"),
        ("train", "train", "to come"),
    ]
    assert (seen.fragments[0].phase, seen.fragments[0].waiting_for, seen.finished) == ("gathering", [], False)
    shown = nursery.start("atoll", "status", "--server", run.url, cwd=tmp_path)
    assert shown.wait() == 0
    assert "workflow 1 of 2 first: running, " in shown.output()
    assert "workflow 2 of 2 train: to come" in shown.output()
    run.let_go()
    require_end(server)
    assert submitted(sites) == BOTH


@pytest.mark.covers("P12")
@pytest.mark.parametrize("point", ["head.after", "workflow.ended"])
def test_a_killed_server_continues_its_workflow(nursery: Nursery, tmp_path: Path, point: str) -> None:
    """A restarted server continues with the workflow in which it was killed."""
    # It does not repeat a workflow that has ended. The server is killed after its first trained version, or between two
    # workflows.
    run = Run(nursery, tmp_path, *ASK_TRAIN_ASK)
    # head.after: the first is that of the initial model, the second that of round 1
    server, sites = run.start_server(f"{point}=kill@2"), run.start_sites()
    require_end(server, -signal.SIGKILL)
    said = require_end(run.start_server())
    assert (run.written, submitted(sites), run.exported) == (ALL, BOTH, 2.0)
    assert "workflow 1 of 3, before, ended before this start" in said
    assert ("train, ended before this start" in said) == (point == "workflow.ended")


@pytest.mark.covers("P12")
def test_an_interrupted_workflow_begins_again(nursery: Nursery, tmp_path: Path) -> None:
    """If a server is killed during a workflow of tasks, the restarted server runs its function again. It does not
    repeat the workflows before.
    """
    run = Run(nursery, tmp_path, BEFORE, TRAIN, step("hold"))
    server, sites = run.start_server(), run.start_sites()
    run.until_held()
    server.kill()
    shown = nursery.start("atoll", "status", "--dir", "state", cwd=tmp_path)
    assert shown.wait() == 0
    interrupted = "flow.py:hold: running; was under way; if no server runs, `atoll server` goes on with it"
    for number, line in enumerate(("before: done", "train: done", interrupted), 1):
        assert f"workflow {number} of 3 {line}" in shown.output()
    run.let_go()
    require_end(run.start_server())
    assert run.written == [*ALL[:2], "hold begins", "hold begins", "hold ends"]
    assert submitted(sites) == BOTH


@pytest.mark.covers("P12")
def test_more_rounds_repeat_the_later_workflows(nursery: Nursery, tmp_path: Path) -> None:
    """If a finished run gets more rounds, the server trains them and then repeats the workflows that follow the
    training.
    """
    run = Run(nursery, tmp_path, *ASK_TRAIN_ASK)
    server, sites = run.start_server(), run.start_sites()
    require_end(server)
    assert submitted(sites) == BOTH
    run.write(*ASK_TRAIN_ASK, **{"rounds.total": 3})
    server, sites = run.start_server("workflow.ended=kill"), run.start_sites()  # behind the third round
    require_end(server, -signal.SIGKILL)
    require_end(run.start_server())
    assert run.written[:5] == [*ALL, "after begins"]
    # the round that goes on waits for those that are there when it opens
    assert {number for rounds in submitted(sites) for number in rounds} == {"3"}
    require_end(run.start_server())
    assert len(run.written) == 6


@pytest.mark.covers("P12")
def test_a_site_without_handlers_trains(nursery: Nursery, tmp_path: Path) -> None:
    """A site without task handlers trains, then leaves and says why."""
    # Before the rounds, the site answers a task with the error that it has no handler. After them, an evaluation waits
    # for another site in vain, and the run fails.
    evaluation = {"kind": "cross_site_evaluation", "sites": ["c"], "start_timeout_s": 1}
    run = Run(nursery, tmp_path, step("ask", name="before"), TRAIN, evaluation)
    flow = tmp_path / "flow.py"
    flow.write_text(flow.read_text().replace("answer.payload for", "answer.error for").replace("min_responses=2, ", ""))
    server, sites = run.start_server(), run.start_sites("bare")
    said = require_end(server, RunFailed.exit_code)
    assert submitted(sites) == BOTH
    assert run.written[1] == f"before {['this site has no handler for task ' + repr('count') + ', only for: none'] * 2}"
    assert "the run continues with tasks, and this site has no handler" in sites[0].output()
    assert "waited 1 s for 1 site, but only 0 take part: none." in said or "evaluated nothing: " in said
    assert run.exported == 2.0


@pytest.mark.covers("P12")
def test_components_are_created_once(nursery: Nursery, tmp_path: Path) -> None:
    """A component is created once, even if another component and a workflow refer to its id."""
    # A component without a reference is not created. The component `long` and the second workflow refer to `short`. In
    # an argument, `@@` stands for the character `@`.
    components = [
        {"id": "short", "path": "flow.py:Schedule", "args": {"first": 0.1}},
        {"id": "long", "path": "flow.py:Schedule", "args": {"first": 0.5, "more": ["@short"]}},
        {"id": "unused", "path": "flow.py:Nobody"},
        {"id": "run", "path": "flow.py:scheduled"},
    ]
    steps = (
        step("scheduled", args={"schedule": "@long", "other": "@@me"}),
        {"path": "@run", "args": {"schedule": "@short"}},
    )
    run = Run(nursery, tmp_path, *steps, **{"workflow.components": components, "rounds.total": None})
    require_end(run.start_server())
    assert run.written == ["a schedule is made"] * 2 + ["scheduled 0.5 [0.1] @me", "scheduled 0.1 [] None"]


# -- workflows that end badly


@pytest.mark.covers("P12", "X3")
def test_only_a_failed_workflow_runs_again(nursery: Nursery, tmp_path: Path) -> None:
    """If a workflow raises an error, the run ends. After a restart, only this workflow runs again."""
    run = Run(nursery, tmp_path, TRAIN, step("fail"))
    server, sites = run.start_server(), run.start_sites()
    said = require_end(server, RunFailed.exit_code)
    assert "atoll: The workflow flow.py:fail failed: KeyError: 'w'. See the traceback in the log" in said
    assert "raise KeyError" in said
    assert submitted(sites, ServerFailed.exit_code) == BOTH
    (tmp_path / "mended").touch()
    require_end(run.start_server())
    assert run.written == ["fail begins", "fail begins"]


@pytest.mark.covers("P12")
@pytest.mark.parametrize(
    ("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["interrupted", "terminated"]
)
def test_an_endless_workflow_can_be_stopped(nursery: Nursery, tmp_path: Path, asked: signal.Signals, code: int) -> None:
    """The status shows a workflow that never returns. SIGINT ends the server with exit status 130, and SIGTERM with
    0.
    """
    run = Run(nursery, tmp_path, step("never"), **{"rounds.total": None})
    server = run.start_server()
    url_of(server)
    wait_until(lambda: status(run.url).workflows[0].quiet_s > 0.2, "its silence")
    seen = status(run.url).workflows[0]
    assert (seen.name, seen.state) == ("flow.py:never", "running")
    server.send(asked)
    assert server.wait(20) == code


@pytest.mark.covers("P12")
def test_notes_count_as_a_workflows_progress(nursery: Nursery, tmp_path: Path) -> None:
    """A workflow without progress fails after its limit. A workflow that writes notes does not, because notes count as
    progress.
    """
    # `noted` takes two seconds and writes a note every quarter of a second. The limit is one second.
    limit = {"progress_timeout_s": 1}
    run = Run(nursery, tmp_path, step("noted", **limit), step("never", **limit), **{"rounds.total": None})
    said = require_end(run.start_server(), RunFailed.exit_code)
    assert "workflow 2 of 2 begins: flow.py:never" in said
    assert "The workflow flow.py:never made no progress for 1 s: no answer, no byte and no report" in said


@pytest.mark.covers("P12")
def test_training_without_sites_fails(nursery: Nursery, tmp_path: Path) -> None:
    """Training without any site fails after its start limit."""
    run = Run(nursery, tmp_path, TRAIN | {"start_timeout_s": 0.5})
    said = require_end(run.start_server(), RunFailed.exit_code)
    assert "The workflow train waited 0.5 s for 2 sites, but only 0 take part: none." in said


@pytest.mark.covers("P12")
def test_a_finished_workflow_must_not_be_replaced(nursery: Nursery, tmp_path: Path) -> None:
    """If a restart has another workflow in place of one that has ended, the server refuses to start and names both."""
    run = Run(nursery, tmp_path, step("quick"), **{"rounds.total": None})
    require_end(run.start_server())
    run.write(step("never"), **{"rounds.total": None})
    said = require_end(run.start_server(), ConfigError.exit_code)
    assert "workflow 1 was 'flow.py:quick' and has ended, but this start has 'flow.py:never' in its place" in said


# -- limits by progress


@pytest.mark.covers("P12")
def test_training_without_progress_fails(tmp_path: Path) -> None:
    """Training without progress fails after `progress_timeout_s`, and the status shows the reason."""
    settings = {"workflow.steps": [{"kind": "train", "progress_timeout_s": 1}], "rounds.total": 1}
    server = plain_server(tmp_path, {"w": torch.ones(2)}, **settings, **{"network.heartbeat_interval_s": 0.2})
    with server, ManualSite(server.url, "a", folder=tmp_path) as client:
        assert client.next_round() == 1  # and then it submits nothing
        with pytest.raises(RunFailed, match="The workflow train made no progress for 1 s"):
            server.run()
    (workflow,) = server.status().workflows
    assert workflow.state == "failed"
    assert "made no progress for 1 s" in workflow.detail


@pytest.mark.covers("P12")
def test_waiting_for_sites_does_not_time_out(tmp_path: Path) -> None:
    """The time in which a round waits for sites does not count for `progress_timeout_s`."""
    # Another setting limits this time. It is not set here.
    settings = {"workflow.steps": [{"kind": "train", "progress_timeout_s": 0.5}], "rounds.total": 1, "rounds.sites": 2}
    server = plain_server(tmp_path, {"w": torch.ones(2)}, **settings)

    def train(site: str) -> None:
        with ManualSite(server.url, site, folder=tmp_path) as client:
            while client.next_round() is not None:
                client.submit(client.pull())

    with server:
        first = Threads(partial(train, "a"))
        wait_until(lambda: server.status().workflows[0].seconds > 1.0, "a longer time")
        second = Threads(partial(train, "b"))
        server.run()
        first.join()
        second.join()
    assert server.status().workflows[0].state == "done"


@pytest.mark.covers("P12", "T14")
def test_a_site_without_progress_is_given_up(tmp_path: Path) -> None:
    """If a site shows no progress during a task, the server gives the site up after `progress_timeout_s`."""
    # A site that writes notes is not given up. Both sites work for at least twice the limit. The heartbeats of `b`
    # carry its notes.
    came: dict[str, Any] = {}
    over = threading.Event()

    def main(controller: Any) -> None:
        with pytest.raises(UsageError, match="progress_timeout_s is -1"):
            controller.send("a", "work", progress_timeout_s=-1)
        sites = controller.sites(2, timeout_s=30)
        results = controller.broadcast("work", sites=sites, progress_timeout_s=1.5)
        came.update({result.site: result.error or result.payload for result in results})
        over.set()

    def site(name: str) -> None:
        with atoll.tasks(server.url, name) as worker:

            @worker.task("work")
            def work(_: Any) -> str:
                if name == "a":
                    over.wait(60)
                for number in range(12):
                    worker.note(f"batch {number}")
                    if over.wait(0.25):
                        break
                return "done"

            worker.run()

    with workflow_server(tmp_path, main, **{"network.heartbeat_interval_s": 0.2}) as server:
        sites = Threads(partial(site, "a"), partial(site, "b"))
        server.run()
        sites.join()
    assert came == {"a": "the site made no progress for 1.5 s (its last report: task work)", "b": "done"}


# -- a run folder that is moved


@pytest.mark.parametrize("target", ["flow.py:quick", "parts/flow.py:quick"])
def test_a_moved_run_folder_continues_its_run(tmp_path: Path, nursery: Nursery, target: str) -> None:
    """If a run folder is moved after a workflow has ended, the server continues in the new place with the next
    workflow.
    """
    port, before, after = free_port(), tmp_path / "before", tmp_path / "elsewhere" / "after"
    flow = before / target.partition(":")[0]
    flow.parent.mkdir(parents=True)
    flow.write_text(FLOW)
    write_run_file(
        before,
        **{
            "network.port": port,
            "rounds.total": 1,
            "rounds.sites": 1,
            "workflow.steps": [{"path": target}, {"kind": "train"}],
        },
    )
    first = nursery.start("atoll", "server", "run.toml", cwd=before, failpoints="workflow.ended=kill")
    assert first.wait(60) == -9
    after.parent.mkdir()
    before.rename(after)
    second = nursery.start("atoll", "server", "run.toml", cwd=after)
    FederatedSites(f"http://127.0.0.1:{port}", tmp_path, ["a"]).join()
    assert second.wait(60) == 0
    assert (after / target.partition(":")[0]).with_name("written.txt").read_text() == "quick begins\n"
    assert (after / "state" / "exports" / "model.safetensors").exists()


GIVEN = """
given = []


def leaves(controller):
    given.append(controller)


def looks(controller):
    try:
        given[0].sites()
    except BaseException as error:
        given.append(type(error).__name__)
    if given[1:] != ["ServerStops"]:
        raise AssertionError(given)
"""


def test_a_finished_workflows_controller_is_refused(tmp_path: Path) -> None:
    """If code still uses the controller of a finished workflow during the next workflow, its call raises
    `ServerStops`.
    """
    (tmp_path / "given.py").write_text(GIVEN)
    steps = [{"path": f"{tmp_path / 'given.py'}:{name}", "name": name} for name in ("leaves", "looks")]
    settings = {"workflow.steps": steps, "disk.state_dir": tmp_path / "state", "network.port": 0}
    with atoll.Server(settings=settings) as server:
        server.run()
