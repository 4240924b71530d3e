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
from streaming_world import build, inner, local_step, serve

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
            model = build()
            optimizer = inner(model)
            last = chance.choice([3, 5, 8, 20, 1000])
            retries = chance.choice([0, 1, 6])
            try:
                with atoll.DiLoCo(
                    model, optimizer, server=url, site=site, folder=folder, max_sync_retries=retries
                ) as diloco:
                    for _ in range(last):
                        if diloco.finished:
                            break
                        time.sleep(0.01 * chance.random())
                        local_step(model, optimizer, site)
                    else:
                        if last % 2:
                            raise Breaks
            except Breaks:
                continue
            if diloco.finished:
                ends[site] = {name: value.clone() for name, value in model.state_dict().items()}
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
        pytest.param(
            {"diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.5},
            id="one-under-way",
            marks=pytest.mark.long,
        ),
        pytest.param(
            {"diloco.fragment_sync_delay": 3, "diloco.max_inflight": 2, "aggregation.upload_codec.name": "int8"},
            id="two-under-way",
        ),
        pytest.param(
            {"diloco.fragment_sync_delay": 0, "rounds.quorum": 1, "rounds.deadline_s": 0.3},
            id="quorum",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_comes_to_its_end_whatever_its_workers_do(tmp_path: Path, settings: dict[str, Any]) -> None:
    rounds, ends, errors = 6, dict[str, Any](), list[Exception]()
    options = {
        "rounds.sites": 2,
        "diloco.num_fragments": 3,
        "diloco.sync_every": 6,
        "rounds.total": rounds,
        "network.heartbeat_interval_s": 0.5,
    }
    server = serve(tmp_path, **options, **{"network.heartbeat_timeout_s": 5.0}, **settings)
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
            now = [fragment.version for fragment in server.status().fragments]
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
