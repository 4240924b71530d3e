"""A stock torch optimizer as a pure rule: (run of parameters, run of gradients, state) → the same, one round later.

One parameter per tensor chunk, never across tensors. The state is assigned to `optimizer.state[p]` directly; in a first
round torch creates it (it is not zeros in Adagrad, NAdam, Rprop …). State of 0 dimensions (`step`) belongs to the
tensor: a caller that steps a tensor in chunks gives each chunk a clone, and keeps one of the results.
"""

from __future__ import annotations

import copy
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
State = dict[str, Tensor]

_PYTHON_DTYPES: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Numbers that an optimizer keeps as Python's → how they are stored."""


@dataclass(frozen=True)
class StateSpec:
    """One entry of an optimizer's state for one tensor.

    Attributes:
        key: in `optimizer.state[p]`.
        dtype: safetensors name.
        shape: None where it has the tensor's; it is then cut as the tensor is.
    """

    key: str
    dtype: str
    shape: tuple[int, ...] | None = None

    @property
    def elementwise(self) -> bool:
        """Whether it has one value for each element of the tensor, and is cut as the tensor is."""
        return self.shape is None


class OuterRule:
    """An outer optimizer that passed the probe of `atoll.outer_optimizers.chunk_exactness`; `build_outer` makes it.

    Attributes:
        label: what the user called it.
        lrs: pattern of names → the learning rate of these parameters; of several patterns that fit, the first.
        granularity: `chunk` where steps on runs of a tensor are bit-identical to steps on the tensor, else `tensor`.
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
        self._lr_of: dict[str, float | None] = {}  # asked for in every window of every round
        self._specs: dict[object, list[StateSpec]] = {}

    def make(self, parameters: Sequence[Tensor]) -> Optimizer:
        """The optimizer itself over `parameters`, with `fused` and `foreach` as this rule has them.

        Raises:
            ConfigError: the factory made something else.
        """
        optimizer = self._factory(list(parameters), **copy.deepcopy(self._options))
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(f"it made a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
        for group in [*optimizer.param_groups, optimizer.defaults]:
            for flag in ("fused", "foreach"):
                if flag in group and group[flag] is None:
                    group[flag] = False
        return optimizer

    def state_specs(self, spec: TensorSpec) -> list[StateSpec]:
        """What is kept between rounds for a tensor; nothing for buffers, integers and empty tensors.

        With granularity `tensor` a tensor of that shape is stepped once to see it.
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
        """The learning rate of a parameter; None: the optimizer's own."""
        if name not in self._lr_of:
            self._lr_of[name] = next((lr for pattern, lr in self.lrs.items() if fnmatchcase(name, pattern)), None)
        return self._lr_of[name]

    def stepper(self) -> Stepper:
        """What steps; one per thread."""
        return Stepper(self)

    def describe(self) -> dict[str, Any]:
        """What decides the bits of a step, as plain values: to be recorded with the run."""
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
    """Steps runs of tensors with one optimizer object that is used again and again; not for two threads at once."""

    def __init__(self, rule: OuterRule) -> None:
        self._rule = rule
        self._optimizer: Optimizer | None = None
        self._numbers: dict[str, type] | None = None

    def step_(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State] | None,
        names: Sequence[str] = (),
    ) -> list[State]:
        """Step each of `params` (in place) along its gradient.

        Args:
            params: tensors, or runs of tensors, of one dtype.
            grads: of the same shapes and dtype; not kept.
            states: by key, changed in place or replaced; 0-d entries must be this call's own. None: the first round.
            names: of the tensors, by which some have learning rates of their own; by default none has.

        Returns:
            The state of each afterwards, by key; numbers of Python's as 0-d tensors.
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

    def _thawed(self, state: State) -> dict[str, Any]:
        if not self._numbers:
            return dict(state)
        return {
            key: self._numbers[key](value.item()) if key in self._numbers else value for key, value in state.items()
        }


def _grouped(
    group: Mapping[str, Any], leaves: Sequence[torch.nn.Parameter], lrs: Sequence[float | None]
) -> list[dict[str, Any]]:
    """The group's parameters, those of one learning rate in a group each."""
    of: dict[float, list[torch.nn.Parameter]] = {}
    for leaf, lr in zip(leaves, lrs, strict=True):
        of.setdefault(group["lr"] if lr is None else lr, []).append(leaf)
    return [{**group, "params": together, "lr": lr} for lr, together in of.items()]


def _frozen(state: Mapping[str, Any]) -> State:
    """A torch state as tensors only.

    Raises:
        ConfigError: it holds something that has no place in a safetensors file.
    """
    frozen: State = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            frozen[key] = value
        elif type(value) in _PYTHON_DTYPES:
            frozen[key] = torch.tensor(value, dtype=_PYTHON_DTYPES[type(value)])
        elif value is not None:
            raise ConfigError(f"it keeps {key!r}, a {type(value).__name__}, which is neither a tensor nor a number.")
    return frozen


class EachTensor(Optimizer, ABC):
    """An optimizer that is one rule for a tensor, its gradient and its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step along every gradient; returns what `closure` does, which computes them anew."""
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
        """Step `x` in place along `g`; what is kept is in `self.state[x]`."""
