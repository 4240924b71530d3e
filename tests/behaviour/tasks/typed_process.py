"""A site with types of its own, as a process: argv is the server and the site's name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll.objects import Stream, register

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
import own_types  # noqa: F401 (it registers its types)


@dataclass(frozen=True)
class Word:
    """Has no tensors at all."""

    text: str


@dataclass(frozen=True)
class Local:
    """Known at this site alone."""

    number: int


class Torn:
    """Its stream breaks in the middle."""


class Short:
    """Its stream gives less than it says."""


def torn() -> Iterator[bytes]:
    yield bytes(1000)
    raise OSError("the disk is gone")


def refuse(sent: Any) -> Any:
    raise ValueError(f"never {sent}")


register(Word, "tests.word", lambda word: word.text, Word)
register(Torn, "tests.torn", lambda _: {"data": Stream(torch.uint8, (2000,), torn)}, lambda sent: Torn())
register(Short, "tests.short", lambda _: Stream(torch.int16, (3,), lambda: [torch.zeros(2, dtype=torch.int16)]), refuse)

if __name__ == "__main__":
    register(Local, "tests.site_only", lambda local: {"number": local.number, "w": torch.ones(2)}, refuse)
    with atoll.tasks(sys.argv[1], sys.argv[2]) as worker:

        @worker.task("echo")
        def echo(payload: Any) -> Any:
            return payload

        @worker.task("give")
        def give(name: str) -> Any:
            return {"it": {"torn": Torn, "short": Short, "local": lambda: Local(7)}[name]()}

        worker.run()
