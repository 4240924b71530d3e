"""llms.txt from docs/index.md: every page of the documentation with a line, for programs that read it."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def index() -> str:
    """The text of llms.txt. A row of the index with several links gives a line for each."""
    title, first = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[:2]
    lines = [title, "", f"> {first}", ""]
    lines += ["[README](README.md) has the first steps; [AGENTS](AGENTS.md) is for changes to Atoll itself."]
    for line in (ROOT / "docs" / "index.md").read_text(encoding="utf-8").splitlines():
        if heading := re.fullmatch(r"\*\*(.+)\*\*", line):
            lines += ["", f"## {heading[1]}", ""]
        elif line.startswith("| ") and (links := _LINK.findall(line.split(" | ")[0])):
            about = _LINK.sub(r"\1", line.split(" | ")[1]).removesuffix(" |")
            lines += [f"- [{name}]({_from_root(target)}): {about}" for name, target in links]
    return "\n".join(lines) + "\n"


def _from_root(target: str) -> str:
    return (ROOT / "docs" / target).resolve().relative_to(ROOT).as_posix()


def main() -> int:
    parser = argparse.ArgumentParser(description="Write llms.txt.")
    parser.add_argument("--out", type=Path, default=ROOT / "llms.txt")
    parser.parse_args().out.write_text(index(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
