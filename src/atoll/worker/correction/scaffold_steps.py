"""SCAFFOLD at a worker: steps that are shifted by the controls, and what the controls learn of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from atoll.errors import UsageError
from atoll.tensors.chunks import run_of
from atoll.tensors.schema import CONTROL_PREFIX
from atoll.worker.correction.optimizer_hooks import Correction
from atoll.worker.correction.optimizers import Given, optimizers_in
from atoll.worker.exchange.encode_update import Runs

if TYPE_CHECKING:
    from atoll.worker.correction.control_variates import OwnControls
    from atoll.worker.exchange.encode_update import Filtered


class Shifted(Correction):
    """SCAFFOLD (arXiv 1910.06378, option II): y ← y − η·(c − c_i) behind each step.

    `offsets` are c − c_i of the trainable parameters, by name: one copy of them, beside them.
    """

    def attach(self, optimizer: Given) -> Correction:
        """As every correction.

        Raises:
            UsageError: also for several optimizers: what a round moved is divided by the learning rates of one. And
                for L-BFGS: Δc_i divides what a step moved by the learning rate, and L-BFGS moves as far
                as its line search says, along curvature that a shift between two steps would spoil.
        """
        *others, optimizer = optimizers_in(optimizer)
        if others:
            raise UsageError(
                f"SCAFFOLD follows one optimizer, and these are {len(others) + 1}: a control is what the round moved, "
                "divided by the sum of one optimizer's learning rates.",
                "Put all parameters into one optimizer, with one learning rate; or run fedprox or fedavg.",
            )
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
    measures_controls = True

    def __init__(self, model: nn.Module, base: Runs, controls: OwnControls) -> None:
        super().__init__(model)
        self._base, self._controls = base, controls
        self._trainable = {name for name, value in self.parameters.items() if value.requires_grad}
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
