"""One site of a DiLoCo run as a process."""

from __future__ import annotations

import hashlib
import json
import os

import torch
from swarm_run import SITES, build, gradients_

import atoll

site = os.environ["ATOLL_SITE"]
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.DiLoCo(model, optimizer, weight=SITES[site]) as diloco:
    step = 0
    while not diloco.finished:
        gradients_(model, site, step)
        optimizer.step()
        step += 1
state = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values()))
print(json.dumps({"what": "ends", "round": 0, "digest": state.hexdigest()}), flush=True)
