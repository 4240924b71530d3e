"""The script of every worker: a training loop. Atoll synchronises after every `sync_every` optimizer steps (run.toml).

python train.py                                              trains alone, without a server
atoll worker --server URL --site NAME -- python train.py     takes part in a run
"""

import os
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import atoll

STEPS = 400
BATCH = 32


def build(hidden: int = 64) -> nn.Module:
    """Build the model. Every worker calls this; the server, too, for the initial model, with `model.args`."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10))


def batches(site: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images [BATCH, 1, 8, 8] and labels. Put your data here; this example is ten patterns with noise."""
    patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(zlib.crc32(site.encode()))
    while True:
        labels = torch.randint(10, (BATCH,), generator=own)
        yield patterns[labels] + 2.0 * torch.randn(BATCH, 1, 8, 8, generator=own), labels


def main() -> None:
    """Train the model. Atoll synchronises it within calls of `optimizer.step()`."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(os.environ.get("ATOLL_SITE", "alone"))
    with atoll.DiLoCo(model, optimizer) as diloco:  # the address comes from ATOLL_SERVER; without it, this trains alone
        for step in range(1, STEPS + 1):
            images, labels = next(data)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            if step % 20 == 0:  # before optimizer.step(), which synchronises: the report belongs to that round
                diloco.report(loss=loss.item())
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            optimizer.step()
            if diloco.finished:
                break


if __name__ == "__main__":
    main()
