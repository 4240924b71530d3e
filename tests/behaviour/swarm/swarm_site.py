"""One site of a swarm as a process: a training script, which says what it does in lines of JSON."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from swarm_run import SITES, build, gradients_

import atoll

site = os.environ["ATOLL_SITE"]
held_round, _, held_until = os.environ.get("HOLD", "").partition(":")
nan_in, leave_after = os.environ.get("NAN_IN"), int(os.environ.get("LEAVE_AFTER", "0"))


def say(what: str, number: int = 0, **more: object) -> None:
    print(json.dumps({"what": what, "round": number, **more}), flush=True)


model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.join() as worker:
    for fl_round in worker:
        fl_round.load_into(model)
        say("trains", fl_round.number)
        while held_round == str(fl_round.number) and not Path(held_until).exists():
            time.sleep(0.01)
        correction = fl_round.correct(model, optimizer)
        for step in range(2):
            gradients_(model, site, 10 * fl_round.number + step)
            optimizer.step()
        if nan_in == str(fl_round.number):
            with torch.no_grad():
                model.decoder.bias[3] = float("nan")
        fl_round.submit(model, weight=SITES.get(site, 1.0), metrics={"loss": 1.0 / fl_round.number})
        say("submitted", fl_round.number)
        if fl_round.number == leave_after:
            break
    worker.load_into(model)
    state = hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values()))
    say("ends", digest=state.hexdigest(), up=worker.bytes_up, down=worker.bytes_down)
