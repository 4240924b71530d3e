"""Limits by progress: of training, of one task at one site; what a site says counts as progress."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit import Threads
from kit.client import Client
from kit.servers import plain_server
from kit.workflows import workflow_server

import atoll
from atoll.errors import RunFailed, UsageError


@pytest.mark.covers("P12")
def test_training_in_which_nothing_moves_fails_after_its_limit(tmp_path: Path) -> None:
    settings = {"workflow.steps": [{"kind": "train", "progress_timeout_s": 1}], "rounds.total": 1}
    server = plain_server(tmp_path, {"w": torch.ones(2)}, **settings)
    with server, Client(server.url, "a", folder=tmp_path) as client:
        assert client.next_round() == 1  # and then it submits nothing
        with pytest.raises(RunFailed, match="The workflow train made no progress for 1 s"):
            server.run()
    (workflow,) = server.status().workflows
    assert workflow.state == "failed"
    assert "made no progress for 1 s" in workflow.detail


@pytest.mark.covers("P12")
def test_time_in_which_sites_are_awaited_is_none_in_which_training_stands_still(tmp_path: Path) -> None:
    """How long they are waited for is another limit, and here there is none."""
    settings = {"workflow.steps": [{"kind": "train", "progress_timeout_s": 2}], "rounds.total": 1, "rounds.sites": 2}
    server = plain_server(tmp_path, {"w": torch.ones(2)}, **settings)

    def train(site: str) -> None:
        with Client(server.url, site, folder=tmp_path) as client:
            while client.next_round() is not None:
                client.submit(client.pull())

    with server:
        first = Threads(partial(train, "a"))
        wait_until(lambda: server.status().workflows[0].seconds > 3.0, "a longer time")
        second = Threads(partial(train, "b"))
        server.run()
        first.join()
        second.join()
    assert server.status().workflows[0].state == "done"


@pytest.mark.covers("P12", "T14")
def test_a_site_that_shows_nothing_is_given_up_and_one_that_says_what_it_does_is_not(tmp_path: Path) -> None:
    """b works as long as a and says so; its heartbeats carry it, at most one a second."""
    came: dict[str, Any] = {}
    over = threading.Event()

    def main(controller: Any) -> None:
        with pytest.raises(UsageError, match="progress_timeout_s is -1"):
            controller.send("a", "work", progress_timeout_s=-1)
        sites = controller.sites(2, timeout_s=30)
        results = controller.broadcast("work", sites=sites, progress_timeout_s=3.0)
        came.update({result.site: result.error or result.payload for result in results})
        over.set()

    def site(name: str) -> None:
        with atoll.tasks(server.url, name) as worker:

            @worker.task("work")
            def work(_: Any) -> str:
                for number in range(20):
                    if name == "b":
                        worker.note(f"batch {number}")
                    if over.wait(0.3):
                        break
                return "done"

            worker.run()

    with workflow_server(tmp_path, main, **{"network.heartbeat_interval_s": 1.0}) as server:
        sites = [threading.Thread(target=site, args=(name,), daemon=True) for name in "ab"]
        for each in sites:
            each.start()
        server.run()
    for each in sites:
        each.join(30)
    assert came == {"a": "the site made no progress for 3 s (its last report: task work)", "b": "done"}
