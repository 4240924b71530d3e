"""One end of a reference as a process."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from object_world import TREES, differences

import atoll
from atoll import resolve


class File:
    """An abort event that another process sets, by making a file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def is_set(self) -> bool:
        return self._path.exists()


def anonymous_kb() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def grown_mb(work: Any) -> float:
    """By how much anonymous memory grew meanwhile, at most, in MiB."""
    before, peak, done = anonymous_kb(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_kb() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    work()
    done.set()
    thread.join()
    return peak[0] / 1024


def across(mb: int) -> torch.Tensor:
    return torch.arange(mb * 2**18, dtype=torch.int32).reshape(1024, -1).t()  # not contiguous


def publish(what: str, **options: Any) -> None:
    print(atoll.objects.publish(TREES[what](), **options), flush=True)
    if "server" not in options:
        signal.pause()


def fetch(ref: str, how: str = "memory", what: str = "flat", abort: str = "", **options: Any) -> None:
    if abort:
        options["abort"] = File(abort)
    came = atoll.objects.fetch(ref, to_disk=how == "disk", **options)
    if came is None:
        print("none")
        return
    expected = TREES[what]()
    if how == "disk":  # lazily it is torch that comes
        came, expected = resolve(came), {key: torch.as_tensor(value) for key, value in expected.items()}
    print(differences(expected, came) or "same")


def measure(mb: int) -> None:
    tensor = across(mb)
    held: dict[str, Any] = {}
    atoll.objects.publish({"small": torch.zeros(1)})  # modules and threads come with the first
    publishing = grown_mb(lambda: held.update(ref=atoll.objects.publish({"w": tensor}, chunk_bytes=16 * 2**20)))
    ref = str(held["ref"])
    print(json.dumps({"publish": publishing, "ref": ref}), flush=True)
    signal.pause()


def measure_fetch(ref: str, mb: int) -> None:
    held: dict[str, Any] = {}
    small = atoll.objects.publish({"small": torch.zeros(1)})
    atoll.objects.fetch(str(small))  # as above
    grown = grown_mb(lambda: held.update(state=atoll.objects.fetch(ref, to_disk=True)))
    target = torch.zeros(mb * 256, 1024, dtype=torch.int32)
    target.add_(1)  # its pages are there before
    into = grown_mb(lambda: atoll.objects.fetch(ref, into={"w": target}))
    assert torch.equal(target, across(mb))
    print(json.dumps({"disk": grown, "into": into}), flush=True)


try:
    {"publish": publish, "fetch": fetch, "measure": measure, "measure_fetch": measure_fetch}[sys.argv[1]](
        **json.loads(sys.argv[2])
    )
except atoll.AtollError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    os._exit(error.exit_code)
