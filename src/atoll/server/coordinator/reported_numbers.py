"""Warnings about numbers that a site reports with its updates and that are far above those of the other sites.

The server cannot check a weight or a number of steps, and a single wrong one can decide the result for all sites.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from atoll.protocol.run_events import Happened, RoundClosed
from atoll.server.coordinator.roster import Presence

LEAST_SITES = 3
"""One of two sites has at least half of the weight, so that is nothing to warn of."""

LOG = logging.getLogger("atoll.server")


@dataclass
class _Numbers:
    """One kind of number: the last value of each site, and the warnings about unusual values.

    Attributes:
        factor: a value is unusual if it is more than this many times the median of the other sites.
        warning: text of the warning, with places for the site, the value and the median.
        last: site → its last value above zero.
        warnings: site → warning, for the sites with an unusual value.
        told: sites about which the log has had a warning.
    """

    factor: float
    warning: str
    last: dict[str, float] = field(default_factory=dict)
    warnings: dict[str, str] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)

    def compare(self, alive: Collection[str]) -> None:
        last = {site: value for site, value in self.last.items() if site in alive}
        ordered = sorted(last.values())
        self.warnings = {}
        if len(ordered) < 2:
            return
        usual = statistics.median(ordered[:-1])  # also without another value of the upper half, as unusual ones are
        for site, value in last.items():
            if value > self.factor * usual:
                self.warnings[site] = self.warning.format(site=site, value=value, usual=usual)
        self.say()

    def say(self) -> None:
        """Log the warnings about sites that the log has had none about."""
        for site in self.warnings.keys() - self.told:
            self.told.add(site)
            LOG.warning("%s", self.warnings[site])


class ReportedNumbers:
    """The weights and numbers of local steps that the sites of a run report.

    Args:
        roster: site → what the server knows about its worker.
        needs_steps: whether the run uses the numbers of steps; if not, no warning is about them.
        weight_share: share of the weight of three or more sites above which to warn of one.

    Attributes:
        heard: sites that have submitted an update or sat out a round since the server's start.
    """

    def __init__(self, roster: Mapping[str, Presence], *, needs_steps: bool, weight_share: float = 1.0) -> None:
        self._roster, self.heard = roster, set[str]()
        self._needs_steps, self._weight_share = needs_steps, weight_share
        self._steps = _Numbers(
            100,
            "{site} reports {value} local steps, more than 100 × the median of the other sites ({usual:g}). Check that "
            "it counts optimizer steps, not samples or tokens: FedNova and normalised_mean divide by this number. "
            "aggregation.max_steps refuses larger ones",
        )
        self._weights = _Numbers(
            1000,
            "{site} reports a weight of {value:g}, more than 1000 × the median of the other sites ({usual:g}). Check "
            "that all sites count the same, samples or tokens: this site nearly decides the mean alone. "
            "aggregation.max_weight refuses larger ones",
        )

    def note(self, site: str, weight: float, steps: int) -> None:
        """Record what a site reports with an accepted update. 0 steps: the site does not report them."""
        self.heard.add(site)
        self._weights.last[site] = weight
        if steps and self._needs_steps:
            self._steps.last[site] = steps

    def on_event(self, event: Happened) -> None:
        """When a round has closed, compare the last numbers of all live sites. Log a warning once for each unusual one.

        After a small round, compare only once all have reported: the first sites alone say nothing.
        """
        if isinstance(event, RoundClosed):
            self.heard &= self._roster.keys()
            alive = {each.site for each in self._roster.values() if each.state == "alive"}
            is_small = len(event.sites) < LEAST_SITES
            if not is_small or alive <= self.heard:
                self._steps.compare(alive)
                self._weights.compare(alive)
                self._find_large_share(alive if is_small else event.sites)

    def _find_large_share(self, sites: Collection[str]) -> None:
        """Warn of a site that has more than `weight_share` of the weight of these sites."""
        weights = {site: self._weights.last[site] for site in sites if site in self._weights.last}
        largest = max(weights, key=weights.__getitem__, default="")
        share = weights[largest] / math.fsum(weights.values()) if largest else 0.0
        if len(weights) >= LEAST_SITES and share > self._weight_share:
            self._weights.warnings.setdefault(
                largest,
                f"{largest} has {share:.0%} of the weight of {len(weights)} sites (limits.weight_share = "
                f"{self._weight_share:g}): its update decides the mean. Check that all sites count the same, samples "
                "or tokens; aggregation.max_weight refuses larger weights",
            )
            self._weights.say()

    @property
    def warnings(self) -> list[str]:
        """Warnings for the status."""
        return [*self._steps.warnings.values(), *self._weights.warnings.values()]
