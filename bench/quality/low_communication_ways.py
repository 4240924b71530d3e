"""The ways to train that `low_communication.py` compares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NAME = "low_communication"
OWN_TEXT = "Python's standard library"
WORKERS, STEPS, BATCH, WINDOW = 4, 1500, 8, 64
WARMUP, CLIP = 100, 1.0
RATES = (3e-3, 6e-3, 12e-3, 24e-3)
"""Inner learning rates that each way is tried with, on seed TUNED_ON."""
MOST_RATES = 6
"""So many in all where the best is at an end: half or twice as much, again and again."""
TUNED_ON = 100
"""A seed that is not among those of the table."""
FAST_S, SLOW_S = 0.025, 0.075
"""What a step takes at least where one worker is to have a third of the speed. Four threads need most of the 25 ms of
two cores: where others use those as well, the fast ones are slower, and the slow one has more than a third. What it
came to is measured (`step_s`)."""
MARKS = 10
"""How often the global model is measured on its way."""


@dataclass(frozen=True)
class Inner:
    """How each worker steps on its own batches.

    Attributes:
        muon: whether torch.optim.Muon steps the matrices of the blocks, at the same rate; AdamW steps the others.
        betas, weight_decay: of AdamW; Muon takes the weight decay, too.
        floor: share of the rate at the end of the cosine.
        steps: of each worker.
    """

    muon: bool = False
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    floor: float = 0.1
    steps: int = STEPS


MUON, LONGER = Inner(muon=True), Inner(steps=2 * STEPS)
H20 = {"algorithm.name": "diloco", "aggregation.upload_codec.name": "none", "diloco.sync_every": 20}
STREAMING = {**H20, "diloco.num_fragments": 4, "diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.5}
A25 = {
    **STREAMING,
    "diloco.fragment_update_alpha": 0.25,
    "aggregation.upload_codec.name": "int4",
    "aggregation.download_codec.name": "int4",
}
TOPK = {
    "aggregation.upload_codec.name": "topk",
    "aggregation.download_codec.name": "topk",
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.0,
}
DENSER = {**TOPK, "aggregation.upload_codec.density": 1 / 16, "aggregation.download_codec.name": "int8"}
BUFFERED = {
    "async.enabled": True,
    "async.buffer_size": WORKERS - 1,
    "async.sync_rounds_first": 10,
    "algorithm.outer_optimizer.momentum": 0.8,
}
DELAYED = {
    "async.enabled": True,
    "async.momentum_every": WORKERS,
    "async.sync_rounds_first": 10,
    "algorithm.outer_optimizer.momentum": 0.7,
}
WARM = {
    "async.enabled": True,
    "async.buffer_size": 2,
    "async.momentum_every": 2,
    "async.sync_rounds_first": 25,
    "algorithm.outer_optimizer.momentum": 0.75,
}
"""A third of the 75 rounds is synchronous: delayed Nesterov is meant for a model that was trained before."""


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        settings: of the run; empty: data-parallel.
        slow: whether the last worker has a third of the speed, and every step its least duration.
        rates: inner learning rates to try.
        against: the data-parallel way that this one is compared with, of the same inner optimizer.
        tuned_as: the way whose best rate this one takes, since both come to the same model, but for the rounding of a
            codec; empty: its own search.
    """

    title: str
    settings: dict[str, Any] = field(default_factory=dict)
    slow: bool = False
    inner: Inner = Inner()
    rates: tuple[float, ...] = RATES
    against: str = "data_parallel"
    tuned_as: str = ""


WAYS: dict[str, Way] = {
    "data_parallel": Way("data-parallel"),
    "diloco": Way("DiLoCo, H = 20", H20),
    "diloco_50": Way("DiLoCo, H = 50", {**H20, "diloco.sync_every": 50}),
    "averaging": Way(
        "plain averaging, H = 20",
        {**H20, "algorithm.outer_optimizer.lr": 1.0, "algorithm.outer_optimizer.momentum": 0.0},
    ),
    "streaming": Way("streaming, K = 4, τ = 1, α = 0.5", STREAMING, tuned_as="streaming_int4"),
    "streaming_int8": Way(
        "the same, int8 both ways",
        {**STREAMING, "aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"},
        tuned_as="streaming_int4",
    ),
    "streaming_int4": Way(
        "the same, int4 both ways",
        {**STREAMING, "aggregation.upload_codec.name": "int4", "aggregation.download_codec.name": "int4"},
    ),
    "streaming_int4_a0": Way(
        "int4 both ways, α = 0",
        {
            **STREAMING,
            "diloco.fragment_update_alpha": 0.0,
            "aggregation.upload_codec.name": "int4",
            "aggregation.download_codec.name": "int4",
        },
    ),
    "streaming_int4_a25": Way("int4 both ways, α = 0.25", A25),
    "streaming_topk": Way("top-k of 1/64 both ways, no momentum", {**STREAMING, **TOPK}),
    "streaming_topk_16": Way("top-k of 1/16 up, int8 down, no momentum", {**STREAMING, **DENSER}),
    "data_parallel_muon": Way("data-parallel, Muon", inner=MUON),
    "streaming_int4_muon": Way(
        "int4 both ways, α = 0.25, Muon",
        A25,
        inner=MUON,
        against="data_parallel_muon",
    ),
    "data_parallel_longer": Way("data-parallel, 3,000 steps", inner=LONGER),
    "streaming_int4_longer": Way(
        "int4 both ways, α = 0.25, 3,000 steps",
        A25,
        inner=LONGER,
        against="data_parallel_longer",
    ),
    "slow_sync": Way("DiLoCo, H = 20, one worker slow", H20, slow=True, tuned_as="diloco"),
    "slow_async": Way("async, one slow", {**H20, "async.enabled": True}, slow=True),
    "slow_delayed": Way("async, delayed Nesterov, sync first, one slow", {**H20, **DELAYED}, slow=True),
    "slow_delayed_warm": Way(
        "async, delayed Nesterov on steps for 2 updates, a third sync first, one slow", {**H20, **WARM}, slow=True
    ),
    "slow_buffered": Way("async, a step for 3 updates, sync first, one slow", {**H20, **BUFFERED}, slow=True),
    "slow_dylu": Way(
        "async, delayed Nesterov, sync first, DyLU, one slow",
        {**H20, **DELAYED, "diloco.dynamic_local_steps": True},
        slow=True,
    ),
}

BETAS, DECAY, TO_ZERO = Inner(betas=(0.9, 0.99)), Inner(weight_decay=0.01), Inner(floor=0.0)
HIGHER, LOWER = (12e-3, 24e-3), (6e-3, 12e-3)

TRIED: dict[str, Way] = {
    "dp_betas": Way("data-parallel, AdamW with β₂ = 0.99", inner=BETAS, rates=HIGHER),
    "dp_to_zero": Way("data-parallel, the rate falls to 0", inner=TO_ZERO, rates=HIGHER),
    "dp_decay": Way("data-parallel, weight decay 0.01", inner=DECAY, rates=HIGHER),
    "betas": Way("AdamW with β₂ = 0.99", A25, inner=BETAS, rates=LOWER, against="dp_betas"),
    "to_zero": Way("the rate falls to 0", A25, inner=TO_ZERO, rates=LOWER, against="dp_to_zero"),
    "decay": Way("weight decay 0.01", A25, inner=DECAY, rates=LOWER, against="dp_decay"),
    "h12": Way("H = 12", {**A25, "diloco.sync_every": 12}, rates=LOWER),
    "a10": Way("α = 0.1", {**A25, "diloco.fragment_update_alpha": 0.1}, rates=LOWER),
    "algorithm.outer_optimizer.lr": Way(
        "algorithm.outer_optimizer.lr 0.5", {**A25, "algorithm.outer_optimizer.lr": 0.5}, rates=LOWER
    ),
    "algorithm.outer_optimizer.momentum": Way(
        "algorithm.outer_optimizer.momentum 0.8", {**A25, "algorithm.outer_optimizer.momentum": 0.8}, rates=LOWER
    ),
}
"""Tried on seed TUNED_ON to bring int4 both ways with α = 0.25 closer to data-parallel training."""
