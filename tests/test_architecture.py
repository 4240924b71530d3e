"""The package's shape, read from its source: imports, sizes, names of files, dangerous calls, imports of torch; and
that docs/layout.md shows this shape.

The checks are functions of a folder, so that the tests can also plant what they are there to find.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from size import code_lines, sizes

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "atoll"
LAYOUT = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")

LAYERS: list[set[str]] = [
    {"format_text", "system_calls"},
    {"errors"},
    {"posix", "runtime"},
    {"child_processes", "json_files"},
    {"registry"},
    {"config", "data"},
    {"tensors"},
    {"codecs", "filters", "outer_optimizers", "reducers", "algorithms"},
    {"blobs"},
    {"rounds"},
    {"protocol"},
    {"store", "transport", "trackers"},
    {"aggregation"},
    {"server/coordinator", "worker"},
    {"server/swarm", "server/tasks", "worker/session"},
    {"server/http", "worker/peer"},
    {"server", "worker/exchange"},
    {"worker/tasks"},
    {"worker/training"},
    {"integrations", "integrations/flower", "simulate"},
    {"recipes", "functional", "objects"},
    {"cli", "testing"},
]
"""A room imports rooms of the rows above its own, and no other member of its own row.

"server" and "worker" are the files directly in these folders.
"""


LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
TOP = len(LAYERS) - 1

NEVER_IMPORTED = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
NEVER_CALLED = {
    "eval",
    "exec",
    "builtins.eval",
    "builtins.exec",
    "torch.load",
    "torch.save",
    "torch.serialization.load",
    "torch.serialization.save",
    "torch.jit.load",
    "torch.hub.load",
    "yaml.load",
    "yaml.load_all",
    "yaml.unsafe_load",
    "yaml.full_load",
    "pandas.read_pickle",
}
"""Each of them can run code that a file or a peer brought along."""

LOADERS: dict[str, set[str]] = {
    "atoll.registry.OwnName": {
        "config/settings.py",
        "config/workflow_settings.py",
        "algorithms/resolve.py",  # the names in an algorithm's own value
        "reducers/__init__.py",  # the name in a reducer's own attribute
        "aggregation/user_aggregator.py",  # a child of the server, which sends what its settings say
        "server/evaluation_process.py",  # a child of the server, which sends what its settings say
        "simulate/script.py",  # the argument of a public call
        "simulate/simulated_site.py",  # a child of the simulation, which sends what its settings say
        "testing/contracts.py",  # an attribute of the author's test
    },
    "importlib.import_module": {
        "__init__.py",
        "cli/main.py",
        "integrations/__init__.py",
        "integrations/flower/app_folder.py",  # the app that this user's own command or run file names
        "integrations/lightning_callback.py",
    },
    "runpy.run_path": {"simulate/script.py", "integrations/nvflare/__main__.py"},
    "runpy.run_module": {"integrations/nvflare/__main__.py"},
    **{name: set() for name in ("importlib.util.spec_from_file_location", "__import__")},
}
"""Call → the files, besides registry.py, that may contain it. It makes a name that may be imported, or imports one."""

LIGHT: dict[str, set[str]] = {
    "atoll": {"torch", "aiohttp", "pydantic"},
    "atoll.integrations.lightning": {"lightning", "pytorch_lightning", "aiohttp"},
    "atoll.integrations.nvflare": {"torch", "aiohttp", "nvflare"},
    "atoll.cli.main": {"torch", "aiohttp", "matplotlib"},
    "atoll.recipes": {"torch", "aiohttp"},
    "atoll.algorithms.resolve": {"torch"},
    "atoll.config": {"torch", "aiohttp"},
    "atoll.data": {"torch", "aiohttp", "pydantic", "matplotlib", "sklearn", "datasets"},
    "atoll.registry": {"torch"},
    "atoll.tensors.schema": {"torch", "numpy"},
    "atoll.tensors.layout": {"torch", "numpy"},
    "atoll.rounds.events": {"torch"},
    "atoll.protocol.messages": {"torch", "aiohttp"},
    "atoll.protocol.status_messages": {"torch", "aiohttp"},
    "atoll.protocol.routes": {"torch", "aiohttp"},
}
"""Module → what its import must not bring: `atoll status` answers before torch would be imported."""

HTTP_LIBRARIES = {"aiohttp", "http", "ssl", "urllib3"}
KNOWS_HTTP = ("transport/", "server/http/")
"""Where HTTP libraries may be imported, by the beginning of the path; everything else speaks to a port."""

FORBIDDEN_PAIRS = [
    ("server/coordinator/", "atoll.server.http"),
    ("server/", "atoll.worker"),
    ("worker/", "atoll.server"),
]
"""Path → module that it never imports, although LAYERS would let it."""

LINES: dict[str, int] = {
    ".": 1724,
    "aggregation": 1339,
    "algorithms": 2016,
    "blobs": 474,
    "cli": 4878,
    "cli/examples": 47,
    "cli/templates": 291,
    "codecs": 460,
    "config": 1934,
    "data": 512,
    "filters": 315,
    "integrations": 1044,
    "integrations/flower": 788,
    "integrations/nvflare": 472,
    "outer_optimizers": 439,
    "protocol": 2566,
    "recipes": 877,
    "reducers": 259,
    "rounds": 1262,
    "server": 2346,
    "server/coordinator": 4961,
    "server/http": 1546,
    "server/swarm": 733,
    "server/tasks": 1919,
    "simulate": 2288,
    "store": 4516,
    "tensors": 2239,
    "testing": 480,
    "trackers": 333,
    "transport": 4633,
    "worker": 270,
    "worker/exchange": 2780,
    "worker/peer": 963,
    "worker/session": 930,
    "worker/tasks": 659,
    "worker/training": 2350,
}
"""Folder → code lines that it may have. Raise one only in a commit that says what the reader gets for it."""


def sources(package: Path) -> Iterator[tuple[Path, str]]:
    """(path, text) of every file."""
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package), path.read_text(encoding="utf-8")


def room_of(*parts: str) -> str:
    """`tensors/schema.py` → "tensors", `server/http/app.py` → "server/http", `errors.py` → "errors"."""
    folder = "/".join(parts[:2])
    return folder if folder in LEVEL else parts[0].removesuffix(".py")


@functools.cache  # the package is read by several tests; its trees are too large to be kept
def imported_modules(path: Path, text: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands; `from a import b` is "a.b"."""
    parents = ["atoll", *path.parts[:-1]]
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def room_imports(package: Path) -> Iterator[tuple[str, str, str]]:
    """(path, its room, another room that it imports) of every import, wherever it stands."""
    for path, text in sources(package):
        room = room_of(*path.parts)
        for _, name in imported_modules(path, text):
            first, _, rest = name.partition(".")
            target = room_of(*rest.split("."))
            if first == "atoll" and room in LEVEL and target in LEVEL and target != room:
                yield str(path), room, target


def room_edges(package: Path) -> dict[str, set[str]]:
    """Room → rooms that it imports anywhere: at the head of a file, inside functions, for type checkers."""
    edges: dict[str, set[str]] = {room: set() for room in LEVEL}
    for _, room, target in room_imports(package):
        edges[room].add(target)
    return edges


def wrong_imports(package: Path) -> list[str]:
    """Every import that points down or sideways, as "path:line: what"."""
    found = []
    for path, text in sources(package):
        room = room_of(*path.parts)
        if room == "__init__":
            continue
        if room not in LEVEL:
            found.append(f"{path}:1: {room} has no row in LAYERS")
            continue
        for line, name in imported_modules(path, text):
            first, _, rest = name.partition(".")
            if first != "atoll":
                continue
            target = room_of(*rest.split("."))
            if target not in LEVEL:
                if LEVEL[room] < TOP:
                    found.append(f"{path}:{line}: {room} imports {name}; take it from the room that has it")
            elif target != room and LEVEL[target] >= LEVEL[room]:
                found.append(f"{path}:{line}: {room} imports {name}")
    return found


def bound_names(nodes: list[ast.AST]) -> dict[str, str]:
    """What the local names of a file stand for."""
    bound: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            bound |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return bound


def full_name(node: ast.expr, bound: dict[str, str]) -> str:
    first, dot, rest = ast.unparse(node).partition(".")
    return bound.get(first, first) + dot + rest


def dangerous_calls(package: Path) -> list[str]:
    """Every import or use of something that runs code from data, as "path:line: what"."""
    found = []
    for path, text in sources(package):
        nodes = list(ast.walk(ast.parse(text)))
        bound = bound_names(nodes)
        for line, name in imported_modules(path, text):
            if name.partition(".")[0] in NEVER_IMPORTED or name in NEVER_CALLED:
                found.append(f"{path}:{line}: {name}")
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                name = full_name(node, bound)
                if name in NEVER_CALLED:
                    found.append(f"{path}:{node.lineno}: {name}")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                found.append(f"{path}:{node.value.lineno}: allow_pickle")
    return found


def loading_calls(package: Path) -> list[str]:
    """Every call of `LOADERS` in another file than is listed there, as "path:line: what"."""
    found = []
    for path, text in sources(package):
        if str(path) == "registry.py" or not any(name.rpartition(".")[2] in text for name in LOADERS):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        bound = bound_names(nodes)
        for node in nodes:
            name = full_name(node.func, bound) if isinstance(node, ast.Call) else ""
            if str(path) not in LOADERS.get(name, {str(path)}):
                found.append(f"{path}:{node.lineno}: {name}")
    return found


def forbidden_imports(package: Path) -> list[str]:
    """Imports of HTTP libraries outside their rooms, of forbidden pairs and of another room's private names."""
    found = []
    for path, text in sources(package):
        for line, name in imported_modules(path, text):
            parts = name.split(".")
            if parts[0] in HTTP_LIBRARIES and not path.as_posix().startswith(KNOWS_HTTP):
                found.append(f"{path}:{line}: {name} is for {', '.join(KNOWS_HTTP)}")
            for start, module in FORBIDDEN_PAIRS:
                if path.as_posix().startswith(start) and f"{name}.".startswith(f"{module}."):
                    found.append(f"{path}:{line}: {start} imports {name}")
            private = parts[-1].startswith("_") and not parts[-1].startswith("__")
            if parts[0] == "atoll" and private:
                found.append(f"{path}:{line}: {name} is private")
    return found


def shared_file_names(package: Path) -> list[str]:
    """File names that two files of the package have; `base`, `__init__` and `__main__` may be shared."""
    names = Counter(path.name for path, _ in sources(package))
    return sorted(
        name for name, count in names.items() if count > 1 and name not in ("base.py", "__init__.py", "__main__.py")
    )


def import_edges(package: Path) -> dict[str, set[str]]:
    """Module → modules of the package that it imports anywhere: at its head, inside functions, for type checkers."""
    modules = {
        ".".join(["atoll", *path.with_suffix("").parts]): (path, text)
        for path, text in sources(package)
        if path.name != "__init__.py"
    }
    edges: dict[str, set[str]] = {module: set() for module in modules}
    for module, (path, text) in modules.items():
        for _, name in imported_modules(path, text):
            target = name
            while target and target not in modules:
                target = target.rpartition(".")[0]
            if target and target != module:
                edges[module].add(target)
    return edges


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules, or of rooms, that import each other in a row of any length (Tarjan's algorithm)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for target in sorted(edges[module]):
            if target not in number:
                visit(target)
            if target in stack:
                lowest[module] = min(lowest[module], lowest[target])
        if lowest[module] == number[module]:
            group = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(edges):
        if module not in number:
            visit(module)
    return sorted(found)


COORDINATOR, COORDINATOR_IMPORTS = "atoll.server.coordinator.coordinator", 11
"""How many files of the package the coordinator may import: it orders events, and parts of others are handed in."""


def listed_files(page: str) -> list[str]:
    """The files in the section "Files" of docs/layout.md, in its order."""
    found, folder = [], ""
    for line in page.partition("## Files")[2].partition("\n## ")[0].splitlines():
        if heading := re.match(r"\*\*`(.+/)`\*\*", line):
            folder = heading[1].removeprefix("atoll/")
        elif row := re.match(r"\| `(.+?)` \|", line):
            found.append(f"{folder}{row[1]}.py")
    return found


def wrong_list(package: Path, page: str) -> list[str]:
    """Files of the package that the page does not list, and lines of it without a file. `__init__` may have no line."""
    files = {path.as_posix() for path, text in sources(package) if path.name != "__init__.py" or code_lines(text)}
    listed = Counter(listed_files(page))
    return [
        *(f"{name}: has no line" for name in sorted(files - listed.keys())),
        *(f"{name}: there is no such file" for name in sorted(listed.keys() - files)),
        *(f"{name}: has several lines" for name in sorted(name for name, count in listed.items() if count > 1)),
    ]


def wrong_names(page: str) -> list[str]:
    """Paths that the page names although they do not exist, and names that are not in the file which the page says."""
    found = []
    for name in re.findall(r"`([\w.]+/[\w./]*)`", page):
        if not any(
            (folder / f"{name.rstrip('/')}{end}").exists()
            for folder in (PACKAGE, ROOT, ROOT / "src", PACKAGE / "cli" / "examples")
            for end in ("", ".py")
        ):
            found.append(name)
    pairs = [*re.findall(r"`([\w/]+)` \(`([\w.]+)`", page)]
    pairs += [(file, name) for name, file in re.findall(r"`([\w.]+)` in `([\w/]+)`", page)]
    for file, name in pairs:
        path = PACKAGE / f"{file}.py"
        if not path.exists() or not re.search(rf"\b{name.rpartition('.')[2]}\b", path.read_text(encoding="utf-8")):
            found.append(f"{file}: {name}")
    return found


def wrong_diagram(package: Path, page: str) -> list[str]:
    """Rooms that the page's diagram lacks, imports that run along none of its arrows, and arrows without an import."""
    rooms: dict[str, list[str]] = {}
    arrows: set[tuple[str, str]] = set()
    for line in page.partition("```mermaid")[2].partition("```")[0].splitlines()[2:]:
        sides = [[*map(str.strip, side.split("&"))] for side in line.split("-->")]
        for node in (node for side in sides for node in side):
            drawn = re.fullmatch(r'(\w+)(?:\["(.+)"\])?', node)
            assert drawn, f"{node!r} is not a node of the diagram"
            name, label = drawn.groups()
            if label or name not in rooms:
                rooms[name] = label.split(" · ") if label else [name]
        names = [[node.partition("[")[0] for node in side] for side in sides]
        arrows |= {(a, b) for left, right in pairwise(names) for a in left for b in right}
    node_of = {room: node for node, inside in rooms.items() for room in inside}
    used = {(node_of.get(target, target), node_of.get(room, room)) for _, room, target in room_imports(package)}
    reached = set(arrows)
    while further := {(a, d) for a, b in reached for c, d in arrows if b == c} - reached:
        reached |= further
    return [
        *(f"{room} is not drawn" for room in sorted(LEVEL.keys() ^ node_of.keys())),
        *(f"{b} imports {a}, which no arrows show" for a, b in sorted(used - reached) if a != b),
        *(f"{b} does not import {a}" for a, b in sorted(arrows - used)),
    ]


def plant(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return folder


def test_imports_point_one_way() -> None:
    """Each folder of the package imports only folders in the rows above its own in `LAYERS`."""
    assert wrong_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tensors/lazy_tensors.py", "from atoll.store import journal", "tensors imports atoll.store.journal"),
        (
            "tensors/lazy_tensors.py",
            "def f():\n    import atoll.server.http.app",
            "tensors imports atoll.server.http.app",
        ),
        (
            "store/update_spool.py",
            "from atoll.transport.http_client import Client",
            "store imports atoll.transport.http_client.Client",
        ),
        ("store/update_spool.py", "from ..transport import client", "store imports atoll.transport.client"),
        ("store/update_spool.py", "from atoll import worker", "store imports atoll.worker"),
        ("errors.py", "import atoll.runtime", "errors imports atoll.runtime"),
        ("cli/main.py", "from atoll.testing import faults", "cli imports atoll.testing.faults"),
        (
            "worker/session/session.py",
            "from atoll import DiLoCo",
            "worker/session imports atoll.DiLoCo; take it from the room",
        ),
        (
            "server/http/app.py",
            "if TYPE_CHECKING:\n    from atoll.cli import main",
            "server/http imports atoll.cli.main",
        ),
        (
            "worker/exchange/pull_version.py",
            "from atoll.worker.tasks import answer_tasks",
            "worker/exchange imports atoll.worker.tasks.answer_tasks",
        ),
        ("worker/arguments.py", "from atoll.worker.session import ranks", "worker imports atoll.worker.session.ranks"),
        ("common/util.py", "", "common has no row in LAYERS"),
    ],
)
def test_a_wrong_import_is_found(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """The check reports an import that `LAYERS` does not allow, and a folder without a row in `LAYERS`."""
    (complaint,) = wrong_imports(plant(tmp_path, name, text))
    assert complaint.startswith(f"{name}:")
    assert expected in complaint


def test_allowed_imports_are_not_reported(tmp_path: Path) -> None:
    plant(tmp_path, "__init__.py", "from atoll.cli import main")
    plant(
        tmp_path,
        "store/update_spool.py",
        "from atoll.protocol import routes\nfrom . import slots\nfrom ..errors import DiskFull",
    )
    plant(tmp_path, "cli/main.py", "import atoll\nfrom atoll import Server\nfrom atoll.recipes import fedavg")
    assert wrong_imports(tmp_path) == []


def test_the_package_has_no_forbidden_imports() -> None:
    """Only `transport` and `server/http` import HTTP libraries. No file imports a private name of another file, or a
    module that its folder must not import.
    """
    assert forbidden_imports(PACKAGE) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("store/store.py", "def f():\n    import aiohttp.web", "aiohttp.web is for transport/"),
        ("worker/session/session.py", "from http.client import HTTPException", "http.client.HTTPException is for"),
        ("server/coordinator/roster.py", "from atoll.server.http import app", "imports atoll.server.http.app"),
        ("server/startup.py", "from atoll.worker.session import session", "imports atoll.worker.session.session"),
        ("store/store.py", "from atoll.tensors.layout import _offset", "atoll.tensors.layout._offset is private"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, name: str, text: str, expected: str) -> None:
    """The check reports an HTTP library in a wrong folder, a module that a folder must not import, and a private
    name.
    """
    (complaint,) = forbidden_imports(plant(tmp_path, name, text))
    assert complaint.startswith(f"{name}:")
    assert expected in complaint


def test_no_two_files_share_a_name(tmp_path: Path) -> None:
    """No two files of the package have the same name, except `base.py` and `__init__.py`. The check reports a planted
    pair.
    """
    assert shared_file_names(PACKAGE) == []
    plant(tmp_path, "codecs/base.py", "")
    plant(tmp_path, "reducers/base.py", "")
    plant(tmp_path, "worker/client.py", "")
    assert shared_file_names(plant(tmp_path, "simulate/client.py", "")) == ["client.py"]


def articles_of_types(package: Path) -> list[str]:
    """Return each message that would speak of "a int": the file and the article with the name of a type behind it."""
    before_type = re.compile(r"\ban? \{(?:type\(|_name\()[^}]*\}")
    return [f"{path}: {found}" for path, text in sources(package) for found in before_type.findall(text)]


def test_messages_have_no_article_before_types(tmp_path: Path) -> None:
    """No message has "a" or "an" before the name of a type, since the first letter of the name is not known. Messages
    say "of type int".
    """
    assert articles_of_types(PACKAGE) == []
    plant(tmp_path, "a.py", 'f"{x!r} is a {type(x).__name__}."\n')
    assert articles_of_types(tmp_path) == ["a.py: a {type(x).__name__}"]


def test_each_folder_stays_within_its_line_budget(tmp_path: Path) -> None:
    """No folder has more lines of code than its budget in `LINES`. Docstrings, comments and empty lines do not
    count.
    """
    lines, _ = sizes(PACKAGE, depth=2)
    assert set(LINES) == set(lines)
    assert [f"{folder}: {lines[folder]} of {most}" for folder, most in LINES.items() if lines[folder] > most] == []
    plant(tmp_path, "store/a.py", '"""Two lines\nof docstring."""\n\n# a comment\nx = (\n    1,\n)\n')
    assert sizes(tmp_path)[0] == {"store": 3}


def test_no_modules_import_each_other() -> None:
    """No modules of the package import each other in a circle."""
    assert circles(import_edges(PACKAGE)) == []


def test_a_circle_of_module_imports_is_found(tmp_path: Path) -> None:
    """The check finds a circle of modules, even through an import inside a function and an import for type checkers."""
    plant(tmp_path, "store/a.py", "def f():\n    from .b import g")
    plant(
        tmp_path, "store/b.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from atoll.rounds.c import d"
    )
    plant(tmp_path, "rounds/c.py", "from atoll.store import a")
    plant(tmp_path, "rounds/d.py", "from atoll.store import a, b")
    assert circles(import_edges(tmp_path)) == [["atoll.rounds.c", "atoll.store.a", "atoll.store.b"]]


def test_the_coordinator_imports_few_files() -> None:
    """The coordinator imports at most `COORDINATOR_IMPORTS` files of the package."""
    assert len(import_edges(PACKAGE)[COORDINATOR]) <= COORDINATOR_IMPORTS


def test_no_folders_import_each_other() -> None:
    """No folders of the package import each other in a circle."""
    assert circles(room_edges(PACKAGE)) == []


def test_a_circle_of_folder_imports_is_found(tmp_path: Path) -> None:
    """The check finds a circle of folders, even through an import inside a function."""
    plant(tmp_path, "worker/exchange/a.py", "from atoll.worker.session import b")
    plant(tmp_path, "worker/session/b.py", "from atoll.worker.peer import c")
    plant(tmp_path, "worker/peer/d.py", "def f():\n    from ..exchange.e import g")
    assert circles(room_edges(tmp_path)) == [["worker/exchange", "worker/peer", "worker/session"]]


@pytest.mark.covers("X2", "L11")
def test_the_package_runs_no_code_from_data() -> None:
    """The package uses nothing that can run code from received data, such as `pickle`, `eval` or `torch.load`."""
    assert dangerous_calls(PACKAGE) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle.loads"),
        ("import torch\ntorch.load(path, weights_only=True)", "torch.load"),
        ("import torch as t\nwrite = t.save", "torch.save"),
        ("from torch import load", "torch.load"),
        ("import yaml\nyaml.load(text)", "yaml.load"),
        ("def f(text):\n    return eval(text)", "eval"),
        ("exec(text)", "exec"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle"),
    ],
)
def test_a_planted_unsafe_call_is_found(tmp_path: Path, text: str, expected: str) -> None:
    """The check reports an import or a call that can run code from data."""
    complaints = dangerous_calls(plant(tmp_path, "store/x.py", text))
    assert complaints
    assert all(complaint.endswith(f": {expected}") for complaint in complaints)


@pytest.mark.covers("X8")
def test_only_listed_files_import_by_name() -> None:
    """Only the files in `LOADERS` import modules by a name. They take this name from settings or from a call of the
    user.
    """
    assert loading_calls(PACKAGE) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("from atoll.registry import OwnName\nOwnName(info.codec.text)", "atoll.registry.OwnName"),
        ("from atoll import registry\nregistry.OwnName(info.codec.text)", "atoll.registry.OwnName"),
        ("from importlib import import_module as load\nload(info.codec.text)", "importlib.import_module"),
        ("from runpy import run_module\nrun_module(name)", "runpy.run_module"),
        ("__import__(name)", "__import__"),
    ],
)
def test_code_that_imports_received_names_is_found(tmp_path: Path, text: str, expected: str) -> None:
    """The check of the sources reports a call that imports by a received name."""
    # The test plants each such call in a file.
    (complaint,) = loading_calls(plant(tmp_path, "worker/x.py", text))
    assert complaint.endswith(f": {expected}")


def test_model_eval_is_not_reported_as_unsafe(tmp_path: Path) -> None:
    """The check for unsafe calls does not report `model.eval()`, which sets the mode of a model."""
    assert dangerous_calls(plant(tmp_path, "worker/x.py", "model.eval()\ntorch.manual_seed(0)")) == []


@pytest.mark.parametrize("module", LIGHT)
@pytest.mark.usefixtures("fresh_processes")
def test_what_a_quick_command_imports_is_light(module: str) -> None:
    """A module that a quick command needs does not import heavy libraries, such as torch."""
    script = f"import sys, {module}; print(*sys.modules)"
    outcome = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    assert set(outcome.stdout.split()) & LIGHT[module] == set()


def test_the_layout_page_lists_exactly_the_files(tmp_path: Path) -> None:
    """The layout page has one line for each file of the package, and each path or name on the page exists. The check
    reports planted mistakes.
    """
    assert wrong_list(PACKAGE, LAYOUT) == []
    assert wrong_names(LAYOUT) == []
    plant(tmp_path, "errors.py", "")
    plant(tmp_path, "store/__init__.py", '"""The store."""')
    plant(tmp_path, "store/journal.py", "")
    lines = ("## Files", "**`atoll/`**", "| `errors` | a |", "| `errors` | b |", "**`store/`**", "| `tickets` | c |")
    page = "\n".join([*lines, "## Words", "| `x` | d |"])
    assert wrong_list(tmp_path, page) == [
        "store/journal.py: has no line",
        "store/tickets.py: there is no such file",
        "errors.py: has several lines",
    ]
    assert wrong_names("`rounds/leases` (`silent`), `State.why` in `rounds/state`, `tests/README.md`, `store/`") == []
    assert wrong_names("`rounds/leasing`, `rounds/leases` (`loud`)") == ["rounds/leasing", "rounds/leases: loud"]


def test_the_layout_page_orders_folders_by_imports() -> None:
    """On the layout page, each folder comes after the folders that it imports, in the list as in the table."""
    headings = re.findall(r"^\*\*`(.+)/`\*\*$", LAYOUT, re.MULTILINE)
    assert headings == re.findall(r"^\| `(.+)/` \|", LAYOUT, re.MULTILINE)
    assert headings[0] == "atoll"
    assert sorted(headings[1:]) == sorted(LINES.keys() - {"."})
    levels = [LEVEL[room_of(*folder.split("/"))] for folder in headings[1:]]
    assert levels == sorted(levels)


def test_the_layout_diagram_shows_every_import(tmp_path: Path) -> None:
    """The diagram on the layout page shows exactly the imports between folders. The check reports a missing folder, a
    missing arrow and an arrow without an import.
    """
    assert wrong_diagram(PACKAGE, LAYOUT) == []
    plant(tmp_path, "store/journal.py", "from atoll.rounds import state")
    page = LAYOUT.replace(" & objects", "")
    complaints = wrong_diagram(tmp_path, page)
    assert "objects is not drawn" in complaints
    assert "store imports rounds, which no arrows show" in complaints
    assert "store does not import protocol" in complaints
