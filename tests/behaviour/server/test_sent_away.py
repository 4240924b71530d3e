"""Who waits for a round or a task when the server ends is told so: it was waited for, twice two seconds, before."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from kit.wire import WireSite, heard

import atoll
from atoll.errors import RunFailed

START = {"w": torch.ones(4)}


def require_sent_away(server: atoll.Server, site: WireSite, path: str, end: Callable[[], object]) -> None:
    """A request of the site that waits when the server ends is told so."""
    with ThreadPoolExecutor(1) as thread:
        answer = heard(server, site.name, lambda: thread.submit(site.post, path, {"wait_s": 20.0}))
        assert not answer.done()
        end()
        _, told = answer.result(60)
    assert told["code"] == "busy"
    assert "The server is stopping" in told["message"]


def test_ends_a_wait_for_a_round(tmp_path: Path) -> None:
    with plain_server(tmp_path, START, **{"rounds.sites": 2}) as server:
        require_sent_away(server, WireSite(server.url), "/v1/tickets", server.stop)


def test_a_site_that_has_submitted_learns_once_which_sites_are_awaited(tmp_path: Path) -> None:
    with plain_server(tmp_path, START, **{"rounds.sites": 2}) as server:
        a, _ = (WireSite(server.url, site) for site in "ab")
        a.train().submit()
        assert a.ask(wait_s=0.0)["reason"] == "its update is accepted; the round waits for b"


def test_ends_a_wait_for_a_task(tmp_path: Path) -> None:
    def workflow(controller: Any) -> None:
        controller.sites(at_least=2)

    with plain_server(tmp_path, START, workflow=workflow) as server:
        require_sent_away(server, WireSite(server.url), "/v1/tasks", server.stop)


def test_ends_a_wait_while_an_aggregator_fails(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def bad(updates):\n    raise ValueError('no such luck')\n")
    aggregator = {"aggregation.aggregator.path": f"{tmp_path / 'mine.py'}:bad"}
    with plain_server(tmp_path, START, **{"rounds.sites": 2}, **aggregator) as server:
        first, last = (WireSite(server.url, site) for site in ("first", "last"))
        update = last.train()
        first.train().submit()
        require_sent_away(server, first, "/v1/tickets", update.submit)
        with pytest.raises(RunFailed, match="no such luck"):
            server.run()
