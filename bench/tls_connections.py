"""TLS connections at the server: memory of each behind its handshake, and how long rounds take, by size of buffer.

    python bench/tls_connections.py                     # 1,000 connections; rounds of 64 MB with two sites, in turn
    python bench/tls_connections.py --rounds 0          # memory alone

Everything is on loopback and ends within some minutes. The server is a process of its own, started with the size that
is measured: asyncio's (256 KiB) and Atoll's (64 KiB), in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import trustme
from harness.process_figures import anonymous_kb, cpu_s
from harness.processes import free_port, wait_until

from atoll.transport.listener import raise_files_limit

SIZES = (2**18, 2**16)

SERVER = """import sys
from asyncio.sslproto import SSLProtocol
from atoll.cli.main import main
try:
    from atoll.transport.tls import SmallBuffer as Used
except ImportError:  # before it had one of its own
    Used = SSLProtocol
Used.max_size = int(sys.argv.pop(1))
main()
"""

MODEL = """import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Linear({width}, {width}, bias=False)
"""

SITE = """import sys, time
import atoll, torch
sys.path.insert(0, ".")
from round_model import build
model, ends = build(), []
with atoll.join(site=sys.argv[1], folder="w") as worker:
    for fl_round in worker:
        fl_round.load_into(model)
        with torch.no_grad():
            model.weight.add_(1e-3)
        fl_round.submit(model)
        ends.append(time.monotonic())
print("rounds_s", *(f"{b - a:.4f}" for a, b in zip(ends, ends[1:])))
"""


@contextlib.contextmanager
def server(folder: Path, size: int, *, rounds: int, mb: int) -> Iterator[tuple[int, int, dict[str, str]]]:
    """(pid, port, environment of sites) of a server that reads `size` bytes of a TLS connection at a time."""
    authority, port = trustme.CA(), free_port()
    cert = authority.issue_cert("127.0.0.1")
    cert.private_key_pem.write_to_path(folder / "key.pem")
    (folder / "key.pem").chmod(0o600)
    (folder / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in cert.cert_chain_pems))
    authority.cert_pem.write_to_path(folder / "ca.pem")
    (folder / "bench_model.py").write_text(MODEL.format(width=int((mb * 1e6 / 4) ** 0.5)))
    (folder / "run.toml").write_text(
        f'model.source = "bench_model:build"\nalgorithm.name = "fedavg"\nrounds.total = {rounds}\nrounds.sites = '
        "2\nrounds.min_sites = 2\n"
        f'network.port = {port}\nnetwork.tls_cert = "cert.pem"\nnetwork.tls_key = "key.pem"\ndisk.min_free_bytes = 0\n'
    )
    environment = os.environ | {
        "ATOLL_TOKEN": secrets.token_hex(16),
        "ATOLL_TLS_CA": str(folder / "ca.pem"),
        "OMP_NUM_THREADS": "1",
    }
    argv = [sys.executable, "-c", SERVER, str(size), "server", "run.toml"]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        wait_until(lambda: "listen" in (folder / "server.log").read_text(), "the server to listen", 120.0)
        yield process.pid, port, environment | {"ATOLL_SERVER": f"https://127.0.0.1:{port}"}
    finally:
        process.terminate()
        process.wait(30)


def memory(size: int, count: int) -> tuple[float, float]:
    """Bytes of the server for each of `count` connections behind their handshake, and when they are closed again."""
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as opened:
        folder = Path(place)
        with server(folder, size, rounds=1, mb=1) as (pid, port, _):
            context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
            connections = []

            def open_one() -> None:
                raw = socket.create_connection(("127.0.0.1", port), timeout=30)
                connections.append(opened.enter_context(context.wrap_socket(raw, server_hostname="127.0.0.1")))

            for _ in range(20):  # what the first ones bring is not of each
                open_one()
            time.sleep(1.0)
            before = anonymous_kb(pid)
            for _ in range(count):
                open_one()
            time.sleep(1.0)
            open_kb = anonymous_kb(pid)
            for each in connections:
                each.close()
            time.sleep(3.0)
            return (open_kb - before) * 1024 / count, (anonymous_kb(pid) - before) * 1024 / count


def rounds_s(size: int, rounds: int, mb: int) -> tuple[list[float], float]:
    """Seconds of each round behind the first, and the server's CPU seconds a round.

    Two sites hardly train: every byte travels up and down. CPU seconds hardly depend on what else the machine does.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with server(folder, size, rounds=rounds, mb=mb) as (pid, _, environment):
            before = cpu_s(pid)
            sites = [
                subprocess.Popen(
                    [sys.executable, "-c", SITE, site],
                    cwd=folder,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                for site in ("a", "b")
            ]
            said = [sites[0].communicate(timeout=600)[0]]
            used = cpu_s(pid) - before
            said += [site.communicate(timeout=600)[0] for site in sites[1:]]
    found = re.search(r"rounds_s (.+)", said[0])
    if found is None:
        raise SystemExit(f"A site said nothing of its rounds: {said[0]!r}")
    return [float(each) for each in found[1].split()], used / rounds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7, help="of each run; 0: none are measured")
    parser.add_argument("--runs", type=int, default=3, help="of each size, in turn")
    parser.add_argument("--mb", type=int, default=64, help="of the model")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes of the buffer")
    given = parser.parse_args()
    raise_files_limit()
    for size in given.sizes:
        each, left = memory(size, given.connections)
        print(
            f"buffer {size:>7}: {each / 1e3:6.1f} kB a connection ({given.connections} behind their handshake), "
            f"{left / 1e3:.1f} kB when they are closed",
            flush=True,
        )
    if not given.rounds:
        return
    times: dict[int, list[float]] = {size: [] for size in given.sizes}
    cpu: dict[int, list[float]] = {size: [] for size in given.sizes}
    for run in range(given.runs):
        for size in given.sizes:
            found, used = rounds_s(size, given.rounds, given.mb)
            times[size] += found
            cpu[size].append(used)
            shown = " ".join(f"{each:.2f}" for each in found)
            print(f"run {run + 1}, buffer {size:>7}: {shown} s; {used:.2f} CPU s a round", flush=True)
    for size, found in times.items():
        print(
            f"buffer {size:>7}: median {statistics.median(found):.3f} s, least {min(found):.3f} s of {len(found)} "
            f"rounds of {given.mb} MB with two sites over TLS; {statistics.median(cpu[size]):.2f} CPU s a round"
        )


if __name__ == "__main__":
    main()
