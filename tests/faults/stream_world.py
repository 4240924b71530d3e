"""A small streaming run that gives the same bits every time: three fragments, results merged a step later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from fault_world import PART_BYTES, SITES, build
from torch import nn

import atoll

ROUNDS = 2
FRAGMENTS = 3
SETTINGS: dict[str, Any] = {
    "algorithm": "diloco",
    "codec": "int8",
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "rounds": ROUNDS,
    "num_fragments": FRAGMENTS,
    "sync_every": 6,
    "tau": 1,
    "alpha": 0.25,
    "part_bytes": PART_BYTES,
}
"""Over those of `fault_world`."""
STEPS = ROUNDS * 6 + 1
EVERY_UPDATE = sorted((site, fragment, base, 1) for site in SITES for fragment in range(3) for base in range(ROUNDS))
"""(site, fragment, base version, how often it counted)."""


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
    """A gradient that depends on site and step, and on the parameters."""
    generator = torch.Generator().manual_seed(1000 * step + ord(site[0]))
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.01 + torch.randn(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        buffer.add_(ord(site[0]) if name.endswith("num_batches_tracked") else 0.25)
    optimizer.step()


class StreamingSites:
    """Workers as threads of this process; they survive whatever happens to the server.

    Attributes:
        models: site → its model.
        loops: site → its part in the run.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        during: Callable[[str, int], None] | None = None,
        names: Iterable[str] = SITES,
        steps: int = STEPS,
        **options: Any,
    ) -> None:
        """`during(site, step)` is called before each local step; the first is 0."""
        self.models: dict[str, nn.Module] = {}
        self.loops: dict[str, atoll.DiLoCo] = {}
        self._url, self._folder, self._during, self._steps, self._options = url, folder, during, steps, options
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(site,), daemon=True) for site in names]
        for thread in self._threads:
            thread.start()

    def _guarded(self, site: str) -> None:
        try:
            self._work(site)
        except BaseException as error:
            self._errors.append(error)

    def _work(self, site: str) -> None:
        model = self.models[site] = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
        folder = self._folder / "workers"
        with atoll.DiLoCo(
            model, optimizer, server=self._url, site=site, weight=SITES[site], folder=folder, **self._options
        ) as diloco:
            self.loops[site] = diloco
            for step in range(self._steps):
                if diloco.finished:
                    break
                if self._during:
                    self._during(site, step)
                local_step(model, optimizer, site, step)

    def join(self, timeout_s: float = 90.0) -> None:
        """Wait for all of them; raise what the first of them raised."""
        for thread in self._threads:
            thread.join(timeout_s)
            if self._errors:
                raise self._errors[0]
            assert not thread.is_alive(), "a worker hangs"
        if self._errors:
            raise self._errors[0]
