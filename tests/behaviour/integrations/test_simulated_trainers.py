"""Scripts with a Trainer as simulated sites: their rounds, by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import simulated_trainers
import torch
from engine_here import simulate_here
from lightning_world import One as LightningOne
from safetensors.torch import load_file
from transformers_world import MOMENTUM, STEPS, TARGETS, One, rate

import atoll

ROUNDS = 2


def sgd(x: float, target: float) -> float:
    """Three steps of rate 0.1 on (w − target)²/2."""
    for _ in range(STEPS):
        x -= 0.1 * (x - target)
    return x


def momentum(x: float, target: float) -> float:
    """Three steps whose schedule and momentum begin anew, as a script does that is run for each round."""
    velocity = 0.0
    for step in range(STEPS):
        velocity = MOMENTUM * velocity + x - target
        x -= rate(step) * velocity
    return x


@pytest.mark.covers("V1")
@pytest.mark.parametrize(
    ("client", "model", "trained"),
    [(simulated_trainers.lightning, LightningOne, sgd), (simulated_trainers.hugging_face, One, momentum)],
    ids=["lightning", "hugging_face"],
)
def test_each_round_is_a_fit_of_the_simulated_site(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    client: Callable[[], None],
    model: Callable[[], torch.nn.Module],
    trained: Callable[[float, float], float],
) -> None:
    simulate_here(monkeypatch)
    run = atoll.Simulation(
        model(),
        script=client,
        sites=[*TARGETS],
        settings={"rounds.total": ROUNDS, "algorithm.name": "fedavg", "disk.state_dir": tmp_path / "state"},
    )
    done = run.run()
    expected = 0.0
    for _ in range(ROUNDS):
        expected = sum(trained(expected, target) for target in TARGETS.values()) / len(TARGETS)
    assert (done.rounds, done.worker_rounds, done.failed) == (ROUNDS, ROUNDS * len(TARGETS), {})
    assert load_file(done.model)["w"].item() == pytest.approx(expected, abs=1e-6)
