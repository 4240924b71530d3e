"""Dynamic local updates (DyLU): slower workers take fewer local steps, so that all submit about equally often.

B. Liu et al., arXiv 2401.09135, section 5:  H_w = max(1, ⌊v_w / v_max · H⌋).
With K fragments, H_w = K · max(1, ⌊v_w / v_max · H / K⌋), so that every fragment is due once in H_w steps.
"""

from __future__ import annotations

from collections.abc import Mapping


def local_steps(speeds: Mapping[str, float], site: str, sync_every: int, fragments: int = 1) -> int:
    """Return H_w, the number of local steps that a site takes between two synchronisations.

    Args:
        speeds: live site → local steps per second; 0 if its speed is unknown.
        site: the site.
        sync_every: H, the number of local steps of the fastest site; a multiple of `fragments`.
        fragments: K, number of fragments.
    """
    speed, fastest = speeds.get(site, 0.0), max(speeds.values(), default=0.0)
    if speed <= 0 or fastest <= 0:
        return sync_every
    # 1e-9 keeps rounding errors from reducing a whole number of steps by one.
    return fragments * max(1, int(min(1.0, speed / fastest) * sync_every / fragments + 1e-9))
