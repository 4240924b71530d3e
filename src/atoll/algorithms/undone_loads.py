"""Signs in the steps after a load of other weights that a copy, which was not loaded, undoes it.

`Load` compares the first step with the second: it may lead back to the weights before the load. Or it compares a whole
round with the last one. `Anchor` finds other weights towards which each step draws the model's. `EarlierWeights`
knows for certain if a script puts weights of earlier rounds back: before the first step, they are those bit for bit.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from atoll.algorithms.copies_in_optimizers import (
    Pair,
    Place,
    Sample,
    Weights,
    are_equal,
    gathered,
    local_part,
    points_of,
)
from atoll.tensors.module_tensors import PLAIN

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
MOST_EARLIER = 1024
"""Digests of earlier weights that are kept, three for each round."""
MOST_SEARCHES = 8
"""Loads before which all tensors of the process are looked at, which takes as long as a collection of garbage."""
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


class EarlierWeights:
    """Tells whether a script puts weights from before the last load back into the model, after it.

    Only bits are compared, and of weights that no step has changed since the load. So it is no chance if they are equal
    to weights that the model had earlier, or to tensors that there were before the load, such as an average. Weights
    that a script changes on purpose, by noise, a mask, or a mixture with its own, are equal to neither.

    Attributes:
        are_back: whether the weights before the first step since the load were earlier ones, and have not been replaced
            by the loaded ones since then: a script may train its own model for a while, too.
    """

    def __init__(self) -> None:
        self._earlier: deque[int] = deque(maxlen=MOST_EARLIER)
        self._recent: list[int] = []  # digests of the version loaded last, and of what was trained from it
        self._loaded: int | None = None
        self._before = self._after = Sample(Weights())
        self._tensors: set[int] = set()  # digests of tensors that there were before the load
        self._searches_left, self._are_others = MOST_SEARCHES, False
        self._awaits_step = self.are_back = False

    def look_around(self, weights: Weights) -> None:
        """Before a load, find tensors that may be put back, if the weights were others than those loaded last time."""
        self._tensors = set()
        if self._are_others and self._searches_left:
            self._searches_left -= 1
            self._tensors = _digests_of_tensors_like(weights)

    def note_load(self, before: Sample, after: Sample) -> None:
        """Record a load. If it repeats the last one, weights that were trained in between are not earlier ones."""
        loaded = _digest(after.values)
        self._recent.append(_digest(before.values))
        if loaded != self._loaded:
            self._earlier += self._recent
            self._recent = [loaded]
        self._before, self._after = before, after
        self._loaded, self._awaits_step, self.are_back = loaded, True, False

    def note_end(self, now: Tensor) -> None:
        """Record the weights at the end of a round. What the script does then is not looked at."""
        self._recent.append(_digest(now))
        self._awaits_step = self.are_back = False

    def look(self, now: Tensor) -> None:
        """Compare elements of the weights before a step, at every step while `are_back`."""
        digest = _digest(now) if self._awaits_step or self.are_back else None
        if self._awaits_step:
            self._awaits_step = False
            changed = self._changed(now) if digest != self._loaded else []
            self._are_others = bool(changed) and not any(torch.equal(loaded, new) for loaded, new in changed)
            are_old = self._are_others and self._tensors.issuperset(_digest(new) for _, new in changed)
            self.are_back = are_old or (digest != self._loaded and digest in self._earlier)
        elif self.are_back:
            self.are_back = digest != self._loaded

    def _changed(self, now: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what was loaded and what is there now, of each tensor that the load changed."""
        before, loaded = self._before.values, self._after.values
        parts = self._after.parts.values() if before.shape == loaded.shape == now.shape else ()
        return [(loaded[part], now[part]) for part in parts if not torch.equal(before[part], loaded[part])]


def _digest(values: Tensor) -> int:
    return hash(values.numpy().tobytes())


def _digests_of_tensors_like(weights: Weights) -> set[int]:
    """Return digests of some elements of all tensors of this process that have the shape of one of the weights."""
    dtypes = {each.shape: each.dtype for each in map(local_part, weights.sampled.values())}
    devices = {each.device for each in weights.sampled.values()}
    alike = [
        each.detach()
        for each in gc.get_objects()
        if type(each) in PLAIN
        and not each.is_nested  # such a tensor of the script has no shape
        and each.shape in dtypes
        and each.is_floating_point()
        and each.device in devices
        and each.layout == torch.strided
        and each.data_ptr()
    ]
    pieces = [piece.to(dtypes[each.shape]) for piece, each in zip(points_of(alike), alike, strict=True)]
    return (
        {_digest(each) for each in torch.split(gathered(pieces), list(map(Tensor.numel, pieces)))} if pieces else set()
    )


class Anchor:
    """Tells whether each step draws the model's weights towards tensors of the optimizer, which may be other weights.

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
