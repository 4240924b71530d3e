"""What a Trainer of Hugging Face is asked: what a callback would not see, its optimizer, samples, metrics."""

from __future__ import annotations

import inspect
import math
from typing import Any, TypeVar

from transformers import TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from atoll.errors import UsageError
from atoll.worker.arguments import finite_metrics

T = TypeVar("T")

_NO_METRICS = ("_runtime", "_per_second", "_time")
"""Ends of what the Trainer logs beside a metric of an evaluation."""


def require_plain(args: TrainingArguments) -> None:
    """Refuse what this callback would see only a part of."""
    if args.world_size > 1:
        raise UsageError(
            f"The Trainer runs in {args.world_size} processes, and each would be a worker of its own.",
            "Start one process a site: without torchrun, or with --nproc-per-node 1.",
        )
    if args.deepspeed:
        raise UsageError(
            "The Trainer runs under DeepSpeed, which keeps parameters and steps to itself.",
            "Train without it; a run of several sites does what its data parallelism would.",
        )


def callbacks_of_the_caller(kind: type[T]) -> list[T]:
    """Those of a kind that the Trainer has which calls one of its callbacks at this moment.

    A handler gives its callbacks everything but each other, and the first of two would wait before the second is
    called: so it is looked for where it calls from.
    """
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            return [callback for callback in handler.callbacks if isinstance(callback, kind)]
        frame = frame.f_back
    return []


def samples_of_step(args: TrainingArguments, state: TrainerState, loader: Any) -> int:
    """Samples behind the optimizer step that has ended: full batches, but for what is left at the end of an epoch."""
    batch = state.train_batch_size or args.train_batch_size
    full = int(batch * args.gradient_accumulation_steps)
    try:
        samples, batches = len(loader.dataset), len(loader)
    except (AttributeError, TypeError):  # a stream, whose end nobody knows
        return full
    steps = math.ceil(batches / args.gradient_accumulation_steps)
    if not steps or state.global_step % steps:
        return full
    if not (batches - 1) * batch < samples <= batches * batch:  # a sampler of its own length, or drop_last
        samples = batches * batch
    return samples - (steps - 1) * full


def metrics_in(logs: dict[str, Any]) -> dict[str, float]:
    """The training loss and `eval_…`, where they are finite numbers; not how long something took."""
    numbers = {
        key: value
        for key, value in logs.items()
        if (key == "loss" or key.startswith("eval_"))
        and not key.endswith(_NO_METRICS)
        and isinstance(value, int | float)
    }
    return finite_metrics(numbers, "trainer")
