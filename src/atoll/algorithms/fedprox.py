"""FedProx.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in Heterogeneous Networks.
MLSys 2020, arXiv 1812.06127, equation 2 and algorithm 2.

    h_k(w; w_t) = F_k(w) + (μ/2)·‖w − w_t‖²          minimised by the site, so
    g ← ∇F_k(w) + μ·(w − w_t)                        in every local step
    w_{t+1} = Σ_k (n_k / n) · w^k_{t+1}

μ is set by algorithm = {name = "fedprox", mu = 0.1}; with μ = 0 this is FedAvg. The best in the paper are between
0.001 and 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.algorithms.base import Algorithm, Correction, LocalContext, LocalRule
from atoll.algorithms.by_hand import ByHand
from atoll.algorithms.optimizer_hooks import StepHooks
from atoll.errors import UsageError, public_api


@dataclass(frozen=True)
class ProximalTerm(LocalRule):
    """Pull every step towards the version that the round began with."""

    mu: float = 0.01

    def start(self, context: LocalContext) -> Correction:
        """Copy the trainable parameters, w_t; each step then adds μ·(w − w_t) to the gradients."""
        return _Proximal(context.trainable, self.mu)


class _Proximal(Correction):
    """Holds one copy of the trainable parameters, beside them."""

    def __init__(self, parameters: dict[str, Tensor], mu: float) -> None:
        super().__init__()
        self._mu, self._w = mu, parameters
        self._w_t = {name: value.detach().clone() for name, value in parameters.items()}

    def before_step_(self, names: Collection[str]) -> None:
        for name in names:
            g = self._w[name].grad if name in self._w else None
            if g is None:
                continue
            if g.is_sparse:
                raise UsageError(
                    f"The gradient of {name!r} is sparse, and FedProx adds a dense term to it.",
                    "Build the embedding with sparse=False, or run fedavg.",
                )
            g.add_(self._w[name].detach() - self._w_t[name], alpha=self._mu)

    def penalty(self, names: Collection[str]) -> Tensor:
        """Return (μ/2)·‖w − w_t‖², in fp32 or wider."""
        term = torch.zeros(())
        for name in names:
            if name in self._w:
                moved = self._w[name] - self._w_t[name]
                norm = torch.linalg.vector_norm(moved, dtype=torch.promote_types(moved.dtype, torch.float32))
                term = term.to(norm.device) + norm.square()
        return term * (self._mu / 2)


@public_api
class FedProx(ByHand):
    """FedProx (arXiv 1812.06127) for one round of a hand-written loop: g ← g + μ·(w − w_t).

    Args:
        model: as it was pulled; a copy of its trainable parameters, w_t, is kept.
        mu: μ.
    """

    @public_api
    def __init__(self, model: nn.Module, mu: float) -> None:
        if not 0 <= mu < float("inf"):
            raise UsageError(f"mu is {mu}.", "Give a number that is finite and not negative.")
        super().__init__(StepHooks(model, "FedProx", ProximalTerm(mu)))

    def finish(self) -> None:
        """Let go of the optimizer. Idempotent."""
        self._hooks.close()


fedprox = Algorithm(
    name="fedprox",
    citation="Federated Optimization in Heterogeneous Networks, Li et al., 1812.06127",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    local=ProximalTerm,
)
