"""Hundreds of workers on one server: errors, how soon heartbeats are answered, the server's memory.

The server is a process of its own. The workers are coroutines of this one that speak the protocol: they join, ask for
their ticket, pull the version and check its digest, "train" for a while, send their parts, complete. A third process
sends the heartbeats of all of them, so that what it measures is the server's time and not that of 200 workers in one
process.

    python bench/many_workers.py                        # 200 workers, 1 MB, 24 rounds
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parent / "quality"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.crowd import Crowd
from harness.process_figures import anonymous_kb
from harness.processes import free_port
from results import FOLDER, Gate, write

from atoll.protocol import messages, routes

MODEL = """import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear({width}, {width}) for _ in range(4)])
"""


@dataclass
class Results:
    """What went wrong, how long each round took, and the most memory that the server had in it."""

    errors: Counter[str] = field(default_factory=Counter)
    anonymous_mb: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)


def beat(url: str, leases: Connection, interval_s: float, answer: Connection) -> None:
    """Send the heartbeats of all leases that come, each every `interval_s`, until told to end; answer with seconds."""
    asyncio.run(_beat(url, leases, interval_s, answer))


async def _beat(url: str, leases: Connection, interval_s: float, answer: Connection) -> None:
    seconds: list[float] = []
    errors: Counter[str] = Counter()
    loop, tasks, ending = asyncio.get_running_loop(), set[asyncio.Task[None]](), asyncio.Event()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def of_one(lease: str) -> None:
            await asyncio.sleep(random.uniform(0, interval_s))
            body = messages.Heartbeat(step=1, state="training").model_dump_json()
            headers = {"Content-Type": "application/json", routes.LEASE_HEADER: lease}
            while not ending.is_set():
                began = time.perf_counter()
                try:
                    async with session.post(url + routes.HEARTBEAT, data=body, headers=headers) as response:
                        await response.read()
                        if response.status != 200:
                            errors[f"heartbeat: {response.status}"] += 1
                except aiohttp.ClientError as error:
                    errors[f"heartbeat: {type(error).__name__}"] += 1
                seconds.append(time.perf_counter() - began)
                await asyncio.sleep(max(0.0, interval_s - (time.perf_counter() - began)))

        while (lease := await loop.run_in_executor(None, leases.recv)) is not None:
            tasks.add(asyncio.create_task(of_one(lease)))
        ending.set()
        for task in tasks:
            task.cancel()
    answer.send((seconds, dict(errors)))


async def drive(url: str, options: argparse.Namespace, leases: Connection, server_pid: int) -> Results:
    """Run all workers to the end, and look at the server five times a second."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        crowd, results = await Crowd.at(url, session, options.train_s), Results()

        async def look() -> None:
            version, since, most_kb = 0, time.monotonic(), 0
            while True:
                await asyncio.sleep(0.2)
                most_kb = max(most_kb, anonymous_kb(server_pid))
                async with session.get(url + routes.STATUS) as response:
                    head = (await response.json())["fragments"][0]["version"]
                if head != version:
                    now = time.monotonic()
                    results.rounds_s.append(now - since)
                    results.anonymous_mb.append(most_kb * 1024 / 1e6)
                    version, since, most_kb = head, now, 0

        looking = asyncio.create_task(look())
        sites = [f"w-{number:03}" for number in range(options.workers)]
        await asyncio.gather(*(crowd.one(session, site, leases.send) for site in sites))
        looking.cancel()
    results.errors.update(crowd.errors)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--width", type=int, default=256, help="four linear layers so wide: 256 is 1 MB")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--train-s", type=float, default=4.0, help='how long a worker "trains"')
    parser.add_argument("--heartbeat-s", type=float, default=1.0, help="between two heartbeats of a worker")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the results go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "their_model.py").write_text(MODEL.format(width=options.width))
        flags = [
            "--set",
            "model.source=their_model:build",
            "--set",
            "algorithm.name=fedavg",
            "--rounds",
            str(options.rounds),
        ]
        flags += [
            "--set",
            f"rounds.sites={options.workers}",
            "--port",
            str(port),
            "--set",
            "disk.max_pinned_versions=8",
        ]
        command = [sys.executable, "-m", "atoll.cli.main", "server", *flags]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        url = f"http://127.0.0.1:{port}"
        theirs, mine = multiprocessing.Pipe(duplex=False)
        answer, answered = multiprocessing.Pipe(duplex=False)
        pulse = multiprocessing.get_context("spawn").Process(
            target=beat, args=(url, theirs, options.heartbeat_s, answered), daemon=True
        )
        try:
            asyncio.run(_up(url))
            pulse.start()
            results = asyncio.run(drive(url, options, mine, server.pid))
            mine.send(None)
            seconds, errors = answer.recv()
            results.errors.update(errors)
        finally:
            server.terminate()
            server.wait(30)
    report(options, results, seconds)


async def _up(url: str) -> None:
    """Wait until the server answers."""
    until = time.monotonic() + 60
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(url + routes.HEALTH) as response:
                    await response.read()
                    return
            except aiohttp.ClientError:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.1)


def report(options: argparse.Namespace, results: Results, seconds: list[float]) -> None:
    """Write the figures and the gates."""
    if len(seconds) < 2:
        sys.exit("Fewer than two heartbeats were sent before the run ended: use more --rounds or a longer --train-s.")
    quantiles = statistics.quantiles(seconds, n=100)
    p50_ms, p99_ms = 1e3 * statistics.median(seconds), 1e3 * quantiles[98]
    early, late = results.anonymous_mb[1], max(results.anonymous_mb[2:])
    rounds_s = statistics.median(results.rounds_s[1:])
    lately = results.anonymous_mb[-1] - results.anonymous_mb[len(results.anonymous_mb) // 2]
    gates = [
        Gate(
            "errors, all requests",
            sum(results.errors.values()),
            "0",
            not results.errors,
            str(dict(results.errors))[:300],
        ),
        Gate("heartbeat, p99, ms", p99_ms, "<= 50", p99_ms <= 50),
        Gate(
            "server's memory after round 2 until the end, growth in MB",
            late - early,
            "<= 10",
            late - early <= 10,
            f"{lately:.1f} MB of it in the second half.",
        ),
    ]
    settings = {key: getattr(options, key) for key in ("workers", "width", "rounds", "train_s", "heartbeat_s")}
    figures = {
        "heartbeats": len(seconds),
        "p50_ms": p50_ms,
        "p99_ms": p99_ms,
        "max_ms": 1e3 * max(seconds),
        "percentiles_ms": [1e3 * each for each in quantiles],
        "anonymous_mb": results.anonymous_mb,
        "rounds_s": results.rounds_s,
        "errors": dict(results.errors),
    }
    plot(figures, options.folder)
    write(
        "many_workers",
        title=f"{options.workers} workers on one server",
        command="python bench/many_workers.py",
        settings=settings,
        figures=figures,
        gates=gates,
        header=["workers", "heartbeats", "p50, ms", "p99, ms", "longest, ms", "a round, s", "server, MB"],
        rows=[[options.workers, len(seconds), p50_ms, p99_ms, 1e3 * max(seconds), rounds_s, late]],
        text=f"""Server, workers and heartbeats share {os.cpu_count()} cores. A round is {options.train_s:g} s of
training, give or take a fifth, and the exchange. The table has the median of all rounds but the first. Memory is the
server's anonymous memory, including Python and PyTorch: the maximum after the second round, sampled five times a
second.""",
        folder=options.folder,
    )
    for gate in gates:
        print(f"{gate.name}: {gate.value:.4g} ({gate.bar}) {'met' if gate.ok else 'MISSED ' + gate.note}")


def plot(figures: dict[str, Any], folder: Path) -> None:
    """Heartbeats by percentile; the server's memory by round."""
    import matplotlib  # here: the process that sends heartbeats imports this module, too

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5), layout="constrained")
    left.plot(range(1, 100), figures["percentiles_ms"])
    left.axhline(50, linestyle=":", color="gray")
    left.set(xlabel="percentile of the heartbeats", ylabel="ms until the answer", yscale="log")
    right.plot(range(1, len(figures["anonymous_mb"]) + 1), figures["anonymous_mb"], marker="o")
    right.set(xlabel="round", ylabel="the server's anonymous memory, MB", ylim=(0, None))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "many_workers.png", dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
