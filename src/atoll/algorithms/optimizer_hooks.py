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

import functools
import math
import sys
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from types import FrameType, MethodType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.base import ChangeReader, Correction, ElementReader, LocalContext, LocalRule, SiteState
from atoll.algorithms.corrected_copies import CorrectedCopies
from atoll.algorithms.unfollowed_steps import UnfollowedSteps, trained_by
from atoll.errors import UsageError
from atoll.format_text import number_of
from atoll.tensors.module_tensors import gradients_of, named_parameters

Given = Optimizer | Sequence[Optimizer]
"""One optimizer, or several in any order."""

Refuse = Callable[[Optimizer, str], None]
"""A function that raises an error for a step of an optimizer. It gets the name of a parameter that would be trained."""

PATIENCE_STEPS = 32
"""An optimizer that makes no step while another one makes this many is not waited for at the end of a cycle."""


# -- Optimizers from a script: unwrap them, and check which parameters they hold.


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that calls step hooks: the given one, or the one inside a wrapper such as Accelerate's.

    Raises:
        UsageError: `optimizer` is neither a torch optimizer nor a wrapper of one.
    """
    inner = layers_of(optimizer)[-1]
    assert isinstance(inner, Optimizer)
    return inner


def layers_of(optimizer: Any) -> list[Any]:
    """Return an optimizer and what it wraps: the given object first, and last the one that calls step hooks.

    Raises:
        UsageError: `optimizer` is neither a torch optimizer nor a wrapper of one.
    """
    layers = [optimizer]
    while not _calls_hooks(layers[-1]):
        inner = getattr(layers[-1], "optimizer", None)
        if inner is None:
            raise UsageError(
                f"The optimizer is of type {type(optimizer).__name__}, which does not call step hooks.",
                "Use a torch.optim.Optimizer, or a wrapper that has one in its attribute `optimizer`.",
            )
        layers.append(inner)
    return layers


def _calls_hooks(optimizer: object) -> bool:
    """Return whether `Optimizer.__init__` ran, which sets up the hooks. It does not run in Accelerate's wrapper."""
    return isinstance(optimizer, Optimizer) and "_optimizer_step_post_hooks" in vars(optimizer)


def with_inner(optimizer: Optimizer) -> list[Optimizer]:
    """Return an optimizer, and those in its attributes that hold the same parameters.

    A method other than `step` may step these: in SAM, `second_step` steps `base_optimizer`.
    """
    held = held_by([optimizer])
    inner = [each for each in vars(optimizer).values() if _calls_hooks(each) and held_by([each]) == held]
    return [optimizer, *(each for each in inner if each is not optimizer)]


def optimizers_in(optimizers: Given | Any) -> tuple[Optimizer, ...]:
    """Return the given optimizers as a tuple, without wrappers. The errors are those of `layers_in`."""
    return tuple(layers[-1] for layers in layers_in(optimizers))


def layers_in(optimizers: Given | Any) -> tuple[list[Any], ...]:
    """Return each of the given optimizers with what it wraps, as `layers_of` does.

    Raises:
        UsageError: the list is empty, an optimizer is in the list twice, or an element is not an optimizer.
    """
    if isinstance(optimizers, Mapping | set | frozenset | str):
        raise UsageError(
            f"The optimizers are in an object of type {type(optimizers).__name__}, not a list.",
            "Pass a list of the optimizers.",
        )
    found = tuple(map(layers_of, optimizers)) if isinstance(optimizers, Iterable) else (layers_of(optimizers),)
    if not found:
        raise UsageError("The list of optimizers is empty.", "Pass the optimizers that train the model.")
    if len({id(layers[-1]) for layers in found}) < len(found):
        raise UsageError("The list contains an optimizer twice.", "Pass each once.")
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
    "Steps of another optimizer are not noticed, and its parameters drift away from the run's model.",
    "Pass all optimizers, as a list",
)
ALL_CORRECTED = ("Steps of another optimizer are not corrected.", "Pass all optimizers, as a list")
ALL_IN_ONE = ("Steps of another optimizer are not corrected.", "Put all parameters into one optimizer")


def require_holds_all(
    held_parameters: Collection[int], parameters: Mapping[str, Tensor], advice: tuple[str, str] = ALL_AS_A_LIST
) -> None:
    """Check that optimizers hold all trainable parameters: Atoll does not see the steps of other optimizers.

    Args:
        held_parameters: `id(parameter)` for each parameter that an optimizer with Atoll's hooks holds.
        parameters: the model's parameters, by name.
        advice: the consequence and the remedy, for the message.

    Raises:
        UsageError: a trainable parameter is not held. The message names the first one.
    """
    trainable = {name: id(value) for name, value in parameters.items() if value.requires_grad}
    missing = [name for name, each in trainable.items() if each not in held_parameters]
    if missing:
        consequence, remedy = advice
        raise UsageError(
            f"The optimizer holds only {len(trainable) - len(missing)} of the model's {len(trainable)} trainable "
            f"parameters; for example, {missing[0]!r} is missing. {consequence}",
            f"{remedy}, or set requires_grad = False for parameters that are not trained. To train only a part on "
            "purpose, pass allow_partial=True.",
        )


def held_by(optimizers: Sequence[Optimizer]) -> set[int]:
    """Return `id(parameter)` for each parameter that one of the optimizers holds."""
    return {key for each in optimizers for group in each.param_groups for key in map(id, group["params"])}


def outside_compiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a hook from `torch.compile`: hooks move tensors in ways that break compiled code."""
    return torch.compiler.disable(hook)  # type: ignore[no-any-return,no-untyped-call]


# -- Step counting for DiLoCo, with one or several optimizers.


class Steps:
    """Hooks that call a function after each local step, which is a step of every one of the optimizers.

    Args:
        optimizers: each optimizer with what it wraps (`layers_in`), in any order.
        before: the function to call at the beginning of each optimizer's step. It gets the optimizer.
        after: the function to call after each local step. It gets the number of local steps since the last call.

    Under `torch.compile` both functions run outside of compiled code.
    """

    def __init__(
        self, optimizers: Sequence[Sequence[Any]], before: Callable[[Optimizer], None], after: Callable[[int], None]
    ) -> None:
        self._after, self._due = after, 0  # called outside of compiled code, by the end of a step
        trained = [id(layers[-1]) for layers in optimizers if _trains(layers[-1])]
        self._cycles = Cycles(trained) if trained and len(optimizers) > 1 else None
        self._steps: list[WholeSteps] = []
        self._others: UnfollowedSteps | None = None
        try:
            for layers in optimizers:
                self._steps.append(WholeSteps(layers, before, self._ended))
        except BaseException:
            self.close()
            raise

    def refuse_others(self, model: nn.Module, refuse: Refuse, *, is_partial: bool) -> None:
        """Refuse steps of other optimizers of the model, until `close`. Arguments are those of `UnfollowedSteps`."""

        def refuse_or_note(optimizer: Optimizer, name: str) -> None:
            around = [each for each in self._steps if each.is_called]
            for each in around:
                each.refuse = partial(refuse, optimizer, name)
            if not around:
                refuse(optimizer, name)

        followed = [inner for each in self._steps for inner in with_inner(each.optimizer)]
        self._others = UnfollowedSteps(model, followed, self._is_within, refuse_or_note, is_partial=is_partial)

    def _is_within(self) -> bool:
        return any(each.is_within for each in self._steps)

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        if self._others is not None:
            self._others.close()
            self._others = None
        while self._steps:
            self._steps.pop().close()

    def _ended(self, optimizer: Optimizer) -> None:
        self._due += self._cycles.count(id(optimizer)) if self._cycles is not None else 1
        if self._due and not any(each.is_open for each in self._steps):  # one optimizer may step inside of another
            due, self._due = self._due, 0
            self._after(due)


def _trains(optimizer: Optimizer) -> bool:
    return any(value.requires_grad for group in optimizer.param_groups for value in group["params"])


class Cycles:
    """Finds the end of each cycle of several optimizers: the step after which all have stepped, in whatever order.

    One optimizer may step several times in a cycle. A cycle begins with a step of the optimizer that was the first of
    all to step, after a step of another one. Each optimizer is expected to make as many steps as in the last cycle.

    Args:
        optimizers: a key for each optimizer.
    """

    def __init__(self, optimizers: Iterable[int]) -> None:
        self._expected = dict.fromkeys(optimizers, 1)
        self._made: dict[int, int] = {}  # steps in this cycle
        self._first = 0
        self._is_counted, self._uncounted = False, 0  # whether this cycle's end was found; earlier cycles without one

    def count(self, optimizer: int) -> int:
        """Record a step. Return the number of cycles that end with it, with earlier ones without a known end."""
        self._first = self._first or optimizer
        made = self._made.get(optimizer, 0)
        if optimizer == self._first and (self._is_counted or len(self._made) > 1):
            self._begin()
        elif made >= PATIENCE_STEPS + self._expected.get(optimizer, 0):  # the others have stopped
            self._begin()
            self._first, self._expected, self._uncounted = optimizer, {optimizer: 1}, 0
        self._made[optimizer] = self._made.get(optimizer, 0) + 1
        if self._is_counted or any(self._made.get(each, 0) < steps for each, steps in self._expected.items()):
            return 0
        self._is_counted, uncounted, self._uncounted = True, self._uncounted, 0
        return 1 + uncounted

    def _begin(self) -> None:
        """Begin a cycle. If the last one had no end, an optimizer was missing: expect only those that came."""
        if self._is_counted:
            self._expected = self._made
        else:
            self._uncounted += 1
            self._expected = {
                each: min(steps, self._made[each]) for each, steps in self._expected.items() if each in self._made
            }
        self._made, self._is_counted = {}, False


class WholeSteps:
    """Calls functions at the beginning and at the end of each whole step of an optimizer.

    Attributes:
        optimizer: the optimizer that calls hooks.
        refuse: called at the end of a wrapper's step if this optimizer has made no step in it; None: no error. Another
            optimizer has stepped there, and either the wrapper steps both, or it has the other one in place of this.

    torch calls an optimizer's hooks around `step` of the optimizer's class, and once more around `step` of a parent
    class that has been used before. The whole step may be longer: a wrapper may work on, or a function with which a
    script has replaced the optimizer's `step`. So `step` of each of these objects is wrapped as well, and a step has
    ended when the outermost call has returned. The hooks alone notice a step that another program has kept a reference
    to.

    Args:
        layers: the optimizer with what it wraps (`layers_of`).
        begin: the function to call at the beginning, with the optimizer that calls hooks.
        end: the function to call at the end, likewise. It is not called after a step that failed.
    """

    def __init__(
        self, layers: Sequence[Any], begin: Callable[[Optimizer], None], end: Callable[[Optimizer], None]
    ) -> None:
        self._begin, self._end = begin, outside_compiled(end)
        self.optimizer: Optimizer = layers[-1]
        self.refuse: Callable[[], None] | None = None
        self._nesting = _Nesting()
        self._calls, self._is_made = 0, False  # wrapped calls that have not returned; whether a step was made in them
        self._closing: list[Callable[[], None]] = []
        before, after = outside_compiled(self._before), outside_compiled(self._after)
        try:
            for layer in layers:
                with suppress(AttributeError, TypeError):  # the object has no attributes of its own
                    self._wrap(layer)
            for each in with_inner(self.optimizer):
                self._closing.append(each.register_step_pre_hook(before).remove)
                self._closing.append(each.register_step_post_hook(after).remove)
        except BaseException:
            self.close()
            raise

    @property
    def is_open(self) -> bool:
        """Whether a step has begun and not ended."""
        return bool(self._calls or self._nesting.depth)

    @property
    def is_called(self) -> bool:
        """Whether a call of `step` of the optimizer, or of a wrapper, has not returned."""
        return bool(self._calls)

    @property
    def is_within(self) -> bool:
        """Whether the caller is within a step of the optimizer itself, not only of a wrapper."""
        return self._nesting.is_within

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        while self._closing:
            self._closing.pop()()
        self._begin = self._end = lambda _: None  # another program may keep a wrapped `step`
        self._nesting.reset()

    def _wrap(self, layer: Any) -> None:
        earlier, this = vars(layer).get("step"), weakref.ref(layer)

        @functools.wraps(earlier or type(layer).step)
        def step(caller: Any, *args: Any, **kwargs: Any) -> Any:
            call = earlier or partial(type(caller).step, caller)
            if caller is not this():  # a copy of the object
                return call(*args, **kwargs)
            self._calls += 1
            try:
                result = call(*args, **kwargs)
            except BaseException:
                self._is_made, self.refuse = False, None
                raise
            finally:
                self._calls -= 1
                if not self._calls:
                    self._nesting.reset()
            if not self._calls:
                is_made, self._is_made = self._is_made, False
                refuse, self.refuse = self.refuse, None
                if is_made:
                    self._end(self.optimizer)
                elif refuse is not None:
                    refuse()
            return result

        # under torch.compile, this function is not compiled, but the optimizer's own step is
        ours = MethodType(torch.compiler.disable(step, recursive=False), layer)  # type: ignore[no-untyped-call]
        layer.step = ours

        def unwrap() -> None:
            if vars(layer).get("step") is not ours:  # wrapped once more, for example by a learning rate schedule
                return
            if earlier is None:
                del layer.step
            else:
                layer.step = earlier

        self._closing.append(unwrap)

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        if self._nesting.begins(optimizer):
            self._begin(optimizer)

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        if self._nesting.ends():
            self._is_made = bool(self._calls)
            if not self._calls:
                self._end(optimizer)


class _Nesting:
    """Tells the outermost call of an optimizer's hooks: torch calls the hooks for a step inside of a step, too.

    Attributes:
        depth: calls of torch's function around a step that have not returned.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._call: FrameType | None = None  # torch's function around the outermost step, which calls the hooks

    @property
    def is_within(self) -> bool:
        """Whether the caller is within the outermost call."""
        return bool(self.depth) and any(call is self._call for call, _ in traceback.walk_stack(sys._getframe()))

    def reset(self) -> None:
        """Forget a step that has failed: torch calls no post-hook for it."""
        self.depth, self._call = 0, None

    def begins(self, optimizer: Optimizer) -> bool:
        """Record the call of a pre-hook. Return whether a step begins, not one inside of it."""
        if self.is_within:
            self.depth += 1
            return False
        around = getattr(type(optimizer).step, "__code__", None)
        call: FrameType | None = sys._getframe()
        while call is not None and call.f_code is not around and call.f_back is not None:
            call = call.f_back
        self.depth, self._call = 1, call
        return True

    def ends(self) -> bool:
        """Record the call of a post-hook. Return whether the step ends."""
        if self.depth != 1:  # 0: the hooks were added during the step
            self.depth = max(0, self.depth - 1)
            return False
        self.depth = 0
        self._call = None
        return True


# -- Step counting and corrections for federated rounds.


class StepHooks:
    """Hooks that count the optimizer steps of one round and, if the run's algorithm has a local rule, correct them.

    Args:
        model: the model that is trained.
        algorithm: the algorithm's name, for messages.
        rule: the algorithm's local rule; None: steps are counted but not corrected.
        version: a function that reads tensors of the downloaded version, by name; None: all values are zeros.
        site_state: the tensors that the site keeps between rounds; None: all values are zeros.
        own: names of parameters that the site keeps for itself. Their steps are not corrected.

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
        self._model, self.parameters, self.algorithm = model, named_parameters(model), algorithm
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
        self._others: UnfollowedSteps | None = None
        self.under_way: set[Optimizer] = set()

    @property
    def changes_training(self) -> bool:
        """Whether the algorithm corrects the steps."""
        return self.correction is not None

    @property
    def shared(self) -> dict[str, Tensor]:
        """The tensors that must be equal at all ranks, by name (`Correction.shared`)."""
        return self.correction.shared if self.correction is not None else {}

    def attach(self, optimizer: Given, *, is_partial: bool = True, needs_steps: bool = False) -> StepHooks:
        """Add the hooks to the optimizers, until `close`.

        If steps are corrected, or their number matters, a step of another optimizer of the same parameters is refused.

        Args:
            optimizer: one optimizer, or several. Only the steps of the last optimizer are counted.
            is_partial: whether other optimizers may train the parameters that these do not hold.
            needs_steps: whether the run's result depends on the number of steps.

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
        self._require_reachable([*others, last])
        if self.one_rate:
            self._require_one_rate([*others, last])
        remaining = dict(self._shared)
        for each in others if self.correction is not None else ():
            held_parameters = held_by([each])
            names = [name for name, value in remaining.items() if id(value) in held_parameters]
            remaining = {name: value for name, value in remaining.items() if name not in names}
            self._followed.append(_Followed(self, each, names, is_counted=False))
        self._followed.append(_Followed(self, last, list(remaining), is_counted=True))
        if self.correction is not None or needs_steps:
            self._others = UnfollowedSteps(
                self._model,
                [inner for each in (*others, last) for inner in with_inner(each)],
                self._is_within,
                self._refuse,
                is_partial=is_partial,
            )
        return self

    def _is_within(self) -> bool:
        return any(each.is_within for each in self._followed)

    def _refuse(self, optimizer: Optimizer, name: str) -> None:
        lost = "corrected" if self.correction is not None else "counted"
        raise UsageError(
            f"The optimizer {type(optimizer).__name__}, which correct() did not get, is about to train the model; for "
            f"example, {name!r}. Its steps would not be {lost}, so the result of {self.algorithm} would be wrong.",
            "If it replaces another optimizer, leave the `with` block of correct(), or call close() of what correct() "
            "returned. Then call correct() with the new one. If both train the model, pass them as a list. To train "
            "other parameters without Atoll on purpose, pass allow_partial=True.",
        )

    def _require_reachable(self, optimizers: Sequence[Optimizer]) -> None:
        """Check that each optimizer trains the model, and that corrections reach what it trains.

        Raises:
            UsageError: an optimizer holds none of the model's parameters; or copies of them, although steps are
                corrected. Or parameters of the model were replaced since the first call.
        """
        self.require_same_parameters()
        held = held_by(optimizers)
        copying = {each: trained_by(each, self.parameters) for each in optimizers}
        copied = {
            each: [name for name in names if id(self.parameters[name]) not in held] for each, names in copying.items()
        }
        require_trains([each for each in optimizers if not copied[each]], self.parameters)
        for optimizer, names in copied.items():
            if names and self.correction is not None:
                raise UsageError(
                    f"The optimizer {type(optimizer).__name__} trains copies of the model's parameters, for example "
                    f"of {min(names)!r}. {self.algorithm} corrects the parameters themselves and their gradients.",
                    "Use an optimizer that holds the model's parameters, and keeps copies in its state.",
                )

    def require_same_parameters(self) -> None:
        """Check that no parameter of the model was replaced since the correction began: it is of the earlier ones."""
        now = named_parameters(self._model) if self.correction is not None else self.parameters
        for name in self.parameters | now:
            if now.get(name) is not self.parameters.get(name):
                raise UsageError(
                    f"The model's parameter {name!r} was added, removed or replaced since the correction of this round "
                    f"began. {self.algorithm} does not correct the new one.",
                    "Change the model before you load the global model into it, and build the optimizer with the new "
                    "parameters.",
                )

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
        if self._others is not None:
            self._others.close()
            self._others = None
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
        self.require_same_parameters()
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
                f"The sum of the learning rates of this round ({number_of(self.steps, 'step')}) is {self.rate_sum:g}.",
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
        self._held = held_by([optimizer])
        changes = hooks.correction is not None and hooks.correction.changes_weights
        self._copies = CorrectedCopies(optimizer, hooks.parameters.values() if changes else (), hooks.algorithm)
        self._is_formed = False  # whether the current step has had a gradient
        self._nesting = _Nesting()  # torch calls the hooks twice if step() of a class calls its parent's step()
        before, after = outside_compiled(self._begin), outside_compiled(lambda *_: self._after())
        self._handles = [
            handle
            for each in with_inner(optimizer)
            for handle in (each.register_step_pre_hook(before), each.register_step_post_hook(after))
        ]

    @property
    def is_within(self) -> bool:
        """Whether the caller is within a step of this optimizer."""
        return self._nesting.is_within

    def close(self) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._nesting.reset()

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Handle the start of a step, as torch's pre-hook. If the step has a closure, replace it by a corrected one.

        `args[0]` is the optimizer. torch calls the step with the returned arguments, or with `args` and `kwargs` if the
        result is None.
        """
        if not self._nesting.begins(optimizer):
            return None
        self._is_formed = False
        self._hooks.under_way.add(self._optimizer)
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
        if not self._held.issuperset(held := held_by([self._optimizer])):
            self._hooks.require_same_parameters()
            self._held = held
        self._rate = self._hooks.rate_of(self._optimizer)
        self._is_formed = self._is_formed or self._has_gradients()
        if self._hooks.correction is not None:
            with torch.no_grad():
                self._hooks.correction.before_step_(self._names)

    def _after(self) -> None:
        if not self._nesting.ends():
            return
        self._hooks.under_way.discard(self._optimizer)
        if not (self._is_formed or self._has_gradients()):  # step() may have cleared them
            return  # without a gradient the step moved nothing
        if self._hooks.correction is not None:
            with torch.no_grad(), self._copies.changing() if self._copies.are_possible else nullcontext():
                self._hooks.correction.after_step_(self._names, self._rate)
        if self._is_counted:
            self._hooks.steps, self._hooks.rate_sum = self._hooks.steps + 1, self._hooks.rate_sum + self._rate

    def _has_gradients(self) -> bool:
        return any(gradients_of(value) for group in self._optimizer.param_groups for value in group["params"])


class _Zeros:
    """Stand-in for a version or kept tensors that this rank does not have: all values read as zeros."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return torch.zeros(stop - start)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Discard the values."""
