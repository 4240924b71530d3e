"""A site as a process: argv is the server and the site's name."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import torch

import atoll

with atoll.tasks(sys.argv[1], sys.argv[2]) as worker:

    @worker.task("echo")
    def echo(payload: Any) -> Any:
        return payload

    @worker.task("train")
    def train(payload: Any) -> Any:
        return {"w": payload["w"] + len(worker.site), "site": worker.site}

    @worker.task("validate")
    def validate(payload: Any) -> Any:
        if worker.site == "b":
            raise ValueError("no data here")
        return {"accuracy": float(payload["w"].sum())}

    @worker.task("submit_model")
    def submit_model(payload: Any) -> Any:
        """A reference to what only this process has: ones."""
        return {"ref": atoll.objects.publish({"w": torch.ones(payload["elements"])})}

    @worker.task("train_from")
    def train_from(payload: Any) -> Any:
        """What came, what is behind it, and what the server has on disk meanwhile."""
        w = atoll.objects.fetch(payload["ref"])["w"]
        objects = [path.name for path in Path("state/objects").glob("*")]
        return {**payload, "kind": type(payload["ref"]).__name__, "sum": float(w.sum()), "objects": objects}

    @worker.task("hang")
    def hang(payload: Any) -> Any:
        """Stand still until killed, except where a file says that this process is the next."""
        marker = Path(f"{worker.site}.hung")
        if marker.exists():
            return {"again": True, "w": payload["w"]}
        marker.touch()
        while True:
            signal.pause()

    worker.run()
    print("ended", flush=True)
