"""SCAFFOLD where sites have unequal weights: weights define the objective, for model and controls alike.

p_i = w_i / W        W = the sum of the weights of the sites heard × (registered sites / sites heard)
c ← c · W_before / W + Σ_S p_i·Δc_i
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port
from kit import serve
from torch import nn

import atoll

TARGETS = {"a": 1.0, "b": -3.0, "c": 5.0}
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 8.0}


class Point(nn.Module):
    """A model of one vector, in fp64."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def options(**settings: Any) -> dict[str, Any]:
    """Of a server: plain SCAFFOLD, no codec."""
    return {
        "algorithm.name": "scaffold",
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
    } | settings


def train(
    round_: atoll.Round,
    curvature: torch.Tensor,
    target: torch.Tensor,
    *,
    lr: float,
    steps: int,
    weight: float,
) -> None:
    """Local steps on ½·Σ curvature·(x − target)²."""
    model = round_.load_into(Point(len(target)))
    optimizer = torch.optim.SGD([model.x], lr=lr)
    with round_.correct(model, optimizer):
        for _ in range(steps):
            model.x.grad = curvature * (model.x.detach() - target)
            optimizer.step()
    round_.submit(model, weight=weight)


def one_step(round_: atoll.Round, site: str, weight: float | None = None) -> tuple[float, float, float]:
    """One local step at rate ½ on ½·(x − target)²; returns x, c and the site's c_i, as the round begins."""
    x = round_.load_into(Point()).x.item()
    known = x, round_.global_state("control")["x"].item(), round_.own_state("control")["x"].item()
    one = torch.ones(1, dtype=torch.float64)
    train(round_, one, TARGETS[site] * one, lr=0.5, steps=1, weight=WEIGHTS[site] if weight is None else weight)
    return known


def joined(url: str, folder: Path, site: str) -> tuple[atoll.Worker, Iterator[atoll.Round]]:
    worker = atoll.join(url, site=site, folder=folder / "workers")
    return worker, iter(worker)


def test_converges_to_the_optimum_of_the_weighted_objective(tmp_path: Path) -> None:
    """Of Σ w_i·f_i with f_i = ½·Σ a_i·(x − t_i)², the optimum is Σ w_i·a_i·t_i / Σ w_i·a_i; local steps are unequal."""
    weights = {"a": 739.0, "b": 463.0, "c": 60.0}
    steps = {"a": 8, "b": 12, "c": 5}
    generator = torch.Generator().manual_seed(3)
    curvatures = {site: 0.5 + torch.rand(6, generator=generator, dtype=torch.float64) for site in weights}
    targets = {site: torch.randn(6, generator=generator, dtype=torch.float64) for site in weights}
    rounds = 70
    with serve(
        tmp_path, Point(6), **options(**{"rounds.sites": 3, "rounds.min_sites": 3, "rounds.total": rounds})
    ) as server:
        sites = {site: joined(server.url, tmp_path, site) for site in weights}
        for _ in range(rounds):
            for site, (_, loop) in sites.items():
                round_ = next(loop)
                train(
                    round_,
                    curvatures[site],
                    targets[site],
                    lr=0.1,
                    steps=steps[site],
                    weight=weights[site],
                )
        found = {}
        for site, (worker, loop) in sites.items():
            assert next(loop, None) is None
            found[site] = worker.load_into(Point(6)).x.detach().clone()
            worker.leave()
    above = sum(weights[site] * curvatures[site] * targets[site] for site in weights)
    below = sum(weights[site] * curvatures[site] for site in weights)
    optimum = above / below
    for x in found.values():
        torch.testing.assert_close(x, optimum, rtol=0, atol=1e-12)


def test_rounds_with_unequal_weights_by_hand(tmp_path: Path) -> None:
    """With one step at rate η = ½: c_i⁺ = g_i(x), y_i = x − ½·(g_i − c_i + c), g_i = x − target.

    Round 1, sites a and b:  W = 1 + 3 = 4.  g = −1, 3;  y = 0.5, −1.5.
        x = 0 − (¼·(−0.5) + ¾·1.5) = −1;          c = ¼·(−1) + ¾·3 = 2
    Round 2, c has registered and was not heard:  W = (1 + 3)·3/2 = 6.  g = −2, 2;  Δ = −1, −1;  y = −1.5, −1.5.
        x = −1 − (¼·½ + ¾·½) = −1.5;              c = 2·4/6 + (1·(−1) + 3·(−1))/6 = 2/3
    Round 3, all three:  W = 12.  g = −2.5, 1.5, −6.5;  Δ = −0.5, −0.5, −6.5;  x − y = 1/12, 1/12, −35/12.
        x = −1.5 − (1/12 + 3/12 − 8·35/12)/12 = 5/12;   c = 2/3·6/12 + (−0.5 − 3·0.5 − 8·6.5)/12 = −25/6
    """
    with serve(tmp_path, Point(), **options(**{"rounds.sites": 2, "rounds.min_sites": 2, "rounds.total": 4})) as server:
        sites = {site: joined(server.url, tmp_path, site) for site in ("a", "b")}
        for site, (_, loop) in sites.items():
            assert one_step(next(loop), site) == (0.0, 0.0, 0.0)
        second = {site: next(loop) for site, (_, loop) in sites.items()}
        sites["c"] = joined(server.url, tmp_path, "c")  # the second round is open, for two
        assert one_step(second["a"], "a") == (-1.0, 2.0, -1.0)
        assert one_step(second["b"], "b") == (-1.0, 2.0, 3.0)
        for site, own in (("a", -2.0), ("b", 2.0), ("c", 0.0)):
            found = one_step(next(sites[site][1]), site)
            assert found == pytest.approx((-1.5, 2 / 3, own), abs=1e-15)
        x, c, _ = one_step(next(sites["a"][1]), "a")
        assert (x, c) == pytest.approx((5 / 12, -25 / 6), abs=1e-15)
        for worker, _ in sites.values():
            worker.leave()


def test_a_site_keeps_its_first_weight_and_the_change_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The numbers are those of two sites with weights 1 and 3; the second server finds the weights in its journal."""
    settings = options(**{"rounds.sites": 2, "rounds.min_sites": 2, "rounds.total": 3, "network.port": free_port()})
    with serve(tmp_path, Point(), **settings) as server:
        sites = {site: joined(server.url, tmp_path, site) for site in ("a", "b")}
        for site, (_, loop) in sites.items():
            one_step(next(loop), site)
        second = {site: next(loop) for site, (_, loop) in sites.items()}
    with serve(tmp_path, Point(), **settings), caplog.at_level(logging.WARNING, "atoll.server"):
        assert one_step(second["a"], "a", 1.0) == (-1.0, 2.0, -1.0)
        assert one_step(second["b"], "b", 500.0) == (-1.0, 2.0, 3.0)
        # W = 4:  x = −1 − ½ = −1.5;  c = 2 + ¼·(−1) + ¾·(−1) = 1
        assert one_step(next(sites["a"][1]), "a", 1.0) == (-1.5, 1.0, -2.0)
        assert one_step(next(sites["b"][1]), "b", 500.0) == (-1.5, 1.0, 2.0)
        for worker, loop in sites.values():
            assert next(loop, None) is None
            worker.leave()
    said = [record.getMessage() for record in caplog.records if "500" in record.getMessage()]
    assert len(said) == 1  # once a site
    assert {"b", "500", "3"} <= set(re.findall(r"\w+", said[0]))


def test_equal_weights_are_the_papers_to_the_last_bit(tmp_path: Path) -> None:
    """Weight 1: c is Σ Δc_i·(1/N) in the order of the sites' names, one rounding a site."""
    with serve(tmp_path, Point(), **options(**{"rounds.sites": 3, "rounds.min_sites": 3, "rounds.total": 2})) as server:
        sites = {site: joined(server.url, tmp_path, site) for site in TARGETS}
        differences = []
        for site, (_, loop) in sites.items():
            one_step(next(loop), site, 1.0)
            differences.append(-torch.tensor([TARGETS[site]], dtype=torch.float64))  # c_i⁺ = g_i(0)
        _, c, _ = one_step(next(sites["a"][1]), "a", 1.0)
        for worker, _ in sites.values():
            worker.leave()
    wanted = differences[0] * (1 / 3)
    for difference in differences[1:]:
        wanted.add_(difference, alpha=1 / 3)
    assert c == wanted.item()
