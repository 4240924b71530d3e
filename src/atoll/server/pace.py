"""Who trains how fast: local steps by speed (DyLU), versions that are still to be pulled, and updates far behind."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping

from atoll.rounds.dylu import local_steps
from atoll.rounds.state import State
from atoll.server.plan import Plan
from atoll.server.roster import Presence
from atoll.wire import status_messages
from atoll.wire.units import size

LOG = logging.getLogger("atoll.server")

FAR_BEHIND = 5
"""Versions behind the head from which on an update is worth a word."""


class Pace:
    """Of one run; looks at the roster, decides nothing about rounds."""

    def __init__(self, plan: Plan, roster: Mapping[str, Presence]) -> None:
        self._plan, self._roster = plan, roster
        self._worst = FAR_BEHIND
        self.advice = advice(plan)
        self._far: list[str] = []
        self.counts: Counter[int] = Counter()

    @property
    def warnings(self) -> list[str]:
        """What status shows."""
        return [*self.advice, *self._far]

    def local_steps(self, site: str, state: State) -> int:
        """H_w of a site; 0 where all take the run's H."""
        settings = self._plan.settings
        if not settings.dylu or not self._plan.algorithm.sync_every:
            return 0
        speeds = {
            site: self._roster[site].beat.steps_per_s
            for site, member in state.members.items()
            if member.alive and site in self._roster
        }
        return local_steps(speeds, site, settings.sync_every, settings.num_fragments)

    def wanted(self, fragment: int, state: State) -> Collection[int]:
        """Versions that open tickets name and their holders have not pulled yet, as far as is known."""
        if not state.is_async(fragment):
            return ()
        one = len(state.rounds) == 1
        tickets = [ticket for ticket in state.rounds[fragment].tickets.values() if ticket.state == "open"]
        return {
            ticket.base_version
            for ticket in tickets
            if not (one and self._has(ticket.site, ticket.base_version)) and ticket.site in state.seen_s
        }

    def _has(self, site: str, version: int) -> bool:
        """Whether a site has said that it trains from this version, or a later one; of version 0 nobody can tell."""
        presence = self._roster.get(site)
        return presence is not None and presence.beat.version >= version > 0

    def look_at(self, summary: status_messages.RoundSummary) -> None:
        """Count how far behind updates were, and warn of one that is further behind than any before it."""
        if self._plan.settings.mode == "async":
            self.counts.update(summary.staleness)
        worst = max(summary.staleness, default=0)
        if worst <= self._worst:
            return
        self._worst = worst
        site = summary.workers[summary.staleness.index(worst)]
        told = (
            f"an update of {site} was {worst} versions behind: stale updates slow training down, or undo it. Set "
            "dylu = true so that slow sites take fewer steps, staleness_weight = 'inverse_sqrt', dn_buffer_size to the "
            "number of sites, or max_staleness to refuse such updates"
        )
        self._far = [told]
        LOG.warning("%s", told)


def advice(plan: Plan) -> list[str]:
    """What to say of the settings of a run before it begins: what they do that nobody can have meant."""
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
    return [*told, *_of_the_way_down(plan)]


def _of_the_way_down(plan: Plan) -> list[str]:
    """In an asynchronous run each worker pulls everybody's differences, which have to be kept, and add up."""
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
