"""Write the SBOM of the wheel in CycloneDX: Atoll, what it needs at run time, and what that needs, as installed here.

python tools/sbom.py                       # build/atoll-VERSION.cdx.json
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def needed(requirements: Iterable[str], extras: Iterable[str] = (), found: set[str] | None = None) -> set[str]:
    """Return the names of the installed packages that these requirements lead to on this machine."""
    found = set() if found is None else found
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        if name not in found or requirement.extras:
            found.add(name)
            needed(importlib.metadata.requires(name) or (), requirement.extras, found)
    return found


def of_wheel(document: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Return an SBOM of an environment with these packages alone."""
    kept = [each for each in document["components"] if canonicalize_name(each["name"]) in names]
    refs = {each["bom-ref"] for each in kept} | {document["metadata"]["component"]["bom-ref"]}
    graph = [
        {"ref": each["ref"], "dependsOn": sorted(refs.intersection(each.get("dependsOn", ())))}
        for each in document["dependencies"]
        if each["ref"] in refs
    ]
    return {**document, "components": kept, "dependencies": graph}


def main(out: Path | None = None) -> Path:
    """Write the SBOM, and return its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    out = out or ROOT / "build" / f"atoll-{project['version']}.cdx.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        whole = Path(name, "environment.json")
        argv = ["environment", "--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "-o", str(whole)]
        # it validates what it writes
        subprocess.run(
            [sys.executable, "-m", "cyclonedx_py", *argv, "--output-format", "JSON", sys.executable], check=True
        )
        document = of_wheel(json.loads(whole.read_text()), needed(project["dependencies"]))
    out.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")
    return out


if __name__ == "__main__":
    print(main())
