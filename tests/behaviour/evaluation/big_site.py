"""A site whose model is a tensor of the size that is asked for: `big_site.py SERVER SITE TARGET BYTES [lazy]`.

All elements of its model are its target t, and its loss of a model is (w − t)², w being the model's last element;
twice that where w is below t.
`lazy`: the model lies in a file, and it begins when
PID.go is there.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import atoll
from atoll.tensors.lazy_tensors import LazyState

server, site, target, nbytes = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
words = set(sys.argv[5:])


def measure(state: LazyState) -> dict[str, float]:
    last = 0.0
    for run in state.ref("weight").runs():
        last = run[-1].item()
    return {"loss": (last - target) ** 2 * (2.0 if last < target else 1.0)}


def give() -> Any:
    if "lazy" in words:
        return LazyState.open(f"{site}.safetensors")
    return {"weight": torch.full((1, nbytes // 4), target)}


if "lazy" in words:
    save_file({"weight": torch.full((1, nbytes // 4), target)}, f"{site}.safetensors")
with atoll.tasks(server, site) as worker:
    worker.evaluates(measure)
    worker.submits(give)
    print("begins", flush=True)
    while "lazy" in words and not Path(f"{os.getpid()}.go").exists():
        time.sleep(0.01)
    worker.run()
