"""Fragments have rounds of their own: no two sites wait for each other, with barriers, without, and through faults."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness.processes import wait_until
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit.sites import DiLoCoSites, run_to_end, together
from kit.wire import WireSite
from streaming_world import Sites, build, copied, data, equal, local_step, loop_of, new_server, step_, versions
from torch import Tensor, nn

import atoll

OPTIONS: dict[str, Any] = {"sites": 2, "K": 2, "H": 4, "rounds": 3}
OPTIONS |= {"network.heartbeat_interval_s": 0.1, "network.heartbeat_timeout_s": 60.0}


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
def test_an_ending_worker_delays_no_round(tmp_path: Path) -> None:
    """If a worker ends while an update is on its way, the other sites' rounds close without it, and it waits only for
    its own result.
    """
    # It stays for its result and merges it. Site `a` ends after 4 steps with fragment 1 in flight. Site `b` closes
    # round 2 of fragment 0 before it submits fragment 1.
    with new_server(tmp_path, **OPTIONS, tau=1) as server:
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
def test_a_failed_update_is_sent_while_waiting(tmp_path: Path, held: threading.Event) -> None:
    """If the upload of one fragment breaks off while the site waits for another fragment, the site sends the update
    again.
    """
    # So the round can end. Site `a` is expected in fragment 0 only. Site `b` submits fragment 1 only when round 1 of
    # fragment 0 is over.
    with new_server(tmp_path, **OPTIONS, tau=3, inflight=2) as server, Proxy(server.port) as proxy:
        before = Hand(server.url, "a")
        b = Hand(server.url, "b")
        before.ticket(fragment=0)
        before.leave()
        proxy.faults.append(Fault("PUT .*/parts/0 ", "up", at=BEFORE_HEADER, action="reset", wait=held.wait))
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
def test_a_late_worker_waits_for_its_turn(tmp_path: Path) -> None:
    """A worker that joins during another site's open round waits for its end, so that both do not wait
    for each other.
    """
    # Site `a` waits after two steps, in which site `b` had its turn. Had it submitted to round 2 of fragment 0 at once,
    # both would wait for each other.
    with new_server(tmp_path, **OPTIONS | {"sites": 1, "rounds": 2}, tau=1) as server:
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


@pytest.mark.covers("F23", "L7")
def test_a_worker_that_missed_a_round_submits_its_other_fragment_first(tmp_path: Path) -> None:
    """A worker that was cut off while a round closed does not wait for that fragment's next round while another site
    waits for its update of the other fragment.
    """
    # Version 1 of fragment 0 is b's alone, and so is round 2. Had a waited for its end, b could not have closed it: it
    # first needs the version of fragment 1, for which a has to submit.
    options = OPTIONS | {"network.heartbeat_timeout_s": 2.0}
    with new_server(tmp_path, **options) as server, Proxy(server.port) as proxy:
        a, b = loop_of(proxy.url, tmp_path, "a"), Hand(server.url, "b")
        with a:
            proxy.cut()
            wait_until(lambda: b.beat() is not None and state_of(server, "a") == "dead", "the end of a's lease")
            b.submits(0)
            wait_until(lambda: b.beat() is not None and versions(server) == [1, 0], "round 1 of fragment 0, without a")
            b.ticket(0)
            proxy.heal()
            training = threading.Thread(target=lambda: [step_(a) for _ in range(4)], daemon=True)
            training.start()
            wait_until(lambda: waits_for(server, b, 1) == ["b"], "a's update of fragment 1")
            b.submits(1)
            wait_until(lambda: b.beat() is not None and not training.is_alive(), "four steps of a")
            assert versions(server) == [1, 1]
        b.leave()


def state_of(server: atoll.Server, site: str) -> str:
    return next(each.state for each in server.status().workers if each.site == site)


def waits_for(server: atoll.Server, hand: Hand, fragment: int) -> list[str]:
    """The sites that a round waits for. The other site stays alive."""
    hand.beat()
    return [each.site for each in server.status().fragments[fragment].waiting_for]


# -- asynchronous runs


class Alike(Sites):
    """Sites with the same data, that of a.

    Where no site waits, it is chance which updates are the last and how many local steps lie in one. On random targets,
    a model that one site has trained for long is worse for the other than none; where they learn the same, whatever
    comes last, it is better for both.
    """

    def _traced(self, model: nn.Module, optimizer: torch.optim.Optimizer, site: str, step: int) -> None:
        local_step(model, optimizer, "a")
        self.traces[site].append(copied(model))


def loss_of(state: dict[str, Tensor]) -> float:
    """Of a model, on the data of site a."""
    model = build()
    model.load_state_dict(state)
    inputs, targets = data("a")
    with torch.no_grad():
        return float((model(inputs) - targets).square().mean())


@pytest.mark.covers("L4", "L14")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_does_not_send_a_refused_update_again(tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str) -> None:
    """If the server refuses an update and no other site closes the round, the site gets a ticket for the same version.
    It trains a new update.
    """
    caplog.set_level("INFO", "atoll")

    def step_(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        optimizer.zero_grad()
        (model(data("a")[0]) - data("a")[1]).square().mean().backward()
        if number == 0:
            next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
        optimizer.step()

    with new_server(tmp_path, K=2, H=2, rounds=2, **{"async.enabled": mode == "async"}) as server:
        sites = DiLoCoSites(server.url, tmp_path, 8, ["a"], build=build, step=step_)
        sites.join()
        assert sites.loops["a"].finished
        assert server.status().refused == 1
    assert "submitting this site's update again" not in caplog.text
    assert "a: update refused: steps of fragment 0 since version 0 are lost" in caplog.text


@pytest.mark.covers("L3", "L16")
def test_async_fragments_support_codecs_in_both_directions(tmp_path: Path) -> None:
    """With int4 uploads and int8 downloads, all workers end with the same values. The export has the server's full
    precision.
    """
    settings = {"async.enabled": True, "aggregation.download_codec.name": "int8"}
    settings |= {"algorithm.outer_optimizer.momentum": 0.0, "algorithm.outer_optimizer.lr": 0.4}
    pacer = threading.Event()  # where no site waits, a turn is passed over while an exchange is under way
    with new_server(tmp_path, sites=2, K=2, H=4, tau=1, rounds=16, codec="int4", **settings) as server:
        sites = Alike(server.url, tmp_path, ["a", "b"], steps=20_000, during=lambda *_: pacer.wait(0.002) and None)
        run_to_end(server, sites)
    a, b = (sites.traces[site][-1] for site in "ab")
    result = safetensors.torch.load_file(server.exports / "model.safetensors")
    assert equal(a, b)
    assert not equal(a, result)
    assert all(torch.allclose(value, a[name], atol=0.02) for name, value in result.items())
    assert loss_of(result) < 0.9 * loss_of(copied(build()))


@pytest.mark.covers("L3", "L6")
def test_a_skipped_fragment_is_synchronised_next(tmp_path: Path) -> None:
    """If a streaming site has skipped a fragment, as after a lost answer, it synchronises this fragment next."""
    # Otherwise, it and site `b` would wait for each other.
    skipped, pacer = threading.Event(), threading.Event()

    def during(site: str, step: int) -> None:
        pacer.wait(0.002)
        if site == "a" and step == 1:  # fragment 0 is due after the next step
            sync = sites.loops["a"]._sync
            assert sync is not None
            sync._order._next = 1
            skipped.set()

    run = {"async.enabled": True, "async.sync_rounds_first": 4}
    with new_server(tmp_path, sites=2, K=2, H=4, rounds=4, **run) as server:
        sites = Sites(server.url, tmp_path, ["a", "b"], steps=20_000, during=during)
        sites.join()
        assert versions(server) == [4, 4]
    assert skipped.is_set()
    assert all(diloco.finished for diloco in sites.loops.values())


@pytest.mark.covers("L18")
def test_dynamic_local_steps_are_a_multiple_of_fragments(tmp_path: Path) -> None:
    """With K = 2 fragments, a slow site is asked for a number of local steps that is a multiple of 2."""
    # A site at a third of the speed, with H = 12, is asked for about 4 steps.
    server = new_server(
        tmp_path,
        K=2,
        H=12,
        sites=2,
        **{"async.enabled": True, "diloco.dynamic_local_steps": True, "network.heartbeat_interval_s": 0.1},
    )
    asked: list[int] = []
    enough, pacer = threading.Event(), threading.Event()

    def work(site: str, pause_s: float) -> None:
        with loop_of(server.url, tmp_path, site) as loop:
            while not enough.is_set():
                pacer.wait(pause_s)
                step_(loop, site[0])
                if site == "slow":
                    sync = loop._sync
                    assert sync is not None
                    asked[:] = [each.local_steps for each in sync._fragments]
                    if all(0 < steps < 12 for steps in asked) and loop.rounds > 4:
                        enough.set()

    with server:
        together(partial(work, "fast", 0.01), partial(work, "slow", 0.03))
    assert all(steps % 2 == 0 and 2 <= steps <= 10 for steps in asked), asked


# -- faults at random


REQUESTS = ["PUT .*/parts/0 ", r"GET /v1/tickets/\d+ ", "POST /v1/tickets"]


STANDS_STILL_S = 60.0


class Breaks(Exception):
    pass


def life(
    server: atoll.Server, url: str, folder: Path, site: str, ends: dict[str, Any], errors: list[Exception]
) -> None:
    """Take part, again and again, until the run is finished."""
    chance = random.Random(site)
    try:
        while site not in ends and not server.finished:
            last = chance.choice([3, 5, 8, 20, 1000])
            loop = loop_of(url, folder, site, max_sync_retries=chance.choice([0, 1, 6]))
            try:
                with loop:
                    for _ in range(last):
                        if loop.finished:
                            break
                        time.sleep(0.01 * chance.random())
                        step_(loop, site)
                    else:
                        if last % 2:
                            raise Breaks
            except Breaks:
                continue
            if loop.finished:
                ends[site] = copied(loop.model)
    except atoll.AtollError as error:
        if not server.finished:
            errors.append(error)
    except Exception as error:
        errors.append(error)


@pytest.mark.slow
@pytest.mark.covers("L4", "L7", "L10")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"tau": 1, "alpha": 0.5}, id="one-under-way", marks=pytest.mark.long),
        pytest.param({"tau": 3, "inflight": 2, "codec": "int8"}, id="two-under-way"),
        pytest.param({"rounds.quorum": 1, "rounds.deadline_s": 0.3}, id="quorum", marks=pytest.mark.long),
    ],
)
def test_every_run_with_network_faults_finishes(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Runs in which connections break off at random finish with every round done, and all sites end with the result."""
    rounds, ends, errors = 6, dict[str, Any](), list[Exception]()
    beats = {"network.heartbeat_interval_s": 0.5, "network.heartbeat_timeout_s": 5.0}
    server = new_server(tmp_path, sites=2, K=3, H=6, rounds=rounds, **beats, **settings)
    chance = random.Random(0)
    with server:
        proxies = [Proxy(server.port).__enter__() for _ in range(4)]
        threads = [
            threading.Thread(target=life, args=(server, proxy.url, tmp_path / "w", site, ends, errors), daemon=True)
            for site, proxy in zip("abcd", proxies, strict=True)
        ]
        for thread in threads:
            thread.start()
        heads, since_s = [0], time.monotonic()
        while any(thread.is_alive() for thread in threads) and not errors:
            proxy = chance.choice(proxies)
            if all(fault.reached.is_set() for fault in list(proxy.faults)):
                way = chance.choice(["up", "down"])
                proxy.faults.append(Fault(chance.choice(REQUESTS), way, at=BEFORE_HEADER, action="reset"))
            time.sleep(0.2)
            now = versions(server)
            if now != heads:
                heads, since_s = now, time.monotonic()
            assert time.monotonic() - since_s < STANDS_STILL_S, f"nothing moves: {server.status().workers}"
        for proxy in proxies:
            proxy.close()
    assert errors == []
    assert heads == [rounds] * 3
    result = safetensors.torch.load_file(server.exports / "model.safetensors")
    for site, end in ends.items():
        assert all(torch.equal(end[name], result[name]) for name in result), site
