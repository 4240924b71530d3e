"""Workflows that a restart of their server must not change, and what a site does for them: argv is server and site."""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch

import atoll

ROUNDS = 3


def note(name: str, line: str) -> None:
    with Path(name).open("a") as file:
        file.write(f"{line}\n")


def loop(controller: Any, times: int = ROUNDS) -> None:
    """Three rounds of a mean; each start says what it drew at random, and which time it is for it."""
    drawn = [random.random(), np.random.rand(), torch.rand(1).item(), controller.random.random(), controller.now()]
    note("drawn.txt", json.dumps(drawn))
    sites = controller.sites(at_least=2, timeout_s=90)
    w = torch.arange(2000) / 7
    for number in range(times):
        results = controller.broadcast("train", {"w": w, "round": number}, sites=sites, min_responses=2)
        w = sum(result.payload["w"] for result in results) / len(results)
    np.save("final.npy", w.numpy())


def as_they_come(controller: Any) -> None:
    """The first result counts double; one site never answers in time, and one fails."""
    controller.sites(at_least=4, timeout_s=90)
    order: list[str] = []
    results = controller.broadcast(
        "late", {"w": torch.ones(2000)}, min_responses=2, timeout_s=6, on_result=lambda each: order.append(each.site)
    )
    note("order.txt", " ".join(order))
    try:
        controller.broadcast("late", {"w": torch.ones(3)}, sites=["c", "d"], min_responses=1, timeout_s=6)
    except atoll.AtollError as error:
        note("error.txt", str(error))
    w = sum(result.payload["w"] for result in results if result.ok)
    (last,) = controller.broadcast("train", {"w": w, "round": 9}, sites=["a"])
    np.save("final.npy", last.payload["w"].numpy())


def side_by_side(controller: Any, second: str = "train") -> None:
    """Two threads ask for tasks at the same time."""
    sites, found = controller.sites(at_least=2, timeout_s=90), {}

    def ask(site: str) -> None:
        for number in range(2):
            task = "train" if number == 0 else second
            found[site, number] = controller.send(site, task, {"w": torch.ones(4), "round": number}).payload["w"]

    threads = [threading.Thread(target=ask, args=(site,)) for site in sites]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.save("final.npy", sum(found[key] for key in sorted(found)).numpy())


if __name__ == "__main__":
    with atoll.tasks(sys.argv[1], sys.argv[2]) as worker:

        @worker.task("train")
        def train(payload: Any) -> Any:
            note(f"done-{worker.site}.txt", f"train {payload['round']}")
            return {"w": payload["w"] * 1.1 + ord(worker.site) / 3}

        @worker.task("late")
        def late(payload: Any) -> Any:
            note(f"done-{worker.site}.txt", "late")
            if worker.site == "c":
                raise ValueError("no data here")
            if worker.site == "d":
                threading.Event().wait()
            return {"w": payload["w"] * ord(worker.site) / 3}

        worker.run()
