"""Simulations in the test's own process: the trainer of every engine, which begins at once, since all is imported."""

from __future__ import annotations

import queue
import sys
import threading
from typing import Any

import pytest

from atoll.simulate import script, simulated_site, simulation
from atoll.simulate.engine import Beginning, Heard, Job


class Here:
    """Trains simulated sites in a thread of this process."""

    name = "here"
    capacity = 1

    def __init__(self, *_: Any) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue()
        self._threads: list[threading.Thread] = []

    def start(self, beginning: Beginning, heard: Heard) -> None:
        trains = simulated_site.SiteTrainer(beginning)

        def serve() -> None:
            while (job := self._jobs.get()) is not None:
                heard.job_done(job, trains.train(job.round, job.base.fd, job.spool_fd))

        self._threads.append(threading.Thread(target=serve))
        self._threads[0].start()

    def put(self, job: Job) -> None:
        self._jobs.put(job)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        script.inside = False  # the trainer has said that it is


def simulate_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `atoll.Simulation` take this engine, and leave the process as it was."""
    monkeypatch.setattr(simulation, "Engine", Here)
    monkeypatch.setattr(simulated_site, "_say_little", lambda: None)  # loggers are the tests'
    for name in ("path", "argv"):
        monkeypatch.setattr(sys, name, [*getattr(sys, name)])
    monkeypatch.delenv("ATOLL_SITE", raising=False)
