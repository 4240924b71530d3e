"""The server counts refusals itself, and sends a site away whose worker goes on after five of them in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import serve
from kit.by_hand import formed

import atoll
from atoll.errors import UpdateRefused
from atoll.protocol.values import Delivered, Refused
from atoll.worker.exchange.participation import take_part

SETTINGS: dict[str, Any] = {
    "rounds.sites": 1,
    "aggregation.max_weight": 10.0,
    "rounds.total": 0,
    "network.heartbeat_interval_s": 0,
    "network.heartbeat_timeout_s": 0,
}


class StubbornSite:
    """A site that asks for the next ticket after each refusal; Atoll's own loops end after the fifth in a row."""

    def __init__(self, server: atoll.Server, folder: Path) -> None:
        self.server, self.place = server, take_part(server.url, "a", folder=folder / "workers")

    def submit(self, weight: float) -> Delivered:
        formed(self.place, weight=weight)
        return self.place.exchange.deliver()

    def states_after_refusals(self, count: int) -> list[str]:
        """The site's state at the server after each of so many refused updates."""
        states = []
        for _ in range(count):
            self.refusal()
            states += [worker.state for worker in self.server.status().workers]
        return states

    def refusal(self) -> UpdateRefused:
        """What the site hears of an update that is refused for its weight."""
        delivered = self.submit(weight=11.0)
        assert isinstance(delivered, Refused)
        self.place.exchange.outbox.clear()
        return delivered.error


@pytest.mark.covers("F31")
def test_sends_a_site_away_after_five_refusals_in_a_row(tmp_path: Path) -> None:
    with serve(tmp_path, **SETTINGS) as server:
        site = StubbornSite(server, tmp_path)
        assert "it needs 1 update (rounds.min_sites)" in str(site.refusal())
        assert site.states_after_refusals(3) == ["alive"] * 3
        assert "5 updates in a row were refused; look at" in str(site.refusal()), "the last that the site hears"
        assert [worker.state for worker in server.status().workers] == ["failed"]
        assert server.status().refused == 5
        # to join again starts no new count: the next refusal is one too many
        assert site.states_after_refusals(1) == ["failed"]
        # an accepted update does: it is the updates in a row that count
        site.submit(weight=1.0)
        assert site.states_after_refusals(5) == ["alive"] * 4 + ["failed"]
        assert server.status().refused == 11
        site.place.leave()


@pytest.mark.covers("F31", "F6")
def test_refusals_are_counted_over_restarts_of_the_server(tmp_path: Path) -> None:
    with serve(tmp_path, **SETTINGS) as server:
        site = StubbornSite(server, tmp_path)
        assert site.states_after_refusals(2) == ["alive"] * 2
        site.place.leave()
    with serve(tmp_path, **SETTINGS) as server:
        assert server.status().refused == 2
