"""Learning-rate schedules across rounds: the module knows its round; a schedule that restarts is reported."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_world import Tiny, data, serve, trainer_of

import atoll
import atoll.integrations.lightning

pytestmark = pytest.mark.usefixtures("each_package")


class Restarting(Tiny):
    """Halves the rate after each epoch: with one epoch in a fit, never."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ByRound(Restarting):
    """Halves the rate in each round, and has a schedule within the round, too."""

    def configure_optimizers(self) -> Any:
        self.lr = 0.1 * 0.5 ** (self.atoll_round - 1)
        return super().configure_optimizers()


def rates_of(folder: Path, module: Any, rounds: int = 3) -> list[float]:
    """The rate at the end of each round's fit, and the numbers that the module was given are right."""
    rates = []
    with serve(folder, **{"rounds.total": rounds}) as server:
        trainer = trainer_of()
        atoll.integrations.lightning.patch(trainer, server.url, "a", folder=folder)
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data())
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])
            assert (module.atoll_round, module.atoll_rounds) == (len(rates), rounds)
    return rates


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "schedule" in record.getMessage()]


@pytest.mark.covers("L14")
def test_warns_once_of_an_epoch_schedule_that_restarts_in_each_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "atoll"):
        assert rates_of(tmp_path, Restarting()) == [0.05, 0.05, 0.05]  # one epoch of each: 0.1 · 0.5
    assert len(warnings_in(caplog)) == 1
    assert "atoll_round" in warnings_in(caplog)[0]


def test_a_module_builds_its_schedule_from_the_number_of_the_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "atoll"):
        assert rates_of(tmp_path, ByRound()) == [0.05, 0.025, 0.0125]
    assert not warnings_in(caplog)


def test_a_module_that_trains_alone_is_in_round_one_of_one() -> None:
    trainer, module = trainer_of(), ByRound()
    atoll.integrations.lightning.patch(trainer)
    trainer.fit(module, data())
    assert (module.atoll_round, module.atoll_rounds) == (1, 1)
