"""How much one hostile site or stranger slows the rounds of the others, by what it floods the server with.

A few sites train over TLS (`harness.crowd`), and a process of its own floods their server: with requests of a site,
wrong tokens, joins, new connections and so on. Phases without a flood and with one alternate; the figure is the ratio
of the median times of their rounds. The flood runs on the same machine, so part of each ratio is its own time.

    python bench/flooding_site.py                       # 4 sites of 1 MB, 10 kinds, 12 s each
    python bench/flooding_site.py --kinds joins tls
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.crowd import Crowd
from harness.processes import free_port
from kit.tls import write_certificate
from many_workers import MODEL

MOST = 1.5
TOKEN = "right"
RIGHT = {"Authorization": f"Bearer {TOKEN}"}


class Timed(Crowd):
    """Notes when the first ticket of each round was given."""

    begun_s: dict[int, float]

    async def _round(self, session: aiohttp.ClientSession, ticket: dict[str, Any], headers: dict[str, str]) -> None:
        self.begun_s.setdefault(ticket["round"], time.monotonic())
        await super()._round(session, ticket, headers)


async def request(session: aiohttp.ClientSession, url: str, kind: str, number: int, lease: str) -> int:
    """Send one request of a kind; its status."""
    site = RIGHT | {"Atoll-Lease": lease}
    opened = {"head_bytes": 64, "nbytes": 2**30, "part_bytes": 65536, "expires_s": 3600.0}
    method, path, options = {
        "heartbeats": ("POST", "/v1/heartbeat", {"json": {"step": number}, "headers": site}),
        "status": ("GET", "/v1/status", {"headers": site}),
        "tokens": ("GET", "/v1/run", {"headers": {"Authorization": f"Bearer {number}"}}),
        "strangers": ("GET", "/v1/status", {}),
        "tables": ("GET", "/v1/updates.csv", {"headers": site}),
        "metrics": ("GET", "/metrics", {"headers": site}),
        "joins": ("POST", "/v1/workers", {"json": {"protocol": 1, "site": f"ghost-{number}"}, "headers": RIGHT}),
        "objects": ("POST", "/v1/objects", {"json": opened, "headers": site}),
        "parts": ("PUT", "/v1/tickets/1/parts/0", {"data": bytes(65536), "headers": site}),
    }[kind]
    async with session.request(method, url + path, **options) as response:
        await response.read()
        return response.status


async def flood(url: str, kind: str, seconds: float, tasks: int) -> Counter[str]:
    """Flood a server with one kind of request, over as many connections as there are tasks; answers by status."""
    found: Counter[str] = Counter()
    end_s, numbers = time.monotonic() + seconds, iter(range(10**9))
    host, port = url.removeprefix("https://").split(":")
    context = ssl._create_unverified_context()

    async def one(session: aiohttp.ClientSession, lease: str) -> None:
        while time.monotonic() < end_s:
            try:
                if kind == "tls":
                    _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port), ssl=context), 5.0)
                    found["connected"] += 1
                    writer.close()
                else:
                    found[str(await request(session, url, kind, next(numbers), lease))] += 1
            except (OSError, aiohttp.ClientError, TimeoutError) as error:
                found[type(error).__name__] += 1

    connector = aiohttp.TCPConnector(limit=0, ssl=False)
    timeout = aiohttp.ClientTimeout(total=10.0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        lease = ""
        if kind in ("heartbeats", "status", "objects", "parts", "tables", "metrics"):
            join = {"protocol": 1, "site": "hostile"}
            async with session.post(f"{url}/v1/workers", json=join, headers=RIGHT) as response:
                lease = (await response.json())["lease"]
        await asyncio.gather(*(one(session, lease) for _ in range(tasks)))
        if lease:
            with contextlib.suppress(aiohttp.ClientError):
                await session.post(f"{url}/v1/workers/leave", json={}, headers=RIGHT | {"Atoll-Lease": lease})
    return found


def flooding(url: str, kind: str, seconds: float, tasks: int, answers: Any) -> None:
    """Run the flood in a process, which gives way to the others."""
    os.nice(10)
    answers.put(asyncio.run(flood(url, kind, seconds, tasks)))


async def drive(url: str, options: argparse.Namespace) -> bool:
    """Measure, and print a line for each kind; whether all are within the bar."""
    good, processes = True, get_context("spawn")
    connector = aiohttp.TCPConnector(limit=0, ssl=False)
    async with aiohttp.ClientSession(connector=connector, headers=RIGHT) as session:
        crowd = await Timed.at(url, session, options.train_s)
        assert isinstance(crowd, Timed)
        crowd.begun_s = {}
        sites = [asyncio.create_task(crowd.one(session, f"w-{number}")) for number in range(options.sites)]
        await asyncio.sleep(3.0)
        for kind in options.kinds:
            calm, rounds, answers = await phase(crowd, options.seconds), list[float](), processes.Queue()
            given = (url, kind, options.seconds + 3.0, options.tasks, answers)
            process = processes.Process(target=flooding, args=given, daemon=True)
            process.start()
            await asyncio.sleep(3.0)
            rounds = await phase(crowd, options.seconds)
            found: Counter[str] = await asyncio.to_thread(answers.get)
            await asyncio.to_thread(process.join)
            ratio = statistics.median(rounds) / statistics.median(calm) if rounds else float("inf")
            good = good and ratio <= MOST
            shown = ", ".join(f"{count} × {what}" for what, count in found.most_common(4))
            print(
                f"{kind:>10}: {statistics.median(calm):.3f} s → {statistics.median(rounds or [0]):.3f} s a round, "
                f"{ratio:.2f} × (worst {max(rounds, default=0.0):.2f} s of {len(rounds)}); answers: {shown}",
                flush=True,
            )
        for site in sites:
            site.cancel()
        await asyncio.gather(*sites, return_exceptions=True)
        print(f"errors of the sites: {dict(crowd.errors)}")
    return good and not crowd.errors


async def phase(crowd: Timed, seconds: float) -> list[float]:
    """The times of the rounds that begin and end within the next seconds."""
    begun_s = time.monotonic()
    await asyncio.sleep(seconds)
    times = sorted(at_s for at_s in crowd.begun_s.values() if at_s >= begun_s)
    return [after - before for before, after in itertools.pairwise(times)]


def main() -> None:
    """Start a server and measure; the exit code is 1 if a ratio is above the bar."""
    kinds = ["heartbeats", "status", "tables", "metrics", "tokens", "strangers", "objects", "parts", "tls", "joins"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--train-s", type=float, default=0.25)
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a phase")
    parser.add_argument("--tasks", type=int, default=64, help="connections of the flood")
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "their_model.py").write_text(MODEL.format(width=256))
        chosen: dict[str, Any] = {"model.source": "their_model:build", "algorithm.name": "fedavg"}
        chosen |= {"rounds.sites": options.sites, "rounds.min_sites": options.sites, "rounds.total": 100_000}
        chosen |= {"network.port": port, "limits.first_update_s": 1.0} | write_certificate(folder)
        flags = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "atoll.cli.main", "server", *flags]
        environment = os.environ | {"ATOLL_TOKEN": TOKEN}
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment)
        try:
            for _ in range(300):
                if b"listening" in (folder / "log").read_bytes():
                    break
                time.sleep(0.1)
            good = asyncio.run(drive(f"https://127.0.0.1:{port}", options))
        finally:
            server.terminate()
            server.wait(30)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
