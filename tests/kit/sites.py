"""Sites of a run as threads of the test's process: they survive whatever happens to the server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll.testing.run import Threads, together, wait_until
from kit.manual_site import ManualSite
from kit.models import SITES, build_model, local_step, train_

__all__ = [
    "DiLoCoSites",
    "FederatedSites",
    "Gate",
    "Threads",
    "diloco",
    "federated",
    "finish",
    "logged",
    "manual_sites",
    "run_to_end",
    "take_steps",
    "together",
    "train_round",
]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The messages, without those of sites that earlier tests left open: garbage collection ends them at any time."""
    return [each for each in caplog.messages if "left the run after sending" not in each]


def manual_sites(
    server: atoll.Server, folder: Path, sites: Iterable[str] = "ab", **options: Any
) -> dict[str, ManualSite]:
    """Sites that have joined, and that a test moves one by one."""
    return {site: ManualSite(server.url, site=site, folder=folder / "w", **options).join() for site in sites}


def train_round(
    sites: Mapping[str, ManualSite],
    number: int,
    train: Callable[[str, dict[str, Tensor]], Mapping[str, Tensor]],
    weights: Mapping[str, float] | None = None,
    **about: Any,
) -> None:
    """All sites get a ticket of the round; then each submits what `train` makes of what it pulled."""
    for site in sites.values():
        assert site.next_round() == number
    for name, site in sites.items():
        site.submit(train(name, site.pull()), weight=(weights or {}).get(name, 1.0), **about)


def finish(server: atoll.Server, sites: Mapping[str, ManualSite]) -> dict[str, Tensor]:
    """The sites hear that the run is over, and leave; the model that the run has exported."""
    for site in sites.values():
        assert site.next_round() is None
        site.close()
    assert server.wait(60)
    return load_file(server.exports / "model.safetensors")


class Gate:
    """Holds sites back in a round, or before a local step, until it is opened; it is their `before` or `during`."""

    def __init__(self, number: int, names: Iterable[str] = SITES) -> None:
        self._number, self._names, self._open = number, set(names), threading.Event()
        self.waiting: set[str] = set()

    def __call__(self, site: str, number: int, *_: object) -> None:
        if number == self._number and site in self._names:
            self.waiting.add(site)
            assert self._open.wait(100)

    def wait(self) -> None:
        """Return once all of them wait."""
        wait_until(lambda: self.waiting == self._names, f"{self._number} at {sorted(self._names)}", 60)

    def open(self) -> None:
        self._open.set()


def run_to_end(server: atoll.Server, *sites: Threads) -> None:
    """Wait until these sites, and the server with them, have come to the end of the run."""
    for each in sites:
        each.join()
    server.run()


def federated(
    server: atoll.Server, folder: Path, train_: Callable[[nn.Module], object], build: Callable[[], nn.Module]
) -> nn.Module:
    """The site a trains a module until the run is finished; the module, with what came of the run."""
    model = build()
    with atoll.join(server.url, site="a", folder=folder / "w") as worker:
        for fl_round in worker:
            train_(fl_round.load_into(model))
            fl_round.submit(model)
        worker.load_into(model)
    return model


class FederatedSites(Threads):
    """Sites that load, train and submit until the run is finished.

    Attributes:
        trained: (site, round) → how often it was trained.
        models: site → its model.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        url: str,
        folder: Path,
        names: Iterable[str] = SITES,
        *,
        before: Callable[[str, int], None] | None = None,
        during: Callable[[str, int], None] | None = None,
        build: Callable[[], nn.Module] = build_model,
        train: Callable[[nn.Module, str, int], None] = train_,
        weights: dict[str, float] | None = None,
        **options: Any,
    ) -> None:
        """`options` go to `atoll.join`.

        Args:
            before: called with site and round before the round's model is loaded.
            during: called with them in the middle of local training.
        """
        self.trained: Counter[tuple[str, int]] = Counter()
        self.models: dict[str, nn.Module] = {}
        self._url, self._folder, self._options = url, folder, options
        self._before, self._during = before, during
        self._build, self._train, self._weights = build, train, weights or SITES
        self._lock = threading.Lock()
        super().__init__(*(partial(self._work, site) for site in names))

    def _work(self, site: str) -> None:
        model = self.models[site] = self._build()
        with atoll.join(self._url, site=site, folder=self._folder / "workers", **self._options) as worker:
            for fl_round in worker:
                if self._before:
                    self._before(site, fl_round.number)
                fl_round.load_into(model)
                with self._lock:
                    self.trained[site, fl_round.number] += 1
                if self._during:
                    self._during(site, fl_round.number)
                self._train(model, site, fl_round.number)
                fl_round.submit(model, weight=self._weights.get(site, 1.0), metrics={"loss": 1.0 / fl_round.number})


class DiLoCoSites(Threads):
    """Sites that run `atoll.DiLoCo` around a loop until the run is finished, at most `steps` local steps each.

    Attributes:
        models: site → its model.
        loops: site → its `atoll.DiLoCo`.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        url: str,
        folder: Path,
        steps: int,
        names: Iterable[str] = SITES,
        *,
        during: Callable[[str, int], None] | None = None,
        build: Callable[[], nn.Module] = build_model,
        inner: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
        step: Callable[[nn.Module, torch.optim.Optimizer, str, int], None] = local_step,
        weights: Mapping[str, float] = SITES,
        **options: Any,
    ) -> None:
        """`during(site, step)` is called before each local step; `options` go to `atoll.DiLoCo`."""
        self.models: dict[str, nn.Module] = {}
        self.loops: dict[str, atoll.DiLoCo] = {}
        self._url, self._folder, self._steps, self._during, self._options = url, folder, steps, during, options
        self._build, self._step, self._weights = build, step, weights
        self._inner = inner or (lambda model: torch.optim.SGD(model.parameters(), lr=0.05))
        super().__init__(*(partial(self._work, site) for site in names))

    def _work(self, site: str) -> None:
        model = self.models[site] = self._build()
        optimizer = self._inner(model)
        options = {"weight": self._weights.get(site, 1.0)} | self._options
        with atoll.DiLoCo(
            model, optimizer, server=self._url, site=site, folder=self._folder / "workers", **options
        ) as loop:
            self.loops[site] = loop
            for number in range(self._steps):
                if loop.finished:
                    break
                if self._during:
                    self._during(site, number)
                self._step(model, optimizer, site, number)


def diloco(
    server: atoll.Server | str,
    folder: Path,
    site: str = "a",
    model: nn.Module | None = None,
    optimizer: Any = None,
    **options: Any,
) -> atoll.DiLoCo:
    """A site's `atoll.DiLoCo` with these options, not started; by default around `build_model()` and SGD."""
    model = build_model() if model is None else model
    given = torch.optim.SGD(model.parameters(), lr=0.05) if optimizer is None else optimizer
    url = server if isinstance(server, str) else server.url
    return atoll.DiLoCo(model, given, server=url, site=site, folder=folder / "workers", **options)


def take_steps(
    loop: atoll.DiLoCo, most: int = 10**6, site: str = "a", during: Callable[[int], object] | None = None
) -> None:
    """Local steps until the run is finished, at most so many; `during(step)` comes before each, the first is 1."""
    for step in range(1, most + 1):
        if loop.finished:
            break
        if during:
            during(step)
        local_step(loop.model, loop.optimizer, site, step)
