"""Which sites a cross-site evaluation that is still to come asks for measurements."""

from __future__ import annotations

from pathlib import Path

from atoll import Settings
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.server.tasks.workflow_schedule import EVALUATES, WorkflowSchedule


def test_a_site_is_asked_by_an_evaluation_that_is_still_to_come(tmp_path: Path) -> None:
    settings = Settings.build(
        {
            "disk.state_dir": tmp_path,
            "rounds.sites": 2,
            "rounds.total": 1,
            "workflow.steps": [{"kind": "train"}, {"kind": EVALUATES, "args": {"sites": ["a"]}}],
        }
    )
    schedule = WorkflowSchedule(settings, None, TaskFilters(settings))
    assert [schedule.will_evaluate(site) for site in "ab"] == [True, False]
    schedule.steps[1].state = "running"
    assert schedule.will_evaluate("a")
    schedule.steps[1].state = "done"
    assert not schedule.will_evaluate("a")
