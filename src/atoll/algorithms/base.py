"""What an algorithm is: a small frozen value in one file. This file is free of torch.

    site      w ← local training from w_v, corrected by the algorithm's `LocalRule`;  u = w_v − w  (the pseudo-gradient)
    server    g = reduce(u_1 … u_k)           per group of tensors, as `reduce` says
              w_{v+1} = outer step of w_v along g

Groups are `params` (what is trained), `buffers` (averaged as raw values) and any others that the algorithm names. Such
a group lies beside the model in every version: one tensor for each parameter, of its shape, in fp32 (fp64 for fp64),
zero at first. Each update carries one tensor for each of them; the server adds their reduction to the version's tensor.
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
"""(parameter, start, stop) → version − local, elements [start, stop), flat, on the CPU, as it leaves the site: in new
memory, in fp32 (fp64 for fp64). None where a filter of the site keeps the parameter back."""


class KeptState(Protocol):
    """What a site keeps between rounds, by the names that `name_beside` gives."""

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) as the last update that counted left them, in new memory."""

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Set what the elements from `start` on become, once the update that is being formed counts."""


@dataclass(frozen=True)
class LocalContext:
    """What a correction may use in its round.

    At ranks other than 0 of a site, the version and the kept state read as zeros: see `Correction.shared`.

    Attributes:
        parameters: of the model as it was pulled, name → tensor, frozen ones included.
        read_version: the tensors of the version that was pulled, by their names in it.
        kept: what the site keeps between rounds.
    """

    parameters: Mapping[str, Tensor]
    read_version: Runs
    kept: KeptState

    @property
    def trainable(self) -> dict[str, Tensor]:
        """The parameters that are trained, by name."""
        return {name: value for name, value in self.parameters.items() if value.requires_grad}

    def version(self, group: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return what the version has for a parameter in a group: flat, on the CPU, by default all of it."""
        tensor = name if group == PARAMS else name_beside(group, name)
        return self.read_version(tensor, start, self._stop(name, stop))

    def own(self, group: str, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return what the site keeps for a parameter in a group: flat, on the CPU, by default all of it."""
        return self.kept.read(name_beside(group, name), start, self._stop(name, stop))

    def keep(self, group: str, name: str, values: Tensor, start: int = 0) -> None:
        """Set what the site keeps for a parameter from element `start` on, once the update counts.

        For `Correction.finish`. A tensor of which nothing is set stays as it is; set all elements of one, or none.
        """
        self.kept.write(name_beside(group, name), start, values.detach().reshape(-1).cpu())

    def like(self, name: str, values: Tensor) -> Tensor:
        """Return flat values in the shape and dtype of a parameter, where it is."""
        parameter = self.parameters[name]
        return values.view(parameter.shape).to(parameter.device, parameter.dtype)

    def _stop(self, name: str, stop: int | None) -> int:
        return self.parameters[name].numel() if stop is None else stop


class Correction:
    """What an algorithm does around the optimizer steps of one round; this one does nothing.

    Steps are followed where they happen: under gradient accumulation, with a schedule, or in a framework's loop. With
    several optimizers each step names the parameters that its optimizer holds.

    Attributes:
        shared: name → tensor that every rank of the site must have alike; those of rank 0 are copied to the others.
    """

    def __init__(self) -> None:
        self.shared: dict[str, Tensor] = {}

    def before_step_(self, names: Collection[str]) -> None:
        """Change the gradients of these parameters in place, before a step. Not all of them have one."""

    def penalty(self, names: Collection[str]) -> Tensor | None:
        """Return what `before_step_` adds the gradient of, 0-d; None: nothing.

        A line search goes by loss and gradient, so this is added to the loss that a closure returns.
        """
        return None

    def after_step_(self, names: Collection[str], rate: float) -> None:
        """Change these parameters in place, after a step with the learning rate `rate`."""

    def finish(self, moved: Moved, rates: float) -> Mapping[str, Runs]:
        """Return what the update carries for the groups beside the model: group → runs by the parameter's name.

        Called once, when the update is formed; this is where the kept state is set.

        Args:
            moved: how the parameters have moved.
            rates: Σ η, the sum of the learning rates of the round's steps.
        """
        return {}


class LocalRule(ABC):
    """How an algorithm corrects local training: a frozen dataclass with the algorithm's options as its fields.

    Attributes:
        keeps: names of the groups of tensors that a site keeps between rounds, each as a group beside the model is: one
            tensor for each parameter, zero at first. They change when an update of the site counts, and not before.
        one_rate: whether the rule divides by learning rates: it then needs one optimizer with one learning rate.
    """

    keeps: ClassVar[tuple[str, ...]] = ()
    one_rate: ClassVar[bool] = False

    @abstractmethod
    def start(self, context: LocalContext) -> Correction:
        """Return the correction of one round; the model holds the version that was pulled."""


@dataclass(frozen=True)
class Algorithm:
    """One member of the family.

    Attributes:
        name: in the run file. Sites load it by this name from what is installed with them.
        citation: title, authors, arXiv number.
        outer: name of the outer optimizer (`registry.TABLES["outer"]`).
        outer_options: its keyword arguments.
        reduce: group → reducer, for floating point tensors; integers and flags always take `max`.
        local: the class of its local rule; None: sites train plainly.
        codec: how `params` travel unless the run file says otherwise.
        on_missed: what a DiLoCo loop does that missed a round: `rebase` keeps its local steps, `reset` loses them and
            says so. A federated loop begins every round anew.
        own_reducer: whether its reducer of `params` is what makes it, so that no other may take its place.
        steps_driven: whether a round is `sync_every` local steps (else the site's own script decides).

    Raises:
        UsageError: it counts steps, and has a local rule or groups beside the model, which need whole rounds.
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
                f"The algorithm {self.name!r} counts steps, and corrects local training or keeps tensors beside the "
                "model.",
                "Leave steps_driven out: these need whole rounds, which the site's script ends.",
            )

    @property
    def beside(self) -> tuple[str, ...]:
        """The groups that lie beside the model in every version."""
        return tuple(group for group in self.reduce if group not in (PARAMS, BUFFERS))

    @property
    def keeps(self) -> tuple[str, ...]:
        """The groups that a site keeps between rounds."""
        return self.local.keeps if self.local else ()

    @property
    def local_options(self) -> dict[str, Any]:
        """The options of its local rule, with their defaults."""
        rule: Any = self.local
        return {each.name: each.default for each in dataclasses.fields(rule)} if rule else {}
