"""Validations of a Trainer in a DiLoCo run: their metrics are those of a global version, or are not sent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning_world import DILOCO, Tiny, data, serve, trainer_of

import atoll

H, ROUNDS = 3, 3
GLOBAL = [1 - 0.9 ** (H * version) for version in range(ROUNDS)]
"""w of each version: one site whose steps are w ← w + 0.1·(1 − w), and an outer step that takes its model over."""


def rounds_of(folder: Path, **trainer_options: Any) -> tuple[list[dict[str, float]], Any]:
    """Metrics of each round of a run whose Trainer validates as the options say, and the status at its end."""
    best = {"rounds.best_metric": "val_w", "rounds.best_mode": "max"}
    with serve(folder, "diloco", **DILOCO, **{"rounds.total": ROUNDS}, **best) as server:
        trainer = trainer_of(**trainer_options)
        atoll.integrations.lightning.patch(trainer, server.url, "a", folder=folder)
        module = Tiny()
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data(), data())
        assert server.wait(60)
        status = server.status()
    rows = (folder / "state" / "exports" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["metrics"] for row in rows], status


@pytest.mark.covers("X41")
def test_the_validation_behind_a_synchronisation_is_credited_to_its_version(tmp_path: Path) -> None:
    """It validates after every step; three steps are a round."""
    metrics, status = rounds_of(tmp_path, val_check_interval=1)
    assert ["val_w" in each for each in metrics] == [False, True, True]  # of version 0 nothing was measured
    assert [each["val_w"] for each in metrics[1:]] == pytest.approx(GLOBAL[1:])
    assert all("train_loss" in each for each in metrics[1:])
    assert (status.best.version, status.best.value) == (2, pytest.approx(GLOBAL[2]))


def test_the_validation_of_a_local_model_is_not_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It validates after the second step of three, always."""
    metrics, status = rounds_of(tmp_path, val_check_interval=2)
    assert ["val_w" in each for each in metrics] == [False] * ROUNDS
    assert status.best.version is None
    assert sum("val_check_interval" in record.getMessage() for record in caplog.records) == 1


def test_the_sanity_check_before_training_is_not_sent(tmp_path: Path) -> None:
    metrics, _ = rounds_of(tmp_path, num_sanity_val_steps=1, val_check_interval=1)
    assert ["val_w" in each for each in metrics] == [False, True, True]
