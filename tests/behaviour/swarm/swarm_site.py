"""One site of a swarm as a process: a training script. The variable LOOP is `federated` or `diloco`."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from kit import tensors_digest
from kit.models import local_step, wide_model
from swarm_world import SITES, submit, train_in

import atoll
from atoll.protocol import routes

routes.LONG_POLL_S = 2.0  # as in the tests
site = os.environ["ATOLL_SITE"]
held_round, _, held_until = os.environ.get("HOLD", "").partition(":")
model = wide_model()
if os.environ["LOOP"] == "federated":
    with atoll.join(swarm=True) as worker:
        for fl_round in worker:
            train_in(fl_round, fl_round.load_into(model), site)
            print("trained", fl_round.number, flush=True)
            while held_round == str(fl_round.number) and not Path(held_until).exists():
                time.sleep(0.01)
            submit(fl_round, model, site)
        worker.load_into(model)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.DiLoCo(model, optimizer, weight=SITES[site], swarm=True) as diloco:
        step = 0
        while not diloco.finished:
            local_step(model, optimizer, site, step)
            step += 1
print("digest", tensors_digest(dict(model.state_dict())), flush=True)
