"""What a site runs: each `trainer.fit` is a round, of whichever algorithm run.toml names."""

import os

from data import load
from lightning.pytorch import Trainer
from model import build

import atoll.integrations.lightning


def main() -> None:
    train_data, validation_data = load(os.environ.get("ATOLL_SITE", "alone"))
    trainer = Trainer(
        max_epochs=1,  # of a round
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    atoll.integrations.lightning.patch(
        trainer
    )  # the address comes from ATOLL_SERVER; without one, this trains one round, alone
    module = build()
    for number in atoll.integrations.lightning.rounds(trainer):
        measured = trainer.validate(module, validation_data, verbose=False)  # the global model: global_accuracy
        print(f"round {number}: accuracy {measured[0]['accuracy']:.3f} of the global model", flush=True)
        trainer.fit(module, train_data, validation_data)


if __name__ == "__main__":
    main()
