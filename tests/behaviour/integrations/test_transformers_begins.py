"""A Trainer that begins again: smaller batches behind an error, a checkpoint, its best model; and two sites on one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import Threads
from lightning_world import DILOCO
from safetensors.torch import load_file
from transformers_world import MOMENTUM, STEPS, One, rate, serving, trainer_for

import atoll
from atoll.errors import UsageError
from atoll.integrations.transformers import AtollCallback


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., atoll.Server]]:
    with serving(tmp_path) as start:
        yield start


@pytest.mark.covers("X3")
@pytest.mark.parametrize("added", [False, True], ids=["given", "added"])
@pytest.mark.parametrize("workers", [1, 2])
def test_two_sites_on_one_trainer_are_refused_before_either_joins(
    serve: Any, tmp_path: Path, added: bool, workers: int
) -> None:
    """With two workers the first waited for the second for ever, with one the second put it out of the run."""
    server = serve("fedavg", **{"rounds.sites": workers})
    first, second = (AtollCallback(server.url, site, sync_every=1, folder=tmp_path / site) for site in ("a", "b"))
    trainer = trainer_for(One(), 1.0, first, tmp_path / "out")
    trainer.add_callback(second)
    if not added:  # in one list from the begin
        trainer.callback_handler.callbacks.remove(second)
        trainer.callback_handler.callbacks.insert(0, second)
    with pytest.raises(
        UsageError, match=r"has 2 Atoll callbacks, for the sites ('a', 'b'|'b', 'a'), but a Trainer is one site"
    ):
        trainer.train()
    assert server.status().workers == []
    if workers == 1:
        trainer.remove_callback(second)
        trainer.train()
        assert first.finished


class OutOfMemory(One):
    """At the given call, as a device that is full; and what else happens then."""

    def __init__(self, at: int, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._at, self._before, self.calls = at, before, 0

    def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == self._at:
            self._before()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(target)


@pytest.mark.covers("S10")
def test_a_site_that_tries_smaller_batches_keeps_its_place_in_the_round(serve: Any, tmp_path: Path) -> None:
    """Another site has submitted: had this one left to join anew, the round would have closed without it."""
    server = serve("fedavg", **{"rounds.sites": 2})
    submitted = threading.Event()

    def other() -> None:
        with atoll.join(server.url, site="b", folder=tmp_path / "b") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.load_into(One()), weight=12.0)
                submitted.set()

    model = OutOfMemory(2, lambda: submitted.wait(30))
    callback = AtollCallback(server.url, "a", sync_every=STEPS, folder=tmp_path / "a")
    trainer = trainer_for(model, 1.0, callback, tmp_path / "out", auto_find_batch_size=True)
    sites = Threads(other)
    trainer.train()
    sites.join()
    assert server.wait(30)
    history = server.status().history
    assert [row.workers for row in history] == [["a", "b"]] * 3
    assert [row.weights for row in history] == [[9.0, 12.0]] * 3  # batches of int(0.9·4) = 3, three to a round


@pytest.mark.covers("S10")
@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("fedprox", marks=pytest.mark.long), "scaffold", "diloco"])
def test_smaller_batches_begin_the_round_anew(serve: Any, tmp_path: Path, algorithm: str) -> None:
    """The second step of round 1 fails. A round is begun again from w = 0; DiLoCo keeps the step that it has.

    Momentum and schedule are the Trainer's: given by hand they go on from where the first step left them.
    """
    local = {"algorithm.mu": 0.0} if algorithm == "fedprox" else {}
    server = serve(algorithm, **{"rounds.total": 1}, **DILOCO if algorithm == "diloco" else local)
    callback = AtollCallback(server.url, "a", sync_every=STEPS, folder=tmp_path / "a")
    model = OutOfMemory(2)
    trainer = trainer_for(model, 1.0, callback, tmp_path / "out", auto_find_batch_size=True)
    trainer.train()
    assert server.wait(30)
    assert callback.finished
    # the first step: g = −1, v = −1, w = 0.1
    rates, w = [rate(1), rate(2), rate(3)], 0.0
    velocity = -1.0
    if algorithm == "diloco":
        rates, w = rates[: STEPS - 1], 0.1
    for each in rates:
        velocity = MOMENTUM * velocity + (w - 1.0)
        w -= each * velocity
    assert model.w.item() == pytest.approx(w, rel=1e-5)
    assert [row.workers for row in server.status().history] == [["a"]]


def test_from_a_checkpoint_come_momentum_and_schedule_and_from_the_run_the_weights(serve: Any, tmp_path: Path) -> None:
    """Four steps, the last one in round 2, and a checkpoint; another process begins round 2 anew with step 5's rate."""
    server = serve("fedavg", **{"rounds.total": 2})
    x, velocity = 0.0, 0.0
    for step in range(STEPS):
        velocity = MOMENTUM * velocity + (x - 1.0)
        x -= rate(step) * velocity
    velocity = MOMENTUM * velocity + (x - 1.0)  # the fourth, whose weights stay local
    for most in (4, 1000):
        model = One()
        callback = AtollCallback(server.url, "a", sync_every=STEPS, folder=tmp_path / "a")
        keeps = {"save_strategy": "steps", "save_steps": 4, "max_steps": most}
        trainer = trainer_for(model, 1.0, callback, tmp_path / "out", **keeps)
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4") if most > 4 else None)
    for step in (4, 5, 6):
        velocity = MOMENTUM * velocity + (x - 1.0)
        x -= rate(step) * velocity
    assert trainer.state.global_step == 7
    assert model.w.item() == pytest.approx(x, rel=1e-5)
    assert [row.weights for row in server.status().history] == [[12.0]] * 2


def test_the_best_model_of_a_trainer_is_a_global_one_and_takes_the_results_place(serve: Any, tmp_path: Path) -> None:
    """An evaluation at the end of a round measures, and a checkpoint holds, the new global model."""
    server = serve("fedavg")
    model = One()
    callback = AtollCallback(server.url, "a", folder=tmp_path / "a")
    keeps = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "eval_loss"}
    trainer = trainer_for(
        model, 1.0, callback, tmp_path / "out", load_best_model_at_end=True, greater_is_better=True, **keeps
    )
    trainer.train()
    assert server.wait(30)
    x, velocity = 0.0, 0.0
    for step in range(STEPS):
        velocity = MOMENTUM * velocity + (x - 1.0)
        x -= rate(step) * velocity
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-3")
    assert model.w.item() == pytest.approx(x, rel=1e-5)  # version 1, whose loss is the greatest
    assert load_file(server.exports / "model.safetensors")["w"].item() > x
