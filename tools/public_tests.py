"""How many test functions reach Atoll through public names only.

    python tools/public_tests.py              the share, and for each folder
    python tools/public_tests.py --internal   also what each file imports that is not public

Public are the names of `atoll.__all__`, the submodules in `atoll._MODULES`, and what these list in their `__all__`.
What a file imports at its head counts for all its test functions, what a function imports counts for that one, and what
a helper in `tests` imports counts for the files that import the helper.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def names_of(module: str = "") -> frozenset[str] | None:
    """`__all__` of `atoll`, or of this module in it; None if it has none, so that all its names are public."""
    path = ROOT / "src" / "atoll" / module
    for node in parsed(path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return frozenset(ast.literal_eval(node.value))
    return None


@cache
def modules() -> frozenset[str]:
    """`atoll._MODULES`, the public submodules."""
    for node in parsed(ROOT / "src" / "atoll" / "__init__.py").body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            return frozenset(ast.literal_eval(node.value))
    raise LookupError("src/atoll/__init__.py has no _MODULES")


def imported(node: ast.AST) -> Iterator[str]:
    """Dotted names that this node imports: `from a import b` is "a.b"."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_public(name: str) -> bool:
    _, *parts = name.split(".")
    if parts and parts[0] in modules():
        names = names_of(parts[0])
        return len(parts) == 1 or names is None or parts[1] in names
    return not parts or (len(parts) == 1 and parts[0] in (names_of() or ()))


def helper(importer: Path, name: str) -> Path | None:
    """The file in `tests` that is imported by this name: from beside its importer, or from the head of `tests`."""
    parts = name.split(".")
    for folder in (importer.parent, TESTS):
        for end in range(len(parts), 0, -1):
            for path in (
                folder.joinpath(*parts[:end]).with_suffix(".py"),
                folder.joinpath(*parts[:end], "__init__.py"),
            ):
                if path.is_file() and path != importer:
                    return path
    return None


def at_head(tree: ast.Module) -> Iterator[ast.AST]:
    """Every node that is not inside a test function."""
    for node in tree.body:
        if not is_test(node):
            yield from ast.walk(node)


def is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def internals(nodes: Iterator[ast.AST], path: Path, seen: set[Path]) -> set[str]:
    """What these nodes of a file import of Atoll that is not public, helpers included."""
    found = set()
    for node in nodes:
        for name in imported(node):
            if name.split(".")[0] == "atoll":
                found |= {name} if not is_public(name) else set()
            elif (other := helper(path, name)) and other not in seen:
                seen.add(other)
                found |= internals(ast.walk(parsed(other)), other, seen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--internal", action="store_true", help="list what is imported that is not public")
    given = parser.parse_args()
    public, all_ = defaultdict[str, int](int), defaultdict[str, int](int)
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = parsed(path)
        folder = "/".join(path.relative_to(TESTS).parts[:-1][:2]) or "tests"
        head = internals(at_head(tree), path, {path})
        for node in ast.walk(tree):
            if is_test(node):
                all_[folder] += 1
                public[folder] += not head | internals(ast.walk(node), path, {path})
        if given.internal and head:
            print(f"{path.relative_to(ROOT)}: {', '.join(sorted(head))}")
    for folder in sorted(all_):
        print(f"{public[folder]:5d} of {all_[folder]:5d}  {folder}")
    share = sum(public.values()) / sum(all_.values())
    print(f"{sum(public.values())} of {sum(all_.values())} test functions through public names only: {share:.1%}")


if __name__ == "__main__":
    main()
