"""Low-communication training: any loop around one optimizer; Atoll synchronises every `sync_every` steps.

python train.py                                              trains alone, without a server
atoll worker --server URL --site NAME -- python train.py     takes part in a run
"""

import os
import zlib
from collections.abc import Iterator

import torch
from model import build
from torch import Tensor, nn

import atoll

STEPS = 400
BATCH = 32
SITE = os.environ.get("ATOLL_SITE", "alone")


def batches(site: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Your data goes here. These are made: ten shared patterns, and noise of its own."""
    patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(zlib.crc32(site.encode()))
    while True:
        labels = torch.randint(10, (BATCH,), generator=own)
        yield patterns[labels] + 2.0 * torch.randn(BATCH, 1, 8, 8, generator=own), labels


def loss_of(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def main() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(SITE)
    with atoll.DiLoCo(
        model, optimizer
    ) as diloco:  # the address comes from ATOLL_SERVER; without one, this trains alone
        for step in range(1, STEPS + 1):
            loss = loss_of(model, *next(data))
            optimizer.zero_grad()
            loss.backward()
            if step % 20 == 0:  # before step(), which synchronises: the report belongs to that round
                diloco.report(loss=loss.item())
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            optimizer.step()
            if diloco.finished:
                break


if __name__ == "__main__":
    main()
