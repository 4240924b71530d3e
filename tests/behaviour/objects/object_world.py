"""What the tests of objects publish, what HTTP says of it, and how they start the other end as a process."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.processes import Nursery, Process, wait_until
from kit.requests import send
from torch import Tensor, nn

from atoll import TensorRef

SCRIPT = Path(__file__).with_name("object_process.py")
PART = 2**16
SIZES = ("ATOLL_WORKFLOW__TENSOR_PART_BYTES", "ATOLL_WORKFLOW__ARRAY_PART_BYTES")
"""The variables with the size of a part: of torch tensors, and of arrays. 0: inline."""


def manifest_of(ref: TensorRef) -> dict[str, Any]:
    """What a publisher, or a server, says of an object."""
    status, manifest = send(ref.server, "GET", f"/v1/objects/{ref.object}", secret=ref.secret)
    assert status == 200, manifest
    return manifest


def nameless_files(folder: Path) -> int:
    """Files without a name in a folder that this process has open."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            target = str(entry.readlink())
            found += target.startswith(str(folder)) and target.endswith("(deleted)")
    return found


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


def differences(mine: Any, theirs: Any, path: str = "") -> list[str]:
    """Places where two trees differ: in kind, dtype, shape or bits."""
    if type(mine) is not type(theirs):
        return [f"{path}: {type(mine).__name__} and {type(theirs).__name__}"]
    if isinstance(mine, dict):
        if list(mine) != list(theirs):
            return [f"{path}: {list(mine)} and {list(theirs)}"]
        return [each for key in mine for each in differences(mine[key], theirs[key], f"{path}/{key}")]
    if isinstance(mine, list | tuple):
        if len(mine) != len(theirs):
            return [f"{path}: {len(mine)} and {len(theirs)} items"]
        return [
            each for i, pair in enumerate(zip(mine, theirs, strict=True)) for each in differences(*pair, f"{path}/{i}")
        ]
    if isinstance(mine, Tensor):
        same = mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine, theirs)
    elif isinstance(mine, np.ndarray):
        same = mine.dtype == theirs.dtype and mine.shape == theirs.shape and bool((mine == theirs).all())
    else:
        same = mine == theirs
    return [] if same else [f"{path}: {mine!r} and {theirs!r}"]


def publishing(nursery: Nursery, folder: Path, what: str, **options: Any) -> tuple[Process, TensorRef]:
    """A process that publishes `what` and waits, and the reference that it printed."""
    process = nursery.start(str(SCRIPT), "publish", json.dumps({"what": what, **options}), cwd=folder)
    text = wait_until(lambda: process.output() if "\n" in process.output() else "", "the reference")
    assert text.startswith("atoll-ref"), text
    return process, TensorRef.parse(text.strip())


def fetching(nursery: Nursery, folder: Path, ref: TensorRef, failpoints: str = "", **options: Any) -> Process:
    """A process that fetches, holds what came against what it should be, and prints "same" or what went wrong."""
    told = json.dumps({"ref": str(ref), **options})
    return nursery.start(str(SCRIPT), "fetch", told, cwd=folder, failpoints=failpoints)


def paused(nursery: Nursery, folder: Path, ref: TensorRef, **options: Any) -> tuple[Process, Path]:
    """A process that fetches `large()` and stands still in the middle, and the file that lets it go on.

    Each of its two connections has brought a part of the tensors; the first part of all is that of the head.
    """
    go = folder / "go"
    process = fetching(nursery, folder, ref, f"pull.part=pause:{go}@2,3", what="large", **options)
    wait_until(Path(f"{go}.reached").exists, "the first part of the tensors")
    return process, go


def said(process: Process, timeout_s: float = 30.0) -> str:
    """All that it printed, once it has ended."""
    process.wait(timeout_s)
    return process.output().strip()
