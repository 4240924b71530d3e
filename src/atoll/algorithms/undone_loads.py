"""Signs in the steps after a load of other weights that a copy, which was not loaded, undoes it.

`Load` compares the first step with the second: it may lead back to the weights before the load. Or it compares a whole
round with the last one. `Companion` finds other weights towards which each step draws the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from atoll.algorithms.copies_in_optimizers import Pair, Place, Sample, Weights, are_equal, gathered, points_of

TIMES_THE_NOISE = 6
"""A tensor is on its way back if the way is so many times the noise that is expected in it by chance."""
FEWEST_ELEMENTS = 8
"""Elements of a tensor below which noise may look like a way back."""
RETURN_RATIO = 0.25
"""A step jumped back if a return to the earlier weights explains it so many times better than an ordinary step does."""
LEAST_STEP = 0.001
"""A second step that is a smaller share of the way back tells nothing: it may be the rest of a step to an optimum."""
SHRUNK = 0.6
"""Ratio of the third step to the second one below which the steps lead to an optimum."""
DRAWN_STEPS = 3
"""Steps in a row that other weights have to explain, so that they are no chance."""
UNEXPLAINED_SHARE = 0.01
"""Share of a step that may remain unexplained, because of rounding."""
LEAST_SHARE_OF_WAY = 0.1
"""A round's change that is a smaller share of the way back is no proof: training may end at the site's own optimum."""
LEAST_DIFFERENCE = 0.5
"""Share of a round's change by which it must differ from that of the last round if the load was not undone."""
HALF_WAY = 0.5
"""Cosine of the angle from which on a change leads towards the weights, as that of an average does."""


class Changes(NamedTuple):
    """What a round has changed in some elements of the weights: since the load, and since the weights before it."""

    local: Tensor
    own: Tensor


class Load:
    """One load of other weights into the model, and what the next steps tell of it.

    Args:
        before: elements of the weights before the load.
        after: the same elements after it.

    Attributes:
        changed: whether the load changed the weights.
        is_decided: whether it is known whether the next step jumped back to the weights before the load.
        returned: places in memory of tensors that seem to have jumped back, alone. One load is no proof of that.
    """

    def __init__(self, before: Sample, after: Sample) -> None:
        self._before, self._after = before, after
        self.changed = not torch.equal(before.values, after.values)
        self.is_decided = not self.changed
        self._seen = [after.values]  # the weights after the load, and after each of the first steps
        self._is_back = False
        self.returned: set[Place] = set()

    def is_of(self, weights: Weights) -> bool:
        """Return whether the load was into these tensors."""
        return self._after.is_of(weights)

    def is_before(self, pairs: Sequence[Pair]) -> bool:
        """Return whether these tensors have the values from before the load."""
        return self.changed and are_equal(pairs, self._before)

    def has_moved(self, pairs: Sequence[Pair]) -> bool:
        """Return whether the steps since the load have changed one of these parameters."""
        loaded = [(then, each.parameter) for each in pairs if (then := self._after.of(each.parameter)) is not None]
        now = gathered(points_of([each for _, each in loaded]))
        return bool(loaded) and not torch.equal(torch.cat([then for then, _ in loaded]), now)

    def jumps_back(self, now: Tensor, *, is_end: bool = False) -> bool:
        """Return whether the first step after the load started from the weights before it, judged by the second step.

        A step that leads to the site's own optimum goes the same way. But the steps after it shrink, so the third step
        is awaited, too.

        Args:
            now: elements of the weights before a step, at every step until `is_decided`.
            is_end: whether no further step follows.
        """
        if not torch.equal(now, self._seen[-1]):
            self._seen.append(now)
            if len(self._seen) == 3:
                self._judge()
            elif (
                len(self._seen) == 4 and (now - self._seen[2]).norm() < SHRUNK * (self._seen[2] - self._seen[1]).norm()
            ):
                self._is_back, self.returned = False, set()
        is_sign = self._is_back or bool(self.returned)
        self.is_decided = len(self._seen) == 4 or (len(self._seen) == 3 and (is_end or not is_sign))
        return self.is_decided and self._is_back

    def _judge(self) -> None:
        before, (after, first, second) = self._before.values, self._seen
        way, step = before - after, second - first
        beyond = first - after - step  # what the first step did beyond what the second one did
        if step.norm() < LEAST_STEP * way.norm():
            return
        moved, is_moved = dict[Place, slice](), torch.zeros_like(step, dtype=torch.bool)
        for place, part in self._after.parts.items():
            if step[part].any():  # else another optimizer made the second step, and this tensor's step is not known
                moved[place], is_moved[part] = part, True
        self.returned = {place for place, part in moved.items() if _is_return(beyond[part], way[part])}
        back = (first - before - step)[is_moved].norm()
        is_long = bool(way[is_moved].norm() >= step.norm())
        self._is_back = is_long and bool(back < RETURN_RATIO * beyond[is_moved].norm())

    def changes(self, now: Tensor) -> Changes:
        """Return what a round has changed in the weights. `now` has their elements at its end."""
        return Changes(now - self._after.values, now - self._before.values)

    def is_continued(self, now: Tensor, last: Changes) -> bool:
        """Return whether a round has repeated the change of the last round, but from the weights before the load.

        Without the steps in between, this is seen of constant gradients alone. Weights that are merely near those
        before the load are no sign: every round may end near the site's own optimum.

        Args:
            now: elements of the weights at the end of the round.
            last: what the last round has changed.
        """
        if now.shape != last.local.shape or not self.changed:
            return False
        local, own = self.changes(now)
        least = LEAST_SHARE_OF_WAY * (own - local).norm()
        return any(
            change.norm() >= least
            and (own - change).norm() <= UNEXPLAINED_SHARE * change.norm()
            and (local - last.local).norm() >= LEAST_DIFFERENCE * change.norm()
            for change in last
        )


def _is_return(change: Tensor, back: Tensor) -> bool:
    """Return whether a change of one tensor is, but for noise, the way back to the values before a load."""
    if change.numel() < FEWEST_ELEMENTS or not back.any():
        return False
    share = change @ back / (back @ back)
    noise = vector_norm(change - share * back) / (change.numel() - 1) ** 0.5
    return bool(abs(share - 1) < 0.5 and share * vector_norm(back) > TIMES_THE_NOISE * noise)


class Companion:
    """Watches tensors that may be other weights, towards which each step draws the model's.

    In a schedule-free optimizer, z equals the weights at most at the first step. A step is Δw = a·(z − w) + b·Δz there,
    with a > 0. An average of the weights does not count: its own steps lead towards these.

    Attributes:
        steps: number of the last steps in a row that the tensors explain in this way.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._last: tuple[Tensor, Tensor, int] | None = None

    def note(self, copy: Tensor, weights: Tensor, step: int) -> None:
        """Record elements of the tensors and of the weights before a step with this number."""
        last, self._last = self._last, (copy, weights, step)
        if last is None or last[2] + 1 < step or torch.equal(weights, last[1]):
            return
        then, earlier, _ = last
        change, way = copy - then, weights - then
        is_average = bool(change @ way > HALF_WAY * change.norm() * way.norm())
        draws = not is_average and _draws(weights - earlier, then - earlier, change)
        self.steps = self.steps + 1 if draws else 0

    def forget_last(self) -> None:
        """Begin anew after a load, which changed the weights alone."""
        self._last = None


def _draws(step: Tensor, way: Tensor, change: Tensor) -> bool:
    """Return whether a step is a·way + b·change with a > 0, and no multiple of the change alone."""
    if step.numel() < FEWEST_ELEMENTS or not change.any():
        return False
    along = (change @ step / (change @ change)) * change
    across = way - (change @ way / (change @ change)) * change
    if across.norm() <= UNEXPLAINED_SHARE * way.norm():
        return False
    share = across @ (step - along) / (across @ across)
    unexplained = (step - along - share * across).norm()
    most = min(UNEXPLAINED_SHARE * step.norm(), (step - along).norm() / TIMES_THE_NOISE)
    return bool(share > 0 and unexplained < most)
