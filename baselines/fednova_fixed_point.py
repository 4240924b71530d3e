"""The fixed points of FedAvg and FedNova where sites take different numbers of steps, beside their closed forms.

After section 4 and theorem 1 of arXiv 2007.07481.

    python baselines/fednova_fixed_point.py

Site i minimises ½·(x − e_i)² with τ_i steps of gradient descent of rate η, which take it K_i = 1 − (1 − η)^τ_i of the
way to e_i. So FedAvg ends where Σ p_i·K_i·(e_i − x) = 0, and FedNova where Σ p_i·K_i/τ_i·(e_i − x) = 0. The minimum
of the weighted mean of the losses is Σ p_i·e_i.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import atoll

TARGETS, STEPS, SHARES, RATE, ROUNDS = [0.0, 1.0, 4.0], [1, 5, 20], [0.5, 0.3, 0.2], 0.01, 250
SITES = ["a", "b", "c"]


def train(worker: Any) -> None:
    """Take the site's number of steps towards its target in each round."""
    place, model = SITES.index(worker.site), nn.ParameterDict({"x": torch.zeros(1, dtype=torch.float64)})
    for fl_round in worker:
        fl_round.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        with fl_round.correct(model, optimizer):
            for _ in range(STEPS[place]):
                optimizer.zero_grad()
                (0.5 * (model["x"] - TARGETS[place]) ** 2).sum().backward()
                optimizer.step()
        fl_round.submit(model, weight=SHARES[place])


def fixed_point(algorithm: str) -> float:
    """Return the model after many rounds."""
    model = nn.ParameterDict({"x": torch.full((1,), 2.0, dtype=torch.float64)})
    with tempfile.TemporaryDirectory() as folder:
        settings = {"algorithm.name": algorithm, "rounds.total": ROUNDS, "disk.state_dir": folder}
        run = atoll.run(model, train, sites=SITES, settings=settings)
        return float(load_file(run.model)["x"])


def closed_form(algorithm: str) -> float:
    """Return the fixed point that the paper's argument gives."""
    pulls = [share * (1 - (1 - RATE) ** steps) for share, steps in zip(SHARES, STEPS, strict=True)]
    if algorithm == "fednova":
        pulls = [pull / steps for pull, steps in zip(pulls, STEPS, strict=True)]
    return sum(pull * target for pull, target in zip(pulls, TARGETS, strict=True)) / sum(pulls)


if __name__ == "__main__":
    least = sum(share * target for share, target in zip(SHARES, TARGETS, strict=True))
    print(f"the minimum of the weighted mean is at {least:.4f}")
    for algorithm in ("fedavg", "fednova"):
        print(f"{algorithm}: ends at {fixed_point(algorithm):.6f}; closed form {closed_form(algorithm):.6f}")
