"""SCAFFOLD.

S. P. Karimireddy, S. Kale, M. Mohri, S. J. Reddi, S. U. Stich, A. T. Suresh: SCAFFOLD: Stochastic Controlled Averaging
for Federated Learning. ICML 2020, arXiv 1910.06378, algorithm 1, option II for the controls.

worker    y_i ← x;   K times:  y_i ← y_i − η_l·(g_i(y_i) − c_i + c)
          c_i⁺ = c_i − c + (x − y_i) / (K·η_l)          with a schedule: Σ η_l in place of K·η_l
          Δc_i = c_i⁺ − c_i
server    x ← x − η_g · mean_S (x − y_i)                Atoll: by weight;  η_g = outer_lr
          c ← c + Σ_S p_i·Δc_i                          the paper: p_i = 1/N;  Atoll: p_i = w_i / W

Weights define the objective, for model and controls alike. W is the weight of all workers that ever joined: the sum of
the weights of the workers heard × (N / workers heard). So weights of 1 are the paper's 1/N. A worker keeps its first
weight.

c lies beside the model in every version, Δc_i beside the pseudo-gradient in every update (group `control`), c_i with
the worker, which keeps c_i⁺ only when its update was counted. When W changes, c ← c·W_before/W: it stays the mean of
all c_i.
"""

from __future__ import annotations

from atoll.algorithms.base import Algorithm

scaffold = Algorithm(
    name="scaffold",
    citation="SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, Karimireddy et al., 1910.06378",
    outer="sgd",
    outer_options={"lr": 1.0, "momentum": 0.0},
    reduce={"params": "mean", "buffers": "mean", "control": "share"},
    local={"correction": "scaffold"},
)
