"""`atoll.DiLoCo(metrics=...)` measures global versions, and the server credits the numbers to those versions."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from kit import SITES, build_model, diloco, exported, serve, take_steps, tensors_digest, together
from torch import Tensor, nn

from atoll.testing.run import history

DILOCO: dict[str, Any] = {"algorithm": "diloco", "algorithm.outer_optimizer.name": None, "H": 3, "rounds": 4}


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

    def __init__(self, folder: Path, *, measures: bool = True, **settings: Any) -> None:
        self._measures = measures
        self.seen: defaultdict[str, list[dict[str, Tensor]]] = defaultdict(list)
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        with serve(folder, **(DILOCO | settings)) as server:
            together(*(partial(self._work, server.url, folder, site) for site in SITES))
            server.run()
            self.status = server.status()
        self.result = exported(folder)
        self.rounds = history(folder / "state")

    def _work(self, url: str, folder: Path, site: str) -> None:
        def measure() -> dict[str, float]:
            self.seen[site].append({name: each.clone() for name, each in loop.model.state_dict().items()})
            self.values[site].append(norm(loop.model))
            return {"norm": self.values[site][-1]}

        metrics = measure if self._measures else None
        loop = diloco(url, folder, site, metrics=metrics, weight=SITES[site])
        with loop:
            take_steps(loop, site=site)


@pytest.mark.covers("X41")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tau": 1, "alpha": 0.0},
        {"tau": 1, "alpha": 0.5},
    ],
    ids=["whole", "overlap", "mixed"],
)
def test_metrics_are_credited_to_the_version_that_was_measured(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = Run(tmp_path, **{"rounds.best_metric": "norm", "rounds.best_mode": "max"}, **settings)
    a, b = (list(map(tensors_digest, run.seen[site])) for site in SITES)
    assert a == b  # both saw the same global versions
    assert len(set(a)) == len(a) == DILOCO["rounds"]
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
        **{"rounds": 9, "rounds.best_metric": "norm", "rounds.best_mode": "min", "rounds.early_stop_after": 2},
    )
    values = run.values["a"]
    assert values == sorted(values)
    assert run.status.best is not None
    assert run.status.best.version == 0
    assert run.status.version == 3


def test_fragments_are_measured_as_the_global_model_and_local_progress_stays(tmp_path: Path) -> None:
    """With the hook the run comes to the bits that it has without."""
    settings: dict[str, Any] = {"K": 3, "tau": 0, "alpha": 0.5}
    run = Run(tmp_path / "measured", **settings)
    a, b = (list(map(tensors_digest, run.seen[site])) for site in SITES)
    assert a == b
    assert len(set(a)) == len(a)
    assert tensors_digest(Run(tmp_path / "plain", measures=False, **settings).result) == tensors_digest(run.result)


def test_no_metric_travels_where_local_progress_was_carried_to_another_version(tmp_path: Path) -> None:
    """A site that missed rounds never had the newer version alone: what it measured before is not of that one."""
    with serve(tmp_path, **DILOCO | {"H": 2}, **{"rounds.quorum": 1, "rounds.deadline_s": 0.2}) as server:
        late, early = (diloco(server, tmp_path, site, metrics=lambda site=site: {f"of_{site}": 1.0}) for site in "ba")
        with late:  # it has version 0
            with early:
                take_steps(early, 4, "a")
            take_steps(late, 4, "b")
        assert server.status().version == 4
    rows = history(tmp_path / "state")
    assert [row["metrics"] for row in rows] == [{"of_a": 1.0}, {"of_a": 1.0}, {}, {"of_b": 1.0}]
