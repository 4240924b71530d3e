"""What a site refuses to do with models: by name, before it does harm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_world import errors, losses, serve
from kit import Threads
from torch import nn

import atoll
from atoll.errors import UsageError

ALONE: dict[str, Any] = {"workflow.steps": ({"kind": "cross_site_evaluation"},), "rounds.total": 0, "rounds.sites": 1}


def play(folder: Path, register: Callable[[Any], None], **settings: Any) -> dict[str, Any]:
    """An evaluation of one site, in this process; the run's model is w = 0."""
    with serve(folder, **ALONE, **settings) as server:
        with atoll.tasks(server.url, "a") as worker:
            register(worker)
            worker.run()
        server.run()
    assert server.evaluation is not None
    return server.evaluation.model_dump()


def measure(model: Any) -> dict[str, Any]:
    return {"loss": model.weight.sum()}


NET = nn.Linear(1, 1, bias=False)
KEY = {"object": "0" * 32, "secret": "0" * 32, "digest": "0" * 64, "expires_at": 1}


@pytest.mark.covers("P9", "X3")
@pytest.mark.parametrize(
    ("register", "words"),
    [
        (lambda worker: worker.submits(lambda: NET), "model=copy.deepcopy(model)"),
        *(
            (
                lambda worker, model=model: worker.submits(lambda: model),
                f"The model a does not fit the module of worker.evaluates{words}",
            )
            for model, words in (
                ({"weight": torch.ones(1, 1), "bias": torch.ones(1)}, ": only the model has 'bias'"),
                ({"weight": torch.ones(1, 2)}, ": 'weight' is F32[1, 2] in the model, F32[1, 1] in the module"),
                ({"bias": torch.ones(1)}, ": only the module has 'weight'"),
            )
        ),
        *(
            (lambda worker, answer=answer: worker.task("submit_model")(lambda _: answer), words)
            for answer, words in (
                ({"model": "here"}, "is not a reference to a model"),
                ({"model": KEY}, "server does not have object"),
            )
        ),
    ],
    ids=["the module that others' go into", "more", "shape", "less", "no reference", "no object"],
)
def test_a_model_that_cannot_be_evaluated_leaves_its_row_empty_and_says_why(
    tmp_path: Path, register: Callable[[Any], None], words: str
) -> None:
    def both(worker: Any) -> None:
        worker.evaluates(measure, model=NET)
        register(worker)

    found = play(tmp_path, both)
    assert losses(found) == {"version 0": {"a": 0.0}}
    assert words in errors(found)["a", "a"]


@pytest.mark.covers("P9", "X3")
@pytest.mark.parametrize(
    ("gives", "words"),
    [(None, "returned nothing"), ([1], "returned a list"), ({"loss": "low"}, "The metric 'loss' is 'low'")],
    ids=["nothing", "list", "text"],
)
def test_what_is_no_metric_is_said_to_the_site(tmp_path: Path, gives: Any, words: str) -> None:
    given = iter([gives, {"loss": 1.0}])

    def register(worker: Any) -> None:
        worker.evaluates(lambda state: next(given))
        worker.submits(lambda: {"weight": torch.ones(1, 1)})

    found = play(tmp_path, register)
    assert words in errors(found)["version 0", "a"]
    assert losses(found) == {"a": {"a": 1.0}}


@pytest.mark.covers("P9")
def test_a_model_of_long_tensors_goes_into_the_module_as_it_is(tmp_path: Path) -> None:
    """It is read in runs of 8 MiB, of which the tensor takes three."""
    expected = torch.arange(2.5 * 2**23 // 4).view(1, -1)

    def wrong(model: Any) -> dict[str, Any]:
        return {"loss": (model.weight != expected).sum()}

    def register(worker: Any) -> None:
        worker.evaluates(wrong, model=nn.Linear(expected.numel(), 1, bias=False))
        worker.submits(lambda: {"weight": expected})

    assert losses(play(tmp_path, register, has_model=False)) == {"a": {"a": 0.0}}


@pytest.mark.covers("P9")
def test_only_the_sites_that_are_named_evaluate(tmp_path: Path) -> None:
    asked: list[str] = []

    def site(name: str) -> None:
        with atoll.tasks(server.url, name) as worker:
            worker.evaluates(lambda state: asked.append(name) or {"loss": 1.0})
            worker.submits(lambda: {"weight": torch.ones(1, 1)})
            worker.run()

    workflows = ({"kind": "cross_site_evaluation", "sites": ["b"]},)
    with serve(tmp_path, **{"workflow.steps": workflows, "rounds.total": 0, "rounds.sites": 2}) as server:
        running = Threads(partial(site, "a"), partial(site, "b"))
        server.run()
        running.join()
    assert server.evaluation is not None
    assert losses(server.evaluation.model_dump()) == {"version 0": {"b": 1.0}, "b": {"b": 1.0}}
    assert set(asked) == {"b"}


@pytest.mark.covers("P9", "P1")
def test_a_handler_may_answer_with_a_reference_to_a_model_elsewhere(tmp_path: Path) -> None:
    with atoll.objects.Publisher() as publisher:

        def register(worker: Any) -> None:
            worker.task("submit_model")(lambda payload: {"model": publisher.publish({"weight": torch.full((2,), 3.0)})})
            worker.evaluates(lambda state: {"loss": state["weight"][-1]})

        assert losses(play(tmp_path, register, has_model=False)) == {"a": {"a": 3.0}}


@pytest.mark.covers("T9")
def test_a_name_has_one_handler(tmp_path: Path) -> None:
    with serve(tmp_path, **ALONE) as server, atoll.tasks(server.url, "a") as worker:
        worker.evaluates(measure)
        with pytest.raises(UsageError, match="'validate' already has a handler"):
            worker.task("validate")(print)
        with pytest.raises(UsageError, match="'validate' already has a handler"):
            worker.evaluates(measure)
        worker.task("submit_model")(print)  # one's own counts
        server.stop()


def test_without_a_server_handlers_are_taken_and_never_called() -> None:
    with atoll.join() as worker:
        assert worker.task("count")(len) is len
        assert worker.evaluates(model=nn.Linear(1, 1))(measure) is measure
        assert worker.submits(measure) is measure
        worker.note("nothing")
        assert list(worker.tasks()) == []
        worker.run()
