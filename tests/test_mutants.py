"""tests/mutants.toml applies to the sources as they are; tools/mutants.py reports what does not, or is not noticed."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness.fork_server import fresh_processes

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "mutants.py"

MUTANT = {
    "id": "minus",
    "meaning": "it subtracts",
    "file": "src/atoll/sums.py",
    "find": "a + b",
    "replace": "a - b",
    "tests": ["tests/test_sums.py::test_sum"],
}


def run_tool(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    with fresh_processes():  # they import another package `atoll`
        return subprocess.run(
            [sys.executable, str(TOOL), "--root", str(root), *words], capture_output=True, text=True, timeout=100
        )


def planted(root: Path, *mutants: dict[str, object]) -> Path:
    """A checkout with one function, two tests, and these mutants."""
    entries = ("".join(f"{key} = {value!r}\n" for key, value in mutant.items()) for mutant in mutants)
    for name, text in {
        "pyproject.toml": "",
        "src/atoll/__init__.py": "",
        "src/atoll/sums.py": "def add(a, b):\n    return a + b  # a sum\n",
        "tests/test_sums.py": """
            from atoll.sums import add

            def test_sum():
                assert add(1, 2) == 3

            def test_zero():
                assert add(1, 0) == 1

            class TestMore:
                def test_more(self): ...
        """,
        "tests/mutants.toml": "".join(f"[[mutants]]\n{entry}" for entry in entries),
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    return root


def test_every_mutant_applies_and_its_tests_exist() -> None:
    done = run_tool(ROOT, "--check")
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.split()[0]) >= 80


@pytest.mark.parametrize(
    "change",
    [
        {"find": "a * b"},  # not there
        {"find": "a"},  # more than once
        {"find": ""},
        {"replace": "a -"},  # no Python
        {"find": "# a sum", "replace": "# another"},  # changes no code
        {"file": "src/atoll/none.py"},
        {"file": "tests/test_sums.py"},
        {"tests": []},
        {"tests": ["tests/test_sums.py::test_none"]},
        {"tests": ["tests/test_none.py::test_sum"]},
        {"tests": ["tests/test_sums.py"]},
        {"tests": ["tests/test_sums.py::TestMore::test_none"]},
        {"why": "no such key"},
    ],
    ids=str,
)
def test_an_invalid_mutant_is_an_error(tmp_path: Path, change: dict[str, object]) -> None:
    """The tool fails and names a mutant that does not fit its file, changes no code, has no existing test, or has an
    unknown key.
    """
    done = run_tool(planted(tmp_path, MUTANT | change), "--check")
    assert (done.returncode, "minus" in done.stdout) == (2, True), done.stdout


def test_mutant_ids_must_be_unique(tmp_path: Path) -> None:
    """The tool fails if two mutants have the same id, or if `--only` has an unknown id."""
    assert run_tool(planted(tmp_path, MUTANT, MUTANT), "--check").returncode == 2
    assert run_tool(planted(tmp_path, MUTANT, MUTANT | {"id": "other"}), "--check").returncode == 0
    assert run_tool(tmp_path, "--check", "--only", "none").returncode == 2


def test_an_unnoticed_mutant_is_an_error(tmp_path: Path) -> None:
    """The tool runs the tests of each mutant. If no test notices a mutant, the tool fails and reports it."""
    # The sources stay unchanged.
    blind = MUTANT | {"id": "blind", "tests": ["tests/test_sums.py::test_zero"]}
    planted(tmp_path, MUTANT, blind)
    source = (tmp_path / "src/atoll/sums.py").read_text()
    noticed = run_tool(tmp_path, "--only", "minus")
    assert noticed.returncode == 0, noticed.stdout
    assert "| minus | it subtracts | test_sums.py::test_sum |" in noticed.stdout
    both = run_tool(tmp_path)
    assert both.returncode == 1, both.stdout
    assert "| blind | it subtracts | **nothing** |" in both.stdout
    assert "1 of 2 faults noticed" in both.stdout
    assert (tmp_path / "src/atoll/sums.py").read_text() == source


def test_mutant_tests_must_pass_without_the_mutant(tmp_path: Path) -> None:
    """If a mutant's tests fail without the mutant, the tool fails and does not report the mutant as noticed."""
    planted(tmp_path, MUTANT)
    (tmp_path / "src/atoll/sums.py").write_text("def add(a, b):\n    return a + b + 1\n")
    done = run_tool(tmp_path)
    assert done.returncode == 1
    assert "noticed" not in done.stdout
