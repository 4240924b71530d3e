"""A model of one weight under Hugging Face's Trainer, whose numbers can be worked out by hand.

Transformers takes some seconds to import: `trainer_of` does it, so that only processes that need it wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll

TARGETS = {"a": 1.0, "b": -3.0}  # each site's loss is (w − target)²/2, so its gradient is w − target
STEPS, ROUNDS, MOMENTUM = 3, 3, 0.5


def rate(step: int) -> float:
    """The schedule over all steps of the run; it must not begin anew with a round."""
    return 0.1 / (1 + step)


def descend(steps: Iterable[int], w: float = 0.0, velocity: float = 0.0, target: float = 1.0) -> tuple[float, float]:
    """The weight and its velocity after these steps of the schedule: SGD with momentum, by hand."""
    for step in steps:
        velocity = MOMENTUM * velocity + (w - target)
        w -= rate(step) * velocity
    return w, velocity


class One(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.w - target) ** 2 / 2).mean(), "logits": self.w.expand(len(target), 1)}


class Failing(One):
    def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        raise ValueError("no more records")


def arguments(folder: Path, **more: Any) -> Any:
    """Quiet TrainingArguments of batches of 4, at most 1000 steps, output in `folder`/out."""
    import transformers

    quiet: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": 4,
        "max_steps": 1000,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    return transformers.TrainingArguments(**quiet | more)


OURS = ("sync_every", "weight", "filters")


def trainer_of(
    server: atoll.Server | str | None,
    folder: Path,
    model: nn.Module | None = None,
    *,
    site: str = "a",
    target: float = TARGETS["a"],
    **options: Any,
) -> Any:
    """A Trainer of 12 records of the site's target that takes part in a run, with SGD whose rate is that of `rate`.

    `sync_every`, `weight` and `filters` go to the callback, other options to `arguments`.
    """
    import transformers

    from atoll.integrations.transformers import AtollCallback

    ours = {key: options.pop(key) for key in OURS if key in options}
    url = server.url if isinstance(server, atoll.Server) else server
    model = model or One()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    common = {"max_grad_norm": 0.0, "logging_steps": 1, "label_names": ["target"]}
    return transformers.Trainer(
        model=model,
        args=arguments(folder, **common | options),
        train_dataset=[{"target": torch.tensor(target)}] * 12,
        eval_dataset=[{"target": torch.tensor(target)}] * 4,
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)),
        callbacks=[AtollCallback(url, site, folder=folder / site if url else None, **ours)],
    )


def callback_of(trainer: Any) -> Any:
    """The Trainer's callback of Atoll."""
    from atoll.integrations.transformers import AtollCallback

    return next(each for each in trainer.callback_handler.callbacks if isinstance(each, AtollCallback))
