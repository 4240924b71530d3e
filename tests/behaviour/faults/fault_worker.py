"""One site of the small run as a process: a training script, which says what it does in lines of JSON."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from kit.models import SITES, train_, wide_model

import atoll

site = os.environ["ATOLL_SITE"]
held_round, _, held_until = os.environ.get("HOLD", "").partition(":")
fail_in = os.environ.get("FAIL_IN")

model = wide_model()
with atoll.join() as worker:

    def say(what: str, number: int = 0) -> None:
        print(json.dumps({"what": what, "round": number, "up": worker.bytes_up, "down": worker.bytes_down}), flush=True)

    for fl_round in worker:
        say("begins", fl_round.number)
        fl_round.load_into(model)
        say("trains", fl_round.number)
        while held_round == str(fl_round.number) and not Path(held_until).exists():
            time.sleep(0.01)
        if fail_in == str(fl_round.number):
            raise ValueError("no such column: age")
        train_(model, site, fl_round.number)
        fl_round.submit(model, weight=SITES.get(site, 1.0), metrics={"loss": 1.0 / fl_round.number})
        say("submitted", fl_round.number)
    say("ends")
