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

LOG = logging.getLogger("atoll.server")

FAR_BEHIND = 5
"""Versions behind the head from which on an update is worth a word."""


class Pace:
    """Of one run; looks at the roster, decides nothing about rounds."""

    def __init__(self, plan: Plan, roster: Mapping[str, Presence]) -> None:
        self._plan, self._roster = plan, roster
        self._worst = FAR_BEHIND
        self.warnings: list[str] = []
        self.counts: Counter[int] = Counter()

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
        self.warnings = [told]
        LOG.warning("%s", told)


def advice(plan: Plan) -> str:
    """What to say of the settings of an asynchronous run before it begins; empty where there is nothing."""
    settings, options = plan.settings, plan.algorithm.outer_options
    if settings.mode == "sync" or settings.dn_buffer_size or settings.async_buffer > 1 or settings.async_grace_s:
        return ""
    if not options.get("momentum") or settings.num_workers == 1:
        return ""
    return (
        f"every update makes a step of its own with outer momentum {options['momentum']:g}, {settings.num_workers} of "
        "them where a synchronous round makes one: this may diverge. Set dn_buffer_size = "
        f"{settings.num_workers} (delayed Nesterov)"
    )
