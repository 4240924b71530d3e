"""What a worker must know of a run before it joins; a recipe compares it with what it would have had."""

from __future__ import annotations

from atoll.aggregation.plan import Plan
from atoll.protocol import messages, routes


def run_info(plan: Plan, run_id: str) -> messages.RunInfo:
    """The message of a run with this plan."""
    settings, algorithm = plan.settings, plan.algorithm
    return messages.RunInfo(
        protocol=routes.PROTOCOL,
        run=run_id,
        name=settings.name,
        algorithm=algorithm.name,
        local=dict(algorithm.local),
        on_missed=algorithm.algorithm.on_missed,
        rounds=settings.rounds,
        sync_every=algorithm.sync_every,
        mode=settings.mode,
        placement=settings.placement,
        sync_rounds_first=settings.sync_rounds_first,
        schema_digest=plan.schema.digest,
        schema_bytes=plan.schema.nbytes,
        fragments=len(plan.fragments),
        tau=settings.tau,
        alpha=settings.alpha,
        max_inflight=settings.max_inflight,
        codec=algorithm.codec,
        codec_options=algorithm.codec_options,
        downlink_codec=settings.downlink_codec or "none",
        downlink_codec_options=settings.downlink_codec_options,
        part_bytes=settings.part_bytes,
        ranks=settings.ranks,
        connections=settings.connections,
        heartbeat_interval_s=settings.heartbeat_interval_s,
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        waiting_heartbeat_s=settings.waiting_heartbeat_s,
        idle_timeout_s=settings.idle_timeout_s,
    )
