"""One site of the small run as a process: a training script, which says what it does in lines of JSON.

The variable LOOP is `federated` or `diloco`.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
from kit.models import SITES, local_step, train_, wide_model

import atoll

site = os.environ["ATOLL_SITE"]
held_round, _, held_until = os.environ.get("HOLD", "").partition(":")
fail_in = os.environ.get("FAIL_IN")
model = wide_model()


def say(what: str, **more: object) -> None:
    print(json.dumps({"what": what, **more}), flush=True)


def take_rounds() -> None:
    with atoll.join() as worker:

        def say_in(number: int, what: str) -> None:
            say(what, round=number, up=worker.bytes_up, down=worker.bytes_down)

        for fl_round in worker:
            say_in(fl_round.number, "begins")
            fl_round.load_into(model)
            say_in(fl_round.number, "trains")
            while held_round == str(fl_round.number) and not Path(held_until).exists():
                time.sleep(0.01)
            if fail_in == str(fl_round.number):
                raise ValueError("no such column: age")
            train_(model, site, fl_round.number)
            fl_round.submit(model, weight=SITES.get(site, 1.0), metrics={"loss": 1.0 / fl_round.number})
            say_in(fl_round.number, "submitted")
        say_in(0, "ends")


def take_steps() -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    with atoll.DiLoCo(model, optimizer, weight=SITES[site]) as diloco:
        say("begins", up=diloco.sync_metrics["bytes_up"], down=diloco.sync_metrics["bytes_down"])
        for step in range(int(os.environ.get("STEPS", "60"))):
            if diloco.finished:
                break
            local_step(model, optimizer, site, step)
            say("made", step=step)
    say("ends", over=diloco.over, lost=diloco.lost)


{"federated": take_rounds, "diloco": take_steps}[os.environ["LOOP"]]()
