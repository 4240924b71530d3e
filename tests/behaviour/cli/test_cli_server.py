"""Flags and settings of `atoll server`, and `atoll config show`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Nursery, Process, free_port, wait_until

from atoll.errors import ServerUnreachable
from atoll.testing.run import Status, status

Show = Callable[..., dict[str, Any]]


@pytest.fixture
def show(atoll_command) -> Show:
    """Group → its settings, as `atoll config show` prints them."""

    def shown(*arguments: str) -> dict[str, Any]:
        outcome = atoll_command("config", "show", *arguments)
        assert outcome.returncode == 0, outcome.stderr
        return tomllib.loads(outcome.stdout)

    return shown


@pytest.mark.covers("L12", "L23")
def test_sets_what_runs_choose(show: Show) -> None:
    chosen = {
        "algorithm.name": "diloco",
        "network.insecure": "yes",
        "model.buffers": "*mean, *var",
        "async.enabled": "true",
        "aggregation.upload_codec.name": "none",
        "algorithm.outer_optimizer": "{lr = 0.5, betas = [0.9, 0.95]}",
        "diloco.num_fragments": "2",
        "diloco.sync_every": "30",
        "diloco.fragment_update_alpha": "0.5",
        "async.max_staleness": "3",
        "disk.export_dir": "out",
    }
    found = show(*(each for key, value in chosen.items() for each in ("--set", f"{key}={value}")))
    assert found["network"]["insecure"] is True
    assert found["model"]["buffers"] == ["*mean", "*var"]
    assert (found["async"]["enabled"], found["async"]["max_staleness"]) == (True, 3)
    assert found["aggregation"]["upload_codec"]["name"] == "none"
    assert found["algorithm"]["outer_optimizer"].items() >= {"lr": 0.5, "betas": [0.9, 0.95]}.items()
    diloco = found["diloco"]
    assert (diloco["num_fragments"], diloco["sync_every"], diloco["fragment_update_alpha"]) == (2, 30, 0.5)
    assert found["disk"]["export_dir"] == "out"


RUN_FILE = """
model.source = "own:build"
algorithm.name = "fedavg"
rounds.total = 7
disk.state_dir = "state"
disk.min_free_bytes = 0
"""
OWN = """
import beside
from torch import nn

def build():
    return nn.Linear(2, 2)
"""


@pytest.fixture
def start(nursery: Nursery, tmp_path: Path) -> Callable[..., tuple[Process, Status]]:
    """Start `atoll server there/run.toml` with further arguments; its process, and its status."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "run.toml").write_text(RUN_FILE)
    (tmp_path / "there" / "own.py").write_text(OWN)
    (tmp_path / "beside.py").write_text("")

    def started(*arguments: str) -> tuple[Process, Status]:
        port = free_port()
        process = nursery.start("atoll", "server", "there/run.toml", "--port", str(port), *arguments, cwd=tmp_path)

        def answer() -> Status | None:
            assert process.poll() is None, process.output()
            with suppress(ServerUnreachable):
                return status(f"http://127.0.0.1:{port}")
            return None

        return process, wait_until(answer, "its answer")

    return started


@pytest.mark.covers("L12")
def test_flags_win_over_the_run_file_and_modules_beside_it_and_here_can_be_imported(start, tmp_path: Path) -> None:
    process, said = start()
    assert said.rounds == 7
    assert (tmp_path / "there" / "state").is_dir()
    process.kill()
    process, said = start("--rounds", "9", "--dir", "here", "--host", "0.0.0.0", "--set", "network.insecure=true")
    assert said.rounds == 9
    assert (tmp_path / "here").is_dir()
    assert "127.0.0.1" not in said.address
    process.kill()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "rounds.total=many"], ["command line: rounds.total", "'many'"]),
        (["--set", "algorithm.outer_optimizer=lr=1"], ["--set", "algorithm.outer_optimizer={key = 1}"]),
        (["missing.toml"], ["missing.toml", "atoll new"]),
        (["--set", "rounds.min_sites=5"], ["rounds.min_sites is 5", "rounds.sites is 1"]),
    ],
)
def test_a_wrong_value_names_the_flag_and_the_remedy(atoll_command, arguments: list[str], words: list[str]) -> None:
    outcome = atoll_command("server", *arguments)
    assert outcome.returncode == 2
    assert [word for word in words if word not in outcome.stderr] == []


@pytest.mark.parametrize("present", [True, False])
def test_a_run_file_that_was_not_named_is_offered(atoll_command, tmp_path, present: bool) -> None:
    if present:
        (tmp_path / "run.toml").write_text('model.source = "model:build"\n')
    outcome = atoll_command("server", "--port", "0")
    assert outcome.returncode == 2
    assert ("Did you mean: atoll server run.toml?" in outcome.stderr) is present


def test_config_show_refuses_unknown_names_and_says_where_a_value_comes_from(atoll_command, tmp_path) -> None:
    (tmp_path / "run.toml").write_text('[algorithm]\nname = "fedavgg"\n')
    outcome = atoll_command("config", "show", "run.toml")
    assert outcome.returncode == 2
    assert "Did you mean 'fedavg'?" in outcome.stderr
    outcome = atoll_command("config", "show", "run.toml", "--set", "algorithm.name=fedavg")
    assert re.search(r"^state_dir = .*  # default$", outcome.stdout, re.MULTILINE)
