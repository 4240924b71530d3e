"""Hugging Face's Trainer as a worker: one `train()` over many rounds, against the same arithmetic in Python."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import Threads, together
from kit.results import of_sites
from kit.servers import plain_server
from lightning_world import DILOCO
from safetensors.torch import load_file
from torch import nn
from transformers_world import (
    MOMENTUM,
    ROUNDS,
    STEPS,
    TARGETS,
    Failing,
    One,
    arguments,
    callback_of,
    descend,
    rate,
    trainer_of,
)

import atoll
from atoll.errors import SchemaMismatch, UsageError

MU = 0.3


def reference(algorithm: str) -> float:
    """x after all rounds of both sites: momentum and schedule go on, only w is replaced."""
    x, c = 0.0, 0.0
    own, velocity = dict.fromkeys(TARGETS, 0.0), dict.fromkeys(TARGETS, 0.0)
    for number in range(ROUNDS):
        ends, deltas = [], []
        for site, target in TARGETS.items():
            y, rates = x, 0.0
            for step in range(number * STEPS, (number + 1) * STEPS):
                gradient = y - target + (MU * (y - x) if algorithm == "fedprox" else 0.0)
                velocity[site] = MOMENTUM * velocity[site] + gradient
                y -= rate(step) * velocity[site]
                rates += rate(step)
                if algorithm == "scaffold":
                    y -= rate(step) * (c - own[site])
            plus = own[site] - c + (x - y) / rates
            ends.append(y)
            deltas.append(plus - own[site])
            own[site] = plus
        x, c = sum(ends) / 2, c + sum(deltas) / 2
    return x


@pytest.mark.slow
@pytest.mark.covers("S10", "S16")
@pytest.mark.parametrize(
    ("algorithm", "options"), [("fedavg", {}), ("fedprox", {"algorithm.mu": MU}), ("scaffold", {})]
)
def test_one_train_call_spans_all_rounds(serve: Any, tmp_path: Path, algorithm: str, options: dict[str, Any]) -> None:
    """One `train()` call of a Transformers Trainer spans all rounds. Momentum and schedule continue from round to
    round.
    """
    server = serve(algorithm, sites=2, **options)
    trainers = [
        trainer_of(server, tmp_path, site=site, target=target, sync_every=STEPS) for site, target in TARGETS.items()
    ]
    together(*(trainer.train for trainer in trainers), timeout_s=100)
    assert server.wait(30)
    for trainer in trainers:
        assert trainer.model.w.item() == pytest.approx(reference(algorithm), rel=1e-5)  # the result, at both
        assert trainer.state.global_step == STEPS * ROUNDS  # the run's end is the Trainer's
    assert of_sites(server.status().history, "weight") == [[12.0, 12.0]] * ROUNDS  # 3 steps of 4 records


@pytest.mark.covers("S16")
def test_the_callback_takes_part_in_a_diloco_run(serve: Any, tmp_path: Path) -> None:
    """A Transformers Trainer takes part in a DiLoCo run. Its inner momentum and schedule continue from
    round to round.
    """
    # By hand, with outer SGD, lr 0.7 and Nesterov momentum 0.9: m ← 0.9·m + Δ and θ ← θ − 0.7·(Δ + 0.9·m).
    trainer = trainer_of(serve("diloco", H=STEPS, codec="none", rounds=2), tmp_path)
    trainer.train()
    theta, outer, velocity = 0.0, 0.0, 0.0
    for number in range(2):
        w, velocity = descend(range(number * STEPS, (number + 1) * STEPS), theta, velocity)
        outer = 0.9 * outer + (theta - w)
        theta -= 0.7 * ((theta - w) + 0.9 * outer)
    assert trainer.model.w.item() == pytest.approx(theta, rel=1e-5)
    callback = callback_of(trainer)
    assert (trainer.state.global_step, callback.rounds, callback.finished) == (2 * STEPS, 2, True)


@pytest.mark.covers("S10", "S16")
@pytest.mark.parametrize("algorithm", ["scaffold", "diloco"])
def test_a_language_model_with_tied_weights_takes_part(tmp_path: Path, algorithm: str) -> None:
    """A language model whose head is its embedding takes part, and the weights stay tied."""
    # The Trainer makes its own optimizer, with two parameter groups and a linear schedule.
    import transformers

    from atoll.integrations.transformers import AtollCallback

    build = transformers.GPT2LMHeadModel
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    start, model = build(config), build(config)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    with plain_server(tmp_path, start, algorithm=algorithm, rounds=2, H=2) as server:
        trainer = transformers.Trainer(
            model=model,
            args=arguments(tmp_path, max_steps=20),
            train_dataset=rows,
            callbacks=[AtollCallback(server.url, "a", sync_every=2, folder=tmp_path / "a")],
        )
        trainer.train()
        assert server.wait(30)
    assert trainer.state.global_step == 4
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx([5e-5 * 16 / 20] * 2)  # linear to 0 over max_steps
    assert model.lm_head.weight is model.transformer.wte.weight
    again = build(config)
    again.load_state_dict(load_file(server.exports / "model.safetensors"))
    for (name, value), other in zip(again.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(value, other), name
    assert not torch.equal(model.lm_head.weight, start.lm_head.weight)


# -- what an update counts, and which metrics travel

ACCUMULATED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({}, [10.0, 10.0]),
        ({"sync_every": 2}, [8.0, 2.0 + 4.0]),
        (ACCUMULATED, [10.0, 10.0]),
        (ACCUMULATED | {"sync_every": 2}, [8.0, 2.0 + 4.0]),
        ({"dataloader_drop_last": True}, [8.0, 8.0]),
        ({"sync_every": 1, "weight": 2.5}, [2.5, 2.5]),
        ({"sync_every": 1, "weight": lambda: 7}, [7.0, 7.0]),
    ],
    ids=["an epoch", "across", "accumulated", "accumulated across", "drop last", "a number", "a function"],
)
def test_updates_count_records_or_a_given_weight(
    serve: Any, tmp_path: Path, options: dict[str, Any], weights: list[float]
) -> None:
    """The weight of a Trainer's update is the number of records that it trained on, unless the user gives a weight."""
    # There are 10 records in batches of 4, or in batches of 2 with two batches per step. The last step of an epoch then
    # has two records. With two steps per round, the first round has two full steps. The second round has the last step
    # of the epoch and the first step of the next one.
    server = serve(rounds=2)
    trainer = trainer_of(server, tmp_path, **options)
    trainer.train_dataset = trainer.train_dataset[:10]
    trainer.train()
    assert of_sites(server.status().history, "weight") == [[weight] for weight in weights]


@pytest.mark.covers("S16")
def test_a_round_is_an_epoch_by_default(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default, a round of a Transformers Trainer is an epoch, and its metrics are sent with the update."""
    # An epoch has 3 steps. An evaluation at the end of an epoch measures the global model that was just loaded.
    server = serve(rounds=2)
    monkeypatch.setenv("ATOLL_SERVER", server.url)  # as `atoll worker` starts a script
    monkeypatch.setenv("ATOLL_SITE", "clinic-a")
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "files"))
    trainer = trainer_of(None, tmp_path, site=None, eval_strategy="epoch", eval_on_start=True)
    trainer.train()
    assert trainer.state.global_step == 6
    assert [row.workers for row in server.status().history] == [["clinic-a"]] * 2
    first, second = (row.metrics for row in server.status().history)
    x, _ = descend(range(3))
    assert first["eval_loss"] == pytest.approx(0.5)  # before training w = 0, and the loss (0 − 1)²/2
    assert second["eval_loss"] == pytest.approx((x - 1.0) ** 2 / 2, rel=1e-4)
    assert set(first) == set(second) == {"loss", "eval_loss"}


def test_a_metric_is_sent_only_once(serve: Any, tmp_path: Path) -> None:
    """An evaluation before round 1 is sent with round 1, and is not sent again with round 2."""
    server = serve(rounds=2)
    trainer_of(server, tmp_path, sync_every=2, eval_on_start=True).train()
    assert [set(row.metrics) for row in server.status().history] == [{"loss", "eval_loss"}, {"loss"}]


def test_sends_only_finite_metrics_of_the_trainer() -> None:
    """The callback sends the Trainer's finite metrics. It sends neither NaN, nor texts, nor the Trainer's preparation
    time.
    """
    from atoll.integrations.transformers import metrics_in

    others = {"eval_f1": float("nan"), "eval_model_preparation_time": 0.1, "eval_name": "x"}
    assert metrics_in({"loss": 0.5, **others}) == {"loss": 0.5}


def evaluated_every(
    steps: int, serve: Any, folder: Path, *, rounds: int = ROUNDS, **options: Any
) -> tuple[list[dict[str, float]], Any]:
    """Metrics of each round of a DiLoCo run whose Trainer evaluates so often, and the status at its end."""
    best = {"rounds.best_metric": "eval_loss", "rounds.best_mode": "min"}
    server = serve("diloco", **DILOCO, **best, rounds=rounds)
    trainer_of(server, folder, eval_strategy="steps", eval_steps=steps, **options).train()
    assert server.wait(30)
    status = server.status()
    return [row.metrics for row in status.history], status


@pytest.mark.covers("X41")
def test_diloco_sends_evaluations_of_global_versions(serve: Any, tmp_path: Path) -> None:
    """In a DiLoCo run, the Trainer's evaluation of a global version is sent and counts for this version."""
    # The Trainer evaluates before the first step and after every step, and three steps make a round. The outer step
    # adopts w as it is.
    metrics, status = evaluated_every(1, serve, tmp_path, eval_on_start=True)
    versions = [descend(range(STEPS * number))[0] for number in range(ROUNDS)]
    assert [each["eval_loss"] for each in metrics] == pytest.approx([(w - 1) ** 2 / 2 for w in versions], rel=1e-4)
    assert all("loss" in each for each in metrics[1:])
    assert (status.best.version, status.best.value) == (2, pytest.approx((versions[2] - 1) ** 2 / 2, rel=1e-4))


def test_diloco_sends_no_evaluation_of_local_models(
    serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a DiLoCo run, an evaluation of a local model is not sent, and the site warns once."""
    # The Trainer evaluates after the second of three steps, and the third step ends the run.
    metrics, status = evaluated_every(2, serve, tmp_path, rounds=1)
    assert not any("eval_loss" in each for each in metrics)
    assert status.best.version is None
    assert sum("eval_steps" in record.getMessage() for record in caplog.records) == 1


def test_an_evaluation_after_training_causes_no_warning(
    serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Atoll does not warn of an evaluation that a script makes after the training."""
    trainer = trainer_of(serve("diloco", H=STEPS), tmp_path, max_steps=1)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert not any("eval_steps" in record.getMessage() for record in caplog.records)


def test_a_trainers_best_model_is_a_global_version(serve: Any, tmp_path: Path) -> None:
    """With `load_best_model_at_end`, the Trainer ends with the global version that measured best, not with the last
    one.
    """
    # An evaluation and a checkpoint at the end of a round take the new global model.
    server = serve()
    keeps = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "eval_loss"}
    trainer = trainer_of(server, tmp_path, load_best_model_at_end=True, greater_is_better=True, **keeps)
    trainer.train()
    assert server.wait(30)
    x, _ = descend(range(STEPS))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-3")
    assert trainer.model.w.item() == pytest.approx(x, rel=1e-5)  # version 1, whose loss is the greatest
    assert load_file(server.exports / "model.safetensors")["w"].item() > x


# -- smaller batches behind an error, and a checkpoint


class OutOfMemory(One):
    """At the second call, as a device that is full; and what else happens then."""

    def __init__(self, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._before, self.calls = before, 0

    def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == 2:
            self._before()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(target)


@pytest.mark.covers("S10")
def test_a_site_that_tries_smaller_batches_stays_in_its_round(serve: Any, tmp_path: Path) -> None:
    """A site that runs out of memory and tries smaller batches stays in its round.

    The other site has already submitted: if this site left and joined again, the round would close without it.
    """
    server = serve(sites=2)
    submitted = threading.Event()

    def other() -> None:
        with atoll.join(server.url, site="b", folder=tmp_path / "b") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.load_into(One()), weight=12.0)
                submitted.set()

    model = OutOfMemory(lambda: submitted.wait(30))
    trainer = trainer_of(server, tmp_path, model, sync_every=STEPS, auto_find_batch_size=True)
    sites = Threads(other)
    trainer.train()
    sites.join()
    assert server.wait(30)
    history = server.status().history
    assert [row.workers for row in history] == [["a", "b"]] * 3
    assert of_sites(history, "weight") == [[9.0, 12.0]] * 3  # batches of int(0.9·4) = 3, three to a round


@pytest.mark.covers("S10")
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("fedavg", {}),
        pytest.param("fedprox", {"algorithm.mu": 0.0}, marks=pytest.mark.long),
        ("scaffold", {}),
        ("diloco", DILOCO),
    ],
    ids=["fedavg", "fedprox", "scaffold", "diloco"],
)
def test_trying_smaller_batches_restarts_the_round(
    serve: Any, tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    """If a step fails for lack of memory, the site trains the round again from its start, with smaller batches."""
    # The second step of round 1 fails. DiLoCo keeps the step that it has made. Momentum and schedule belong to the
    # Trainer and continue from the first step.
    server = serve(algorithm, rounds=1, **settings)
    trainer = trainer_of(server, tmp_path, OutOfMemory(), sync_every=STEPS, auto_find_batch_size=True)
    trainer.train()
    assert server.wait(30)
    assert callback_of(trainer).finished
    # the first step: g = −1, v = −1, w = 0.1
    w, _ = descend((1, 2), 0.1, -1.0) if algorithm == "diloco" else descend((1, 2, 3), 0.0, -1.0)
    assert trainer.model.w.item() == pytest.approx(w, rel=1e-5)
    assert [row.workers for row in server.status().history] == [["a"]]


def test_a_checkpoint_restores_momentum_and_schedule(serve: Any, tmp_path: Path) -> None:
    """A Trainer that resumes from a checkpoint takes momentum and schedule from it, and the weights from the run."""
    # The first process makes four steps, the last one in round 2, and saves a checkpoint. The second process starts
    # round 2 again with the rate of step 5.
    server = serve(rounds=2)
    for most, checkpoint in ((4, None), (1000, str(tmp_path / "out" / "checkpoint-4"))):
        keeps = {"save_strategy": "steps", "save_steps": 4, "max_steps": most}
        trainer = trainer_of(server, tmp_path, sync_every=STEPS, **keeps)
        trainer.train(resume_from_checkpoint=checkpoint)
    x, velocity = descend(range(STEPS))
    _, velocity = descend([STEPS], x, velocity)  # the fourth, whose weights stay local
    x, _ = descend((4, 5, 6), x, velocity)
    assert trainer.state.global_step == 7
    assert trainer.model.w.item() == pytest.approx(x, rel=1e-5)
    assert of_sites(server.status().history, "weight") == [[12.0]] * 2


# -- how training ends


def test_the_callback_changes_nothing_without_a_server(tmp_path: Path) -> None:
    """Without a server, a Transformers Trainer gives the same bits with Atoll's callback as without it."""
    with_it = trainer_of(None, tmp_path, sync_every=2, max_steps=5)
    without = trainer_of(None, tmp_path, max_steps=5)
    without.remove_callback(type(callback_of(without)))
    for trainer in (with_it, without):
        trainer.train()
    assert torch.equal(with_it.model.w, without.model.w)


def test_a_trainer_joining_a_finished_run_gets_the_result(serve: Any, tmp_path: Path) -> None:
    """A Trainer that joins a finished run trains nothing and has the run's result."""
    server = serve(rounds=1)
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:  # stays: the server waits for it
        round_ = next(iter(worker))
        round_.load_into(One())
        round_.submit({"w": torch.full((1,), 5.0)})
        assert server.wait(30)
        trainer = trainer_of(server, tmp_path, site="b")
        trainer.train()
        assert callback_of(trainer).finished
        assert trainer.model.w.item() == 5.0


def test_warns_of_steps_that_were_not_sent(serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If training ends in the middle of a round, the site and the server warn of the steps that were not sent."""
    # 5 steps in rounds of 3 leave 2 steps unsent, and the correction removes its hooks from the optimizer. A Trainer
    # that ends with a round causes no warning.
    server = serve("fedprox", **{"algorithm.mu": MU})
    said = "the Trainer ended after 2 steps of round 3, which are not sent, because an update needs 3 steps"
    for most, warnings in ((3, []), (5, [f"a: {said}", f"a reports: {said}"])):  # at the site and at the server
        trainer = trainer_of(server, tmp_path, sync_every=3, max_steps=most)
        optimizer = trainer.optimizer
        with caplog.at_level(logging.WARNING, "atoll"):
            trainer.train()
        assert callback_of(trainer).rounds == 1
        assert [message for message in caplog.messages if "are not sent" in message] == warnings
        assert not optimizer._optimizer_step_pre_hooks
        assert [worker.state for worker in server.status().workers] == ["left"]


# -- what fails or is refused


class Larger(One):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("model", "options", "error", "words", "told"),
    [
        (Failing, {}, ValueError, "no more records", "ValueError: no more records"),
        (Larger, {"sync_every": 1}, SchemaMismatch, "extra", "is not the model of the run"),
        (One, {"sync_every": 1, "weight": lambda: -1.0}, UsageError, "weight is -1", "The weight is -1.0"),
    ],
    ids=["in a step", "at the begin", "in a round"],
)
def test_failed_training_leaves_the_run_with_the_error(
    serve: Any, tmp_path: Path, model: type[One], options: dict[str, Any], error: type[Exception], words: str, told: str
) -> None:
    """A site whose training fails leaves the run with the error, so that the other sites do not wait for it. A model
    that does not fit is refused before it trains.
    """
    server = serve()
    trainer = trainer_of(server, tmp_path, model(), **options)
    with pytest.raises(error, match=words) as caught:
        trainer.train()
    if model is Failing:  # no hook of a callback is called for that: the script says it
        callback_of(trainer).leave(caught.value)
    (worker,) = server.status().workers
    assert worker.state == "failed"
    assert told in worker.error
    assert trainer.state.global_step == (1 if "weight" in options else 0)


@pytest.mark.parametrize(("algorithm", "settings"), [("fedavg", {}), ("diloco", {"H": STEPS})])
def test_a_new_trainer_replaces_a_failed_one(
    serve: Any, tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    """After a Trainer has failed, another Trainer may take part as the same site.

    This happens when a cell of a notebook is run again.
    """
    server = serve(algorithm, rounds=1, **settings)
    with pytest.raises(ValueError, match="no more records"):
        trainer_of(server, tmp_path, Failing(), max_steps=3).train()
    trainer_of(server, tmp_path).train()
    assert server.wait(30)
    assert server.status().history[0].workers == ["a"]


@pytest.mark.covers("X3")
@pytest.mark.parametrize("added", [False, True], ids=["given", "added"])
@pytest.mark.parametrize("workers", [1, 2])
def test_refuses_two_sites_on_one_trainer(serve: Any, tmp_path: Path, added: bool, workers: int) -> None:
    """Two sites on one Transformers Trainer are refused before either of them joins."""
    # Otherwise, with two workers the first site would wait for ever for the second. With one worker the second would
    # displace the first.
    server = serve(sites=workers)
    trainer, second = trainer_of(server, tmp_path, sync_every=1), callback_of(trainer_of(server, tmp_path, site="b"))
    first = callback_of(trainer)
    if added:
        trainer.add_callback(second)
    else:  # in one list from the begin
        trainer.callback_handler.callbacks.insert(0, second)
    words = r"has 2 Atoll callbacks, for the sites ('a', 'b'|'b', 'a'), but a Trainer is one site"
    with pytest.raises(UsageError, match=words):
        trainer.train()
    assert server.status().workers == []
    if workers == 1:
        trainer.remove_callback(second)
        trainer.train()
        assert first.finished


@pytest.mark.covers("S9")
@pytest.mark.parametrize(
    ("given", "words"), [({"world_size": 4}, "runs in 4 processes"), ({"deepspeed": "ds.json"}, "DeepSpeed")]
)
def test_trainers_that_split_a_model_are_refused(given: dict[str, Any], words: str) -> None:
    """A Trainer that runs in several processes or with DeepSpeed is refused, because the callback would see only a
    part.
    """
    from atoll.integrations.transformers import AtollCallback

    args: Any = SimpleNamespace(**{"world_size": 1, "deepspeed": None, "fp16": False} | given)
    with pytest.raises(UsageError, match=words):
        AtollCallback().on_train_begin(args, Any, Any)


@pytest.mark.covers("S8")
def test_scaled_gradients_are_refused(serve: Any, tmp_path: Path) -> None:
    """A Trainer with `fp16` is refused if the algorithm corrects steps, because its gradients are scaled."""
    trainer = trainer_of(serve("fedprox"), tmp_path)
    args: Any = SimpleNamespace(
        world_size=1, deepspeed=None, fp16=True, train_batch_size=4, gradient_accumulation_steps=1
    )
    control, state = SimpleNamespace(should_training_stop=False), SimpleNamespace(global_step=0)
    with pytest.raises(UsageError, match="fp16"):
        callback_of(trainer).on_train_begin(args, state, control, model=trainer.model, optimizer=trainer.optimizer)
    callback_of(trainer).leave()


def test_the_callback_refuses_wrong_arguments() -> None:
    from atoll.integrations.transformers import AtollCallback

    with pytest.raises(UsageError, match="sync_every is 0"):
        AtollCallback(sync_every=0)
    with pytest.raises(UsageError, match="is not a filter"):
        AtollCallback(filters=["drop"])
