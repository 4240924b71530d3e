"""FedAvg: sites train the global model locally; the server takes the weighted mean of the results.

H. B. McMahan, E. Moore, D. Ramage, S. Hampson, B. Agüera y Arcas: Communication-Efficient Learning of Deep Networks
from Decentralized Data. AISTATS 2017, arXiv 1602.05629, algorithm 1.

    w_{t+1} = Σ_k (n_k / n) · w^k_{t+1}          w^k_{t+1}: worker k's model after local training from w_t

in pseudo-gradient form, u_k = w_t − w^k_{t+1}:

    g = Σ_k (n_k / n) · u_k          n_k: the worker's weight, n = Σ_k n_k
    w_{t+1} = w_t − η · g            η = 1: SGD without momentum
"""

from __future__ import annotations

from atoll.algorithms.base import Algorithm

fedavg = Algorithm(
    name="fedavg",
    citation="Communication-Efficient Learning of Deep Networks from Decentralized Data, McMahan et al., 1602.05629",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
)
