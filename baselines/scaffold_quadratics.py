"""FedAvg and SCAFFOLD on two quadratics, after figure 3 of arXiv 1910.06378.

    python baselines/scaffold_quadratics.py

Site a has x² + G·x, site b has −G·x, so the mean of the two is ½·x² whatever G is. The paper's claims: FedAvg gets
worse with more local steps K and with more dissimilarity G; SCAFFOLD gets better with more steps, and does not depend
on G.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import atoll

RATE, ROUNDS, BEGIN = 0.1, 30, 10.0
DISSIMILARITIES, LOCAL_STEPS = (1.0, 10.0, 100.0), (1, 2, 10)


def train(worker: Any, dissimilarity: float, steps: int) -> None:
    """Take some steps on the site's quadratic in each round."""
    model = nn.ParameterDict({"x": torch.zeros(1, dtype=torch.float64)})
    for fl_round in worker:
        fl_round.load_into(model)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        with fl_round.correct(model, optimizer):
            for _ in range(steps):
                optimizer.zero_grad()
                x = model["x"]
                (x**2 + dissimilarity * x if worker.site == "a" else -dissimilarity * x).sum().backward()
                optimizer.step()
        fl_round.submit(model, weight=1.0)


def distance(algorithm: str, dissimilarity: float, steps: int) -> float:
    """Return how far from the minimum, 0, the model is after the rounds."""
    script = functools.partial(train, dissimilarity=dissimilarity, steps=steps)
    model = nn.ParameterDict({"x": torch.full((1,), BEGIN, dtype=torch.float64)})
    with tempfile.TemporaryDirectory() as folder:
        settings = {"algorithm.name": algorithm, "rounds.total": ROUNDS, "disk.state_dir": folder}
        run = atoll.run(model, script, sites=["a", "b"], settings=settings)
        return abs(float(load_file(run.model)["x"]))


if __name__ == "__main__":
    print(f"distance from the minimum after {ROUNDS} rounds")
    print("| algorithm | K | G = 1 | G = 10 | G = 100 |\n|---|---|---|---|---|")
    for algorithm in ("fedavg", "scaffold"):
        for steps in LOCAL_STEPS:
            found = (f"{distance(algorithm, each, steps):.5f}" for each in DISSIMILARITIES)
            print(f"| {algorithm} | {steps} | {' | '.join(found)} |", flush=True)
