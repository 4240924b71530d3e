"""DiLoCo: workers take H local steps; the server takes an SGD step with Nesterov momentum along the mean difference.

A. Douillard, Q. Feng, A. A. Rusu, R. Chhaparia, Y. Donchev, A. Kuncoro, M. Ranzato, A. Szlam, J. Shen: DiLoCo:
Distributed Low-Communication Training of Language Models. arXiv 2311.08105, algorithm 1.

    Δ_i = θ^(t−1) − θ_i^(t)          θ_i^(t): after H inner steps (AdamW in the paper) on worker i
    Δ = (1/k) · Σ_i Δ_i              over k workers; Atoll: weighted
    m^(t) = μ · m^(t−1) + Δ          momentum
    θ^(t) = θ^(t−1) − η · (Δ + μ · m^(t))          Nesterov; η = 0.7, μ = 0.9
"""

from __future__ import annotations

from atoll.algorithms.base import Algorithm

diloco = Algorithm(
    name="diloco",
    citation="DiLoCo: Distributed Low-Communication Training of Language Models, Douillard et al., 2311.08105",
    outer="sgd",
    outer_options={"lr": 0.7, "momentum": 0.9, "nesterov": True},
    codec="bf16",
    on_missed="rebase",
    steps_driven=True,
)
