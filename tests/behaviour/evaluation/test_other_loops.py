"""Evaluation behind other ways to train: DiLoCo, asynchronous rounds, SCAFFOLD, sites with filters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_world import TARGETS, errors, losses, matrix_of, serve
from harness.processes import Nursery

SITE = str(Path(__file__).parent / "other_site.py")


def evaluated(nursery: Nursery, folder: Path, how: dict[str, str], **settings: Any) -> dict[str, Any]:
    with serve(folder, **{"rounds.sites": len(how)} | settings) as server:
        sites = [
            nursery.start(SITE, server.url, name, str(TARGETS[name]), way, cwd=folder) for name, way in how.items()
        ]
        assert server.wait(90)
        server.run()
    assert [site.wait() for site in sites] == [0] * len(sites), [site.output() for site in sites]
    return matrix_of(folder)


@pytest.mark.covers("P9", "P12")
def test_behind_diloco_sites_join_again_with_the_model_that_they_have(nursery: Nursery, tmp_path: Path) -> None:
    """One round of two steps each, with outer SGD of rate 1: from 0, w ← (w + t)/2 twice is 3/4·t: 0 and 4.5.

    When the run is finished, sites have its result.
    """
    settings = {
        "algorithm.name": "diloco",
        "diloco.sync_every": 2,
        "aggregation.upload_codec.name": "none",
    }
    outer = {
        "algorithm.outer_optimizer.name": "sgd",
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "algorithm.outer_optimizer.nesterov": False,
    }
    found = losses(evaluated(nursery, tmp_path, {"a": "diloco", "c": "diloco"}, **settings, **outer), "w")
    assert found == {name: {"a": 2.25, "c": 2.25} for name in ("version 1", "a", "c")}


@pytest.mark.covers("P9", "P12")
@pytest.mark.parametrize(
    "settings",
    [{"algorithm.name": "scaffold"}, {"async.enabled": True}],
    ids=["scaffold", "async"],
)
def test_every_way_of_rounds_ends_in_an_evaluation(nursery: Nursery, tmp_path: Path, settings: dict[str, Any]) -> None:
    """One site, one step of rate 1/2 from 0 to t/2 = 1.5: that is its model, and the run's."""
    how = {"b": "rounds"}
    found = losses(evaluated(nursery, tmp_path, how, **settings), "w")
    assert found == {"version 1": {"b": 1.5}, "b": {"b": 1.5}}


@pytest.mark.covers("P9", "T8")
def test_a_model_does_not_go_round_the_filters_of_its_site(nursery: Nursery, tmp_path: Path) -> None:
    """What b says may leave passes its filter: 1 + 2⁻⁹ is no bfloat16, which has 8 bits, and becomes 1."""
    how = {"a": "filtered", "b": "filtered own"}
    matrix = evaluated(nursery, tmp_path, how)
    assert losses(matrix, "w")["b"] == {"a": 1.0, "b": 1.0}
    assert "a" not in losses(matrix)
    assert "its stored model would leave the site without" in errors(matrix)["a", "b"]
    assert not list(tmp_path.rglob("local.safetensors"))
