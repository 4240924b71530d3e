"""What a site refuses to do with models, and a site without a function that evaluates."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from evaluation_world import ALONE, errors, evaluation_server, losses, zero
from kit import DiLoCoSites, together
from kit.servers import PLAIN_DILOCO
from torch import nn

import atoll
from atoll.errors import UsageError

ALONE_AT_A = ALONE | {"rounds.sites": 1}


def evaluate(folder: Path, register: Callable[[Any], None], **settings: Any) -> dict[str, Any]:
    """An evaluation of one site, in this process; the run's model is w = 0."""
    with evaluation_server(folder, **ALONE_AT_A, **settings) as server:
        with atoll.tasks(server.url, "a") as worker:
            register(worker)
            worker.run()
        server.run()
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
def test_a_failed_evaluation_shows_its_reason(tmp_path: Path, register: Callable[[Any], None], words: str) -> None:
    """If a site's own model cannot be evaluated, its row in the matrix has no metrics, and its cell
    gives the reason.
    """

    def both(worker: Any) -> None:
        worker.evaluates(measure, model=NET)
        register(worker)

    found = evaluate(tmp_path, both)
    assert losses(found) == {"version 0": {"a": 0.0}}
    assert words in errors(found)["a", "a"]


@pytest.mark.covers("P9", "X3")
@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (None, "returned nothing"),
        ([1], "returned an object of type list"),
        ({"loss": "low"}, "The metric 'loss' is 'low'"),
        (dict.fromkeys(range(257), 1.0), "returned 257 metrics; an evaluation may have at most 256"),
    ],
    ids=["nothing", "list", "text", "too many"],
)
def test_a_site_refuses_wrong_metrics(tmp_path: Path, gives: Any, words: str) -> None:
    """If a site's evaluation returns no valid metrics, the cell gives the reason. The next model is still evaluated."""
    given = iter([gives, {"loss": 1.0}])

    def register(worker: Any) -> None:
        worker.evaluates(lambda state: next(given))
        worker.submits(lambda: {"weight": torch.ones(1, 1)})

    found = evaluate(tmp_path, register)
    assert words in errors(found)["version 0", "a"]
    assert losses(found) == {"a": {"a": 1.0}}


@pytest.mark.covers("P9", "X3")
@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({}, "returned nothing instead of a dict of metric name → number"),
        ([1], "returned an object of type list instead of a dict of metric name → number"),
        (dict.fromkeys(map(str, range(257)), 1.0), "returned 257 metrics; an evaluation may have at most 256"),
    ],
    ids=["nothing", "list", "too many"],
)
def test_a_server_refuses_wrong_metrics(tmp_path: Path, metrics: Any, words: str) -> None:
    """If a site answers with no valid metrics, the server puts the reason into the cell."""
    given = iter([metrics, {"loss": 1.0}])

    def register(worker: Any) -> None:
        worker.task("validate")(lambda _: {"metrics": next(given)})
        worker.submits(lambda: {"weight": torch.ones(1, 1)})

    assert errors(evaluate(tmp_path, register)) == {("version 0", "a"): f"the site {words}"}


@pytest.mark.covers("P9")
def test_long_tensors_are_loaded_into_the_module(tmp_path: Path) -> None:
    """A long tensor of a model reaches the site's module unchanged, though the site reads models in pieces of 8 MiB."""
    # This tensor takes three pieces.
    expected = torch.arange(2.5 * 2**23 // 4).view(1, -1)

    def wrong(model: Any) -> dict[str, Any]:
        return {"loss": (model.weight != expected).sum()}

    def register(worker: Any) -> None:
        worker.evaluates(wrong, model=nn.Linear(expected.numel(), 1, bias=False))
        worker.submits(lambda: {"weight": expected})

    assert losses(evaluate(tmp_path, register, has_model=False)) == {"a": {"a": 0.0}}


@pytest.mark.covers("P9")
def test_only_the_sites_in_the_settings_evaluate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the sites listed in an evaluation's `sites` evaluate models.

    For a listed site that has never joined, the error suggests the most similar name of a site.
    """
    monkeypatch.setattr("atoll.server.tasks.cross_site_evaluation.RETURN_S", 0.1)
    asked: list[str] = []

    def take_part(name: str) -> None:
        with atoll.tasks(server.url, name) as worker:
            worker.evaluates(lambda state: asked.append(name) or {"loss": 1.0})
            worker.submits(lambda: {"weight": torch.ones(1, 1)})
            worker.run()

    only_b = ({"kind": "cross_site_evaluation", "sites": ["clinic-b", "clinc-b"]},)
    with evaluation_server(tmp_path, **{"workflow.steps": only_b, "rounds.total": 0, "rounds.sites": 2}) as server:
        together(partial(take_part, "clinic-a"), partial(take_part, "clinic-b"))
        server.run()
    found = server.evaluation.model_dump()
    assert losses(found) == {"version 0": {"clinic-b": 1.0}, "clinic-b": {"clinic-b": 1.0}}
    assert set(asked) == {"clinic-b"}
    assert "'clinic-b'" in errors(found)["version 0", "clinc-b"]


@pytest.mark.covers("P9", "P1")
def test_a_handler_may_answer_with_a_reference(tmp_path: Path) -> None:
    """A handler for `submit_model` may answer with a reference to a model that is stored elsewhere."""
    with atoll.objects.Publisher() as publisher:

        def register(worker: Any) -> None:
            worker.task("submit_model")(lambda payload: {"model": publisher.publish({"weight": torch.full((2,), 3.0)})})
            worker.evaluates(lambda state: {"loss": state["weight"][-1]})

        assert losses(evaluate(tmp_path, register, has_model=False)) == {"a": {"a": 3.0}}


@pytest.mark.covers("T9")
def test_a_task_has_only_one_handler(tmp_path: Path) -> None:
    """A second handler for the same task is refused. A script's own handler for `submit_model` is accepted."""
    with evaluation_server(tmp_path, **ALONE_AT_A) as server, atoll.tasks(server.url, "a") as worker:
        worker.evaluates(measure)
        with pytest.raises(UsageError, match="'validate' already has a handler"):
            worker.task("validate")(print)
        with pytest.raises(UsageError, match="already registered"):
            worker.evaluates(measure)
        worker.task("submit_model")(print)  # one's own counts
        server.stop()


def test_joining_a_run_without_rounds_logs_no_algorithm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log line of a site that joins a run without rounds names no algorithm."""
    caplog.set_level(logging.INFO, "atoll")
    with evaluation_server(tmp_path, **ALONE_AT_A) as server, atoll.join(server.url, site="a", folder=tmp_path / "w"):
        assert f"a: joined run atoll at {server.url}" in caplog.text
        server.stop()


def test_task_handlers_wait_in_vain_without_a_server() -> None:
    """Without a server, a script may register task handlers. They are never called, and `run` returns at once."""
    with atoll.join() as worker:
        assert worker.task("count")(len) is len
        assert worker.evaluates(model=nn.Linear(1, 1))(measure) is measure
        assert worker.submits(measure) is measure
        worker.note("nothing")
        assert list(worker.tasks()) == []
        worker.run()


# -- sites without a function that evaluates
#
# A DiLoCo loop answers no tasks itself: a site is told at its join that an evaluation will ask it.


@pytest.mark.covers("P9")
def test_refuses_a_site_without_an_evaluator_before_training(tmp_path: Path) -> None:
    """If a run evaluates after training, a site without an evaluation function is refused before it trains."""
    trained: list[int] = []
    with evaluation_server(tmp_path, **{"rounds.sites": 1}) as server:
        with pytest.raises(UsageError) as refused, atoll.join(server.url, "a", folder=tmp_path / "w") as worker:
            trained.extend(fl_round.number for fl_round in worker)
        (site,) = server.status().workers
        assert server.status().version == 0
    assert trained == []
    assert "site a" in refused.value.message
    assert "worker.evaluates" in refused.value.remedy
    assert (site.state, "evaluat" in site.error) == ("failed", True)


@pytest.mark.covers("P9")
def test_refuses_a_site_of_tasks_without_an_evaluator(tmp_path: Path) -> None:
    """A site that only answers tasks is refused if the run evaluates and the site has no evaluation function."""
    with evaluation_server(tmp_path, **ALONE_AT_A) as server:
        with atoll.tasks(server.url, "a") as worker:
            worker.task("train")(lambda payload: payload)
            with pytest.raises(UsageError) as refused:
                worker.run()
    assert "site a" in refused.value.message


@pytest.mark.covers("P9")
@pytest.mark.parametrize("by_hand", [False, True], ids=["left out of the sites", "with a handler of its own"])
def test_a_site_may_train_without_an_evaluator(tmp_path: Path, by_hand: bool) -> None:
    """Site `b` may train without an evaluation function in two cases.

    Either the evaluation's `sites` leave site `b` out, or site `b` answers the task `validate` with its own handler.
    """
    evaluation: dict[str, Any] = {"kind": "cross_site_evaluation", "site_models": False}
    workflows = [{"kind": "train"}, evaluation if by_hand else {**evaluation, "sites": ["a"]}]

    def train(url: str, site: str) -> None:
        with atoll.join(url, site, folder=tmp_path / "w") as worker:
            if site == "a":
                worker.evaluates(lambda model: {"loss": 1.0})
            elif by_hand:
                worker.task("validate")(lambda payload: {"metrics": {"loss": 2.0}})
            for fl_round in worker:
                fl_round.submit(fl_round.load_into(zero()))

    with evaluation_server(tmp_path, **{"rounds.sites": 2, "workflow.steps": workflows}) as server:
        together(lambda: train(server.url, "a"), lambda: train(server.url, "b"))
        server.run()
    found = {cell.site: cell.metrics.get("loss") for cell in server.evaluation.cells}
    assert found == ({"a": 1.0, "b": 2.0} if by_hand else {"a": 1.0})


@pytest.mark.covers("P9")
@pytest.mark.parametrize("sites", [["a", "b"], ["a"]])
def test_warns_of_the_evaluation_before_the_first_step(
    tmp_path: Path, sites: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A DiLoCo site that will be asked to evaluate gets a warning before its first step."""
    caplog.set_level(logging.WARNING)
    told_before: set[str] = set()

    def told(logger: str) -> set[str]:
        lines = [record.getMessage() for record in caplog.records if record.name == logger]
        return {site for site in "ab" for line in lines if line.startswith(f"{site}: ") and "evaluat" in line}

    def during(site: str, step: int) -> None:
        if site in told("atoll"):
            told_before.add(site)

    workflows = [{"kind": "train"}, {"kind": "cross_site_evaluation", "sites": sites, "site_models": False}]
    settings = PLAIN_DILOCO | {"diloco.sync_every": 2, "rounds.sites": 2, "workflow.steps": workflows}
    with evaluation_server(tmp_path, **settings) as server:
        DiLoCoSites(server.url, tmp_path, 4, build=zero, during=during).join()
    assert told_before == told("atoll") == set(sites)
