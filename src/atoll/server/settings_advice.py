"""Warn about settings that are valid but almost certainly wrong, before a run begins."""

from __future__ import annotations

from atoll.aggregation.plan import Plan
from atoll.format_text import size


def advice(plan: Plan) -> list[str]:
    """Return a sentence for each warning; the status shows them while the run is served."""
    settings, momentum = plan.settings, plan.algorithm.outer_options.get("momentum")
    told = []
    each_steps = not (settings.dn_buffer_size or settings.async_buffer > 1 or settings.async_grace_s)
    if settings.mode == "async" and each_steps and momentum and settings.num_workers > 1:
        told.append(
            f"every update makes a step of its own with outer momentum {momentum:g}, {settings.num_workers} of "
            "them where a synchronous round makes one: this may diverge. Set dn_buffer_size = "
            f"{settings.num_workers} (delayed Nesterov)"
        )
    if 0 < settings.rounds <= settings.sync_rounds_first:
        told.append(
            f"sync_rounds_first is {settings.sync_rounds_first}, and rounds is {settings.rounds}: every round waits "
            "for all workers, none is asynchronous. Set sync_rounds_first to fewer than rounds"
        )
    if plan.algorithm.codec == "topk" and momentum:
        told.append(
            f"codec is 'topk', and the outer momentum {momentum:g}: what does not travel comes later, which does what "
            "momentum does, and both together overshoot. Set outer_momentum = 0 and outer_lr = 1"
        )
    if settings.alpha == 1 and settings.num_workers > 1:
        told.append(
            "alpha is 1: workers keep all of their own parameters, and never take over what the others have trained. "
            "Set alpha below 1; 0 takes the global ones"
        )
    return [*told, *_of_lost_steps(plan), *_of_the_way_down(plan)]


_LARGE_SHARE = 0.25
"""Share of the local steps that merges may drop without a warning."""


def _of_lost_steps(plan: Plan) -> list[str]:
    """A merge drops a share 1 − alpha of the tau local steps that a worker made since it took the update."""
    settings = plan.settings
    if not settings.tau:
        return []
    share = settings.tau / settings.sync_every
    if (1 - settings.alpha) * share > _LARGE_SHARE:
        return [
            f"tau is {settings.tau}, and sync_every {settings.sync_every}: {share:.0%} of the local steps are made "
            f"while an update is under way, and a merge with alpha {settings.alpha:g} drops "
            f"{1 - settings.alpha:.0%} of what they change. Set a smaller tau, or a larger alpha"
        ]
    if settings.dylu and settings.alpha == 0:
        return [
            f"dylu is true, tau is {settings.tau}, and alpha is 0: a worker that is so slow that it is given "
            f"{settings.tau} local steps or fewer loses all of them. Set alpha above 0"
        ]
    return []


def _of_the_way_down(plan: Plan) -> list[str]:
    """Warn of differences that add up: an asynchronous worker pulls those of all steps, and they are kept."""
    settings = plan.settings
    behind = -(-settings.num_workers // settings.async_buffer)  # versions that come while one worker trains
    downlinks = [each.downlink for each in plan.fragments]
    if settings.mode == "sync" or settings.async_grace_s or not all(downlinks) or behind == 1:
        return []
    one, whole = sum(each.layout.nbytes for each in downlinks if each), sum(each.nbytes for each in plan.versions)
    begin = f"downlink_codec is {settings.downlink_codec!r}: while one of {settings.num_workers} workers trains, "
    if one < whole <= behind * one:
        return [
            f"{begin}{behind} versions come, whose differences, {size(behind * one)}, are more than a version, "
            f"{size(whole)}: it saves next to nothing. Choose one with fewer bytes, or leave it out"
        ]
    if one < whole and settings.keep_versions < behind:
        return [
            f"{begin}{behind} versions come, but the differences of {settings.keep_versions} are kept: most versions "
            f"are pulled whole. Set keep_versions = {behind}"
        ]
    return []
