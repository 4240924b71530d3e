"""A site as a process, or of a simulation, that keeps the rounds it took and a mean of what it saw in `worker.state`.

What it submits depends on its state: the result of a run has other bits if a state was lost, or counts twice.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import atoll


def build() -> dict[str, Tensor]:
    return {"w": torch.zeros(5)}


def train(worker: Any) -> None:
    for fl_round in worker:
        model, state = fl_round.state_dict(), worker.state
        rounds, mean = state.get("rounds", []), state.get("mean", torch.full((5,), float(len(worker.site))))
        print(json.dumps({"round": fl_round.number, "found": rounds}), flush=True)
        state["rounds"] = [*rounds, fl_round.number]
        state["mean"] = 0.9 * mean + 0.1 * model["w"] + 0.01 * fl_round.number
        mark = os.environ.get("KILL_ONCE")
        if mark and fl_round.number == 3 and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        fl_round.submit({"w": model["w"] + state["mean"]})


if __name__ == "__main__":
    with atoll.join() as joined:
        train(joined)
