"""What the page costs a server: its CPU without viewers and with five, 4 sites, about 2 rounds a second.

python bench/page_cost.py            # what a chart of many sites costs: bench/site_curves.py
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))


def view(url: str, end_s: float) -> None:
    """Follow a run as a tab of the page does: curves once, the stream, and after events the status, once a second."""
    stream = urllib.request.Request(f"{url}/v1/events?last=1000", headers={"Accept": "text/event-stream"})
    news = threading.Event()

    def listen() -> None:
        with urllib.request.urlopen(stream, timeout=30) as reply:
            for line in reply:
                if line.startswith(b"data") and time.monotonic() < end_s:
                    news.set()

    threading.Thread(target=listen, daemon=True).start()
    for name in ("loss", "accuracy"):
        urllib.request.urlopen(f"{url}/v1/site-curves?value=metrics.{name}&points=300").read()
    while time.monotonic() < end_s:
        news.wait(5)
        news.clear()
        urllib.request.urlopen(f"{url}/v1/status").read()
        time.sleep(1)


def viewers(count: int, seconds: float, folder: Path) -> float:
    """Return the CPU seconds a second of a server process that `count` viewers follow."""
    from harness.process_figures import cpu_s
    from kit.wire import WireSite

    settings = {
        "algorithm.name": "fedavg",
        "rounds.sites": 4,
        "rounds.total": 0,
        "model.source": "kit.models:build_model",
    }
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words = [sys.executable, "-m", "atoll.cli.main", "server", "--port", "0", "--dir", str(folder), *sets]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(TESTS)}
    ) as server:
        try:
            assert server.stdout is not None
            url = next(found[0] for line in server.stdout if (found := re.search(r"http://[0-9.:]+", line)))
            threading.Thread(target=server.stdout.read, daemon=True).start()
            sites = [WireSite(url, f"site-{place}") for place in range(4)]
            play(sites)
            end_s = time.monotonic() + seconds
            for _ in range(count):
                threading.Thread(target=view, args=(url, end_s), daemon=True).start()
            begun_s = cpu_s(server.pid)
            while time.monotonic() < end_s:
                play(sites)
            return (cpu_s(server.pid) - begun_s) / seconds
        finally:
            server.terminate()


def play(sites: list[Any]) -> None:
    """One round of all sites, then half a second of rest."""
    updates = [site.train(0.01) for site in sites]
    for place, update in enumerate(updates):
        update.push().complete(metrics={"loss": 0.5 + place, "accuracy": 0.5})
    time.sleep(0.4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {count: viewers(count, asked.seconds, Path(folder) / str(count)) for count in (0, 5)}
        print(
            f"CPU of the server: {found[0]:.1%} without viewers, {found[5]:.1%} with 5: {found[5] - found[0]:.1%} more"
        )


if __name__ == "__main__":
    main()
