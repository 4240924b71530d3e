"""A federated round follows several optimizers: FedAvg and FedProx; SCAFFOLD refuses them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import build_model, exported, serve, tensors_digest
from torch import nn
from torch.optim import SGD, Optimizer

import atoll
from atoll import errors

RATE = 0.05


def one(model: nn.Module) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=RATE)]


def two(model: nn.Module) -> list[Optimizer]:
    parameters = list(model.parameters())
    return [SGD(parameters[:1], lr=RATE), SGD(parameters[1:], lr=RATE)]


def trained(folder: Path, make: Callable[[nn.Module], list[Optimizer]], **settings: Any) -> tuple[str, list[int]]:
    """The digest of the result of two rounds of three steps, and the steps that each round counted."""
    model, counted = build_model(), []
    with serve(folder, sites=1, rounds=2, **settings) as server:
        with atoll.join(server.url, site="a", folder=folder / "workers") as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                optimizers = make(model)
                with fl_round.correct(model, optimizers) as correction:
                    for step in range(3):
                        for parameter in model.parameters():
                            parameter.grad = parameter.detach() * 0.3 + step
                        for optimizer in optimizers:
                            optimizer.step()
                counted.append(correction.steps)
                fl_round.submit(model, weight=1.0)
        server.run()
    return tensors_digest(exported(folder)), counted


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox"])
def test_corrects_several_optimizers_as_one_that_holds_all_parameters(tmp_path: Path, algorithm: str) -> None:
    settings: dict[str, Any] = {"algorithm.name": algorithm, "aggregation.upload_codec.name": "none"}
    if algorithm == "fedprox":
        settings["algorithm.mu"] = 0.5
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    digest, steps = trained(tmp_path / "one", one, **settings)
    assert steps == [3, 3]
    assert trained(tmp_path / "two", two, **settings) == (digest, steps)
    if algorithm == "fedprox":  # the term is not nothing
        (tmp_path / "plain").mkdir()
        assert trained(tmp_path / "plain", two, **{"algorithm.name": "fedavg"})[0] != digest


def test_refuses_several_optimizers_with_scaffold(tmp_path: Path) -> None:
    with serve(tmp_path, sites=1, algorithm="scaffold") as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
            model, fl_round = build_model(), next(iter(worker))
            fl_round.load_into(model)
            with pytest.raises(errors.UsageError, match="one optimizer"):
                fl_round.correct(model, two(model))
            fl_round.correct(model, one(model))  # the round may go on


def test_counts_the_steps_of_the_last_one_where_a_script_trains_alone(tmp_path: Path) -> None:
    model = build_model()
    optimizers = two(model)
    with atoll.join(site="a", folder=tmp_path) as worker, next(iter(worker)).correct(model, optimizers) as correction:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.3
        for optimizer in optimizers:
            optimizer.step()
    assert correction.steps == 1
