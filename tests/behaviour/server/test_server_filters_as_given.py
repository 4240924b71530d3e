"""How filters at the server may be given: in a run file, a variable, a flag or a program; what is wrong is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from filter_world import START, Halved
from harness.processes import Nursery
from kit.processes import Outcome, command
from kit.servers import new_server

import atoll
from atoll import Settings
from atoll.errors import ConfigError, UsageError


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"path": "norm_clip", "args": {"norm": 1.0}}, "norm_clip.*with args"),
        ({"path": "nrom_clip"}, "not one of the filters.*Did you mean 'norm_clip'"),
        ({"name": "drop"}, "is not a valid filter table"),
        ({"path": "drop", "args": ["w"], "site": "a"}, "is not a valid filter table"),
        ({"path": "drop", "args": ["w"], "sites": "a"}, "is not a valid filter table"),
        ({"path": "math:sqrt", "args": [4.0]}, "creates a float"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_at_the_start(entry: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        atoll.Server(START, settings={"algorithm.name": "diloco", "workflow.result_filters": [entry]})


def test_what_a_program_gives_wrongly_is_refused() -> None:
    with pytest.raises(UsageError, match="is not a filter"):
        new_server(START, filters=["drop"])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="Use one of them"):
        atoll.Server(
            START,
            filters=[Halved()],
            settings={"algorithm.name": "diloco", "workflow.result_filters": [{"path": "cast", "args": ["bf16"]}]},
        )
    with pytest.raises(UsageError, match=r"Server got data_filters, but its settings have workflow\.payload_filters"):
        atoll.Server(
            START,
            data_filters=[Halved()],
            settings={"algorithm.name": "diloco", "workflow.payload_filters": [{"path": "cast", "args": ["bf16"]}]},
        )


@pytest.mark.covers("T8", "X3")
def test_rounds_refuse_filters_that_only_tasks_can_have() -> None:
    for options in ({"data_filters": [Halved()]}, {"workflow.payload_filters": [{"path": "cast", "args": ["bf16"]}]}):
        told = r"workflow.payload_filters is set \(.* of every site\), but the run has rounds.*Leave them out"
        with pytest.raises(ConfigError, match=told):
            new_server(START, **options)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"contains the tasks train, but a run with rounds sends no tasks.*Remove the key tasks"
    ):
        new_server(START, filters={"a": {"train": [Halved()]}})


def test_a_filter_in_a_file_beside_the_run_file_and_in_a_variable(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from atoll.filters import Filter\nclass Mine(Filter): ...\n")
    (tmp_path / "run.toml").write_text(
        'algorithm.name = "diloco"\nworkflow.result_filters = [{path = "own.py:Mine"}]\n'
    )
    (filter_,) = atoll.Server(START, Settings.read(tmp_path / "run.toml", environ={}))._filters.results.of("a")
    assert repr(filter_) == "Mine()"
    text = '[{path = "cast", args = ["bf16"]}]'
    settings = Settings.read(environ={"ATOLL_WORKFLOW__RESULT_FILTERS": text})
    assert settings.workflow.result_filters == ({"path": "cast", "args": ["bf16"]},)


def test_set_takes_a_list_of_tables(nursery: Nursery, tmp_path: Path) -> None:
    def shown(value: str) -> Outcome:
        chosen = ("--set", "algorithm.name=fedavg", "--set", f"workflow.result_filters={value}")
        return command(nursery, tmp_path, "config", "show", *chosen)

    tables = '[{path = "drop", args = ["w"]}]'
    assert f"result_filters = {tables}  # command line" in shown(tables).stdout
    refused = shown("drop")
    assert refused.returncode == ConfigError.exit_code
    assert "workflow.result_filters" in refused.stderr
