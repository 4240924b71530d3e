"""For loops that somebody writes by hand: the corrections of FedProx and SCAFFOLD as values, and Δc_i given back.

    fl_round.load_into(model)
    scaffold = atoll.Scaffold(model, fl_round.global_controls(), fl_round.own_controls())
    with scaffold.correct(optimizer):
        train()
    fl_round.submit(model, control_difference=scaffold.finish(), steps=scaffold.steps)

`fl_round.correct(model, optimizer)` does all of it for whichever algorithm the run has, without a copy of the controls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.border import border, bordered
from atoll.errors import UsageError
from atoll.tensors.arrays import Arrays, as_tensor
from atoll.tensors.chunks import run_of
from atoll.tensors.module_tensors import named_parameters
from atoll.tensors.schema import CONTROL_PREFIX
from atoll.worker.correction.optimizer_hooks import Correction, Proximal
from atoll.worker.correction.scaffold_steps import ScaffoldCorrection
from atoll.worker.exchange.encode_update import Runs

if TYPE_CHECKING:
    from atoll.worker.correction.control_variates import OwnControls

Shapes = Mapping[str, tuple[int, ...]]


@bordered
class FedProx:
    """FedProx (arXiv 1812.06127) for one round of a hand-written loop: g ← g + μ·(w − w_t).

    Args:
        model: as it was pulled; a copy of its trainable parameters, w_t, is kept.
        mu: μ.
    """

    @border
    def __init__(self, model: nn.Module, mu: float) -> None:
        if not 0 <= mu < float("inf"):
            raise UsageError(f"mu is {mu}.", "Give a number that is finite and not negative.")
        self._correction: Correction = Proximal(model, mu)

    @property
    def steps(self) -> int:
        """Optimizer steps so far."""
        return self._correction.steps

    @border
    def correct(self, optimizer: Optimizer) -> Correction:
        """Correct each step of `optimizer`, until `finish` or the end of a `with` block.

        Raises:
            UsageError: it corrects another one already.
        """
        return self._correction.attach(optimizer)

    def finish(self) -> None:
        """Let go of the optimizer. Idempotent."""
        self._correction.close()


@bordered
class Scaffold:
    """SCAFFOLD (arXiv 1910.06378, option II) for one round of a hand-written loop: y ← y − η·(c − c_i) after each step.

    Args:
        model: as it was pulled; a copy of its parameters on the CPU, x, is kept.
        global_controls: c, parameter's name → tensor of its shape, for each parameter.
        own_controls: c_i, likewise.

    Raises:
        UsageError: a control is missing, unknown, of another shape, no tensor of floats or not finite; it is named.
    """

    @border
    def __init__(self, model: nn.Module, global_controls: Arrays, own_controls: Arrays) -> None:
        parameters = {name: value for name, value in named_parameters(model).items() if value.is_floating_point()}
        self._shapes = {name: tuple(value.shape) for name, value in parameters.items()}
        c = require_controls("global_controls", global_controls, self._shapes)
        self._own = _Memory(require_controls("own_controls", own_controls, self._shapes))
        x = {name: value.detach().to("cpu", copy=True) for name, value in parameters.items()}

        def base(name: str, start: int, stop: int) -> Tensor:
            parameter = name.removeprefix(CONTROL_PREFIX)
            return run_of(x[name] if parameter == name else c[parameter], start, stop).clone()

        self._correction = ScaffoldCorrection(model, base, self._own)

    @property
    def steps(self) -> int:
        """Optimizer steps so far: K."""
        return self._correction.steps

    @property
    def own_controls(self) -> dict[str, Tensor]:
        """c_i as it was given; after `finish` c_i⁺, which counts only if the update does."""
        return dict(self._own.tensors)

    @border
    def correct(self, optimizer: Optimizer) -> Correction:
        """Correct each step of `optimizer`, until `finish` or the end of a `with` block.

        Raises:
            UsageError: it corrects another one already.
        """
        return self._correction.attach(optimizer)

    @border
    def finish(self) -> dict[str, Tensor]:
        """Let go of the optimizer.

        Returns:
            Δc_i = c_i⁺ − c_i, parameter's name → CPU tensor of its shape: the `control_difference` of an update.
            Zeros where a parameter was not trained.

        Raises:
            UsageError: there was no step, or one that did not end, or none with a learning rate.
        """
        self._correction.close()
        with torch.no_grad():
            difference = self._correction.control_difference()
            return {
                name: difference(CONTROL_PREFIX + name, 0, _numel(shape)).reshape(shape)
                for name, shape in self._shapes.items()
            }


class _Memory:
    """c_i and c_i⁺ in memory, where `Controls` has them in files."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._current, self.tensors = tensors, {name: value.clone() for name, value in tensors.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return run_of(self._current[name.removeprefix(CONTROL_PREFIX)], start, stop)

    def write(self, name: str, start: int, values: Tensor) -> None:
        target = self.tensors[name.removeprefix(CONTROL_PREFIX)]
        target.reshape(-1)[start : start + values.numel()].copy_(values)


def require_controls(what: str, given: object, shapes: Shapes) -> dict[str, Tensor]:
    """Contiguous CPU tensors in fp32 (fp64 for fp64), one for each parameter.

    Args:
        what: the argument's name, for the message.
        given: parameter's name → tensor, or anything that becomes one (numpy, DLPack, `__array__`).
        shapes: of the parameters.

    Raises:
        UsageError: it is no such mapping; what is wrong is named.
    """
    if not isinstance(given, Mapping):
        raise UsageError(
            f"{what} is a {type(given).__name__}.", "Give a mapping from parameters' names to tensors of their shapes."
        )
    for name in shapes:
        if name not in given:
            raise UsageError(f"{what} lacks {name!r}.", "Give one for each parameter, zeros for those not trained.")
    tensors = {}
    for name, value in given.items():
        if name not in shapes:
            raise UsageError(f"{what} has {name!r}, which is no parameter.", "Use the parameters' own names.")
        tensor = as_tensor(f"{what}[{name!r}]", value).detach()
        if tuple(tensor.shape) != shapes[name]:
            raise UsageError(
                f"{what}[{name!r}] has the shape {list(tensor.shape)}, the parameter {list(shapes[name])}.",
                "Give a tensor of the parameter's shape.",
            )
        if not tensor.is_floating_point():
            raise UsageError(f"{what}[{name!r}] is {tensor.dtype}.", "Give one of floating point numbers.")
        if not bool(torch.isfinite(tensor).all()):
            raise UsageError(f"{what}[{name!r}] holds NaN or Inf.", "Look at the learning rate and the loss.")
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        tensors[name] = tensor.to("cpu", wide).contiguous()
    return tensors


def difference_runs(given: object, shapes: Shapes, own: OwnControls) -> Runs:
    """Δc_i that a script hands over, as an update is formed from it; c_i⁺ = c_i + Δc_i is written on the way.

    Raises:
        UsageError: as `require_controls`.
    """
    difference = require_controls("control_difference", given, shapes)

    def run(control: str, start: int, stop: int) -> Tensor:
        mine = own.read(control, start, stop)
        delta = run_of(difference[control.removeprefix(CONTROL_PREFIX)], start, stop).to(mine.dtype)
        own.write(control, start, mine + delta)
        return delta

    return run


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
