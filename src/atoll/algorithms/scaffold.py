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
from torch import Tensor

from atoll.algorithms.base import Algorithm, ChangeReader, Correction, ElementReader, LocalContext, LocalRule
from atoll.errors import UsageError

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
        for name, shift in self.shared.items():  # all of them, since there is one optimizer (`one_rate`)
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


scaffold = Algorithm(
    name="scaffold",
    citation="SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, Karimireddy et al., 1910.06378",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    reduce={"params": "mean", "buffers": "mean", CONTROL: "share"},
    local=ControlVariates,
)
