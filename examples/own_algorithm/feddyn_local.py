"""The sites' part of FedDyn: a dynamic regulariser. Each site keeps its λ_k between rounds.

D. A. E. Acar, Y. Zhao, R. Matas Navarro, M. Mattina, P. N. Whatmough, V. Saligrama: Federated Learning Based on Dynamic
Regularization. ICLR 2021, arXiv 2111.04263, algorithm 1.

    site      g ← ∇L_k(θ) − λ_k + α·(θ − θ_t)          in every local step
              λ_k ← λ_k − α·(θ_k − θ_t)                when its update counts
    server    θ_{t+1} = Σ_k (n_k / n) · θ_k            the paper subtracts h/α as well, which is left out here
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from atoll.algorithms import Algorithm, ChangeReader, Correction, ElementReader, LocalContext, LocalRule

LAMBDA = "feddyn_lambda"


@dataclass(frozen=True)
class DynamicRegulariser(LocalRule):
    state_groups = (LAMBDA,)
    alpha: float = 0.1

    def start(self, context: LocalContext) -> Correction:
        return _Regularised(context, self.alpha)


class _Regularised(Correction):
    def __init__(self, context: LocalContext, alpha: float) -> None:
        super().__init__()
        self.context, self.alpha, self.theta = context, alpha, context.trainable
        self.theta_t = {name: theta.detach().clone() for name, theta in self.theta.items()}
        self.shared = {name: context.like(name, context.own_state(LAMBDA, name)) for name in self.theta}

    def before_step_(self, names: Collection[str]) -> None:
        for name in self.theta.keys() & names:
            theta, g = self.theta[name], self.theta[name].grad
            if g is not None:
                g.add_(self.alpha * (theta - self.theta_t[name]) - self.shared[name])

    def finish(self, read_change: ChangeReader, rate_sum: float) -> Mapping[str, ElementReader]:
        for name, theta in self.theta.items():
            change = read_change(name, 0, theta.numel())  # θ_t − θ_k, as it leaves the site
            if change is not None:
                self.context.set_own_state(LAMBDA, name, self.context.own_state(LAMBDA, name) + self.alpha * change)
        return {}


feddyn_local = Algorithm(
    name="feddyn_local",
    citation="Federated Learning Based on Dynamic Regularization, Acar et al., 2111.04263",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    local=DynamicRegulariser,
)
