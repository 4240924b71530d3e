"""What a worker runs: an ordinary loop around one optimizer. Atoll sees `optimizer.step()`, and synchronises every
`sync_every` of them (run.toml); in between nothing is sent.
"""

import os

import torch
from data import batches
from model import CONTEXT, build
from torch import nn

import atoll

STEPS = 200
"""Without a server; with one, its run says when it is over."""


def main() -> None:
    site = os.environ.get("ATOLL_SITE", "alone")
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with atoll.DiLoCo(model, optimizer) as diloco:  # ATOLL_SERVER says where; without one, this trains alone
        for step, window in enumerate(batches(site, CONTEXT), start=1):
            predicted = model(window[:, :-1])
            loss = nn.functional.cross_entropy(predicted.flatten(0, 1), window[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            if step % 10 == 0:  # before step(), which synchronises: the report belongs to that round
                diloco.report(loss=loss.item())
                print(f"step {step}: loss {loss.item():.3f}", flush=True)
            optimizer.step()
            if diloco.finished or (step == STEPS and "ATOLL_SERVER" not in os.environ):
                break


if __name__ == "__main__":
    main()
