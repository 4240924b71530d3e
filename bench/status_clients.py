"""What clients of the status cost: CPU of a server with 200 training sites, beside 1 client and beside 20.

The sites are coroutines that speak the protocol (`harness.crowd`); rounds take some seconds. Phases with one client and
with many alternate. Each client asks twice a second.

    python bench/status_clients.py
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.crowd import Crowd
from harness.process_figures import cpu_s
from harness.processes import free_port
from many_workers import MODEL, _up

from atoll.protocol import routes

EVERY_S = 0.5


async def ask(url: str, session: aiohttp.ClientSession, clients: int) -> None:
    """Ask for the status from so many clients, each twice a second, until cancelled."""

    async def one() -> None:
        while True:
            async with session.get(url + routes.STATUS) as response:
                await response.read()
            await asyncio.sleep(EVERY_S)

    await asyncio.gather(*(one() for _ in range(clients)))


async def drive(url: str, options: argparse.Namespace, pid: int) -> dict[int, list[float]]:
    """CPU seconds of the server in each phase: number of clients → one entry a phase."""
    spent: dict[int, list[float]] = {1: [], options.clients: []}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        crowd = await Crowd.at(url, session, options.train_s)
        sites = [asyncio.create_task(crowd.one(session, f"w-{number:03}")) for number in range(options.sites)]
        await asyncio.sleep(2 * options.train_s)
        for _ in range(options.pairs):
            for clients, found in spent.items():
                asking, before = asyncio.create_task(ask(url, session, clients)), cpu_s(pid)
                await asyncio.sleep(options.seconds)
                found.append(cpu_s(pid) - before)
                asking.cancel()
        for site in sites:
            site.cancel()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sites", type=int, default=200)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0, help="length of a phase: some rounds")
    parser.add_argument("--train-s", type=float, default=4.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "their_model.py").write_text(MODEL.format(width=32))
        chosen = {"model.source": "their_model:build", "algorithm.name": "fedavg", "rounds.sites": options.sites}
        flags = [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "atoll.cli.main", "server", *flags, "--rounds", "10000", "--port", str(port)]
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
        try:
            asyncio.run(_up(f"http://127.0.0.1:{port}"))
            spent = asyncio.run(drive(f"http://127.0.0.1:{port}", options, server.pid))
        finally:
            server.terminate()
            server.wait(30)
    one, many = (statistics.median(found) for found in spent.values())
    print(
        f"CPU of the server in {options.seconds:g} s, median of {options.pairs}: {one:.2f} s beside 1 client, ", end=""
    )
    print(f"{many:.2f} s beside {options.clients}: {many / one:.2f} ×; all: {spent}")


if __name__ == "__main__":
    main()
