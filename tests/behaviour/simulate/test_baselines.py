"""The programs in `baselines/`: what papers and published tables say, in small."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import fednova_fixed_point
import niid_bench
import pytest
import scaffold_quadratics
import torch
from torch.utils.data import TensorDataset

import atoll
from atoll.data.load import FASHION_MNIST

HERE = Path(niid_bench.__file__).parent
needs_fashion_mnist = pytest.mark.skipif(
    not Path(FASHION_MNIST).is_dir(), reason="Debian's package dataset-fashion-mnist is not installed"
)


@pytest.mark.slow
@pytest.mark.covers("X43")
@pytest.mark.parametrize("algorithm", ["fedavg", "fednova"])
def test_a_run_ends_at_the_fixed_point_of_the_paper(algorithm: str) -> None:
    """With unequal steps, FedAvg ends far from the minimum and FedNova near it, each where its paper's formula says."""
    # K = 1 − 0.99^τ for τ = 1, 5, 20: 0.01, 0.0490099501, 0.1820930624; times p = ½, 0.3, 0.2; targets 0, 1, 4.
    pulls = [0.005, 0.01470298503, 0.03641861248]
    if algorithm == "fednova":
        pulls = [0.005, 0.01470298503 / 5, 0.03641861248 / 20]
    expected = (pulls[1] + 4 * pulls[2]) / sum(pulls)
    assert fednova_fixed_point.closed_form(algorithm) == pytest.approx(expected, abs=1e-8)
    assert fednova_fixed_point.fixed_point(algorithm) == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_scaffold_gains_by_local_steps_whatever_the_sites_are_like() -> None:
    """On the paper's quadratics, more local steps harm FedAvg the more sites differ, and help SCAFFOLD."""
    # One step a round is gradient descent on the mean, ½·x²: each round keeps 0.9 of the distance.
    one = 10 * 0.9**30
    assert scaffold_quadratics.distance("scaffold", 10.0, 1) == pytest.approx(one, rel=1e-9)
    ten = {each: scaffold_quadratics.distance("fedavg", each, 10) for each in (1.0, 100.0)}
    # The fixed point of FedAvg: x_a = −G/2 + 0.8^10·(x + G/2) and x_b = x + 10·0.1·G, with mean x, so
    # x = G·(½ + ½·0.8^10)/(1 − 0.8^10).
    for dissimilarity, found in ten.items():
        expected = dissimilarity * (0.5 + 0.5 * 0.8**10) / (1 - 0.8**10)
        assert found == pytest.approx(expected, rel=1e-3)
    for dissimilarity in ten:
        assert scaffold_quadratics.distance("scaffold", dissimilarity, 10) < one / 100


def test_sites_of_a_class_share_its_pictures() -> None:
    """In the split by classes, each picture is at one site, and each site has its own class and another."""
    labels = torch.arange(10).repeat(30)
    pictures = TensorDataset(torch.arange(300.0), labels)
    parts = niid_bench.by_classes(pictures, 2, seed=3)
    assert sorted(index for part in parts for index in part) == list(range(300))
    assert all(len(set(labels[part].tolist())) == 2 and site in labels[part] for site, part in enumerate(parts))


@needs_fashion_mnist
@pytest.mark.slow
def test_niid_bench_prints_its_table(tmp_path: Path) -> None:
    """A short run of niid_bench prints our accuracy beside the published one, and continues a finished cell at once."""
    words = ["--split", "iid", "--algorithm", "fedavg", "--seeds", "1", "--rounds", "1", "--epochs", "1"]
    lines = [
        subprocess.run(
            [sys.executable, HERE / "niid_bench.py", *words],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout.splitlines()[-1]
        for _ in range(2)
    ]
    assert lines[0] == lines[1]
    _, kind, algorithm, ours, seeds, published, _, _ = (each.strip() for each in lines[0].split("|"))
    assert (kind, algorithm, seeds, published) == ("iid", "fedavg", "1", "89.23 ± 0.45")
    assert float(ours.split()[0]) > 15  # by chance: 10
    assert math.isfinite(float(ours.split()[0]))
    assert atoll.data.fashion_mnist(train=False)[0][0].shape == (1, 28, 28)
