"""Errors that leave a public function end a script with their exit code: docs/reference/exit-codes.md promises it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
import atoll.recipes
from atoll.errors import is_public_api
from atoll.worker.tasks.answer_tasks import Task, TaskWorker
from atoll.worker.training.federated_loop import Round, Worker

GIVEN = (Round, Task, TaskWorker, Worker)
"""Classes of what public functions return."""

FORWARDED = {
    "atoll.Settings": {"read", "build"},  # of pydantic's own methods nothing is Atoll's
    "atoll.AtollError": set[str](),
}
"""Public name → the methods that are Atoll's, where not all are."""


def members(name: str, cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class of Atoll has, its constructor among them."""
    seen = set[str]()
    for kind in cls.__mro__:
        if not kind.__module__.startswith("atoll."):
            continue
        for key, member in vars(kind).items():
            if key in seen or (key.startswith("_") and key not in ("__init__", "__getitem__")):
                continue
            seen.add(key)
            if name in FORWARDED and key not in FORWARDED[name]:
                continue
            if getattr(kind, "_is_protocol", False):
                continue
            function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            function = function.fget if isinstance(function, property) else function
            if inspect.isfunction(function) and not inspect.isgeneratorfunction(function):
                yield f"{name}.{key} ({kind.__name__})", function


def public() -> Iterator[tuple[str, Any]]:
    named = [(f"atoll.{name}", getattr(atoll, name)) for name in atoll.__all__]
    named += [(f"atoll.recipes.{name}", getattr(atoll.recipes, name)) for name in atoll.recipes.__all__]
    named += [(each.__name__, each) for each in GIVEN]
    for name, value in named:
        if inspect.isclass(value):
            yield from members(name, value)
        elif callable(value):
            yield name, value


@pytest.mark.covers("X3")
def test_every_public_function_sets_exit_codes() -> None:
    """Every public function is declared as public API, so that an uncaught error of it ends a script with the error's
    exit code.
    """
    functions = dict(public())
    assert len(functions) > 100
    assert [name for name, function in functions.items() if not is_public_api(function)] == []


SCRIPTS = {
    "fl_round.correct alone": """
import torch, atoll
with atoll.join() as worker:
    for fl_round in worker:
        fl_round.correct(fl_round.load_into(torch.nn.Linear(2, 2)), "no optimizer")
""",
    "recipe without its script": """
import torch
from atoll.recipes import FedAvgRecipe
FedAvgRecipe(name="x", model=torch.nn.Linear(2, 2), min_sites=1, num_rounds=1, train_script="missing.py")
""",
    "server of an unknown algorithm": """
import torch, atoll
atoll.Server(torch.nn.Linear(2, 2), {"algorithm.name": "fedavgg", "network.port": 0}).start()
""",
}


@pytest.mark.slow
@pytest.mark.covers("X3")
def test_an_uncaught_error_sets_the_exit_code(tmp_path: Path) -> None:
    """If a script does not catch an error of Atoll, the script ends with the exit code of this error, here 2."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    started = {
        what: subprocess.Popen([sys.executable, "-c", text], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
        for what, text in SCRIPTS.items()
    }
    said = {what: process.communicate()[1] for what, process in started.items()}
    codes = {what: process.returncode for what, process in started.items()}
    assert codes == dict.fromkeys(SCRIPTS, 2), said
