"""A long, lossy line between two network namespaces, in user space: for kernels without netem. A process of its own.

    python -m harness.lossy_line '{"machines": ["a", "b"], "addresses": ["10.209.78.1", "10.209.78.2"]}'

Two tun devices, one in each namespace; this process carries the packets from one to the other. A packet waits until
those before it have passed at the rate of the line, then for half of the round trip. It is lost at random, or if more
wait than the line's queue holds. It ends when its standard input closes.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1500
QUEUE_S = 0.2
"""Longest wait for the packets before, in seconds: the queue holds as much as the line carries in one round trip."""


def tun(machine: str, address: str, other: str) -> int:
    """Make a tun device in a network namespace, with a route to the other end. Return its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"al{os.getpid()}{fd}"[:15]
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    for line in (
        f"link set {name} netns {machine}",
        f"-n {machine} addr add {address} peer {other} dev {name}",
        f"-n {machine} link set {name} mtu {MTU} txqueuelen 1000 up",
        f"-n {machine} route replace {other} dev {name} congctl cubic",
    ):
        subprocess.run(["ip", *line.split()], check=True)
    return fd


class Way:
    """One direction: packets on their way, each with the time at which it arrives."""

    def __init__(self, target: int, bytes_per_s: float, delay_s: float, loss: float, seed: int) -> None:
        self.target, self._bytes_per_s, self._delay_s, self._loss = target, bytes_per_s, delay_s, loss
        self._free_s, self._chance = 0.0, random.Random(seed)
        self.packets: deque[tuple[float, bytes]] = deque()

    def send(self, packet: bytes, now_s: float) -> None:
        waits_s = max(self._free_s - now_s, 0.0)
        if waits_s > QUEUE_S or self._chance.random() < self._loss:
            return
        self._free_s = now_s + waits_s + len(packet) / self._bytes_per_s
        self.packets.append((self._free_s + self._delay_s, packet))

    def deliver(self, now_s: float) -> float:
        """Pass on what has arrived. Return when the next packet arrives."""
        while self.packets and self.packets[0][0] <= now_s:
            try:
                os.write(self.target, self.packets.popleft()[1])
            except (BlockingIOError, OSError):
                continue  # the device is full, or down
        return self.packets[0][0] if self.packets else now_s + 1.0


def main() -> None:
    """Carry packets until standard input closes."""
    told = json.loads(sys.argv[1])
    rate, delay_s = told.get("mbit_per_s", 50.0) * 1e6 / 8, told.get("round_trip_s", 0.2) / 2
    (a, b), (at_a, at_b) = told["machines"], told["addresses"]
    ends = tun(a, at_a, at_b), tun(b, at_b, at_a)
    ways = {fd: Way(other, rate, delay_s, told.get("loss", 0.01), fd) for fd, other in (ends, ends[::-1])}
    print("ready", flush=True)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        now_s = time.monotonic()
        next_s = min(way.deliver(now_s) for way in ways.values())
        for fd in select.select(list(ways), [], [], min(max(next_s - time.monotonic(), 0.0), 0.2))[0]:
            try:
                for _ in range(64):
                    ways[fd].send(os.read(fd, MTU + 100), time.monotonic())
            except BlockingIOError:
                pass


if __name__ == "__main__":
    main()
