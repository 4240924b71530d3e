"""FedNova: FedAvg in which a worker that takes more local steps does not get more influence.

J. Wang, Q. Liu, H. Liang, G. Joshi, H. V. Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization. NeurIPS 2020, arXiv 2007.07481, section 5.

    x_{t+1} = x_t − τ_eff · Σ_i p_i · η·d_i          d_i = G_i·a_i / ‖a_i‖₁,   τ_eff = Σ_i p_i·τ_i

G_i holds the τ_i gradients of worker i's local steps. a_i holds the factor of each gradient in the worker's change of
the model. p_i is the worker's share of all updates' weights. For plain local SGD, a_i = (1, …, 1). Then ‖a_i‖₁ = τ_i,
and η·d_i = u_i / τ_i with the pseudo-gradient u_i = x_t − x_i. With g as the reduced pseudo-gradient:

    g = (Σ_k p_k·τ_k) · Σ_k p_k · u_k / τ_k          p_k = n_k / n; n_k: the worker's weight, n = Σ_k n_k
    x_{t+1} = x_t − g                                SGD, η = 1

τ_k is the number of steps that update k reports. If all τ_k are equal, FedNova equals FedAvg.
"""

from __future__ import annotations

from atoll.algorithms.base import Algorithm

fednova = Algorithm(
    name="fednova",
    citation="Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, Wang et al., "
    "2007.07481",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    reduce={"params": "normalised_mean", "buffers": "mean"},
    own_reducer=True,
)
