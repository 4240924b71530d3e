"""A site of a run with several workflows: `ordered_site.py SERVER SITE [WORD…]`; one process for rounds and tasks.

In each round it adds 1 to its model. Tasks: `count` adds 1 to what it is sent, and tells how many rounds the site has
had; `hold` answers when the file hold.go is there. `by hand`: tasks come in a loop of the script's own, behind the
rounds. `bare`: it has no handlers.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import atoll
from atoll.testing.run import wait_until

server, site, *words = sys.argv[1:]
net, rounds = nn.Linear(1, 1, bias=False), []


def count(payload: Any) -> dict[str, int]:
    return {"sum": payload + 1, "rounds": len(rounds)}


def hold(payload: Any) -> str:
    Path(f"{site}.holds").touch()
    wait_until(Path("hold.go").exists, "hold.go", 60.0)
    return "held"


with atoll.join(server, site) as worker:
    if "by hand" not in words and "bare" not in words:
        worker.task("count")(count)
        worker.task("hold")(hold)
    for fl_round in worker:
        fl_round.load_into(net)
        with torch.no_grad():
            net.weight += 1
        fl_round.submit(net)
        rounds.append(fl_round.number)
        print(f"submitted {fl_round.number}", flush=True)
    if "by hand" in words:
        for task in worker.tasks():
            task.answer(count(task.payload))
print("ended", flush=True)
