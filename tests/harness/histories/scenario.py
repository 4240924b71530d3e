"""What a seed decides before a history begins: the kind of run, its network, and which faults happen when."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.histories.network import Faults

LR, MOMENTUM = 0.7, 0.9
"""Of the outer optimizer: with momentum and unequal weights, a lost, doubled or reordered update changes the result."""
HEARTBEAT_S, TIMEOUT_S = 1.75, 4.0
MOST_WEIGHT, MOST_STEPS = 1000.0, 100
"""Of an update that the server accepts."""


@dataclass(frozen=True)
class Fault:
    """Something that happens at a time: `what` to `site`; `number` says how."""

    at_s: float
    what: str
    site: str = ""
    number: float = 0.0

    @property
    def loses_power(self) -> bool:
        """Whether a server that is killed at an instruction is so by a loss of power."""
        return self.number > 0.7


KINDS = ("barrier", "quorum", "async", "buffered", "fragments", "streaming", "streaming", "fednova", "scaffold")
FEEDBACK = ("int8", "int4", "topk")
"""Codecs that lose something, which the site adds to its next update."""
SITE_FAULTS = ("kill site", "kill site at", "power loss of site", "freeze", "rival", "cut off", "leave")
SERVER_FAULTS = ("kill server", "kill server at", "power loss", "stop server", "disk full")
OF_THE_ADMIN = ("pause", "roll back")


@dataclass(frozen=True)
class Scenario:
    """What a seed decides before anything happens."""

    seed: int
    kind: str
    sites: tuple[str, ...]
    power: bool
    large: bool
    wire: Faults
    faults: tuple[Fault, ...]
    settings: dict[str, Any]
    heals_at_s: float
    ends: bool

    @classmethod
    def of(cls, seed: int) -> Scenario:
        chance = random.Random(f"scenario {seed}")
        kind = chance.choice(KINDS)
        sites = tuple("abcd"[: chance.choice((2, 2, 2, 3, 3, 4))])
        heals_at_s = chance.uniform(2.0, 8.0)
        wire = Faults(
            delay_s=chance.choice((0.01, 0.05, 0.4)),
            lost=chance.choice((0.0, 0.0, 0.02, 0.1)),
            twice=chance.choice((0.0, 0.05)),
            flipped=chance.choice((0.0, 0.05)),
        )
        quorum = chance.randint(1, len(sites))
        settings: dict[str, Any] = {
            "algorithm.name": "fedavg",
            "rounds.sites": chance.randint(1, len(sites)),
            "rounds.total": chance.choice((0, 0, 2, 4)),
        }
        if kind == "quorum":
            settings |= {"rounds.quorum": quorum, "rounds.deadline_s": chance.uniform(1.5, 12.0)}
            settings["rounds.sites"] = max(settings["rounds.sites"], quorum)
        elif kind in ("barrier", "fednova", "scaffold"):
            settings |= {"rounds.min_sites": min(quorum, settings["rounds.sites"])}
        elif kind in ("async", "buffered"):
            settings |= {
                "async.enabled": True,
                "async.staleness_weight": chance.choice(("constant", "inverse_sqrt")),
                "async.max_staleness": chance.choice((None, None, 1, 3)),
            }
            if kind == "buffered":
                settings |= {"async.buffer_size": 2, "async.grace_s": chance.choice((0.0, 2.5))}
        elif kind == "fragments":
            settings |= {"algorithm.name": "diloco", "diloco.num_fragments": 2, "diloco.sync_every": 4}
        elif kind == "streaming":
            inflight = chance.choice((1, 2))
            settings |= {
                "algorithm.name": "diloco",
                "diloco.num_fragments": chance.choice((1, 2, 2, 2)),
                "diloco.sync_every": 4,
                "diloco.fragment_sync_delay": chance.choice((0, 1, 2, 2)),
                "diloco.fragment_update_alpha": chance.choice((0.0, 0.0, 0.5)),
                "async.enabled": chance.random() < 0.3,
            }
            settings["diloco.max_inflight"] = min(inflight, settings["diloco.num_fragments"])
        if kind in ("fednova", "scaffold"):
            settings["algorithm.name"] = kind
        settings["aggregation.upload_codec.name"] = chance.choice(("none", "none", chance.choice(FEEDBACK)))
        power = chance.random() < 0.5
        faults = [
            Fault(
                round(chance.uniform(0.5, heals_at_s), 3),
                chance.choice(chance.choice((SITE_FAULTS, SITE_FAULTS, SERVER_FAULTS, SERVER_FAULTS, OF_THE_ADMIN))),
                chance.choice(sites),
                chance.random(),
            )
            for _ in range(chance.choice((1, 1, 2, 2, 3, 4)))
        ]
        return cls(
            seed,
            kind,
            sites,
            power,
            chance.random() < 0.05,
            wire,
            tuple(sorted(faults, key=lambda fault: fault.at_s)),
            settings,
            heals_at_s,
            ends=chance.random() < 0.3,
        )

    @property
    def is_async(self) -> bool:
        return bool(self.settings.get("async.enabled"))

    @property
    def may_lose_residuals(self) -> bool:
        """Whether a fault may take what a site's codec has lost so far, or versions that it belongs to."""
        losses = ("rival", "power loss of site", "roll back")
        return (self.loses_power and not self.power) or any(each.what in losses for each in self.faults)

    @property
    def counts_steps(self) -> bool:
        """Whether each local step is in at most one update: without a merge that keeps a share of local values."""
        return self.kind == "streaming" and not self.settings["diloco.fragment_update_alpha"]

    @property
    def may_begin_anew(self) -> bool:
        """Whether a fault may take a site's state, or versions that it belongs to: then SCAFFOLD's begins at zero."""
        losses = ("rival", "power loss of site", "roll back")
        return self.kind == "scaffold" and (self.loses_power or any(each.what in losses for each in self.faults))

    @property
    def loses_power(self) -> bool:
        """Whether the server's machine may lose power."""
        return any(f.what == "power loss" or (f.what == "kill server at" and f.loses_power) for f in self.faults)

    @property
    def quorum(self) -> int:
        return int(self.settings.get("rounds.quorum") or self.settings.get("rounds.min_sites") or 1)

    def all_settings(self, folder: Path) -> dict[str, Any]:
        return self.settings | {
            "algorithm.outer_optimizer.name": "sgd",
            "algorithm.outer_optimizer.lr": LR,
            "algorithm.outer_optimizer.momentum": MOMENTUM,
            "algorithm.outer_optimizer.nesterov": False,
            "aggregation.max_weight": MOST_WEIGHT,
            "aggregation.max_steps": MOST_STEPS,
            "network.heartbeat_interval_s": HEARTBEAT_S,
            "network.heartbeat_timeout_s": TIMEOUT_S,
            "network.part_bytes": 2**16,
            "disk.min_free_bytes": 0,
            "disk.durability": "power" if self.power else "process",
            "disk.state_dir": folder,
            "run.threads": 1,
        }

    def model(self) -> dict[str, torch.Tensor]:
        """The first model. It is shared: do not change it."""
        return model_of(17_000 if self.large else 6)  # in two parts, or in one


@functools.cache
def model_of(count: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(count, dtype=torch.float32) / 8, "b": torch.ones(3)}
