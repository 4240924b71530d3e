"""What simulated sites run in test_simulated_trainers.py: a Trainer each, of the site that ATOLL_SITE names."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lightning_world import Tiny, data, trainer_of
from transformers_world import TARGETS, One, trainer_for

import atoll.integrations.lightning
from atoll.integrations.transformers import AtollCallback


def lightning() -> None:
    """A loop over the rounds that there are; a simulated site has one."""
    trainer = trainer_of()
    assert atoll.integrations.lightning.patch(trainer).site == os.environ["ATOLL_SITE"]
    module = Tiny(TARGETS[os.environ["ATOLL_SITE"]])
    for _ in atoll.integrations.lightning.rounds(trainer):
        trainer.fit(module, data())


def hugging_face() -> None:
    """One `train()` of a thousand steps, which ends with the round."""
    site = os.environ["ATOLL_SITE"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(One(), TARGETS[site], AtollCallback(), Path(folder))
        trainer.train()
