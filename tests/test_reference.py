"""tools/reference.py leaves nothing out: every setting, every variable, every error and its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from atoll.config import FIELDS, NOT_SETTINGS, settings
from atoll.errors import BY_CODE
from atoll.protocol.messages import RunInfo

TOOL = Path(__file__).parents[1] / "tools" / "reference.py"


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
