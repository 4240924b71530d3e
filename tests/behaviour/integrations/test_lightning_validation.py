"""Validations of a Trainer: which model they measure, whether their metrics travel, and which version is credited."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import wait_until
from lightning_world import Tiny, data, driver_of, patched, rounds_of, serve, trainer_of
from safetensors.torch import load_file

import atoll
import atoll.integrations.lightning
from atoll.errors import UsageError
from atoll.worker.exchange.exchange import Exchange
from atoll.worker.training.federated_loop import Round

pytestmark = pytest.mark.usefixtures("each_package")


def spy(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[str]:
    """Calls of a method, which happen as before."""
    calls: list[str] = []
    real = getattr(kind, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(kind, name, call)
    return calls


@pytest.mark.covers("S4", "S13")
@pytest.mark.parametrize("other", [False, True])
def test_fit_reuses_the_version_that_validate_downloaded(
    tmp_path: Path, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If `trainer.validate` has downloaded a version, the following `fit` loads it without a second download."""
    # This holds for another module, too. Validation within the fit pulls nothing: the sanity check measures the global
    # model, and the validation after each epoch measures the trained one.
    pulled, loaded = spy(monkeypatch, Exchange, "ask_and_resend"), spy(monkeypatch, Round, "load_into")
    with serve(tmp_path) as server:
        trainer, module = patched(server, tmp_path, max_epochs=2, num_sanity_val_steps=1), Tiny(w=7.0)
        for number in (0, 1):
            begin, middle, end = (pytest.approx(1 - 0.9 ** (6 * number + steps), abs=2e-6) for steps in (0, 3, 6))
            trainer.validate(module, data(), verbose=False)
            assert module.seen[-1] == begin
            assert (len(pulled), len(loaded)) == (number + 1, 2 * number + 1)
            if other:
                module = Tiny(w=-5.0)
            trainer.fit(module, data(), data())
            assert module.seen[-3:] == [begin, middle, end]
            assert (len(pulled), len(loaded)) == (number + 1, 2 * number + 2)
        model_bytes = 3 * 4  # w and frozen in fp32
        assert driver_of(trainer).worker.bytes_down < 2 * (model_bytes + 4096)
        assert not atoll.integrations.lightning.is_running(trainer)
        metrics = [row.metrics for row in rounds_of(server)]
        assert [each["global_val_w"] for each in metrics] == pytest.approx([0.0, 1 - 0.9**6])
        assert [each["val_w"] for each in metrics] == pytest.approx([1 - 0.9**6, 1 - 0.9**12])


class Measured(Tiny):
    """Says what it is told to say, validation by validation."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = iter(losses)

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", next(self.losses))


@pytest.mark.covers("S13", "X41")
@pytest.mark.parametrize(
    ("metric", "version", "least"), [("val_loss", 2, 0.2), ("global_val_loss", 1, 0.1)], ids=["in-fit", "before-fit"]
)
def test_validation_decides_the_best_version(tmp_path: Path, metric: str, version: int, least: float) -> None:
    """The validation metrics of a round count for the version from which the round started, and decide which version is
    best.
    """
    # Round 1 starts from version 0. The weight w of version v is 1 − 0.9³ᵛ.
    before, inside = [0.5, 0.1, 0.4, 0.3], [0.6, 0.7, 0.2, 0.5]
    with serve(tmp_path, rounds=4, **{"rounds.best_metric": metric, "rounds.best_mode": "min"}) as server:
        trainer = patched(server, tmp_path)
        module = Measured([loss for both in zip(before, inside, strict=True) for loss in both])
        for _ in atoll.integrations.lightning.rounds(trainer):
            trainer.validate(module, data(), verbose=False)
            trainer.fit(module, data(), data())
        metrics = [row.metrics for row in rounds_of(server)]
        assert [line["global_val_loss"] for line in metrics] == pytest.approx(before)
        assert [line["val_loss"] for line in metrics] == pytest.approx(inside)
        wait_until(lambda: (now := server.status().best) and now.file, "the best version is written")
        best = server.status().best
        assert (best.metric, best.version, best.round) == (metric, version, version + 1)
        assert best.value == pytest.approx(least)
        assert load_file(best.file)["w"].item() == pytest.approx(1 - 0.9 ** (3 * version))


H, ROUNDS = 3, 3
GLOBAL = [1 - 0.9 ** (H * version) for version in range(ROUNDS)]
"""w of each version: one site whose steps are w ← w + 0.1·(1 − w), and an outer step that takes its model over."""


def rounds_of_diloco(folder: Path, **trainer_options: Any) -> tuple[list[dict[str, float]], Any]:
    """Metrics of each round of a run whose Trainer validates as the options say, and the status at its end."""
    best = {"rounds.best_metric": "val_w", "rounds.best_mode": "max"}
    with serve(folder, "diloco", rounds=ROUNDS, **best) as server:
        trainer, module = patched(server, folder, **trainer_options), Tiny()
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data(), data())
        return [row.metrics for row in rounds_of(server)], server.status()


@pytest.mark.covers("X41")
@pytest.mark.parametrize("sanity", [0, 1], ids=["", "with a sanity check"])
def test_diloco_validation_counts_for_its_version(tmp_path: Path, sanity: int) -> None:
    """In a DiLoCo run, a validation right after a synchronisation counts for the new version."""
    # The Trainer validates after every step, and three steps make a round. The sanity check before training is not
    # sent.
    metrics, status = rounds_of_diloco(tmp_path, val_check_interval=1, num_sanity_val_steps=sanity)
    assert ["val_w" in each for each in metrics] == [False, True, True]  # of version 0 nothing was measured
    assert [each["val_w"] for each in metrics[1:]] == pytest.approx(GLOBAL[1:])
    assert all("train_loss" in each for each in metrics[1:])
    assert (status.best.version, status.best.value) == (2, pytest.approx(GLOBAL[2]))


def test_the_validation_of_a_local_model_is_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In a DiLoCo run, the validation of a local model is not sent, and the site warns once."""
    # The Trainer always validates after the second of three steps.
    metrics, status = rounds_of_diloco(tmp_path, val_check_interval=2)
    assert ["val_w" in each for each in metrics] == [False] * ROUNDS
    assert status.best.version is None
    assert sum("val_check_interval" in record.getMessage() for record in caplog.records) == 1


def test_refuses_a_federated_fit_from_a_checkpoint(tmp_path: Path) -> None:
    """A federated fit that resumes from a checkpoint is refused, and a validation of a checkpoint is not sent to the
    server.
    """
    # The restored epochs would leave such a fit without a step, and the checkpoint would count as the global model. The
    # checkpoint comes from one epoch of plain training: w = 1 − 0.9³ = 0.271. The run's first version has w = 0.
    alone, file = trainer_of(), tmp_path / "alone.ckpt"
    alone.fit(Tiny(), data())
    alone.save_checkpoint(file)
    with serve(tmp_path, rounds=1) as server:
        trainer, module = patched(server, tmp_path), Tiny()
        assert trainer.validate(module, data(), ckpt_path=file)[0]["val_w"] == pytest.approx(0.271)
        with pytest.raises(UsageError, match=r"resumes from the checkpoint '.*alone.ckpt'.*Leave ckpt_path out"):
            trainer.fit(module, data(), ckpt_path=file)
        assert trainer.validate(module, data())[0]["val_w"] == 0.0
        trainer.fit(module, data())
        assert rounds_of(server)[0].metrics["global_val_w"] == 0.0


@pytest.mark.covers("S7")
def test_reserved_metric_names_are_refused(tmp_path: Path) -> None:
    """A fit is refused if its module logs a metric under a name that Atoll uses itself, such as `global_val_w`."""

    class Logs(Tiny):
        def on_train_epoch_end(self) -> None:
            self.log("global_val_w", 1.0)

    with serve(tmp_path) as server:
        trainer = patched(server, tmp_path)
        trainer.validate(Logs(), data(), verbose=False)
        with pytest.raises(UsageError, match=r"logs 'global_val_w'.*Log it under another name"):
            trainer.fit(Logs(), data())


WORKFLOWS = ({"kind": "train"}, {"kind": "cross_site_evaluation", "versions": ["latest", 0]})


@pytest.mark.covers("P9", "S1")
def test_lightning_sites_evaluate_after_training(tmp_path: Path) -> None:
    """After training, a Lightning site validates the models of a cross-site evaluation."""
    # `val_w` is w itself: three steps w ← w − 0.1·(w − 1) lead to 1 − 0.9³, and version 0 has w = 0.
    with serve(tmp_path, rounds=1, **{"workflow.steps": WORKFLOWS}) as server:
        trainer, module = patched(server, tmp_path), Tiny()
        atoll.integrations.lightning.evaluates(trainer, module, data())
        with pytest.raises(UsageError, match="called a second time or after fit"):
            atoll.integrations.lightning.evaluates(trainer, module)
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data(), data())
        assert module.w.item() == pytest.approx(1 - 0.9**3)  # the result, not what was evaluated last
        server.run()
    found = {cell.model: cell.metrics.get("val_w", cell.error) for cell in server.evaluation.cells}
    w = pytest.approx(1 - 0.9**3, abs=1e-6)
    assert found == {"version 1": w, "version 0": 0.0, "a": w}
    assert server.status().history[0].metrics["val_w"] == w  # of the fit; an evaluation adds nothing to a round
