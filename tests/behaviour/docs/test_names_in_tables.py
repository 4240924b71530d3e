"""Every Atoll name in the tables for people who move over exists."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll import registry
from atoll.aggregation.user_aggregator import Update
from atoll.config import FIELDS, GROUPS, NOT_SETTINGS, Settings
from atoll.protocol.openapi import OPERATIONS
from atoll.recipes import Recipe, RunResult
from atoll.server.tasks.workflow_controller import Controller
from atoll.worker.training.federated_loop import Round, Worker

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT, Commands, prose, require_command

PAGES = ["from-nvflare", "from-flower", "from-diloco"]

STAND_FOR: dict[str, Any] = {
    "atoll": atoll,
    "controller": Controller,
    "diloco": atoll.DiLoCo,
    "received": Round,
    "recipe": Recipe,
    "result": RunResult,
    "fl_round": Round,
    "server": atoll.Server,
    "update": Update,
    "worker": Worker,
}
"""First word of a name with dots → what it is of."""

FILES = {"run.toml", "model.safetensors", "metrics.jsonl"}
ARGUMENTS = {
    "filters": atoll.join,
    "max_sync_retries": atoll.DiLoCo,
    "metrics": Round.submit,
    "site": Controller.send,
    "weight": Round.submit,
}
"""Names that are arguments → of what."""


def exists(name: str, commands: Commands) -> bool:
    """Whether a name of ours is a public one, a setting, a value of one, a command, a variable, a route or a file."""
    if name in FILES or name in FIELDS or name in GROUPS or name.startswith("algorithm.") or name in NOT_SETTINGS:
        return True
    if name in ARGUMENTS:
        return name in inspect.signature(ARGUMENTS[name]).parameters
    if found := re.fullmatch(r"([\w.]+) = (\S.*)", name):
        Settings.build({"rounds.sites": 2, found[1]: value_of(found[2])})
        return True
    if found := re.fullmatch(r"(GET|POST|PUT|DELETE) (/\S+)", name):
        return any((each.method, each.path) == found.groups() for each in OPERATIONS)
    if name.startswith("atoll "):
        require_command(commands, name.removeprefix("atoll "), name)
        return True
    if name.startswith("--"):
        return name in commands["worker"]
    if name in {each for kind in registry.TABLES for each in registry.TABLES[kind]}:
        return True
    if name.startswith("with "):
        name = re.sub(r"^with (.+?)\(.*$", r"\1", name)
    first, *rest = name.split(".")
    found_at: Any = STAND_FOR.get(first)
    return found_at is not None and bool(rest) and has(found_at, rest)


def value_of(text: str) -> Any:
    return tomllib.loads(f"value = {text}")["value"]


def has(of: Any, names: list[str]) -> bool:
    for name in names:
        fields = getattr(of, "__dataclass_fields__", {})
        annotations = (
            {key for kind in inspect.getmro(of) for key in vars(kind).get("__annotations__", {})}
            if (inspect.isclass(of))
            else set()
        )
        if not hasattr(of, name) and name not in fields and name not in annotations:
            return False
        of = getattr(of, name, None)
    return True


def our_names(page: str) -> list[str]:
    """What stands in back quotes in the second column of the tables whose second column is Atoll's."""
    found: list[str] = []
    for table in re.findall(r"(?:^\|.*\n)+", prose(ROOT / "docs" / f"{page}.md"), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()]
        if head[1:2] == ["Atoll"]:
            found += [name for row in rows if len(row) > 1 for name in re.findall(r"`([^`]+)`", row[1])]
    return found


@pytest.mark.covers("X7")
@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_ours_in_the_tables_exists(page: str, commands: Commands) -> None:
    names = our_names(page)
    assert len(names) > 50
    missing = [name for name in names if not exists(name, commands)]
    assert missing == []


NO_NAMES = ["atoll.joyn", "round.submitt", "sync_evry", "POST /v1/worker", "result.modle", "reducer_of_mine", "--sight"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_does_not_exist_is_found(name: str, commands: Commands) -> None:
    assert not exists(name, commands)
