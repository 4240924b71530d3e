"""Sites of a run as threads of the test's process: they survive whatever happens to the server."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

import atoll


class Threads:
    """Jobs at once. No test waits for a thread that `join` has given up: they end with the process."""

    def __init__(self, *jobs: Callable[[], object]) -> None:
        self._ends = [_begun(job) for job in jobs]

    def join(self, timeout_s: float = 60.0) -> None:
        """Wait for all of them; what one raises is raised here as soon as it is."""
        _, waiting = wait(self._ends, timeout_s, FIRST_EXCEPTION)
        for end in self._ends:
            if end.done():
                end.result()
        assert not waiting, "a worker hangs"


def _begun(job: Callable[[], object]) -> Future[object]:
    end: Future[object] = Future()

    def work() -> None:
        try:
            end.set_result(job())
        except BaseException as error:
            end.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return end


def together(*jobs: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Run jobs at once, to their ends."""
    Threads(*jobs).join(timeout_s)


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
