"""A workflow names a site that has never joined."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from harness.processes import wait_until
from kit import together
from kit.workflows import workflow_server

import atoll
from atoll.errors import AtollError, UsageError


def answer(url: str, site: str) -> None:
    with atoll.tasks(url, site) as worker:
        worker.task("echo")(lambda payload: payload)
        worker.run()


def refusal(folder: Path, ask: Callable[[Any], object], sites: tuple[str, ...], **settings: Any) -> AtollError:
    """What a call of a workflow raises once these sites take part; the workflow goes on after it."""
    raised: list[AtollError] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=len(sites), timeout_s=30)
        try:
            ask(controller)
        except AtollError as error:
            raised.append(error)

    with workflow_server(folder, main, **settings) as server:
        together(*(lambda site=site: answer(server.url, site) for site in sites))
        server.run()
    assert raised, "nothing was raised"
    return raised[0]


@pytest.mark.parametrize(
    "ask",
    [
        lambda controller: controller.broadcast("echo", 1, sites=["clinic-a", "clinc-b"], timeout_s=0.5),
        lambda controller: controller.broadcast("echo", 1, sites=["clinc-b"], min_responses=1),
        lambda controller: controller.send("clinc-b", "echo", 1, timeout_s=0.5),
        lambda controller: controller.send("clinc-b", "echo", 1),
    ],
    ids=["one of several", "with min_responses", "sent with a timeout", "sent without one"],
)
@pytest.mark.covers("T14")
def test_refuses_a_task_for_an_unknown_site_and_names_the_nearest(tmp_path: Path, ask: Callable[[Any], object]) -> None:
    error = refusal(tmp_path, ask, ("clinic-a", "clinic-b"), **{"rounds.sites": 2})
    assert isinstance(error, UsageError)
    assert "'clinc-b'" in error.message
    assert "'clinic-b'" in error.remedy


def test_waits_for_a_named_site_that_has_not_joined_yet_and_refuses_it_at_the_timeout(tmp_path: Path) -> None:
    error = refusal(
        tmp_path, lambda controller: controller.send("late", "echo", timeout_s=0.2), ("a",), **{"rounds.sites": 2}
    )
    assert isinstance(error, UsageError)
    assert "'late'" in error.message
    assert "a" in error.remedy


def test_a_named_site_that_joins_late_gets_its_task(tmp_path: Path) -> None:
    came: list[Any] = []

    def main(controller: Any) -> None:
        came.extend(controller.broadcast("echo", 7, sites=["a", "b"], timeout_s=60))

    with workflow_server(tmp_path, main, **{"rounds.sites": 2}) as server:
        together(*(lambda site=site: answer(server.url, site) for site in "ab"))
        server.run()
    assert [(each.site, each.payload) for each in came] == [("a", 7), ("b", 7)]


def test_an_evaluation_names_the_nearest_of_a_site_that_has_never_joined(tmp_path: Path) -> None:
    from kit import build_model

    def take_part(url: str, site: str) -> None:
        with atoll.tasks(url, site) as worker:
            worker.evaluates(lambda model: {"loss": 1.0}, model=build_model())
            worker.run()

    workflows = [{"kind": "cross_site_evaluation", "sites": ["clinic-a", "clinc-b"], "site_models": False}]
    with atoll.Server(
        build_model(),
        settings={
            "algorithm.name": "diloco",
            "workflow.steps": workflows,
            "disk.state_dir": tmp_path / "state",
            "network.port": 0,
            "rounds.sites": 2,
        },
    ) as server:
        together(*(lambda site=site: take_part(server.url, site) for site in ("clinic-a", "clinic-b")))
        server.run()
        evaluation = server.evaluation
    assert evaluation is not None
    (empty,) = [cell for cell in evaluation.cells if cell.error]
    assert empty.site == "clinc-b"
    assert "'clinic-b'" in empty.error


def test_a_wait_for_a_site_that_has_never_joined_is_reported_with_the_nearest_name(tmp_path: Path) -> None:
    told: list[list[str]] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        with pytest.raises(UsageError):
            controller.send("clinic_a", "echo", timeout_s=60)

    with workflow_server(tmp_path, main, **{"rounds.sites": 2}) as server:

        def watch() -> None:
            wait_until(lambda: any("clinic_a" in each for each in server.status().warnings), "a warning")
            told.append(server.status().warnings)
            answer(server.url, "clinic-b")  # now as many have joined as the run expects

        together(lambda: answer(server.url, "clinic-a"), watch, server.run)
        assert server.status().warnings == []
    ((warning,),) = told
    assert "'clinic-a'" in warning
