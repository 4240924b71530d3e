"""An algorithm of one's own that keeps controls: the site's loop gives each update its control difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import serve
from torch import nn

import atoll
from atoll.errors import UsageError

ALGORITHM = """
from atoll.algorithms.base import Algorithm

drift = Algorithm(
    name="drift",
    citation="",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    reduce={"params": "mean", "buffers": "mean", "control": "share"},
)
"""


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2))


def options(folder: Path, **settings: Any) -> dict[str, Any]:
    (folder / "own_drift.py").write_text(ALGORITHM)
    defaults = {
        "algorithm.outer_optimizer.name": None,
        "algorithm.outer_optimizer.lr": None,
        "algorithm.outer_optimizer.momentum": None,
        "rounds.sites": 1,
        "rounds.total": 2,
    }
    return defaults | {"algorithm.name": None, "algorithm.path": f"{folder}/own_drift.py:drift"} | settings


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "within fl_round.correct"])
def test_refuses_a_submission_without_its_control_difference_and_the_round_stays_open(
    tmp_path: Path, corrected: bool
) -> None:
    seen = []
    with serve(tmp_path, Line(), **options(tmp_path)) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            for fl_round in worker:
                model = fl_round.load_into(Line())
                seen.append(fl_round.global_state("control")["w"].tolist())
                if corrected:
                    fl_round.correct(model, torch.optim.SGD(model.parameters(), lr=0.1))
                with torch.no_grad():
                    model.w.add_(1.0)
                with pytest.raises(UsageError) as refused:
                    fl_round.submit(model)
                assert "groups=" in str(refused.value)
                fl_round.submit(model, groups={"control": {"w": torch.tensor([1.0, -2.0])}}, steps=1)
        server.run()
        assert [summary.workers for summary in server.status().history] == [["a"], ["a"]]
    assert seen == [[0.0, 0.0], [1.0, -2.0]]


def test_refuses_a_diloco_loop_without_the_groups_of_the_update(tmp_path: Path) -> None:
    with serve(tmp_path, Line(), **options(tmp_path)) as server:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = atoll.DiLoCo(model, optimizer, server=server.url, site="a", sync_every=1, folder=tmp_path / "workers")
        with pytest.raises(UsageError) as refused:
            loop.start()
    assert "needs 'control' in each update, besides the model; atoll.DiLoCo does not support this" in str(refused.value)


def test_refuses_a_diloco_loop_in_a_run_that_corrects_local_steps(tmp_path: Path) -> None:
    with serve(tmp_path, Line(), algorithm="fedprox", sites=1, **{"algorithm.mu": 0.1}) as server:
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loop = atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "workers")
        with pytest.raises(UsageError) as refused:
            loop.start()
    assert "'fedprox'" in str(refused.value)
    assert "corrects local steps; atoll.DiLoCo does not support this" in str(refused.value)
