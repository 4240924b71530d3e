"""Steps of optimizers that train a model without Atoll's hooks, such as one that has replaced another in mid-run.

Atoll has hooks on the optimizers that a script has passed. A step of another one is neither counted nor corrected. So
`UnfollowedSteps` looks, before each step of each optimizer of the process, whether that optimizer trains the model.
These steps pass:

- steps of the followed optimizers, and of optimizers that these step inside of their own steps
- steps of an optimizer that holds a followed one, since it steps that one
- steps of optimizers of other models, of frozen parameters, and without a gradient, if they move nothing
- steps in a fork of the process
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.copies_in_optimizers import Sample, Weights, local_part, may_be_copied, parameters_copied
from atoll.algorithms.every_step import before_every_step, no_longer_before_steps
from atoll.tensors.module_tensors import PLAIN, gradients_of, memory_of, named_parameters

_of_models: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that were followed for some model: copies that they train are of that one, not of an equal one."""


def trained_by(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the parameters of a model that an optimizer holds, or holds a copy of, which it trains.

    Args:
        optimizer: the optimizer.
        parameters: the model's parameters, by name.
    """
    return _held_or_in(parameters_copied(optimizer, parameters.values()), optimizer, parameters)


def _held_or_in(copied: set[int], optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> set[str]:
    held = {_key(value) for group in optimizer.param_groups for value in group["params"]}
    return {name for name, value in parameters.items() if _key(value) in held or id(value) in copied}


def _key(parameter: Tensor) -> object:
    """Return a key that is equal for parameters with the same elements, as far as that can be known."""
    return memory_of(parameter) if type(parameter) in PLAIN else id(parameter)


class UnfollowedSteps:
    """Refuses a step that trains the model, of an optimizer that is not followed. Works until `close`.

    Args:
        model: the model.
        followed: the optimizers that are followed.
        is_within_a_step: whether the caller is within a step of one of these.
        refuse: called before a step of another one, with that optimizer and the name of a parameter that it trains.
        is_partial: whether other optimizers may train the parameters that those in `followed` do not hold.
    """

    def __init__(
        self,
        model: nn.Module,
        followed: Sequence[Optimizer],
        is_within_a_step: Callable[[], bool],
        refuse: Callable[[Optimizer, str], None],
        *,
        is_partial: bool,
    ) -> None:
        self._model, self._is_within_a_step, self._refuse = model, is_within_a_step, refuse
        self._followed = {id(each): each for each in followed}
        parameters = named_parameters(model) if is_partial else {}
        self._of_others = parameters.keys() - set[str]().union(*(trained_by(each, parameters) for each in followed))
        _of_models.update(followed)
        self._size_of_other: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._without_gradient: weakref.WeakKeyDictionary[Optimizer, Sample] = weakref.WeakKeyDictionary()
        self._process = os.getpid()
        self._thread = threading.get_ident()
        """The thread that trains the model, and the only one that reads its gradients: a backward pass replaces them
        without the GIL, and a read at that moment corrupts the memory of the process."""
        before_every_step(self._look)

    def close(self) -> None:
        """Refuse nothing from now on. Idempotent."""
        no_longer_before_steps(self._look)

    def _look(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if id(optimizer) in self._followed:
            self._thread = threading.get_ident()
            self._without_gradient.clear()
            return
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._size_of_other.get(optimizer) == size or os.getpid() != self._process:
            return
        if self._is_within_a_step() or self._holds_followed(optimizer):
            return
        parameters = named_parameters(self._model)  # a script may have replaced some
        if not _moves(optimizer, args, kwargs) and not self._has_moved(optimizer, parameters):
            return
        copied: set[int] = set()
        if optimizer not in _of_models and threading.get_ident() == self._thread:
            copied = parameters_copied(optimizer, parameters.values(), by_gradients=True)
        names = _held_or_in(copied, optimizer, parameters)
        if not names:
            self._size_of_other[optimizer] = size
        trained = [name for name in names - self._of_others if parameters[name].requires_grad]
        if trained:
            self._refuse(optimizer, min(trained))

    def _has_moved(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> bool:
        """Return whether parameters moved since an optimizer's last step, without a followed step in between.

        So a zero-order optimizer (MeZO), which has no gradients, is noticed at its second step.
        """
        names = _held_or_in(set(), optimizer, parameters) - self._of_others
        values = [parameters[name] for name in names if _is_compared(parameters[name])]
        now = Sample(Weights(values))
        last, self._without_gradient[optimizer] = self._without_gradient.get(optimizer), now
        return last is not None and last.values.shape == now.values.shape and not torch.equal(last.values, now.values)

    def _holds_followed(self, optimizer: Optimizer) -> bool:
        """Return whether one of the followed optimizers is in the attributes of this one, or of what these hold."""
        seen, waiting = set[int](), [optimizer]
        while waiting:
            each = waiting.pop()
            if id(each) in self._followed:
                return True
            if id(each) not in seen:
                seen.add(id(each))
                waiting += [held for value in vars(each).values() for held in _optimizers_in(value)]
        return False


def _is_compared(parameter: Tensor) -> bool:
    return parameter.requires_grad and may_be_copied(local_part(parameter))


def _moves(optimizer: Optimizer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a step may change parameters: it has a gradient, or a closure that makes one."""
    has_closure = any(map(callable, (*args[1:], *kwargs.values())))
    return has_closure or any(gradients_of(value) for group in optimizer.param_groups for value in group["params"])


def _optimizers_in(value: Any) -> list[Any]:
    values: Collection[Any] = (value,)
    if isinstance(value, list | tuple | Mapping):
        values = value.values() if isinstance(value, Mapping) else value
    return [each for each in values if hasattr(each, "param_groups") and hasattr(each, "__dict__")]
