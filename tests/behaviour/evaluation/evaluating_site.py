"""A site as a process: `evaluating_site.py SERVER SITE TARGET [WORD…]`.

Its model is one number w, its data one number, the target t, and its loss (w − t)², twice that where w is
below t: a's loss of b's model is not b's of a's. It trains in one step, to w = t.

Words: `refuses` gives no model, `raises` fails where it evaluates, `nan` measures what is no number, `tasks` takes no
part in training, `hangs` stands still where it evaluates until the file SITE.go is there.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll

server, site, target = sys.argv[1], sys.argv[2], float(sys.argv[3])
words = set(sys.argv[4:])
net = nn.Linear(1, 1, bias=False)


def measure(model: Any) -> dict[str, float]:
    print("evaluates", flush=True)
    if "raises" in words:
        raise ValueError("no data here")
    if "hangs" in words:
        Path(f"{site}.hangs").touch()
        while not Path(f"{site}.go").exists():
            time.sleep(0.01)
    w = model["weight"] if "tasks" in words else model.weight
    loss = (w.item() - target) ** 2 * (2.0 if w.item() < target else 1.0)
    return {"loss": float("nan") if "nan" in words else loss, "distance": abs(w.item() - target)}


if "tasks" in words:
    with atoll.tasks(server, site) as answers:
        answers.evaluates(measure)
        answers.submits(lambda: {"weight": torch.tensor([[target]])})
        answers.run()
else:
    with atoll.join(server, site) as worker:
        worker.evaluates(measure, model=nn.Linear(1, 1, bias=False))
        if "refuses" in words:
            worker.submits(lambda: None)
        for fl_round in worker:
            fl_round.load_into(net)
            with torch.no_grad():
                net.weight.fill_(target)
            fl_round.submit(net)
            print(f"submitted {fl_round.number}", flush=True)
print("ended", flush=True)
