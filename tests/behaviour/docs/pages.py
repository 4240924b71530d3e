"""The project's pages for people, as the tests read them: code blocks, links, headings, and what is written as
code.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]

Commands = Mapping[str, frozenset[str]]
"""Command, such as "config show", → its flags; "" is `atoll` itself."""

_FENCE = re.compile(r"^ *```(.*)$")
_MARK = re.compile(r"^<!-- run: (\w+) -->$")
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its info string, its first line's number, and the name in `<!-- run: name -->` above it."""

    info: str
    line: int
    text: str
    name: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    info: str | None = None
    begin, name, held = 0, "", list[str]()
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence and info is None:
            info, begin, held = fence.group(1), number + 1, []
        elif fence:
            assert info is not None
            found.append(Block(info, begin, "\n".join(held) + "\n", name))
            info, name = None, ""
        elif info is not None:
            held.append(line)
        elif mark := _MARK.match(line):
            name = mark.group(1)
    assert info is None, f"{page}: a block is not closed"
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def links(page: Path) -> list[str]:
    """Targets of a page's links."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def inline_code(page: Path) -> list[str]:
    """What stands between single back quotes."""
    return _INLINE.findall(prose(page))


def command_lines(page: Path) -> Iterator[str]:
    """Every line that a page gives as a command: in shell and text blocks, and in back quotes."""
    yield from inline_code(page)
    for block in blocks(page):
        if block.info in ("sh", "text"):
            yield from block.text.replace("\\\n", " ").splitlines()


def table_rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the tables under a heading, without their first rows."""
    section = re.split(rf"^#+ {re.escape(heading)}$", prose(page), flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, flags=re.MULTILINE)[0]
    tables = re.findall(r"(?:^\|.*\n?)+", section, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("| ").split(" | ")] for t in tables for row in t.splitlines()[2:]]


def require_command(commands: Commands, called: str, line: str) -> None:
    """The words of a command line of `atoll` are a command and flags of it."""
    words, command = shlex.split(re.split(r" (?:&&|;|\|) ", called)[0], comments=True), ""
    while any(path.startswith(f"{command} ".lstrip()) and path != command for path in commands):
        command = f"{command} {words.pop(0) if words else ''}".strip(" ")
        assert command in commands, f"{line!r}: no such command"
    own = words[: words.index("--")] if "--" in words else words
    flags = {word.partition("=")[0] for word in own if word.startswith("--")}
    assert flags <= commands[command], f"{line!r}: no such flag"
