"""DiLoCo follows one optimizer, several of them, and those that are wrapped or compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import SITES, build_model, diloco, exported, serve, tensors_digest, together
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import atoll
from atoll import errors

Optimizers = list[Optimizer]
DILOCO = {"algorithm": "diloco", "algorithm.outer_optimizer.name": None, "H": 2, "rounds": 2}


def two(model: nn.Module) -> Optimizers:
    """SGD for matrices, AdamW for the others."""
    matrices = [each for each in model.parameters() if each.dim() >= 2]
    others = [each for each in model.parameters() if each.dim() < 2]
    return [SGD(matrices, lr=0.05), AdamW(others, lr=0.01)]


def gradients(model: nn.Module, site: str, step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + ord(site[0]))
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.01 + torch.randn(parameter.shape, generator=generator)


class Both(Optimizer):
    """Two optimizers behind one step: what a list of them must come to."""

    def __init__(self, inner: Optimizers) -> None:
        super().__init__([each for one in inner for group in one.param_groups for each in group["params"]], {})
        self.inner = inner

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.inner:
            each.step()


def trained(
    folder: Path,
    given: Callable[[Optimizers], Any],
    steps: Callable[[Any, Optimizers], list[Callable[[], Any]]],
    make: Callable[[nn.Module], Optimizers] = two,
) -> tuple[str, dict[str, str]]:
    """Digests of the run's result, and of the sites' models right behind their last step.

    Args:
        given: to `atoll.DiLoCo`, made of the site's optimizers.
        steps: what the loop calls at every step.
    """
    sites: dict[str, str] = {}

    def work(site: str) -> None:
        model = build_model()
        optimizers = make(model)
        handed = given(optimizers)
        with diloco(server, folder, site, model, handed) as loop:
            calls = steps(handed, optimizers)
            number = 0
            while not loop.finished:
                gradients(model, site, number)
                for call in calls:
                    call()
                number += 1
            assert number == loop.step == 4
        sites[site] = tensors_digest(model.state_dict())

    with serve(folder, **DILOCO) as server:
        together(*(partial(work, site) for site in SITES))
        server.run()
    return tensors_digest(exported(folder)), sites


def step_of_each(_: Any, optimizers: Optimizers) -> list[Callable[[], Any]]:
    return [each.step for each in optimizers]


def step_of_given(given: Any, _: Optimizers) -> list[Callable[[], Any]]:
    return [given.step]


@pytest.mark.covers("L2")
def test_synchronises_after_the_last_of_several_optimizers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, sites = trained(tmp_path / "one", Both, step_of_given)
    assert set(sites.values()) == {run}
    assert trained(tmp_path / "list", list, step_of_each) == (run, sites)
    assert trained(tmp_path / "tuple", tuple, step_of_each) == (run, sites)
    assert not [record for record in caplog.records if "optimizer" in record.getMessage()]


def test_warns_of_an_order_in_which_the_last_optimizer_steps_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained(tmp_path, lambda optimizers: optimizers[::-1], step_of_each)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert sum("AdamW" in record.getMessage() for record in warned) == len(SITES)


def test_warns_of_an_optimizer_that_holds_a_part_of_the_parameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        caplog.clear()
        return [each for each in found if "trainable parameters" in each]

    model = build_model()
    with serve(tmp_path, sites=1, **DILOCO) as server:
        start = partial(diloco, server, tmp_path, "a", model)
        with start(two(model)[0]):
            (said,) = warnings()
        assert "'0.bias'" in said
        assert "2 of the model's 6" in said
        with start(two(model)):
            assert not warnings()
        for parameter in (each for each in model.parameters() if each.dim() < 2):
            parameter.requires_grad_(False)
        with start(two(model)[0]):
            assert not warnings()


@pytest.mark.parametrize(("algorithm", "warned"), [("fedprox", True), ("scaffold", True), ("fedavg", False)])
def test_warns_of_a_correction_that_misses_a_part_of_the_parameters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str, warned: bool
) -> None:
    def warnings(optimizers: Callable[[nn.Module], Optimizers], *, frozen: bool = False) -> list[str]:
        """Of a site that takes part in two rounds of a run."""
        caplog.clear()
        model = build_model()
        for parameter in (each for each in model.parameters() if frozen and each.dim() < 2):
            parameter.requires_grad_(False)
        (optimizer,) = optimizers(model)
        folder = tmp_path / f"{optimizers.__name__}-{frozen}"
        with (
            serve(folder, algorithm=algorithm, sites=1, rounds=2, **{"algorithm.outer_optimizer.name": None}) as server,
            atoll.join(server.url, site="a", folder=folder / "workers") as worker,
        ):
            for fl_round in worker:
                fl_round.load_into(model)
                with fl_round.correct(model, optimizer):
                    gradients(model, "a", fl_round.number)
                    optimizer.step()
                fl_round.submit(model)
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        return [each for each in found if "trainable parameters" in each]

    said = warnings(first_of_two)
    assert len(said) == warned  # once a run, not in each round
    assert not warned or ("as a list" in said[0]) == (algorithm != "scaffold")  # SCAFFOLD takes one optimizer
    assert all("'0.bias'" in each and "2 of the model's 6" in each for each in said)
    assert not warnings(one)
    assert not warnings(first_of_two, frozen=True)


def first_of_two(model: nn.Module) -> Optimizers:
    return two(model)[:1]


@pytest.mark.parametrize("given", [[], [1], "sgd", {}, "twice"], ids=str)
def test_refuses_what_is_no_optimizer_or_given_twice(given: Any) -> None:
    model = build_model()
    with pytest.raises(errors.UsageError):
        atoll.DiLoCo(model, 2 * [SGD(model.parameters(), lr=0.1)] if given == "twice" else given)


def test_refuses_one_of_several_optimizers_that_trains_another_model(tmp_path: Path) -> None:
    model = build_model()
    of_another = SGD(build_model().parameters(), lr=0.1)
    with serve(tmp_path, **DILOCO) as server:
        with pytest.raises(errors.UsageError):
            diloco(server, tmp_path, "a", model, [SGD(model.parameters(), lr=0.1), of_another]).start()


# -- wrapped and compiled


def one(model: nn.Module) -> Optimizers:
    return [SGD(model.parameters(), lr=0.05, momentum=0.9)]


def compiled(_: Any, optimizers: Optimizers) -> list[Callable[[], Any]]:
    return [torch.compile(optimizers[0].step, backend="eager")]


def compiled_around(_: Any, optimizers: Optimizers) -> list[Callable[[], Any]]:
    def step() -> None:
        optimizers[0].step()

    return [torch.compile(step, backend="eager")]


def first(optimizers: Optimizers) -> Optimizer:
    return optimizers[0]


def wrapped(optimizers: Optimizers) -> Any:
    return pytest.importorskip("accelerate").Accelerator(cpu=True).prepare_optimizer(optimizers[0])


@pytest.mark.parametrize(
    ("given", "how"),
    [(first, compiled), (first, compiled_around), (wrapped, step_of_given)],
    ids=lambda each: each.__name__,
)
def test_follows_compiled_and_wrapped_steps(
    tmp_path: Path, given: Callable[[Optimizers], Any], how: Callable[[Any, Optimizers], list[Callable[[], Any]]]
) -> None:
    plain = trained(tmp_path / "plain", first, step_of_given, one)
    assert trained(tmp_path / "followed", given, how, one) == plain


@pytest.mark.parametrize("wrapper", ["accelerate", "compile"])
def test_corrections_follow_wrapped_and_compiled_steps(tmp_path: Path, wrapper: str) -> None:
    def result(folder: Path, how: str) -> str:
        def work(site: str) -> None:
            model = build_model()
            optimizer: Any = SGD(model.parameters(), lr=0.05)
            if how == "accelerate":
                optimizer = wrapped([optimizer])
            step = torch.compile(optimizer.step, backend="eager") if how == "compile" else optimizer.step
            with atoll.join(server.url, site=site, folder=folder / "workers") as worker:
                for fl_round in worker:
                    fl_round.load_into(model)
                    with fl_round.correct(model, optimizer):
                        for number in range(2):
                            gradients(model, site, 10 * fl_round.number + number)
                            step()
                    fl_round.submit(model)

        outer = {"name": None, "lr": 1.0, "momentum": 0.0}
        settings = {f"algorithm.outer_optimizer.{name}": value for name, value in outer.items()}
        with serve(folder, algorithm="scaffold", **settings) as server:
            together(*(partial(work, site) for site in SITES))
            server.run()
        return tensors_digest(exported(folder))

    assert result(tmp_path / wrapper, wrapper) == result(tmp_path / "plain", "")
