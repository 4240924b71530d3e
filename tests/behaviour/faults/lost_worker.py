"""A site as a process, in either loop, which says in lines of JSON how far it is."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch
from kit.models import train_, wide_model

import atoll


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


model = wide_model()
if os.environ["LOOP"] == "federated":
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            train_(model, worker.site, fl_round.number)
            fl_round.submit(model)
            say(done=fl_round.number)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    with atoll.DiLoCo(model, optimizer) as diloco:
        while not diloco.finished:
            optimizer.zero_grad()
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            say(done=diloco.step)
            time.sleep(0.01)
    say(done=diloco.step, over=diloco.over, lost=diloco.lost)
