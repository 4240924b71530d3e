"""Two network namespaces that only a virtual cable connects; skips where there are none, as without root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

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
