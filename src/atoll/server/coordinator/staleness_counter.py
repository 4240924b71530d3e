"""Staleness of updates: how many versions the head was ahead of an update's base when the update was aggregated."""

from __future__ import annotations

import logging
from collections import Counter

from atoll.aggregation.plan import Plan
from atoll.format_text import number_of
from atoll.protocol import status_messages

LOG = logging.getLogger("atoll.server")

FAR_BEHIND = 5
"""Staleness above which an update causes a warning."""


class StalenessCounter:
    """Counts the staleness of updates: how many versions each was behind the newest. Warns about high values.

    Attributes:
        counts: staleness in versions → number of updates; only in an asynchronous run.
        warnings: warnings for the status.
    """

    def __init__(self, plan: Plan) -> None:
        self._is_async = plan.settings.async_.enabled
        self._worst = FAR_BEHIND
        self.warnings: list[str] = []
        self.counts: Counter[int] = Counter()

    def note_round(self, summary: status_messages.RoundSummary) -> None:
        """Count the staleness of a round's updates. Warn of a value above `FAR_BEHIND` and above all earlier values."""
        if self._is_async:
            self.counts.update(each.staleness for each in summary.sites)
        lags = {each.site: each.staleness for each in summary.sites}
        site = max(lags, key=lags.__getitem__, default="")
        worst = lags.get(site, 0)
        if worst <= self._worst:
            return
        self._worst = worst
        told = (
            f"an update of {site} was {number_of(worst, 'version')} old: old updates slow training down or undo it. "
            "Set diloco.dynamic_local_steps = true to give slow sites fewer steps, async.staleness_weight = "
            "'inverse_sqrt', async.momentum_every = number of sites, or async.max_staleness to refuse such "
            "updates. See docs/troubleshooting.md, Updates far behind"
        )
        self.warnings = [told]
        LOG.warning("%s", told)
