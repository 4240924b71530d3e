"""One end of a reference as a process."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from kit.payloads import plain
from object_world import TREES

import atoll
from atoll import resolve


class File:
    """An abort event that another process sets, by making a file."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def is_set(self) -> bool:
        return self._path.exists()


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
    print("same" if plain(came) == plain(expected) else f"another payload: {came}")


try:
    {"publish": publish, "fetch": fetch}[sys.argv[1]](**json.loads(sys.argv[2]))
except atoll.AtollError as error:
    print(f"{type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    os._exit(error.exit_code)
