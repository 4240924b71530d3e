"""Fragments have rounds of their own: where a worker waits for one, no other may need it in another before.

Site b is a hand that submits what a test says, and when.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.wire import WireSite
from streaming_world import Sites, build, serve, versions

import atoll

OPTIONS = {"sites": 2, "K": 2, "H": 4, "rounds": 3}


class Hand(WireSite):
    """A site that takes part in the rounds of a fragment when it is told to."""

    def submits(self, fragment: int, change: float = 0.0) -> None:
        """To the round that is open, or opens next."""

        def train_(tensors: dict[str, torch.Tensor]) -> None:
            start = build().state_dict()
            for name in tensors:
                tensors[name] = start[name] + change

        self.train(train_, fragment=fragment, steps=2).submit()


def doing(server: atoll.Server, site: str) -> tuple[str, int] | None:
    return next(((each.doing, each.step) for each in server.status().workers if each.site == site), None)


@pytest.fixture
def held() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.covers("L10", "L7")
def test_a_worker_that_ends_holds_up_no_round_of_the_others(tmp_path: Path) -> None:
    """a ends after 4 steps with fragment 1 under way; b closes round 2 of fragment 0 before it submits fragment 1."""
    with serve(tmp_path, **OPTIONS, tau=1) as server:
        b = Hand(server.url, "b")
        a = Sites(server.url, tmp_path, ["a"], 4)
        b.submits(0)
        wait_until(lambda: versions(server) == [1, 0], "round 1 of fragment 0, of both")
        wait_until(lambda: [each.site for each in server.status().fragments[1].waiting_for] == ["b"], "a's update")
        b.submits(0)
        wait_until(lambda: versions(server) == [2, 0], "round 2 of fragment 0, without a")
        b.submits(1)
        a.join()
        assert a.loops["a"].rounds == 2, "the result that it stayed for is in its model"
        b.leave()


@pytest.mark.covers("L10", "L7")
def test_a_failed_update_is_sent_again_before_a_later_round_is_waited_for(
    tmp_path: Path, held: threading.Event
) -> None:
    """a is expected in fragment 0 alone, and waits for fragment 1, when its update of fragment 0 breaks off.

    b submits fragment 1 only when round 1 of fragment 0 is over.
    """
    with (
        serve(tmp_path, **OPTIONS, tau=3, inflight=2) as server,
        Proxy(server.port) as proxy,
    ):
        before = Hand(server.url, "a")
        b = Hand(server.url, "b")
        before.ticket(fragment=0)
        before.leave()
        proxy.faults.append(Fault("POST .*/complete ", "up", at=BEFORE_HEADER, action="reset", wait=held.wait))
        a = Sites(proxy.url, tmp_path, ["a"], 1000, max_sync_retries=0)
        wait_until(lambda: doing(server, "a") == ("waiting for the round", 4), "a, which waits for fragment 1")
        held.set()
        b.submits(0)
        wait_until(lambda: versions(server) == [1, 0], "round 1 of fragment 0, with a's update sent again")
        for fragment in (1, 0, 1, 0, 1):
            b.submits(fragment)
        a.join()
        assert versions(server) == [3, 3]
        b.leave()


@pytest.mark.covers("L4", "L7")
def test_a_worker_that_waited_submits_to_the_next_round_with_the_others(tmp_path: Path) -> None:
    """a joins when round 1 is open for b alone, and waits for its end after two steps, in which b had its turn.

    Where a submitted to round 2 of fragment 0 at once, it would wait for b there, with two steps in its update, while b
    waits for it in round 1 of fragment 1.
    """
    with serve(tmp_path, **OPTIONS | {"sites": 1, "rounds": 2}, tau=1) as server:
        b = Hand(server.url, "b")
        for fragment in (0, 1):
            b.ticket(fragment)
        a = Sites(server.url, tmp_path, ["a"], 100)
        wait_until(lambda: doing(server, "a") == ("waiting for the round", 2), "a, which waits for fragment 0")
        b.submits(0, change=0.1)
        wait_until(lambda: doing(server, "a") == ("waiting for the round", 4), "a, which waits for fragment 1")
        assert versions(server) == [1, 0]
        assert [each.site for each in server.status().fragments[0].waiting_for] == ["a", "b"]
        b.submits(1, change=0.1)
        wait_until(lambda: [each.site for each in server.status().fragments[0].waiting_for] == ["b"], "a's update")
        b.submits(0, change=0.1)
        b.submits(1, change=0.1)
        a.join()
        assert versions(server) == [2, 2]
        assert a.loops["a"].rounds == 2
        b.leave()
