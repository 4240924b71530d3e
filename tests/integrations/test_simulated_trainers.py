"""Scripts with a Trainer as virtual workers: their rounds, by hand. The engine is one of this process, which has
imported what they need; the station is the one of every engine."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import simulated_trainers
import torch
from lightning_world import One as LightningOne
from safetensors.torch import load_file
from transformers_world import MOMENTUM, STEPS, TARGETS, One, rate

import atoll
from atoll.simulate import client as client_module
from atoll.simulate import simulation, station
from atoll.simulate.jobs import Beginning, Heard, Job

ROUNDS = 2


class Here:
    """Trains virtual workers in a thread of this process."""

    name = "here"
    capacity = 1

    def __init__(self, *_: Any) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()

    def start(self, beginning: Beginning, heard: Heard) -> None:
        trains = station.Station(beginning)

        def serve() -> None:
            while (job := self._jobs.get()) is not None:
                heard.answered(job, trains.train(job.site, job.ticket, [*job.outcomes], job.base.fd, job.spool_fd))

        self._thread = threading.Thread(target=serve)
        self._thread.start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


def sgd(x: float, target: float) -> float:
    """Three steps of rate 0.1 on (w − target)²/2."""
    for _ in range(STEPS):
        x -= 0.1 * (x - target)
    return x


def momentum(x: float, target: float) -> float:
    """Three steps whose schedule and momentum begin anew, as a script does that is run for each round."""
    velocity = 0.0
    for step in range(STEPS):
        velocity = MOMENTUM * velocity + x - target
        x -= rate(step) * velocity
    return x


@pytest.mark.covers("V1")
@pytest.mark.parametrize(
    ("client", "model", "trained"),
    [(simulated_trainers.lightning, LightningOne, sgd), (simulated_trainers.hugging_face, One, momentum)],
    ids=["lightning", "hugging_face"],
)
def test_each_round_is_a_fit_of_the_virtual_worker(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    client: Callable[[], None],
    model: Callable[[], torch.nn.Module],
    trained: Callable[[float, float], float],
) -> None:
    monkeypatch.setattr(simulation, "LocalEngine", Here)
    monkeypatch.setattr(station, "_say_little", lambda: None)  # loggers are the tests'
    monkeypatch.setattr(client_module, "inside", False)  # a station says it is
    monkeypatch.setattr(sys, "path", [*sys.path])
    run = atoll.Simulation(
        model(), client=client, workers=[*TARGETS], rounds=ROUNDS, algorithm="fedavg", state_dir=tmp_path / "state"
    )
    done = run.run()
    expected = 0.0
    for _ in range(ROUNDS):
        expected = sum(trained(expected, target) for target in TARGETS.values()) / len(TARGETS)
    assert (done.rounds, done.worker_rounds, done.failed) == (ROUNDS, ROUNDS * len(TARGETS), {})
    assert load_file(done.model)["w"].item() == pytest.approx(expected, abs=1e-6)
