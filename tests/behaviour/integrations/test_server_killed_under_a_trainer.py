"""The server is killed in the middle of a round and started again, on its port and state: a Trainer goes on as if not.

The Trainer's site has a gradient of w − 1 and three steps a round. The other one, where there is one, submits what it
pulled, with the same weight.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Kept, Nursery, Process, free_port, wait_until
from kit import Threads
from lightning_world import Tiny, fit_rounds, trainer_of
from safetensors.torch import load_file
from torch import nn
from transformers_world import MOMENTUM, STEPS, One, rate, trainer_for

import atoll
import atoll.integrations.lightning
from atoll.integrations.transformers import AtollCallback

ROUNDS = 3
MODEL = """
import torch
from torch import nn

class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        if {frozen}:
            self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
"""
DILOCO = (
    f"diloco.sync_every = {STEPS}\nalgorithm.outer_optimizer.lr = 1.0\nalgorithm.outer_optimizer.momentum = "
    "0.0\naggregation.upload_codec.name = 'none'\n"
)

IN_TRAINING = ""
LIVES = {
    "while it trains": IN_TRAINING,  # in round 2; the other site's update is in
    "when its update is accepted": "accept.after=kill@{second}",  # of round 2; nobody hears of it
    "before the head moves": "head.before=kill@2",
}


LONG = pytest.mark.long


class World:
    """A server as a process, started again whenever it was killed, and what it has counted."""

    def __init__(self, nursery: Nursery, folder: Path, algorithm: str, life: str, *, frozen: bool) -> None:
        self.folder, self.url = folder, f"http://127.0.0.1:{(port := free_port())}"
        self.names = ["a", "b"] if algorithm == "fedavg" else ["a"]
        self.in_training = life == IN_TRAINING
        (folder / "one_weight.py").write_text(MODEL.format(frozen=frozen))
        (folder / "run.toml").write_text(
            f"model.source = 'one_weight:One'\nalgorithm.name = '{algorithm}'\nnetwork.port = {port}\nrounds.total = "
            f"{ROUNDS}\n"
            f"rounds.sites = {len(self.names)}\nrounds.min_sites = {len(self.names)}\ndisk.state_dir = 'state'\n"
            "disk.min_free_bytes = 0\nnetwork.heartbeat_interval_s = 0.5\nnetwork.heartbeat_timeout_s = 60.0\n"
            + (DILOCO if algorithm == "diloco" else "")
        )

        def start(failpoints: str) -> Process:
            log = folder / "server.log"
            return nursery.start("atoll", "server", "run.toml", cwd=folder, failpoints=failpoints, log=log)

        self.kept = Kept(start, [life.format(second=2 * len(self.names))] if life else [])
        self._submitted = 0
        self._other = Threads(*(self._submit_what_was_pulled for _ in self.names[1:]))

    def _submit_what_was_pulled(self) -> None:
        with atoll.join(self.url, site="b", folder=self.folder / "b") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.state_dict(), weight=12.0)
                self._submitted += 1

    def in_step(self, number: int) -> None:
        """Called in each of the Trainer's steps, from 1 on: the fifth is in the middle of round 2."""
        if self.in_training and number == STEPS + 2:
            wait_until(lambda: self._submitted == 2 or len(self.names) == 1, "the other site's update")
            self.kept.now.kill()
            wait_until(lambda: self.kept.deaths == 1, "a new start")

    def require_each_update_once(self) -> float:
        """Every site's update of every round counted once, and the server had died; returns w of the result."""
        self._other.join()
        assert self.kept.wait() == 0
        assert self.kept.deaths == 1
        with contextlib.closing(sqlite3.connect(self.folder / "state" / "journal.sqlite")) as journal:
            tickets = "SELECT site, base_version + 1 FROM tickets WHERE state = 'counted' ORDER BY 1, 2"
            counted = journal.execute(tickets).fetchall()
        assert counted == [(site, number) for site in self.names for number in range(1, ROUNDS + 1)]
        return load_file(self.folder / "state" / "exports" / "model.safetensors")["w"].item()

    def close(self) -> None:
        self.kept.close()


@pytest.fixture
def world_of(nursery: Nursery, tmp_path: Path) -> Iterator[Callable[..., World]]:
    with contextlib.ExitStack() as stack:

        def make(algorithm: str, life: str, *, frozen: bool) -> World:
            world = World(nursery, tmp_path, algorithm, life, frozen=frozen)
            stack.callback(world.close)
            return world

        yield make


@pytest.mark.slow
@pytest.mark.covers("S1", "F6")
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("algorithm", ["fedavg", *(pytest.param(each, marks=LONG) for each in ("scaffold", "diloco"))])
def test_a_lightning_trainer_goes_on(world_of: Any, algorithm: str, life: str) -> None:
    """Three steps of rate 0.1: e = 1 − w → 0.729·e; with the other site's e the mean is 0.8645·e. Nothing twice."""
    world: World = world_of(algorithm, LIVES[life], frozen=True)

    class Told(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            world.in_step(self.steps)
            return loss

    trainer, module = trainer_of(), Told()
    atoll.integrations.lightning.patch(trainer, world.url, "a", folder=world.folder / "a")
    fit_rounds(trainer, module)
    w = world.require_each_update_once()
    assert w == pytest.approx(1 - (0.8645 if algorithm == "fedavg" else 0.729) ** ROUNDS)
    assert module.w.item() == pytest.approx(w)
    assert module.steps == ROUNDS * STEPS  # no round was trained twice


class Counted(One):
    """Says each step to the world."""

    def __init__(self, in_step: Callable[[int], None]) -> None:
        super().__init__()
        self._in_step, self.steps = in_step, 0

    def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        self.steps += 1
        self._in_step(self.steps)
        return super().forward(target)


@pytest.mark.slow
@pytest.mark.covers("S10", "F6")
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("diloco", marks=LONG)])
def test_a_transformers_trainer_goes_on(world_of: Any, tmp_path: Path, algorithm: str, life: str) -> None:
    """Momentum and schedule go on over all nine steps, as if nothing had happened."""
    world: World = world_of(algorithm, LIVES[life], frozen=False)
    model: nn.Module = Counted(world.in_step)
    callback = AtollCallback(world.url, "a", sync_every=STEPS, folder=world.folder / "a")
    trainer = trainer_for(model, 1.0, callback, tmp_path / "out")
    trainer.train()
    x = velocity = 0.0
    for number in range(ROUNDS):
        y = x
        for step in range(number * STEPS, (number + 1) * STEPS):
            velocity = MOMENTUM * velocity + (y - 1.0)
            y -= rate(step) * velocity
        x = (x + y) / 2 if algorithm == "fedavg" else y
    assert world.require_each_update_once() == pytest.approx(x, rel=1e-5)
    assert model.w.item() == pytest.approx(x, rel=1e-5)
    assert trainer.state.global_step == ROUNDS * STEPS
    assert callback.rounds == ROUNDS
