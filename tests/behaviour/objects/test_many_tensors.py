"""5,000 small tensors against 50 of the same total: what is counted is what would cost.

5,000 x 3,200 bytes and 50 x 320,000 are 16 MB each, behind heads of 0.7 MB and 7 KB.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.proxy import Proxy
from object_world import differences

import atoll
from atoll import resolve

MANY, FEW = 5000, 50
TOTAL = 16_000_000
ROOT = Path(__file__).resolve().parents[3]


def tensors(count: int) -> dict[str, Any]:
    return {f"layer.{i}.weight": torch.full((TOTAL // 4 // count,), float(i)) for i in range(count)}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[list[int]]:
    """How often a function of `os` is called within, as the length of a list."""
    calls: list[int] = []
    real: Callable[..., Any] = getattr(os, name)

    def counting(*given: Any, **more: Any) -> Any:
        calls.append(1)
        return real(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, counting)
        yield calls


@pytest.mark.covers("T5", "P2")
def test_small_tensors_are_written_to_disk_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 MiB have 655 tensors of 3,200 bytes: ceil(5,000 / 655) = 8 writes, and one of the head, which is larger than
    256 KiB. The 50 are larger, too, and each is written from where it is; their head is gathered: 51."""
    for count, writes in ((MANY, 9), (FEW, 51)):
        with counted(monkeypatch, "pwrite") as calls:
            ref = atoll.objects.publish(tensors(count))
        assert len(calls) == writes
        assert differences(tensors(count), atoll.objects.fetch(ref)) == []


@pytest.mark.covers("T5")
@pytest.mark.parametrize("count", [MANY, FEW], ids=["many", "few"])
def test_requests_and_runs_do_not_grow_with_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """16 MB in parts of 8 MiB are 2 parts, and 2 requests over two connections; one for the head, one for the manifest.
    To disk each part is 4 runs of 2 MiB at most."""
    ref = atoll.objects.publish(tensors(count))
    with Proxy(ref.port) as proxy:
        through = dataclasses.replace(ref, port=proxy.port)
        with counted(monkeypatch, "pwrite") as writes:
            lazy = atoll.objects.fetch(through, to_disk=True)
        assert proxy.count("GET ") == 1 + 1 + 2
        assert len(writes) == 8
        proxy.requests.clear()
        target = {name: torch.zeros_like(tensor) for name, tensor in tensors(count).items()}
        atoll.objects.fetch(through, into=target)
        assert proxy.count("GET ") == 1 + 1 + 2
    assert differences(tensors(count), target) == []
    with counted(monkeypatch, "preadv") as reads:
        assert differences(tensors(count), resolve(lazy)) == []
    assert len(reads) == count  # each when it is asked for


@pytest.mark.covers("T5")
def test_small_tensors_set_off_no_search_for_cycles() -> None:
    """A collection begins with every 700 objects more, and every hundredth or so is one of all objects of the process.
    5,000 tensors in new memory are 7; what describes them would be 50 to 100."""
    begun: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        begun.append(phase)

    def collections(work: Callable[[], Any]) -> tuple[int, Any]:
        begun.clear()
        gc.callbacks.append(note)
        try:
            result = work()
        finally:
            gc.callbacks.remove(note)
        return begun.count("start"), result

    published = tensors(MANY)
    target = {name: torch.zeros_like(tensor) for name, tensor in published.items()}
    atoll.objects.withdraw(atoll.objects.publish(tensors(FEW)))  # what is made once is there
    assert gc.isenabled()
    publishing, ref = collections(lambda: atoll.objects.publish(published))
    into, _ = collections(lambda: atoll.objects.fetch(ref, into=target))
    to_disk, lazy = collections(lambda: atoll.objects.fetch(ref, to_disk=True))
    to_memory, state = collections(lambda: atoll.objects.fetch(ref))
    assert gc.isenabled()
    assert list(lazy) == list(state) == list(published)
    assert max(publishing, into, to_disk) <= 6
    assert to_memory <= 16


def test_leaves_the_garbage_collector_off_where_it_was_off() -> None:
    gc.disable()
    try:
        atoll.objects.fetch(atoll.objects.publish({"w": torch.zeros(2)}))
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.slow
def test_the_program_that_measures_it_runs(tmp_path: Path) -> None:
    argv = [sys.executable, str(ROOT / "bench/many_tensors.py"), "--gb", "0.02", "--repetitions", "1", "--json"]
    done = subprocess.run([*argv, "--dir", str(tmp_path)], capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert set(told) == {"50", "5000"}
    assert set(told["50"]) == {"publish", "fetch", "fetch into", "fetch to disk", "load", "lazily, both"}
