"""A small run with exact arithmetic, by whichever Atoll `PYTHONPATH` names.

python old_run.py whole FOLDER         # to its end; prints the digest of the final model
python old_run.py killed FOLDER        # to SIGKILL in round 3: site a's update has arrived, and b trains
python old_run.py server FOLDER        # the server of a run of one site; prints its address
python old_run.py site FOLDER URL a    # that site

It uses only what the recorded commits and today's Atoll have in common.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.testing.run import serve

SETTINGS: dict[str, Any] = {
    "algorithm.name": "fedavgm",
    "algorithm.outer_optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.5},
    "rounds.total": 4,
    "rounds.sites": 2,
    "disk.min_free_bytes": 0,
    "run.threads": 1,
}
ALONE = {"rounds.sites": 1, "rounds.total": 2, "network.heartbeat_interval_s": 0.05}
WEIGHTS = {"a": 1.0, "b": 3.0}


def build() -> nn.Module:
    """Return a model whose values are multiples of 1/2."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) / 2)
    return model


def site(url: str, name: str, folder: Path, on_third: str = "") -> None:
    """Take part in the run. `on_third`: what happens in round 3: `wait`, or `kill` after the update has arrived."""
    model = build()
    with atoll.join(url, site=name, folder=folder) as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += fl_round.number * WEIGHTS[name] / 4
            if fl_round.number == 3 and on_third == "wait":
                threading.Event().wait()
            fl_round.submit(model, weight=WEIGHTS[name], metrics={"loss": 1.0 / fl_round.number})
            if fl_round.number == 3 and on_third == "kill":
                os.kill(os.getpid(), signal.SIGKILL)


def sites(url: str, folder: Path, on_third: dict[str, str]) -> None:
    """Run both sites."""
    threads = [
        threading.Thread(target=site, args=(url, name, folder / name, on_third.get(name, "")), daemon=True)
        for name in WEIGHTS
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def result(folder: Path) -> str:
    """Return the digest of the final model's tensors."""
    tensors = load_file(folder / "state" / "exports" / "model.safetensors")
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def run(folder: Path, on_third: dict[str, str]) -> str:
    """Serve the run with its sites, and return the digest of the final model's tensors."""
    with serve(build(), folder / "state", SETTINGS) as server:
        sites(server.url, folder / "sites", on_third)
        server.run()
    return result(folder)


def main(how: str, folder: Path, url: str = "", name: str = "") -> None:
    if how == "server":
        with serve(build(), folder / "state", SETTINGS | ALONE) as server:
            print(server.url, flush=True)
            server.run()
    elif how == "site":
        site(url, name, folder / "sites" / name)
    elif how == "killed":
        run(folder, {"a": "kill", "b": "wait"})
    else:
        print(run(folder, {}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
