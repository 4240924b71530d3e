"""A workflow whose payloads and answers pass through filters, to its end; two sites in threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kit.workflows import workflow_server
from torch import Tensor

import atoll
from atoll.filters import CHUNK_ELEMENTS, Filter


@contextmanager
def serving(folder: Path, workflow: Callable[[Any], None], **options: Any) -> Iterator[atoll.Server]:
    """To the workflow's end; then nothing is left of what was sent and answered."""
    with workflow_server(folder, workflow, **options) as server:
        yield server
        assert server.wait(60)
        server.run()
        assert left(folder) == []


def left(folder: Path) -> list[str]:
    """Files of objects that the server has, with a name or without."""
    found = [str(path) for path in (folder / "state" / "objects").glob("*")]
    for entry in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(str(folder / "state" / "objects")):
                found.append(target)
    return found


@contextmanager
def sites(server: atoll.Server, handlers: dict[str, Callable[[Any], Any]], **filters: Any) -> Iterator[None]:
    """Sites a and b, in threads: each answers with the handler of a task's name."""
    with ExitStack() as stack:
        threads = []
        for name in "ab":
            worker = stack.enter_context(atoll.tasks(server.url, name, filters=filters.get(name, ())))
            for task, handler in handlers.items():
                worker.task(task)(handler)
            threads.append(threading.Thread(target=worker.run))
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join(60)


def model() -> dict[str, Any]:
    return {"model": {"w": torch.tensor([3.0, 4.0]), "head": np.zeros(2)}, "n": torch.tensor(9), "lr": 0.5}


def plain(tree: Any) -> Any:
    """With lists for tensors and arrays."""
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return tree.tolist() if isinstance(tree, Tensor | np.ndarray) else tree


class Halved(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        assert len(values) <= CHUNK_ELEMENTS
        return values.div_(2)


class Broken(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        if name == "model.w":
            raise KeyError("salt")
        return values
