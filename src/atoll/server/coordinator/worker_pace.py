"""What follows from the pace of workers, as their heartbeats say it: local steps (DyLU), versions yet to be pulled."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from atoll.aggregation.plan import Plan
from atoll.rounds import local_steps
from atoll.rounds.state import State
from atoll.server.coordinator.roster import Presence


class Pace:
    """Of one run; decides nothing about rounds."""

    def __init__(self, plan: Plan, roster: Mapping[str, Presence]) -> None:
        self._plan, self._roster = plan, roster

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
        return local_steps.local_steps(speeds, site, settings.sync_every, settings.num_fragments)

    def wanted(self, fragment: int, state: State) -> Collection[int]:
        """Versions that open tickets name and their holders have not pulled yet, as far as is known."""
        if not state.is_async(fragment):
            return ()
        one = len(state.rounds) == 1
        return {
            ticket.base_version
            for ticket in state.rounds[fragment].tickets.values()
            if ticket.state == "open"
            and ticket.site in state.seen_s
            and not (one and self._has(ticket.site, ticket.base_version))
        }

    def _has(self, site: str, version: int) -> bool:
        """Whether a site has said that it trains from this version, or a later one; of version 0 nobody can tell."""
        presence = self._roster.get(site)
        return presence is not None and presence.beat.version >= version > 0
