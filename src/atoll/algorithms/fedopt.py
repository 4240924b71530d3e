"""FedOpt: FedAvg with an adaptive step at the server.

S. J. Reddi, Z. Charles, M. Zaheer, Z. Garrett, K. Rush, J. Konečný, S. Kumar, H. B. McMahan: Adaptive Federated
Optimization. ICLR 2021, arXiv 2003.00295, algorithms 1 and 2. FedAvgM is from T.-M. H. Hsu, H. Qi, M. Brown: Measuring
the Effects of Non-Identical Data Distribution for Federated Visual Classification. arXiv 1909.06335.

    g_t = Σ_k (n_k / n) · (x_t − x^k_t)          the paper's −Δ_t; x^k_t: site k's model after local training
    FedAvgM      m_t = β·m_{t−1} + g_t                                              x_{t+1} = x_t − η·m_t
    FedAdagrad   v_t = v_{t−1} + g_t²                                               x_{t+1} = x_t − η·g_t / (√v_t + τ)
    FedAdam      m_t = β₁·m_{t−1} + (1−β₁)·g_t;  v_t = β₂·v_{t−1} + (1−β₂)·g_t²      x_{t+1} = x_t − η·m̂_t / (√v̂_t + τ)
    FedYogi      as FedAdam, with Yogi's v_t (`outer_optimizers/yogi.py`)            x_{t+1} = x_t − η·m_t / (√v_t + τ)

m_t and v_t are the first and second moment, η is the outer learning rate, and τ = 1e-3. FedAdam uses torch's Adam. The
hats mark Adam's bias correction, which the paper leaves out. The best η (`algorithm.outer_optimizer.lr`) depends
strongly on the task; in the paper, the best values are between 1e-3 and 1.
"""

from __future__ import annotations

from atoll.algorithms.base import Algorithm

CITATION = "Adaptive Federated Optimization, Reddi et al., 2003.00295"
TAU = 1e-3

fedavgm = Algorithm(
    name="fedavgm",
    citation="Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, "
    "Hsu et al., 1909.06335",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.9},
)
fedadagrad = Algorithm(
    name="fedadagrad",
    citation=CITATION,
    outer="adagrad",
    outer_options={"lr": 0.01, "initial_accumulator_value": TAU**2, "eps": TAU},
)
fedadam = Algorithm(
    name="fedadam",
    citation=CITATION,
    outer="adam",
    outer_options={"lr": 0.01, "betas": (0.9, 0.99), "eps": TAU},
)
fedyogi = Algorithm(
    name="fedyogi",
    citation=CITATION,
    outer="yogi",
    outer_options={"lr": 0.01, "betas": (0.9, 0.99), "eps": TAU},
)
