"""Types of one's own in tasks: a file on disk, and a tensor in a format of its own.

    python examples/own_types.py

The workflow sends the site a quantised tensor; the site answers with a file. Neither is ever whole in memory as bytes:
the file is read, sent and written in runs of some MiB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import atoll
from atoll.objects import Stream, register

ARRIVED = tempfile.TemporaryDirectory(prefix="arrived-")
"""Where files come to lie; removed when the process ends."""


# -- a file


@dataclass(frozen=True)
class File:
    """A file of this machine. The receiver gets one of its own, in a new folder."""

    path: Path


def produce_file(file: File) -> dict[str, Any]:
    def chunks() -> Iterator[bytes]:
        with file.path.open("rb") as source:
            while run := source.read(2**20):
                yield run

    size = file.path.stat().st_size
    return {"name": file.path.name, "bytes": Stream(torch.uint8, (size,), chunks)}


def consume_file(sent: dict[str, Any]) -> File:
    name = Path(sent["name"]).name  # a peer does not decide where it goes
    path = Path(tempfile.mkdtemp(dir=ARRIVED.name)) / name
    with path.open("wb") as target:
        for run in sent["bytes"].runs():
            target.write(run.numpy())
    return File(path)


# -- a tensor in 8 bits


@dataclass(frozen=True)
class Quantised:
    """A matrix as codes [rows, columns] of 8 bits, and a scale [rows] in fp32 for each row."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def of(cls, matrix: Tensor) -> Quantised:
        scale = matrix.abs().amax(dim=1).clamp(min=1e-12) / 127
        return cls((matrix / scale[:, None]).round().to(torch.int8), scale)

    def dense(self) -> Tensor:
        return self.codes * self.scale[:, None]


def produce_quantised(value: Quantised) -> dict[str, Any]:
    return {"codes": value.codes, "scale": value.scale}  # tensors travel in runs by themselves


def consume_quantised(sent: dict[str, Any]) -> Quantised:
    return Quantised(**sent)


# Both sides register the same names; here they run the same file.
register(File, "examples.file", produce_file, consume_file)
register(Quantised, "examples.quantised", produce_quantised, consume_quantised)


# -- at the server


def main(controller: Any) -> None:
    matrix = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    sent = Quantised.of(matrix)
    (result,) = controller.broadcast("train", {"weights": sent}, min_responses=1, timeout_s=60)
    file = result.payload["log"]
    print(f"{file.path.name}: {file.path.stat().st_size} bytes", flush=True)
    print(file.path.read_text().splitlines()[0], flush=True)
    print("the dense matrix has the same bits:", result.payload["sum"] == sent.dense().sum().item(), flush=True)


# -- at a site


def site() -> None:
    """ATOLL_SERVER and ATOLL_SITE name the run and this site."""
    with tempfile.TemporaryDirectory() as folder, atoll.tasks(os.environ["ATOLL_SERVER"]) as worker:

        @worker.task("train")
        def train(payload: dict[str, Any]) -> dict[str, Any]:
            weights = payload["weights"].dense()
            log, norm = Path(folder) / "training.log", weights.norm().item()
            log.write_text("".join(f"step {step}: norm {norm:.3f}\n" for step in range(100_000)))
            return {"log": File(log), "sum": weights.sum().item()}

        worker.run()


if __name__ == "__main__":
    if "ATOLL_SITE" in os.environ:
        site()
    else:
        with (
            tempfile.TemporaryDirectory() as folder,
            atoll.Server(workflow=main, settings={"network.port": 0, "disk.state_dir": f"{folder}/state"}) as server,
        ):
            told = os.environ | {"ATOLL_SERVER": server.url, "ATOLL_SITE": "clinic-a"}
            worker = subprocess.Popen([sys.executable, __file__], env=told)
            server.run()
            sys.exit(worker.wait())
