"""docs/custom-aggregators.md: the files on the page, with the run files on the page, over the real path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from kit.client import Client
from safetensors.torch import load_file
from torch import Tensor

import atoll

sys.path.insert(0, str(Path(__file__).parent))
from pages import ROOT, blocks

PAGE = ROOT / "docs" / "custom-aggregators.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the page's files."""
    for block in blocks(PAGE):
        _, name = block.info.split()
        (tmp_path / name).write_text(block.text, encoding="utf-8")
    return tmp_path


def play(server: atoll.Server, folder: Path, rounds: int, adds: dict[str, float]) -> dict[str, Tensor]:
    """Rounds in which each site adds a number to every element; returns the result."""
    clients = {site: Client(server.url, site=site, folder=folder / "w").register() for site in adds}
    for _ in range(rounds):
        for client in clients.values():
            assert client.next_round() is not None
        for site, client in clients.items():
            client.submit({name: tensor + adds[site] for name, tensor in client.pull().items()})
    for client in clients.values():
        assert client.next_round() is None
        client.close()
    assert server.wait(60)
    server.run()
    return load_file(server.exports / "model.safetensors")


def server_of(run_file: Path, **flags: object) -> atoll.Server:
    settings = atoll.Settings.read(run_file, {"network.port": 0, "disk.min_free_bytes": 0} | flags, environ={})
    return atoll.Server({"w": torch.zeros(2, 2), "v": torch.zeros(3)}, settings=settings)


SITES = {"a": 1.0, "b": 1.25, "c": 1.375, "d": 50.0, "e": -50.0}


@pytest.mark.covers("D7", "X1")
def test_krum_takes_the_update_in_the_middle_of_the_honest_ones(folder: Path) -> None:
    # with f = 1 of 5 the two nearest count, in units of the number of elements:
    # a: .25² + .375²,  b: .125² + .25²,  c: .125² + .375²; b is the smallest, and d and e are far from everybody
    with server_of(folder / "run.toml") as server:
        result = play(server, folder, 1, SITES)
    assert torch.equal(result["w"], torch.full((2, 2), 1.25))
    assert torch.equal(result["v"], torch.full((3,), 1.25))


@pytest.mark.covers("D13", "X1")
def test_the_running_mean_is_the_mean(folder: Path) -> None:
    with server_of(
        folder / "run.toml",
        **{"aggregation.aggregator": {"path": f"{folder / 'running_mean.py'}:RunningMean"}},
    ) as s:
        result = play(s, folder, 1, SITES)
    assert torch.allclose(result["w"], torch.full((2, 2), sum(SITES.values()) / 5), atol=1e-5)


@pytest.mark.covers("D14", "X1")
def test_the_folder_gives_a_next_run_what_the_last_one_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with server_of(folder / "store.toml") as server:
        play(server, folder, 2, {"a": 1.0})
    saved = {path.name: load_file(path)["v"][0].item() for path in (folder / "shelf").iterdir()}
    assert saved == {f"round-{n:04d}.safetensors": float(n) for n in (0, 1, 2)}
    settings = atoll.Settings.read(
        folder / "store.toml", {"network.port": 0, "disk.state_dir": folder / "next"}, environ={}
    )
    with atoll.Server(settings=settings) as server:
        begin = load_file(server.save_state(folder / "begin.safetensors"))
    assert begin["v"][0].item() == 2.0
