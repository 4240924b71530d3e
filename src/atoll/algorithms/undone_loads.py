"""Signs in the steps after a load of other weights that a copy, which was not loaded, undoes it.

`Load` compares the first step with the second: it may lead back to the weights before the load. `Companion` finds other
weights towards which each step draws the model's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.algorithms.copies_in_optimizers import Memory, Pair, Sample, are_equal, gathered, sampled_points

TIMES_THE_NOISE = 6
"""A tensor is on its way back if the way is so many times the noise that is expected in it by chance."""
FEWEST_ELEMENTS = 8
"""Elements of a tensor below which noise may look like a way back."""
RETURN_RATIO = 0.25
"""A step jumped back if a return to the earlier weights explains it so many times better than an ordinary step does."""
DRAWN_STEPS = 3
"""Steps in a row that other weights have to explain, so that they are no chance."""
UNEXPLAINED_SHARE = 0.01
"""Share of a step that may remain unexplained, because of rounding."""
HALF_WAY = 0.5
"""Cosine of the angle from which on a change leads towards the weights, as that of an average does."""


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
        self._first: Tensor | None = None  # after the first step
        self.returned: set[tuple[object, ...]] = set()

    def is_of(self, tensors: Memory) -> bool:
        """Return whether the load was into these tensors."""
        return self._after.is_of(tensors)

    def is_before(self, pairs: Sequence[Pair]) -> bool:
        """Return whether these tensors have the values from before the load."""
        return self.changed and are_equal(pairs, self._before)

    def has_moved(self, pairs: Sequence[Pair]) -> bool:
        """Return whether the steps since the load have changed one of these parameters."""
        loaded = [(self._after.of(each.parameter), each.parameter) for each in pairs]
        return any(then is not None and not torch.equal(then, gathered([sampled_points(now)])) for then, now in loaded)

    def jumps_back(self, now: Tensor) -> bool:
        """Return whether the first step after the load started from the weights before it, judged by the second step.

        Args:
            now: elements of the weights before a step, at every step until `is_decided`.
        """
        if torch.equal(now, self._after.values if self._first is None else self._first):
            return False  # nothing has moved
        if self._first is None:
            self._first = now
            return False
        self.is_decided = True
        before, after, step = self._before.values, self._after.values, now - self._first
        beyond = self._first - after - step  # what the first step did beyond what the second one did
        self.returned = {
            place for place, part in self._after.parts.items() if _is_return(beyond[part], before[part] - after[part])
        }
        back, onward = (self._first - before - step).norm(), beyond.norm()
        return bool((after - before).norm() >= step.norm() and back < RETURN_RATIO * onward)


def _is_return(change: Tensor, back: Tensor) -> bool:
    """Return whether a change of one tensor is, but for noise, the way back to the values before a load."""
    if change.numel() < FEWEST_ELEMENTS or not back.any():
        return False
    share = change @ back / (back @ back)
    noise = (change - share * back).norm() / (change.numel() - 1) ** 0.5
    return bool(abs(share - 1) < 0.5 and share * back.norm() > TIMES_THE_NOISE * noise)


class Companion:
    """Watches tensors that may be other weights, towards which each step draws the model's.

    In a schedule-free optimizer, z equals the weights at most at the first step. A step is Δw = a·(z − w) + b·Δz there,
    with a > 0. An average of the weights does not count: its own steps lead towards these.

    Attributes:
        steps: number of the last steps in a row that the tensors explain in this way.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._last: tuple[Tensor, Tensor] | None = None

    def note(self, copy: Tensor, weights: Tensor) -> None:
        """Record elements of the tensors and of the weights after a step."""
        last, self._last = self._last, (copy, weights)
        if last is None or torch.equal(weights, last[1]):
            return
        then, earlier = last
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
