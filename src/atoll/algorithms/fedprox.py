"""FedProx.

T. Li, A. K. Sahu, M. Zaheer, M. Sanjabi, A. Talwalkar, V. Smith: Federated Optimization in Heterogeneous Networks.
MLSys 2020, arXiv 1812.06127, equation 2 and algorithm 2.

    h_k(w; w_t) = F_k(w) + (μ/2)·‖w − w_t‖²          minimised by the worker, so
    g ← ∇F_k(w) + μ·(w − w_t)                        in every local step
    w_{t+1} = Σ_k (n_k / n) · w^k_{t+1}

μ is set by local_options = {mu = 0.1}; with μ = 0 this is FedAvg. The paper's best lie between 0.001 and 1.
"""

from __future__ import annotations

from atoll.algorithms.base import Algorithm

fedprox = Algorithm(
    name="fedprox",
    citation="Federated Optimization in Heterogeneous Networks, Li et al., 1812.06127",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    local={"correction": "fedprox", "mu": 0.01},
)
