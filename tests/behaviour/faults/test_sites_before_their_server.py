"""A site may start before its server: it waits as long as ATOLL_GIVE_UP_S says, and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness.processes import free_port, wait_until
from harness.proxy import Proxy
from kit import FederatedSites, build_model, serve
from kit.client import Client

import atoll
from atoll.errors import ServerLost

AFTER_15_S = 7
"""Attempts that earlier were all that a site made."""


def join(url: str, folder: Path) -> object:
    return atoll.join(url, site="a", folder=folder)


def diloco(url: str, folder: Path) -> object:
    model = build_model()
    return atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), server=url, site="a", folder=folder).start()


def tasks(url: str, folder: Path) -> object:
    return atoll.tasks(url, "a")


def client(url: str, folder: Path) -> object:
    return Client(url, site="a", folder=folder).register()


@pytest.mark.parametrize("start", [join, diloco, tasks, client])
@pytest.mark.covers("L10")
def test_a_site_gives_up_when_the_setting_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, start: Callable[..., object]
) -> None:
    monkeypatch.setenv("ATOLL_GIVE_UP_S", "0.2")
    url = f"http://127.0.0.1:{free_port()}"
    with caplog.at_level(logging.WARNING, "atoll"), pytest.raises(ServerLost, match=url) as caught:
        start(url, tmp_path)
    assert caught.value.exit_code == 5
    said = [record.getMessage() for record in caplog.records if record.name == "atoll"]
    assert url in said[0]
    assert "ATOLL_GIVE_UP_S" in said[0]


@pytest.mark.covers("L10")
def test_a_site_waits_for_its_server_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.worker.session import session as session_module

    monkeypatch.setattr(session_module, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(session_module, "LONGEST_BACKOFF_S", 0.01)
    with serve(tmp_path, **{"rounds.sites": 1, "rounds.total": 1}) as server, Proxy(server.port) as proxy:
        proxy.cut()
        sites = FederatedSites(proxy.url, tmp_path, ["a"])
        wait_until(lambda: len(proxy.moved_bytes) > 3 * AFTER_15_S, "further attempts")
        proxy.heal()
        sites.join()
        server.run()
    assert sites.trained == {("a", 1): 1}
