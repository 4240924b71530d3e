"""Which fragment is due: pure, and the same rule for every worker, so that no two workers wait for each other.

In rounds that wait for their workers, the fragment that is due is the one with the lowest (round, number) among those
that this worker has not submitted. In an undisturbed run that is the cycle 0 … K−1. Where a synchronisation was
skipped, or a worker joined later, all workers still follow the same order. So the lowest open round of all is always
the next one of every worker that it waits for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atoll.protocol import messages


@dataclass(frozen=True)
class SyncRules:
    """When fragments are synchronised, and what becomes of local progress.

    Attributes:
        every: H, local steps between two synchronisations of one fragment.
        fragments: K, fragments that are synchronised in turn.
        tau: local steps between forming an update and merging its result.
        alpha: share of the local parameters that a merge keeps.
        max_inflight: fragments of this worker that may be under way at a time.
        waits: whether rounds wait for their workers.
        on_missed: what becomes of local steps when the head moved on without them.
        sync_rounds_first: rounds of an asynchronous run that wait all the same.
    """

    every: int
    fragments: int = 1
    tau: int = 0
    alpha: float = 0.0
    max_inflight: int = 1
    waits: bool = True
    on_missed: Literal["rebase", "reset"] = "rebase"
    sync_rounds_first: int = 0

    @classmethod
    def of(cls, info: messages.RunInfo, every: int) -> SyncRules:
        """Return those of a run."""
        return cls(
            every,
            info.fragments,
            info.tau,
            info.alpha,
            info.max_inflight,
            info.mode == "sync",
            info.on_missed,
            info.sync_rounds_first,
        )

    @property
    def overlap(self) -> bool:
        """Whether training goes on while an update is on its way."""
        return self.tau > 0


class Place(NamedTuple):
    """Where a worker is with one fragment.

    Attributes:
        round: that it takes part in next.
        is_free: whether the fragment is neither under way nor finished.
        local_steps: H_w, where the run has given this worker one (DyLU); else 0.
    """

    round: int
    is_free: bool = True
    local_steps: int = 0


class FragmentOrder:
    """The order of one worker's synchronisations.

    Args:
        first: the fragment that is due first, in rounds that wait for no worker.
    """

    def __init__(self, rules: SyncRules, first: int = 0) -> None:
        self._rules, self._next = rules, first

    def steps_between(self, places: Sequence[Place]) -> int:
        """Return the local steps between two turns: H/K, or H_w/K where this worker has an H_w of its own."""
        h = min((each.local_steps for each in places if each.local_steps), default=self._rules.every)
        return max(1, h // len(places))

    def pick(self, places: Sequence[Place]) -> int | None:
        """Return the fragment that is due; None where each is finished or under way."""
        free = [index for index, each in enumerate(places) if each.is_free]
        first = self._rules.sync_rounds_first
        waits = [index for index in free if self._rules.waits or places[index].round <= first]
        if waits:
            return min(waits, key=lambda index: (places[index].round, index))
        return min(free, key=lambda index: (index - self._next) % len(places), default=None)

    def took(self, fragment: int) -> None:
        """An update of this fragment was formed."""
        self._next = (fragment + 1) % self._rules.fragments
