"""What an experiment leaves in `docs/results/`: NAME.json (settings, figures, gates), NAME.md (a table), NAME.png."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import atoll

FOLDER = Path(__file__).parents[2] / "docs" / "results"


@dataclass(frozen=True)
class Gate:
    """A figure that was promised, and what it came to.

    Attributes:
        bar: what `value` was to be, in words.
        note: what was tried, where it is missed.
    """

    name: str
    value: float
    bar: str
    ok: bool
    note: str = ""


def write(
    name: str,
    *,
    title: str,
    command: str,
    settings: Mapping[str, Any],
    figures: Mapping[str, Any],
    gates: Sequence[Gate],
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    text: str = "",
    folder: Path = FOLDER,
) -> None:
    """Write the table and the figures of one run; a plot beside them is the program's own.

    Args:
        name: of the files.
        command: what was run, so that it can be run again.
        header, rows: the table.
        text: what the reader should know besides.
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "settings": {**settings, "command": command},
        "machine": machine(),
        "figures": figures,
        "gates": [asdict(gate) for gate in gates],
    }
    (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
    lines = [f"# {title}", "", f"`{command}`", "", _row(header), _row(["---"] * len(header)), *map(_row, rows), ""]
    if text:
        lines += [text.strip(), ""]
    lines += [_row(["gate", "measured", "bar", ""]), _row(["---"] * 4)]
    lines += [_row([g.name, _figure(g.value), g.bar, "met" if g.ok else f"**missed** {g.note}"]) for g in gates]
    if (folder / f"{name}.png").exists():
        lines += ["", f"![{title}]({name}.png)"]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def machine() -> dict[str, Any]:
    """What the figures were measured with: the commit, torch, and what the CPU can do, which decides the bits."""
    return {
        "commit": _commit(),
        "atoll": atoll.__version__,
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
    }


def _commit() -> str:
    """The commit of the checkout, with a + if files differ from it; empty outside a checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False)
    return found.stdout.strip()[:12] + ("+" if changed.stdout else "") if found.returncode == 0 else ""


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(_figure(cell) for cell in cells)} |"


def _figure(cell: Any) -> str:
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)
