"""What counts as another run: settings, code with what it imports, arguments, data, sites."""

from __future__ import annotations

import functools
import itertools
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll import Settings
from atoll.simulate import inputs as inputs_module
from atoll.simulate.inputs import Inputs

Take = Callable[..., Inputs]


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Take]:
    """The inputs of a run in a folder with a script, two modules of its own and a file of data."""
    monkeypatch.chdir(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == "own"]:  # of another test
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "own").mkdir()
    for name, text in {
        "train.py": "import json\nimport torch\nimport atoll\nfrom own import model\ndef build(): ...\n",
        "own/__init__.py": "",
        "own/model.py": "from . import layers\n",
        "own/layers.py": "WIDTH = 8\n",
        "unrelated.py": "",
        "data.csv": "1,2\n",
    }.items():
        (tmp_path / name).write_text(text)

    def taken(arguments: tuple[str, ...] = (), sites: str = "ab", **settings: Any) -> Inputs:
        chosen = {"algorithm.name": "fedavg", "model.source": "train.py:build"} | settings
        return Inputs.of(Settings.build(chosen), "train.py", arguments, list(sites))

    yield taken
    for name in ("own", "own.model", "own.layers"):
        sys.modules.pop(name, None)


def test_a_runs_code_is_what_its_script_imports(take: Take, tmp_path: Path) -> None:
    """The files of the user's own folders that a script imports count as the code of a run: not Python's, installed or
    Atoll's modules.
    """
    names = {str(Path(each).relative_to(tmp_path)) for each in take().code}
    assert names == {"train.py", "own/__init__.py", "own/model.py", "own/layers.py"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"settings": {"rounds.total": 3}}, ["rounds.total is 3, was 0"]),
        ({"settings": {"algorithm.mu": 0.1}}, ["algorithm.mu is 0.1, was not set"]),
        ({"settings": {"network.port": 9, "disk.keep_versions": 3}}, []),
        ({"arguments": ("--rate", "0.1")}, ["the script's arguments are --rate 0.1, were none"]),
        ({"sites": "abc"}, ["the sites are 3, were 2"]),
        ({"sites": "ac"}, ["the sites are a, c, were a, b"]),
        ({"sites": "ba"}, []),
        ({"file": "own/layers.py"}, ["own/layers.py has changed"]),
        ({"file": "unrelated.py"}, []),
        ({"file": "data.csv"}, []),
    ],
    ids=["setting", "option", "place", "arguments", "number", "names", "order", "module", "unrelated", "unnamed"],
)
def test_the_error_names_the_changed_inputs(
    take: Take, tmp_path: Path, changed: dict[str, Any], said: list[str]
) -> None:
    before = take()
    if "file" in changed:
        (tmp_path / changed.pop("file")).write_text("WIDTH = 9\n")
    assert take(**changed.pop("settings", {}), **changed).differences(before) == said


@pytest.mark.parametrize("argument", ["data.csv", "--data=data.csv", "."])
def test_files_named_by_arguments_count_as_data(take: Take, tmp_path: Path, argument: str) -> None:
    before = take(("--data", argument))
    assert take(("--data", argument)) == before
    (tmp_path / "data.csv").write_text("1,2\n3,4\n")
    named = argument.rpartition("=")[2]
    assert take(("--data", argument)).differences(before) == [f"{named} has changed"]


@pytest.mark.parametrize(
    ("files", "script"),
    [
        ({"pkg/__init__.py": "", "pkg/sub/__init__.py": "", "pkg/sub/mod.py": ""}, "import pkg.sub.mod"),
        ({"pkg/__init__.py": "", "pkg/sub/__init__.py": ""}, "from pkg.sub import name"),
        ({"space/sub/mod.py": ""}, "import space.sub.mod"),
        ({"space/mod.py": ""}, "from space import mod"),
        (
            {"pkg/__init__.py": "from .a import *", "pkg/a/__init__.py": "__all__ = ['b']", "pkg/a/b.py": ""},
            "import pkg",
        ),
        ({"pkg/__init__.py": "", "pkg/a.py": "from . import NAME", "pkg/b.py": "from .a import x"}, "import pkg.b"),
        ({"lazy.py": ""}, "def train(worker):\n    if worker:\n        import lazy"),
        ({"lazy.py": ""}, "from importlib import import_module\nimport_module('lazy')"),
        ({"pkg/__init__.py": "import helper", "pkg/helper.py": "", "helper.py": ""}, "import pkg"),
    ],
    ids=["packages", "names", "namespace", "of a namespace", "star", "relative", "lazy", "by text", "shadowed"],
)
def test_each_file_that_an_import_runs_counts(take: Take, tmp_path: Path, files: dict[str, str], script: str) -> None:
    """Packages on the way to a module, namespace packages, imports in functions: a change of any of them is named."""
    for name, text in {**files, "train.py": script + "\ndef build(): ...\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    before = take()
    for name in files:
        (tmp_path / name).write_text(f"{files[name]}\nchanged = True\n")
        assert take().differences(before) == [f"{name} has changed"]
        (tmp_path / name).write_text(files[name])


def test_a_package_installed_to_be_edited_counts(
    take: Take, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installer's finder leads to it, not `sys.path`; a link leads to the file itself."""
    from importlib.machinery import ModuleSpec

    home = tmp_path_factory.mktemp("home") / "src" / "named_otherwise"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("")
    (home / "deep.py").write_text("RATE = 1\n")

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
            if name != "edited_package":
                return None
            spec = ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = [str(home)]
            return spec

    monkeypatch.setattr("sys.meta_path", [*sys.meta_path, Finder])
    (tmp_path / "train.py").write_text("from edited_package.deep import RATE\ndef build(): ...\n")
    before = take()
    (home / "deep.py").write_text("RATE = 2\n")
    assert take().differences(before) == [f"{home / 'deep.py'} has changed"]


def test_files_in_subfolders_of_an_argument_count(take: Take, tmp_path: Path) -> None:
    """Files in subfolders of a script's argument count as inputs by name, size and time.

    Hidden folders, folders of runs and files that no argument names do not count.
    """
    (tmp_path / "data" / "a" / "b").mkdir(parents=True)
    (tmp_path / "data" / "a" / "b" / "x.csv").write_text("1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "y.csv").write_text("1")
    (tmp_path / "data" / "link").symlink_to(elsewhere, target_is_directory=True)
    (tmp_path / "data" / "a" / "up").symlink_to(tmp_path / "data", target_is_directory=True)
    (tmp_path / "data" / "gone.csv").symlink_to("nothing")
    before = take(("data",))
    assert take(("data",)) == before
    for changed in ("data/a/b/x.csv", "elsewhere/y.csv", "data/a/b/new.csv"):
        (tmp_path / changed).write_text("1,2,3")
        assert take(("data",)).differences(before) == ["data has changed"]
        before = take(("data",))
    for own in ("atoll-run", ".cache", "__pycache__", "data/runs/x"):
        (tmp_path / own).mkdir(parents=True)
        (tmp_path / own / "begun-with.json").write_text("{}")
        (tmp_path / own / "more").write_text("")
    assert take(("data",)).differences(before) == []
    everything = take((".",))
    (tmp_path / "atoll-run" / "more").write_text("longer")
    assert take((".",)) == everything


def test_a_vast_folder_is_compared_in_part(
    take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says how many of its files count."""
    monkeypatch.setattr(inputs_module, "MOST_FILES", 3)
    (tmp_path / "data").mkdir()
    for name in "abcdef":
        (tmp_path / "data" / name).write_text("")
    with caplog.at_level("INFO", "atoll"):
        before = take(("data",))
    assert "data: of the files in it, the first 3 tell whether the data have changed" in caplog.text
    (tmp_path / "data" / "f").write_text("1")
    assert take(("data",)) == before
    (tmp_path / "data" / "c").write_text("1")
    assert take(("data",)) != before


CELL = """
import functools, own.model
RATE = 0.1
SEEN = 0
def scaled(x): return x * 2
def train(worker, data=None, more=0):
    global SEEN
    SEEN += 1
    return scaled(RATE), own.model, data
def of(width):
    return lambda worker: width
"""


@pytest.mark.parametrize(
    ("old", "new", "script", "said"),
    [
        ("RATE = 0.1", "RATE = 0.2", "train", ["RATE of train has changed"]),
        ("x * 2", "x * 3", "train", ["scaled has changed"]),
        ("SEEN = 0", "SEEN = 5", "train", []),
        ("", "", "functools.partial(train, more={n})", ["more of train has changed"]),
        ("", "", "of({n})", ["width of of.<locals>.<lambda> has changed"]),
        ("", "", "[train, ({n}, 'x')]", []),
    ],
    ids=["value", "function", "counter", "partial", "closure", "unnamed"],
)
def test_what_a_function_of_a_cell_uses_counts(
    take: Take, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, script: str, said: list[str]
) -> None:
    """For a function of a notebook cell, its source and all functions, values and modules that it names count as
    inputs.
    """
    monkeypatch.syspath_prepend(tmp_path)
    files = (tmp_path / f"cell-{number}.py" for number in itertools.count())

    def taken(text: str, number: int) -> Inputs:
        file = next(files)
        file.write_text(f"{text}GIVEN = {script.format(n=number)}\n")
        given = runpy.run_path(str(file), run_name="__main__")["GIVEN"]
        return Inputs.of(Settings.build({"algorithm.name": "fedavg"}), "train.py", (), ["a"], [given])

    before = taken(CELL, 1)
    assert taken(CELL.replace(old, new) if old else CELL, 2).differences(before) == said
    if "train" in script:
        (tmp_path / "own" / "model.py").write_text("changed = True\n")
        assert "own/model.py has changed" in taken(CELL, 1).differences(before)


def test_a_file_that_a_partial_names_is_data(take: Take, tmp_path: Path) -> None:
    """`functools.partial(train, path="data.csv")`, and whatever else a program passes."""

    def taken() -> Inputs:
        given = functools.partial(print, path="data.csv")
        return Inputs.of(Settings.build({"algorithm.name": "fedavg"}), given, (), ["a"])

    before = taken()
    os.utime(tmp_path / "data.csv", ns=(1, 1))
    assert taken().differences(before) == ["data.csv has changed"]


def test_a_damaged_record_of_inputs_is_ignored(take: Take, tmp_path: Path) -> None:
    inputs = take()
    inputs.write(tmp_path)
    assert Inputs.read(tmp_path) == inputs
    note = tmp_path / "begun-with.json"
    note.write_text(note.read_text().replace("fedavg", "fedxyz"))
    assert Inputs.read(tmp_path) is None
    note.unlink()
    assert Inputs.read(tmp_path) is None
