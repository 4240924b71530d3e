"""One worker process of the demo: what a user's training script would be, for each of the two kinds of run."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import demo_data
import torch
from demo_models import (
    CONTEXT_BYTES,
    accuracy,
    adamw,
    byte_transformer,
    digits_net,
    validation_loss,
)
from torch import Tensor, nn

import atoll
from atoll.child_processes import Terminated, raise_on_sigterm

BATCH = 8
WARM_UP_STEPS = 20
REPORT_EVERY = 5
LOCAL_EPOCHS = 2


def train_bytes(index: int, workers: int, seed: int) -> dict[str, Any]:
    """DiLoCo on this worker's share of the standard library; returns what the summary needs."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    texts, windows = demo_data.corpus(workers, seed)
    text, mine = texts[index], windows[index::workers]
    generator = torch.Generator().manual_seed(1000 * seed + index)
    model = byte_transformer()
    optimizer = adamw(model)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP_STEPS))
    with atoll.DiLoCo(model, optimizer, labels={"bytes": str(len(text))}) as diloco:
        diloco.report(validation_loss=validation_loss(model, mine))
        rounds, since, begin = diloco.rounds, 0, time.monotonic()
        while not diloco.finished:
            loss = model.loss(demo_data.batch(text, BATCH, generator))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if (since := since + 1) == REPORT_EVERY:
                tokens_per_s = since * BATCH * CONTEXT_BYTES / (time.monotonic() - begin)
                diloco.report(loss=loss.item(), tokens_per_s=tokens_per_s)
                since, begin = 0, time.monotonic()
            optimizer.step()
            warm_up.step()
            if diloco.rounds != rounds and not diloco.finished:
                # every worker now holds the same model and judges it on an equal share of the held-out bytes, so the
                # server's mean over the workers is the loss on all of them
                diloco.report(validation_loss=validation_loss(model, mine))
                rounds, since, begin = diloco.rounds, 0, time.monotonic()
        return {"steps": diloco.step, **diloco.sync_metrics}


def train_digits(index: int, workers: int, seed: int) -> dict[str, Any]:
    """Federated averaging on this site's digits."""
    torch.set_num_threads(1)
    torch.manual_seed(seed + index)
    sites, (test_images, test_labels) = demo_data.digits(workers, seed)
    images, labels = sites[index]
    model = digits_net()
    with atoll.join(labels={"images": str(len(images))}) as worker:
        steps = 0
        for fl_round in worker:
            fl_round.load_into(model)
            before = accuracy(model, test_images, test_labels)
            loss, done = _epochs(model, images, labels)
            steps += done
            fl_round.submit(model, weight=len(images), steps=done, metrics={"loss": loss, "test_accuracy": before})
        return {"steps": steps, "bytes_up": worker.bytes_up, "bytes_down": worker.bytes_down}


def _epochs(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, int]:
    """Plain local training; (mean loss of the last epoch, steps)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model.train()
    steps = 0
    losses: list[float] = []
    for _ in range(LOCAL_EPOCHS):
        losses = []
        for indices in torch.split(torch.randperm(len(images)), 32):
            if len(indices) < 2:  # batch normalisation has no variance of one image
                continue
            loss = nn.functional.cross_entropy(model(images[indices]), labels[indices])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(loss.item())
            steps += 1
    return sum(losses) / len(losses), steps


def main() -> None:
    """`python demo_worker.py ALGORITHM INDEX WORKERS SEED RESULT`; the rest comes from ATOLL_*."""
    parser = argparse.ArgumentParser()
    parser.add_argument("algorithm", choices=["diloco", "fedavg"])
    parser.add_argument("index", type=int)
    parser.add_argument("workers", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("result", type=Path)
    given = parser.parse_args()
    raise_on_sigterm()
    train = train_bytes if given.algorithm == "diloco" else train_digits
    try:
        result = train(given.index, given.workers, given.seed)
    except Terminated:
        raise SystemExit(143) from None
    temporary = given.result.with_suffix(".tmp")
    temporary.write_text(json.dumps(result), encoding="utf-8")
    os.replace(temporary, given.result)


if __name__ == "__main__":
    main()
