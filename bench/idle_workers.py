"""What hundreds of connected workers cost a server while nothing happens, and what happens if many restart at once.

The server is a process of its own on one core; the workers are coroutines of this process on another one. Each worker
has joined, waits for a ticket by long polls, and sends heartbeats. No round begins: the run waits for one more site.

    python bench/idle_workers.py                 # 500 workers for 40 s; then 200 of them restart at once
    python bench/idle_workers.py --tls           # each with a certificate of its own
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
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from harness.process_figures import cpu_s
from harness.processes import free_port

from atoll.protocol import messages, routes
from atoll.protocol.invitation import Invitation
from atoll.transport.authority_files import authority_file
from atoll.transport.certificates import new_key, signing_request

MODEL = "import torch\ndef build():\n    return torch.nn.Linear(8, 8)\n"
_JSON = {"Content-Type": "application/json"}
_process = itertools.count(1)


class Worker:
    """A worker that has joined, and waits."""

    def __init__(self, url: str, site: str, context: ssl.SSLContext | None, found: Found) -> None:
        self.url, self.site, self.context, self.found = url, site, context, found
        self.lease, self.session = "", aiohttp.ClientSession()

    async def post(self, path: str, message: messages.Message) -> int:
        """Send a message; after a refusal that asks for it, or a lost connection, again, as a real worker does."""
        headers = _JSON | ({routes.LEASE_HEADER: self.lease} if self.lease else {})
        while True:
            try:
                async with self.session.post(
                    self.url + path, data=message.model_dump_json(), headers=headers, ssl=self.context or False
                ) as answer:
                    body = await answer.read()
                    if path == routes.WORKERS and answer.status == 200:
                        self.lease = messages.Joined.model_validate_json(body).lease
                    if answer.status != 503:
                        return answer.status
                    self.found.again["asked to try again"] += 1
                    await asyncio.sleep(float(answer.headers.get("Retry-After", 1)))
            except aiohttp.ClientError as error:
                self.found.again[type(error).__name__] += 1
                await asyncio.sleep(0.2)

    async def join(self) -> None:
        """Join as a new process of the site."""
        self.lease = ""
        message = messages.Join(protocol=routes.PROTOCOL, site=self.site, process=f"{next(_process):032x}")
        self.note(routes.WORKERS, await self.post(routes.WORKERS, message))

    def note(self, path: str, status: int) -> None:
        if status not in (200, 204):
            self.found.errors[f"{path}: {status}"] += 1

    async def wait(self) -> None:
        """Ask for a ticket, again and again."""
        ask = messages.TicketRequest(fragment=0, wait_s=routes.LONG_POLL_S)
        while True:
            self.note(routes.TICKETS, await self.post(routes.TICKETS, ask))

    async def beat(self, interval_s: float, offset_s: float) -> None:
        """Send heartbeats, and note how soon each is answered."""
        await asyncio.sleep(offset_s)
        while True:
            began = time.perf_counter()
            self.note(routes.HEARTBEAT, await self.post(routes.HEARTBEAT, messages.Heartbeat(state="training")))
            self.found.seconds.append(time.perf_counter() - began)
            await asyncio.sleep(interval_s)


class Found:
    """What was measured.

    Attributes:
        errors: answers that a user would see; again: what a worker repeats by itself.
        seconds: until a heartbeat was answered.
    """

    def __init__(self) -> None:
        self.errors, self.again, self.seconds = Counter[str](), Counter[str](), list[float]()


async def contexts(url: str, state: Path, sites: list[str], folder: Path) -> dict[str, ssl.SSLContext]:
    """Invite each site, and enrol it."""
    ca, found = authority_file(state), dict[str, ssl.SSLContext]()
    admin = {"Authorization": f"Bearer {(state / 'admin.token').read_text().strip()}"} | _JSON
    async with aiohttp.ClientSession() as session:
        context = ssl.create_default_context(cafile=str(ca))
        for site in sites:
            async with session.post(url + routes.INVITE, json={"site": site}, headers=admin, ssl=context) as answer:
                invitation = Invitation.parse((await answer.json())["invitation"])
            key = new_key()
            body = {"secret": invitation.secret, "request": signing_request(key, site).decode()}
            async with session.post(url + routes.ENROL, json=body, ssl=context) as answer:
                (folder / site).write_bytes(key + (await answer.json())["certificate"].encode())
            found[site] = ssl.create_default_context(cafile=str(ca))
            found[site].load_cert_chain(folder / site)
    return found


async def measure(url: str, server: int, folder: Path, options: argparse.Namespace) -> None:
    """Connect the workers, look at the server for a while, and let some restart."""
    sites, found = [f"w-{number:03}" for number in range(options.workers)], Found()
    by_site = await contexts(url, folder / "state", sites, folder) if options.tls else {}
    workers = [Worker(url, site, by_site.get(site), found) for site in sites]
    for some in itertools.batched(workers, 50) if hasattr(itertools, "batched") else [workers]:
        await asyncio.gather(*(each.join() for each in some))
    step_s = options.heartbeat_s / len(workers)
    tasks = {
        each: [
            asyncio.create_task(each.wait()),
            asyncio.create_task(each.beat(options.heartbeat_s, number * step_s)),
        ]
        for number, each in enumerate(workers)
    }
    await asyncio.sleep(options.heartbeat_s + 5)  # until each has a connection for both
    found.seconds.clear()
    begin_s, used_s = time.monotonic(), cpu_s(server)
    await asyncio.sleep(options.for_s)
    used = (cpu_s(server) - used_s) / (time.monotonic() - begin_s)
    p50_ms, p99_ms = (1e3 * statistics.quantiles(found.seconds, n=100)[at] for at in (49, 98))
    print(f"{len(workers)} workers, TLS {options.tls}: the server uses {used:.3f} of a core")
    most_ms = 1e3 * max(found.seconds)
    print(f"{len(found.seconds)} heartbeats: p50 {p50_ms:.1f} ms, p99 {p99_ms:.1f} ms, {most_ms:.1f} ms at most")
    print(f"errors {dict(found.errors)}, repeated {dict(found.again)}", flush=True)
    found.errors.clear()
    found.again.clear()
    some = workers[: options.restarts]
    for each in some:
        for task in tasks[each]:
            task.cancel()
        await each.session.close()
        each.session = aiohttp.ClientSession()
    begin_s = time.monotonic()
    await asyncio.gather(*(each.join() for each in some))
    joined_s = time.monotonic() - begin_s
    print(
        f"{len(some)} restarted at once: all have joined after {joined_s:.2f} s; "
        f"errors {dict(found.errors)}, repeated {dict(found.again)}"
    )
    for task in itertools.chain(*tasks.values()):
        task.cancel()
    await asyncio.gather(*(each.session.close() for each in workers))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=500)
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--for-s", type=float, default=40.0)
    parser.add_argument("--heartbeat-s", type=float, default=10.0, help="between two heartbeats of a worker")
    parser.add_argument("--tls", action="store_true", help="each worker has a certificate of its own")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "their_model.py").write_text(MODEL)
        values = {
            "model.source": "their_model:build",
            "algorithm.name": "fedavg",
            "rounds.total": 3,
            "rounds.sites": options.workers + 1,
            "network.port": port,
            "network.heartbeat_interval_s": options.heartbeat_s,
            "disk.state_dir": folder / "state",
        } | ({"trust.required": "true"} if options.tls else {})
        flags = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "atoll.cli.main", "server", *flags]
        with open(folder / "log", "wb") as log:
            server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(server.pid, cores[:1])
        os.sched_setaffinity(0, cores[1:2] or cores)
        url = f"{'https' if options.tls else 'http'}://127.0.0.1:{port}"
        try:
            state = folder / "state"
            asyncio.run(up(port, state / "admin.token", *[authority_file(state)] * options.tls))
            asyncio.run(measure(url, server.pid, folder, options))
        finally:
            server.terminate()
            server.wait(30)
            if server.returncode:
                print((folder / "log").read_text()[-2000:], file=sys.stderr)


async def up(port: int, *files: Path) -> None:
    """Wait until the server listens, and has written its files."""
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            if all(map(Path.exists, files)):
                return
        await asyncio.sleep(0.1)


if __name__ == "__main__":
    main()
