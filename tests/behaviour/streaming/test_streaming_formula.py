"""Every parameter of every site after every step, over real sockets and files, against the specification."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.processes import Nursery, free_port
from kit.diloco_specified import WEIGHTS, Trace, inner
from kit.models import Weights
from kit.servers import plain_server
from kit.sites import DiLoCoSites, run_to_end
from safetensors.torch import load_file, save_file
from streaming_world import Sites, build, data, expected, new_server, require_close
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import atoll

RUNS: list[Any] = []
for tau, alpha in itertools.product((0, 1, 2, 3), (0.0, 0.25, 0.5, 1.0)):  # a fragment's turn comes every three steps
    RUNS += [("ab", {"K": 3, "H": 9, "tau": tau, "alpha": alpha, "rounds": 2})]
    three_sites = {"K": 2, "H": 6, "tau": tau, "alpha": alpha, "rounds": 2}
    RUNS += [pytest.param("abc", three_sites, marks=pytest.mark.long)]
RUNS += [("ab", {"K": 1, "H": 3, "tau": 2, "alpha": alpha, "rounds": 3}) for alpha in (0.0, 0.5)]  # whole models
RUNS += [("ab", {"K": 3, "H": 9, "tau": 5, "alpha": 0.25, "rounds": 2, "inflight": 2})]  # two fragments under way


@pytest.mark.covers("L7", "L4", "L15")
@pytest.mark.parametrize(("sites", "settings"), RUNS, ids=str)
def test_every_streaming_step_follows_the_formula(tmp_path: Path, sites: str, settings: dict[str, Any]) -> None:
    """Each site's parameters after every step are those of the streaming DiLoCo formula.

    The inner optimizer is AdamW, the outer one Nesterov momentum, and weights and data are unequal.
    """
    with new_server(tmp_path, sites=len(sites), **settings) as server:
        workers = Sites(server.url, tmp_path, list(sites), steps=100)
        run_to_end(server, workers)
    require_close(workers.traces, expected(sites, settings))


def rank_of_a_site(site: str, folder: Path) -> None:
    """What each process of a site does: train on half of its data, and save the parameters after every step."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(build())
    optimizer = inner(model.module)
    inputs, targets = (each[8 * rank : 8 * rank + 8] for each in data(site))
    trace = []
    with atoll.DiLoCo(model, optimizer, site=site, weight=WEIGHTS[site], folder=folder / "workers") as loop:
        while not loop.finished:
            optimizer.zero_grad()
            (model(inputs) - targets).square().mean().backward()
            optimizer.step()
            trace.append({name: p.detach().clone() for name, p in model.module.named_parameters()})
    steps = {f"{step:03d}/{name}": each for step, named in enumerate(trace) for name, each in named.items()}
    save_file(steps, folder / f"{site}-{rank}.safetensors")
    dist.barrier()
    del model  # DDP that ends after its process group waits, now and then for ever (pytorch issue 56297)
    dist.destroy_process_group()


def trace_of(path: Path) -> Trace:
    """The parameters after every step, as `rank_of_a_site` saved them under STEP/NAME."""
    steps: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in load_file(path).items():
        step, _, name = key.partition("/")
        steps.setdefault(step, {})[name] = value
    return [steps[step] for step in sorted(steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"K": 1, "tau": 0, "alpha": 0.0}, id="whole", marks=pytest.mark.long),
        pytest.param({"K": 2, "tau": 1, "alpha": 0.25}, id="streams"),
    ],
)
def test_the_ranks_of_a_site_are_one_worker(tmp_path: Path, nursery: Nursery, how: dict[str, Any]) -> None:
    """Two sites of two Gloo processes each follow the formula, like two sites of one process.

    Each rank has half of its site's data, and the mean gradient of the ranks is that of the site.
    """
    places = [(site, rank) for site in "ab" for rank in (0, 1)]
    settings = {"H": 4, "rounds": 3} | how
    with new_server(tmp_path, sites=2, **settings) as server:
        common = {"ATOLL_SERVER": server.url, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        ports = {site: str(free_port()) for site in "ab"}
        ranks = [
            nursery.start(
                *(__file__, site, str(tmp_path)),
                cwd=tmp_path,
                env=common | {"RANK": str(rank), "MASTER_PORT": ports[site]},
            )
            for site, rank in places
        ]
        try:
            assert [each.wait(100) for each in ranks] == [0] * len(ranks)
        except (TimeoutError, AssertionError):
            for (site, rank), each in zip(places, ranks, strict=True):
                print(f"{site}-{rank} ended with {each.poll()}:\n{each.output()[-3000:]}")
            raise
        server.run()
    right = expected(["a", "b"], settings)
    for rank in (0, 1):
        traces: dict[str, Trace] = {site: trace_of(tmp_path / f"{site}-{rank}.safetensors") for site in "ab"}
        require_close(traces, right)
    assert [worker.site for worker in server.status().workers] == ["a", "b"]


def two() -> Weights:
    """Two tensors of two elements, one for each fragment."""
    return Weights(first=torch.zeros(2).double(), second=torch.zeros(2).double())


@pytest.mark.covers("L7")
@pytest.mark.parametrize(
    ("alpha", "tau", "outer_lr", "outer_momentum", "speed"),
    [
        # G = outer_lr / (1 − outer_momentum); G·p / (1 − α + α·G), with p = 2, of two inner steps of 1
        (0.25, 0, 0.7, 0.9, 2 * 7 / 2.5),
        pytest.param(0.5, 0, 0.7, 0.9, 2 * 7 / 4, marks=pytest.mark.long),
        pytest.param(0.5, 0, 1.0, 0.9, 2 * 10 / 5.5, marks=pytest.mark.long),
        pytest.param(0.5, 0, 1.0, 0.0, 2.0, marks=pytest.mark.long),
        # and 1 − (1 − α)·τ/H of it
        (0.5, 1, 0.7, 0.9, 2 * 7 / 4 * 0.75),
    ],
)
def test_the_model_moves_at_the_documented_speed(
    tmp_path: Path, alpha: float, tau: int, outer_lr: float, outer_momentum: float, speed: float
) -> None:
    """In a streaming run, the model moves each round by the distance that `docs/low-communication.md` gives."""
    # After 30 rounds, the influence of the start is below 0.73²⁹ of what it was.
    found: list[float] = []

    def step(model: Any, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        optimizer.zero_grad()
        (model.first.sum() + model.second.sum()).backward()  # every element moves by −1
        optimizer.step()
        if number in (56, 58):
            found.append(load_file(server.save_state(tmp_path / "version.safetensors"))["first"][0].item())

    def inner(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    rates = {"algorithm.outer_optimizer.lr": outer_lr, "algorithm.outer_optimizer.momentum": outer_momentum}
    run = {"sites": 1, "rounds": 30, "H": 2, "K": 2, "tau": tau, "alpha": alpha, "codec": "none"}
    with plain_server(tmp_path, two(), algorithm="diloco", **run, **rates) as server:
        DiLoCoSites(server.url, tmp_path, 10**6, "a", build=two, inner=inner, step=step).join()
    assert found[0] - found[1] == pytest.approx(speed, rel=1e-3)


if __name__ == "__main__":
    rank_of_a_site(sys.argv[1], Path(sys.argv[2]))
