"""A DiLoCo loop answers no tasks itself: a site is told at its join that an evaluation will ask it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from evaluation_world import serve, zero
from kit import DiLoCoSites

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
