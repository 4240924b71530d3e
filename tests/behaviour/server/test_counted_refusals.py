"""The server counts refusals itself, and sends a site away whose worker goes on after five of them in a row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import serve
from kit.wire import WireSite
from torch import nn

import atoll

SETTINGS: dict[str, Any] = {
    "rounds.sites": 1,
    "aggregation.max_weight": 10.0,
    "rounds.total": 0,
    "network.heartbeat_interval_s": 0,
    "network.heartbeat_timeout_s": 0,
}


def refused(site: WireSite) -> str:
    """What the site hears of an update that is refused for its weight; then it asks for the next ticket."""
    status, told = site.train(weight=11.0).push().complete()
    assert (status, told["code"]) == (422, "update_refused")
    return str(told["message"]) + str(told["remedy"])


def states_after_refusals(server: atoll.Server, site: WireSite, count: int) -> list[str]:
    """The site's state at the server after each of so many refused updates."""
    states = []
    for _ in range(count):
        refused(site)
        states += [worker.state for worker in server.status().workers]
    return states


@pytest.mark.covers("F31")
def test_sends_a_site_away_after_five_refusals_in_a_row(tmp_path: Path) -> None:
    """The site is stubborn: it joins again. Atoll's own loops end after the fifth."""
    with serve(tmp_path, nn.Linear(4, 3), **SETTINGS) as server:
        site = WireSite(server.url)
        assert "it needs 1 update (rounds.min_sites)" in refused(site)
        assert states_after_refusals(server, site, 3) == ["alive"] * 3
        assert "5 updates in a row were refused; check" in refused(site), "the last that the site hears"
        assert [worker.state for worker in server.status().workers] == ["failed"]
        assert server.status().refused == 5
        # to join again starts no new count: the next refusal is one too many
        site = WireSite(server.url)
        assert states_after_refusals(server, site, 1) == ["failed"]
        # an accepted update does: it is the updates in a row that count
        site = WireSite(server.url)
        site.train().submit()
        assert states_after_refusals(server, site, 5) == ["alive"] * 4 + ["failed"]
        assert server.status().refused == 11


@pytest.mark.covers("F31", "F6")
def test_refusals_are_counted_over_restarts_of_the_server(tmp_path: Path) -> None:
    with serve(tmp_path, nn.Linear(4, 3), **SETTINGS) as server:
        assert states_after_refusals(server, WireSite(server.url), 2) == ["alive"] * 2
    with serve(tmp_path, nn.Linear(4, 3), **SETTINGS) as server:
        assert server.status().refused == 2
