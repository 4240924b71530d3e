"""What counts as another run: settings, code with what it imports, arguments, data, sites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll import Settings
from atoll.simulate.inputs import Inputs

Take = Callable[..., Inputs]


@pytest.fixture
def take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Take:
    """The inputs of a run in a folder with a script, two modules of its own and a file of data."""
    monkeypatch.chdir(tmp_path)
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

    return taken


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


def test_a_damaged_record_of_inputs_is_ignored(take: Take, tmp_path: Path) -> None:
    inputs = take()
    inputs.write(tmp_path)
    assert Inputs.read(tmp_path) == inputs
    note = tmp_path / "begun-with.json"
    note.write_text(note.read_text().replace("fedavg", "fedxyz"))
    assert Inputs.read(tmp_path) is None
    note.unlink()
    assert Inputs.read(tmp_path) is None
