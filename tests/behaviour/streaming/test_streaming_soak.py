"""Workers that come, go, fail and lose answers at random: no two wait for each other."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from streaming_world import copied, loop_of, serve, step_, versions

import atoll

REQUESTS = ["POST .*/complete ", "PUT .*/parts/0 ", "GET .*/versions/", "POST /v1/tickets"]
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
def test_a_run_comes_to_its_end_whatever_its_workers_do(tmp_path: Path, settings: dict[str, Any]) -> None:
    rounds, ends, errors = 6, dict[str, Any](), list[Exception]()
    beats = {"network.heartbeat_interval_s": 0.5, "network.heartbeat_timeout_s": 5.0}
    server = serve(tmp_path, sites=2, K=3, H=6, rounds=rounds, **beats, **settings)
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
