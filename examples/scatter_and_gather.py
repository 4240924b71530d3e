"""Federated averaging as a workflow of one's own: scatter the model, gather what the sites made of it.

    python examples/scatter_and_gather.py

Starts a server with the workflow `main`, and a process for each site, which answers the tasks `train` and `validate`.
Between two machines: `workflow = "scatter_and_gather.py:main"` in the server's run file, and `site()` at each site.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

import atoll

ROUNDS, SITES = 5, ("clinic-a", "clinic-b")


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


# -- at the server


def main(controller: Any) -> None:
    state: dict[str, Tensor] = dict(build().state_dict())
    sites = controller.sites(at_least=len(SITES), timeout_s=60)
    for number in range(1, ROUNDS + 1):
        results = controller.broadcast("train", state, sites=sites, min_responses=len(sites), timeout_s=60)
        state = mean([result.payload for result in results])
        measured = controller.broadcast("validate", state, sites=sites, min_responses=1, timeout_s=60)
        losses = [result.payload["loss"] for result in measured if result.ok]
        print(f"round {number}: loss {sum(losses) / len(losses):.4f}", flush=True)


def mean(answers: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The mean of the models, weighted by samples."""
    total = sum(answer["samples"] for answer in answers)
    names = answers[0]["model"]
    return {name: sum(answer["model"][name] * (answer["samples"] / total) for answer in answers) for name in names}


# -- at a site


def site() -> None:
    """ATOLL_SERVER and ATOLL_SITE name the run and this site."""
    generator = torch.Generator().manual_seed(SITES.index(os.environ["ATOLL_SITE"]))
    inputs = torch.randn(200, 4, generator=generator)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]) + 0.1
    model = build()
    with atoll.tasks() as worker:

        @worker.task("train")
        def train(state: dict[str, Tensor]) -> dict[str, Any]:
            model.load_state_dict(state)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(5):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
            return {"model": dict(model.state_dict()), "samples": len(inputs)}

        @worker.task("validate")
        def validate(state: dict[str, Tensor]) -> dict[str, float]:
            model.load_state_dict(state)
            with torch.no_grad():
                return {"loss": nn.functional.mse_loss(model(inputs), targets).item()}

        worker.run()


if __name__ == "__main__":
    if "ATOLL_SITE" in os.environ:
        site()
    else:
        with (
            tempfile.TemporaryDirectory() as folder,
            atoll.Server(workflow=main, settings={"network.port": 0, "disk.state_dir": f"{folder}/state"}) as server,
        ):
            told = os.environ | {"ATOLL_SERVER": server.url}
            workers = [subprocess.Popen([sys.executable, __file__], env=told | {"ATOLL_SITE": name}) for name in SITES]
            server.run()
            sys.exit(max(worker.wait() for worker in workers))
