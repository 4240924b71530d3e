"""The site's records: put your own here. These are on every machine: Python's own sources, of which each takes some."""

import sysconfig
import zlib
from pathlib import Path

import torch
from torch import Tensor


def records(site: str, context: int, count: int = 256) -> list[dict[str, Tensor]]:
    """Windows of bytes, as a Trainer takes them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.glob("*.py") if path.stat().st_size > 1000)[:200]
    mine = [
        path for path in files if zlib.crc32(f"{site} {path.name}".encode()) % 2
    ]  # half of them, by the site's name
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in mine)), dtype=torch.uint8).long()
    starts = torch.linspace(0, len(text) - context, count).long().tolist()
    rows = [text[start : start + context] for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]
