"""Choose the fragment to synchronise next. All workers use the same rule, so that no two wait for each other.

A model has K fragments, with numbers from 0 to K−1; each has its own rounds. In synchronous runs, the next fragment is
the one with the lowest pair (round, fragment number) among those for which this worker has no update in flight.
Usually, this gives the cycle 0 … K−1. All workers follow this order, even after a synchronisation was skipped or a
worker joined later. So the open round with the lowest pair always gets the updates that it waits for.

This file has no IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from atoll.protocol import messages


@dataclass(frozen=True)
class SyncRules:
    """The run's rules for synchronising the fragments of a model.

    Attributes:
        every: H, local steps between two synchronisations of one fragment.
        fragments: K, number of fragments.
        tau: τ, local steps between forming an update and merging its result.
        alpha: α, share of the local parameters when a result is merged: w ← (1−α)·global + α·local.
        max_inflight: number of this worker's updates that may be in flight at a time: formed, but their results not
            merged.
        waits: whether the run is synchronous: a round waits for the updates of its workers.
        on_missed: what happens to this worker's local steps if the server made a new version without them: "rebase"
            adds them to the new version, "reset" discards them.
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
            every: H, local steps between two synchronisations of one fragment.
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
        """Whether training continues while an update is sent and its result is awaited (τ > 0)."""
        return self.tau > 0


class Candidate(NamedTuple):
    """The state of one fragment at a worker, as `FragmentOrder` needs it to choose the next fragment.

    Attributes:
        round: the round that the worker takes part in next.
        is_free: whether the fragment has no update in flight, and its rounds are not over.
        local_steps: this worker's number of local steps in this round, if the run adapts it to the worker's speed
            (DyLU) or changes it from a round on; else 0.
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

    def steps_between(self, candidates: Sequence[Candidate]) -> int:
        """Return the number of local steps from the synchronisation of one fragment to that of the next: H/K, or H_w/K.

        The run gives each worker its own number of local steps, H_w, if `diloco.dynamic_local_steps` is set (DyLU), or
        one to all workers if it changes H from a round on. While fragments are in rounds with different ones, the
        smallest counts.
        """
        return max(1, self.steps_of_all(candidates) // len(candidates))

    def steps_of_all(self, candidates: Sequence[Candidate]) -> int:
        """Return the number of local steps in which each fragment is synchronised once: H, or H_w."""
        return min((each.local_steps for each in candidates if each.local_steps), default=self._rules.every)

    def pick(self, candidates: Sequence[Candidate]) -> int | None:
        """Return the number of the fragment to synchronise next; None if no fragment is free."""
        free = [index for index, each in enumerate(candidates) if each.is_free]
        first = self._rules.sync_rounds_first
        waits = [index for index in free if self._rules.waits or candidates[index].round <= first]
        if waits:
            return min(waits, key=lambda index: (candidates[index].round, index))
        return min(free, key=lambda index: (index - self._next) % len(candidates), default=None)

    def took(self, fragment: int) -> None:
        """Record that an update of this fragment was formed. In an asynchronous run, the next fragment is then due."""
        self._next = (fragment + 1) % self._rules.fragments
