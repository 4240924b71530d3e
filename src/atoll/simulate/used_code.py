"""The code that a run uses, as digests: files with all that they import from your own folders, and functions of cells.

A function that no file has (of a notebook cell, a lambda, a partial) is its source, with that of the functions that it
names, the plain values that it is given or names (numbers, texts, tuples of them), and the files of modules it names.
Not seen: code that is loaded by a computed name, installed packages, and values of other types.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from blake3 import blake3

from atoll import registry
from atoll.simulate.script import source_of

IMPORTS = ("import_module", "__import__")
"""Functions that import a module by its name, which is their first argument."""
ASSIGNMENTS = ("STORE_GLOBAL", "STORE_DEREF")
"""Instructions of a function that assign a variable outside of it."""


# -- files


def digests(names: Sequence[str]) -> dict[str, str]:
    """Return the digest of each file that the names lead to, and of those of the user's that these import.

    Args:
        names: code by its file, `train.py:train` or `train.py`, or by its module, `package.module:train`.
    """
    folders = [Path.cwd(), *(Path(each) for each in map(str, sys.path) if not _is_installed(each))]
    found, todo = dict[str, str](), list[Path]()
    for name in names:
        place = name if name.endswith(".py") else name.rpartition(":")[0]
        todo += [Path(place).resolve()] if place.endswith(".py") else _module(place, folders)
    while todo:
        file = todo.pop()
        if str(file) in found:
            continue
        with suppress(OSError, SyntaxError, ValueError, RecursionError):
            source = file.read_bytes()
            found[str(file)] = blake3(source).hexdigest()
            for node in ast.walk(ast.parse(source)):
                todo += _imported(node, file, folders)
    return found


def _is_installed(folder: str) -> bool:
    return any(part in folder for part in ("site-packages", "dist-packages")) or folder.startswith(
        sysconfig.get_paths()["stdlib"]
    )


def _imported(node: ast.AST, file: Path, folders: Sequence[Path]) -> list[Path]:
    """Return the user's files that a statement of a file imports, wherever it stands in the file."""
    near = [file.parent, *folders]
    if isinstance(node, ast.Import):
        return [found for each in node.names for found in _module(each.name, near)]
    if isinstance(node, ast.ImportFrom):
        above = f"{node.module}." if node.module else ""
        names = [above[:-1], *(above + each.name for each in node.names)]
        if not node.level:
            return [found for name in names for found in _module(name, near)]
        package = file.parents[min(node.level, len(file.parents)) - 1]
        return [*_files(package), *(found for name in names for found in _below(package, name.split(".")))]
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=[ast.Constant(value=str(target)), *_]):
            if name in IMPORTS:
                relative = target.lstrip(".")
                return _below(file.parent, relative.split(".")) if relative != target else _module(target, near)
    return []


def _module(name: str, folders: Sequence[Path]) -> list[Path]:
    """Return the user's files that the import of a module runs: its packages' `__init__.py`, and its own."""
    top, *rest = name.split(".")
    if not top or top == "atoll":
        return []
    found = [file for folder in folders for file in _below(folder, [top, *rest])]
    with suppress(ImportError, ValueError, AttributeError):  # also a package that is installed to be edited
        spec = importlib.util.find_spec(top)
        places = [*(spec.submodule_search_locations or ())] if spec is not None else []
        for place in (Path(each) for each in map(str, places) if not _is_installed(each)):
            found += [*_files(place), *_below(place, rest)]
        if spec is not None and not places and spec.origin and not _is_installed(spec.origin):
            found += [Path(spec.origin).resolve()] * spec.origin.endswith(".py")
    return found


def _below(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files of a module below a folder, and of the packages on the way; `*` is each module of a package."""
    found = list[Path]()
    for name in names:
        if name == "*":
            return found + sorted(each.resolve() for each in folder.glob("*.py"))
        folder = folder / name
        found += _files(folder)
    return found


def _files(module: Path) -> list[Path]:
    """Return the files of the module or package at a path without its ending."""
    files = (module.parent / f"{module.name}.py", module / "__init__.py")
    return [file.resolve() for file in files if file.is_file()]


# -- functions and other objects of the program


class GivenCode:
    """What decides what objects of the program do: functions, partials, objects with attributes.

    Attributes:
        parts: what it is, such as `train` or `lr of train` → a text that changes with it.
        places: code that other processes can import, as `digests` takes it.
        named_texts: the plain texts among the values, some of which may name files.
    """

    def __init__(self, *given: Any) -> None:
        self.parts, self.places, self.named_texts = dict[str, str](), list[str](), list[str]()
        self._seen = set[int]()
        for each in given:
            self._add(each, "")

    def _add(self, value: Any, name: str) -> None:
        """Add a value that is found under a name, such as `lr of train`; empty: it is given itself."""
        if _is_plain(value):
            self.parts |= {name: repr(value)} if name else {}
            texts = [each for each in (value if isinstance(value, tuple) else [value]) if isinstance(each, str)]
            self.named_texts += [each for each in texts if any(map(str.isalnum, each))]
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            for inner, part in self._inside(value):
                self._add(part, inner)

    def _inside(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Yield what else decides what a value does, each with its name."""
        if isinstance(value, ModuleType):
            self._place(value)
        elif isinstance(value, functools.partial):
            yield "", value.func
            named = {**{f"argument {number}": each for number, each in enumerate(value.args, 1)}, **value.keywords}
            yield from _named(named, registry.label_of(value))
        elif isinstance(value, MethodType):
            yield from (("", value.__func__), ("", value.__self__))
        elif isinstance(value, FunctionType) and not self._place(value):
            self.parts[registry.label_of(value)] = blake3(source_of(value).encode()).hexdigest()
            yield from _named(_values(value), registry.label_of(value))
        elif isinstance(value, type) and not self._place(value):
            if value.__module__ == "__main__":
                self.parts[registry.label_of(value)] = blake3(source_of(value).encode()).hexdigest()
        elif isinstance(value, Mapping | list | tuple | set):
            yield from (("", each) for each in (value.values() if isinstance(value, Mapping) else value))
        elif not isinstance(value, type) and _is_own(type(value)):
            yield "", type(value)
            yield from _named(getattr(value, "__dict__", {}), type(value).__qualname__)

    def _place(self, value: Any) -> bool:
        """Add the file or module of a value, and return True, if there is one that is the user's."""
        module = value if isinstance(value, ModuleType) else sys.modules.get(getattr(value, "__module__", None) or "")
        file = getattr(module, "__file__", None) or ""
        if not file.endswith(".py") or _is_installed(file) or not Path(file).is_file():
            return False
        if getattr(module, "__name__", "").partition(".")[0] != "atoll":
            self.places.append(str(Path(file).resolve()))
        return isinstance(value, ModuleType) or bool(registry.importable_place(value))


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(each) for each in value)
    return value is None or type(value) in (bool, int, float, complex, str, bytes)


def _is_own(kind: type) -> bool:
    """Return whether a type is of the user, not of Python or an installed package."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return kind.__module__ == "__main__" or (file is not None and not _is_installed(file))


def _named(values: Mapping[str, Any], owner: str) -> Iterator[tuple[str, Any]]:
    return ((f"{name} of {owner}", value) for name, value in values.items())


def _values(function: FunctionType) -> dict[str, Any]:
    """Return the values outside a function that it names, without those that it assigns: name → value."""
    names, assigned = set[str](), set[str]()
    todo: list[CodeType] = [function.__code__]
    while todo:
        code = todo.pop()
        names |= {*code.co_names}
        assigned |= {each.argval for each in dis.get_instructions(code) if each.opname in ASSIGNMENTS}
        todo += [each for each in code.co_consts if isinstance(each, CodeType)]
    found = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is empty
            found[name] = cell.cell_contents
    return {name: value for name, value in found.items() if name not in assigned}
