"""The pages say what is: links lead somewhere, commands, flags, variables, metrics and messages exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import urllib.request
from functools import cache
from pathlib import Path

import pytest
from torch import nn

import atoll

sys.path.insert(0, str(Path(__file__).parent))
from pages import PAGES, ROOT, Commands, anchors, command_lines, inline_code, links, prose, require_command, table_rows

DOCS = ROOT / "docs"
SETTINGS = atoll.Settings().by_key()
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)

LEFTOVERS = re.compile(r"(?<![\w.])/(?:root|home|Users|mnt)/|\bTODO\b|\bFIXME\b|lorem ipsum", re.IGNORECASE)
"""Paths of somebody's own machine, and what should have been finished or left out."""


@by_page
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in links(page):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no such file"
        assert target.is_relative_to(ROOT), link
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


def test_every_page_is_reached_from_the_index() -> None:
    seen, todo = set[Path](), [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page not in seen and page.suffix == ".md":
            seen.add(page)
            todo += [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if "://" not in link]
    assert set(PAGES) <= seen


@by_page
def test_every_command_and_flag_exists(page: Path, commands: Commands) -> None:
    anywhere = flags_of_script("bench/round.py").union(*commands.values())
    for line in command_lines(page):
        for script, rest in re.findall(r"(?:^|[\s(])python ((?:bench|examples)/\S+\.py)([^\n]*)", line):
            flags = {word.partition("=")[0] for word in shlex.split(rest, comments=True) if re.match(r"--\S+$", word)}
            assert flags <= flags_of_script(script), f"{line!r}: no such flag"
        if re.match(r"--[a-z]", line):
            words = shlex.split(line, comments=True)
            assert {word.partition("=")[0] for word in words if word.startswith("--")} <= anywhere, line
        for called in re.findall(r"(?:^|[\s(])atoll ([a-z][^\n]*)", line):
            require_command(commands, called, line)


@cache
def flags_of_script(script: str) -> set[str]:
    """What its source names as `--flag`, and the parameters of its `main`, which typer makes flags of."""
    source = (ROOT / script).read_text(encoding="utf-8")
    mains = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "main"]
    names = [argument.arg.replace("_", "-") for main in mains for argument in main.args.args]
    return {
        "--help",
        *re.findall(r"[\"'](--[a-z_-]+)[\"']", source),
        *(f"--{no}{name}" for name in names for no in ("", "no-")),
    }


@by_page
def test_every_make_target_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for line in command_lines(page):
        for target in re.findall(r"(?:^|[\s(])make ([a-z]+)", line):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"


@by_page
def test_every_variable_exists(page: Path) -> None:
    known = {f"ATOLL_{key.upper().replace('.', '__')}" for key in SETTINGS}
    known.add("ATOLL_LEASES")  # `atoll worker` and its script tell each other by it
    known |= set(re.findall(r"ATOLL_\w+", (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")))
    written = set(re.findall(r"\bATOLL_[A-Z][A-Z_]*[A-Z]\b", page.read_text(encoding="utf-8")))
    if page.parent.name != "reference" and page.name != "behaviours.md":
        assert written <= known, written - known


OPTIONS = ("algorithm.mu", "algorithm.outer_optimizer.lr", "algorithm.outer_optimizer.momentum", "on_missed")
"""Options of a choice, and a field of an algorithm."""
ARGUMENTS = (
    "idle_timeout_s",
    "max_sync_retries",
    "min_clients",
    "min_responses",
    "min_sites",
    "num_clients",
    "num_rounds",
    "round_s",
)
"""Names that look like settings, and are arguments, or a field of a bench's result."""


def test_every_setting_in_the_pages_exists() -> None:
    """What looks like a setting with a unit, or is assigned a value in back quotes, is one."""
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        others = page.name == "behaviours.md" or page.name.startswith("from-")  # whose names are not ours alone
        for code in [] if others else inline_code(page):
            if found := re.fullmatch(r"([a-z_.]+) = .+", code):
                assert found.group(1) in {*SETTINGS, *OPTIONS}, f"{page.name}: {code}"
            if re.fullmatch(r"(heartbeat|idle|round|min|max|keep|num)_[a-z_]+", code):
                assert code in {*SETTINGS, *ARGUMENTS}, f"{page.name}: {code}"


@by_page
def test_nothing_is_left_over(page: Path) -> None:
    found = LEFTOVERS.search(page.read_text(encoding="utf-8"))
    assert found is None, f"{page.name}: {found}"


def test_the_diagrams_are_those_of_the_code(tmp_path: Path) -> None:
    page = tmp_path / "concepts.md"
    page.write_text((DOCS / "concepts.md").read_text(encoding="utf-8"), encoding="utf-8")
    subprocess.run([sys.executable, ROOT / "tools" / "diagrams.py", "--page", page], check=True)
    assert page.read_text(encoding="utf-8") == (DOCS / "concepts.md").read_text(encoding="utf-8"), (
        "run tools/diagrams.py: the transition tables have changed"
    )


def test_the_readme_has_one_table_of_figures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- figures -->") == text.count("<!-- /figures -->") == 1
    assert len(table_rows(ROOT / "README.md", "Measured")) == 9


@pytest.fixture(scope="module")
def texts() -> str:
    """Every piece of text in the package's source: constants, and what stands between the values of f-strings."""
    pieces = [
        node.value
        for path in (ROOT / "src" / "atoll").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return "\x00".join(pieces)


@pytest.mark.covers("X3")
def test_the_messages_in_operations_are_those_of_the_code(texts: str) -> None:
    quoted = [
        cells[0].strip("`") for cells in table_rows(DOCS / "operations.md", "Common errors") if cells[0][0] == "`"
    ]
    assert len(quoted) > 20
    for message in quoted:
        for piece in filter(None, message.split("…")):
            assert piece in texts, f"{message!r}: nobody says {piece!r}"


def rows_of(page: Path) -> list[list[str]]:
    """Cells of every table of a page, without the first rows."""
    headings = re.findall(r"^## (.+)$", prose(page), re.MULTILINE)
    return [row for heading in headings for row in table_rows(page, heading)]


@pytest.mark.covers("L26", "X3")
def test_the_messages_in_troubleshooting_are_those_of_the_code(texts: str) -> None:
    rows = rows_of(DOCS / "troubleshooting.md")
    assert len(rows) > 40
    assert {len(row) for row in rows} == {4}, [row for row in rows if len(row) != 4]
    quoted = [cells[0][1:].partition("`")[0] for cells in rows if cells[0].startswith("`")]
    assert len(quoted) > 35
    for message in quoted:
        for piece in filter(None, message.split("…")):
            assert piece in texts, f"{message!r}: nobody says {piece!r}"
    assert all(symptom and cause and remedy for symptom, cause, _, remedy in rows)


@pytest.mark.covers("L26")
def test_the_warning_of_staleness_names_its_part_of_troubleshooting(texts: str) -> None:
    named = re.search(r"See (docs/troubleshooting\.md), (.+)", texts)
    assert named is not None
    heading = named[2].partition("\x00")[0]
    assert any("versions behind" in row[0] for row in table_rows(ROOT / named[1], heading))


def test_the_metrics_in_operations_are_those_of_the_server(tmp_path: Path) -> None:
    written = set(re.findall(r"`(atoll_\w+)", prose(DOCS / "operations.md")))
    with atoll.Server(
        nn.Linear(2, 2), settings={"algorithm.name": "diloco", "network.port": 0, "disk.state_dir": tmp_path / "state"}
    ) as server:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
            served = set(re.findall(r"^# TYPE (\w+)", response.read().decode(), re.MULTILINE))
    assert written == served
