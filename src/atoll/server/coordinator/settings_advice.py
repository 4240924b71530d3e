"""Warnings about settings that are valid but almost certainly wrong."""

from __future__ import annotations

from atoll.aggregation.plan import Plan
from atoll.format_text import size


def advice(plan: Plan) -> list[str]:
    """Return a warning for each setting of a run that is valid but almost certainly wrong."""
    settings, momentum = plan.settings, plan.algorithm.outer_options.get("momentum")
    mode, sites, advice = settings.async_, settings.rounds.sites, []
    each_steps = not (mode.momentum_every or mode.buffer_size > 1 or mode.grace_s)
    if mode.enabled and each_steps and momentum and sites > 1:
        advice.append(
            f"each update makes its own step with outer momentum {momentum:g}: {sites} steps where a "
            f"synchronous round makes one. Training may diverge. Set async.momentum_every = {sites} (delayed "
            "Nesterov)"
        )
    if 0 < settings.rounds.total <= mode.sync_rounds_first:
        advice.append(
            f"async.sync_rounds_first is {mode.sync_rounds_first}, but rounds.total is "
            f"{settings.rounds.total}: all rounds are synchronous and wait for all workers. Set "
            "async.sync_rounds_first to fewer than rounds.total"
        )
    if plan.codec.name == "topk" and momentum:
        advice.append(
            f"aggregation.upload_codec is 'topk', but the outer momentum is {momentum:g}: topk sends small "
            "changes later and so acts like momentum; both together overshoot. Set momentum = 0 and lr = 1 "
            "in algorithm.outer_optimizer"
        )
    if settings.diloco.fragment_update_alpha == 1 and sites > 1:
        advice.append(
            "diloco.fragment_update_alpha is 1: workers keep only their own parameters, and never use the "
            "training of other workers. Set it below 1, or to 0 to use the global parameters alone"
        )
    return [*advice, *_of_lost_steps(plan), *_of_the_way_down(plan)]


_LARGE_SHARE = 0.25
"""Share of the local steps that may be lost to merges without a warning."""


def _of_lost_steps(plan: Plan) -> list[str]:
    """Return a warning if a large share of the local steps is lost when new versions are merged into the model.

    Of H local steps, τ (`fragment_sync_delay`) happen while an update is on its way. Merging the new version drops
    1 − α (`fragment_update_alpha`) of the change that these τ steps made.
    """
    diloco = plan.settings.diloco
    delay, alpha = diloco.fragment_sync_delay, diloco.fragment_update_alpha
    share = delay / diloco.sync_every
    if (1 - alpha) * share > _LARGE_SHARE:
        return [
            f"diloco.fragment_sync_delay is {delay} and diloco.sync_every is {diloco.sync_every}: {share:.0%} "
            "of the local steps happen while an update is in flight, and a merge with fragment_update_alpha "
            f"{alpha:g} drops {1 - alpha:.0%} of their change. Set a smaller delay or a larger alpha"
        ]
    if delay and diloco.dynamic_local_steps and alpha == 0:
        return [
            f"diloco.dynamic_local_steps is true, fragment_sync_delay is {delay} and fragment_update_alpha is "
            f"0: a worker that is so slow that it gets at most {delay} local steps loses all of them. Set "
            "alpha above 0"
        ]
    return []


def _of_the_way_down(plan: Plan) -> list[str]:
    """Return a warning if downloading encoded differences between versions saves little or nothing.

    One difference can be as large as a version. And an asynchronous worker can need several differences at once:
    together they can be larger than a version, or the server may no longer keep all of them.
    """
    settings = plan.settings
    behind = -(-settings.rounds.sites // settings.async_.buffer_size)  # versions committed while one worker trains
    downlinks = [each.downlink for each in plan.fragments]
    diff, whole = sum(each.layout.nbytes for each in downlinks if each), sum(each.nbytes for each in plan.versions)
    if any(downlinks) and diff >= whole:
        return [
            f"aggregation.download_codec {settings.aggregation.download_codec.target!r} saves nothing: the "
            f"difference between versions would take {size(diff)}, a whole version {size(whole)}. The reason "
            "is small tensors or a narrow dtype. Leave aggregation.download_codec out"
        ]
    if not settings.async_.enabled or settings.async_.grace_s or not all(downlinks) or behind == 1:
        return []
    begin = (
        f"aggregation.download_codec is {settings.aggregation.download_codec.target!r}: while one of "
        f"{settings.rounds.sites} workers trains, "
    )
    if whole <= behind * diff:
        return [
            f"{begin}{behind} new versions appear. Their differences, {size(behind * diff)}, are larger than a "
            f"whole version, {size(whole)}, so almost nothing is saved. Choose a codec with fewer bytes, or "
            "leave aggregation.download_codec out"
        ]
    if settings.disk.keep_versions < behind:
        return [
            f"{begin}{behind} new versions appear, but only the differences of {settings.disk.keep_versions} "
            f"are kept, so most versions are downloaded whole. Set disk.keep_versions = {behind}"
        ]
    return []
