"""Filters of one site, over the real path: what the server gets, and what happens when one fails."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.client import Client
from kit.servers import plain_server
from kit.sites import clients, finish, together
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll.errors import UsageError
from atoll.filters import Drop, Filter, NormClip, Outgoing


def serving(folder: Path, **settings: object) -> atoll.Server:
    return plain_server(folder, zero_linear(), **({"rounds.total": 1} | settings))


def zero_linear() -> nn.Linear:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def become_(model: nn.Linear, weight: list[float], bias: float) -> nn.Linear:
    with torch.no_grad():
        model.weight.copy_(torch.tensor([weight]))
        model.bias.fill_(bias)
    return model


@pytest.mark.covers("T8")
def test_each_site_has_its_own_filters(tmp_path: Path) -> None:
    """a drops its bias, b scales its update of norm √(6² + 8²) = 10 down to 5; the mean is of what is left."""
    filters = {"a": [Drop("bias")], "b": [NormClip(5.0)]}
    becomes = {"a": ([1.0, 1.0], 7.0), "b": ([6.0, 8.0], 0.0)}

    def take_part(site: str) -> None:
        model = zero_linear()
        with atoll.join(server.url, site, folder=tmp_path / "w", filters=filters[site]) as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                fl_round.submit(become_(model, *becomes[site]))

    with serving(tmp_path, **{"rounds.sites": 2}) as server:
        together(*(partial(take_part, site) for site in filters))
        assert server.wait(60)
        result = load_file(server.exports / "model.safetensors")
    assert result["weight"].tolist() == [[2.0, 2.5]]  # (1 + 3) / 2, (1 + 4) / 2
    assert result["bias"].tolist() == [0.0]


@pytest.mark.covers("T8", "X3")
def test_the_round_goes_on_without_a_site_with_a_failing_filter(tmp_path: Path) -> None:
    class Broken(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            raise KeyError("salt")

    with serving(tmp_path, **{"rounds.sites": 2, "rounds.min_sites": 1}) as server:
        (good,) = clients(server, tmp_path, "a").values()
        (bad,) = clients(server, tmp_path, "b", filters=[Broken()]).values()
        for client in (good, bad):
            assert client.next_round() == 1
            client.pull()
        good.submit(become_(nn.Linear(2, 1), [1.0, 2.0], 3.0))
        with pytest.raises(UsageError, match=r"Broken\(\) failed at '(weight|bias)': KeyError: 'salt'") as caught:
            bad.submit(become_(nn.Linear(2, 1), [9.0, 9.0], 9.0))
        bad.close(caught.value)
        result = finish(server, {"a": good})
    assert (result["weight"].tolist(), result["bias"].tolist()) == ([[1.0, 2.0]], [3.0])


@pytest.mark.covers("T8")
def test_diloco_has_filters_too(tmp_path: Path) -> None:
    """The gradient of x·w + b is x = (3, 4) and 1, which is dropped: a step of 1 moves w by −(3, 4), clipped to half.

    The outer step is SGD with a rate of 1.
    """
    model = zero_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {
        "algorithm.name": "diloco",
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "aggregation.upload_codec.name": "none",
    }
    with serving(tmp_path, **{"diloco.sync_every": 1}, **settings) as server:
        with atoll.DiLoCo(
            model,
            optimizer,
            server=server.url,
            site="a",
            folder=tmp_path / "w",
            filters=[Drop("bias"), NormClip(2.5)],
        ):
            model(torch.tensor([[3.0, 4.0]])).sum().backward()
            optimizer.step()
        assert server.wait(60)
        result = load_file(server.exports / "model.safetensors")
    assert (result["weight"].tolist(), result["bias"].tolist()) == ([[-1.5, -2.0]], [0.0])


def scaffold_step(fl_round: Any, rate: float) -> nn.Linear:
    """One step down the gradient of x·w + b at x = (3, 4): the gradient is (3, 4) and 1."""
    model = fl_round.load_into(zero_linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with fl_round.correct(model, optimizer):
        model(torch.tensor([[3.0, 4.0]])).sum().backward()
        optimizer.step()
    return model


@pytest.mark.covers("T8")
def test_scaffolds_control_follows_from_what_the_filters_left(tmp_path: Path) -> None:
    """A step of η = ½: Δ = (1.5, 2) and ½, which is dropped; the norm 2.5 is clipped to 1.25, so Δ̂ = (0.75, 1).

    Δc = Δ̂/η − c = (1.5, 2), where the gradient is (3, 4); nothing of the bias is told. With one site c is c_i.
    """
    filters = [Drop("bias"), NormClip(1.25)]
    with serving(tmp_path, **{"algorithm.name": "scaffold", "rounds.total": 2}) as server:
        with atoll.join(server.url, "a", folder=tmp_path / "w", filters=filters) as worker:
            rounds = iter(worker)
            fl_round = next(rounds)
            fl_round.submit(scaffold_step(fl_round, 0.5))
            fl_round = next(rounds)
            assert fl_round.load_into(zero_linear()).weight.tolist() == [[-0.75, -1.0]]
            for controls in (fl_round.global_state("control"), fl_round.own_state("control")):
                assert controls["weight"].tolist() == [[1.5, 2.0]]
                assert controls["bias"].tolist() == [0.0]


@pytest.mark.covers("T8", "X3")
def test_a_control_difference_measured_by_hand_does_not_pass_by_the_filters(tmp_path: Path) -> None:
    with serving(tmp_path, **{"algorithm.name": "scaffold"}) as server:
        with atoll.join(server.url, "a", folder=tmp_path / "w", filters=[NormClip(1.0)]) as worker:
            fl_round = next(iter(worker))
            model = fl_round.load_into(zero_linear())
            with pytest.raises(UsageError, match=r"would bypass this site's filters.*round\.correct"):
                fl_round.submit(model, steps=1, groups={"control": fl_round.own_state("control")})


def test_a_filter_that_fails_at_the_begin_leaves_the_outbox_as_it_was(tmp_path: Path) -> None:
    """A server that lost power may ask for the update before once more."""

    class Second(Filter):
        def begin(self, update: Outgoing) -> None:
            if update.about.round == 2:
                raise KeyError("salt")

    with serving(tmp_path, **{"rounds.total": 2}) as server:
        with Client(server.url, site="a", folder=tmp_path / "w", filters=[Second()]) as client:
            for number in (1, 2):
                assert client.next_round() == number
                client.pull()
                if number == 1:
                    client.submit(zero_linear())
            with pytest.raises(UsageError, match=r"Second\(\) failed at the start of the update: KeyError: 'salt'"):
                client.submit(zero_linear())
            (note,) = (tmp_path / "w").glob("a/*/outbox.json")
            assert json.loads(note.read_text())["round"] == 1
