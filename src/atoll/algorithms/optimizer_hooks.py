"""Hooks on the user's own optimizers, whatever wraps them: they count steps, and correct them for one round.

    with fl_round.correct(model, optimizer):
        train()                               # plain training, whatever the algorithm
    fl_round.submit(model)

Steps are counted and learning rates read where they happen: under gradient accumulation, with a schedule, or in a
framework's loop. Where the gradient is formed inside the step, by a closure, gradients are corrected after the closure,
each time it is called. The loss that it returns then has the correction's penalty added, since a line search goes by
loss and gradient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.base import Correction, KeptState, LocalContext, LocalRule, Moved, Runs
from atoll.errors import UsageError
from atoll.tensors.module_tensors import named_parameters

LOG = logging.getLogger("atoll")

Given = Optimizer | Sequence[Optimizer]
"""One optimizer, or several in the order in which they step."""


# -- Optimizers that a script hands over: which of a wrapper's steps, and what they train.


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that calls step hooks: the given one, or what it wraps, as Accelerate's wrapper does.

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
    """Return one optimizer or a sequence of them, without wrappers.

    Raises:
        UsageError: there is none, one occurs twice, or one is no optimizer.
    """
    if isinstance(given, Mapping | set | frozenset | str):
        raise UsageError(
            f"The optimizers are in a {type(given).__name__}.", "Give a list, in the order in which they step."
        )
    found = tuple(map(innermost, given)) if isinstance(given, Iterable) else (innermost(given),)
    if not found:
        raise UsageError("There is no optimizer in the list.", "Give those that train the model by their step().")
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
    """Return the ids of the parameters that they train."""
    return {id(value) for each in optimizers for group in each.param_groups for value in group["params"]}


def outside_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Have `torch.compile` call a hook as it is: it moves tensors in ways that compiled code does not survive."""
    return torch.compiler.disable(hook)  # type: ignore[no-any-return,no-untyped-call]


# -- A DiLoCo loop counts the steps of several optimizers.


class Steps:
    """Calls a function after every step of the last of several optimizers.

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


# -- A federated round corrects the steps of its optimizers.


class StepHooks:
    """Counts the optimizer steps of one round, and corrects them where the run's algorithm has a local rule.

    Args:
        model: that is trained; its parameters are known by name.
        algorithm: its name, for messages.
        rule: how it corrects local training; None: not at all.
        version: reads the version that was pulled, by the names of its tensors; None: zeros.
        kept: what the site keeps between rounds; None: zeros.

    Attributes:
        steps: optimizer steps so far.
        rates: Σ η over them.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: str = "",
        rule: LocalRule | None = None,
        version: Runs | None = None,
        kept: KeptState | None = None,
    ) -> None:
        self.parameters, self.algorithm = named_parameters(model), algorithm
        self.steps, self.rates = 0, 0.0
        self.one_rate = rule is not None and rule.one_rate
        self.correction: Correction | None = None
        if rule is not None:
            if rule.keeps and version is not None and kept is None:
                raise UsageError(
                    f"{algorithm} keeps {', '.join(rule.keeps)} at a site, and this site holds none.",
                    "Begin a new run.",
                )
            zeros = _Zeros()
            self.correction = rule.start(LocalContext(self.parameters, version or zeros.read, kept or zeros))
        self._followed: list[_Followed] = []
        self._unended = False  # a step of the last optimizer, when its hooks were removed

    @property
    def changes_training(self) -> bool:
        """Whether a step with it is another one than without."""
        return self.correction is not None

    @property
    def shared(self) -> dict[str, Tensor]:
        """What every rank must have alike."""
        return self.correction.shared if self.correction is not None else {}

    def attach(self, optimizer: Given) -> StepHooks:
        """Follow the steps of an optimizer, or of several in the order in which they step, until `close`.

        Those of the last one are counted.

        Raises:
            UsageError: it follows another one already, one of these trains another model, or the algorithm cannot
                follow such optimizers.
        """
        if self._followed:
            raise UsageError(
                "The round is corrected already, by another call.", "Call it once, with all optimizers as a list."
            )
        *others, last = optimizers_in(optimizer)
        require_trains([*others, last], self.parameters)
        if self.one_rate:
            self._require_one_rate([*others, last])
        left = dict(self.parameters)
        for each in others if self.correction is not None else ():
            held = held_by([each])
            names = [name for name, value in left.items() if id(value) in held]
            left = {name: value for name, value in left.items() if name not in names}
            self._followed.append(_Followed(self, each, names, is_counted=False))
        self._followed.append(_Followed(self, last, list(left), is_counted=True))
        return self

    def _require_one_rate(self, optimizers: Sequence[Optimizer]) -> None:
        if len(optimizers) > 1:
            raise UsageError(
                f"{self.algorithm} follows one optimizer, and these are {len(optimizers)}: it divides what a round "
                "moved by the sum of one optimizer's learning rates.",
                "Put all parameters into one optimizer, with one learning rate; or run fedprox or fedavg.",
            )
        kind = type(optimizers[0])
        if any("LBFGS" in each.__name__ for each in kind.__mro__):
            raise UsageError(
                f"{kind.__name__} chooses the length of its steps by itself, and {self.algorithm} divides what a step "
                "moved by its learning rate.",
                "Use an optimizer that steps by its learning rate times a direction, as SGD does; or run fedprox "
                "or fedavg.",
            )

    def close(self) -> None:
        """Let go of the optimizers. Idempotent."""
        for each in self._followed:
            each.close()
            self._unended |= each.is_under_way and each is self._followed[-1]
        self._followed.clear()  # each refers to this object: the model would outlive the round

    def __enter__(self) -> StepHooks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def require_steps(self) -> None:
        """Refuse a round that was trained without the correction, or not at all.

        Raises:
            UsageError: training was to be corrected, and there was no step, one that did not end, or none with a
                learning rate where the algorithm divides by it.
        """
        if self.correction is None:
            return
        if self._unended or (self._followed and self._followed[-1].is_under_way):
            raise UsageError(
                "An optimizer step began and did not end: its correction is missing.",
                "Let optimizer.step() return before the round is submitted.",
            )
        if not self.steps:
            raise UsageError(
                f"{self.algorithm} saw no optimizer step in this round.",
                "Call fl_round.correct(model, optimizer) before training, with the optimizer that trains the model.",
            )
        if self.one_rate and not self.rates > 0:
            raise UsageError(
                f"The learning rates of this round's {self.steps} steps sum up to {self.rates:g}.",
                f"{self.algorithm} divides by the sum: at least one step needs a learning rate above zero.",
            )

    def finish(self, moved: Moved) -> Mapping[str, Runs]:
        """Return the algorithm's extra tensors for the update (SCAFFOLD: Δc), and store the site's own (SCAFFOLD: c_i).

        Raises:
            UsageError: as `require_steps`.
        """
        self.require_steps()
        return self.correction.finish(moved, self.rates) if self.correction is not None else {}

    def rate_of(self, optimizer: Optimizer) -> float:
        """Return η of the step that is about to happen; where nothing divides by it, the first group's, or 0.

        Raises:
            UsageError: the algorithm needs one rate, and there are several, none, or one that is no rate.
        """
        given = [group.get("lr") for group in optimizer.param_groups]
        if not self.one_rate:
            return float(given[0] or 0.0)
        if None in given:
            raise UsageError(
                f"{type(optimizer).__name__} has no learning rate: it chooses its steps by itself.",
                f"{self.algorithm} needs one: give lr=, or another optimizer, or run fedavg.",
            )
        rates = {float(rate) for rate in given if rate is not None}
        if len(rates) > 1:
            raise UsageError(
                f"The optimizer has the learning rates {', '.join(f'{rate:g}' for rate in sorted(rates))}.",
                f"{self.algorithm} needs one for all parameter groups.",
            )
        (rate,) = rates
        if not (math.isfinite(rate) and rate >= 0):
            raise UsageError(
                f"The learning rate is {rate:g}.", f"{self.algorithm} needs one that is finite and not negative."
            )
        return rate


class _Followed:
    """The steps of one optimizer.

    Args:
        names: of the parameters that are corrected around its steps.
        is_counted: whether its steps are those of the round.

    Attributes:
        is_under_way: whether a step has begun and not ended.
    """

    def __init__(self, hooks: StepHooks, optimizer: Optimizer, names: Collection[str], *, is_counted: bool) -> None:
        self._hooks, self._optimizer, self._names, self._is_counted = hooks, optimizer, names, is_counted
        self._rate = 0.0
        self.is_under_way = self._is_formed = False  # a step; a gradient in it
        self._depth = 0  # 2 where step() of a class calls that of its parent: torch calls the hooks of both
        self._handles = [
            optimizer.register_step_pre_hook(outside_compiled(self._begin)),
            optimizer.register_step_post_hook(outside_compiled(lambda *_: self._after())),
        ]

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """As torch calls it: `args` begin with the optimizer; what is returned takes their place."""
        self._depth += 1
        if self._depth > 1:
            return None
        self.is_under_way, self._is_formed = True, False
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._corrected(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._corrected(kwargs["closure"])}
        with self._a_failed_step_has_ended():
            self._before()
        return None

    def _corrected(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure with a corrected gradient, and with the loss that this is the gradient of."""

        def call() -> Any:
            with self._a_failed_step_has_ended():
                loss = closure()
                self._before()
                correction = self._hooks.correction
                if correction is None or not isinstance(loss, Tensor | int | float):
                    return loss
                with torch.no_grad():
                    penalty = correction.penalty(self._names)
                if penalty is None:
                    return loss
                return loss + (penalty.to(loss.device) if isinstance(loss, Tensor) else penalty.item())

        return call

    @contextmanager
    def _a_failed_step_has_ended(self) -> Iterator[None]:
        """Torch calls no hook after it; the next step is not one within it."""
        try:
            yield
        except BaseException:
            self._depth = 0
            raise

    def _before(self) -> None:
        self._rate = self._hooks.rate_of(self._optimizer)
        self._is_formed = self._is_formed or self._has_gradients()
        if self._hooks.correction is not None:
            with torch.no_grad():
                self._hooks.correction.before_step_(self._names)

    def _after(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self.is_under_way = False
        if not (self._is_formed or self._has_gradients()):  # an optimizer that steps twice clears them itself
            return  # a closure that formed no gradient: nothing moved
        if self._hooks.correction is not None:
            with torch.no_grad():
                self._hooks.correction.after_step_(self._names, self._rate)
        if self._is_counted:
            self._hooks.steps, self._hooks.rates = self._hooks.steps + 1, self._hooks.rates + self._rate

    def _has_gradients(self) -> bool:
        return any(value.grad is not None for group in self._optimizer.param_groups for value in group["params"])


class _Zeros:
    """A version, or a kept state, that is not here."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Nothing is kept."""
