"""What SECURITY.md names, and the SBOM of the wheel, which `make sbom` writes before a release."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import sbom
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_sbom_names_each_dependency_and_no_tool(tmp_path: Path) -> None:
    """The SBOM has each dependency of pyproject.toml with its version and purl, what these need, and no extra's."""
    document = json.loads(sbom.main(tmp_path / "atoll.cdx.json").read_text())
    assert (document["bomFormat"], document["metadata"]["component"]["name"]) == ("CycloneDX", "atoll")
    found = {canonicalize_name(each["name"]): each for each in document["components"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {canonicalize_name(Requirement(each).name) for each in project["dependencies"]}
    assert declared <= {*found}
    assert {"pydantic-core", "multidict", "cffi"} <= {*found}, "of pydantic, aiohttp and cryptography"
    assert not {"pytest", "schemathesis", "matplotlib", "cyclonedx-bom"} & {*found}
    for name in declared:
        assert found[name]["version"]
        assert found[name]["purl"].startswith("pkg:pypi/"), name
    graph = {each["ref"]: each["dependsOn"] for each in document["dependencies"]}
    root = document["metadata"]["component"]["bom-ref"]
    assert {canonicalize_name(ref.partition("==")[0]) for ref in graph[root]} == declared


def test_an_sbom_that_lacks_a_package_is_noticed() -> None:
    """What is needed is found by the metadata of installed packages; a package that is not installed is an error."""
    assert {"numpy", "torch"} <= sbom.needed(["torch"]) | {"numpy"}
    with pytest.raises(Exception, match="no-such-package-of-atoll"):
        sbom.needed(["no-such-package-of-atoll"])
    assert sbom.needed(["no-such-package-of-atoll; python_version < '3'"]) == set()


def test_the_tests_that_security_names_exist() -> None:
    """Each test file and folder that SECURITY.md names exists; names without a folder are in that of the one before."""
    text = (ROOT / "SECURITY.md").read_text()
    rows = [line for line in text.splitlines() if "`tests/" in line]
    assert len(rows) >= 10
    for row in rows:
        folder = ROOT
        for name in re.findall(r"`((?:tests/|test_)[\w/.]+)`", row):
            path = ROOT / name if name.startswith("tests/") else folder / name
            assert path.exists(), name
            folder = path.parent if path.is_file() else path
