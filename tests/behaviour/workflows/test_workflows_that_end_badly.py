"""Workflows that raise, never return, or wait for nobody: visible, with an exit code, and nothing lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness.processes import Nursery, free_port, wait_until
from ordered_world import start_server, start_sites, submitted, told, write_run

from atoll.testing.run import status

TRAIN = '[[workflow.steps]]\nkind = "train"\n'


@pytest.mark.covers("P12", "X3")
def test_a_workflow_that_raises_ends_the_run_and_is_all_that_is_done_again(nursery: Nursery, tmp_path: Path) -> None:
    write_run(tmp_path, TRAIN + '[[workflow.steps]]\npath = "flow.py:fail"\n')
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    sites = start_sites(nursery, tmp_path, port)
    assert server.wait(60) == 9
    assert "atoll: The workflow flow.py:fail failed: KeyError: 'w'. See the traceback in the log" in server.output()
    assert "raise KeyError" in server.output()
    (tmp_path / "mended").touch()
    again = start_server(nursery, tmp_path, port)
    assert again.wait(60) == 0, again.output()
    assert [site.wait() for site in sites] == [0, 0]
    assert told(tmp_path) == ["fail begins", "fail begins"]
    assert [submitted(site) for site in sites] == [["submitted 1", "submitted 2"]] * 2


@pytest.mark.covers("P12")
@pytest.mark.parametrize(
    ("asked", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)], ids=["interrupted", "terminated"]
)
def test_one_that_never_returns_is_seen_and_can_be_stopped(
    nursery: Nursery, tmp_path: Path, asked: signal.Signals, code: int
) -> None:
    write_run(tmp_path, '[[workflow.steps]]\npath = "flow.py:never"\n', **{"rounds.total": None})
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    wait_until(lambda: told(tmp_path), "the workflow")
    wait_until(lambda: status(f"http://127.0.0.1:{port}").workflows[0].quiet_s > 0.2, "its silence")
    seen = status(f"http://127.0.0.1:{port}").workflows[0]
    assert (seen.name, seen.state) == ("flow.py:never", "running")
    server.send(asked)
    assert server.wait(20) == code


@pytest.mark.covers("P12")
def test_its_progress_limit_ends_it_and_notes_are_progress(nursery: Nursery, tmp_path: Path) -> None:
    """`noted` takes two seconds, and says something every quarter of one."""
    limits = "progress_timeout_s = 1\n"
    workflows = (
        f'[[workflow.steps]]\npath = "flow.py:noted"\n{limits}[[workflow.steps]]\npath = "flow.py:never"\n{limits}'
    )
    write_run(tmp_path, workflows, **{"rounds.total": None})
    server = start_server(nursery, tmp_path, free_port())
    assert server.wait(30) == 9
    assert "workflow 2 of 2 begins: flow.py:never" in server.output()
    assert "The workflow flow.py:never made no progress for 1 s: no answer, no byte and no report" in server.output()


@pytest.mark.covers("P12")
def test_training_without_any_site_fails_after_its_start_limit(nursery: Nursery, tmp_path: Path) -> None:
    write_run(tmp_path, '[[workflow.steps]]\nkind = "train"\nstart_timeout_s = 0.5\n')
    port = free_port()
    server = start_server(nursery, tmp_path, port)
    assert server.wait(30) == 9
    assert "The workflow train waited 0.5 s for 2 sites, but only 0 take part: none." in server.output()


@pytest.mark.covers("P12")
def test_other_workflows_than_those_that_have_ended_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    write_run(tmp_path, '[[workflow.steps]]\npath = "flow.py:noted"\n', **{"rounds.total": None})
    port = free_port()
    assert start_server(nursery, tmp_path, port).wait(30) == 0
    write_run(tmp_path, '[[workflow.steps]]\npath = "flow.py:never"\n', **{"rounds.total": None})
    refused = start_server(nursery, tmp_path, port)
    assert refused.wait(30) == 2
    assert "workflow 1 was 'flow.py:noted' and has ended, but this start has 'flow.py:never' in its place" in (
        refused.output()
    )
