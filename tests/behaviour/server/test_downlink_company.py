"""The way down beside whatever else a run has: DiLoCo's loop, SCAFFOLD's controls, robust reducers, filters, people."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from down_world import Reference, down_bytes, finish_as, mixed, play, require_equal, serve, start, through, trained
from harness.processes import Nursery
from harness.proxy import Fault, Proxy
from kit.client import Client
from kit.processes import export
from kit.sites import clients, finish, play_round
from own_world import MEAN, write
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll.codecs import build_codecs
from atoll.errors import Gone, StateCorrupt
from atoll.filters import NormClip


def whole_pull(server: atoll.Server, folder: Path, model: Any) -> tuple[dict[str, Tensor], int]:
    """What a new site gets, with what its file has beside the model; and its bytes."""
    client = Client(server.url, site="joiner", folder=folder / "joiner").register()
    client.worker.load_into(model)
    (base,) = (folder / "joiner").rglob("base.safetensors")
    state, nbytes = load_file(base), down_bytes(client)
    client.close()
    return state, nbytes


@pytest.mark.parametrize(
    "options",
    [
        {"aggregation.reducer.name": "median", "aggregation.upload_codec.name": "int4"},
        {"aggregation.reducer.name": "clipped_mean", "aggregation.upload_codec.name": "int8"},
        {"filters": [NormClip(1.0)], "aggregation.upload_codec.name": "int8"},
    ],
    ids=["median", "clipped-mean", "server-filter"],
)
def test_differences_and_whole_pulls_lead_to_the_same_model(tmp_path: Path, options: dict[str, Any]) -> None:
    with serve(tmp_path, **{"rounds.min_sites": 1}, **options) as server:
        sites = clients(server, tmp_path)
        for number in (1, 2, 3):
            play_round(sites, number, lambda site, state: trained(state, site, number))  # noqa: B023
        for client in sites.values():
            assert client.next_round() == 4
        held, nbytes = whole_pull(server, tmp_path, start())
        for client in sites.values():
            require_equal({name: client.pull()[name] for name in held}, held)
            assert down_bytes(client) < 2 * nbytes  # three differences are less than a version
            client.close()


def test_what_an_aggregator_of_ones_own_makes_steps_the_master(tmp_path: Path) -> None:
    with serve(
        tmp_path, **{"aggregation.aggregator.path": f"{write(tmp_path, MEAN)}:mean", "rounds.total": 3}
    ) as server:
        sites = clients(server, tmp_path)
        reference = Reference(start())
        for number in (1, 2, 3):
            play(sites, number, reference)
        finish_as(reference, server, sites)


def test_controls_travel_as_they_are_beside_the_differences(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(90, 60)
    settings = {"algorithm.name": "scaffold", "rounds.min_sites": 1, "model.buffers": ()}
    with serve(tmp_path, model, **settings) as server:
        sites = clients(server, tmp_path)
        for number in (1, 2, 3):
            for client in sites.values():
                assert client.next_round() == number
            for index, client in enumerate(sites.values()):
                client.pull(into=model)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                with client.round.correct(model, optimizer):
                    for _ in range(2):
                        optimizer.zero_grad()
                        ((model(torch.eye(90)) - index) ** 2).mean().backward()
                        optimizer.step()
                client.submit(model)
        for client in sites.values():
            assert client.next_round() == 4
        held, nbytes = whole_pull(server, tmp_path, model)
        for client in sites.values():
            require_equal(client.pull(), {name: held[name] for name in ("weight", "bias")})
            controls = client.round.global_state("control")
            require_equal(controls, {name: held[f"atoll.control.{name}"] for name in controls})
            assert nbytes < down_bytes(client) < nbytes * (1 + 3 * 0.65)  # controls whole, parameters a quarter
            client.close()
    assert controls["weight"].any()


def test_diloco_trains_from_what_went_down_and_submits_against_it(tmp_path: Path) -> None:
    """H = 1: w = b − 1 → u = 1 up to rounding; θ ← θ − lr·C(u + e), b ← b + dec(D(θ − b)); the loop ends with b."""
    start = {"weight": torch.randn(1, 9000, generator=torch.Generator().manual_seed(0))}
    up, down = build_codecs("bf16", {})["bf16"], build_codecs("int4", {})["int4"]
    theta, held = start["weight"].clone(), start["weight"].clone()
    model = nn.Linear(9000, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scale = torch.linspace(0.1, 1.0, 9000)
    settings = {
        "algorithm.name": "diloco",
        "rounds.sites": 1,
        "rounds.total": 3,
        "diloco.sync_every": 1,
        "algorithm.outer_optimizer.lr": 0.5,
        "algorithm.outer_optimizer.momentum": 0.0,
        "aggregation.download_codec.name": "int4",
    }
    with serve(tmp_path, start, **settings) as server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w"):
            for _ in range(3):
                assert torch.equal(model.weight.data, held)
                optimizer.zero_grad()
                (model.weight * scale).sum().backward()
                update = through(up, held - (held - scale), torch.float32)
                optimizer.step()
                theta.add_(update * 1.0, alpha=-0.5)
                held = held + through(down, theta - held, torch.float32)
        assert torch.equal(model.weight.data, held)
        assert server.wait(60)
        assert torch.equal(load_file(server.exports / "model.safetensors")["weight"], theta)
    assert not torch.equal(held, theta)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm.outer_optimizer.momentum": 0.9},
        {"algorithm.outer_optimizer.name": "adam"},
        {"algorithm.outer_optimizer.path": "torch.optim:Adafactor"},
    ],
    ids=["plain", "momentum", "adam", "whole-tensors"],
)
def test_masters_that_were_damaged_are_never_exported(
    tmp_path: Path, nursery: Nursery, options: dict[str, Any]
) -> None:
    out = tmp_path / "model.safetensors"
    with serve(tmp_path, **{"rounds.total": 1}, **options) as server:
        sites = clients(server, tmp_path)
        play_round(sites, 1, lambda site, state: trained(state, site, 1))
        exported = finish(server, sites)
    state = str(tmp_path / "state")
    assert export(nursery, out, "--dir", state) == 1
    require_equal(load_file(out), exported)
    (path,) = (tmp_path / "state" / "slots").glob("state-*")
    data = bytearray(path.read_bytes())
    for place in (9, len(data) // 2, len(data) - 1):
        data[place] ^= 1
        path.write_bytes(data)
        refused = str(export(nursery, tmp_path / "never.safetensors", "--dir", state))
        assert refused.startswith(f"exit {StateCorrupt.exit_code}: ")
        assert re.search(r"state-0-.* is damaged: its digest differs", refused)
        data[place] ^= 1
    assert not (tmp_path / "never.safetensors").exists()


@pytest.mark.covers("L16")
def test_atoll_export_takes_the_masters_from_a_server_and_from_its_directory(tmp_path: Path, nursery: Nursery) -> None:
    """θ, and the same file bit for bit as the server's own export: of the head, and of a version that is still kept."""
    reference, theta, out = Reference(mixed()), {}, tmp_path / "model.safetensors"
    with serve(tmp_path, mixed()) as server, Proxy(server.port) as line:
        sites = clients(server, tmp_path)
        assert export(nursery, out, "--server", server.url) == 0
        require_equal(load_file(out), mixed())  # the initial model is both
        for number in (1, 2):
            play(sites, number, reference)
            for client in sites.values():
                assert client.next_round() == number + 1
            theta[number] = reference.exported
        flipped = Fault(r"GET .*/model/1 ", "down", at=1000, action="flip")
        broken = Fault(r"GET .*/model/2 ", "down", at=5000, action="reset")
        line.faults += [flipped, broken]
        assert export(nursery, out, "--server", line.url) == 2
        assert flipped.reached.is_set()
        assert broken.reached.is_set()
        assert (line.count(r"GET .*/model/1 "), line.count(r"GET .*/model/3 ")) == (2, 1)  # they alone came again
        own = server.save_state(tmp_path / "own.safetensors")
        assert out.read_bytes() == own.read_bytes()
        require_equal(load_file(out), theta[2])
        assert not torch.equal(theta[2]["large"], reference.held["large"])
        assert export(nursery, out, "--server", server.url, "--version", "1") == 1
        require_equal(load_file(out), theta[1])
        refused = str(export(nursery, out, "--server", server.url, "--version", "9"))
        assert refused.startswith(f"exit {Gone.exit_code}: ")
        for client in sites.values():
            client.close()
    assert export(nursery, out, "--dir", str(tmp_path / "state")) == 2
    assert out.read_bytes() == own.read_bytes()


def test_atoll_export_takes_the_masters_of_every_fragment_from_a_server(tmp_path: Path, nursery: Nursery) -> None:
    model, out = nn.Sequential(nn.Linear(60, 70), nn.Linear(70, 80)), tmp_path / "model.safetensors"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {
        "algorithm.name": "diloco",
        "diloco.num_fragments": 2,
        "diloco.sync_every": 2,
        "rounds.sites": 1,
    }
    with serve(tmp_path, model, **{"model.buffers": (), "rounds.total": 0}, **options) as server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w"):
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(1, 60)).square().mean().backward()
                optimizer.step()
        assert (
            export(nursery, out, "--server", server.url) == min(each.version for each in server.status().fragments) == 3
        )
        assert out.read_bytes() == server.save_state(tmp_path / "own.safetensors").read_bytes()
