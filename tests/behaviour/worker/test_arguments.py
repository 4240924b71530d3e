"""Arguments of another type than a public function takes are refused at the call, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import diloco
from kit.servers import plain_server
from torch import nn
from torch.optim import SGD

import atoll
from atoll import integrations
from atoll.errors import UsageError

pytestmark = pytest.mark.covers("X3")

MODEL = nn.Linear(2, 1)
FEDAVG = {"algorithm.name": "fedavg", "rounds.total": 1, "rounds.sites": 1}


def loop(**options: Any) -> atoll.DiLoCo:
    return atoll.DiLoCo(MODEL, SGD(MODEL.parameters(), lr=0.1), **options)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: atoll.join(123), "server is 123. Give text, or leave it out"),
        (lambda: atoll.join(b"http://fl.example"), "server is b'http://fl.example'. Give text"),
        (lambda: atoll.join(site=5), "site is 5"),
        (lambda: atoll.join(folder=5), "folder is 5. Give a path"),
        (lambda: atoll.join(swarm="no"), "swarm is 'no'. Give True or False"),
        (lambda: atoll.join(require_server=0), "require_server is 0"),
        (lambda: atoll.join(filters=5), "filters is 5, not a list"),
        (lambda: loop(allow_partial="no"), "allow_partial is 'no'. Give True or False"),
        (lambda: loop(metrics={"loss": 1.0}), "metrics is {'loss': 1.0}. Give a function"),
        (lambda: loop(sync_every="5"), "sync_every is '5'"),
        *(
            (lambda weight=weight: loop(weight=weight), "The weight is")
            for weight in ("x", True, math.nan, -1, 10**400, 10**5000)
        ),
        (lambda: integrations.lightning.AtollCallback(allow_partial="no"), "allow_partial is 'no'"),
        (lambda: integrations.lightning.AtollCallback(weight="x"), "The weight is 'x'"),
        (lambda: integrations.lightning.AtollCallback(weigth=1.0), "no argument 'weigth'. Did you mean 'weight'"),
        (lambda: integrations.lightning.AtollCallback(steps="x"), "steps is 'x'. Give a function or a whole number"),
        (lambda: integrations.transformers.AtollCallback(require_server="no"), "require_server is 'no'"),
        (lambda: integrations.transformers.AtollCallback(weight=-1), "The weight is -1"),
        (lambda: atoll.Server(MODEL, 5), "settings is 5"),
        (lambda: atoll.Server(MODEL, FEDAVG, filters=5), "filters is 5, not a list"),
        (lambda: atoll.Server(MODEL, FEDAVG, outer_optimizer=5), "outer_optimizer is 5. Give a function or text"),
        (lambda: atoll.Settings.build(5), "values is 5"),
        (lambda: atoll.Simulation(MODEL, FEDAVG, script=5), "script is 5"),
        (lambda: atoll.Simulation(MODEL, FEDAVG, script="a.py", sites=2, processes="2"), "processes is '2'"),
        (lambda: atoll.tasks(5), "server is 5"),
        (lambda: atoll.functional.init(require_server="no"), "require_server is 'no'"),
        (lambda: atoll.objects.publish({}, expires_s="60"), "expires_s is '60'. Give a number"),
        (lambda: atoll.objects.fetch(5), "not a reference to tensors"),
        (lambda: atoll.objects.Publisher(name=5), "name is 5. Give text"),
        (lambda: atoll.register("codecs", 5, object), "name is 5. Give text"),
        (lambda: atoll.objects.Publisher(port="80"), "port is '80'. Give a whole number"),
    ],
)
def test_an_argument_of_a_wrong_type_is_refused(call: Callable[[], object], told: str) -> None:
    """Public functions refuse an argument of a wrong type or value, and the error names the argument.

    Text for a boolean does not count as true, and every error is a `UsageError`.
    """
    with pytest.raises(UsageError) as refused:
        call()
    assert told in str(refused.value)


def test_correct_refuses_text_for_a_boolean(tmp_path: Path) -> None:
    """`fl_round.correct` refuses text for `allow_partial`, and the round goes on."""
    model = nn.Linear(2, 1)
    with atoll.join(site="a", folder=tmp_path) as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            with pytest.raises(UsageError, match="allow_partial is 'no'"):
                fl_round.correct(model, SGD(model.parameters(), lr=0.1), allow_partial="no")
            fl_round.submit(model)


@pytest.mark.parametrize("function", [False, True])
def test_diloco_refuses_a_weight_above_the_limit(tmp_path: Path, function: bool) -> None:
    """If the weight is above the run's limit, DiLoCo raises: a fixed weight before the first step, that of a function
    at the first synchronisation.
    """
    options = {"algorithm": "diloco", "H": 1, "rounds": 1, "sites": 1, "aggregation.max_weight": 10.0}
    with plain_server(tmp_path, MODEL, **options) as server:
        model = nn.Linear(2, 1)
        steps = []

        def train() -> None:
            weight = (lambda: 11.0) if function else 11.0
            with diloco(server, tmp_path, model=model, sync_every=1, weight=weight) as trains:
                model(torch.ones(2)).backward()
                steps.append(1)
                trains.optimizer.step()

        above = r"The weight is 11, above aggregation\.max_weight of the run, 10"
        with pytest.raises(UsageError, match=above):
            train()
        assert len(steps) == function
        assert server.status().refused == 0
