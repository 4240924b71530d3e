"""What a run's algorithm adds to local training: hooks on the user's own optimizer, for one round.

    with round.correct(model, optimizer):
        train()                               # plain training, whatever the algorithm
    round.submit(model)

FedProx changes the gradient before a step, SCAFFOLD the parameters behind it. FedAvg changes nothing. Steps are counted
and learning rates read where they happen: under gradient accumulation, with a schedule, or in a framework's loop. Where
the gradient is formed inside the step, by a closure, "before" is behind the closure, each time that it is called; and
the loss that it returns is that of the gradient, since a line search goes by both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.errors import UsageError
from atoll.tensors.chunks import run_of
from atoll.tensors.schema import CONTROL_PREFIX
from atoll.worker.given import require_trains
from atoll.worker.update import Runs

if TYPE_CHECKING:
    from atoll.worker.controls import OwnControls
    from atoll.worker.filtering import Filtered


class Correction:
    """Local training without a correction; the others build on it.

    Args:
        model: that is trained; its parameters are known by name.

    Attributes:
        steps: optimizer steps so far.
        rates: Σ η over them.
    """

    algorithm = "The algorithm"
    changes_training = False
    """Whether a step with it is another one than without."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = dict(model.named_parameters())
        self.steps, self.rates = 0, 0.0
        self._optimizer: Optimizer | None = None
        self._handles: list[Any] = []
        self._rate = 0.0
        self._under_way = self._formed = False  # a step; a gradient in it
        self._depth = 0  # 2 where step() of a class calls that of its parent: torch calls the hooks of both

    def attach(self, optimizer: Optimizer) -> Correction:
        """Follow the steps of `optimizer`, until `close`.

        Raises:
            UsageError: it follows another one already, or this one trains another model.
        """
        if self._optimizer is not None:
            raise UsageError(
                "A round has one optimizer, and this is the second.", "Put all parameters into one optimizer."
            )
        require_trains(optimizer, self.parameters.values())
        self._optimizer = optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._begin),
            optimizer.register_step_post_hook(lambda *_: self._after()),
        ]
        return self

    def close(self) -> None:
        """Let go of the optimizer. Idempotent."""
        handles, self._handles = self._handles, []
        for handle in handles:
            handle.remove()

    def __enter__(self) -> Correction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def control_difference(self) -> Runs | None:
        """Δc_i of what was trained; None for algorithms without controls.

        Raises:
            UsageError: training was to be corrected, and there was no step, or one that did not end.
        """
        if self.changes_training:
            self._require_steps()
        return None

    def _require_steps(self) -> None:
        """Refuse what was trained behind the correction's back, or not at all."""
        if self._under_way:
            raise UsageError(
                "An optimizer step began and did not end: its correction is missing.",
                "Let optimizer.step() return before the round is submitted.",
            )
        if not self.steps:
            raise UsageError(
                f"{self.algorithm} saw no optimizer step in this round.",
                "Call round.correct(model, optimizer) before training, with the optimizer whose step() trains.",
            )

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """As torch calls it: `args` begin with the optimizer; what is returned takes their place."""
        self._depth += 1
        if self._depth > 1:
            return None
        self._under_way, self._formed = True, False
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._behind(args[1]), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            return args, kwargs | {"closure": self._behind(kwargs["closure"])}
        with self._a_failed_step_has_ended():
            self._before()
        return None

    def _behind(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            with self._a_failed_step_has_ended():
                loss = closure()
                self._before()
                return self._whole(loss)

        return call

    @contextmanager
    def _a_failed_step_has_ended(self) -> Iterator[None]:
        """Torch calls no hook behind it; the next step is not one within it."""
        try:
            yield
        except BaseException:
            self._depth = 0
            raise

    def _before(self) -> None:
        self._rate, self._formed = self._learning_rate(), self._formed or self._has_gradients()
        with torch.no_grad():
            self.correct_gradients_()

    def _after(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        self._under_way = False
        if not (self._formed or self._has_gradients()):  # an optimizer that steps twice clears them itself
            return  # a closure that formed no gradient: nothing moved
        with torch.no_grad():
            self.correct_parameters_(self._rate)
        self.steps, self.rates = self.steps + 1, self.rates + self._rate

    def _whole(self, loss: Any) -> Any:
        """What a closure returned, with what the gradients' correction is the gradient of."""
        return loss

    def _has_gradients(self) -> bool:
        assert self._optimizer is not None
        return any(value.grad is not None for group in self._optimizer.param_groups for value in group["params"])

    def _learning_rate(self) -> float:
        """η of the step that is about to happen; where nothing depends on it, of the first group, or 0 without one."""
        assert self._optimizer is not None
        return float(self._optimizer.param_groups[0].get("lr") or 0.0)

    def correct_gradients_(self) -> None:
        """Before a step."""

    def correct_parameters_(self, rate: float) -> None:
        """Behind a step with the learning rate `rate`."""


class Proximal(Correction):
    """FedProx (arXiv 1812.06127): g ← g + μ·(w − w_t). Holds one copy of the trainable parameters, beside them.

    Args:
        mu: μ.
    """

    algorithm = "FedProx"
    changes_training = True

    def __init__(self, model: nn.Module, mu: float) -> None:
        super().__init__(model)
        self._mu = mu
        self._start = {name: value.detach().clone() for name, value in self.parameters.items() if value.requires_grad}

    def correct_gradients_(self) -> None:
        for name, start in self._start.items():
            parameter = self.parameters[name]
            if parameter.grad is not None and parameter.grad.is_sparse:
                raise UsageError(
                    f"The gradient of {name!r} is sparse, and FedProx adds a dense term to it.",
                    "Build the embedding with sparse=False, or run fedavg.",
                )
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach() - start, alpha=self._mu)

    def _whole(self, loss: Any) -> Any:
        """F(w) + (μ/2)·‖w − w_t‖², in fp32 or wider; what is no loss stays as it is."""
        if not isinstance(loss, Tensor | int | float):
            return loss
        term = torch.zeros((), device=loss.device if isinstance(loss, Tensor) else None)
        with torch.no_grad():
            for name, start in self._start.items():
                moved = self.parameters[name] - start
                norm = torch.linalg.vector_norm(moved, dtype=torch.promote_types(moved.dtype, torch.float32))
                term = term + norm.square().to(term.device)
        term = term * (self._mu / 2)
        return loss + (term if isinstance(loss, Tensor) else term.item())


class Shifted(Correction):
    """SCAFFOLD (arXiv 1910.06378, option II): y ← y − η·(c − c_i) behind each step.

    Attributes:
        offsets: c − c_i of the trainable parameters, by name; one copy of them, beside them.
    """

    offsets: dict[str, Tensor]

    def attach(self, optimizer: Optimizer) -> Correction:
        """As every correction.

        Raises:
            UsageError: also for L-BFGS: Δc_i divides what a step moved by the learning rate, and L-BFGS moves as far
                as its line search says, along curvature that a shift between two steps would spoil.
        """
        if any("LBFGS" in kind.__name__ for kind in type(optimizer).__mro__):
            raise UsageError(
                f"{type(optimizer).__name__} chooses the length of its steps by itself, and SCAFFOLD's controls are "
                "what a step moved, divided by its learning rate.",
                "Use an optimizer whose step is its learning rate times a direction, as SGD's; or run fedprox or "
                "fedavg.",
            )
        return super().attach(optimizer)

    def correct_parameters_(self, rate: float) -> None:
        for name, offset in self.offsets.items():
            self.parameters[name].sub_(offset, alpha=rate)

    def _learning_rate(self) -> float:
        assert self._optimizer is not None
        given = [group.get("lr") for group in self._optimizer.param_groups]
        if None in given:
            raise UsageError(
                f"{type(self._optimizer).__name__} has no learning rate: it chooses its steps by itself.",
                "SCAFFOLD needs one: give lr=, or another optimizer, or run fedavg.",
            )
        rates = {float(rate) for rate in given if rate is not None}
        if len(rates) > 1:
            raise UsageError(
                f"The optimizer has the learning rates {', '.join(f'{rate:g}' for rate in sorted(rates))}.",
                "SCAFFOLD needs one for all parameter groups.",
            )
        (rate,) = rates
        if not (math.isfinite(rate) and rate >= 0):
            raise UsageError(f"The learning rate is {rate:g}.", "SCAFFOLD needs one that is finite and not negative.")
        return rate


class ScaffoldCorrection(Shifted):
    """SCAFFOLD with what its update needs.

    Args:
        base: runs of the version that was pulled: of x by a parameter's name, of c by its control's.
        controls: c_i.

    Raises:
        UsageError: c or c_i is not finite.
    """

    algorithm = "SCAFFOLD"
    changes_training = True

    def __init__(self, model: nn.Module, base: Runs, controls: OwnControls) -> None:
        super().__init__(model)
        self._base, self._controls = base, controls
        self._trainable = {name for name, value in self.parameters.items() if value.requires_grad}
        self.offsets = {}
        for name in self._trainable:
            value, control = self.parameters[name], CONTROL_PREFIX + name
            offset = base(control, 0, value.numel()) - controls.read(control, 0, value.numel())
            if not bool(torch.isfinite(offset).all()):
                raise UsageError(
                    f"The control of {name!r} is not finite: this site's file of it is damaged, or the run's is.",
                    "Remove this site's folder under ATOLL_DIR and start it with ATOLL_NEW_CONTROLS=1; if it is said "
                    "again, begin a new run.",
                )
            self.offsets[name] = offset.view(value.shape).to(value.device, value.dtype)

    def control_difference(self) -> Runs:
        """Δc_i = (x − y_i) / Σ η − c, as the update is formed; c_i⁺ is written on the way.

        Raises:
            UsageError: there was no step, or one that did not end, or none with a learning rate.
        """
        self._require_steps()
        return _Measured(self)

    def difference(self, control: str, start: int, stop: int, filtered: Filtered | None) -> Tensor:
        """Those elements of Δc_i; x − y is what `filtered` leaves of it."""
        name = control.removeprefix(CONTROL_PREFIX)
        mine, value = self._controls.read(control, start, stop), self.parameters.get(name)
        if name not in self._trainable or value is None or (filtered is not None and not filtered.sends(name)):
            delta = torch.zeros_like(mine)  # it was not trained, or nobody is told: c_i stays
        else:
            if filtered is not None:
                moved = filtered.change(name, start, stop).to(mine.dtype)
            else:
                x, y = self._base(name, start, stop), run_of(value.detach(), start, stop).cpu()
                moved = x.to(mine.dtype) - y.to(mine.dtype)
            delta = moved.div_(self.rates).sub_(self._base(control, start, stop))
        self._controls.write(control, start, mine + delta)
        return delta

    def _require_steps(self) -> None:
        """Refuse what has no Δc_i."""
        super()._require_steps()
        if not self.rates > 0:
            raise UsageError(
                f"The learning rates of this round's {self.steps} steps sum up to {self.rates:g}.",
                "SCAFFOLD divides by the sum: at least one step needs a learning rate above zero.",
            )


@dataclass(frozen=True)
class _Measured:
    """Δc_i of a round that was trained with `ScaffoldCorrection`; an `update.Difference`."""

    scaffold: ScaffoldCorrection
    filtered: Filtered | None = None

    def __call__(self, control: str, start: int, stop: int) -> Tensor:
        return self.scaffold.difference(control, start, stop, self.filtered)

    def behind(self, filtered: Filtered) -> Runs:
        return _Measured(self.scaffold, filtered)


def correction_for(local: Mapping[str, Any], model: nn.Module, base: Runs, controls: OwnControls | None) -> Correction:
    """What the run's algorithm asks for.

    Args:
        local: as the server said it when this worker joined.
        controls: c_i, in runs that have controls.

    Raises:
        UsageError: this version of Atoll does not know it.
    """
    kind = local.get("correction", "none")
    if kind == "none":
        return Correction(model)
    if kind == "fedprox":
        return Proximal(model, float(local["mu"]))
    if kind == "scaffold":
        if controls is None:
            raise UsageError("The run is SCAFFOLD's, and its versions hold no controls.", "Begin a new run.")
        return ScaffoldCorrection(model, base, controls)
    raise UsageError(f"The run corrects local training by {kind!r}, which this worker does not know.", "Upgrade Atoll.")
