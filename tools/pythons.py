"""Environments with other Pythons, for what needs no torch: .venv-3.12 and .venv-3.13, each where its Python is found.

make pythons                      # then `make test` runs tests/test_other_pythons.py with them
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.12", "3.13")
FOR_TESTS = {"pytest", "pytest-timeout", "hypothesis"}
"""Of the extra `test`: what the tests of the parts without torch import."""


def requirements() -> list[str]:
    """The package's own but for torch, and those of the tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = [line for line in project["dependencies"] if _name(line) != "torch"]
    return own + [line for line in project["optional-dependencies"]["test"] if _name(line) in FOR_TESTS]


def _name(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    return found[0] if found else ""


def environment(version: str) -> Path:
    """The interpreter that `make pythons` makes; it need not be there."""
    return ROOT / f".venv-{version}" / "bin" / "python"


def interpreter(version: str) -> Path | None:
    """One of that version on this machine, with or without packages; None where there is none."""
    return next((path for path in _candidates(version) if _says(path) == version), None)


def _candidates(version: str) -> Iterator[Path]:
    yield environment(version)
    found = shutil.which(f"python{version}")
    if found:
        yield Path(found)
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    yield from sorted(versions.glob(f"{version}.*/bin/python"), reverse=True)


def _says(path: Path) -> str | None:
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([str(path), "-c", ask], capture_output=True, text=True, check=False, timeout=60)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> int:
    for version in VERSIONS:
        python, target = interpreter(version), environment(version)
        if python is None:
            print(f"Python {version} is not found: its tests will be skipped.", file=sys.stderr)
            continue
        if not target.exists():
            subprocess.run([str(python), "-m", "venv", str(target.parents[1])], check=True)
        subprocess.run([str(target), "-m", "pip", "install", "--quiet", *requirements()], check=True)
        print(f"{target.parents[1].name}: Python {version}, {len(requirements())} packages", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
