"""The types that define an algorithm: a small frozen value in one file. This file does not import torch.

    site      w ← local training from w_v, corrected by the algorithm's `LocalRule`;  u = w_v − w  (the pseudo-gradient)
    server    g = reduce(u_1 … u_k)           per group of tensors, with the reducer that `Algorithm.reduce` names
              w_{v+1} = outer step of w_v along g

Two groups always exist: `params` (the float parameters) and `buffers` (averaged as raw values). An algorithm can name
further groups. A further group has one tensor per parameter, of the parameter's shape, in fp32 (fp64 for fp64). Every
version stores these tensors beside the model; version 0 has zeros. Every update has the same tensors. The server
reduces those of the updates, and adds the result to the version's tensors.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from atoll.errors import UsageError
from atoll.tensors.schema import BUFFERS, PARAMS, name_beside

if TYPE_CHECKING:
    from torch import Tensor

Runs = Callable[[str, int, int], "Tensor"]
"""(name, start, stop) → elements [start, stop) of a tensor, flat, on the CPU."""

Moved = Callable[[str, int, int], "Tensor | None"]
"""(parameter, start, stop) → version − local for elements [start, stop): flat, on the CPU, in new memory, in fp32 (fp64
for fp64), after the site's filters. None if a filter of the site keeps the parameter out of the update."""


class KeptState(Protocol):
    """The tensors that a site keeps between rounds, with names `atoll.<group>.<parameter>`."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a kept tensor, as of the site's last counted update, in new memory."""

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Set the next values of a kept tensor from element `start` on.

        They replace the kept values when the update that is being formed counts.
        """


@dataclass(frozen=True)
class LocalContext:
    """The inputs of a correction in one round: the model, the pulled version and the site's kept tensors.

    Only rank 0 of a site has the version and the kept tensors; the other ranks read zeros. `Correction.shared` copies
    tensors from rank 0 to the others.

    Attributes:
        parameters: the model's parameters, with the pulled values: name → tensor, including frozen parameters.
        read_version: a function that reads tensors of the pulled version, by their names in the version.
        kept: the tensors that the site keeps between rounds.
    """

    parameters: Mapping[str, Tensor]
    read_version: Runs
    kept: KeptState

    @property
    def trainable(self) -> dict[str, Tensor]:
        """The parameters with `requires_grad`, by name."""
        return {name: value for name, value in self.parameters.items() if value.requires_grad}

    def version(self, group: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the pulled version's values for a parameter in a group: flat, on the CPU.

        Args:
            group: `params`, for the parameter itself, or a group that every version stores beside the model.
            name: name of the parameter.
            start: first element.
            stop: element after the last one; None: to the end.
        """
        tensor = name if group == PARAMS else name_beside(group, name)
        return self.read_version(tensor, start, self._stop(name, stop))

    def own(self, group: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the values that the site keeps for a parameter in a group: flat, on the CPU.

        Args:
            group: a group of `LocalRule.keeps`.
            name: name of the parameter.
            start: first element.
            stop: element after the last one; None: to the end.
        """
        return self.kept.read(name_beside(group, name), start, self._stop(name, stop))

    def keep(self, group: str, name: str, values: Tensor, start: int = 0) -> None:
        """Set the next values that the site keeps for a parameter in a group, from element `start` on.

        Call this in `Correction.finish`. The values take effect when the update counts. For each parameter, set either
        all elements or none. Without new values, the kept values stay.
        """
        self.kept.write(name_beside(group, name), start, values.detach().reshape(-1).cpu())

    def like(self, name: str, values: Tensor) -> Tensor:
        """Return flat values with the shape, dtype and device of a parameter."""
        parameter = self.parameters[name]
        return values.view(parameter.shape).to(parameter.device, parameter.dtype)

    def _stop(self, name: str, stop: int | None) -> int:
        return self.parameters[name].numel() if stop is None else stop


class Correction:
    """An algorithm's code around the optimizer steps of one round. This base class changes nothing.

    Atoll calls it from hooks of the optimizer. So it also works with gradient accumulation, a learning rate schedule or
    a framework's training loop. With several optimizers, each call names the parameters of the optimizer that steps.

    Attributes:
        shared: name → tensor that must be equal at all ranks of the site; Atoll copies rank 0's tensors to the others.
    """

    def __init__(self) -> None:
        self.shared: dict[str, Tensor] = {}

    def before_step_(self, names: Collection[str]) -> None:
        """Change the gradients of these parameters in place, before a step. A parameter's `grad` may be None."""

    def penalty(self, names: Collection[str]) -> Tensor | None:
        """Return the loss term as a 0-d tensor; `before_step_` adds its gradient. None: the loss has no such term.

        Atoll adds the penalty to the loss that a closure returns, because a line search needs loss and gradient to
        match.
        """
        return None

    def after_step_(self, names: Collection[str], rate: float) -> None:
        """Change these parameters in place, after a step with the learning rate `rate`."""

    def finish(self, moved: Moved, rates: float) -> Mapping[str, Runs]:
        """Return, for each group beside the model, a function that reads the update's tensors by parameter name.

        Atoll calls this once, when it forms the update. Set the kept tensors here (`LocalContext.keep`).

        Args:
            moved: a function that returns version − local of a parameter.
            rates: Σ η, the sum of the learning rates of the round's steps.
        """
        return {}


class LocalRule(ABC):
    """An algorithm's rule for correcting local training: a frozen dataclass with the algorithm's options as fields.

    Attributes:
        keeps: names of the groups that a site keeps between rounds. Each group has one tensor per parameter, zero at
            first. These tensors change only when an update of the site counts.
        one_rate: whether the rule divides by learning rates. If so, it needs one optimizer with one learning rate.
    """

    keeps: ClassVar[tuple[str, ...]] = ()
    one_rate: ClassVar[bool] = False

    @abstractmethod
    def start(self, context: LocalContext) -> Correction:
        """Return the correction for one round. When Atoll calls this, the model holds the pulled version."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm: names of its outer optimizer, reducers and codec, and its local rule.

    Attributes:
        name: the algorithm's name in the run file. Each site loads the algorithm by this name from its own packages.
        citation: title, authors and arXiv number of the paper.
        outer: name of the outer optimizer (`registry.TABLES["outer"]`).
        outer_options: keyword arguments of the outer optimizer.
        reduce: group → name of its reducer, for floating point tensors. Integers and booleans are reduced by `max`.
        local: the class of the local rule; None: sites train without correction.
        codec: the default codec of `params`; the run file can name another.
        on_missed: what a DiLoCo worker does after it missed a round. `rebase` keeps its local steps; `reset` discards
            them and logs a warning. Has no effect in a federated run: there each round starts from the pulled version.
        own_reducer: whether the algorithm requires its reducer of `params`. If so, a run file cannot name another.
        steps_driven: whether a round is `sync_every` local steps. If not, the site's script decides when a round ends.

    Raises:
        UsageError: `steps_driven` is true, but the algorithm has a local rule or groups beside the model.
    """

    name: str
    citation: str
    outer: str
    outer_options: Mapping[str, Any]
    reduce: Mapping[str, str] = field(default_factory=lambda: {PARAMS: "mean", BUFFERS: "mean"})
    local: type[LocalRule] | None = None
    codec: str = "none"
    on_missed: Literal["rebase", "reset"] = "reset"
    own_reducer: bool = False
    steps_driven: bool = False

    def __post_init__(self) -> None:
        if self.steps_driven and (self.local or self.beside):
            raise UsageError(
                f"The algorithm {self.name!r} sets steps_driven, but it corrects local training or keeps "
                "tensors besides the model.",
                "Leave steps_driven out: such algorithms need rounds that end in the site's script.",
            )

    @property
    def beside(self) -> tuple[str, ...]:
        """The groups that every version stores beside the model."""
        return tuple(group for group in self.reduce if group not in (PARAMS, BUFFERS))

    @property
    def keeps(self) -> tuple[str, ...]:
        """The groups that a site keeps between rounds."""
        return self.local.keeps if self.local else ()

    @property
    def local_options(self) -> dict[str, Any]:
        """The options of the local rule: name → default."""
        rule: Any = self.local
        return {each.name: each.default for each in dataclasses.fields(rule)} if rule else {}
