"""disk.in_files = false: updates and versions in memory, by the same code and with the same bits."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.process_figures import memory_files_bytes
from harness.processes import wait_until
from kit import ask_journal
from kit.servers import plain_server
from kit.sites import clients, finish, play_round
from torch import Tensor

import atoll
from atoll.errors import ConfigError

ELEMENTS = 50_000


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"w": torch.randn(ELEMENTS, generator=generator), "bn.running_mean": torch.zeros(7)}


def serve(folder: Path, **options: Any) -> atoll.Server:
    settings: dict[str, Any] = {
        "algorithm.outer_optimizer.name": "adam",
        "aggregation.upload_codec.name": "bf16",
        "rounds.sites": 2,
        "rounds.total": 3,
        "network.part_bytes": 2**16,
    }
    return plain_server(folder, start(), **(settings | options))


def play(server: atoll.Server, folder: Path) -> tuple[str, list[str]]:
    """Three rounds of two sites; the export's digest, and every version's."""

    def train(site: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(10 * number + ord(site))
        return {n: t + torch.randn(t.shape, generator=generator) for n, t in state.items()}

    sites = clients(server, folder)
    for number in (1, 2, 3):
        play_round(sites, number, train, {"b": 2.0})
    wait_until(lambda: server.finished, "the last commit")
    digests = [digest for (digest,) in ask_journal(folder, "SELECT digest FROM history ORDER BY seq")]
    finish(server, sites)
    server.run()
    return hashlib.sha256((server.exports / "model.safetensors").read_bytes()).hexdigest(), digests


@pytest.mark.covers("D8", "D12")
def test_both_give_the_same_bits_and_in_memory_no_tensor_is_on_disk(tmp_path: Path) -> None:
    on_disk = serve(tmp_path / "disk")
    with on_disk:
        assert memory_files_bytes(os.getpid()) == 0
        expected = play(on_disk, tmp_path / "disk")
    assert len(expected[1]) == 4
    in_memory = serve(tmp_path / "memory", **{"disk.in_files": False})
    with in_memory:
        assert memory_files_bytes(os.getpid()) >= 4 * ELEMENTS  # version 0
        assert play(in_memory, tmp_path / "memory") == expected
    assert list((tmp_path / "memory" / "state" / "slots").iterdir()) == []
    assert memory_files_bytes(os.getpid()) == 0


@pytest.mark.covers("D12")
def test_an_aggregator_reads_updates_that_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("def first(updates):\n    return updates[0].tensors\n")
    settings = {
        "aggregation.aggregator.path": f"{tmp_path / 'first.py'}:first",
        "rounds.total": 1,
        "disk.in_files": False,
    }
    with plain_server(tmp_path, start(), **settings) as server:
        sites, before = clients(server, tmp_path, "a"), start()
        play_round(sites, 1, lambda _, state: {name: tensor + 1 for name, tensor in state.items()})
        after = finish(server, sites)
    # θ − (θ − (θ + 1)), in fp32
    assert torch.equal(after["w"], before["w"] - (before["w"] - (before["w"] + 1)))


@pytest.mark.covers("D12")
def test_a_run_in_memory_ends_with_its_server_and_says_so(tmp_path: Path) -> None:
    with serve(tmp_path, **{"disk.in_files": False}):
        pass
    with pytest.raises(ConfigError, match=r"a stopped run cannot continue\. Start a new run in another disk.state_dir"):
        serve(tmp_path, **{"disk.in_files": False}).start()
    with pytest.raises(ConfigError, match=r"disk\.in_files = False, but this start sets True"):
        serve(tmp_path).start()
    with pytest.raises(ConfigError, match="data in memory does not survive a power loss"):
        serve(tmp_path, **{"disk.in_files": False, "disk.durability": "power"})
