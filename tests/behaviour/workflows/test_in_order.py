"""Workflows of a run file, one after the other: tasks before training and behind it, in the same run and processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.processes import Nursery, free_port, wait_until
from ordered_world import ASK_TRAIN_ASK, start_server, start_sites, submitted, told, write_run
from safetensors.torch import load_file

from atoll.testing.run import status

ALL = [
    "before begins",
    "before [{'sum': 11, 'rounds': 0}, {'sum': 11, 'rounds': 0}]",
    "after begins",
    "after [{'sum': 1, 'rounds': 2}, {'sum': 1, 'rounds': 2}]",
]


@pytest.mark.covers("P12", "T14")
def test_tasks_before_and_behind_the_rounds_reach_the_same_processes(nursery: Nursery, tmp_path: Path) -> None:
    """Two rounds, each of which adds 1 to a model of 0; what a task is answered tells how many the site has had."""
    write_run(tmp_path, ASK_TRAIN_ASK)
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    sites = start_sites(nursery, tmp_path, port)
    assert server.wait(60) == 0, server.output()
    assert [site.wait() for site in sites] == [0, 0]
    assert told(tmp_path) == ALL
    assert [submitted(site) for site in sites] == [["submitted 1", "submitted 2"]] * 2
    model = load_file(tmp_path / "state" / "exports" / "model.safetensors")
    assert torch.equal(model["weight"], torch.full((1, 1), 2.0))
    said = server.output()
    assert "workflows: before → train → after" in said
    assert said.index("workflow 2 of 3 begins: train") < said.index("training is finished at version 2")
    assert said.index("training is finished at version 2") < said.index("workflow 3 of 3 begins: after")


@pytest.mark.covers("P12", "T14")
def test_a_loop_of_ones_own_over_tasks_may_follow_that_over_rounds(nursery: Nursery, tmp_path: Path) -> None:
    write_run(tmp_path, '[[workflow.steps]]\nkind = "train"\n[[workflow.steps]]\npath = "flow.py:ask"\n')
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    sites = start_sites(nursery, tmp_path, port, "by hand")
    assert server.wait(60) == 0, server.output()
    assert [site.wait() for site in sites] == [0, 0]
    assert told(tmp_path)[1].endswith("[{'sum': 1, 'rounds': 2}, {'sum': 1, 'rounds': 2}]")


@pytest.mark.covers("P12")
def test_status_shows_which_workflow_runs(nursery: Nursery, tmp_path: Path) -> None:
    """Tasks first: the rounds have not begun, and no site is awaited for them."""
    write_run(
        tmp_path, '[[workflow.steps]]\npath = "flow.py:hold"\nname = "first"\n[[workflow.steps]]\nkind = "train"\n'
    )
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    sites = start_sites(nursery, tmp_path, port)
    wait_until(lambda: all((tmp_path / f"{site}.holds").exists() for site in "ab"), "the task at both sites")
    seen = status(f"http://127.0.0.1:{port}")
    assert [(each.name, each.kind, each.state) for each in seen.workflows] == [
        ("first", "", "running"),
        ("train", "train", "to come"),
    ]
    assert seen.fragments[0].phase == "gathering"
    assert not seen.fragments[0].waiting_for
    assert not seen.finished
    shown = nursery.start("atoll", "status", "--server", f"http://127.0.0.1:{port}", cwd=tmp_path)
    assert shown.wait() == 0
    assert "workflow 1 of 2 first: running, " in shown.output()
    assert "workflow 2 of 2 train: to come" in shown.output()
    (tmp_path / "hold.go").touch()
    assert server.wait(60) == 0
    assert [site.wait() for site in sites] == [0, 0]
    assert [submitted(site) for site in sites] == [["submitted 1", "submitted 2"]] * 2


@pytest.mark.covers("P12")
@pytest.mark.parametrize("point", ["head.after", "workflow.ended"])
def test_a_server_that_is_killed_goes_on_with_the_workflow_that_it_was_at(
    nursery: Nursery, tmp_path: Path, point: str
) -> None:
    """Killed behind the first version, and between two workflows: nothing that has ended is done again."""
    write_run(tmp_path, ASK_TRAIN_ASK)
    port = free_port()
    # head.after: the first is that of the initial model, the second that of round 1
    server = start_server(nursery, tmp_path, port, failpoints=f"{point}=kill@2")
    sites = start_sites(nursery, tmp_path, port)
    assert server.wait(60) == -9, server.output()
    again = start_server(nursery, tmp_path, port)
    assert again.wait(60) == 0, again.output()
    assert [site.wait() for site in sites] == [0, 0]
    assert told(tmp_path) == ALL
    assert [submitted(site) for site in sites] == [["submitted 1", "submitted 2"]] * 2
    model = load_file(tmp_path / "state" / "exports" / "model.safetensors")
    assert torch.equal(model["weight"], torch.full((1, 1), 2.0))
    assert "workflow 1 of 3, before, ended before this start" in again.output()
    assert ("train, ended before this start" in again.output()) == (point == "workflow.ended")


@pytest.mark.covers("P12")
def test_a_workflow_of_tasks_that_is_interrupted_begins_again_and_those_before_it_do_not(
    nursery: Nursery, tmp_path: Path
) -> None:
    write_run(tmp_path, ASK_TRAIN_ASK.replace('path = "flow.py:ask"\nname = "after"', 'path = "flow.py:hold"'))
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    sites = start_sites(nursery, tmp_path, port)
    wait_until(lambda: all((tmp_path / f"{site}.holds").exists() for site in "ab"), "the task at both sites")
    server.kill()
    again = start_server(nursery, tmp_path, port)
    (tmp_path / "hold.go").touch()
    assert again.wait(60) == 0, again.output()
    assert [site.wait() for site in sites] == [0, 0]
    assert told(tmp_path) == [*ALL[:2], "hold begins", "hold begins", "hold ends"]
    assert [submitted(site) for site in sites] == [["submitted 1", "submitted 2"]] * 2


@pytest.mark.covers("P12")
def test_more_rounds_are_trained_and_what_comes_behind_is_done_again(nursery: Nursery, tmp_path: Path) -> None:
    write_run(tmp_path, ASK_TRAIN_ASK)
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    first = start_sites(nursery, tmp_path, port)
    assert server.wait(60) == 0, server.output()
    assert [site.wait() for site in first] == [0, 0]
    write_run(tmp_path, ASK_TRAIN_ASK, **{"rounds.total": 3})
    killed = start_server(nursery, tmp_path, port, failpoints="workflow.ended=kill")  # behind the third round
    second = start_sites(nursery, tmp_path, port)
    assert killed.wait(60) == -9, killed.output()
    again = start_server(nursery, tmp_path, port)
    assert again.wait(60) == 0, again.output()
    assert [site.wait() for site in second] == [0, 0]
    assert told(tmp_path)[:5] == [*ALL, "after begins"]
    # the round that goes on waits for who is there when it opens
    assert {line for site in second for line in submitted(site)} == {"submitted 3"}
    finished = start_server(nursery, tmp_path, port)
    assert finished.wait(60) == 0
    assert len(told(tmp_path)) == 6


@pytest.mark.covers("P12")
def test_a_site_without_handlers_trains_and_leaves_and_says_why(nursery: Nursery, tmp_path: Path) -> None:
    """Before the rounds it answers that it has none; an evaluation of another site finds none in its time."""
    evaluation = '[[workflow.steps]]\nkind = "cross_site_evaluation"\nsites = ["c"]\nstart_timeout_s = 1\n'
    write_run(
        tmp_path,
        ASK_TRAIN_ASK.partition("[[workflow.steps]]\nkind")[0] + '[[workflow.steps]]\nkind = "train"\n' + evaluation,
    )
    flow = tmp_path / "flow.py"
    flow.write_text(flow.read_text().replace("answer.payload for", "answer.error for").replace("min_responses=2, ", ""))
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    sites = start_sites(nursery, tmp_path, port, "bare")
    assert server.wait(60) == 9, server.output()
    assert [site.wait() for site in sites] == [0, 0]
    assert told(tmp_path)[1] == f"before {['there is no handler for task ' + repr('count') + ', only for: none'] * 2}"
    assert "the run continues with tasks, and this site has no handler" in sites[0].output()
    said = server.output()
    assert "waited 1 s for 1 sites, but only 0 take part: none." in said or "evaluated nothing: " in said
    assert (tmp_path / "state" / "exports" / "model.safetensors").exists()
