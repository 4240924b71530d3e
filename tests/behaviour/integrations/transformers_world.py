"""A model of one weight under Hugging Face's Trainer, whose numbers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from kit.servers import new_server
from torch import nn

import atoll
from atoll.integrations.transformers import AtollCallback

TARGETS = {"a": 1.0, "b": -3.0}  # each site's loss is (w − target)²/2, so its gradient is w − target
STEPS, ROUNDS, MOMENTUM, MU = 3, 3, 0.5, 0.3


def rate(step: int) -> float:
    """The schedule over all steps of the run; it must not begin anew with a round."""
    return 0.1 / (1 + step)


class One(nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, target: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": ((self.w - target) ** 2 / 2).mean(), "logits": self.w.expand(len(target), 1)}


def trainer_for(
    model: nn.Module, target: float, callback: AtollCallback, folder: Path, **arguments: Any
) -> transformers.Trainer:
    """Plain SGD with momentum, its rate after `rate`, 12 records of the site's target in batches of 4."""
    common: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": 1000,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "label_names": ["target"],
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=MOMENTUM)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**common | arguments),
        train_dataset=[{"target": torch.tensor(target)}] * 12,
        eval_dataset=[{"target": torch.tensor(target)}] * 4,
        optimizers=(optimizer, schedule),
        callbacks=[callback],
    )


@contextmanager
def serving(folder: Path) -> Iterator[Callable[..., atoll.Server]]:
    """Starts servers of runs of this model, and stops them at the end."""
    with ExitStack() as stack:

        def start(algorithm: str, **options: Any) -> atoll.Server:
            common: dict[str, Any] = {"rounds.sites": 1, "rounds.total": ROUNDS, "disk.min_free_bytes": 0}
            server = new_server(
                One(),
                **{"network.port": 0, "disk.state_dir": folder / "state", "algorithm.name": algorithm},
                **common | options,
            )
            stack.callback(server.stop)
            return server.start()

        yield start
