"""A run of three sites whose targets are 0, 3 and 6, as processes; each number of the matrix can be derived by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.processes import Nursery, Process
from kit.servers import DEFAULT_OUTER_OPTIMIZER, plain_server
from torch import nn

import atoll

SITE = str(Path(__file__).parent / "evaluating_site.py")
TARGETS = {"a": 0.0, "b": 3.0, "c": 6.0}

AFTER = ({"kind": "train"}, {"kind": "cross_site_evaluation"})

MATRIX = {
    "version 1": {"a": 9.0, "b": 0.0, "c": 18.0},  # w is the mean of 0, 3 and 6
    "a": {"a": 0.0, "b": 18.0, "c": 72.0},
    "b": {"a": 9.0, "b": 0.0, "c": 18.0},
    "c": {"a": 36.0, "b": 9.0, "c": 0.0},
}
"""(w − t)², twice that below the target: rows by model, columns by whose data. It is not its transpose."""


def zero() -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    return model


def evaluation_server(folder: Path, **options: Any) -> atoll.Server:
    settings = {"rounds.total": 1, "rounds.sites": 3, "run.threads": 1, "workflow.steps": AFTER} | options
    model = zero() if settings.pop("has_model", True) else None
    return plain_server(folder, model, **settings)


ALONE: dict[str, Any] = {"workflow.steps": ({"kind": "cross_site_evaluation"},), "rounds.total": 0}
"""Settings of a run that evaluates and does not train."""


def evaluated(
    nursery: Nursery,
    folder: Path,
    words: Mapping[str, Sequence[str]] = dict.fromkeys("abc", ()),
    during: Callable[[atoll.Server, list[Process]], object] = lambda server, sites: None,
    **options: Any,
) -> tuple[dict[str, Any], list[Process]]:
    """Play a run of these sites to its end; what lies in the exports, and the sites, which have ended well.

    Args:
        words: name of a site → words for its script.
        during: called once they have been started; it may replace processes in the list.
        options: as those of `evaluation_server`.
    """
    with evaluation_server(folder, **options) as server:
        sites = [start_site(nursery, folder, server.url, name, *more) for name, more in words.items()]
        during(server, sites)
        assert server.wait(90)
        server.run()
    assert [site.wait() for site in sites] == [0] * len(sites), [site.output() for site in sites]
    name = server.settings.workflow.steps[-1].get("name", "cross_site_evaluation")
    return matrix_of(folder, name.replace(" ", "_")), sites


def start_site(nursery: Nursery, folder: Path, url: str, name: str, *words: str, **more: Any) -> Process:
    return nursery.start(SITE, url, name, str(TARGETS[name]), *words, cwd=folder, **more)


def matrix_of(folder: Path, name: str = "cross_site_evaluation") -> dict[str, Any]:
    """What lies in the exports."""
    return json.loads((folder / "state" / "exports" / f"{name}.json").read_text())


def run_settings(**settings: Any) -> dict[str, Any]:
    """Of a run file; the model `zero()` lies beside it. It averages the models of its sites."""
    return DEFAULT_OUTER_OPTIMIZER | {"model.source": "zero.safetensors", "rounds.sites": 3} | settings


def losses(matrix: dict[str, Any], metric: str = "loss") -> dict[str, dict[str, float]]:
    """Model → site → loss, of the cells that have one."""
    found: dict[str, dict[str, float]] = {}
    for cell in matrix["cells"]:
        if metric in cell["metrics"]:
            found.setdefault(cell["model"], {})[cell["site"]] = round(cell["metrics"][metric], 4)
    return found


def errors(matrix: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(cell["model"], cell["site"]): cell["error"] for cell in matrix["cells"] if cell["error"]}
