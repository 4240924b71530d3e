"""What people do: submit NaN again and again, press Ctrl-C, restart with another model, ask for figures afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import atoll
from atoll.errors import SchemaMismatch, UpdateRefused, UsageError
from atoll.worker.session import MAX_REFUSALS


def submit_nan(url: str, folder: Path, trained: list[int]) -> None:
    with atoll.join(url, site="a", folder=folder) as worker:
        for round_ in worker:
            model = round_.load_into(nn.Linear(2, 2))
            trained.append(round_.number)
            with torch.no_grad():
                model.weight.fill_(float("nan"))
            round_.submit(model)


@pytest.mark.covers("F31")
def test_a_site_that_is_refused_again_and_again_ends_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained: list[int] = []
    with atoll.Server(
        nn.Linear(2, 2), port=0, state_dir=tmp_path / "s", algorithm="fedavg", min_free_bytes=0
    ) as server:
        with pytest.raises(UpdateRefused, match="weight holds NaN or Inf"):
            submit_nan(server.url, tmp_path / "w", trained)
        assert len(trained) == MAX_REFUSALS
        assert server.status().refused == MAX_REFUSALS
    said = [record.message for record in caplog.records if record.name == "atoll.server"]
    assert sum("a: update refused: weight holds NaN or Inf" in line for line in said) == MAX_REFUSALS


def interrupted(url: str, folder: Path) -> None:
    with atoll.join(url, site="a", folder=folder):
        raise KeyboardInterrupt


def test_leaving_by_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    with atoll.Server(nn.Linear(2, 2), port=0, state_dir=tmp_path / "s", algorithm="fedavg") as server:
        with pytest.raises(KeyboardInterrupt):
            interrupted(server.url, tmp_path / "w")
        (worker,) = server.status().workers
        assert (worker.state, worker.error) == ("left", "")


@pytest.mark.covers("F30")
def test_a_restart_with_another_model_is_refused_with_both_digests(tmp_path: Path) -> None:
    atoll.Server(nn.Linear(2, 2), port=0, state_dir=tmp_path / "s").start().stop()
    with pytest.raises(SchemaMismatch, match=r"this start.*weight F32\[3, 2\].*weight F32\[2, 2\]"):
        atoll.Server(nn.Linear(2, 3), port=0, state_dir=tmp_path / "s").start()
    atoll.Server(nn.Linear(2, 2), port=0, state_dir=tmp_path / "s").start().stop()


@pytest.mark.covers("L24")
def test_the_figures_of_a_worker_are_there_after_the_block(tmp_path: Path) -> None:
    options = {"num_workers": 1, "rounds": 1, "sync_every": 1}
    with atoll.Server(nn.Linear(2, 2), port=0, state_dir=tmp_path / "s", **options) as server:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert diloco.sync_metrics["rounds"] == 1
        assert diloco.sync_metrics["bytes_up"] > 0
        assert diloco.sync_metrics["bytes_down"] > 0
        (worker,) = server.status().workers
        assert worker.bytes_down == diloco.sync_metrics["bytes_down"]


@pytest.mark.covers("L14")
def test_a_pseudo_gradient_of_zeros_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"num_workers": 1, "rounds": 1, "sync_every": 1}
    with atoll.Server(nn.Linear(2, 2), port=0, state_dir=tmp_path / "s", **options) as server:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w"):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert "the pseudo-gradient is all zero after 1 steps" in caplog.text


@pytest.mark.parametrize("weight", ["3", None, float("nan"), 0, -1])
def test_a_weight_that_is_no_positive_number_is_refused(tmp_path: Path, weight: object) -> None:
    with atoll.join() as worker:
        (round_,) = worker
        with pytest.raises(UsageError, match="weight"):
            round_.submit(nn.Linear(1, 1), weight=weight)  # type: ignore[arg-type]


def test_a_metric_that_is_no_number_is_named(tmp_path: Path) -> None:
    with atoll.join() as worker:
        (round_,) = worker
        with pytest.raises(UsageError, match="'loss' is 'high'"):
            round_.submit(nn.Linear(1, 1), metrics={"loss": "high"})  # type: ignore[dict-item]
