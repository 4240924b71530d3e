"""A streaming worker that is killed when its update is in, and started again before the round closes.

The new process goes on from what the round makes. What it trained from the version before would count as new, and be a
round old. `test_rebase_in_the_loop` has the same of whole models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, Process, wait_until
from kit import ForkedSite, serve

SCRIPT = """
import os
from pathlib import Path

import torch

import atoll
from harness.processes import wait_until
from kit.models import SITES, build_model

site, model = os.environ["ATOLL_SITE"], build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
with atoll.DiLoCo(model, optimizer, weight=SITES[site], labels={"start": os.environ["START"]}) as diloco:
    Path(f"{site}-{os.environ['ENTERED']}").touch()
    gate = Path(os.environ["GATE"])
    wait_until(gate.exists, "the gate")
    while not diloco.finished:
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 0.1 + (1.0 if site == "a" else -0.5)
        optimizer.step()
"""

DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "diloco.sync_every": 4,
    "aggregation.upload_codec.name": "none",
    "rounds.total": 3,
    "diloco.num_fragments": 2,
}


@pytest.mark.parametrize(
    "overlap",
    [{}, {"diloco.fragment_sync_delay": 1, "diloco.max_inflight": 2, "diloco.fragment_update_alpha": 0.5}],
    ids=["one at a time", "two under way"],
)
@pytest.mark.covers("F4")
def test_a_restarted_worker_waits_for_the_round_of_a_fragment_that_its_update_is_in(
    tmp_path: Path, nursery: Nursery, overlap: dict[str, Any]
) -> None:
    """Its local steps on the other fragment are lost, and with them the bits; none is trained from the old version."""
    (tmp_path / "open").touch()

    def start(site: ForkedSite, failpoints: str = "", gate: str = "open") -> Process:
        number = str(site.starts + 1)
        return site.start(failpoints, ENTERED=f"entered-{number}", GATE=str(tmp_path / gate), START=number)

    def waits() -> bool:
        return any(each.labels == {"start": "2"} and "wait" in each.doing for each in server.status().workers)

    with serve(tmp_path, **DILOCO, **overlap) as server:
        a, b = (ForkedSite(nursery, tmp_path, server.url, site, SCRIPT) for site in "ab")
        later = start(b, gate="later")
        start(a, "worker.acknowledged=kill").wait(60)
        again = start(a)
        entered = tmp_path / "a-entered-2"
        wait_until(lambda: entered.exists() or waits(), "site a in its second process")
        assert not entered.exists()
        (tmp_path / "later").touch()
        assert [again.wait(60), later.wait(60)] == [0, 0]
        server.run()
        assert [summary.staleness for summary in server.status().history] == [[0, 0]] * 6
