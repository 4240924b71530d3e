"""What a worker refuses by itself: weights, metrics, and what is no model."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import UsageError


class Strict(torch.Tensor):
    """Not to be asked for its value while it requires a gradient: torch warns of that once in a process."""

    def __float__(self) -> float:
        assert not self.requires_grad
        return super().__float__()


@pytest.mark.covers("L15")
def test_metrics_are_as_the_script_has_them_and_those_not_finite_are_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a NaN that is passed on: the server refused the update for its loss."""
    loss = torch.ones((), requires_grad=True).as_subclass(Strict) * 0.25
    assert loss.requires_grad
    with plain_server(tmp_path, nn.Linear(2, 1), rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                metrics = {"loss": math.nan, "accuracy": 0.5, "of-torch": loss}
                fl_round.submit(fl_round.load_into(nn.Linear(2, 1)), metrics=metrics)
        assert server.status().history[0].metrics == {"accuracy": 0.5, "of-torch": 0.25}
    assert "the metric 'loss' is nan, so it is not reported" in caplog.text


@pytest.mark.covers("L14")
def test_a_reported_loss_that_becomes_nan_is_told_once_by_the_site_s_name_and_no_longer_shown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the last finite loss would stand for an update with a loss of NaN: 0.75 counts nowhere."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        plain_server(tmp_path, nn.Linear(2, 1), algorithm="diloco", rounds=2, H=3) as server,
        atoll.DiLoCo(model, optimizer, server=server.url, site="box-a", folder=tmp_path / "w") as diloco,
    ):
        for loss in (1.0, 0.5, 0.5, 0.75, math.nan, math.nan):
            diloco.report(loss=loss, accuracy=0.25)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert [line.metrics for line in server.status().history] == [
            {"loss": 0.5, "accuracy": 0.25},
            {"accuracy": 0.25},
        ]
    assert caplog.text.count("box-a: the metric 'loss' is nan, so it is not reported") == 1


@pytest.mark.covers("L15", "X3")
@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": 2**62}, "steps is 4611686018427387904"),
        ({"weight": 10**400}, "The weight is 1000"),
        ({"weight": "3"}, "The weight is '3'. Give a positive, finite number"),
        *(({"weight": weight}, "The weight is") for weight in (0.0, -1.0, math.inf, math.nan)),
        ({"metrics": [0.5]}, "The metrics are list, not a dict"),
        ({"metrics": {"loss": "low"}}, "The metric 'loss' is 'low'"),
        ({"metrics": {1: 0.5}}, "'1' cannot be the name of a metric"),
        ({"metrics": {129 * "m": 0.5}}, "'m+' cannot be the name of a metric"),
        (
            {"metrics": {str(number): 0.5 for number in range(257)}},
            "There are 257 metrics; an update may have at most 256",
        ),
    ],
    ids=str,
)
def test_numbers_that_no_update_has_are_named_and_the_round_can_be_submitted_after_all(
    tmp_path: Path, told: dict[str, Any], words: str
) -> None:
    with plain_server(tmp_path, nn.Linear(2, 1), rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            fl_round = next(iter(worker))
            model = fl_round.load_into(nn.Linear(2, 1))
            with pytest.raises(UsageError, match=words):
                fl_round.submit(model, **told)
            assert not list(tmp_path.rglob("outbox.json")), "refused before anything is formed"
            most = {64 * "m": 10**400} | {str(number): 0.5 for number in range(63)}
            fl_round.submit(model, steps=2**62 - 1, metrics=most)
        assert server.wait(30)
        assert len(server.status().history[0].metrics) == 63


@pytest.mark.covers("X3")
def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="The model is the class Linear"):
        plain_server(tmp_path / "other", nn.Linear).start()
    with plain_server(tmp_path, nn.Linear(2, 1), rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            fl_round = next(iter(worker))
            model = fl_round.load_into(nn.Linear(2, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with pytest.raises(UsageError, match="The model is of type SGD"):
                fl_round.load_into(optimizer)  # type: ignore[type-var]
            for other in ([torch.ones(2)], None):
                with pytest.raises(UsageError, match=f"The model is of type {type(other).__name__}"):
                    fl_round.submit(other)  # type: ignore[arg-type]
            fl_round.submit(model)
    with pytest.raises(UsageError, match="The model is of type OrderedDict"):
        atoll.DiLoCo(model.state_dict(), optimizer)  # type: ignore[arg-type]


@pytest.mark.parametrize("tries", [-1, 2.5])
def test_refuses_a_number_of_retries_that_no_synchronisation_can_have(tries: Any) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(UsageError, match=f"max_sync_retries is {tries}"):
        atoll.DiLoCo(model, torch.optim.SGD(model.parameters()), max_sync_retries=tries)
