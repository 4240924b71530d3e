"""How far behind the updates of an asynchronous run are: counted, shown, and told where it does harm."""

from __future__ import annotations

import logging
from collections import Counter

from atoll.aggregation.plan import Plan
from atoll.protocol import status_messages

LOG = logging.getLogger("atoll.server")

FAR_BEHIND = 5
"""Versions behind the head from which on an update is worth a word."""


class Stale:
    """What the updates of one run were like, since this server started.

    Attributes:
        counts: versions behind → updates.
        warnings: what the user should know at this moment; status shows it.
    """

    def __init__(self, plan: Plan) -> None:
        self._is_async = plan.settings.mode == "async"
        self._worst = FAR_BEHIND
        self.warnings: list[str] = []
        self.counts: Counter[int] = Counter()

    def look_at(self, summary: status_messages.RoundSummary) -> None:
        """Count how far behind updates were, and warn of one that is further behind than any before it."""
        if self._is_async:
            self.counts.update(summary.staleness)
        worst = max(summary.staleness, default=0)
        if worst <= self._worst:
            return
        self._worst = worst
        site = summary.workers[summary.staleness.index(worst)]
        told = (
            f"an update of {site} was {worst} versions behind: stale updates slow training down, or undo it. Set "
            "dylu = true so that slow sites take fewer steps, staleness_weight = 'inverse_sqrt', dn_buffer_size to the "
            "number of sites, or max_staleness to refuse such updates. "
            "More: docs/troubleshooting.md, Updates far behind"
        )
        self.warnings = [told]
        LOG.warning("%s", told)
