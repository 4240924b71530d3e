"""An update over a long, lossy line: 50 Mbit/s, a round trip of 200 ms, 1 % of the packets lost, CUBIC (root).

    python bench/lossy_line.py                         # 8 connections
    python bench/lossy_line.py --connections 32 --mb 64

Printed: what as many bare TCP connections carry at once, and what Atoll's update reaches over as many connections, with
everything else at the defaults but the size of a part. The exit code is 1 if that is below 80 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kit.hospital_lines import run_over_a_line, started_on
from kit.two_machines import long_line

LEAST = 0.8
RECEIVE = """
import json, socket, sys, threading, time
count, seconds = int(sys.argv[1]), float(sys.argv[2])
listener = socket.create_server(("", 9000), backlog=256)
print("ready", flush=True)
got, links = [0] * count, [listener.accept()[0] for _ in range(count)]
begun = time.monotonic()
def read(n):
    while data := links[n].recv(65536):
        got[n] += len(data)
threads = [threading.Thread(target=read, args=(n,)) for n in range(count)]
[each.start() for each in threads]
time.sleep(seconds)
print(json.dumps(sum(got) / (time.monotonic() - begun)), flush=True)
[each.join() for each in threads]
"""
SEND = """
import socket, sys, threading, time
address, count, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + seconds
def send():
    with socket.create_connection((address, 9000)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        while time.monotonic() < end:
            link.sendall(bytes(65536))
threads = [threading.Thread(target=send) for _ in range(count)]
[each.start() for each in threads]
[each.join() for each in threads]
"""


def bare(connections: int, seconds: float) -> float:
    """What bare connections carry together, in bytes a second, from their beginning on."""
    with long_line() as (there, here, address):
        words = [str(connections), str(seconds)]
        receiver = started_on(there, Path.cwd(), "-c", RECEIVE, *words)
        assert receiver.stdout is not None
        receiver.stdout.readline()
        sender = started_on(here, Path.cwd(), "-c", SEND, address, *words, stdout=subprocess.DEVNULL)
        printed, _ = receiver.communicate(timeout=seconds + 120)
        sender.wait(30)
    return float(json.loads(printed))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--mb", type=float, default=16.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the bare connections send")
    given = parser.parse_args()
    could = bare(given.connections, given.seconds)
    with tempfile.TemporaryDirectory(prefix="atoll-line-") as folder:
        found = run_over_a_line(
            Path(folder) / "run",
            nbytes=int(given.mb * 1e6) // 4 * 4,
            rounds=1,
            mbit_per_s=None,
            settings={"network.part_bytes": 2**19, "network.connections": given.connections},
        )
    reached = found.sent_bytes / found.submit_s
    print(
        f"{given.connections} connections: bare TCP {could * 8 / 1e6:.2f} Mbit/s, an update of {given.mb:g} MB "
        f"{reached * 8 / 1e6:.2f} Mbit/s, {reached / could:.0%}; {found.again} parts again, {found.deaths} deaths"
    )
    return int(reached < LEAST * could)


if __name__ == "__main__":
    sys.exit(main())
