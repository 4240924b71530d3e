"""A server of a small run, in the test's process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

import atoll
from atoll.testing import run
from kit.models import SITES, build_model

SETTINGS: dict[str, Any] = {
    "algorithm": "fedavg",
    "outer_optimizer": "sgd",
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
    "num_workers": len(SITES),
    "rounds": 3,
    "part_bytes": 2**16,
    "min_free_bytes": 0,
    "heartbeat_interval_s": 0.5,
    "heartbeat_timeout_s": 60.0,
    "threads": 1,
}
"""With outer momentum and unequal weights, a lost, doubled or reordered update changes the result."""


@contextmanager
def serve(folder: Path, model: nn.Module | str | None = None, **settings: Any) -> Iterator[atoll.Server]:
    """A started server with its state in `folder`/state; stopped at the end of the block.

    Its port was of no server before: a site that another test has left may still ask for that one, and join this run.

    Args:
        model: the initial model or its name, by default `build_model()`.
        settings: any settings of a run; they replace those of SETTINGS. None takes a key out.
    """
    given = {key: value for key, value in (SETTINGS | settings).items() if value is not None}
    state_dir = given.pop("state_dir", folder / "state")
    with run.serve(model or build_model(), state_dir, **given) as server:
        yield server
