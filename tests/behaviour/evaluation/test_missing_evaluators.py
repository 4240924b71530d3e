"""A site without a function that evaluates, in a run that ends with a cross-site evaluation.

A DiLoCo loop answers no tasks itself: a site is told at its join that an evaluation will ask it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from evaluation_world import serve, zero
from kit import DiLoCoSites, together

import atoll
from atoll.errors import UsageError


@pytest.mark.covers("P9")
def test_refuses_a_site_without_an_evaluator_before_it_trains(tmp_path: Path) -> None:
    trained: list[int] = []
    with serve(tmp_path, **{"rounds.sites": 1}) as server:
        with pytest.raises(UsageError) as refused, atoll.join(server.url, "a", folder=tmp_path / "w") as worker:
            trained.extend(fl_round.number for fl_round in worker)
        (site,) = server.status().workers
        assert server.status().version == 0
    assert trained == []
    assert "site a" in refused.value.message
    assert "worker.evaluates" in refused.value.remedy
    assert (site.state, "evaluat" in site.error) == ("failed", True)


@pytest.mark.covers("P9")
def test_refuses_a_site_of_tasks_without_an_evaluator(tmp_path: Path) -> None:
    workflows = [{"kind": "cross_site_evaluation"}]
    with serve(tmp_path, **{"rounds.sites": 1, "workflow.steps": workflows, "rounds.total": 0}) as server:
        with atoll.tasks(server.url, "a") as worker:
            worker.task("train")(lambda payload: payload)
            with pytest.raises(UsageError) as refused:
                worker.run()
    assert "site a" in refused.value.message


@pytest.mark.covers("P9")
@pytest.mark.parametrize("by_hand", [False, True], ids=["left out of the sites", "with a handler of its own"])
def test_a_site_trains_that_is_not_evaluated_or_has_a_handler_of_its_own(tmp_path: Path, by_hand: bool) -> None:
    """Site a evaluates; site b is left out of `sites`, or answers the task by a handler."""
    evaluation: dict[str, Any] = {"kind": "cross_site_evaluation", "site_models": False}
    workflows = [{"kind": "train"}, evaluation if by_hand else {**evaluation, "sites": ["a"]}]

    def train(url: str, site: str) -> None:
        with atoll.join(url, site, folder=tmp_path / "w") as worker:
            if site == "a":
                worker.evaluates(lambda model: {"loss": 1.0})
            elif by_hand:
                worker.task("validate")(lambda payload: {"metrics": {"loss": 2.0}})
            for fl_round in worker:
                fl_round.submit(fl_round.load_into(zero()))

    with serve(tmp_path, **{"rounds.sites": 2, "workflow.steps": workflows}) as server:
        together(lambda: train(server.url, "a"), lambda: train(server.url, "b"))
        server.run()
        evaluation_found = server.evaluation
    assert evaluation_found is not None
    found = {cell.site: cell.metrics.get("loss") for cell in evaluation_found.cells}
    assert found == ({"a": 1.0, "b": 2.0} if by_hand else {"a": 1.0})


DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "diloco.sync_every": 2,
    "aggregation.upload_codec.name": "none",
    "rounds.sites": 2,
}


@pytest.mark.covers("P9")
@pytest.mark.parametrize("sites", [["a", "b"], ["a"]])
def test_tells_a_site_before_its_first_step_that_it_will_be_asked(
    tmp_path: Path, sites: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    told_before: set[str] = set()

    def told(logger: str) -> set[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == logger]
        return {site for site in "ab" for line in lines if line.startswith(f"{site}: ") and "evaluat" in line}

    def during(site: str, step: int) -> None:
        if site in told("atoll"):
            told_before.add(site)

    workflows = [{"kind": "train"}, {"kind": "cross_site_evaluation", "sites": sites, "site_models": False}]
    with serve(tmp_path, **{"workflow.steps": workflows}, **DILOCO) as server:
        DiLoCoSites(server.url, tmp_path, 4, build=zero, during=during).join()
    assert told_before == told("atoll") == set(sites)
