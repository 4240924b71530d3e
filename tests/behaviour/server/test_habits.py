"""What people do: submit NaN again and again, press Ctrl-C, restart with another model, ask for figures afterwards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from kit.servers import new_server, plain_server
from torch import nn

import atoll
from atoll.errors import SchemaMismatch, UpdateRefused, UsageError

MAX_REFUSALS = 5
"""In a row, after which a site gives up."""


def submit_nan(url: str, folder: Path, trained: list[int]) -> None:
    with atoll.join(url, site="a", folder=folder) as worker:
        for fl_round in worker:
            model = fl_round.load_into(nn.Linear(2, 2))
            trained.append(fl_round.number)
            with torch.no_grad():
                model.weight.fill_(float("nan"))
            fl_round.submit(model)


@pytest.mark.covers("F31")
def test_a_site_that_is_refused_again_and_again_ends_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trained: list[int] = []
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        with pytest.raises(UpdateRefused, match="weight contains NaN or Inf"):
            submit_nan(server.url, tmp_path / "w", trained)
        assert len(trained) == MAX_REFUSALS
        assert server.status().refused == MAX_REFUSALS
    said = [record.message for record in caplog.records if record.name == "atoll.server"]
    assert sum("a: update refused: weight contains NaN or Inf" in line for line in said) == MAX_REFUSALS


@pytest.mark.covers("F31")
def test_refusals_are_counted_anew_after_an_update_that_was_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three that are refused, a good one, and the same again: never five in a row."""
    bad = iter([True, True, True, False] * 2)
    with plain_server(tmp_path, nn.Linear(2, 2), **{"rounds.total": 2}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                model = fl_round.load_into(nn.Linear(2, 2))
                if next(bad):
                    with torch.no_grad():
                        model.weight.fill_(float("nan"))
                fl_round.submit(model)
        assert server.status().refused == 6
    assert "in a row" not in caplog.text


@pytest.mark.covers("L20")
def test_what_save_state_wrote_begins_another_run(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with plain_server(tmp_path, model) as server:
        path = server.save_state(tmp_path / "saved.safetensors")
    settings = {"algorithm.name": "diloco", "network.port": 0, "disk.state_dir": tmp_path / "two"}
    with atoll.Server.load_state(path, settings=settings) as server:
        again = safetensors.torch.load_file(server.save_state(tmp_path / "again.safetensors"))
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


def test_a_server_does_not_stay_for_its_own_sites_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.server.serve.WATCHED_S", 3600.0)
    with plain_server(tmp_path, nn.Linear(2, 2), **{"rounds.total": 1}) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.state_dict(), weight=1)
            worker.load_into(nn.Linear(2, 2))  # asks which version is the newest
        server.run()
        assert server.finished


def interrupted(url: str, folder: Path) -> None:
    with atoll.join(url, site="a", folder=folder):
        raise KeyboardInterrupt


def test_leaving_by_ctrl_c_is_no_failure(tmp_path: Path) -> None:
    with plain_server(tmp_path, nn.Linear(2, 2)) as server:
        with pytest.raises(KeyboardInterrupt):
            interrupted(server.url, tmp_path / "w")
        (worker,) = server.status().workers
        assert (worker.state, worker.error) == ("left", "")


built: list[str] = []
wide = 3


def build(counts: bool = False) -> nn.Module:
    """A tied model; with `counts`, one that looks at its own values."""
    embed, head = nn.Embedding(5, wide), nn.Linear(wide, 5, bias=False)
    head.weight = embed.weight
    if counts:
        head.weight.sum().item()
    built.append(head.weight.device.type)
    return nn.Sequential(embed, nn.BatchNorm1d(wide), head)


@pytest.mark.covers("F30")
@pytest.mark.parametrize(("counts", "devices"), [(False, ["meta"]), (True, ["cpu"])])
def test_a_restart_compares_the_model_without_making_it_where_that_is_possible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool, devices: list[str]
) -> None:
    """A large model is not made anew in memory only to see that it is the run's; another one is found all the same."""
    options: dict[str, Any] = {"model.source": f"{__name__}:build", "model.args": {"counts": counts}}
    options |= {"network.port": 0, "disk.state_dir": tmp_path / "s"}
    new_server(**options).start().stop()
    built.clear()
    new_server(**options).start().stop()
    assert built == devices
    monkeypatch.setattr(sys.modules[__name__], "wide", 4)
    with pytest.raises(SchemaMismatch, match=r"0\.weight F32\[5, 4\].*0\.weight F32\[5, 3\]"):
        new_server(**options).start()


def test_a_restart_reads_only_the_header_of_an_initial_models_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.safetensors"
    options: dict[str, Any] = {"model.source": str(file), "network.port": 0, "disk.state_dir": tmp_path / "s"}
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    safetensors.torch.save_file(model.state_dict(), file)
    new_server(**options).start().stop()
    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "load_file", lambda path: pytest.fail(f"{path} is read"))
        new_server(**options).start().stop()
    safetensors.torch.save_file(nn.Linear(2, 3).state_dict(), file)
    with pytest.raises(SchemaMismatch, match="this start"):
        new_server(**options).start()


def one_step(server: atoll.Server, folder: Path, lr: float) -> atoll.DiLoCo:
    """A DiLoCo loop of one local step, which is a round."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=folder / "w") as diloco:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    return diloco


ONE_STEP = {"algorithm.name": "diloco", "rounds.total": 1, "diloco.sync_every": 1}


@pytest.mark.covers("L24")
def test_the_figures_of_a_worker_are_there_after_the_block(tmp_path: Path) -> None:
    with plain_server(tmp_path, nn.Linear(2, 2), **ONE_STEP) as server:
        figures = one_step(server, tmp_path, lr=0.1).sync_metrics
        assert (figures["rounds"], figures["bytes_up"] > 0, figures["bytes_down"] > 0) == (1, True, True)
        (worker,) = server.status().workers
        assert worker.bytes_down == figures["bytes_down"]


@pytest.mark.covers("L14")
def test_a_pseudo_gradient_of_zeros_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with plain_server(tmp_path, nn.Linear(2, 2), **ONE_STEP) as server:
        one_step(server, tmp_path, lr=0.0)
    assert "the pseudo-gradient is all zero after 1 steps" in caplog.text


def test_a_metric_that_is_no_number_is_named() -> None:
    with atoll.join() as worker:
        fl_round = worker.next_round()
        assert fl_round is not None
        with pytest.raises(UsageError, match="'loss' is 'high'"):
            fl_round.submit(nn.Linear(1, 1), metrics={"loss": "high"})  # type: ignore[dict-item]
