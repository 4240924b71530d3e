"""How training with Hugging Face's Trainer ends: without a server, in a finished run, by an error; what is refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers_world import STEPS, One, serving, trainer_for

import atoll
from atoll.errors import SchemaMismatch, UsageError
from atoll.integrations.transformers import AtollCallback


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., atoll.Server]]:
    with serving(tmp_path) as start:
        yield start


def test_a_weight_of_zero_is_refused(serve: Any, tmp_path: Path) -> None:
    callback = AtollCallback(serve("fedavg").url, "a", sync_every=1, weight=0.0, folder=tmp_path / "a")
    with pytest.raises(UsageError, match="weight is 0"):
        trainer_for(One(), 1.0, callback, tmp_path / "out").train()
    callback.leave()


def test_without_a_server_the_trainer_trains_as_it_would(tmp_path: Path) -> None:
    with_it, without = One(), One()
    trainer_for(with_it, 1.0, AtollCallback(sync_every=2), tmp_path / "with", max_steps=5).train()
    plain = trainer_for(without, 1.0, AtollCallback(), tmp_path / "without", max_steps=5)
    plain.remove_callback(AtollCallback)
    plain.train()
    assert torch.equal(with_it.w, without.w)


def test_after_the_training_steps_are_plain_again(serve: Any, tmp_path: Path) -> None:
    """Training ends in the middle of a round: the correction lets go of the optimizer, and the worker has left."""
    server = serve("fedprox", **{"algorithm.mu": 100.0})
    model = One()
    trainer = trainer_for(
        model, 1.0, AtollCallback(server.url, "a", sync_every=3, folder=tmp_path / "a"), tmp_path / "out", max_steps=2
    )
    optimizer = trainer.optimizer
    trainer.train()
    assert [worker.state for worker in server.status().workers] == ["left"]
    assert not optimizer._optimizer_step_pre_hooks
    assert server.status().fragments[0].version == 0


def test_a_run_that_is_over_gives_its_result_and_no_training(serve: Any, tmp_path: Path) -> None:
    server = serve("fedavg", **{"rounds.total": 1})
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:  # stays: the server waits for it
        round_ = next(iter(worker))
        round_.load_into(One())
        round_.submit({"w": torch.full((1,), 5.0)})
        assert server.wait(30)
        model = One()
        callback = AtollCallback(server.url, "b", folder=tmp_path / "b")
        trainer = trainer_for(model, 1.0, callback, tmp_path / "out")
        trainer.train()
        assert callback.finished
        assert model.w.item() == 5.0


def test_the_server_hears_why_training_failed(serve: Any, tmp_path: Path) -> None:
    class Failing(One):
        def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
            raise ValueError("no more records")

    server = serve("fedavg")
    callback = AtollCallback(server.url, "a", folder=tmp_path / "a")
    trainer = trainer_for(Failing(), 1.0, callback, tmp_path / "out")
    with pytest.raises(ValueError, match="no more records") as caught:
        trainer.train()
    callback.leave(caught.value)
    assert [worker.error for worker in server.status().workers] == ["ValueError: no more records"]


def test_another_model_is_refused_before_it_trains(serve: Any, tmp_path: Path) -> None:
    server = serve("fedavg")
    model = One()
    model.extra = nn.Parameter(torch.zeros(2))
    callback = AtollCallback(server.url, "a", folder=tmp_path / "a")
    trainer = trainer_for(model, 1.0, callback, tmp_path / "out")
    with pytest.raises(SchemaMismatch, match="extra"):
        trainer.train()
    callback.leave()
    assert trainer.state.global_step == 0


@pytest.mark.covers("S9")
@pytest.mark.parametrize(
    ("arguments", "words"), [({"world_size": 4}, "runs in 4 processes"), ({"deepspeed": "ds.json"}, "DeepSpeed")]
)
def test_what_the_callback_would_see_a_part_of_is_refused(arguments: dict[str, Any], words: str) -> None:
    args: Any = SimpleNamespace(**{"world_size": 1, "deepspeed": None, "fp16": False} | arguments)
    with pytest.raises(UsageError, match=words):
        AtollCallback().on_train_begin(args, Any, Any)  # type: ignore[arg-type]


@pytest.mark.covers("S8")
def test_scaled_gradients_are_refused_where_they_would_be_corrected(serve: Any, tmp_path: Path) -> None:
    server = serve("fedprox")
    callback = AtollCallback(server.url, "a", folder=tmp_path / "a")
    model = One()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args: Any = SimpleNamespace(
        world_size=1, deepspeed=None, fp16=True, train_batch_size=4, gradient_accumulation_steps=1
    )
    control: Any = SimpleNamespace(should_training_stop=False)
    state: Any = SimpleNamespace(global_step=0)
    with pytest.raises(UsageError, match="fp16"):
        callback.on_train_begin(args, state, control, model=model, optimizer=optimizer)
    callback.leave()


def test_a_wrong_sync_every_is_refused() -> None:
    with pytest.raises(UsageError, match="sync_every is 0"):
        AtollCallback(sync_every=0)


def test_steps_that_no_round_holds_are_told(serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """5 steps in rounds of 3: the last 2 reach nobody. A Trainer that ends with a round says nothing."""
    server = serve("fedavg")
    for most, words in (
        (3, ""),
        (5, "the Trainer ended after 2 steps of round 3; these steps are not sent, because an update needs 3 steps."),
    ):
        callback = AtollCallback(server.url, "a", sync_every=3, folder=tmp_path)
        with caplog.at_level(logging.WARNING, "atoll"):
            trainer_for(One(), 1.0, callback, tmp_path, max_steps=most).train()
        assert callback.rounds == 1
        assert [
            record.getMessage() for record in caplog.records if "are not sent" in record.message
        ] == words.splitlines()


@pytest.mark.parametrize("where", ["begin", "round"])
def test_a_callback_that_fails_does_not_stay_in_the_run(serve: Any, tmp_path: Path, where: str) -> None:
    """Nobody tells it that training ended: its heartbeats went on, and the others waited for it."""
    server = serve("fedavg")
    model = One()
    if where == "begin":
        model.extra = nn.Parameter(torch.zeros(2))
    callback = AtollCallback(server.url, "a", sync_every=1, weight=0.0, folder=tmp_path / "a")
    with pytest.raises((SchemaMismatch, UsageError)):
        trainer_for(model, 1.0, callback, tmp_path / "out").train()
    (worker,) = server.status().workers
    assert worker.state == "failed"
    assert ("is not the model of the server" if where == "begin" else "The weight is 0.0") in worker.error


@pytest.mark.parametrize("algorithm", ["fedavg", "diloco"])
def test_a_trainer_takes_the_place_of_one_that_failed(serve: Any, tmp_path: Path, algorithm: str) -> None:
    """As a notebook's cell is run again: another Trainer with another callback, as the same site."""

    class Failing(One):
        def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
            raise ValueError("no more records")

    server = serve(algorithm, **{"rounds.total": 1}, **({"diloco.sync_every": STEPS} if algorithm == "diloco" else {}))
    failed = trainer_for(
        Failing(), 1.0, AtollCallback(server.url, "a", folder=tmp_path / "a"), tmp_path / "out", max_steps=3
    )
    with pytest.raises(ValueError, match="no more records"):
        failed.train()
    trainer_for(One(), 1.0, AtollCallback(server.url, "a", folder=tmp_path / "a"), tmp_path / "out").train()
    assert server.wait(30)
    assert server.status().history[0].workers == ["a"]
