"""The numbers of streaming runs, over real sockets and files, against the formula computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from streaming_world import Sites, expected, require_close, serve

SITES = {2: ["a", "b"], 3: ["a", "b", "c"]}


@pytest.mark.covers("L7", "L4", "L15")
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("tau", [0, 1, 2, 3])
@pytest.mark.parametrize("fragments", [pytest.param(2, marks=pytest.mark.long), 3])
def test_every_step_of_every_site_is_the_formulas(tmp_path: Path, fragments: int, tau: int, alpha: float) -> None:
    """AdamW within, Nesterov between, unequal weights and data; 3 local steps from one fragment's turn to the next."""
    sites = SITES[2 if fragments == 3 else 3]
    run = {"fragments": fragments, "sync_every": 3 * fragments, "tau": tau, "alpha": alpha, "rounds": 2}
    right = expected(sites, **run)  # type: ignore[arg-type]
    server = serve(tmp_path, sites=len(sites), K=fragments, H=3 * fragments, tau=tau, alpha=alpha, rounds=2)
    with server:
        workers = Sites(server.url, tmp_path, sites, steps=100)
        workers.join()
        require_close(workers.traces, right)
        server.run()
