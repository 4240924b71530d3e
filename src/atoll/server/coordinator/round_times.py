"""How long rounds and tickets take: the estimate of a run's remaining time, and sites that are slower than usual."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean, median

from atoll.protocol import run_events
from atoll.protocol.status_headline import is_late
from atoll.rounds.state import State

STEADY = 2.0
"""A first round that takes longer than so many medians of the later ones is not steady."""
ROUNDS = 20
"""Number of last rounds of each fragment in the estimate. Older rounds say little about the current workers."""


def left_s(commits_s: Sequence[float], commits_left: int, now_s: float) -> float | None:
    """Return the estimated seconds until `commits_left` more versions are committed.

    Return None without three times, and while the open round is late: how long it still takes is not known then.

    The estimate is `commits_left` × the mean time between commits, minus the time since the last commit. At most one
    mean is subtracted: a round that takes longer than the others does not make later rounds shorter. Rounds before the
    first steady one do not count: sites load data and compile in them.

    Args:
        commits_s: times of commits, in order.
        commits_left: number of commits until the end of the run.
        now_s: current time, by the same clock.
    """
    if len(commits_s) < 3:
        return None
    rounds_s = [after - before for before, after in pairwise(commits_s)]
    while len(rounds_s) > 1 and rounds_s[0] > STEADY * median(rounds_s[1:]):
        del rounds_s[0]
    each_s, spent_s = mean(rounds_s), max(0.0, now_s - commits_s[-1])
    if commits_left and is_late(spent_s, each_s):
        return None
    return max(0.0, commits_left * each_s - min(spent_s, each_s))


class TimeLeft:
    """Estimates a run's remaining time from the rounds since the server started.

    Args:
        rounds: the setting `rounds.total`; 0 if the run has no end.
        fragments: number of fragments of the model.
    """

    def __init__(self, rounds: int, fragments: int) -> None:
        self._rounds, self._fragments, self._count = rounds, fragments, 0
        self._commits_s: deque[float] = deque(maxlen=ROUNDS * fragments + 1)

    def committed(self, now_s: float) -> None:
        """Record a commit at time `now_s`.

        The first round of each fragment gives no time: it contains the start of the sites.
        """
        self._count += 1
        if self._count >= self._fragments:
            self._commits_s.append(now_s)

    def begin_again(self) -> None:
        """Forget the times so far, because the run was paused between them."""
        self._commits_s.clear()

    def of(self, state: State, now_s: float) -> float | None:
        """Return the estimated remaining seconds.

        Return None if the run has no end, is over, paused or being stopped, if too few sites take part, if the open
        round is late, or before this process has committed two rounds after the first.
        """
        stands_still = len(state.active_s) < state.rules.floor and any(each.phase == "open" for each in state.rounds)
        if not self._rounds or state.finished or state.paused or state.stopping or stands_still:
            return None
        return left_s(self._commits_s, sum(max(0, self._rounds - each.done) for each in state.rounds), now_s)


class TicketTimes:
    """For how long sites have their tickets: now, and usually. It follows the run's events.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._start_s = clock, clock()
        self._begun_s: dict[int, float] = {}  # ticket → when the site got it
        self._took_s: dict[str, deque[float]] = {}

    def on_event(self, event: run_events.Happened) -> None:
        """Note when a site gets a ticket, and how long it then takes until its update is complete."""
        match event:
            case run_events.TicketIssued(ticket=ticket):
                self._begun_s[ticket] = self._clock()
            case run_events.UpdateAccepted(site=site, ticket=ticket) if ticket in self._begun_s:
                self._took_s.setdefault(site, deque(maxlen=ROUNDS)).append(self._clock() - self._begun_s[ticket])

    def of(self, state: State, now_s: float) -> dict[str, float]:
        """Return site → seconds for which it has its oldest open ticket, and forget tickets that are over.

        For a ticket that is older than the server's start, return the seconds since then.
        """
        held = {
            each.id: each.site for round_ in state.rounds for each in round_.tickets.values() if each.state == "open"
        }
        self._begun_s = {ticket: self._begun_s.get(ticket, self._start_s) for ticket in held}
        return {held[ticket]: max(0.0, now_s - self._begun_s[ticket]) for ticket in sorted(held, reverse=True)}

    def usual_s(self, site: str) -> float:
        """Return the usual seconds from a site's ticket to its update; 0: not known yet."""
        return median(self._took_s.get(site, [0.0]))
