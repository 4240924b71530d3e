"""Every site's model and the run's on every site's data: three processes, numbers derived by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluation_world import MATRIX, errors, losses, matrix_of, serve, start_site
from harness.processes import Nursery, wait_until

from atoll.errors import RunFailed


@pytest.mark.covers("P9", "P12")
def test_after_training_each_model_is_evaluated_at_each_site(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        sites = [start_site(nursery, tmp_path, server.url, name) for name in "abc"]
        assert server.wait(60)
        status = server.status()
        server.run()
    assert [site.wait() for site in sites] == [0, 0, 0]
    matrix = matrix_of(tmp_path)
    assert losses(matrix) == MATRIX
    assert matrix["sites"] == ["a", "b", "c"]
    assert [(model["name"], model["kind"], model["version"]) for model in matrix["models"]] == [
        ("version 1", "version", 1),
        ("a", "site", None),
        ("b", "site", None),
        ("c", "site", None),
    ]
    assert matrix["finished"]
    assert all(model["digest"] for model in matrix["models"])
    assert [(each.name, each.state) for each in status.workflows] == [
        ("train", "done"),
        ("cross_site_evaluation", "done"),
    ]
    assert status.finished
    assert status.workflows[1].detail == "12 of 12 evaluations"
    text = (tmp_path / "state" / "exports" / "cross_site_evaluation.md").read_text()
    assert "| model | a | b | c |" in text
    assert "| c | 36 | 9 | 0 |" in text
    assert "Empty cells" not in text
    assert list((tmp_path / "state" / "objects").glob("*")) == []


@pytest.mark.covers("P9", "P12")
def test_an_evaluation_of_its_own_needs_no_model_and_no_training(nursery: Nursery, tmp_path: Path) -> None:
    """Sites that only answer tasks give a model of their own; the run has none."""
    only = ({"kind": "cross_site_evaluation", "name": "who knows"},)
    with serve(tmp_path, **{"workflow.steps": only, "rounds.total": 0}, has_model=False) as server:
        sites = [start_site(nursery, tmp_path, server.url, name, "tasks") for name in "abc"]
        assert server.wait(60)
        server.run()
    assert [site.wait() for site in sites] == [0, 0, 0]
    matrix = matrix_of(tmp_path, "who_knows")
    assert losses(matrix) == {name: MATRIX[name] for name in "abc"}
    assert losses(matrix, "distance")["c"] == {"a": 6.0, "b": 3.0, "c": 0.0}


@pytest.mark.covers("P9")
def test_sites_that_fail_refuse_or_measure_no_number_leave_a_cell_and_a_reason(
    nursery: Nursery, tmp_path: Path
) -> None:
    with serve(tmp_path) as server:
        words = {"a": ["refuses"], "b": ["raises"], "c": ["nan"]}
        sites = [start_site(nursery, tmp_path, server.url, name, *words[name]) for name in "abc"]
        assert server.wait(60)
        server.run()
    assert [site.wait() for site in sites] == [0, 0, 0]
    matrix = matrix_of(tmp_path)
    found = losses(matrix)
    assert found == {name: {"a": MATRIX[name]["a"]} for name in ("version 1", "b", "c")}
    # of the two metrics of c one is no number, and is shown as such
    assert losses(matrix, "distance")["c"] == {"a": 6.0, "c": 0.0}
    assert {tuple(cell["not_finite"]) for cell in matrix["cells"] if cell["site"] == "c" and cell["metrics"]} == {
        ("loss",)
    }
    told = errors(matrix)
    assert told["b", "b"] == told["version 1", "b"] == "ValueError: no data here"
    assert {told["a", site] for site in "abc"} == {
        "UsageError: The function of worker.submits at site a returned None instead of a model."
    }
    text = (tmp_path / "state" / "exports" / "cross_site_evaluation.md").read_text()
    assert (
        "- a on every site: UsageError: The function of worker.submits at site a returned None instead of a model."
        in text
    )
    assert "- every model on b: ValueError: no data here" in text
    assert "| c | 36 | — | not finite |" in text


@pytest.mark.covers("P9", "P12")
def test_an_evaluation_that_has_not_one_value_has_failed(nursery: Nursery, tmp_path: Path) -> None:
    only = ({"kind": "cross_site_evaluation"},)
    with serve(tmp_path, **{"workflow.steps": only, "rounds.total": 0, "rounds.sites": 1}) as server:
        start_site(nursery, tmp_path, server.url, "a", "tasks", "refuses", "raises")
        with pytest.raises(RunFailed, match="evaluated nothing: every model on a: ValueError: no data here"):
            server.run()
    assert matrix_of(tmp_path)["finished"]


@pytest.mark.covers("P9")
def test_a_site_that_is_killed_leaves_its_cells_empty_and_the_others_go_on(nursery: Nursery, tmp_path: Path) -> None:
    with serve(tmp_path, **{"network.heartbeat_interval_s": 0.5, "network.heartbeat_timeout_s": 2.0}) as server:
        sites = {name: start_site(nursery, tmp_path, server.url, name) for name in "ab"}
        dying = start_site(nursery, tmp_path, server.url, "c", "hangs")
        wait_until((tmp_path / "c.hangs").exists, "an evaluation at c")
        dying.kill()
        assert server.wait(60)
        server.run()
    assert [site.wait() for site in sites.values()] == [0, 0]
    matrix = matrix_of(tmp_path)
    found, told = losses(matrix), errors(matrix)
    for model in ("version 1", "a", "b"):
        assert found[model] == {site: MATRIX[model][site] for site in "ab"}
    assert {site for _, site in told if _ != "c"} == {"c"}
    assert "is dead: silent for 2 s" in told["a", "c"]
    assert len(matrix["cells"]) == 12  # each is named


@pytest.mark.covers("P9", "P12")
def test_a_site_that_stands_still_is_given_up_after_its_time(nursery: Nursery, tmp_path: Path) -> None:
    workflows = ({"kind": "train"}, {"kind": "cross_site_evaluation", "evaluation_timeout_s": 1.5})
    with serve(tmp_path, **{"workflow.steps": workflows}) as server:
        sites = [start_site(nursery, tmp_path, server.url, name) for name in "ab"]
        hanging = start_site(nursery, tmp_path, server.url, "c", "hangs")
        assert server.wait(60)
        (tmp_path / "c.go").touch()
        server.run()
    assert [site.wait() for site in (*sites, hanging)] == [0, 0, 0]
    matrix = matrix_of(tmp_path)
    assert losses(matrix)["c"] == {"a": 36.0, "b": 9.0}
    assert {why for (_, site), why in errors(matrix).items() if site == "c"} == {
        f"the site made no progress for 1.5 s (its last report: evaluating {hung})" for hung in hung_at(matrix)
    }


def hung_at(matrix: dict[str, Any]) -> list[str]:
    """The one model that c was at."""
    (told,) = {cell["error"] for cell in matrix["cells"] if cell["site"] == "c"}
    return [told.rpartition("evaluating ")[2].removesuffix(")")]
