"""Dynamic local updates: slower workers take fewer local steps, so that all submit about equally often.

B. Liu et al., arXiv 2401.09135, section 5 (DyLU):  H_w = ⌊v_w / v_max · H⌋, and at least 1.
With K fragments  H_w = K · max(1, ⌊v_w / v_max · H / K⌋), so that every fragment is due once a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping


def local_steps(speeds: Mapping[str, float], site: str, sync_every: int, fragments: int = 1) -> int:
    """H_w of `site`, local steps.

    Args:
        speeds: site → local steps a second, of those alive; 0 where nothing is known yet.
        sync_every: H, a multiple of `fragments`.
        fragments: K.
    """
    speed, fastest = speeds.get(site, 0.0), max(speeds.values(), default=0.0)
    if speed <= 0 or fastest <= 0:
        return sync_every
    # a speed is a measurement: what is a hair below the fastest is as fast
    return fragments * max(1, int(min(1.0, speed / fastest) * sync_every / fragments + 1e-9))
