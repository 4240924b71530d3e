"""One site of the small streaming run as a process: a training script, which says what it does in lines of JSON."""

from __future__ import annotations

import json
import os

import torch
from kit.models import SITES, local_step, wide_model

import atoll

site = os.environ["ATOLL_SITE"]
steps = int(os.environ.get("STEPS", "60"))

model = wide_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
with atoll.DiLoCo(model, optimizer, weight=SITES[site]) as diloco:

    def say(what: str, step: int = 0) -> None:
        metrics = diloco.sync_metrics
        told = {"what": what, "step": step, "up": metrics["bytes_up"], "down": metrics["bytes_down"]}
        print(json.dumps(told), flush=True)

    say("begins")
    for step in range(steps):
        if diloco.finished:
            break
        local_step(model, optimizer, site, step)
        say("made", step)
say("ends")
