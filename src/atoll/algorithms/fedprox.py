"""FedProx: FedAvg with a term that pulls local training towards the version from which the site started.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in Heterogeneous Networks.
MLSys 2020, arXiv 1812.06127, equation 2 and algorithm 2.

    h_k(w; w_t) = F_k(w) + (μ/2)·‖w − w_t‖²          the loss that site k minimises; F_k: without the term
    g ← ∇F_k(w) + μ·(w − w_t)                        its gradient, in every local step, of every trainable parameter
    w_{t+1} = Σ_k (n_k / n) · w^k_{t+1}

Set μ in the run file with algorithm = {name = "fedprox", mu = 0.1}. With μ = 0, FedProx equals FedAvg. In the paper,
the best values are between 0.001 and 1.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.algorithms.base import Algorithm, Correction, LocalContext, LocalRule
from atoll.errors import UsageError
from atoll.tensors.module_tensors import gradients_of


@dataclass(frozen=True)
class ProximalTerm(LocalRule):
    """FedProx's local rule: pull every step towards w_t, the version that the round started from."""

    mu: float = 0.01

    def start(self, context: LocalContext) -> Correction:
        """Return a correction that copies the parameters as w_t, and adds μ·(w − w_t) to the gradients in each step."""
        return _Proximal(context, self.mu)


class _Proximal(Correction):
    """FedProx's correction in one round. It holds w_t, a copy of the trainable parameters before training.

    If a parameter has several gradients, such as Megatron's `main_grad`, each gets the term: the optimizer reads one of
    them. A parameter without a gradient (∇F_k = 0, as in a branch of the model that a step does not use) gets the
    gradient μ·(w − w_t) for the length of the step.
    """

    changes_weights = False

    def __init__(self, context: LocalContext, mu: float) -> None:
        super().__init__()
        self._mu, self._w = mu, context.parameters
        self._w_t = {name: value.detach().clone() for name, value in context.trainable.items()}
        self._made: dict[str, Tensor] = {}  # the gradients that were made for a step

    def before_step_(self, names: Collection[str]) -> None:
        if not self._mu:
            return
        self._remove_made(names)
        trained = [name for name in names if self._w[name].requires_grad]
        for name in trained:  # a parameter that was frozen until now still has the value of the version
            if name not in self._w_t:
                self._w_t[name] = self._w[name].detach().clone()
        is_a_step = any(map(gradients_of, self._w.values()))
        for name in trained:
            gradients, pull = gradients_of(self._w[name]), self._w[name].detach() - self._w_t[name]
            if not gradients:
                if is_a_step or bool(pull.any()):  # else step() was called before any backward pass
                    self._w[name].grad = self._made[name] = pull.mul_(self._mu)
                continue
            for g in gradients:
                if g.is_sparse:
                    raise UsageError(
                        f"The gradient of {name!r} is sparse, but FedProx adds a dense term to it.",
                        "Build the embedding with sparse=False, or use fedavg.",
                    )
                if pull.shape != g.shape:
                    pull = pull.reshape(g.shape)
                g.add_(pull, alpha=self._mu)

    def after_step_(self, names: Collection[str], rate: float) -> None:
        self._remove_made(names)

    def _remove_made(self, names: Collection[str]) -> None:
        for name in self._made.keys() & names:
            made = self._made.pop(name)
            if self._w[name].grad is made:
                self._w[name].grad = None

    def penalty(self, names: Collection[str]) -> Tensor:
        """Return (μ/2)·‖w − w_t‖² over the parameters in `names`, in fp32 or wider."""
        term = torch.zeros(())
        for name in names:
            if name in self._w_t and self._w[name].requires_grad:
                moved = self._w[name] - self._w_t[name]
                norm = torch.linalg.vector_norm(moved, dtype=torch.promote_types(moved.dtype, torch.float32))
                term = term.to(norm.device) + norm.square()
        return term * (self._mu / 2)


fedprox = Algorithm(
    name="fedprox",
    citation="Federated Optimization in Heterogeneous Networks, Li et al., 1812.06127",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    local=ProximalTerm,
)
