"""Sites of a run as threads of the test's process: they survive whatever happens to the server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from kit.sites import Threads, together
from torch import nn

import atoll

__all__ = ["DiLoCoSites", "Threads", "together"]


class DiLoCoSites(Threads, ABC):
    """Sites that each train a model of their own until the run is finished.

    Attributes:
        weights: site → weight of its updates.
        models: site → its model.
        loops: site → its part in the run.
    """

    weights: ClassVar[Mapping[str, float]]

    def __init__(
        self,
        url: str,
        folder: Path,
        sites: Collection[str],
        steps: int,
        during: Callable[[str, int], None] | None = None,
        **options: Any,
    ) -> None:
        """At most `steps` local steps each; `during(site, step)` is called before each of them, the first is 0."""
        self.models: dict[str, nn.Module] = {}
        self.loops: dict[str, atoll.DiLoCo] = {}
        self._url, self._folder, self._steps, self._during, self._options = url, folder, steps, during, options
        super().__init__(*(partial(self._train, site) for site in sites))

    @abstractmethod
    def build(self) -> nn.Module:
        """The model before it is trained."""

    @abstractmethod
    def inner(self, model: nn.Module) -> torch.optim.Optimizer:
        """Its inner optimizer."""

    @abstractmethod
    def local_step(self, model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
        """One local step of a site."""

    def _train(self, site: str) -> None:
        model = self.models[site] = self.build()
        optimizer = self.inner(model)
        folder = self._folder / "workers"
        with atoll.DiLoCo(
            model, optimizer, server=self._url, site=site, weight=self.weights[site], folder=folder, **self._options
        ) as diloco:
            self.loops[site] = diloco
            for step in range(self._steps):
                if diloco.finished:
                    break
                if self._during:
                    self._during(site, step)
                self.local_step(model, optimizer, site, step)
