"""The ways to train that `low_communication.py` compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NAME = "low_communication"
OWN_TEXT = "Python's standard library"
WORKERS, STEPS, BATCH, WINDOW = 4, 1500, 8, 64
WARMUP, CLIP = 100, 1.0
RATES = (3e-3, 6e-3, 12e-3, 24e-3)
"""Inner learning rates that each way is tried with, on seed TUNED_ON; beyond them while the best is at an end."""
TUNED_ON = 100
"""A seed that is not among those of the table."""
FAST_S, SLOW_S = 0.025, 0.075
"""What a step takes at least where one worker is to have a third of the speed. Four threads need most of the 25 ms of
two cores: where others use those as well, the fast ones are slower, and the slow one has more than a third. What it
came to is measured (`step_s`)."""
MARKS = 10
"""How often the global model is measured on its way."""

H20 = {"algorithm": "diloco", "codec": "none", "sync_every": 20}
STREAMING = {**H20, "num_fragments": 4, "tau": 1, "alpha": 0.5}
TOPK = {"codec": "topk", "downlink_codec": "topk", "outer_lr": 1.0, "outer_momentum": 0.0}
DENSER = {**TOPK, "codec_options": {"density": 1 / 16}, "downlink_codec": "int8"}
BUFFERED = {"mode": "async", "async_buffer": WORKERS - 1, "sync_rounds_first": 10, "outer_momentum": 0.8}
DELAYED = {"mode": "async", "dn_buffer_size": WORKERS, "sync_rounds_first": 10, "outer_momentum": 0.7}
WARM = {"mode": "async", "async_buffer": 2, "dn_buffer_size": 2, "sync_rounds_first": 25, "outer_momentum": 0.75}
"""A third of the 75 rounds is synchronous: delayed Nesterov is meant for a model that was trained before."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        settings: of the run; empty: data-parallel.
        slow: whether the last worker has a third of the speed, and every step its least duration.
    """

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    slow: bool = False


WAYS: dict[str, Way] = {
    "data_parallel": Way("data-parallel"),
    "diloco": Way("DiLoCo, H = 20", H20),
    "diloco_50": Way("DiLoCo, H = 50", {**H20, "sync_every": 50}),
    "averaging": Way("plain averaging, H = 20", {**H20, "outer_lr": 1.0, "outer_momentum": 0.0}),
    "streaming": Way("streaming, K = 4, τ = 1, α = 0.5", STREAMING),
    "streaming_int8": Way("the same, int8 both ways", {**STREAMING, "codec": "int8", "downlink_codec": "int8"}),
    "streaming_int4": Way("the same, int4 both ways", {**STREAMING, "codec": "int4", "downlink_codec": "int4"}),
    "streaming_int4_a0": Way(
        "int4 both ways, α = 0", {**STREAMING, "alpha": 0.0, "codec": "int4", "downlink_codec": "int4"}
    ),
    "streaming_int4_a25": Way(
        "int4 both ways, α = 0.25", {**STREAMING, "alpha": 0.25, "codec": "int4", "downlink_codec": "int4"}
    ),
    "streaming_topk": Way("top-k of 1/64 both ways, no momentum", {**STREAMING, **TOPK}),
    "streaming_topk_16": Way("top-k of 1/16 up, int8 down, no momentum", {**STREAMING, **DENSER}),
    "slow_sync": Way("DiLoCo, H = 20, one worker slow", H20, slow=True),
    "slow_async": Way("async, one slow", {**H20, "mode": "async"}, slow=True),
    "slow_delayed": Way("async, delayed Nesterov, sync first, one slow", {**H20, **DELAYED}, slow=True),
    "slow_delayed_warm": Way(
        "async, delayed Nesterov on steps for 2 updates, a third sync first, one slow", {**H20, **WARM}, slow=True
    ),
    "slow_buffered": Way("async, a step for 3 updates, sync first, one slow", {**H20, **BUFFERED}, slow=True),
    "slow_dylu": Way(
        "async, delayed Nesterov, sync first, DyLU, one slow", {**H20, **DELAYED, "dylu": True}, slow=True
    ),
}
