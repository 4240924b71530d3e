"""tools/reference.py leaves nothing out: every setting, every variable, every error and its exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from atoll import registry
from atoll.cli.new import run_file
from atoll.config import FIELDS, NOT_SETTINGS, settings
from atoll.errors import BY_CODE
from atoll.protocol.messages import RunInfo

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "reference.py"
RUN_FILES = [
    path for path in ROOT.glob("**/*.toml") if path.name in ("run.toml", "flow.toml") and ".venv" not in str(path)
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    subprocess.run([sys.executable, TOOL, "--out", folder], check=True)
    return folder


def rows(page: Path) -> dict[str, list[str]]:
    """First cell of each table row → its cells, without back quotes."""
    table = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("| ")]
    return {cells[0].strip("`"): [cell.strip("`") for cell in cells] for cells in table}


def test_the_reference_lists_every_setting(pages: Path) -> None:
    """The reference page of settings has every setting and variable, with its type and default."""
    found = rows(pages / "settings.md")
    assert set(FIELDS) <= set(found)
    assert found["diloco.sync_every"][1:3] == ["integer ≥ 1, ≤ 1000000000000", "500"]
    assert found["disk.durability"][1:3] == ["process` or `power", "process"]
    assert found["rounds.sample_fraction"][1:3] == ["number > 0, ≤ 1", "1"]
    assert found["aggregation.upload_codec"][1:3] == ["choice", ""]
    assert set(NOT_SETTINGS) - {"ATOLL_FAILPOINTS", "ATOLL_LEASES"} <= set(found)


def test_the_reference_says_how_settings_may_change(pages: Path) -> None:
    """The reference page says for each setting whether a run accepts a change of it.

    `tests/behaviour/server/test_changed_settings.py` shows some settings of each kind.
    """
    kinds = (settings.FROZEN, settings.FROZEN_OUTER, settings.AT_THE_BEGINNING, settings.FOR_SITES)
    named = [key for kind in kinds for key in kind]
    assert len(set(named)) == len(named)
    assert set(named) <= {"algorithm", *FIELDS}
    found = rows(pages / "settings.md")
    keys = (
        "diloco.fragment_sync_delay",
        "algorithm.outer_optimizer",
        "run.seed",
        "network.connections",
        "rounds.total",
        "disk.state_dir",
    )
    assert [found[key][4] for key in keys] == ["no", "no", "not read", "sites: later", "yes", "another run"]


def test_settings_sent_to_sites_do_not_change() -> None:
    """The settings that sites get when they join do not change during a run, except
    `heartbeat_timeout_s` and `name`.
    """
    # Only the server uses these two. `rounds` comes with every reply that counts rounds.
    lasting = {key.rpartition(".")[2] for key in (*settings.FROZEN, *settings.AT_THE_BEGINNING, *settings.FOR_SITES)}
    told = set(RunInfo.model_fields) & {key.rpartition(".")[2] for key in FIELDS}
    assert told - lasting == {"heartbeat_timeout_s", "name"}


@pytest.mark.covers("X3")
def test_the_reference_lists_every_error(pages: Path) -> None:
    """The reference page of exit codes has every error, with its class, base class, exit code and meaning."""
    found = rows(pages / "exit-codes.md")
    for code, kind in BY_CODE.items():
        assert kind.__name__ in found[str(kind.exit_code)][2].replace("`", "").split(", ")
        assert code == "error" or found[code][1:4] == [
            kind.__name__,
            kind.__bases__[0].__name__,
            str(kind.exit_code),
        ]
        assert code == "error" or found[code][4][0].isalpha()  # the meaning, without the code before it


def test_llms_txt_has_every_page_of_the_index(tmp_path: Path) -> None:
    """llms.txt is what its tool writes, and has a line with its content for each file that the index links to."""
    subprocess.run([sys.executable, ROOT / "tools" / "llms.py", "--out", tmp_path / "llms.txt"], check=True)
    made = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert (ROOT / "llms.txt").read_text(encoding="utf-8") == made, "run make reference"
    listed = dict(re.findall(r"^- \[[^\]]+\]\(([^)]+)\): (.+)$", made, re.MULTILINE))
    pages = re.findall(r"\]\(([^)#]+)\)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    assert {os.path.normpath(Path("docs", page)) for page in pages} <= {*listed, "llms.txt"}
    assert all((ROOT / path).exists() for path in listed)


# -- the JSON Schema of run files


def test_the_written_reference_is_current(pages: Path) -> None:
    for made in pages.iterdir():
        written = ROOT / "docs" / "reference" / made.name
        assert written.read_text(encoding="utf-8") == made.read_text(encoding="utf-8"), "run make reference"


@pytest.fixture(scope="module")
def schema(pages: Path) -> Any:
    made = json.loads((pages / "run-file.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


def test_the_schema_accepts_run_files(schema: Any) -> None:
    """The schema accepts every run file of the repository, and what `atoll new` writes for each algorithm."""
    texts = [path.read_text(encoding="utf-8") for path in RUN_FILES]
    assert len(texts) >= 4
    texts += [run_file(algorithm, "study") for algorithm in registry.TABLES["algorithms"]]
    assert [list(schema.iter_errors(tomllib.loads(text))) for text in texts] == [[]] * len(texts)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[rounds]\ntotl = 3", "'totl' was unexpected"),
        ("[round]\ntotal = 3", "'round' was unexpected"),
        ('[rounds]\ntotal = "3"', "'3' is not of type 'integer'"),
        ("[rounds]\ntotal = -1", "-1 is less than the minimum of 0"),
        ('[disk]\ndurability = "powr"', "'powr' is not one of ['process', 'power']"),
    ],
)
def test_the_schema_refuses_a_wrong_setting(schema: Any, text: str, told: str) -> None:
    (error,) = schema.iter_errors(tomllib.loads(text))
    assert told in error.message


def test_the_schema_describes_every_setting(schema: Any) -> None:
    """Each setting has its description and default, without null; names that Atoll brings are shown."""
    made = schema.schema
    for key, field in FIELDS.items():
        group, _, name = key.partition(".")
        entry = made["$defs"][made["properties"][group]["$ref"].rpartition("/")[2]]["properties"][name]
        assert entry["description"] == field.description
        assert "null" not in json.dumps(entry)
    algorithm = made["$defs"]["Algorithm"]["properties"]
    assert set(algorithm["name"]["examples"]) == set(registry.TABLES["algorithms"])
    assert set(algorithm["outer_optimizer"]["properties"]["name"]["examples"]) == set(registry.TABLES["outer"])
    assert made["$defs"]["Disk"]["properties"]["keep_versions"]["default"] == 2
