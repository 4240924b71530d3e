"""A worker that has left its run: every call says so at once, and a new worker can join."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import build_model, serve

import atoll
from atoll.errors import UsageError


@pytest.fixture
def server(tmp_path: Path) -> Any:
    with serve(tmp_path, sites=1, rounds=3) as server:
        yield server


LATER: dict[str, Callable[[Any], object]] = {
    "enter": lambda worker: worker.__enter__(),
    "iterate": lambda worker: next(iter(worker)),
    "load_into": lambda worker: worker.load_into(build_model()),
    "run": lambda worker: (worker.task("any")(print), worker.run()),
    "tasks": lambda worker: next(worker.tasks()),
}


@pytest.mark.parametrize(
    ("join", "call"), [*(("join", call) for call in LATER), *(("tasks", call) for call in ("enter", "run", "tasks"))]
)
def test_refuses_every_call_of_a_worker_that_has_left(
    tmp_path: Path, server: atoll.Server, join: str, call: str
) -> None:
    how = {"folder": tmp_path / "workers"} if join == "join" else {}
    with getattr(atoll, join)(server.url, site="a", **how) as worker:
        pass
    with pytest.raises(UsageError):
        LATER[call](worker)
    with atoll.join(server.url, site="a", folder=tmp_path / "workers") as again:
        again.load_into(build_model())


@pytest.mark.parametrize("call", ["load_into", "submit", "state_dict"])
def test_refuses_the_round_of_a_worker_that_has_left(tmp_path: Path, server: atoll.Server, call: str) -> None:
    model = build_model()
    with atoll.join(server.url, site="a", folder=tmp_path / "workers") as worker:
        fl_round = next(iter(worker))
        fl_round.load_into(model)
    with pytest.raises(UsageError):
        getattr(fl_round, call)(*([] if call == "state_dict" else [model]))
