"""Hugging Face's Trainer as a worker: one `train()` over many rounds, against the same arithmetic in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from kit import together
from kit.servers import new_server
from lightning_world import DILOCO
from safetensors.torch import load_file
from transformers_world import MOMENTUM, MU, ROUNDS, STEPS, TARGETS, One, rate, serving, trainer_for

import atoll
from atoll.errors import UsageError
from atoll.filters import NormClip
from atoll.integrations.transformers import AtollCallback, metrics_in


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., atoll.Server]]:
    with serving(tmp_path) as start:
        yield start


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
def test_one_train_spans_the_run_and_keeps_momentum_and_schedule(
    serve: Any, tmp_path: Path, algorithm: str, options: dict[str, Any]
) -> None:
    server = serve(algorithm, **{"rounds.sites": 2}, **options)
    models, trainers = {site: One() for site in TARGETS}, {}
    for site, target in TARGETS.items():
        callback = AtollCallback(server.url, site, sync_every=STEPS, folder=tmp_path / site)
        trainers[site] = trainer_for(models[site], target, callback, tmp_path / "out" / site)
    together(*(trainer.train for trainer in trainers.values()), timeout_s=100)
    assert server.wait(30)
    for site, model in models.items():
        assert model.w.item() == pytest.approx(reference(algorithm), rel=1e-5)  # the result, at both
        assert trainers[site].state.global_step == STEPS * ROUNDS  # the run's end is the Trainer's
    assert [row.weights for row in server.status().history] == [[12.0, 12.0]] * ROUNDS  # 3 steps of 4 records


@pytest.mark.covers("S16")
def test_a_diloco_run_is_joined_as_one(serve: Any, tmp_path: Path) -> None:
    """Outer SGD, lr 0.7, Nesterov 0.9: m ← 0.9·m + Δ, θ ← θ − 0.7·(Δ + 0.9·m); inner momentum and schedule go on."""
    server = serve("diloco", **{"diloco.sync_every": STEPS, "aggregation.upload_codec.name": "none", "rounds.total": 2})
    model = One()
    callback = AtollCallback(server.url, "a", folder=tmp_path / "a")
    trainer = trainer_for(model, TARGETS["a"], callback, tmp_path / "out")
    trainer.train()
    theta, outer, velocity = 0.0, 0.0, 0.0
    for number in range(2):
        w = theta
        for step in range(number * STEPS, (number + 1) * STEPS):
            velocity = MOMENTUM * velocity + (w - TARGETS["a"])
            w -= rate(step) * velocity
        outer = 0.9 * outer + (theta - w)
        theta -= 0.7 * ((theta - w) + 0.9 * outer)
    assert model.w.item() == pytest.approx(theta, rel=1e-5)
    assert (trainer.state.global_step, callback.rounds, callback.finished) == (2 * STEPS, 2, True)


@pytest.mark.covers("S16")
def test_a_round_is_an_epoch_by_default_and_metrics_travel(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch is 3 steps. Evaluations at epochs measure the global model, as it was loaded just before."""
    server = serve("fedavg", **{"rounds.total": 2})
    monkeypatch.setenv("ATOLL_SERVER", server.url)  # as `atoll worker` starts a script
    monkeypatch.setenv("ATOLL_SITE", "clinic-a")
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "files"))
    trainer = trainer_for(One(), 1.0, AtollCallback(), tmp_path / "out", eval_strategy="epoch", eval_on_start=True)
    trainer.train()
    assert trainer.state.global_step == 6
    assert [row.workers for row in server.status().history] == [["clinic-a"]] * 2
    first, second = (row.metrics for row in server.status().history)
    # before training w = 0, and the loss (0 − 1)²/2; after the first round w = x₁, by the reference's own steps
    x, velocity = 0.0, 0.0
    for step in range(3):
        velocity = MOMENTUM * velocity + (x - 1.0)
        x -= rate(step) * velocity
    assert first["eval_loss"] == pytest.approx(0.5)
    assert second["eval_loss"] == pytest.approx((x - 1.0) ** 2 / 2, rel=1e-4)
    assert set(first) == set(second) == {"loss", "eval_loss"}


def evaluated_every(
    steps: int, serve: Any, folder: Path, *, rounds: int = ROUNDS, **arguments: Any
) -> tuple[list[dict[str, float]], Any]:
    """Metrics of each round of a DiLoCo run whose Trainer evaluates so often, and the status at its end."""
    best = {"rounds.best_metric": "eval_loss", "rounds.best_mode": "min"}
    server = serve("diloco", **DILOCO, **{"rounds.total": rounds}, **best)
    arguments |= {"eval_strategy": "steps", "eval_steps": steps}
    trainer_for(One(), 1.0, AtollCallback(server.url, "a", folder=folder / "a"), folder / "out", **arguments).train()
    assert server.wait(30)
    status = server.status()
    return [row.metrics for row in status.history], status


@pytest.mark.covers("X41")
def test_diloco_sends_the_evaluation_of_a_global_version_for_that_version(serve: Any, tmp_path: Path) -> None:
    """It evaluates after every step and before the first; three steps are a round. The outer step takes w over."""
    metrics, status = evaluated_every(1, serve, tmp_path, eval_on_start=True)
    versions, w, velocity = [0.0], 0.0, 0.0
    for step in range(STEPS * (ROUNDS - 1)):
        velocity = MOMENTUM * velocity + (w - 1.0)
        w -= rate(step) * velocity
        if (step + 1) % STEPS == 0:
            versions.append(w)
    assert [each["eval_loss"] for each in metrics] == pytest.approx([(w - 1) ** 2 / 2 for w in versions], rel=1e-4)
    assert all("loss" in each for each in metrics[1:])
    assert (status.best.version, status.best.value) == (2, pytest.approx((versions[2] - 1) ** 2 / 2, rel=1e-4))


def test_diloco_does_not_send_the_evaluation_of_a_local_model(
    serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It evaluates after the second step of three; the third ends the run."""
    metrics, status = evaluated_every(2, serve, tmp_path, rounds=1)
    assert not any("eval_loss" in each for each in metrics)
    assert status.best.version is None
    assert sum("eval_steps" in record.getMessage() for record in caplog.records) == 1


def test_an_evaluation_behind_the_training_is_the_scripts_own(
    serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve("diloco", **{"diloco.sync_every": STEPS})
    trainer = trainer_for(
        One(), 1.0, AtollCallback(server.url, "a", folder=tmp_path / "a"), tmp_path / "out", max_steps=1
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert not any("eval_steps" in record.getMessage() for record in caplog.records)


def test_what_the_trainer_logs_beside_metrics_stays_here() -> None:
    logs = {
        "loss": 0.5,
        "eval_loss": 0.25,
        "eval_f1": float("nan"),
        "eval_runtime": 3.0,
        "eval_samples_per_second": 9.0,
        "eval_model_preparation_time": 0.1,
        "eval_name": "x",
        "epoch": 1.0,
        "grad_norm": 2.0,
        "learning_rate": 0.1,
    }
    assert metrics_in(logs) == {"loss": 0.5, "eval_loss": 0.25}


def test_accumulated_gradients_are_one_step(serve: Any, tmp_path: Path) -> None:
    """Batches of 2, 2 to a step: 3 steps an epoch, 12 records."""
    server = serve("scaffold", **{"rounds.total": 1})
    callback = AtollCallback(server.url, "a", sync_every=3, folder=tmp_path / "a")
    arguments = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}  # 12 records in 3 steps
    trainer = trainer_for(One(), 1.0, callback, tmp_path / "out", **arguments)
    trainer.train()
    assert trainer.state.global_step == 3
    assert server.status().history[0].weights == [12.0]


@pytest.mark.covers("S10", "S16")
@pytest.mark.parametrize("algorithm", ["scaffold", "diloco"])
def test_a_language_model_with_tied_weights_takes_part(tmp_path: Path, algorithm: str) -> None:
    """Its head is its embedding, its optimizer the Trainer's own with two groups, its schedule linear."""
    build = transformers.GPT2LMHeadModel
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    start, model = build(config), build(config)
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 16
    options: dict[str, Any] = {
        "algorithm.name": algorithm,
        "rounds.total": 2,
        "diloco.sync_every": 2,
        "disk.min_free_bytes": 0,
    }
    with new_server(start, **{"network.port": 0, "disk.state_dir": tmp_path / "state"}, **options) as server:
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path / "out"),
            per_device_train_batch_size=4,
            max_steps=20,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        callback = AtollCallback(server.url, "a", sync_every=2, folder=tmp_path / "a")
        trainer = transformers.Trainer(model=model, args=args, train_dataset=rows, callbacks=[callback])
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


@pytest.mark.parametrize(("weight", "shown"), [(2.5, 2.5), (lambda: 7, 7.0)], ids=["number", "function"])
def test_a_weight_may_be_given(serve: Any, tmp_path: Path, weight: Any, shown: float) -> None:
    server = serve("fedavg", **{"rounds.total": 1})
    callback = AtollCallback(server.url, "a", sync_every=1, weight=weight, folder=tmp_path / "a")
    trainer_for(One(), 1.0, callback, tmp_path / "out").train()
    assert server.status().history[0].weights == [shown]


@pytest.mark.covers("T8", "S10")
@pytest.mark.parametrize("algorithm", ["fedavg", "diloco"])
def test_what_the_trainer_sends_passes_the_sites_filters(serve: Any, tmp_path: Path, algorithm: str) -> None:
    """Towards 1 the three rounds move w by more than 0.05 each (the last one by 0.067): by 0.05 behind the filter."""
    server = serve(algorithm, **DILOCO if algorithm == "diloco" else {})
    model = One()
    filters = [NormClip(0.05)]
    callback = AtollCallback(server.url, "a", sync_every=STEPS, folder=tmp_path / "a", filters=filters)
    trainer_for(model, 1.0, callback, tmp_path / "out").train()
    assert server.wait(30)
    assert load_file(server.exports / "model.safetensors")["w"].item() == pytest.approx(0.15)
    assert model.w.item() == pytest.approx(0.15)
    with pytest.raises(UsageError, match="is not a filter"):
        AtollCallback(filters=["drop"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "sync_every", "weights"),
    [
        ({}, None, [10.0, 10.0]),
        ({}, 2, [8.0, 2.0 + 4.0]),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, None, [10.0, 10.0]),
        ({"dataloader_drop_last": True}, None, [8.0, 8.0]),
    ],
    ids=["an epoch", "across an epoch", "accumulated", "drop last"],
)
def test_an_update_counts_with_the_records_it_saw(
    serve: Any, tmp_path: Path, arguments: dict[str, Any], sync_every: int | None, weights: list[float]
) -> None:
    """10 records in batches of 4, or 5 of 2 in steps of two: the last step of an epoch has two of them."""
    server = serve("fedavg", **{"rounds.total": 2})
    callback = AtollCallback(server.url, "a", sync_every=sync_every, folder=tmp_path / "a")
    trainer = trainer_for(One(), 1.0, callback, tmp_path / "out", **arguments)
    trainer.train_dataset = trainer.train_dataset[:10]
    trainer.train()
    assert [row.weights for row in server.status().history] == [[weight] for weight in weights]


def test_a_metric_travels_once(serve: Any, tmp_path: Path) -> None:
    """An evaluation before the first round is no measure of the second."""
    server = serve("fedavg", **{"rounds.total": 2})
    callback = AtollCallback(server.url, "a", sync_every=2, folder=tmp_path / "a")
    trainer_for(One(), 1.0, callback, tmp_path / "out", eval_on_start=True).train()
    assert [set(row.metrics) for row in server.status().history] == [{"loss", "eval_loss"}, {"loss"}]
