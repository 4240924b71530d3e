"""A site that trains in some other way: `other_site.py SERVER SITE TARGET HOW`; its data is its target t.

`diloco`: in DiLoCo's loop, then it answers tasks. `rounds`: in the federated loop. `filtered`: it has a filter for what
it submits, and gives no model; `filtered own`: but one that it says may leave, and that passes the filter.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import atoll
from atoll.filters import Cast

server, site, target, how = sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]
net = nn.Linear(1, 1, bias=False)
nn.init.zeros_(net.weight)


def measure(model: nn.Linear) -> dict[str, float]:
    return {"w": model.weight.item(), "loss": (model.weight.item() - target) ** 2}


def step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    ((net.weight - target) ** 2 / 2).sum().backward()
    optimizer.step()


def register(worker: Any) -> None:
    worker.evaluates(measure, model=nn.Linear(1, 1, bias=False))


optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
if how == "diloco":
    with atoll.DiLoCo(net, optimizer, server=server, site=site) as diloco:
        while not diloco.finished:
            step(optimizer)
    with atoll.tasks(server, site) as worker:
        register(worker)
        worker.submits(lambda: net)
        worker.run()
else:
    filters = [Cast("bf16")] if "filtered" in how else []
    with atoll.join(server, site, filters=filters) as worker:
        register(worker)
        if how == "filtered own":
            worker.submits(lambda: {"weight": torch.full((1, 1), 1.0 + 2**-9)})
        for fl_round in worker:
            fl_round.load_into(net)
            with fl_round.correct(net, optimizer):
                step(optimizer)
            fl_round.submit(net)
print("ended", flush=True)
