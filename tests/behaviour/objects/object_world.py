"""What the tests of objects publish, and how they start the other end as a process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness.processes import Nursery, Process, wait_until
from torch import Tensor, nn

from atoll import TensorRef

SCRIPT = Path(__file__).with_name("object_process.py")
PART = 2**16


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


TREES = {"flat": flat, "nested": nested, "large": large}


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


def fetching(nursery: Nursery, folder: Path, ref: TensorRef, **options: Any) -> Process:
    """A process that fetches, holds what came against what it should be, and prints "same" or what went wrong."""
    told = json.dumps({"ref": str(ref), **options})
    return nursery.start(str(SCRIPT), "fetch", told, cwd=folder)


def said(process: Process, timeout_s: float = 30.0) -> str:
    """All that it printed, once it has ended."""
    process.wait(timeout_s)
    return process.output().strip()
