"""Which settings a run lives by, and from when on a changed one holds: the rest at the server's next start."""

from __future__ import annotations

FROZEN = (
    "algorithm",
    "local_options",
    "placement",
    "mode",
    "sync_rounds_first",
    "num_fragments",
    "sync_every",
    "tau",
    "alpha",
    "max_inflight",
    "ranks",
    "codec",
    "codec_options",
    "downlink_codec",
    "downlink_codec_options",
    "part_bytes",
    "download_to_disk",
)
"""Files on disk hang on them, updates that wait to be applied, or what sites that are running were told, which would go
on in another way than those that start."""

FROZEN_OUTER = ("outer_optimizer", "outer_lr", "outer_lrs", "outer_momentum", "outer_options", "dn_buffer_size")
"""Frozen, too, as what they come to together: the rule of the outer optimizer."""

AT_THE_BEGINNING = ("model", "model_args", "buffers", "seed")
"""Of the initial model. It is not read again; where it is named and is another one by its tensors, it is refused."""

FOR_SITES = ("connections", "heartbeat_interval_s", "waiting_heartbeat_s", "idle_timeout_s")
"""Sites have them from the server when they start, and keep them until they are started again."""
