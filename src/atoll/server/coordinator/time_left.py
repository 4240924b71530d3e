"""How long a run will still take, by how long its last rounds took."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from atoll.rounds.state import State

ROUNDS = 20
"""Of each fragment, that are looked at: what was long ago says little of the workers that there are now."""


def left_s(commits_s: Sequence[float], commits_left: int, now_s: float) -> float | None:
    """Seconds that further commits take, by the mean distance of those measured; None where none was.

    The time since the last one is spent, up to one distance: a round that takes longer than the others does not make
    those behind it shorter.

    Args:
        commits_s: when versions were committed, in order; before them when the first of these rounds was opened.
    """
    if len(commits_s) < 2:
        return None
    each_s = (commits_s[-1] - commits_s[0]) / (len(commits_s) - 1)
    return max(0.0, commits_left * each_s - min(max(0.0, now_s - commits_s[-1]), each_s))


class TimeLeft:
    """Of one run, since this server started: the time in which there was none is no round's.

    Args:
        rounds: of the run, as it was set; 0: until it is stopped.
    """

    def __init__(self, rounds: int, fragments: int) -> None:
        self._rounds = rounds
        self._commits_s: deque[float] = deque(maxlen=ROUNDS * fragments + 1)

    def committed(self, opened_s: float, now_s: float) -> None:
        """A version was committed, of a round that was opened at `opened_s`."""
        if not self._commits_s:
            self._commits_s.append(opened_s)
        self._commits_s.append(now_s)

    def of(self, state: State, now_s: float) -> float | None:
        """Seconds; None where the run has no end, is over, has had no round yet, or waits for a site."""
        stands_still = len(state.active_s) < state.rules.floor and any(each.phase == "open" for each in state.rounds)
        if not self._rounds or state.finished or stands_still:
            return None
        return left_s(self._commits_s, sum(max(0, self._rounds - each.done) for each in state.rounds), now_s)
