"""Two network namespaces that only a virtual cable connects; skips where there are none, as without root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SERVER, SITE = "10.209.77.1", "10.209.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextmanager
def two_machines(mbit_per_s: float | None = None) -> Iterator[tuple[str, str]]:
    """Names of two network namespaces with the addresses `SERVER` and `SITE`.

    Args:
        mbit_per_s: what the cable carries, each way; None: as much as the machine can.
    """
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and the command ip")
    names = f"atoll-server-{os.getpid()}", f"atoll-site-{os.getpid()}"
    cables = f"as{os.getpid()}", f"at{os.getpid()}"
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            here, there = (("name", cable, "netns", name) for cable, name in zip(cables, names, strict=True))
            ip("link", "add", *here[1:], "type", "veth", "peer", *there)
            for name, cable, address in zip(names, cables, (SERVER, SITE), strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
                ip("-n", name, "link", "set", cable, "up")
                ip("-n", name, "link", "set", "lo", "up")
                if mbit_per_s is not None:
                    pace = f"tbf rate {mbit_per_s}mbit burst 64kb latency 200ms"
                    tc = f"netns exec {name} tc qdisc add dev {cable} root {pace}"
                    ip(*tc.split())
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            pytest.skip(f"this machine allows no network namespaces: {getattr(error, 'stderr', error)!r}")
        yield names


@contextmanager
def long_line() -> Iterator[tuple[str, str, str]]:
    """Names of the two namespaces with a line of 50 Mbit/s between them, a round trip of 200 ms and 1 % of loss, and
    the server's address on it. TCP is CUBIC.
    """
    far = ["10.209.78.1", "10.209.78.2"]
    with two_machines() as machines:
        told = json.dumps({"machines": machines, "addresses": far})
        line = subprocess.Popen(
            [sys.executable, "-m", "harness.lossy_line", told],
            env=os.environ | {"PYTHONPATH": str(TESTS)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert line.stdout is not None
            if line.stdout.readline() != b"ready\n":
                pytest.skip("this machine allows no tun devices")
            yield *machines, far[0]
        finally:
            line.kill()
            line.wait()
