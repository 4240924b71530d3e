"""Hooks on a script's optimizers. They count the steps of one round, and correct each step as the algorithm says.

    with fl_round.correct(model, optimizer):
        train()                               # the same training code for every algorithm
    fl_round.submit(model)

The hooks run at each optimizer step and read the current learning rate. So gradient accumulation, schedules and
frameworks' training loops work unchanged.

If the optimizer's step takes a closure, the gradients are corrected after each call of the closure. The correction's
penalty is then added to the closure's loss, because a line search needs loss and gradient to match.
"""

from __future__ import annotations

import logging
import math
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.base import ChangeReader, Correction, ElementReader, LocalContext, LocalRule, SiteState
from atoll.errors import UsageError
from atoll.tensors.module_tensors import named_parameters

LOG = logging.getLogger("atoll")

Given = Optimizer | Sequence[Optimizer]
"""One optimizer, or several in the order in which they step."""


# -- Optimizers from a script: unwrap them, and check which parameters they hold.


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that calls step hooks: the given one, or the one inside a wrapper such as Accelerate's.

    Raises:
        UsageError: `optimizer` is neither a torch optimizer nor a wrapper of one.
    """
    inner = optimizer
    while not _calls_hooks(inner):
        inner = getattr(inner, "optimizer", None)
        if inner is None:
            raise UsageError(
                f"The optimizer is of type {type(optimizer).__name__}, which does not call step hooks.",
                "Use a torch.optim.Optimizer, or a wrapper that has one in its attribute `optimizer`.",
            )
    assert isinstance(inner, Optimizer)
    return inner


def _calls_hooks(optimizer: object) -> bool:
    """Return whether `Optimizer.__init__` ran, which sets up the hooks. It does not run in Accelerate's wrapper."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer)


def optimizers_in(optimizers: Given | Any) -> tuple[Optimizer, ...]:
    """Return the given optimizers as a tuple, without wrappers.

    Raises:
        UsageError: the list is empty, an optimizer is in the list twice, or an element is not an optimizer.
    """
    if isinstance(optimizers, Mapping | set | frozenset | str):
        raise UsageError(
            f"The optimizers are in an object of type {type(optimizers).__name__}, not a list.",
            "Pass a list, in the order in which the optimizers step.",
        )
    found = tuple(map(innermost, optimizers)) if isinstance(optimizers, Iterable) else (innermost(optimizers),)
    if not found:
        raise UsageError("The list of optimizers is empty.", "Pass the optimizers that train the model.")
    if len(set(map(id, found))) < len(found):
        raise UsageError("The list contains an optimizer twice.", "Pass each once, in the order in which they step.")
    return found


def require_trains(optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]) -> None:
    """Check that each optimizer holds parameters of the model.

    Args:
        optimizers: the optimizers to check.
        parameters: the model's parameters, by name.

    Raises:
        UsageError: an optimizer holds none of these parameters.
    """
    ids = set(map(id, parameters.values()))
    for optimizer in optimizers:
        if ids.isdisjoint(held_by([optimizer])):
            raise UsageError(
                f"The optimizer {type(optimizer).__name__} holds none of the model's parameters.",
                "Build it with model.parameters() of the model that is trained.",
            )


ALL_AS_A_LIST = (
    "Steps of another optimizer are not noticed, and its parameters drift away from the run's model. Pass "
    "all optimizers, as a list"
)
ALL_CORRECTED = "Steps of another optimizer are not corrected. Pass all optimizers, as a list"
ALL_IN_ONE = "Steps of another optimizer are not corrected. Put all parameters into one optimizer"


def warn_of_unheld_parameters(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor], site: str, advice: str = ALL_AS_A_LIST
) -> None:
    """Warn if these optimizers do not hold all trainable parameters: Atoll does not see the steps of other optimizers.

    Args:
        optimizers: all optimizers to which Atoll has added hooks.
        parameters: the model's parameters, by name.
        site: the site's name, for the message.
        advice: the consequence and the remedy, for the message.
    """
    held_parameters = held_by(optimizers)
    trainable = {name: id(value) for name, value in parameters.items() if value.requires_grad}
    missing = [name for name, each in trainable.items() if each not in held_parameters]
    if missing:
        LOG.warning(
            "%s: the optimizer holds only %d of the model's %d trainable parameters; for example, %r is missing. "
            "%s, or set requires_grad = False for parameters that are not trained.",
            site,
            len(trainable) - len(missing),
            len(trainable),
            missing[0],
            advice,
        )


def held_by(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return `id(parameter)` for each parameter that one of the optimizers holds."""
    return {id(value) for each in optimizers for group in each.param_groups for value in group["params"]}


def outside_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a hook from `torch.compile`: hooks move tensors in ways that break compiled code."""
    return torch.compiler.disable(hook)  # type: ignore[no-any-return,no-untyped-call]


# -- Step counting for DiLoCo, with one or several optimizers.


class Steps:
    """Hooks that call a function after every step of the last optimizer in a list.

    Args:
        optimizers: the optimizers, in the order in which they step.
        after: the function to call after each step. Under `torch.compile` it runs outside of compiled code.
        site: the site's name, for the warning that the optimizers step in another order.
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
        if not self._begun:  # if step() of a class calls its parent's step(), torch calls the hooks for both
            return
        self._begun = False
        if not self._warned and self._awaited:
            LOG.warning(
                "%s: the last optimizer in the list stepped before the others (%s), but Atoll synchronises after the "
                "step of the last optimizer. Pass the optimizers in the order in which they step.",
                self._site,
                ", ".join(self._awaited.values()),
            )
        self._warned = True
        self._after()


# -- Step counting and corrections for federated rounds.


class StepHooks:
    """Hooks that count the optimizer steps of one round and, if the run's algorithm has a local rule, correct them.

    Args:
        model: the model that is trained.
        algorithm: the algorithm's name, for messages.
        rule: the algorithm's local rule; None: steps are counted but not corrected.
        version: a function that reads tensors of the downloaded version, by name; None: all values are zeros.
        site_state: the tensors that the site keeps between rounds; None: all values are zeros.
        own: names of parameters that the site keeps for itself, whose steps are not corrected.

    Attributes:
        steps: number of optimizer steps so far.
        rate_sum: Σ η, the sum of the learning rates of these steps.
        under_way: optimizers in a step that has started and not ended.

    Raises:
        UsageError: the rule keeps tensors between rounds, but `version` is given without `site_state`.
    """

    def __init__(
        self,
        model: nn.Module,
        algorithm: str = "",
        rule: LocalRule | None = None,
        version: ElementReader | None = None,
        site_state: SiteState | None = None,
        *,
        own: Collection[str] = (),
    ) -> None:
        self.parameters, self.algorithm = named_parameters(model), algorithm
        self._shared = {name: value for name, value in self.parameters.items() if name not in own}
        self.steps, self.rate_sum = 0, 0.0
        self.one_rate = rule is not None and rule.one_rate
        self.correction: Correction | None = None
        if rule is not None:
            if rule.state_groups and version is not None and site_state is None:
                raise UsageError(
                    f"{algorithm} keeps tensors ({', '.join(rule.state_groups)}) at each site, but this site has none.",
                    "Start a new run.",
                )
            zeros = _Zeros()
            self.correction = rule.start(LocalContext(self._shared, version or zeros.read, site_state or zeros))
        self._followed: list[_Followed] = []
        self.under_way: set[Optimizer] = set()

    @property
    def changes_training(self) -> bool:
        """Whether the algorithm corrects the steps."""
        return self.correction is not None

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors that must be equal at all ranks, by name (`Correction.shared`)."""
        return self.correction.shared if self.correction is not None else {}

    def attach(self, optimizer: Given) -> StepHooks:
        """Add the hooks to the optimizers, until `close`.

        Args:
            optimizer: one optimizer, or several in the order in which they step. Only the steps of the last optimizer
                are counted.

        Raises:
            UsageError: the hooks of an earlier call are still there, an optimizer holds none of the model's parameters,
                or the algorithm does not work with these optimizers.
        """
        if self._followed:
            raise UsageError(
                "Another call already corrects this round.", "Call correct() once, with all optimizers in a list."
            )
        self.under_way.clear()  # after a failed step, another optimizer may take its place
        *others, last = optimizers_in(optimizer)
        require_trains([*others, last], self.parameters)
        if self.one_rate:
            self._require_one_rate([*others, last])
        remaining = dict(self._shared)
        for each in others if self.correction is not None else ():
            held_parameters = held_by([each])
            names = [name for name, value in remaining.items() if id(value) in held_parameters]
            remaining = {name: value for name, value in remaining.items() if name not in names}
            self._followed.append(_Followed(self, each, names, is_counted=False))
        self._followed.append(_Followed(self, last, list(remaining), is_counted=True))
        return self

    def _require_one_rate(self, optimizers: Sequence[Optimizer]) -> None:
        if len(optimizers) > 1:
            raise UsageError(
                f"{self.algorithm} supports one optimizer, not {len(optimizers)}: it divides the change of a "
                "round by the sum of one optimizer's learning rates.",
                "Put all parameters into one optimizer with one learning rate, or use fedprox or fedavg.",
            )
        kind = type(optimizers[0])
        if any("LBFGS" in each.__name__ for each in kind.__mro__):
            raise UsageError(
                f"{kind.__name__} chooses its own step length, but {self.algorithm} divides the change of a "
                "step by the learning rate.",
                "Use an optimizer that steps by its learning rate times a direction, as SGD does, or use "
                "fedprox or fedavg.",
            )

    def close(self) -> None:
        """Remove all hooks from the optimizers. Idempotent."""
        for each in self._followed:
            each.close()
        self._followed.clear()  # breaks a reference cycle that would keep the model in memory after the round

    def __enter__(self) -> StepHooks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def require_steps(self) -> None:
        """Check that the algorithm's correction was applied in this round. Without a local rule, accept every round.

        Raises:
            UsageError: there was no step, or the last step did not end. Or the algorithm divides by the sum of the
                learning rates, and the sum is not above zero.
        """
        if self.correction is None:
            return
        if self.under_way:
            raise UsageError(
                "The last optimizer.step() has not returned, or has failed, so this step is not corrected.",
                "Submit the round after optimizer.step() has returned. If it failed, call correct() and step() again.",
            )
        if not self.steps:
            raise UsageError(
                f"{self.algorithm} saw no optimizer step in this round.",
                "Call fl_round.correct(model, optimizer) before training, with the optimizer that trains the model.",
            )
        if self.one_rate and not self.rate_sum > 0:
            raise UsageError(
                f"The sum of the learning rates of this round's {self.steps} steps is {self.rate_sum:g}.",
                f"Use a learning rate above zero in at least one step: {self.algorithm} divides by the sum.",
            )

    def finish(self, read_change: ChangeReader) -> Mapping[str, ElementReader]:
        """Return the algorithm's tensors for the update (in SCAFFOLD Δc_i), and set those that the site keeps (c_i).

        Raises:
            UsageError: as in `require_steps`.
        """
        self.require_steps()
        return self.correction.finish(read_change, self.rate_sum) if self.correction is not None else {}

    def rate_of(self, optimizer: Optimizer) -> float:
        """Return η, the learning rate of the next step.

        If the algorithm does not divide by η, return the learning rate of the first parameter group, or 0 if that group
        has none.

        Raises:
            UsageError: the algorithm divides by η, and the optimizer has no learning rate, several different ones, or
                one that is negative or not finite.
        """
        lrs = [group.get("lr") for group in optimizer.param_groups]
        if not self.one_rate:
            return float(lrs[0] or 0.0)
        if None in lrs:
            raise UsageError(
                f"{type(optimizer).__name__} has no learning rate, because it chooses its own step length.",
                f"{self.algorithm} needs one: set lr, use another optimizer, or use fedavg.",
            )
        rates = {float(rate) for rate in lrs if rate is not None}
        if len(rates) > 1:
            raise UsageError(
                f"The optimizer has the learning rates {', '.join(f'{rate:g}' for rate in sorted(rates))}.",
                f"Use the same learning rate for all parameter groups: {self.algorithm} needs that.",
            )
        (rate,) = rates
        if not (math.isfinite(rate) and rate >= 0):
            raise UsageError(
                f"The learning rate is {rate:g}.",
                f"Use a finite learning rate, at least 0: {self.algorithm} needs that.",
            )
        return rate


class _Followed:
    """The hooks on one optimizer.

    Args:
        hooks: the object that counts the round's steps and has the correction.
        optimizer: the optimizer to which the hooks are added.
        names: names of the parameters that are corrected at this optimizer's steps.
        is_counted: whether this optimizer's steps are counted as the round's steps.
    """

    def __init__(self, hooks: StepHooks, optimizer: Optimizer, names: Collection[str], *, is_counted: bool) -> None:
        self._hooks, self._optimizer, self._names, self._is_counted = hooks, optimizer, names, is_counted
        self._rate = 0.0
        self._is_formed = False  # whether the current step has had a gradient
        self._depth = 0  # reaches 2 if step() of a class calls its parent's step(): torch calls the hooks for both
        self._call: FrameType | None = None  # torch's function around the current step, which calls the hooks
        self._handles = [
            optimizer.register_step_pre_hook(outside_compiled(self._begin)),
            optimizer.register_step_post_hook(outside_compiled(lambda *_: self._after())),
        ]

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._call = None

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Handle the start of a step, as torch's pre-hook. If the step has a closure, replace it by a corrected one.

        `args[0]` is the optimizer. torch calls the step with the returned arguments, or with `args` and `kwargs` if the
        result is None.
        """
        running = [call for call, _ in traceback.walk_stack(sys._getframe())]
        self._depth = self._depth + 1 if self._call in running else 1  # torch calls no post-hook after a failed step
        if self._depth > 1:
            return None
        around = getattr(type(optimizer).step, "__code__", None)
        self._call = next((call for call in running if call.f_code is around), running[-1])
        self._is_formed = False
        self._hooks.under_way.add(optimizer)
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._corrected(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._corrected(kwargs["closure"])}
        with self._a_failed_step_has_ended():
            self._before()
        return None

    def _corrected(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure that calls `closure`, corrects the gradients, and adds the penalty to the loss."""

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
        """If the block raises before the step has a gradient, record that the step has ended, without effect."""
        try:
            yield
        except BaseException:
            if not self._is_formed:
                self._hooks.under_way.discard(self._optimizer)
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
        self._call = None
        self._hooks.under_way.discard(self._optimizer)
        if not (self._is_formed or self._has_gradients()):  # step() may have cleared them
            return  # without a gradient the step moved nothing
        if self._hooks.correction is not None:
            with torch.no_grad():
                self._hooks.correction.after_step_(self._names, self._rate)
        if self._is_counted:
            self._hooks.steps, self._hooks.rate_sum = self._hooks.steps + 1, self._hooks.rate_sum + self._rate

    def _has_gradients(self) -> bool:
        return any(value.grad is not None for group in self._optimizer.param_groups for value in group["params"])


class _Zeros:
    """Stand-in for a version or kept tensors that this rank does not have: all values read as zeros."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Discard the values."""
