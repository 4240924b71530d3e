"""FedNova over the real path: numbers by hand, steps that are missing, steps that are counted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.client import Client
from kit.servers import plain_server
from kit.sites import clients
from safetensors.torch import load_file
from torch import nn

import atoll
from atoll.errors import ConfigError, UsageError
from atoll.reducers import NormalisedMean, RoundFacts
from atoll.testing.contracts import ReducerContract


class TestNormalisedMean(ReducerContract):
    reducer = NormalisedMean()


def serve(folder: Path, **settings: Any) -> atoll.Server:
    start = {"w": torch.zeros(1), "bn.running_mean": torch.zeros(1)}
    fednova = {"algorithm.name": "fednova", "rounds.sites": 2, "rounds.total": 1}
    return plain_server(folder, start, **(fednova | settings))


def submit(client: Client, value: float, **how: Any) -> None:
    client.pull()
    client.submit({"w": torch.tensor([value]), "bn.running_mean": torch.tensor([value])}, **how)


def result(server: atoll.Server) -> tuple[float, float]:
    assert server.wait(60)
    model = load_file(server.exports / "model.safetensors")
    return model["w"].item(), model["bn.running_mean"].item()


@pytest.mark.covers("X43")
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # p = ¼, ¾; x = 0 and the sites end at −4 and −6, so u = 4, 6
        ((2, 6), -6.25),  # τ_eff = ¼·2 + ¾·6 = 5;  5 · (¼·4/2 + ¾·6/6)
        ((6, 2), -7.25),  # τ_eff = ¼·6 + ¾·2 = 3;  3 · (¼·4/6 + ¾·6/2) = ½ + 27/4
        ((3, 3), -5.5),  # FedAvg: ¼·4 + ¾·6
    ],
    ids=["few and many", "many and few", "equal"],
)
def test_updates_count_per_step(tmp_path: Path, steps: tuple[int, int], expected: float) -> None:
    with serve(tmp_path) as server:
        for client, value, weight, count in zip(
            clients(server, tmp_path).values(), (-4.0, -6.0), (1.0, 3.0), steps, strict=True
        ):
            assert client.next_round() == 1
            submit(client, value, weight=weight, steps=count)
            client.close()
        parameter, buffer = result(server)
        assert parameter == pytest.approx(expected, rel=1e-6)
        assert buffer == -5.5  # buffers are averaged as they are


@pytest.mark.covers("X43")
def test_an_update_without_steps_is_refused_and_the_round_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "atoll")
    with serve(tmp_path, **{"rounds.total": 2, "rounds.min_sites": 1}) as server:
        a, b = clients(server, tmp_path).values()
        assert a.next_round() == b.next_round() == 1
        submit(b, -100.0)
        submit(a, -4.0, steps=2)
        assert a.next_round() == b.next_round() == 2  # closed with a alone: −4
        status = server.status()
        assert (status.refused, status.history[-1].workers) == (1, ["a"])
        submit(a, -5.0, steps=1)
        submit(b, -8.0, steps=3)
        for client in (a, b):
            client.close()
        # u = 1, 4 from −4; p = ½, ½; τ_eff = 2: 2 · (½·1/1 + ½·4/3) = 7/3
        assert result(server)[0] == pytest.approx(-4 - 7 / 3, rel=1e-6)
    assert "The update of b was refused: it reports no number of local steps" in caplog.text
    assert "submit(model, steps=…)" in caplog.text


def test_correct_counts_the_steps(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    with (
        plain_server(tmp_path, model, **{"algorithm.name": "fednova", "rounds.total": 1}) as server,
        atoll.join(server.url, site="a", folder=tmp_path / "w") as worker,
    ):
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with fl_round.correct(model, optimizer):
                for _ in range(7):
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()
            fl_round.submit(model)
        assert server.status().refused == 0
        assert server.status().fragments[0].version == 1


def test_another_reducer_is_refused_and_the_normalised_mean_serves_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"aggregation.reducer = 'median'.*fednova"):
        serve(tmp_path, **{"aggregation.reducer.name": "median"}).start()
    with serve(
        tmp_path, **{"algorithm.name": "fedavg", "aggregation.reducer.name": "normalised_mean", "rounds.sites": 1}
    ) as server:
        with Client(server.url, site="a", folder=tmp_path / "w") as client:
            client.next_round()
            submit(client, -4.0, steps=5)
        assert result(server)[0] == -4.0


def test_steps_below_one_have_no_mean() -> None:
    with pytest.raises(UsageError, match=r"\[2, 0\]"):
        NormalisedMean().weigh(RoundFacts([1.0, 1.0], [1.0, 1.0], [2, 0]))
