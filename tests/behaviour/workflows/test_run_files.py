"""What a run file may say of workflows and components, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import new_server, plain_server

import atoll
from atoll.errors import AtollError, ConfigError

EVALUATION = {"kind": "cross_site_evaluation"}
TRAINING = {"kind": "train"}


def steps(*given: Any, **more: Any) -> dict[str, Any]:
    """Settings of a run with these workflows."""
    return {"workflow.steps": list(given)} | more


def components(*given: Any) -> dict[str, Any]:
    """Settings of a run with these components."""
    return {"workflow.components": list(given)}


def refused(words: list[str], build: Callable[[], object], error: type[AtollError] = ConfigError) -> None:
    """Building it is refused, and the message has all these words."""
    with pytest.raises(error) as caught:
        build()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.covers("P12", "X3")
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (steps({"kind": "trian"}), ["Workflow 1 has the unknown kind 'trian'", "Did you mean 'train'?"]),
        ({"workflow.function": [TRAINING]}, ["workflow.function = [{", "but it must be text"]),
        (steps({}), ["Workflow 1 is {}", "either kind (train, cross_site_evaluation, flower)"]),
        (steps({"kind": "train", "path": "f.py:g"}), ["exactly one of kind and path"]),
        (steps({"path": "f.py:g", "progress_timeout": 3}), ["Did you mean 'progress_timeout_s'?"]),
        (steps({**EVALUATION, "version": ["latest"]}), ["'version'", "Did you mean 'versions'?"]),
        (steps({"kind": "train", "versions": []}), ["Workflow 1, of the kind 'train', has the unknown key 'versions'"]),
        (steps({"kind": "train", "start_timeout_s": -1}), ["start_timeout_s = -1", "0: no limit"]),
        (steps({"path": "f.py:g", "args": [1]}), ["args = [1]", "Write a table"]),
        (steps({"kind": "train", "args": {"rounds": 3}}), ["the kind 'train' takes no arguments"]),
        ({"run.name": "two\nlines"}, ["name is 'two\\nlines'", "Use one line"]),
        (steps(TRAINING, TRAINING) | {"rounds.total": 1}, ["Workflows 1 and 2", "a run trains only once"]),
        (steps(TRAINING, EVALUATION), ["training never ends", "Set rounds"]),
        (steps(EVALUATION) | {"rounds.total": 3}, ["rounds.total is 3, but no step in workflow.steps trains"]),
        (
            steps(EVALUATION) | {"workflow.function": "f.py:g"},
            ["Both workflow.function ('f.py:g') and workflow.steps"],
        ),
        (steps(TRAINING) | {"model.ranks": 2}, ["workflow.steps is", "model.ranks is 2"]),
        (
            components({"id": "a", "pth": "f:g"}),
            ["Component 1 has the unknown key 'pth'", "Did you mean 'path'?"],
        ),
        (components({"id": "a"}), ["Component 1 is {'id': 'a'}"]),
        (components(*[{"id": "a", "path": "f:g"}] * 2), ["Two components have the id 'a'"]),
        ({"aggregation.aggregator.path": "@trim"}, ["aggregator refers to the unknown component 'trim'"]),
        (
            {"workflow.payload_filters": [{"path": "@clp"}]} | components({"id": "clip", "path": "norm_clip"}),
            ["payload_filters refers to the unknown component 'clp'", "Did you mean 'clip'?"],
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0][:40],
)
def test_mistakes_in_run_files_are_reported(settings: dict[str, Any], words: list[str]) -> None:
    """If a run file has a mistake in its workflows or components, the error names the mistake."""
    refused(words, lambda: atoll.Settings.build(settings))


@pytest.mark.covers("P12", "P9")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"versions": ["lates"]}, ["versions contains 'lates'", "Did you mean 'latest'?"]),
        ({"versions": "latest"}, ["versions is 'latest'", 'versions = ["latest"]']),
        ({"versions": [-1]}, ["versions contains -1"]),
        ({"sites": []}, ["sites is []"]),
        ({"evaluation_timeout_s": -1}, ["evaluation_timeout_s is -1"]),
        ({"site_models": False, "versions": []}, ["no model to evaluate"]),
    ],
    ids=["word", "no list", "number", "sites", "time", "nothing"],
)
def test_impossible_evaluations_are_refused_early(tmp_path: Path, options: dict[str, Any], words: list[str]) -> None:
    """If an evaluation has impossible options, the server refuses the run before the training."""
    settings = steps(TRAINING, EVALUATION | options) | {"rounds.total": 1}
    refused(words, lambda: plain_server(tmp_path, {"w": torch.ones(1)}, **settings).run())


@pytest.mark.covers("P12")
def test_settings_may_refer_to_components() -> None:
    """Filters and the aggregator may refer to a component. The settings then have the component's path and arguments in
    that place.
    """
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


SCHEDULED_BY_A = steps({"path": scheduled, "args": {"schedule": "@a"}})


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
        (steps({"path": scheduled}), ["cannot be called with args []", "'schedule'"]),
        (steps({"path": alone}), ["'alone' cannot be called with args []"]),
        (steps({"path": awaited}), ["is 'awaited', a coroutine function", "plain function"]),
        (steps({"path": yielding}), ["is 'yielding', a coroutine function or a generator"]),
        (steps({"path": both}), ["is 'both', a coroutine function or a generator"]),
        (steps({"path": Awaited()}), ["a coroutine function or a generator"]),
        (
            steps({"path": gives}),
            ["gives failed: RunFailed: it returned an object of type generator, which is never run"],
        ),
        (steps({"path": scheduled, "args": {"schedul": 1}}), ["'scheduled' cannot be called", "schedul"]),
        (steps({"path": "json:decoder"}), ["is of type module", "Use a function"]),
        (steps({"path": "json:laods"}), ["Did you mean 'loads'?"]),
        (
            SCHEDULED_BY_A
            | components(
                {"id": "a", "path": "builtins:dict", "args": {"x": "@b"}},
                {"id": "b", "path": "builtins:dict", "args": {"x": "@a"}},
            ),
            ["in a circle: a → b → a"],
        ),
        (
            SCHEDULED_BY_A | components({"id": "a", "path": "builtins:len", "args": {"x": 1}}),
            ["Component 'a' is 'builtins:len' with args"],
        ),
        (
            steps(EVALUATION, EVALUATION),
            ["2 evaluations have the same name, and so the same file for results: cross_site_evaluation.json"],
        ),
        (
            steps(EVALUATION | {"name": "a/b"}, EVALUATION | {"name": "a_b"}),
            ["2 evaluations have the same name, and so the same file for results: a_b.json"],
        ),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[0][:40],
)
def test_workflow_functions_are_checked_at_start(tmp_path: Path, settings: dict[str, Any], words: list[str]) -> None:
    """The server refuses to start with functions or components that do not fit their arguments, with coroutine
    functions and with generators.
    """
    # If a plain function returns a generator, the error comes when the function is called.
    given = {"disk.state_dir": tmp_path, "network.port": 0}
    refused(words, lambda: new_server(**given, **settings).run(), AtollError)


def test_a_function_beside_workflow_steps_is_refused() -> None:
    """`atoll.Server` refuses a workflow function as argument if the settings have `workflow.steps`."""
    with pytest.raises(ConfigError, match=r"given by the argument workflow\) and workflow\.steps .*add the function"):
        atoll.Server(workflow=print, settings=steps(EVALUATION))
