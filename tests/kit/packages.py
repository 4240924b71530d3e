"""Packages of plugins, as an installer leaves them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, module: str, code: str, points: Mapping[str, Mapping[str, str]]
) -> None:
    """Put a module into a folder on the path of this process, and beside it the metadata of a package of version 1.0.

    Args:
        points: the package's entry points: group → name → what it leads to.
    """
    metadata = folder / f"{module}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (folder / f"{module}.py").write_text(code)
    name = module.replace("_", "-")
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, targets in points.items():
        lines += [f"[{group}]", *(f"{point} = {target}" for point, target in targets.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
