"""A torch optimizer as a pure function: (parameter chunks, gradient chunks, state) → new parameters and new state.

Each chunk of a tensor becomes one torch parameter p, and its stored state is assigned to `optimizer.state[p]`. In the
first round there is no stored state, and torch creates it. Zeros would be wrong: the state of Adagrad, NAdam, Rprop and
others does not start at zero.

0-d state (`step`) belongs to the whole tensor. If you step a tensor in chunks, give each chunk a clone of the tensor's
0-d state, and keep the 0-d state of one chunk.
"""

from __future__ import annotations

import copy
import functools
import inspect
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from atoll.errors import ConfigError
from atoll.tensors.dtypes import accumulate_dtype, dtype_name
from atoll.tensors.schema import PARAMS, TensorSpec

Granularity = Literal["chunk", "tensor"]
OuterState = dict[str, Tensor]

_PYTHON_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Type of a Python number in an optimizer's state → dtype in which it is stored."""


@dataclass(frozen=True)
class StateSpec:
    """One entry of an optimizer's state for one tensor.

    Attributes:
        key: the entry's key in `optimizer.state[p]`.
        dtype: the entry's dtype, as a safetensors name.
        shape: the entry's shape. None: the entry has the tensor's shape, and is cut into chunks like the tensor.
    """

    key: str
    dtype: str
    shape: tuple[int, ...] | None = None

    @property
    def elementwise(self) -> bool:
        """Whether the entry has one value per element of the tensor, and is cut into chunks like the tensor."""
        return self.shape is None


class OuterRule:
    """An outer optimizer with its options. `build_outer` returns it if it passes a trial run (`chunk_exactness`).

    Attributes:
        label: the optimizer's name, as the user wrote it.
        lrs: shell-style pattern of parameter names → learning rate of these parameters. If several patterns match, the
            first one applies.
        granularity: `chunk` if stepping chunks of a tensor gives the same bits as stepping the tensor; else `tensor`.
    """

    def __init__(
        self,
        label: str,
        factory: Callable[..., Optimizer],
        options: Mapping[str, Any],
        granularity: Granularity = "tensor",
        lrs: Mapping[str, float] | None = None,
    ) -> None:
        self.label = label
        self.lrs = dict(lrs or {})
        self.granularity: Granularity = granularity
        self._factory = factory
        self._options = dict(options)
        self._lr_of: dict[str, float | None] = {}  # cache: each chunk of each round needs a lookup
        self._specs: dict[object, list[StateSpec]] = {}

    def with_lr(self, lr: float) -> OuterRule:
        """Return this rule with another learning rate. The state of the one goes on with the other.

        Raises:
            ConfigError: the optimizer does not accept it, or has no learning rate.
        """
        other = OuterRule(self.label, self._factory, {**self._options, "lr": lr}, self.granularity, self.lrs)
        try:
            group = other.make([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
        except Exception as error:
            raise ConfigError(f"The outer optimizer {self.label!r} does not accept lr = {lr!r}: {error}.") from error
        if group.get("lr") != lr:
            raise ConfigError(
                f"The outer optimizer {self.label!r} does not take its learning rate from the option lr.",
                "Leave algorithm.outer_optimizer.lr out of rounds.changes.",
            )
        return other

    def make(self, parameters: Sequence[Tensor]) -> Optimizer:
        """Return a new torch optimizer for `parameters`. Set `fused` and `foreach` to False if they have no value.

        Raises:
            ConfigError: the factory did not return a torch optimizer.
        """
        optimizer = self._factory(list(parameters), **copy.deepcopy(self._options))
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"{self.label!r} returned an object of type {type(optimizer).__name__}, not a torch.optim.Optimizer."
            )
        for group in [*optimizer.param_groups, optimizer.defaults]:
            for flag in ("fused", "foreach"):
                if flag in group and group[flag] is None:
                    group[flag] = False
        return optimizer

    def state_specs(self, spec: TensorSpec) -> list[StateSpec]:
        """Return the entries of optimizer state to store for a tensor; none for buffers, integers and empty tensors.

        To find the entries, step a trial tensor. With granularity `tensor`, the trial tensor has the tensor's shape.
        """
        if spec.group != PARAMS or not spec.is_float or not spec.numel:
            return []
        dtype = accumulate_dtype(spec.dtype)
        shape = (3,) if self.granularity == "chunk" else spec.shape
        if (shape, dtype) not in self._specs:
            (state,) = self.stepper().step_([torch.ones(shape, dtype=dtype)], [torch.zeros(shape, dtype=dtype)], None)
            self._specs[shape, dtype] = [
                StateSpec(
                    key,
                    dtype_name(value.dtype),
                    None if shape and value.shape == shape else tuple(value.shape),
                )
                for key, value in state.items()
            ]
        return self._specs[shape, dtype]

    def lr_of(self, name: str) -> float | None:
        """Return the learning rate for a parameter name; None: the optimizer's own learning rate."""
        if name not in self._lr_of:
            self._lr_of[name] = next((lr for pattern, lr in self.lrs.items() if fnmatchcase(name, pattern)), None)
        return self._lr_of[name]

    @functools.cached_property
    def moves_untrained(self) -> bool:
        """Whether the optimizer moves a parameter that never had a gradient other than zero, by a weight decay."""
        shape = (3,) if self.granularity == "chunk" else (3, 3)
        for name in ("", *self.lrs):
            parameter, states, stepper = torch.ones(shape), None, self.stepper()
            for _ in range(3):
                states = stepper.step_([parameter], [torch.zeros(shape)], states, [name])
            if not bool((parameter == 1).all()):
                return True
        return False

    def stepper(self) -> Stepper:
        """Return a new `Stepper` of this rule. Use one per thread."""
        return Stepper(self)

    def describe(self) -> dict[str, Any]:
        """Return everything that determines the bits of a step, as plain values, for the run's records."""
        optimizer = self.make([torch.nn.Parameter(torch.zeros(1))])
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        lrs = {"lrs": self.lrs} if self.lrs else {}
        return lrs | {
            "optimizer": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}",
            "options": {
                key: value if isinstance(value, int | float | str | None) else str(value)
                for key, value in group.items()
            },
            "fused": group.get("fused"),
            "foreach": group.get("foreach"),
            "granularity": self.granularity,
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }


class Stepper:
    """Applies the outer optimizer's step to tensors or chunks of tensors.

    It reuses one torch optimizer for all of them, so it is not thread-safe.
    """

    def __init__(self, rule: OuterRule) -> None:
        self._rule = rule
        self._optimizer: Optimizer | None = None
        self._numbers: dict[str, type] | None = None

    def step_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[OuterState] | None,
        names: Sequence[str] = (),
    ) -> list[OuterState]:
        """Step each of `params`, in place, along its gradient.

        Args:
            params: tensors, or chunks of tensors, of one dtype.
            grads: the gradients, with the shapes and dtype of `params`.
            states: the stored state of each of `params`, key → tensor; changed in place or replaced. Do not share 0-d
                entries between calls. In the first round, pass None: torch creates the state.
            names: the tensors' names, to look up learning rates by name; empty: all use the optimizer's own rate.

        Returns:
            The new state of each of `params`, key → tensor. Python numbers become 0-d tensors.
        """
        leaves = [torch.nn.Parameter(param) for param in params]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad
        if states is None:
            optimizer = self._rule.make(leaves)
        else:
            optimizer = self._reused()
            optimizer.param_groups[0]["params"] = leaves
            optimizer.state = defaultdict(dict, zip(leaves, map(self._thawed, states), strict=True))
        whole = optimizer.param_groups[0]
        if self._rule.lrs and names:
            optimizer.param_groups[:] = _grouped(whole, leaves, [self._rule.lr_of(name) for name in names])
        optimizer.step()
        after = [_frozen(optimizer.state[leaf]) for leaf in leaves]
        whole["params"] = []
        optimizer.param_groups[:] = [whole]
        optimizer.state = defaultdict(dict)
        return after

    def _reused(self) -> Optimizer:
        if self._optimizer is None:
            leaf = torch.nn.Parameter(torch.zeros(1))
            self._optimizer = self._rule.make([leaf])
            trial = self._rule.make([leaf])
            leaf.grad = torch.zeros(1)
            trial.step()
            state = trial.state[leaf]
            self._numbers = {key: type(value) for key, value in state.items() if type(value) in _PYTHON_DTYPES}
        return self._optimizer

    def _thawed(self, state: OuterState) -> dict[str, Any]:
        if not self._numbers:
            return dict(state)
        return {
            key: self._numbers[key](value.item()) if key in self._numbers else value for key, value in state.items()
        }


def _grouped(
    group: Mapping[str, Any], leaves: Sequence[torch.nn.Parameter], lrs: Sequence[float | None]
) -> list[dict[str, Any]]:
    """Return copies of a parameter group, one for each learning rate, with the parameters that have this rate."""
    of: dict[float, list[torch.nn.Parameter]] = {}
    for leaf, lr in zip(leaves, lrs, strict=True):
        of.setdefault(group["lr"] if lr is None else lr, []).append(leaf)
    return [{**group, "params": together, "lr": lr} for lr, together in of.items()]


def _frozen(state: Mapping[str, Any]) -> OuterState:
    """Return an optimizer's state of one parameter as tensors. Python numbers become 0-d tensors; None is left out.

    Raises:
        ConfigError: the state has a value that is neither a tensor nor a number, so that safetensors cannot store it.
    """
    frozen: OuterState = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            frozen[key] = value
        elif type(value) in _PYTHON_DTYPES:
            frozen[key] = torch.tensor(value, dtype=_PYTHON_DTYPES[type(value)])
        elif value is not None:
            raise ConfigError(
                f"the optimizer's state {key!r} is of type {type(value).__name__}, not a tensor or number."
            )
    return frozen


@functools.cache
def not_compiled(kind: type[Optimizer]) -> type[Optimizer]:
    """Return an optimizer of `torch.optim` without the decorators for `torch.compile`; the numbers are the same.

    The first call of a decorated method imports the compiler, which takes two seconds of every start of a server.
    """
    step = torch.no_grad()(inspect.unwrap(kind.step))
    same_name = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**same_name, "step": step, "add_param_group": _add_param_group})


_add_param_group = inspect.unwrap(Optimizer.add_param_group)


class EachTensor(Optimizer, ABC):
    """Base class of optimizers that step each tensor alone. Subclasses implement `_step`."""

    add_param_group = _add_param_group

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient.

        Args:
            closure: a function that computes the gradients again and returns the loss.

        Returns:
            The loss from `closure`; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._step(x, x.grad, group)
        return loss

    @abstractmethod
    def _step(self, x: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        """Step `x` in place along its gradient `g`. Keep its state in `self.state[x]`."""
