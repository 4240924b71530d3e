"""What a site runs: a Trainer with one callback more; each epoch is a round."""

import os

from data import records
from model import CONTEXT, build
from transformers import Trainer, TrainingArguments

from atoll.integrations.transformers import AtollCallback

ROUNDS = 5
"""As many epochs as the run has rounds: what the learning rate's schedule is laid out for."""


def main() -> None:
    site = os.environ.get("ATOLL_SITE", "alone")
    args = TrainingArguments(
        output_dir=f"out/{site}",
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        num_train_epochs=ROUNDS,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,  # leave it out where there is a GPU
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=build(),
        args=args,
        train_dataset=records(site, CONTEXT),
        callbacks=[AtollCallback()],  # the address comes from ATOLL_SERVER; without one, this trains alone
    )
    trainer.train()


if __name__ == "__main__":
    main()
