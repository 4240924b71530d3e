"""A site that cannot write a file of more than 1 MiB, and a type of payloads that are received into files."""

from __future__ import annotations

import resource
from typing import Any

import torch

import atoll
from atoll.objects import Stream, register


class Zeros:
    """8 MiB that are not held in memory."""


def produce(_: Zeros) -> Any:
    return Stream(torch.float32, (2**21,), lambda: (torch.zeros(2**18) for _ in range(8)))


def consume(sent: Any) -> Zeros:
    return Zeros()


register(Zeros, "test.zeros", produce, consume)

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
    with atoll.tasks() as worker:
        worker.task("count")(lambda _: 1)
        worker.run()
