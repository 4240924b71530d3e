"""Words for people that stand for processes: a worker, a site or the server does something, never "somebody".

    python tools/plain_words.py       print each place of such a word, and exit with 1 if there is one

Read are comments, docstrings and messages of `src`, names of test functions, and all documents.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PEOPLE = re.compile(r"(?<![a-z])(who|whom|whose|whoever|nobody|somebody|everybody|anybody)(?![a-z])", re.IGNORECASE)


def in_source(text: str) -> Iterator[tuple[int, str]]:
    """(line, word) of each such word in comments and strings."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING") or kind.startswith("FSTRING"):
            for match in PEOPLE.finditer(token.string):
                yield token.start[0] + token.string.count("\n", 0, match.start()), match.group()


def in_test_names(text: str) -> Iterator[tuple[int, str]]:
    """(line, word) of each such word in the name of a test function."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield from ((node.lineno, word) for word in PEOPLE.findall(node.name.replace("_", " ")))


def in_document(text: str) -> Iterator[tuple[int, str]]:
    """(line, word) of each such word."""
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, word) for word in PEOPLE.findall(line))


def found(root: Path) -> list[str]:
    """Return each place in this checkout as "path:line: word"."""
    readers = [
        (sorted((root / "src").rglob("*.py")), in_source),
        (sorted((root / "tests").rglob("*.py")), in_test_names),
        ([root / "README.md", *sorted((root / "docs").rglob("*.md"))], in_document),
    ]
    return [
        f"{path.relative_to(root)}:{line}: {word}"
        for paths, read in readers
        for path in paths
        if path.exists()
        for line, word in read(path.read_text(encoding="utf-8"))
    ]


def main() -> int:
    """Print what is found; return the exit code."""
    places = found(ROOT)
    print(*places, sep="\n", end="\n" if places else "")
    if places:
        print("Say which process it is: a worker, a site, the server, a peer.", file=sys.stderr)
    return 1 if places else 0


if __name__ == "__main__":
    sys.exit(main())
