"""What a simulated site of a golden simulation runs; its model goes to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from golden_model import build, inner, take_rounds, train_steps
from safetensors.torch import save_file

import atoll


def train(worker: Any) -> None:
    torch.set_num_threads(1)
    how = json.loads(sys.argv[1])
    trained = take_rounds(worker, worker.site, how)
    save_file(trained, Path(how["out"]) / f"{worker.site}-before.safetensors")


def enter_diloco(worker: Any) -> None:
    """Refused in a simulation."""
    model = build()
    with atoll.DiLoCo(model, inner(model)) as diloco:
        train_steps(diloco, model, "a")
