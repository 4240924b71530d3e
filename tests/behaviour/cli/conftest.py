"""A server of canned answers, and the command as users start it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.processes import Nursery
from kit import serve
from kit.peers import Connection, Peer, Request
from kit.processes import Outcome, command
from kit.requests import get

from atoll.protocol import routes

ROOT = Path(__file__).parents[3]

WORKER: dict[str, Any] = {
    "site": "clinic-a",
    "state": "alive",
    "doing": "training",
    "step": 1250,
    "steps_per_s": 4.5,
    "bytes_up": 3_400_000,
    "bytes_down": 1_200_000_000,
    "gradient_bytes": 5_000_000_000,
    "metrics": {"loss": 2.25},
}

STATUS: dict[str, Any] = {
    "run": "r" * 32,
    "name": "canned",
    "algorithm": "fedavg",
    "policy": "waits for all sites",
    "protocol": 1,
    "epoch": 1,
    "rounds": 3,
    "model_bytes": 4_000_000,
    "fragments": [
        {
            "fragment": 0,
            "version": 2,
            "phase": "collecting",
            "waiting_for": [{"site": "clinic-b", "for_s": 31.0}],
            "reason": "round 3 needs 2 updates",
        }
    ],
    "workers": [WORKER, WORKER | {"site": "clinic-b", "state": "dead", "error": "no heartbeat for 120 s"}],
    "history": [
        {
            "fragment": 0,
            "round": 2,
            "version": 2,
            "sites": [{"site": "clinic-a", "weight": 1.0}, {"site": "clinic-b", "weight": 3.0}],
            "metrics": {"loss": 2.5},
            "counts": {"loss": 2},
            "seconds": 0.25,
            "bytes_up": 8_000_000,
        }
    ],
}


@pytest.fixture(scope="session")
def run_info(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a server says of its run."""
    with serve(tmp_path_factory.mktemp("canned"), **{"run.name": "canned"}) as server:
        return get(server.url, routes.RUN)[1]


@pytest.fixture
def canned(run_info: dict[str, Any]) -> Iterator[SimpleNamespace]:
    """A server of canned answers: path → (status, body)."""
    answers = {"/v1/run": (200, json.dumps(run_info)), "/v1/status": (200, json.dumps(STATUS))}

    def answer(connection: Connection, request: Request) -> None:
        status, body = answers.get(request.path, (404, "nothing here"))
        connection.answer(status, body.encode())

    with Peer.answering(answer) as peer:
        yield SimpleNamespace(url=peer.url, answers=answers, requests=peer.requests)


@pytest.fixture
def atoll_command(nursery: Nursery, tmp_path: Path) -> Callable[..., Outcome]:
    """Run `atoll ARGS` in an empty folder, with further environment variables as keywords."""
    return partial(command, nursery, tmp_path)


@pytest.fixture
def script(nursery: Nursery, tmp_path: Path) -> Callable[..., Outcome]:
    """Run a script of the project, by its path from the root, in an empty folder."""

    def run(path: str, *args: str) -> Outcome:
        return command(nursery, tmp_path, *args, program=str(ROOT / path))

    return run
