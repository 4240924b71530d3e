"""Warn about settings that are valid but almost certainly wrong, before a run begins."""

from __future__ import annotations

from atoll.aggregation.plan import Plan
from atoll.format_text import size


def advice(plan: Plan) -> list[str]:
    """Return the warnings about this plan's settings, one sentence each. The status shows the warnings, too."""
    settings, momentum = plan.settings, plan.algorithm.outer_options.get("momentum")
    mode, sites, advice = settings.async_, settings.rounds.sites, []
    each_steps = not (mode.momentum_every or mode.buffer_size > 1 or mode.grace_s)
    if mode.enabled and each_steps and momentum and sites > 1:
        advice.append(
            f"every update makes a step of its own with outer momentum {momentum:g}, {sites} of them where a "
            "synchronous "
            f"round makes one: this may diverge. Set async.momentum_every = {sites} (delayed Nesterov)"
        )
    if 0 < settings.rounds.total <= mode.sync_rounds_first:
        advice.append(
            f"async.sync_rounds_first is {mode.sync_rounds_first}, and rounds.total is {settings.rounds.total}: every "
            "round waits for all workers, none is asynchronous. Set async.sync_rounds_first to fewer than rounds.total"
        )
    if plan.algorithm.codec == "topk" and momentum:
        advice.append(
            f"aggregation.upload_codec is 'topk', and the outer momentum {momentum:g}: what does not travel comes "
            "later, "
            "which does what momentum does, and both together overshoot. Set momentum = 0 and lr = 1 in "
            "algorithm.outer_optimizer"
        )
    if settings.diloco.fragment_update_alpha == 1 and sites > 1:
        advice.append(
            "diloco.fragment_update_alpha is 1: workers keep all of their own parameters, and never take over what the "
            "others have trained. Set it below 1; 0 takes the global ones"
        )
    return [*advice, *_of_lost_steps(plan), *_of_the_way_down(plan)]


_LARGE_SHARE = 0.25
"""Share of the local steps that merges may drop without a warning."""


def _of_lost_steps(plan: Plan) -> list[str]:
    """Return a warning if merges drop many local steps: each drops a share 1 − α of the last τ steps."""
    diloco = plan.settings.diloco
    delay, alpha = diloco.fragment_sync_delay, diloco.fragment_update_alpha
    share = delay / diloco.sync_every
    if (1 - alpha) * share > _LARGE_SHARE:
        return [
            f"diloco.fragment_sync_delay is {delay}, and diloco.sync_every {diloco.sync_every}: {share:.0%} of the "
            "local steps are made while an update is under way, and a merge with fragment_update_alpha "
            f"{alpha:g} drops {1 - alpha:.0%} of what they change. Set a smaller delay, or a larger alpha"
        ]
    if delay and diloco.dynamic_local_steps and alpha == 0:
        return [
            f"diloco.dynamic_local_steps is true, fragment_sync_delay is {delay}, and fragment_update_alpha is 0: a "
            f"worker so slow that it gets {delay} local steps or fewer loses all of them. Set alpha above 0"
        ]
    return []


def _of_the_way_down(plan: Plan) -> list[str]:
    """Return a warning if encoded downloads save nothing.

    One difference may be as large as a version. An asynchronous worker pulls several differences, which add up.
    """
    settings = plan.settings
    behind = -(-settings.rounds.sites // settings.async_.buffer_size)  # versions committed while one worker trains
    downlinks = [each.downlink for each in plan.fragments]
    one, whole = sum(each.layout.nbytes for each in downlinks if each), sum(each.nbytes for each in plan.versions)
    if any(downlinks) and one >= whole:
        return [
            f"aggregation.download_codec {settings.aggregation.download_codec.target!r} saves nothing: a difference "
            f"would take {size(one)}, a version has {size(whole)}, and is pulled whole. The model is of small tensors, "
            "or of a narrow dtype; leave aggregation.download_codec out"
        ]
    if not settings.async_.enabled or settings.async_.grace_s or not all(downlinks) or behind == 1:
        return []
    begin = (
        f"aggregation.download_codec is {settings.aggregation.download_codec.target!r}: while one of "
        f"{settings.rounds.sites} workers trains, "
    )
    if whole <= behind * one:
        return [
            f"{begin}{behind} versions come. Their differences, {size(behind * one)}, are more than a version, "
            f"{size(whole)}: it saves next to nothing. Choose one with fewer bytes, or leave it out"
        ]
    if settings.disk.keep_versions < behind:
        return [
            f"{begin}{behind} versions come, but the differences of {settings.disk.keep_versions} are kept: most "
            "versions "
            f"are pulled whole. Set disk.keep_versions = {behind}"
        ]
    return []
