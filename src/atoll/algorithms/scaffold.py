"""SCAFFOLD: FedAvg with control variates, which keep local training from drifting towards a site's own optimum.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020, arXiv 1910.06378, algorithm 1, option II for the controls.

    site      y_i ← x;   K times:  y_i ← y_i − η_l·(g_i(y_i) − c_i + c)   c_i, c: mean gradients of site i, of all sites
              c_i⁺ = c_i − c + (x − y_i) / (K·η_l)          with a schedule: Σ η_l in place of K·η_l
              Δc_i = c_i⁺ − c_i = (x − y_i) / Σ η_l − c
    server    x ← x − η_g · mean_S (x − y_i)                Atoll: by weight;  η_g = outer_optimizer.lr
              c ← c + Σ_S p_i·Δc_i                          the paper: p_i = 1/N;  Atoll: p_i = w_i / W

The same weights apply to the model and to the controls. An update counts when the server uses it in a version. A site's
weight w_i is that of its first update that counted. W estimates the total weight of all N sites that ever joined: if
updates of M sites have counted so far, W is the sum of their weights × N / M. If all weights are 1, w_i / W is the
paper's 1/N.

In a version, the tensors of the group `control` are c, in addition to the model. In an update, they are Δc_i, in
addition to the pseudo-gradient. The site keeps c_i. When the site's update counts, c_i⁺ becomes the new c_i. When W
changes, the server scales c ← c·W_before/W, so that c stays the weighted mean of all c_i (reducer `share`).

If the server goes back to an older version, the c_i of that version are lost. Then c and all c_i begin at zero again,
so that c stays their mean: docs/decisions/0035.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from atoll.algorithms.base import Algorithm, ChangeReader, Correction, ElementReader, LocalContext, LocalRule
from atoll.algorithms.by_hand import ByHand, require_tensors
from atoll.algorithms.optimizer_hooks import StepHooks
from atoll.errors import UsageError, public_api
from atoll.tensors.arrays import Arrays, require_model
from atoll.tensors.chunks import run_of
from atoll.tensors.module_tensors import named_parameters
from atoll.tensors.schema import extra_name

CONTROL = "control"


@dataclass(frozen=True)
class ControlVariates(LocalRule):
    """SCAFFOLD's local rule: shift every step by −η·(c − c_i).

    η is the learning rate; c and c_i are the control variates of the run and of the site.
    """

    state_groups: ClassVar[tuple[str, ...]] = (CONTROL,)
    one_rate: ClassVar[bool] = True

    def start(self, context: LocalContext) -> Correction:
        """Read the control variates c (of the run) and c_i (of the site). Return the correction for one round.

        After each step, the correction adds −η·(c − c_i) to the parameters.

        Raises:
            UsageError: a control variate is not finite. The message names its parameter.
        """
        return _Shifted(context)


class _Shifted(Correction):
    """SCAFFOLD's correction in one round. It holds c − c_i (run − site) for each trainable parameter."""

    def __init__(self, context: LocalContext) -> None:
        super().__init__()
        self._context, self._y = context, context.trainable
        for name in self._y:
            shift = context.version(CONTROL, name) - context.own_state(CONTROL, name)
            if not bool(torch.isfinite(shift).all()):
                raise UsageError(
                    f"SCAFFOLD's control variate of {name!r} is not finite: this site's local state or the "
                    "run's version is damaged.",
                    "Remove this site's folder under ATOLL_DIR, and start the site with ATOLL_NEW_STATE=1. "
                    "If this error comes again, start a new run.",
                )
            self.shared[name] = context.like(name, shift)

    def after_step_(self, names: Collection[str], rate: float) -> None:
        for name, shift in self.shared.items():
            self._y[name].sub_(shift, alpha=rate)

    def finish(self, read_change: ChangeReader, rate_sum: float) -> Mapping[str, ElementReader]:
        """Return Δc_i, the change of c_i. It is zero for parameters that were not trained or that a filter drops."""

        def difference(name: str, start: int, stop: int) -> Tensor:
            c_i = self._context.own_state(CONTROL, name, start, stop)
            x_y = read_change(name, start, stop) if name in self._y else None
            if x_y is None:
                delta = torch.zeros_like(c_i)
            else:
                delta = x_y.to(c_i.dtype).div_(rate_sum).sub_(self._context.version(CONTROL, name, start, stop))
            self._context.set_own_state(CONTROL, name, c_i + delta, start)
            return delta

        return {CONTROL: difference}


@public_api
class Scaffold(ByHand):
    """SCAFFOLD (arXiv 1910.06378, option II) for one round of a hand-written loop: y ← y − η·(c − c_i) after each step.

    Args:
        model: the model, with the values of the downloaded version. Scaffold copies its parameters to the CPU as x.
        global_controls: c, the run's control variates (`fl_round.global_state("control")`): parameter name → tensor of
            the parameter's shape.
        own_controls: c_i, the site's control variates (`fl_round.own_state("control")`), in the same form.

    Raises:
        UsageError: a control variate is missing, unknown, of another shape, not floating point or not finite. The
            message names it.
    """

    @public_api
    def __init__(self, model: nn.Module, global_controls: Arrays, own_controls: Arrays) -> None:
        require_model(model, mapping=False)
        self._y = {name: value for name, value in named_parameters(model).items() if value.is_floating_point()}
        self._x = {name: value.detach().to("cpu", copy=True) for name, value in self._y.items()}
        shapes = {name: tuple(value.shape) for name, value in self._y.items()}
        c = _InMemory(require_tensors("global_controls", global_controls, shapes))
        self._own = _InMemory(require_tensors("own_controls", own_controls, shapes))
        super().__init__(StepHooks(model, "SCAFFOLD", ControlVariates(), c.read, self._own))

    @property
    def own_controls(self) -> dict[str, Tensor]:
        """Before `finish`, the given c_i; afterwards c_i⁺, which becomes c_i if the server uses this round's update."""
        return {name: self._own.after[extra_name(CONTROL, name)] for name in self._x}

    @public_api
    def finish(self) -> dict[str, Tensor]:
        """Stop correcting the optimizer, and return Δc_i.

        Returns:
            Δc_i = c_i⁺ − c_i, as parameter name → CPU tensor of the parameter's shape: the update's tensors of the
            group "control". Zeros for a parameter that was not trained.

        Raises:
            UsageError: there was no step, a step did not end, or no step had a learning rate above zero.
        """
        self._hooks.close()
        with torch.no_grad():
            difference = self._hooks.finish(self._moved)[CONTROL]
            return {name: difference(name, 0, x.numel()).reshape(x.shape) for name, x in self._x.items()}

    def _moved(self, name: str, start: int, stop: int) -> Tensor:
        wide = torch.float64 if self._x[name].dtype == torch.float64 else torch.float32
        x, y = run_of(self._x[name], start, stop), run_of(self._y[name].detach(), start, stop)
        return x.to(wide) - y.to("cpu", wide)


class _InMemory:
    """SCAFFOLD's control variates in memory: the current ones (`before`) and the next ones (`after`)."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.before = {extra_name(CONTROL, name): value for name, value in tensors.items()}
        self.after = {name: value.clone() for name, value in self.before.items()}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        return run_of(self.before[name], start, stop).clone()

    def write(self, name: str, start: int, values: Tensor) -> None:
        self.after[name].reshape(-1)[start : start + values.numel()].copy_(values)


scaffold = Algorithm(
    name="scaffold",
    citation="SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, Karimireddy et al., 1910.06378",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    reduce={"params": "mean", "buffers": "mean", CONTROL: "share"},
    local=ControlVariates,
)
