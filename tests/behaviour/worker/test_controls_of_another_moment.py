"""SCAFFOLD's c_i is that of its site, its run and its last update that counts; one of another moment counts as lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.processes import wait_until
from kit import SITES, copy_folder, serve, together
from kit.client import Client
from torch import Tensor

import atoll
from atoll.errors import ConfigError

SCAFFOLD = {
    "algorithm.name": "scaffold",
    "algorithm.outer_optimizer.lr": 1.0,
    "algorithm.outer_optimizer.momentum": 0.0,
    "rounds.total": 9,
}


class Run:
    """SCAFFOLD with the sites a and b of weight 1: c has to be the mean of their c_i."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.workers = folder, folder / "workers"
        self.seen: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def part(self, url: str, site: str, until: int) -> None:
        """Rounds up to this one; each Δc_i depends on site and round."""
        with Client(url, site=site, folder=self.workers) as client:
            while (number := client.next_round()) is not None:
                model = client.pull()
                self.seen[site, number] = (
                    client.round.global_state("control")["w"],
                    client.round.own_state("control")["w"],
                )
                difference = torch.tensor([ord(site[0]) - 96.0, 1.0]) * number
                client.submit({"w": model["w"] - difference}, steps=1, groups={"control": {"w": difference}})
                if number == until:
                    return

    def both(self, server: atoll.Server, until: int) -> None:
        together(*(lambda site=site: self.part(server.url, site, until) for site in SITES))
        wait_until(lambda: server.status().fragments[0].version >= until, f"version {until}")

    def require_the_mean(self, number: int) -> None:
        """c of this round, as both pulled it, is the mean of what they had."""
        (c, own_a), (other, own_b) = self.seen["a", number], self.seen["b", number]
        assert torch.equal(c, other)
        torch.testing.assert_close(c, (own_a + own_b) / 2)
        assert c.norm() > 0


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with served(tmp_path) as server:
        yield server


def served(folder: Path):
    return serve(folder, {"w": torch.zeros(2)}, **SCAFFOLD)


def refused(run: Run, server: atoll.Server, site: str) -> None:
    """Twice: what the first attempt leaves does not pass for a control. It did not join."""
    before = {worker.site: worker.state for worker in server.status().workers}
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            run.part(server.url, site, 9)
        assert "ATOLL_NEW_STATE" in error.value.remedy
    assert {worker.site: worker.state for worker in server.status().workers} == before


@pytest.mark.covers("S2")
def test_refuses_the_control_of_an_older_copy_of_the_sites_folder(run: Run, server: atoll.Server) -> None:
    run.both(server, 1)
    copy_folder(run.workers / "a", run.folder / "older")
    run.both(server, 3)
    newer = (run.workers / "a").rename(run.folder / "newer")
    copy_folder(run.folder / "older", run.workers / "a")
    refused(run, server, "a")
    shutil.rmtree(run.workers / "a")
    newer.rename(run.workers / "a")
    run.both(server, 5)
    run.require_the_mean(5)


@pytest.mark.covers("S2")
def test_refuses_the_control_of_another_site(run: Run, server: atoll.Server) -> None:
    run.both(server, 2)
    a, b = run.workers / "a", run.workers / "b"
    for folders in ((a, run.folder / "x"), (b, a), (run.folder / "x", b)):
        folders[0].rename(folders[1])
    refused(run, server, "a")
    refused(run, server, "b")
    for folders in ((a, run.folder / "x"), (b, a), (run.folder / "x", b)):
        folders[0].rename(folders[1])
    run.both(server, 4)
    run.require_the_mean(4)


@pytest.mark.covers("S2")
def test_refuses_a_copy_from_before_an_update_that_is_in_and_not_counted_yet(run: Run, server: atoll.Server) -> None:
    """The copy has the control of the last update that counts, and nothing of the one that is going to."""
    run.both(server, 2)
    with Client(server.url, site="a", folder=run.workers) as client:
        assert client.next_round() == 3  # settles what was pending
    copy_folder(run.workers / "a", run.folder / "older")
    run.part(server.url, "a", 3)  # the round still waits for b
    newer = (run.workers / "a").rename(run.folder / "newer")
    copy_folder(run.folder / "older", run.workers / "a")
    refused(run, server, "a")
    shutil.rmtree(run.workers / "a")
    newer.rename(run.workers / "a")
    together(lambda: run.part(server.url, "a", 4), lambda: run.part(server.url, "b", 4))
    run.require_the_mean(4)


@pytest.mark.covers("S2")
def test_refuses_controls_that_are_newer_than_those_of_a_restored_server(run: Run) -> None:
    with served(run.folder) as server:
        run.both(server, 2)
    copy_folder(run.folder / "state", run.folder / "backup")
    with served(run.folder) as server:
        run.both(server, 5)
    shutil.rmtree(run.folder / "state")
    copy_folder(run.folder / "backup", run.folder / "state")
    with served(run.folder) as server:
        refused(run, server, "a")
        refused(run, server, "b")


@pytest.mark.covers("S2")
@pytest.mark.parametrize("knows", [False, True], ids=["pending", "counted"])
def test_a_server_restored_to_before_the_last_round_finds_the_control_before_it(run: Run, knows: bool) -> None:
    """A site keeps the control that it had before its last update, whether it knows already that this one counted."""
    with served(run.folder) as server:
        run.both(server, 2)
    copy_folder(run.folder / "state", run.folder / "backup")
    with served(run.folder) as server:
        run.both(server, 3)
        for site in SITES if knows else ():
            with Client(server.url, site=site, folder=run.workers) as client:
                assert client.next_round() == 4
    shutil.rmtree(run.folder / "state")
    copy_folder(run.folder / "backup", run.folder / "state")
    with served(run.folder) as server:
        run.both(server, 6)
    for number in (4, 5, 6):
        run.require_the_mean(number)


@pytest.mark.covers("S2")
def test_a_server_restored_to_its_begin_begins_with_controls_of_zero(run: Run) -> None:
    with served(run.folder):
        pass
    copy_folder(run.folder / "state", run.folder / "backup")
    with served(run.folder) as server:
        run.both(server, 4)
    shutil.rmtree(run.folder / "state")
    copy_folder(run.folder / "backup", run.folder / "state")
    with served(run.folder) as server:
        run.both(server, 3)
    assert run.seen["a", 1][1].tolist() == run.seen["b", 1][1].tolist() == [0.0, 0.0]
    run.require_the_mean(3)


def test_an_outbox_of_another_site_is_not_sent(run: Run) -> None:
    """a's folder is a copy of b's: b's update must not count once more as a's."""
    with serve(
        run.folder,
        {"w": torch.zeros(1)},
        rounds=2,
        **{"algorithm.outer_optimizer.lr": 1.0, "algorithm.outer_optimizer.momentum": 0.0},
    ) as server:
        known = {site: Client(server.url, site=site, folder=run.workers).register() for site in SITES}
        for client in known.values():
            assert client.next_round() == 1
            client.pull()
        known["b"].submit({"w": torch.tensor([2.0])})
        known["a"].close()
        shutil.rmtree(run.workers / "a")
        copy_folder(run.workers / "b", run.workers / "a")
        with Client(server.url, site="a", folder=run.workers) as again:
            assert again.next_round() == 1  # it is not served from b's outbox
            again.pull()
            again.submit({"w": torch.tensor([4.0])})
            wait_until(lambda: server.status().fragments[0].version == 1, "the first round is over")
            assert again.next_round() == 2
            assert again.pull()["w"].tolist() == [3.0]
        known["b"].close()
