"""Copies of the weights, which optimizers keep, under algorithms that change the weights after each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.algorithms.copies_in_optimizers import (
    Pair,
    Sample,
    Weights,
    are_equal,
    fill,
    is_average,
    may_be_copied,
    may_have_no_memory,
    sampled_points,
    tensors_in,
)
from atoll.algorithms.undone_loads import Load
from atoll.algorithms.weight_copies import SHORT_LOOKS, STEPS_UNTIL_STATE, WATCHED_STEPS
from atoll.errors import UsageError
from atoll.tensors.module_tensors import PLAIN

STEPS_BETWEEN_SHORT_LOOKS = 4
"""Steps between looks at one parameter's state, after the first of these (`SHORT_LOOKS`)."""


class CorrectedCopies:
    """Lets what an algorithm changes in the weights after a step reach the copies from which the next step starts.

    A copy that has equalled the weights after every step is changed itself, in its own dtype, and the weights get its
    values: a small change would be lost in bf16. If a copy follows the weights, but is another tensor in between, as in
    schedule-free optimizers, the next step would undo a part of the change, so it is refused.

    Args:
        optimizer: the optimizer that makes the steps.
        parameters: the model's parameters, with the weights before the first of these steps.
        algorithm: the algorithm's name, for messages.
    """

    def __init__(self, optimizer: Optimizer, parameters: Iterable[Tensor], algorithm: str) -> None:
        plain = [each for each in parameters if type(each) in PLAIN and may_be_copied(each)]
        self._weights = Weights(() if may_have_no_memory(optimizer) else plain)
        self._optimizer, self._algorithm = optimizer, algorithm
        self._load = Load(Sample(Weights()), Sample(self._weights))
        self._steps_left, self._seen = WATCHED_STEPS, set[str]()
        self._followed, self._differed = set[str](), set[str]()

    @property
    def are_possible(self) -> bool:
        """Whether there are copies that change with the weights, or may be: `changing` has something to do."""
        return bool(self._weights.by_place and (self._steps_left or self._followed))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Let what the `with` block changes in the weights, after a step, reach the copies.

        Raises:
            UsageError: the block has changed weights of which the optimizer keeps a copy that cannot be changed.
        """
        found = tensors_in(self._optimizer, self._weights) if self._is_searched() else {}
        self._compare(found)
        if not found:
            yield
            return
        partly = {place: pairs for place, pairs in found.items() if place in self._followed & self._differed}
        before = {place: [sampled_points(each.parameter).clone() for each in pairs] for place, pairs in partly.items()}
        with _in_place_of_weights([pair for place in found.keys() - self._differed for pair in found[place]]):
            yield
        for place, points in before.items():
            now = [sampled_points(each.parameter) for each in partly[place]]
            if not all(map(torch.equal, points, now)):
                raise UsageError(
                    f"The optimizer keeps a copy of the weights, {place}, from which its steps start, and which does "
                    f"not equal them after each step. {self._algorithm} changes the weights after each step, and the "
                    "next steps would undo a part of that.",
                    "Use an optimizer without such a copy, or fedprox or fedavg. With Lookahead, pass the optimizer "
                    "inside of it.",
                )

    def _is_searched(self) -> bool:
        """Return whether some tensors may be copies, after this step, or are not known yet."""
        is_first = self._steps_left > WATCHED_STEPS - STEPS_UNTIL_STATE
        if is_first or self._followed or (self._steps_left and self._seen - self._differed):
            return True
        steps = WATCHED_STEPS - self._steps_left
        if steps > SHORT_LOOKS and steps % STEPS_BETWEEN_SHORT_LOOKS:
            return False
        few = tensors_in(self._optimizer, self._weights, most=1)
        return any(place not in self._seen or are_equal(pairs[:1]) for place, pairs in few.items())

    def _compare(self, found: Mapping[str, Sequence[Pair]]) -> None:
        """Note which tensors equal the weights after this step, and which do not."""
        if not self._steps_left:
            return
        self._steps_left -= 1
        self._seen |= found.keys()
        for place, pairs in found.items():
            if is_average(place) or not are_equal(pairs):
                self._differed.add(place)
            elif self._load.has_moved(pairs):
                self._followed.add(place)


@contextmanager
def _in_place_of_weights(pairs: Sequence[Pair]) -> Iterator[None]:
    """Let the `with` block change copies in place of their parameters. At its end, these get the values of the copies.

    Args:
        pairs: the parameters and copies, which are equal up to a cast. Of a parameter's copies, the first is changed.
    """
    weights, wide = dict[int, Tensor](), dict[int, Tensor]()
    for parameter, copy in pairs:
        if id(parameter) not in weights and copy.element_size() >= parameter.element_size():
            weights[id(parameter)], wide[id(parameter)] = parameter.data, copy.detach().to(parameter.device)
            parameter.data = wide[id(parameter)]
    try:
        yield
    finally:
        for parameter, _ in pairs:
            if id(parameter) in weights:
                parameter.data = weights.pop(id(parameter))
                fill([Pair(parameter, wide[id(parameter)])], from_copies=True)
        for parameter, copy in pairs:
            copy.detach().copy_(wide.get(id(parameter), parameter.detach()))
