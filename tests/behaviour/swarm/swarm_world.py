"""Swarms for these tests: three sites as threads or processes, and their server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.processes import Nursery, Process, RestartedProcess
from kit import ForkedServer, ForkedSite, Threads, run_to_end, serve, tensors_digest
from kit.models import local_step, wide_model
from kit.results import Result
from torch import nn

import atoll

ROUNDS = 3
SITES = {"a": 1.0, "b": 2.5, "c": 0.75}
"""Site → weight of its updates."""
EVERY_SITE_AND_ROUND = [(site, number) for site in SITES for number in range(1, ROUNDS + 1)]
SETTINGS: dict[str, Any] = {
    "swarm.enabled": True,
    "rounds.sites": len(SITES),
    "network.heartbeat_interval_s": 0.2,
    "network.idle_timeout_s": 5.0,
}
PLAIN: dict[str, Any] = dict.fromkeys(
    ("algorithm.outer_optimizer.name", "algorithm.outer_optimizer.lr", "algorithm.outer_optimizer.momentum")
)
"""Without the outer optimizer of the kit's settings: that of the algorithm."""
IN_TURN: dict[str, Any] = {"swarm.aggregators": ["a", "b", "c"]}
"""Round 1 is aggregated by a and checked by b, round 2 by b and c, round 3 by c and a."""
QUICK: dict[str, Any] = {"network.heartbeat_timeout_s": 2.0}
"""A silent site is dead soon."""

ServerProcess = partial(ForkedServer, **{"model.source": "kit_model:wide_model"}, **SETTINGS)
"""The run, served by `atoll server` in a process of its own; started again whenever it was killed."""


def train_in(fl_round: Any, model: nn.Module, site: str, steps: int = 2) -> None:
    """A site's local steps in a round, corrected by the run's algorithm."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    fl_round.correct(model, optimizer)
    for step in range(steps):
        local_step(model, optimizer, site, 10 * fl_round.number + step)


def submit(fl_round: Any, model: nn.Module, site: str, steps: int = 2) -> None:
    fl_round.submit(model, weight=SITES.get(site, 1.0), metrics={"loss": 1.0 / fl_round.number}, steps=steps)


class Sites(Threads):
    """Sites as threads of this process, which do not die.

    Args:
        during: called with site, round and model when the model is trained, before it is submitted.
        steps: local steps of sites with another number than two.
        last: site → round with which it leaves.

    Attributes:
        trained: (site, round) in the order in which they were trained.
        models: site → what the run has made of its model.
        moved: site → bytes of tensors that it has sent and received.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        names: Iterable[str] = SITES,
        *,
        during: Callable[[str, int, nn.Module], object] | None = None,
        steps: Mapping[str, int] | None = None,
        last: Mapping[str, int] | None = None,
    ) -> None:
        self.trained: list[tuple[str, int]] = []
        self.models: dict[str, nn.Module] = {}
        self.moved: dict[str, tuple[int, int]] = {}
        self._url, self._folder = url, folder
        self._during, self._steps, self._last = during, steps or {}, last or {}
        super().__init__(*(partial(self._work, site) for site in names))

    def _work(self, site: str) -> None:
        model, steps = wide_model(), self._steps.get(site, 2)
        with atoll.join(self._url, site=site, folder=self._folder / "workers", swarm=True) as worker:
            for fl_round in worker:
                train_in(fl_round, fl_round.load_into(model), site, steps)
                self.trained.append((site, fl_round.number))
                if self._during:
                    self._during(site, fl_round.number, model)
                submit(fl_round, model, site, steps)
                if fl_round.number == self._last.get(site):
                    return
            self.models[site] = worker.load_into(model)
            self.moved[site] = worker.bytes_up, worker.bytes_down

    @property
    def digests(self) -> set[str]:
        """Of what the run has made of their models."""
        return {tensors_digest(dict(model.state_dict())) for model in self.models.values()}


@contextmanager
def serve_swarm(folder: Path, **settings: Any) -> Iterator[atoll.Server]:
    """The run, served by this process."""
    with serve(folder, wide_model(), **(SETTINGS | settings)) as server:
        yield server


def left_by(folder: Path, names: Iterable[str] = SITES, **settings: Any) -> tuple[Result, Sites]:
    """A finished run, and its sites."""
    with serve_swarm(folder, **settings) as server:
        sites = Sites(server.url, folder, names)
        run_to_end(server, sites)
    return Result(folder), sites


class SiteProcess(ForkedSite):
    """One site as a process of its own, which runs `swarm_site.py`; started again whenever it was killed.

    Args:
        lives: failpoints of its first start, the second, …
        env: LOOP is `federated` or `diloco`.
    """

    def __init__(
        self, nursery: Nursery, folder: Path, url: str, site: str, lives: Sequence[str] = (), **env: str
    ) -> None:
        super().__init__(nursery, folder, url, site, Path(__file__).with_name("swarm_site.py"))
        self.process = RestartedProcess(
            lambda failpoints: self.start(failpoints, **{"LOOP": "federated", **env}), lives
        )

    def ended(self) -> str:
        """The digest of its model, once it has come to its end by itself."""
        process: Process = self.process.now
        assert self.process.wait() == 0, process.output()
        return self.process.now.output().split("digest ")[-1].split()[0]

    def __enter__(self) -> SiteProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.close()


def trains(process: Process, number: int) -> bool:
    """Whether it says that it has trained a round."""
    return f"trained {number}\n" in process.output()
