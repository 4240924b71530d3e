"""A federated site is late for `load_into`: the version of its ticket is gone. It has trained nothing, and takes the
newest round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness.processes import free_port, wait_until
from kit import FederatedSites, copy_folder, serve


class Late(FederatedSites):
    """Site a, which waits before it loads the model of a round.

    Attributes:
        has_round: set when it has a ticket for that.
        go_on: lets it load.
        rounds: that it has trained.
    """

    def __init__(
        self, url: str, folder: Path, *, late_in: int, during: Callable[[str, int], None] | None = None
    ) -> None:
        self.has_round, self.go_on = threading.Event(), threading.Event()
        self.rounds: list[int] = []

        def before(site: str, number: int) -> None:
            if number == late_in and not self.has_round.is_set():
                self.has_round.set()
                assert self.go_on.wait(60)

        def trains(site: str, number: int) -> None:
            self.rounds.append(number)
            if during is not None:
                during(site, number)

        super().__init__(url, folder, ["a"], before=before, during=trains)


@pytest.mark.covers("F23", "L10")
def test_a_site_late_for_its_pull_takes_the_newest_round(tmp_path: Path) -> None:
    resumed = threading.Event()

    def during(site: str, number: int) -> None:
        if number == 1:
            assert late.has_round.wait(60)
        if number == 5:
            assert resumed.wait(60)

    with serve(tmp_path, **{"rounds.quorum": 1, "rounds.deadline_s": 0.3, "rounds.total": 6}) as server:
        late = Late(server.url, tmp_path, late_in=1)
        other = FederatedSites(server.url, tmp_path, ["b"], during=during)
        wait_until(lambda: server.status().fragments[0].version == 4, "four rounds without the late site")
        late.go_on.set()
        wait_until(lambda: late.rounds, "a round of the late site")
        resumed.set()
        late.join()
        other.join()
        server.run()
    assert late.rounds[0] == 5


@pytest.mark.covers("F42")
def test_a_site_between_ticket_and_pull_goes_on_with_a_server_restored_from_an_old_backup(tmp_path: Path) -> None:
    """The backup has version 1, and nothing of round 2; site a has a ticket for round 4 when it is restored."""
    state, backup, port = tmp_path / "state", tmp_path / "backup", free_port()
    backed_up, restored = threading.Event(), threading.Event()

    def during(site: str, number: int) -> None:
        assert number != 2 or backed_up.wait(60)
        assert number != 4 or restored.wait(60)

    with serve(tmp_path, **{"network.port": port, "rounds.total": 4}) as server:
        late = Late(server.url, tmp_path, late_in=4, during=during)
        other = FederatedSites(server.url, tmp_path, ["b"], during=during)
        wait_until(lambda: server.status().fragments[0].version == 1, "the first version")
    copy_folder(state, backup)
    with serve(tmp_path, **{"network.port": port, "rounds.total": 4}) as server:
        backed_up.set()
        assert late.has_round.wait(60)
        wait_until(lambda: other.trained["b", 4], "the last round at the other site")
    state.rename(tmp_path / "newer")
    backup.rename(state)
    with serve(tmp_path, **{"network.port": port, "rounds.total": 4}) as server:
        assert server.status().fragments[0].version == 1
        late.go_on.set()
        restored.set()
        late.join()
        other.join()
        server.run()
    assert late.rounds == [1, 2, 3, 2, 3, 4]
    assert other.trained["b", 4] == 2
