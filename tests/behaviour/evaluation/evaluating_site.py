"""A site as a process: `evaluating_site.py SERVER SITE TARGET [WORD…]`.

Its model is one number w, which begins at 0, its data one number, the target t, and its loss (w − t)², twice that where
w is below t: a's loss of b's model is not b's of a's. In a round it sets w to t.

Other ways to train: `sgd` is a step of rate 1/2 towards t; `diloco` such steps in DiLoCo's loop, then it answers tasks;
`tasks` takes no part in training. Where it evaluates: `raises` fails, `nan` measures what is no number, `hangs` stands
still until the file SITE.go is there. `refuses` gives no model, `filters` has a filter for what it submits; `own` gives
a model that may leave, and that the filter changes. `weight=3` tells the number of its samples.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll
from atoll.filters import Cast

server, site, target = sys.argv[1], sys.argv[2], float(sys.argv[3])
words = set(sys.argv[4:])
net = nn.Linear(1, 1, bias=False)
nn.init.zeros_(net.weight)
weight = next((float(word.partition("=")[2]) for word in words if word.startswith("weight=")), None)
optimizer = torch.optim.SGD(net.parameters(), lr=0.5)


def measure(model: Any) -> dict[str, float]:
    print("evaluates", flush=True)
    if "raises" in words:
        raise ValueError("no data here")
    if "hangs" in words:
        Path(f"{site}.hangs").touch()
        while not Path(f"{site}.go").exists():
            time.sleep(0.01)
    w = (model["weight"] if "tasks" in words else model.weight).item()
    loss = (w - target) ** 2 * (2.0 if w < target else 1.0)
    return {"w": w, "loss": float("nan") if "nan" in words else loss, "distance": abs(w - target)}


def step() -> None:
    optimizer.zero_grad()
    ((net.weight - target) ** 2 / 2).sum().backward()
    optimizer.step()


def train_(fl_round: Any) -> None:
    if "sgd" in words:
        with fl_round.correct(net, optimizer):
            step()
    else:
        with torch.no_grad():
            net.weight.fill_(target)


if "diloco" in words:
    with atoll.DiLoCo(net, optimizer, server=server, site=site) as diloco:
        while not diloco.finished:
            step()
if words & {"diloco", "tasks"}:
    with atoll.tasks(server, site) as answers:
        answers.evaluates(measure, model=nn.Linear(1, 1, bias=False) if "diloco" in words else None, weight=weight)
        answers.submits(lambda: net if "diloco" in words else {"weight": torch.tensor([[target]])})
        answers.run()
else:
    with atoll.join(server, site, filters=[Cast("bf16")] if "filters" in words else []) as worker:
        worker.evaluates(measure, model=nn.Linear(1, 1, bias=False), weight=weight)
        if words & {"refuses", "own"}:
            worker.submits(lambda: None if "refuses" in words else {"weight": torch.full((1, 1), 1.0 + 2**-9)})
        for fl_round in worker:
            fl_round.load_into(net)
            train_(fl_round)
            fl_round.submit(net)
            print(f"submitted {fl_round.number}", flush=True)
print("ended", flush=True)
