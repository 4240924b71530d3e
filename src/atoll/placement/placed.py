"""The settings that decide what a round makes of its updates: what a worker must know to make the server's `Plan`."""

from __future__ import annotations

from typing import Any

from atoll.config import Settings

PLACED = (
    "algorithm",
    "outer_optimizer",
    "outer_lr",
    "outer_lrs",
    "outer_momentum",
    "outer_options",
    "local_options",
    "reducer",
    "reducer_options",
    "codec",
    "codec_options",
    "dn_buffer_size",
    "mode",
    "async_buffer",
    "sync_rounds_first",
    "staleness_weight",
    "num_workers",
    "min_workers",
    "sync_every",
    "num_fragments",
    "tau",
    "alpha",
    "max_inflight",
    "part_bytes",
    "download_to_disk",
    "placement",
)
"""Settings that decide what a round makes of its updates."""


def placed_settings(settings: Settings) -> dict[str, Any]:
    """Of a run, as they travel."""
    return settings.model_dump(mode="json", include=set(PLACED))
