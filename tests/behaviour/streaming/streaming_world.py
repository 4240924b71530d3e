"""A model of six equal layers in fp64, runs of it, and the numbers that streaming has to give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from kit import diloco_specified
from kit.diloco_specified import OUTER, WEIGHTS, Trace, data_of, inner, specified_traces
from kit.servers import long, plain_server
from kit.sites import DiLoCoSites, diloco
from torch import Tensor, nn

import atoll

LAYERS = 6


def build() -> nn.Module:
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(5, 5), nn.Tanh()]
    return nn.Sequential(*layers).double()


def data(site: str) -> tuple[Tensor, Tensor]:
    return data_of(site, 5, 5)


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str) -> None:
    diloco_specified.local_step(model, optimizer, data(site))


def names_of(fragments: int) -> list[list[str]]:
    """By hand: six layers of the same size, each with a weight and a bias; a layer is an even place of the sequence."""
    names = [f"{2 * layer}.{kind}" for layer in range(LAYERS) for kind in ("weight", "bias")]
    each = len(names) // fragments
    return [names[start : start + each] for start in range(0, len(names), each)]


def expected(sites: Sequence[str], settings: Mapping[str, Any]) -> dict[str, Trace]:
    """What each site's parameters are after every local step; `settings` are K, H, tau, alpha and rounds."""
    ways = {key: settings[key] for key in ("H", "tau", "alpha", "rounds")}
    return specified_traces(build, data, sites, names_of(settings["K"]), **ways)


def new_server(folder: Path, model: nn.Module | None = None, **options: Any) -> atoll.Server:
    """A server that is not started; settings stand among its arguments, some by their short names."""
    settings = {"algorithm": "diloco", "codec": "none", "network.heartbeat_interval_s": 1.0, "run.threads": 1}
    return plain_server(folder, model or build(), **OUTER | long(settings) | long(options))


def loop_of(url: str, folder: Path, site: str = "a", **options: Any) -> atoll.DiLoCo:
    """The loop of a site around the six layers, not started."""
    model = build()
    return diloco(url, folder, site, model, inner(model), **options)


def step_(loop: atoll.DiLoCo, site: str = "a") -> None:
    """One local step of a loop."""
    local_step(loop.model, loop.optimizer, site)  # type: ignore[arg-type]


def versions(server: atoll.Server) -> list[int]:
    """The newest version of each fragment."""
    return [fragment.version for fragment in server.status().fragments]


class Sites(DiLoCoSites):
    """Workers as threads of this process.

    Attributes:
        traces: site → its parameters after each local step.
    """

    def __init__(self, url: str, folder: Path, sites: list[str], steps: int, **options: Any) -> None:
        self.traces: dict[str, Trace] = {site: [] for site in sites}
        how = {"build": build, "inner": inner, "step": self._traced, "weights": WEIGHTS}
        super().__init__(url, folder, steps, sites, **how | options)

    def _traced(self, model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
        local_step(model, optimizer, site)
        self.traces[site].append({name: p.detach().clone() for name, p in model.named_parameters()})


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states have the same names and bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def copied(model: nn.Module) -> dict[str, Tensor]:
    """The state of a model, apart from it."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def require_close(traces: dict[str, Trace], right: dict[str, Trace]) -> None:
    """Every parameter of every site after every step is what it has to be, to 1e-12."""
    assert traces.keys() == right.keys()
    for site, trace in right.items():
        assert len(traces[site]) == len(trace), site
        for step, (mine, theirs) in enumerate(zip(traces[site], trace, strict=True), start=1):
            for name, value in theirs.items():
                error = float((mine[name] - value).abs().max())
                assert error <= 1e-12, f"{site}, step {step}, {name}: {error}"
