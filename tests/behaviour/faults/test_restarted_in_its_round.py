"""A DiLoCo worker that is killed when its update is in, and started again before the round closes.

The new process goes on from what the round makes. What it trained from the version before would count as new, and be a
round old.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, wait_until
from kit import ForkedSite, exported, serve, tensors_digest

import atoll

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
    Path(os.environ["ENTERED"]).touch()
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
}


class Sites:
    """Two sites of a server, as processes."""

    def __init__(self, nursery: Nursery, folder: Path, url: str) -> None:
        self.folder, self.open = folder, folder / "open"
        self.open.touch()
        self.sites = {site: ForkedSite(nursery, folder, url, site, SCRIPT) for site in "ab"}

    def start(self, site: str, failpoints: str = "", gate: str = "open") -> Any:
        number = self.sites[site].starts + 1
        entered = self.folder / f"entered-{site}-{number}"
        return self.sites[site].start(failpoints, ENTERED=str(entered), GATE=str(self.folder / gate), START=str(number))

    def killed_in_its_round(self, server: atoll.Server) -> bool:
        """Site a is killed when its first update is in, and started again before b submits anything.

        Returns:
            whether it trained before b did.
        """
        b = self.start("b", gate="later")
        self.start("a", "worker.acknowledged=kill").wait(60)
        a = self.start("a")
        entered = self.folder / "entered-a-2"

        def waits() -> bool:
            return any(each.labels == {"start": "2"} and "wait" in each.doing for each in server.status().workers)

        wait_until(lambda: entered.exists() or waits(), "site a in its second process")
        trained = entered.exists()
        (self.folder / "later").touch()
        assert [a.wait(60), b.wait(60)] == [0, 0]
        return trained


def digest_of(nursery: Nursery, folder: Path, *, killed: bool, **settings: Any) -> str:
    folder.mkdir()
    with serve(folder, **DILOCO | settings) as server:
        sites = Sites(nursery, folder, server.url)
        if killed:
            sites.killed_in_its_round(server)
        else:
            assert [each.wait(60) for each in [sites.start("a"), sites.start("b")]] == [0, 0]
        server.run()
        assert [summary.staleness for summary in server.status().history] == [[0, 0]] * 3
    return tensors_digest(exported(folder))


@pytest.mark.covers("F4")
def test_a_restarted_worker_goes_on_from_the_round_that_its_update_is_in(tmp_path: Path, nursery: Nursery) -> None:
    """So the run ends with the bits of one in which no process was killed."""
    undisturbed = digest_of(nursery, tmp_path / "undisturbed", killed=False)
    assert digest_of(nursery, tmp_path / "killed", killed=True) == undisturbed


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
    with serve(tmp_path, **DILOCO, **{"diloco.num_fragments": 2}, **overlap) as server:
        sites = Sites(nursery, tmp_path, server.url)
        assert not sites.killed_in_its_round(server)
        server.run()
        assert [summary.staleness for summary in server.status().history] == [[0, 0]] * 6
