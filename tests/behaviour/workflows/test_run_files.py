"""What a run file may say of workflows and components, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery, free_port
from kit.servers import new_server, plain_server
from ordered_world import start_server, told, write_run

import atoll
from atoll.errors import AtollError, ConfigError, UsageError

EVALUATION = {"kind": "cross_site_evaluation"}


@pytest.mark.covers("P12", "X3")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workflow.steps": [{"kind": "trian"}]}, ["Workflow 1 has the unknown kind 'trian'", "Did you mean 'train'?"]),
        ({"workflow.function": [{"kind": "train"}]}, ["workflow.function = [{", "input should be a valid string"]),
        ({"workflow.steps": [{}]}, ["Workflow 1 is {}", "either kind (train, cross_site_evaluation)"]),
        ({"workflow.steps": [{"kind": "train", "path": "f.py:g"}]}, ["exactly one of kind and path"]),
        ({"workflow.steps": [{"path": "f.py:g", "progress_timeout": 3}]}, ["Did you mean 'progress_timeout_s'?"]),
        ({"workflow.steps": [{**EVALUATION, "version": ["latest"]}]}, ["'version'", "Did you mean 'versions'?"]),
        (
            {"workflow.steps": [{"kind": "train", "versions": []}]},
            ["Workflow 1, of the kind 'train', has the unknown key 'versions'"],
        ),
        ({"workflow.steps": [{"kind": "train", "start_timeout_s": -1}]}, ["start_timeout_s = -1", "0: no limit"]),
        ({"workflow.steps": [{"path": "f.py:g", "args": [1]}]}, ["args = [1]", "Write a table"]),
        ({"workflow.steps": [{"kind": "train", "args": {"rounds": 3}}]}, ["the kind 'train' takes no arguments"]),
        ({"run.name": "two\nlines"}, ["name is 'two\\nlines'", "Use one line"]),
        (
            {"workflow.steps": [{"kind": "train"}] * 2, "rounds.total": 1},
            ["Workflows 1 and 2", "a run trains only once"],
        ),
        ({"workflow.steps": [{"kind": "train"}, EVALUATION]}, ["training never ends", "Set rounds"]),
        (
            {"workflow.steps": [EVALUATION], "rounds.total": 3},
            ["rounds.total is 3, but no step in workflow.steps trains"],
        ),
        (
            {"workflow.steps": [EVALUATION], "workflow.function": "f.py:g"},
            ["workflow.function is 'f.py:g', but workflow.steps is set"],
        ),
        ({"workflow.steps": [{"kind": "train"}], "model.ranks": 2}, ["workflow.steps is", "model.ranks is 2"]),
        (
            {"workflow.components": [{"id": "a", "pth": "f:g"}]},
            ["Component 1 has the unknown key 'pth'", "Did you mean 'path'?"],
        ),
        ({"workflow.components": [{"id": "a"}]}, ["Component 1 is {'id': 'a'}"]),
        ({"workflow.components": [{"id": "a", "path": "f:g"}] * 2}, ["Two components have the id 'a'"]),
        ({"aggregation.aggregator.path": "@trim"}, ["aggregator refers to the unknown component 'trim'"]),
        (
            {
                "workflow.payload_filters": [{"path": "@clp"}],
                "workflow.components": [{"id": "clip", "path": "norm_clip"}],
            },
            ["payload_filters refers to the unknown component 'clp'", "Did you mean 'clip'?"],
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0][:40],
)
def test_what_is_wrong_in_a_run_file_is_named(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        atoll.Settings.build(settings)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.covers("P12", "P9")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"versions": ["lates"]}, ["versions contains 'lates'", "Did you mean 'latest'?"]),
        ({"versions": "latest"}, ["versions is 'latest'", 'versions = ["latest"]']),
        ({"versions": [-1]}, ["versions contains -1"]),
        ({"sites": []}, ["sites is []"]),
        ({"evaluation_timeout_s": -1}, ["evaluation_timeout_s is -1"]),
        ({"site_models": False, "versions": []}, ["no model would be evaluated"]),
    ],
    ids=["word", "no list", "number", "sites", "time", "nothing"],
)
def test_an_evaluation_that_means_nothing_is_refused_before_training(
    tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    workflows = [{"kind": "train"}, EVALUATION | options]
    with pytest.raises(ConfigError) as caught:
        plain_server(tmp_path, {"w": torch.ones(1)}, **{"workflow.steps": workflows, "rounds.total": 1}).run()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.covers("P12")
def test_components_are_made_once_and_referred_to_by_id(nursery: Nursery, tmp_path: Path) -> None:
    """`long` has `short` in it, and so has the workflow: it is made once. `@@` stands for an @."""
    write_run(
        tmp_path,
        """
[[workflow.components]]
id = "short"
path = "flow.py:Schedule"
args = {first = 0.1}
[[workflow.components]]
id = "long"
path = "flow.py:Schedule"
args = {first = 0.5, more = ["@short"]}
[[workflow.components]]
id = "unused"
path = "flow.py:Nobody"
[[workflow.components]]
id = "run"
path = "flow.py:scheduled"
[[workflow.steps]]
path = "flow.py:scheduled"
args = {schedule = "@long", other = "@@me"}
[[workflow.steps]]
path = "@run"
args = {schedule = "@short"}
""",
        **{"rounds.total": None},
    )
    server = start_server(nursery, tmp_path, free_port())
    assert server.wait(30) == 0, server.output()
    assert told(tmp_path) == ["a schedule is made"] * 2 + ["scheduled 0.5 [0.1] @me", "scheduled 0.1 [] None"]


@pytest.mark.covers("P12")
def test_filters_aggregator_and_persistor_take_what_a_component_names() -> None:
    settings = atoll.Settings.build(
        {
            "workflow.components": [
                {"id": "clip", "path": "norm_clip", "args": {"max_norm": 2.0}},
                {"id": "trim", "path": "mine.py:Trim", "args": {"share": 0.1}},
            ],
            "workflow.result_filters": [{"path": "@clip", "sites": ["a"]}],
            "aggregation.aggregator.path": "@trim",
        }
    )
    assert settings.workflow.result_filters == ({"path": "norm_clip", "args": {"max_norm": 2.0}, "sites": ["a"]},)
    assert (settings.aggregation.aggregator.path, settings.aggregation.aggregator.options) == (
        "mine.py:Trim",
        {"share": 0.1},
    )


def scheduled(controller: Any, schedule: Any) -> None: ...


def alone() -> None: ...


async def awaited(controller: Any) -> None: ...


def yielding(controller: Any) -> Any:
    yield


async def both(controller: Any) -> Any:
    yield


class Awaited:
    async def __call__(self, controller: Any) -> None: ...


def gives(controller: Any) -> Any:
    return yielding(controller)


@pytest.mark.covers("P12", "X3")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workflow.steps": [{"path": scheduled}]}, ["cannot be called with args []", "'schedule'"]),
        ({"workflow.steps": [{"path": alone}]}, ["'alone' cannot be called with args []"]),
        ({"workflow.steps": [{"path": awaited}]}, ["is 'awaited', a coroutine function", "plain function"]),
        ({"workflow.steps": [{"path": yielding}]}, ["is 'yielding', a coroutine function or a generator"]),
        ({"workflow.steps": [{"path": both}]}, ["is 'both', a coroutine function or a generator"]),
        ({"workflow.steps": [{"path": Awaited()}]}, ["a coroutine function or a generator"]),
        (
            {"workflow.steps": [{"path": gives}]},
            ["gives failed: RunFailed: it returned a generator, which is never run"],
        ),
        (
            {"workflow.steps": [{"path": scheduled, "args": {"schedul": 1}}]},
            ["'scheduled' cannot be called", "schedul"],
        ),
        ({"workflow.steps": [{"path": "json:decoder"}]}, ["is a module", "Use a function"]),
        ({"workflow.steps": [{"path": "json:laods"}]}, ["Did you mean 'loads'?"]),
        (
            {
                "workflow.steps": [{"path": scheduled, "args": {"schedule": "@a"}}],
                "workflow.components": [
                    {"id": "a", "path": "builtins:dict", "args": {"x": "@b"}},
                    {"id": "b", "path": "builtins:dict", "args": {"x": "@a"}},
                ],
            },
            ["in a circle: a → b → a"],
        ),
        (
            {
                "workflow.steps": [{"path": scheduled, "args": {"schedule": "@a"}}],
                "workflow.components": [{"id": "a", "path": "builtins:len", "args": {"x": 1}}],
            },
            ["Component 'a' is 'builtins:len' with args"],
        ),
        (
            {"workflow.steps": [EVALUATION, EVALUATION]},
            ["2 evaluations have the same name, and so the same file for results: cross_site_evaluation.json"],
        ),
        (
            {"workflow.steps": [EVALUATION | {"name": "a/b"}, EVALUATION | {"name": "a_b"}]},
            ["2 evaluations have the same name, and so the same file for results: a_b.json"],
        ),
    ],
    ids=[
        "needs",
        "alone",
        "awaited",
        "yields",
        "both",
        "object",
        "gives",
        "argument",
        "module",
        "name",
        "circle",
        "component",
        "twice",
        "one-file",
    ],
)
def test_functions_are_looked_at_before_the_server_starts(
    tmp_path: Path, settings: dict[str, Any], words: list[str]
) -> None:
    """But for what a plain function gives: that shows when it has been called."""
    with pytest.raises(AtollError) as caught:
        new_server(**{"disk.state_dir": tmp_path, "network.port": 0}, **settings).run()
    for word in words:
        assert word in str(caught.value)


def test_a_function_beside_the_list_is_refused() -> None:
    with pytest.raises(UsageError, match="its settings have one, too"):
        atoll.Server(workflow=print, settings={"workflow.steps": [EVALUATION]})
