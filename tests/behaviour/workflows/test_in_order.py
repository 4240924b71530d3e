"""Workflows of a run file, one after the other, in the same run and processes; limits, and those that end badly."""

from __future__ import annotations

import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, free_port, wait_until
from kit import FederatedSites, Threads, write_run_file
from kit.client import Client
from kit.servers import plain_server
from kit.workflows import workflow_server
from ordered_world import ASK_TRAIN_ASK, TRAIN, Run, step, submitted

import atoll
from atoll.cli.state_directory import UNDER_WAY
from atoll.errors import RunFailed, UsageError

ALL = [
    "before begins",
    "before [{'sum': 11, 'rounds': 0}, {'sum': 11, 'rounds': 0}]",
    "after begins",
    "after [{'sum': 1, 'rounds': 2}, {'sum': 1, 'rounds': 2}]",
]
BOTH = [["1", "2"]] * 2


@pytest.mark.covers("P12", "T14")
def test_tasks_before_and_behind_the_rounds_reach_the_same_processes(nursery: Nursery, tmp_path: Path) -> None:
    """Two rounds, each of which adds 1 to a model of 0; what a task is answered tells how many the site has had."""
    run = Run(nursery, tmp_path, ASK_TRAIN_ASK)
    said, sites = run.play()
    assert (run.told, submitted(sites), run.exported) == (ALL, BOTH, 2.0)
    assert "workflows: before → train → after" in said
    events = ("workflow 2 of 3 begins: train", "training is finished at version 2", "workflow 3 of 3 begins: after")
    places = [said.index(event) for event in events]
    assert places == sorted(places)


@pytest.mark.covers("P12", "T14")
def test_a_loop_of_ones_own_over_tasks_may_follow_that_over_rounds(nursery: Nursery, tmp_path: Path) -> None:
    run = Run(nursery, tmp_path, TRAIN + step("ask"))
    run.play("by hand")
    assert run.told[1].endswith("[{'sum': 1, 'rounds': 2}, {'sum': 1, 'rounds': 2}]")


@pytest.mark.covers("P12")
def test_status_shows_which_workflow_runs(nursery: Nursery, tmp_path: Path) -> None:
    """Tasks first: the rounds have not begun, and no site is awaited for them."""
    run = Run(nursery, tmp_path, step("hold", 'name = "first"\n') + TRAIN)
    server, sites = run.serve(), run.sites()
    run.until_held()
    seen = run.status()
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
    assert server.wait(60) == 0
    assert submitted(sites) == BOTH


@pytest.mark.covers("P12")
@pytest.mark.parametrize("point", ["head.after", "workflow.ended"])
def test_a_server_that_is_killed_goes_on_with_the_workflow_that_it_was_at(
    nursery: Nursery, tmp_path: Path, point: str
) -> None:
    """Killed behind the first version, and between two workflows: nothing that has ended is done again."""
    run = Run(nursery, tmp_path, ASK_TRAIN_ASK)
    # head.after: the first is that of the initial model, the second that of round 1
    server, sites = run.serve(failpoints=f"{point}=kill@2"), run.sites()
    assert server.wait(60) == -9, server.output()
    said = run.serve(ends=0).output()
    assert (run.told, submitted(sites), run.exported) == (ALL, BOTH, 2.0)
    assert "workflow 1 of 3, before, ended before this start" in said
    assert ("train, ended before this start" in said) == (point == "workflow.ended")


@pytest.mark.covers("P12")
def test_a_workflow_of_tasks_that_is_interrupted_begins_again_and_those_before_it_do_not(
    nursery: Nursery, tmp_path: Path
) -> None:
    run = Run(nursery, tmp_path, step("ask", 'name = "before"\nargs = {start = 10}\n') + TRAIN + step("hold"))
    server, sites = run.serve(), run.sites()
    run.until_held()
    server.kill()
    shown = nursery.start("atoll", "status", "--dir", "state", cwd=tmp_path)
    assert shown.wait() == 0
    for number, line in enumerate(
        ("before: done", "train: done", f"flow.py:hold: running; {UNDER_WAY}begins it again"), 1
    ):
        assert f"workflow {number} of 3 {line}" in shown.output()
    run.let_go()
    run.serve(ends=0)
    assert run.told == [*ALL[:2], "hold begins", "hold begins", "hold ends"]
    assert submitted(sites) == BOTH


@pytest.mark.covers("P12")
def test_more_rounds_are_trained_and_what_comes_behind_is_done_again(nursery: Nursery, tmp_path: Path) -> None:
    run = Run(nursery, tmp_path, ASK_TRAIN_ASK)
    run.play()
    run.write(ASK_TRAIN_ASK, **{"rounds.total": 3})
    killed, sites = run.serve(failpoints="workflow.ended=kill"), run.sites()  # behind the third round
    assert killed.wait(60) == -9, killed.output()
    run.serve(ends=0)
    assert run.told[:5] == [*ALL, "after begins"]
    # the round that goes on waits for those that are there when it opens
    assert {number for rounds in submitted(sites) for number in rounds} == {"3"}
    run.serve(ends=0)
    assert len(run.told) == 6


@pytest.mark.covers("P12")
def test_a_site_without_handlers_trains_and_leaves_and_says_why(nursery: Nursery, tmp_path: Path) -> None:
    """Before the rounds it answers that it has none; an evaluation of another site finds none in its time."""
    evaluation = '[[workflow.steps]]\nkind = "cross_site_evaluation"\nsites = ["c"]\nstart_timeout_s = 1\n'
    run = Run(nursery, tmp_path, step("ask", 'name = "before"\n') + TRAIN + evaluation)
    flow = tmp_path / "flow.py"
    flow.write_text(flow.read_text().replace("answer.payload for", "answer.error for").replace("min_responses=2, ", ""))
    said, sites = run.play("bare", ends=9)
    assert run.told[1] == f"before {['this site has no handler for task ' + repr('count') + ', only for: none'] * 2}"
    assert "the run continues with tasks, and this site has no handler" in sites[0].output()
    assert "waited 1 s for 1 sites, but only 0 take part: none." in said or "evaluated nothing: " in said
    assert run.exported == 2.0


# -- workflows that end badly


@pytest.mark.covers("P12", "X3")
def test_a_workflow_that_raises_ends_the_run_and_is_all_that_is_done_again(nursery: Nursery, tmp_path: Path) -> None:
    run = Run(nursery, tmp_path, TRAIN + step("fail"))
    server, sites = run.serve(), run.sites()
    assert server.wait(60) == 9
    assert "atoll: The workflow flow.py:fail failed: KeyError: 'w'. See the traceback in the log" in server.output()
    assert "raise KeyError" in server.output()
    (tmp_path / "mended").touch()
    run.serve(ends=0)
    assert (run.told, submitted(sites)) == (["fail begins", "fail begins"], BOTH)


@pytest.mark.covers("P12")
@pytest.mark.parametrize(
    ("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["interrupted", "terminated"]
)
def test_one_that_never_returns_is_seen_and_can_be_stopped(
    nursery: Nursery, tmp_path: Path, asked: signal.Signals, code: int
) -> None:
    run = Run(nursery, tmp_path, step("never"), **{"rounds.total": None})
    server = run.serve()
    wait_until(lambda: run.told, "the workflow")
    wait_until(lambda: run.status().workflows[0].quiet_s > 0.2, "its silence")
    seen = run.status().workflows[0]
    assert (seen.name, seen.state) == ("flow.py:never", "running")
    server.send(asked)
    assert server.wait(20) == code


@pytest.mark.covers("P12")
def test_its_progress_limit_ends_it_and_notes_are_progress(nursery: Nursery, tmp_path: Path) -> None:
    """`noted` takes two seconds, and says something every quarter of one."""
    limit = "progress_timeout_s = 1\n"
    run = Run(nursery, tmp_path, step("noted", limit) + step("never", limit), **{"rounds.total": None})
    said = run.serve(ends=9).output()
    assert "workflow 2 of 2 begins: flow.py:never" in said
    assert "The workflow flow.py:never made no progress for 1 s: no answer, no byte and no report" in said


@pytest.mark.covers("P12")
def test_training_without_any_site_fails_after_its_start_limit(nursery: Nursery, tmp_path: Path) -> None:
    said = Run(nursery, tmp_path, TRAIN + "start_timeout_s = 0.5\n").serve(ends=9).output()
    assert "The workflow train waited 0.5 s for 2 sites, but only 0 take part: none." in said


@pytest.mark.covers("P12")
def test_other_workflows_than_those_that_have_ended_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    run = Run(nursery, tmp_path, step("quick"), **{"rounds.total": None})
    run.serve(ends=0)
    run.write(step("never"), **{"rounds.total": None})
    said = run.serve(ends=2).output()
    assert "workflow 1 was 'flow.py:quick' and has ended, but this start has 'flow.py:never' in its place" in said


# -- limits by progress


@pytest.mark.covers("P12")
def test_training_in_which_nothing_moves_fails_after_its_limit(tmp_path: Path) -> None:
    settings = {"workflow.steps": [{"kind": "train", "progress_timeout_s": 1}], "rounds.total": 1}
    server = plain_server(tmp_path, {"w": torch.ones(2)}, **settings)
    with server, Client(server.url, "a", folder=tmp_path) as client:
        assert client.next_round() == 1  # and then it submits nothing
        with pytest.raises(RunFailed, match="The workflow train made no progress for 1 s"):
            server.run()
    (workflow,) = server.status().workflows
    assert workflow.state == "failed"
    assert "made no progress for 1 s" in workflow.detail


@pytest.mark.covers("P12")
def test_time_in_which_sites_are_awaited_is_none_in_which_training_stands_still(tmp_path: Path) -> None:
    """How long they are waited for is another limit, and here there is none."""
    settings = {"workflow.steps": [{"kind": "train", "progress_timeout_s": 0.5}], "rounds.total": 1, "rounds.sites": 2}
    server = plain_server(tmp_path, {"w": torch.ones(2)}, **settings)

    def train(site: str) -> None:
        with Client(server.url, site, folder=tmp_path) as client:
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
def test_a_site_that_shows_nothing_is_given_up_and_one_that_says_what_it_does_is_not(tmp_path: Path) -> None:
    """Both work for 3 s; b says so, and its heartbeats carry it."""
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
                for number in range(12):
                    if name == "b":
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


FLOW = """
from pathlib import Path


def first(controller):
    with (Path(__file__).parent / "ran").open("a") as file:
        file.write("x")
"""


@pytest.mark.parametrize("target", ["flow.py:first", "parts/flow.py:first"])
def test_a_moved_run_folder_goes_on_behind_the_workflow_that_has_ended(
    tmp_path: Path, nursery: Nursery, target: str
) -> None:
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
    assert (after / target.partition(":")[0]).with_name("ran").read_text() == "x"
    assert (after / "state" / "exports" / "model.safetensors").exists()
