"""tools/behaviours.py on a small planted checkout: every place of a mark is read, unknown ids are refused."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "behaviours.py"

LIST = """
[groups]
D = "Disk"
F = "Faults"

[behaviours]
D1 = "Flat."
D2 = "Bytes."
F1 = "Killed."
F2 = "Stopped."
"""

SUITE = """
class CodecContract:
    @pytest.mark.covers("D2")
    def test_rate(self): ...
    def test_plain(self): ...
"""


def run_tool(root: Path, test_source: str) -> subprocess.CompletedProcess[str]:
    """The tool on a checkout whose one test file holds `test_source`."""
    for name, text in {
        "docs/behaviours.toml": LIST,
        "src/atoll/testing/contracts.py": SUITE,
        "tests/room/test_it.py": test_source,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return subprocess.run([sys.executable, TOOL, "--root", root], capture_output=True, text=True, check=False)


def shown(root: Path) -> dict[str, list[str]]:
    """Behaviour → tests, as the written page says."""
    result: dict[str, list[str]] = {}
    for line in (root / "docs" / "behaviours.md").read_text().splitlines():
        if line.startswith("- **"):
            name = line.split("**")[1]
            result[name] = []
        elif line.startswith("  - `"):
            result[name].append(line.strip(" -`").removeprefix("tests/room/test_it.py::"))
    return result


def test_behaviours_without_tests_are_listed_first(tmp_path: Path) -> None:
    """The page lists the behaviours without a test first. Each other behaviour has the list of its tests."""
    source = """
        @pytest.mark.covers("F1", "D1")
        def test_one(): ...

        def test_without(): ...
    """
    outcome = run_tool(tmp_path, source)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout == "2 of 4 behaviours are shown by a test.\n"
    assert shown(tmp_path) == {"D2": [], "F2": [], "D1": ["test_one"], "F1": ["test_one"]}
    text = (tmp_path / "docs" / "behaviours.md").read_text()
    assert text.index("Without a test") < text.index("**D2** Bytes.") < text.index("## D. Disk") < text.index("**D1**")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        pytest.param(
            """
            pytestmark = [pytest.mark.covers("F1")]
            def test_a(): ...
            """,
            {"F1": ["test_a"]},
            id="module",
        ),
        pytest.param(
            """
            @pytest.mark.covers("F1")
            class TestIt:
                @pytest.mark.covers("F2")
                def test_a(self): ...
                async def test_b(self): ...
            """,
            {"F1": ["TestIt::test_a", "TestIt::test_b"], "F2": ["TestIt::test_a"]},
            id="class",
        ),
        pytest.param(
            """
            CASES = [pytest.param(1, marks=pytest.mark.covers("F1")), 2]
            @pytest.mark.parametrize("n", CASES)
            def test_a(n): ...
            @pytest.mark.parametrize("n", [pytest.param(1, marks=[pytest.mark.covers("F2")])])
            def test_b(n): ...
            """,
            {"F1": ["test_a"], "F2": ["test_b"]},
            id="parameters",
        ),
        pytest.param(
            """
            from atoll.testing import codecs
            class TestInt8(codecs.CodecContract):
                def test_own(self): ...
            """,
            {"D2": ["TestInt8::test_rate"]},
            id="contract-suite",
        ),
    ],
)
def test_marks_are_read_where_pytest_allows_them(tmp_path: Path, source: str, expected: dict[str, list[str]]) -> None:
    """The tool reads marks of modules, classes, tests and parameters, and the marks of an inherited contract suite."""
    outcome = run_tool(tmp_path, source)
    assert outcome.returncode == 0, outcome.stderr
    assert {name: tests for name, tests in shown(tmp_path).items() if tests} == expected


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ('@pytest.mark.covers("D9")\ndef test_a(): ...', "test_it.py::test_a: there is no behaviour 'D9'"),
        (
            "@pytest.mark.covers(NAME)\ndef test_a(): ...",
            "test_it.py:1: write the ids of covers(...) as plain strings",
        ),
        ('@pytest.mark.covers("D1")\ndef helper(): ...', "test_it.py:1: this mark belongs to no test"),
    ],
)
def test_an_invalid_mark_is_refused(tmp_path: Path, source: str, complaint: str) -> None:
    """If a mark has an unknown behaviour, has no plain string or belongs to no test, the tool fails and writes no
    page.
    """
    outcome = run_tool(tmp_path, source)
    assert outcome.returncode == 1
    assert complaint in outcome.stderr
    assert not (tmp_path / "docs" / "behaviours.md").exists()
