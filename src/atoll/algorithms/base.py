"""The types that define an algorithm: each algorithm is an immutable object (`Algorithm`) in a file of its own.

    site      w ← local training from w_v, corrected by the algorithm's `LocalRule`;  u = w_v − w  (the pseudo-gradient)
    server    g = reduce(u_1 … u_k)           per group of tensors, with the reducer that `Algorithm.reduce` names
              w_{v+1} = outer step of w_v along g

w_v is version v of the global model. Its tensors form two groups: `params` (the float parameters) and `buffers`
(averaged as raw values). An algorithm can name further groups, such as SCAFFOLD's control variates. A further group has
one tensor per parameter, of the parameter's shape, in fp32 (fp64 for fp64). These tensors are in every version, where
they start as zeros, and in every update. The server reduces the tensors of the updates, and adds the result to the
tensors of the version. This file does not import torch.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from atoll.errors import UsageError
from atoll.tensors.schema import BUFFERS, PARAMS, extra_name

if TYPE_CHECKING:
    from torch import Tensor

ElementReader = Callable[[str, int, int], "Tensor"]
"""(name, start, stop) → elements [start, stop) of a tensor, flat, on the CPU."""

ChangeReader = Callable[[str, int, int], "Tensor | None"]
"""(parameter, start, stop) → version − local for elements [start, stop): flat, on the CPU, in new memory, in fp32 (fp64
for fp64), after the site's filters. None if a filter of the site drops the parameter."""


class SiteState(Protocol):
    """The tensors that a site keeps between rounds, with names `atoll.<group>.<parameter>`."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return the present elements [start, stop) of a kept tensor: flat, in new memory."""

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Set the next values of a kept tensor, from element `start` on.

        The next values replace the present ones only when the server uses the site's current update in a version.
        """


@dataclass(frozen=True)
class LocalContext:
    """The inputs of a correction in one round: the model, the downloaded version, and the tensors that the site keeps.

    Only rank 0 of a site has the version and the kept tensors; the other ranks read zeros. Put a tensor into
    `Correction.shared` to copy it from rank 0 to the other ranks.

    Attributes:
        parameters: the model's parameters, with the values of the version: name → tensor, including frozen parameters.
        read_version: a function that reads tensors of the downloaded version, by their names in the version.
        site_state: the tensors that the site keeps between rounds.
    """

    parameters: Mapping[str, Tensor]
    read_version: ElementReader
    site_state: SiteState

    @property
    def trainable(self) -> dict[str, Tensor]:
        """The parameters with `requires_grad`, by name."""
        return {name: value for name, value in self.parameters.items() if value.requires_grad}

    def version(self, group: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements of a tensor of the downloaded version: flat, on the CPU.

        Args:
            group: `params` for a parameter itself, or a group in `Algorithm.extra_groups`, which has one tensor per
                parameter.
            name: name of the parameter.
            start: first element.
            stop: element after the last one; None: to the end.
        """
        tensor = name if group == PARAMS else extra_name(group, name)
        return self.read_version(tensor, start, self._stop(name, stop))

    def own_state(self, group: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements of a tensor that the site keeps between rounds: flat, on the CPU.

        Args:
            group: a group in `LocalRule.state_groups`, which has one tensor per parameter.
            name: name of the parameter.
            start: first element.
            stop: element after the last one; None: to the end.
        """
        return self.site_state.read(extra_name(group, name), start, self._stop(name, stop))

    def set_own_state(self, group: str, name: str, values: Tensor, start: int = 0) -> None:
        """Set the next values of a tensor that the site keeps between rounds, from element `start` on.

        Call this in `Correction.finish`. The values take effect when the server uses this round's update in a version.
        For each parameter, set either all elements, or none to keep the present values.
        """
        self.site_state.write(extra_name(group, name), start, values.detach().reshape(-1).cpu())

    def like(self, name: str, values: Tensor) -> Tensor:
        """Return `values`, a flat tensor, with the shape, dtype and device of the parameter `name`."""
        parameter = self.parameters[name]
        return values.view(parameter.shape).to(parameter.device, parameter.dtype)

    def _stop(self, name: str, stop: int | None) -> int:
        return self.parameters[name].numel() if stop is None else stop


class Correction:
    """What an algorithm does before and after each optimizer step of one round. This base class changes nothing.

    Atoll calls all methods except `finish` from hooks of the optimizer. So they also work with gradient accumulation, a
    learning rate schedule or a framework's training loop. Their argument `names` has the names of the parameters that
    the stepping optimizer holds.

    Attributes:
        shared: name → tensor that must be equal at all ranks of the site. Before training, Atoll overwrites the tensors
            of the other ranks with those of rank 0.
        changes_weights: whether `after_step_` changes parameters. If so, copies of them that the optimizer keeps, such
            as fp32 masters, are changed with them.
    """

    changes_weights: ClassVar[bool] = True

    def __init__(self) -> None:
        self.shared: dict[str, Tensor] = {}

    def before_step_(self, names: Collection[str]) -> None:
        """Before an optimizer step, change the gradients of the parameters `names` in place. A gradient may be None.

        If a step begins without any gradient, and this method makes none, the step does not count.
        """

    def penalty(self, names: Collection[str]) -> Tensor | None:
        """Return the term that the correction adds to the loss, as a 0-d tensor; None if it adds none.

        `before_step_` adds the gradient of this term. Atoll calls this method only if the step has a closure, and adds
        the term to the closure's loss, because a line search needs loss and gradient to match.
        """
        return None

    def after_step_(self, names: Collection[str], rate: float) -> None:
        """After an optimizer step with the learning rate `rate`, change the parameters in `names` in place."""

    def finish(self, read_change: ChangeReader, rate_sum: float) -> Mapping[str, ElementReader]:
        """Return the algorithm's own tensors for the update: group → function (parameter, start, stop) → elements.

        Atoll calls this after training, when it forms the update. This is also the place to set the tensors that the
        site keeps between rounds, with `LocalContext.set_own_state`.

        Args:
            read_change: a function (parameter, start, stop) → elements of version − local. It returns None if a filter
                of the site drops the parameter.
            rate_sum: Σ η, the sum of the learning rates of the round's steps.
        """
        return {}


class LocalRule(ABC):
    """An algorithm's rule for correcting local training: a frozen dataclass with the algorithm's options as fields.

    Attributes:
        state_groups: names of the groups of tensors that a site keeps between rounds. Each group has one tensor per
            parameter, zero at first. These tensors change only when the server uses an update of the site in a version.
        one_rate: whether the rule divides by learning rates. If so, it needs one optimizer with one learning rate.
    """

    state_groups: ClassVar[tuple[str, ...]] = ()
    one_rate: ClassVar[bool] = False

    @abstractmethod
    def start(self, context: LocalContext) -> Correction:
        """Return the correction for one round. Atoll calls this after it has loaded the version into the model."""


@dataclass(frozen=True)
class Algorithm:
    """One algorithm: names of its outer optimizer, reducers and codec, and its local rule.

    Attributes:
        name: the algorithm's name in the run file. Each site loads the algorithm by this name from its own packages.
        citation: title, authors and arXiv number of the paper.
        outer: name of the outer optimizer (`registry.TABLES["outer"]`).
        outer_options: keyword arguments of the outer optimizer.
        reduce: group of tensors → name of the reducer for its floating point tensors. Integers and booleans are reduced
            by `max`.
        local: the class of the local rule; None: sites train without correction.
        codec: the default codec of `params`; the run file can name another.
        on_missed: what a DiLoCo worker does after it missed a round. `rebase` keeps its local steps; `reset` discards
            them and logs a warning. Without effect in a federated run, where each round starts from the pulled version.
        own_reducer: whether the algorithm works only with its own reducer of `params`. If so, a run file cannot name
            another one.
        steps_driven: whether a round ends after `sync_every` local steps. If not, the site's script decides when a
            round ends.

    Raises:
        UsageError: `steps_driven` is true, but the algorithm has a local rule or further groups of tensors.
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
        if self.steps_driven and (self.local or self.extra_groups):
            raise UsageError(
                f"The algorithm {self.name!r} sets steps_driven, but it corrects local training or keeps "
                "further tensors in every version.",
                "Leave steps_driven out: such algorithms need rounds that end in the site's script.",
            )

    @property
    def extra_groups(self) -> tuple[str, ...]:
        """The groups of tensors that every version has in addition to `params` and `buffers`."""
        return tuple(group for group in self.reduce if group not in (PARAMS, BUFFERS))

    @property
    def state_groups(self) -> tuple[str, ...]:
        """The groups of tensors that a site keeps between rounds."""
        return self.local.state_groups if self.local else ()

    @property
    def local_options(self) -> dict[str, Any]:
        """The options of the local rule: name → default."""
        rule: Any = self.local
        return {each.name: each.default for each in dataclasses.fields(rule)} if rule else {}
