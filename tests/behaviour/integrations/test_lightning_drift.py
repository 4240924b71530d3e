"""What SCAFFOLD is for: sites whose data differ pull FedAvg away from the optimum of all data, and not SCAFFOLD."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_world import Tiny, fit_rounds, serve, trainer_of
from safetensors.torch import load_file
from torch import Tensor

import atoll
import atoll.integrations.lightning

pytestmark = pytest.mark.usefixtures("each_package")
CURVES = {"a": (1.0, 1.0), "b": (4.0, 0.0)}
"""Each site's loss is curvature/2·(w − target)²: both together are least at (1·1 + 4·0)/(1 + 4) = 0.2."""
ROUNDS, OPTIMUM = 15, 0.2


class Curved(Tiny):
    curvature = 1.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = (self.curvature * (self.w - self.target) ** 2 / 2).sum()
        return loss


def train(url: str, site: str, folder: Path) -> None:
    """Three steps of rate 0.1 a round, whatever the algorithm."""
    module = Curved()
    module.curvature, module.target = CURVES[site]
    trainer = trainer_of()
    atoll.integrations.lightning.patch(trainer, url, site, folder=folder)
    fit_rounds(trainer, module)


def end(folder: Path, algorithm: str) -> float:
    """Where two sites end."""
    options: dict[str, Any] = {"rounds.total": ROUNDS, "rounds.sites": 2, "rounds.min_sites": 2}
    with ThreadPoolExecutor(2) as pool, serve(folder, algorithm, **options) as server:
        for site in [pool.submit(train, server.url, name, folder / name) for name in CURVES]:
            site.result(100)
        assert server.wait(60)
        w: torch.Tensor = load_file(server.exports / "model.safetensors")["w"]
        return w.item()


@pytest.mark.covers("S11")
def test_scaffold_ends_above_fedavg_at_equal_rounds(tmp_path: Path) -> None:
    """A round of FedAvg, of three steps: w ← ½·(1 + 0.9³·(w − 1)) + ½·0.6³·w, with its end at 0.271/(2 − 0.945)."""
    fedavg, scaffold = end(tmp_path / "fedavg", "fedavg"), end(tmp_path / "scaffold", "scaffold")
    assert fedavg == pytest.approx(0.271 / 1.055, abs=1e-3)  # 0.2569
    assert scaffold == pytest.approx(OPTIMUM, abs=1e-3)
