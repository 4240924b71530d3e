"""What the tests of objects publish, and the other end of a reference as a process or behind a proxy."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.processes import Nursery, Process, wait_until
from harness.proxy import Fault, Proxy
from torch import nn

from atoll import TensorRef

SCRIPT = Path(__file__).with_name("object_process.py")
PART = 2**16


def connections_at(port: int) -> int:
    """Connections that whatever listens on this port of 127.0.0.1 has taken and not closed yet."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listens, of_no_process = "0A", "0"
    mine = [line for line in lines if int(line[1].partition(":")[2], 16) == port]
    return sum(line[3] != listens and line[9] != of_no_process for line in mine)


def flat() -> dict[str, Any]:
    """1 MiB and a little: `w` alone has 16 parts of 64 KiB; values that tell every element from the next."""
    return {
        "w": torch.arange(2**18, dtype=torch.float32).reshape(512, 512),
        "half": torch.arange(1000, dtype=torch.float32).to(torch.bfloat16),
        "across": torch.arange(600, dtype=torch.int64).reshape(20, 30).t(),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "array": np.arange(12, dtype=np.int16).reshape(3, 4),
    }


def nested() -> dict[str, Any]:
    """Two subtrees with tensors, and plain values around them."""
    shared = torch.ones(7)
    return {
        "model": {"layers": [flat()["w"], {"bias": shared}], "again": shared},
        "result": (np.float32(2.5), b"\x00\xff", None, {3: [torch.tensor(1.5)]}),
        "name": "task",
    }


def model() -> nn.Module:
    """With tied weights, buffers, and values of its own."""
    torch.manual_seed(3)
    built = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    built[2].weight = built[0].weight
    return built


def large() -> dict[str, Any]:
    """128 MiB: in parts of 16 MiB, most of which do not fit into sockets."""
    return {"w": torch.zeros(2**25)}


TREES = {"flat": flat, "large": large}


def start_publisher(nursery: Nursery, folder: Path, what: str, **options: Any) -> tuple[Process, TensorRef]:
    """A process that publishes `what` and waits, and the reference that it printed."""
    process = nursery.start(str(SCRIPT), "publish", json.dumps({"what": what, **options}), cwd=folder)
    text = wait_until(lambda: process.output() if "\n" in process.output() else "", "the reference")
    assert text.startswith("atoll-ref"), text
    return process, TensorRef.parse(text.strip())


def start_fetch(nursery: Nursery, folder: Path, ref: TensorRef, failpoints: str = "", **options: Any) -> Process:
    """A process that fetches, and prints "same" where that is what was published, or else what went wrong."""
    arguments = json.dumps({"ref": str(ref), **options})
    return nursery.start(str(SCRIPT), "fetch", arguments, cwd=folder, failpoints=failpoints)


def start_paused_fetch(nursery: Nursery, folder: Path, ref: TensorRef, **options: Any) -> tuple[Process, Path]:
    """A process that fetches `large()` and stands still in the middle, and the file that lets it go on.

    Each of its two connections has brought a part of the tensors; the first part of all is that of the head.
    """
    go = folder / "go"
    process = start_fetch(nursery, folder, ref, f"pull.part=pause:{go}@2,3", what="large", **options)
    wait_until(Path(f"{go}.reached").exists, "the first part of the tensors")
    return process, go


def output_of(process: Process, timeout_s: float = 30.0) -> str:
    """All that it printed, once it has ended."""
    process.wait(timeout_s)
    return process.output().strip()


@contextmanager
def through_proxy(ref: TensorRef, *faults: Fault) -> Iterator[tuple[Proxy, TensorRef]]:
    """A proxy in front of the publisher, and the reference that leads through it."""
    with Proxy(ref.port) as proxy:
        proxy.faults += faults
        yield proxy, dataclasses.replace(ref, port=proxy.port)
