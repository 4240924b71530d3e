"""Which test shows which behaviour: docs/behaviours.toml and the tests' marks → docs/behaviours.md.

Nothing is imported or run: `@pytest.mark.covers("D1", "F8")` is read from the source, on functions, on
classes, on single parameters (`pytest.param(..., marks=...)`, also in a constant that the decorator names),
as a module's `pytestmark`, and on the methods that a test class inherits from a suite in `atoll.testing`.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Refused(Exception):
    """A mark that names no behaviour, or that cannot be read."""


@dataclass
class Module:
    """One source file: its tree, its classes, and the values of its module-level names."""

    path: str
    tree: ast.Module
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path, root: Path) -> Module:
        module = cls(path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8")))
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                module.classes[node.name] = node
            elif isinstance(node, ast.Assign):
                module.constants |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                module.constants[node.target.id] = node.value
        return module

    def marks(self, nodes: list[ast.expr]) -> list[ast.Call]:
        """Every `covers(...)` in these expressions and in the constants that they name."""
        calls: list[ast.Call] = []
        seen: set[str] = set()
        queue = list(nodes)
        while queue:
            for node in ast.walk(queue.pop()):
                if _is_mark(node):
                    calls.append(node)
                elif isinstance(node, ast.Name) and node.id in self.constants and node.id not in seen:
                    seen.add(node.id)
                    queue.append(self.constants[node.id])
        return calls

    def ids(self, calls: list[ast.Call]) -> set[str]:
        """The literal ids of marks."""
        found: set[str] = set()
        for call in calls:
            for argument in call.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise Refused(f"{self.path}:{call.lineno}: write the ids of covers(...) as plain strings.")
                found.add(argument.value)
        return found


@dataclass
class Collection:
    """Behaviour id → the tests that show it, in file order."""

    tests: dict[str, list[str]] = field(default_factory=dict)
    attached: set[ast.Call] = field(default_factory=set)

    def add(self, module: Module, name: str, calls: list[ast.Call], inherited: set[str]) -> None:
        self.attached.update(calls)
        for behaviour in sorted(inherited | module.ids(calls)):
            self.tests.setdefault(behaviour, []).append(f"{module.path}::{name}")


def collect(root: Path) -> dict[str, list[str]]:
    """Behaviour id → "path::[Class::]test" of every test below `root`/tests that carries it.

    Raises:
        Refused: a mark whose ids are not literal, or that belongs to no test.
    """
    modules = [Module.read(path, root) for path in sorted((root / "tests").rglob("*.py"))]
    suites = [Module.read(path, root) for path in sorted((root / "src" / "atoll" / "testing").rglob("*.py"))]
    classes = {name: (module, node) for module in suites + modules for name, node in module.classes.items()}
    found = Collection()
    for module in modules:
        own = module.marks([module.constants["pytestmark"]]) if "pytestmark" in module.constants else []
        found.attached.update(own)
        for node in module.tree.body:
            if isinstance(node, Function) and node.name.startswith("test"):
                found.add(module, node.name, module.marks(node.decorator_list), module.ids(own))
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                _collect_class(module, node, classes, found, module.ids(own))
    for module in modules:
        loose = [call for call in ast.walk(module.tree) if _is_mark(call) and call not in found.attached]
        if loose:
            raise Refused(f"{module.path}:{loose[0].lineno}: this mark belongs to no test that can be read here.")
    return found.tests


def _collect_class(
    module: Module,
    node: ast.ClassDef,
    classes: dict[str, tuple[Module, ast.ClassDef]],
    found: Collection,
    outer: set[str],
) -> None:
    """The tests of a class, its bases' tests included, under the class's own name."""
    lineage = list(_lineage(module, node, classes))
    on_class = set(outer)
    for where, cls in lineage:
        calls = where.marks(cls.decorator_list)
        found.attached.update(calls)
        on_class |= where.ids(calls)
    seen: set[str] = set()
    for where, cls in lineage:
        for method in _methods(cls):
            if method.name in seen:
                continue
            seen.add(method.name)
            calls = where.marks(method.decorator_list)
            found.attached.update(calls)
            found.add(module, f"{node.name}::{method.name}", [], on_class | where.ids(calls))


def _lineage(
    module: Module, node: ast.ClassDef, classes: dict[str, tuple[Module, ast.ClassDef]]
) -> Iterator[tuple[Module, ast.ClassDef]]:
    """The class, then its bases as far as their sources are known, nearest first."""
    yield module, node
    for base in node.bases:
        name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
        if name in module.classes:
            yield from _lineage(module, module.classes[name], classes)
        elif name in classes:
            yield from _lineage(*classes[name], classes)


def _methods(node: ast.ClassDef) -> list[Function]:
    return [item for item in node.body if isinstance(item, Function) and item.name.startswith("test")]


def _is_mark(node: ast.AST) -> TypeGuard[ast.Call]:
    """`pytest.mark.covers(...)`, or `mark.covers(...)`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.covers")


def page(groups: dict[str, str], behaviours: dict[str, str], tests: dict[str, list[str]]) -> str:
    """The text of docs/behaviours.md: what no test shows yet, then each behaviour with its tests."""
    open_ids = [name for name in behaviours if name not in tests]
    lines = [
        "# Behaviours",
        "",
        "Written by `make behaviours` from [behaviours.toml](behaviours.toml) and the marks of the tests.",
        f"{len(behaviours) - len(open_ids)} of {len(behaviours)} behaviours are shown by a test.",
        "",
        "## Without a test",
        "",
    ]
    lines += [f"- **{name}** {behaviours[name]}" for name in open_ids] or ["None."]
    for group, members in itertools.groupby(behaviours, key=_group):
        shown = [name for name in members if name in tests]
        if not shown:
            continue
        lines += ["", f"## {group}. {groups[group]}", ""]
        for name in shown:
            lines.append(f"- **{name}** {behaviours[name]}")
            lines += [f"  - `{test}`" for test in sorted(tests[name])]
    return "\n".join(lines) + "\n"


def _group(behaviour: str) -> str:
    return re.sub(r"\d+$", "", behaviour)


def build(root: Path) -> str:
    """The page for the checkout at `root`.

    Raises:
        Refused: a test names a behaviour that behaviours.toml does not have, or a mark cannot be read.
    """
    table = tomllib.loads((root / "docs" / "behaviours.toml").read_text(encoding="utf-8"))
    tests = collect(root)
    known = table["behaviours"]
    unknown = [f"{at[0]}: there is no behaviour {name!r}" for name, at in tests.items() if name not in known]
    if unknown:
        raise Refused("; ".join(unknown) + ". docs/behaviours.toml lists them all.")
    return page(table["groups"], known, tests)


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/behaviours.md.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    root: Path = parser.parse_args().root
    try:
        text = build(root)
    except Refused as refusal:
        print(f"behaviours: {refusal}", file=sys.stderr)
        return 1
    (root / "docs" / "behaviours.md").write_text(text, encoding="utf-8")
    print(next(line for line in text.splitlines() if "are shown" in line))
    return 0


if __name__ == "__main__":
    sys.exit(main())
