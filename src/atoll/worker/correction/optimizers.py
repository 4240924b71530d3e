"""Optimizers that a script hands over: which of a wrapper's steps, what they train, and hooks on their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import UsageError
from atoll.worker.log_lines import LOG

Given = Optimizer | Sequence[Optimizer]
"""One optimizer, or several in the order in which they step."""


def innermost(optimizer: Any) -> Optimizer:
    """The optimizer whose step hooks are called: the given one, or what it wraps, as Accelerate's wrapper does.

    Raises:
        UsageError: it is no optimizer of torch, and wraps none.
    """
    inner = optimizer
    while not _calls_hooks(inner):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise UsageError(
                f"The optimizer is a {type(optimizer).__name__}, which calls no step hooks.",
                "Use one that is a torch.optim.Optimizer, or that keeps one as its attribute `optimizer`.",
            )
    assert isinstance(inner, Optimizer)
    return inner


def _calls_hooks(optimizer: object) -> bool:
    """Whether `Optimizer.__init__` was called, which prepares the hooks; Accelerate's wrapper does not call it."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer)


def optimizers_in(given: Given | Any) -> tuple[Optimizer, ...]:
    """One optimizer or a sequence of them, without wrappers.

    Raises:
        UsageError: there is none, one occurs twice, or one is no optimizer.
    """
    if isinstance(given, Mapping | set | frozenset | str):
        raise UsageError(
            f"The optimizers are in a {type(given).__name__}.", "Give a list, in the order in which they step."
        )
    found = tuple(map(innermost, given)) if isinstance(given, Iterable) else (innermost(given),)
    if not found:
        raise UsageError("There is no optimizer in the list.", "Give those whose step() trains the model.")
    if len(set(map(id, found))) < len(found):
        raise UsageError("An optimizer is in the list twice.", "Give each once, in the order in which they step.")
    return found


def require_trains(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer that trains something else.

    Args:
        parameters: of the model, by name.

    Raises:
        UsageError: it holds none of these parameters.
    """
    ids = set(map(id, parameters.values()))
    for optimizer in optimizers:
        if ids.isdisjoint(held_by([optimizer])):
            raise UsageError(
                f"The optimizer {type(optimizer).__name__} holds none of the model's parameters.",
                "Build it with optimizer(model.parameters(), ...), of the model that is trained.",
            )


ALL_AS_A_LIST = "What another one steps is not seen, and drifts from the run's model. Give all optimizers, as a list"
ALL_CORRECTED = "What another one steps is not corrected. Give all optimizers, as a list"
ALL_IN_ONE = "What another one steps is not corrected. Put all parameters into one optimizer"


def warn_of_what_none_trains(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], site: str, told: str = ALL_AS_A_LIST
) -> None:
    """Warn about trainable parameters that none of the optimizers holds: another one may step them, unseen.

    Args:
        told: what that leads to, and the remedy.
    """
    held = held_by(optimizers)
    trainable = {name: id(value) for name, value in parameters.items() if value.requires_grad}
    missing = [name for name, each in trainable.items() if each not in held]
    if missing:
        LOG.warning(
            "%s: the optimizer holds %d of the model's %d trainable parameters; %r is not among them. %s; or set "
            "requires_grad = False where nothing is trained.",
            site,
            len(trainable) - len(missing),
            len(trainable),
            missing[0],
            told,
        )


def held_by(optimizers: Sequence[Optimizer]) -> set[int]:
    """The ids of the parameters that they train."""
    return {id(value) for each in optimizers for group in each.param_groups for value in group["params"]}


class Steps:
    """Calls a function behind every step of the last of several optimizers.

    Args:
        optimizers: in the order in which they step.
        after: called once a step, also under `torch.compile`, where a step of the optimizer calls it outside of
            compiled code.
        site: for the warning.
    """

    def __init__(self, optimizers: Sequence[Optimizer], after: Callable[[], None], site: str) -> None:
        self._after, self._site = after, site
        self._begun = False
        self._awaited = {id(each): type(each).__name__ for each in optimizers[:-1]}
        self._warned = not self._awaited
        self._handles: list[Any] = []
        try:
            for each in optimizers[:-1]:
                self._handles.append(each.register_step_post_hook(outside_compiled(self._of_another)))
            self._handles.append(optimizers[-1].register_step_pre_hook(outside_compiled(self._begin)))
            self._handles.append(optimizers[-1].register_step_post_hook(outside_compiled(self._end)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()

    def _of_another(self, optimizer: Optimizer, *_: Any) -> None:
        self._awaited.pop(id(optimizer), None)

    def _begin(self, *_: Any) -> None:
        self._begun = True

    def _end(self, *_: Any) -> None:
        if not self._begun:  # where step() of a class calls that of its parent, torch calls the hooks of both
            return
        self._begun = False
        if not self._warned and self._awaited:
            LOG.warning(
                "%s: the last optimizer of the list stepped before %s. A synchronisation follows the last one: give "
                "them in the order in which they step.",
                self._site,
                ", ".join(self._awaited.values()),
            )
        self._warned = True
        self._after()


def outside_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Have `torch.compile` call a hook as it is: it moves tensors in ways that compiled code does not survive."""
    return torch.compiler.disable(hook)  # type: ignore[no-any-return,no-untyped-call]
