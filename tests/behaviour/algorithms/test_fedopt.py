"""The server's steps of FedOpt, by hand: x₀ = 0, one element."""

import math

import pytest
import torch

from atoll import Settings
from atoll.algorithms.resolve import resolve
from atoll.errors import ConfigError
from atoll.outer_optimizers import build_outer


def stepped(algorithm: str, gradients: list[float], **settings: object) -> list[float]:
    """x after each round."""
    run = resolve(Settings.build({"algorithm.name": algorithm, **settings}))
    stepper, x, state, path = build_outer(run.outer, run.outer_options).stepper(), torch.zeros(1), None, []
    for gradient in gradients:
        (state_after,) = stepper.step_([x], [torch.tensor([gradient])], state)
        state = [state_after]
        path.append(x.item())
    return path


def test_momentum():
    # m₁ = 1, m₂ = 0.9 + 1, m₃ = 0.9·1.9
    assert stepped("fedavgm", [1.0, 1.0, 0.0]) == pytest.approx([-1.0, -2.9, -4.61])


def test_adagrad():
    # v₀ = τ² = 1e-6;  v₁ = 4 + 1e-6, v₂ = 8 + 1e-6
    first = 0.01 * 2 / (math.sqrt(4 + 1e-6) + 1e-3)
    second = 0.01 * 2 / (math.sqrt(8 + 1e-6) + 1e-3)
    assert stepped("fedadagrad", [2.0, 2.0]) == pytest.approx([-first, -first - second])


def test_adam():
    # m̂₁ = g, v̂₁ = g²;  m₂ = 0.9·0.1·2, m̂₂ = m₂/0.19;  v₂ = 0.99·0.01·4, v̂₂ = v₂/0.0199
    first = 0.1 * 2 / (2 + 1e-3)
    second = 0.1 * (0.18 / 0.19) / (math.sqrt(0.0396 / 0.0199) + 1e-3)
    assert stepped("fedadam", [2.0, 0.0], **{"algorithm.outer_optimizer.lr": 0.1}) == pytest.approx(
        [-first, -first - second]
    )


def test_yogi():
    # v₀ = 1e-6 < g²: v₁ = v₀ + 0.01·1;  then g = 0: v stays, m₂ = 0.9·0.1
    v = 1e-6 + 0.01
    first, second = (0.01 * m / (math.sqrt(v) + 1e-3) for m in (0.1, 0.09))
    assert stepped("fedyogi", [1.0, 0.0]) == pytest.approx([-first, -first - second])


def test_yogi_lets_a_large_gradient_be_forgotten_slowly():
    # after g = 100: v = 1e-6 + 100, Adam's would be the same; then g = 1: v − 0.01·1, where Adam's is 0.99·v
    optimizer = build_outer("yogi").stepper()
    x = torch.zeros(1)
    (state,) = optimizer.step_([x], [torch.tensor([100.0])], None)
    (state,) = optimizer.step_([x], [torch.tensor([1.0])], [state])
    assert state["v"].item() == pytest.approx(100 - 0.01)


@pytest.mark.parametrize("options", [{"lr": 0.0}, {"betas": [1.0, 0.9]}, {"eps": 0.0}])
def test_a_wrong_value_is_refused(options):
    with pytest.raises(ConfigError, match="yogi"):
        build_outer("yogi", options)


def test_yogi_has_no_momentum_setting():
    with pytest.raises(ConfigError, match="betas"):
        resolve(Settings.build({"algorithm.name": "fedyogi", "algorithm.outer_optimizer.momentum": 0.9}))
