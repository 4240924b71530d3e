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
    "algorithm.name": "fedavg",
    "algorithm.outer_optimizer.name": "sgd",
    "algorithm.outer_optimizer.lr": 0.7,
    "algorithm.outer_optimizer.momentum": 0.9,
    "rounds.sites": len(SITES),
    "rounds.total": 3,
    "network.part_bytes": 2**16,
    "disk.min_free_bytes": 0,
    "network.heartbeat_interval_s": 0.5,
    "network.heartbeat_timeout_s": 60.0,
    "run.threads": 1,
}
"""With outer momentum and unequal weights, a lost, doubled or reordered update changes the result."""

DEFAULT_OUTER_OPTIMIZER: dict[str, Any] = {
    "algorithm.outer_optimizer.name": None,
    "algorithm.outer_optimizer.lr": None,
    "algorithm.outer_optimizer.momentum": None,
}
"""Takes what SETTINGS says of it out: with FedAvg, the new model is the mean of the sites'."""

ENDLESS: dict[str, Any] = {"algorithm.name": "diloco", "rounds.total": 0}
"""DiLoCo, until it is stopped."""

PLAIN_DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.0,
    "aggregation.upload_codec.name": "none",
}
"""DiLoCo whose new model is the mean of the sites'."""

PLAIN: dict[str, Any] = {"algorithm.name": "fedavg", "network.port": 0, "disk.min_free_bytes": 0}
"""With plain averages, numbers are derived by hand."""


SHORT = {
    "algorithm": "algorithm.name",
    "sites": "rounds.sites",
    "rounds": "rounds.total",
    "codec": "aggregation.upload_codec.name",
    "part_bytes": "network.part_bytes",
    "K": "diloco.num_fragments",
    "H": "diloco.sync_every",
    "tau": "diloco.fragment_sync_delay",
    "alpha": "diloco.fragment_update_alpha",
    "inflight": "diloco.max_inflight",
}
"""Short names of settings in tests; K, H, tau and alpha are those of the papers."""


def long(options: dict[str, Any]) -> dict[str, Any]:
    """Options with the settings' own names in place of short ones."""
    return {SHORT.get(key, key): value for key, value in options.items()}


class Unwaiting(atoll.Server):
    """A server that does not wait at the end of its block for the sites that a test has left there."""

    def __exit__(self, *_: object) -> None:
        self.stop()


def new_server(*given: Any, **options: Any) -> atoll.Server:
    """An `atoll.Server` whose settings stand among its other arguments, and replace those of ENDLESS."""
    options = long(options)
    settings = {key: value for key, value in options.items() if "." in key}
    others = {key: value for key, value in options.items() if key not in settings}
    endless = {
        key: value for key, value in ENDLESS.items() if "algorithm.path" not in settings or key == "rounds.total"
    }
    return Unwaiting(*given, settings=endless | settings, **others)


def plain_server(folder: Path, model: Any = None, **options: Any) -> atoll.Server:
    """A server of PLAIN with its state in `folder`/state, not started; settings stand among its arguments."""
    return new_server(model, **(PLAIN | {"disk.state_dir": folder / "state"} | long(options)))


def state_of(server: atoll.Server, site: str = "a") -> str:
    """What the status says of a site, such as `alive`; nothing before it has joined."""
    return next((worker.state for worker in server.status().workers if worker.site == site), "")


def new_simulation(*given: Any, **options: Any) -> atoll.Simulation:
    """An `atoll.Simulation` whose settings stand among its other arguments."""
    settings = {key: value for key, value in options.items() if "." in key}
    others = {key: value for key, value in options.items() if key not in settings}
    return atoll.Simulation(*given, settings=settings, **others)


@contextmanager
def serve(folder: Path, model: nn.Module | str | None = None, **settings: Any) -> Iterator[atoll.Server]:
    """A started server with its state in `folder`/state; stopped at the end of the block.

    Its port was of no server before: a site that another test has left may still ask for that one, and join this run.

    Args:
        model: the initial model or its name, by default `build_model()`.
        settings: any settings of a run, also by short names; they replace those of SETTINGS. None takes a key out.
            Other arguments go to `atoll.Server`.
    """
    given = {key: value for key, value in (SETTINGS | long(settings)).items() if value is not None}
    chosen = {key: value for key, value in given.items() if "." in key}
    others = {key: value for key, value in given.items() if key not in chosen}
    with run.serve(model or build_model(), folder / "state", chosen, **others) as server:
        yield server
