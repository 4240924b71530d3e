"""Code lines by folder: no blank lines, comments or docstrings.

python tools/size.py              src/atoll
python tools/size.py tests        another folder
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Count the lines of Python source that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def sizes(root: Path, depth: int = 1) -> tuple[Counter[str], Counter[str]]:
    """Count (code lines, files) of each folder: its first `depth` path parts; "." for files directly in `root`."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in sorted(root.rglob("*.py")):
        folder = "/".join(path.relative_to(root).parts[:-1][:depth]) or "."
        lines[folder] += code_lines(path.read_text(encoding="utf-8"))
        files[folder] += 1
    return lines, files


def main() -> None:
    parser = argparse.ArgumentParser(description="Code lines by folder.")
    parser.add_argument("root", nargs="?", type=Path, default=ROOT / "src" / "atoll")
    lines, files = sizes(parser.parse_args().root, depth=2)
    for folder, count in sorted(lines.items()):
        print(f"{count:7,} lines {files[folder]:4d} files  {folder}")
    print(f"{lines.total():7,} lines {files.total():4d} files  in all")


if __name__ == "__main__":
    main()
