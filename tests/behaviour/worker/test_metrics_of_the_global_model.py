"""`atoll.DiLoCo(metrics=...)` measures global versions, and the server credits the numbers to those versions."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import SITES, build_model, exported, local_step, serve, tensors_digest, together
from torch import Tensor, nn

import atoll

DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "algorithm.outer_optimizer.name": None,
    "diloco.sync_every": 3,
    "rounds.total": 4,
}


def norm(model: nn.Module) -> float:
    """A number that no two versions have in common."""
    return sum(float(each.detach().double().square().sum()) for each in model.parameters())


class Run:
    """A DiLoCo run of two sites; a hook measures the model that it sees.

    Attributes:
        seen: site → the models that the hook saw, in order.
        values: site → what it said of them.
        rounds: rows of metrics.jsonl.
        result: the exported model.
        status: of the server, at the end.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.seen: defaultdict[str, list[dict[str, Tensor]]] = defaultdict(list)
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        with serve(folder, **(DILOCO | settings)) as server:
            together(*(partial(self._work, server.url, folder, site) for site in SITES))
            server.run()
            self.status = server.status()
        self.result = exported(folder)
        self.rounds = rows_of(folder)

    def _work(self, url: str, folder: Path, site: str) -> None:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def measure() -> dict[str, float]:
            self.seen[site].append({name: each.clone() for name, each in model.state_dict().items()})
            self.values[site].append(norm(model))
            return {"norm": self.values[site][-1]}

        how: dict[str, Any] = {"site": site, "folder": folder / "workers", "weight": SITES[site]}
        with atoll.DiLoCo(model, optimizer, server=url, metrics=measure, **how) as loop:
            step = 0
            while not loop.finished:
                local_step(model, optimizer, site, step)
                step += 1


@pytest.mark.covers("X41")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.0},
        {"diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.5},
    ],
    ids=["whole", "overlap", "mixed"],
)
def test_metrics_are_credited_to_the_version_that_was_measured(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = Run(tmp_path, **{"rounds.best_metric": "norm", "rounds.best_mode": "max"}, **settings)
    a, b = (list(map(tensors_digest, run.seen[site])) for site in SITES)
    assert a == b  # both saw the same global versions
    assert len(set(a)) == len(a) == DILOCO["rounds.total"]
    assert a[0] == tensors_digest(build_model().state_dict())
    assert tensors_digest(run.result) not in a  # the result of the last round is not trained from
    values = run.values["a"]
    assert [row["metrics"]["norm"] for row in run.rounds] == pytest.approx(values, rel=1e-12)
    best = run.status.best
    assert best is not None
    assert (best.version, best.value) == (values.index(max(values)), pytest.approx(max(values), rel=1e-12))


@pytest.mark.covers("X42")
def test_ends_early_when_the_global_model_gets_no_better(tmp_path: Path) -> None:
    # the models grow from version to version, so that the smallest is version 0
    run = Run(
        tmp_path,
        **{"rounds.total": 9, "rounds.best_metric": "norm", "rounds.best_mode": "min", "rounds.early_stop_after": 2},
    )
    values = run.values["a"]
    assert values == sorted(values)
    assert run.status.best is not None
    assert run.status.best.version == 0
    assert run.status.version == 3


def test_fragments_are_measured_as_the_global_model_and_local_progress_stays(tmp_path: Path) -> None:
    """With the hook the run comes to the bits that it has without."""
    settings: dict[str, Any] = {
        "diloco.num_fragments": 3,
        "diloco.fragment_sync_delay": 0,
        "diloco.fragment_update_alpha": 0.5,
    }
    run = Run(tmp_path / "measured", **settings)
    a, b = (list(map(tensors_digest, run.seen[site])) for site in SITES)
    assert a == b
    assert len(set(a)) == len(a)

    def plain(site: str) -> None:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        where = {"site": site, "folder": tmp_path / "plain" / "workers", "weight": SITES[site]}
        with atoll.DiLoCo(model, optimizer, server=server.url, **where) as loop:  # type: ignore[arg-type]
            step = 0
            while not loop.finished:
                local_step(model, optimizer, site, step)
                step += 1

    with serve(tmp_path / "plain", **DILOCO, **settings) as server:
        together(*(partial(plain, site) for site in SITES))
        server.run()
    assert tensors_digest(exported(tmp_path / "plain")) == tensors_digest(run.result)


def test_no_metric_travels_where_local_progress_was_carried_to_another_version(tmp_path: Path) -> None:
    """A site that missed rounds never had the newer version alone: what it measured before is not of that one."""
    settings = DILOCO | {"diloco.sync_every": 2, "rounds.quorum": 1, "rounds.deadline_s": 0.2}
    with serve(tmp_path, **settings) as server:

        def loop(site: str) -> tuple[atoll.DiLoCo, nn.Module, torch.optim.Optimizer]:
            model = build_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            where: dict[str, Any] = {"server": server.url, "site": site, "folder": tmp_path / "workers"}
            return atoll.DiLoCo(model, optimizer, metrics=lambda: {f"of_{site}": 1.0}, **where), model, optimizer

        (late, *of_late), (early, *of_early) = loop("b"), loop("a")
        with late:  # it has version 0
            with early:
                for step in range(4):
                    local_step(*of_early, "a", step)
            for step in range(4):
                local_step(*of_late, "b", step)
        assert server.status().version == 4
    assert [row["metrics"] for row in rows_of(tmp_path)] == [{"of_a": 1.0}, {"of_a": 1.0}, {}, {"of_b": 1.0}]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """Of metrics.jsonl, one a round."""
    rows = (folder / "state" / "exports" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows]
