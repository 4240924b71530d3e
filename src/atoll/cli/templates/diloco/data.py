"""The worker's data: put your own here. These are on every machine: Python's own sources, of which each takes some."""

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

FILES = 200
"""Sources that are read."""


def text_of(site: str) -> Tensor:
    """A worker's share of the sources, as bytes."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.glob("*.py") if path.stat().st_size > 1000)[:FILES]
    mine = [
        path for path in files if zlib.crc32(f"{site} {path.name}".encode()) % 2
    ]  # half of them, by the site's name
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in mine)), dtype=torch.uint8)


def batches(site: str, context: int, size: int = 16) -> Iterator[Tensor]:
    """Windows [size, context + 1], without end."""
    text = text_of(site)
    generator = torch.Generator().manual_seed(zlib.crc32(site.encode()))
    while True:
        starts = torch.randint(len(text) - context - 1, (size,), generator=generator).tolist()
        yield torch.stack([text[start : start + context + 1] for start in starts]).long()
