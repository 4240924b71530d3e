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


def dynamic_local_steps(speed: float, fastest: float, sync_every: int, fragments: int = 1) -> int:
    """Return H_w, the number of local steps that a site takes between two synchronisations: fewer for a slower site.

    Dynamic local updates (DyLU): all sites submit about equally often. B. Liu et al., arXiv 2401.09135, section 5:
    H_w = max(1, ⌊v_w / v_max · H⌋). With K fragments, H_w = K · max(1, ⌊v_w / v_max · H / K⌋), so that every fragment
    is due once in H_w steps.

    Args:
        speed: v_w, the site's local steps per second; 0 if they are unknown.
        fastest: v_max, the local steps per second of the fastest live site; 0 if they are unknown.
        sync_every: H, the number of local steps of the fastest site; a multiple of `fragments`.
        fragments: K, number of fragments.
    """
    if speed <= 0 or fastest <= 0:
        return sync_every
    # 1e-9 keeps rounding errors from reducing a whole number of steps by one.
    return fragments * max(1, int(min(1.0, speed / fastest) * sync_every / fragments + 1e-9))
