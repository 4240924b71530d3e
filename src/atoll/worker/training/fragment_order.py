"""Choose the fragment to synchronise next. Every worker uses the same rule, so that no two wait for each other.

In synchronous runs, the next fragment is the one with the lowest (round, number) among the fragments that this worker
has not submitted. Usually, this is the cycle 0 … K−1. If a synchronisation is skipped or a worker joins later, all
workers still follow the same order. So the workers that the lowest open (round, number) waits for will submit to it
next. This file has no IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atoll.protocol import messages


@dataclass(frozen=True)
class SyncRules:
    """The run's rules for synchronising fragments.

    Attributes:
        every: H, local steps between two synchronisations of one fragment.
        fragments: K, number of fragments.
        tau: τ, local steps between forming an update and merging its result.
        alpha: α, share of the local parameters in a merge.
        max_inflight: number of this worker's updates that may be in flight at a time.
        waits: whether the run is synchronous: a round waits for its workers.
        on_missed: what happens to local steps if the head moved on without them: "rebase" carries them over to the new
            head, "reset" discards them.
        sync_rounds_first: number of synchronous rounds at the beginning of an asynchronous run.
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
        """Return the rules of a run.

        Args:
            info: the run's description.
            every: H.
        """
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
        """Whether training continues while an update is in flight (τ > 0)."""
        return self.tau > 0


class Place(NamedTuple):
    """The state of one fragment at a worker, as far as the choice of the next fragment depends on it.

    Attributes:
        round: the round that the worker takes part in next.
        is_free: whether the fragment is neither in flight nor finished.
        local_steps: H_w, if the run has given this worker its own number of local steps (DyLU); else 0.
    """

    round: int
    is_free: bool = True
    local_steps: int = 0


class FragmentOrder:
    """The order in which one worker synchronises fragments.

    Args:
        rules: the run's rules.
        first: the first fragment to synchronise in an asynchronous run.
    """

    def __init__(self, rules: SyncRules, first: int = 0) -> None:
        self._rules, self._next = rules, first

    def steps_between(self, places: Sequence[Place]) -> int:
        """Return the local steps between two synchronisations of any fragment: H/K, or H_w/K with DyLU."""
        h = min((each.local_steps for each in places if each.local_steps), default=self._rules.every)
        return max(1, h // len(places))

    def pick(self, places: Sequence[Place]) -> int | None:
        """Return the fragment to synchronise next; None if every fragment is finished or in flight."""
        free = [index for index, each in enumerate(places) if each.is_free]
        first = self._rules.sync_rounds_first
        waits = [index for index in free if self._rules.waits or places[index].round <= first]
        if waits:
            return min(waits, key=lambda index: (places[index].round, index))
        return min(free, key=lambda index: (index - self._next) % len(places), default=None)

    def took(self, fragment: int) -> None:
        """Record that an update of this fragment was formed."""
        self._next = (fragment + 1) % self._rules.fragments
