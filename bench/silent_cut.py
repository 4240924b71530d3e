"""How long training stands still when the network falls silent: packets are dropped, no connection is closed.

    python bench/silent_cut.py                 # K = 1 and K = 2; at the defaults, but that no site is declared dead
    python bench/silent_cut.py --seconds 300

One site of two trains through a TCP proxy that stops forwarding without closing, while it trains, while it waits for
the other site, or while it pulls a version. Its call ends with the timeout of 25 s, and one look for the server stays
unanswered for 3 s: at the defaults, training stands still for less than 30 s. Printed: the gap between two of its
optimizer steps that the cut made, and the gaps of later turns, which begin with a look.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from torch import nn

import atoll

STEP_S, SYNC_EVERY = 0.05, 20
When = Literal["trains", "waits", "pulls"]
WAYS: dict[str, dict[str, Any]] = {
    "K = 1": {},
    "K = 2": {"diloco.num_fragments": 2, "diloco.fragment_sync_delay": 5, "diloco.fragment_update_alpha": 0.5},
}


def train(url: str, folder: Path, site: str, after_step: Callable[[atoll.DiLoCo], bool]) -> None:
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with atoll.DiLoCo(model, optimizer, server=url, site=site, folder=folder) as loop:
        go_on = True
        while go_on:
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            go_on = after_step(loop)
            time.sleep(STEP_S)


def measure(settings: dict[str, Any], when: When, seconds: float) -> tuple[list[float], int, int]:
    """Gaps of more than a second between steps after the cut, the turns that were skipped, and calls after the first
    of them.

    Args:
        when: what the site does as the cut comes: it waits for the other one, or for the first byte of a version.
    """
    steps: list[float] = []
    calls: list[tuple[int, int]] = []  # skipped turns, requests but heartbeats
    cut_s, is_cut = [0.0], threading.Event()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = atoll.Server(
            nn.Linear(64, 64),
            settings={
                "algorithm.name": "diloco",
                "diloco.sync_every": SYNC_EVERY,
                "rounds.sites": 2,
                "rounds.total": 10**6,
                "network.port": 0,
                "disk.state_dir": folder / "state",
                "network.heartbeat_timeout_s": 0,
                **settings,
            },
        ).start()
        with Proxy(server.port) as proxy:

            def cut() -> None:
                cut_s[0] = time.monotonic()
                proxy.silence()
                is_cut.set()

            def far(loop: atoll.DiLoCo) -> bool:
                steps.append(time.monotonic())
                calls.append((loop.skipped, proxy.count("(GET|PUT|POST) /v1/(?!heartbeat)")))
                if when == "trains" and loop.rounds >= 3 and not is_cut.is_set():
                    cut()
                elif when == "pulls" and loop.rounds >= 3 and not proxy.faults:
                    proxy.faults.append(Fault("GET .*/versions/[0-9]+/", "down", BEFORE_HEADER, "stall", wait=cut))
                return not is_cut.is_set() or time.monotonic() < cut_s[0] + seconds

            def near(loop: atoll.DiLoCo) -> bool:
                if when == "waits" and loop.rounds >= 3 and not is_cut.is_set():
                    time.sleep(2 + SYNC_EVERY * STEP_S)  # the other site waits by then
                    cut()
                return not is_cut.is_set()

            sites = [
                threading.Thread(target=train, args=(proxy.url, folder, "far", far), daemon=True),
                threading.Thread(target=train, args=(server.url, folder, "near", near), daemon=True),
            ]
            for site in sites:
                site.start()
            sites[0].join()
        server.stop()
    gaps = [after - max(before, cut_s[0]) for before, after in pairwise(steps) if after > cut_s[0]]
    gaps = [gap for gap in gaps if gap > 1.0]
    skipped = [entry for entry in calls if entry[0]]
    return gaps, calls[-1][0], skipped[-1][1] - skipped[0][1] if skipped else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="how long the network is silent")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for way, settings in WAYS.items():
        for when in get_args(When):
            gaps, skipped, calls = measure(settings, when, arguments.seconds)
            first, later = (gaps[0] if gaps else 0.0), gaps[1:]
            print(
                f"{way}, cut while it {when}: stands still for {first:.1f} s; {skipped} turns skipped; later turns "
                f"{min(later, default=0):.1f} to {max(later, default=0):.1f} s, {calls} further calls",
                flush=True,
            )


if __name__ == "__main__":
    main()
