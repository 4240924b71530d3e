"""disk.in_files = false: updates and versions in memory, by the same code and with the same bits."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.process_figures import memory_files_bytes
from kit.servers import new_server
from safetensors.torch import load_file
from torch import Tensor

import atoll
from atoll.errors import ConfigError

ELEMENTS = 50_000


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {"w": torch.randn(ELEMENTS, generator=generator), "bn.running_mean": torch.zeros(7)}


def serve(folder: Path, **options: Any) -> atoll.Server:
    settings: dict[str, Any] = {
        "algorithm.name": "fedavg",
        "algorithm.outer_optimizer.name": "adam",
        "aggregation.upload_codec.name": "bf16",
        "rounds.sites": 2,
    }
    more: dict[str, Any] = {
        "rounds.total": 3,
        "network.port": 0,
        "disk.min_free_bytes": 0,
        "network.part_bytes": 2**16,
        "disk.state_dir": folder / "s",
    }
    return new_server(start(), **(settings | more | options))


def play(server: atoll.Server, folder: Path) -> tuple[str, list[str]]:
    """Three rounds of two sites; the export's digest, and every version's."""
    clients = [atoll.functional.Client(server.url, site=site, folder=folder / "w").register() for site in "ab"]
    for number in (1, 2, 3):
        for client in clients:
            assert client.next_round() == number
        for index, client in enumerate(clients):
            generator = torch.Generator().manual_seed(10 * number + index)
            moved = {n: t + torch.randn(t.shape, generator=generator) for n, t in client.pull().items()}
            client.submit(moved, weight=1.0 + index)
    run = server._run
    assert run is not None
    for client in clients:
        assert client.next_round() is None
    digests = [row.digest for row in run.store.run_log.history(None)]
    for client in clients:
        client.close()
    assert server.wait(30)
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
    assert list((tmp_path / "memory" / "s" / "slots").iterdir()) == []
    assert memory_files_bytes(os.getpid()) == 0


@pytest.mark.covers("D12")
def test_an_aggregator_reads_updates_that_are_in_memory(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text("def first(updates):\n    return updates[0].tensors\n")
    options: dict[str, Any] = {
        "aggregation.aggregator.path": f"{tmp_path / 'first.py'}:first",
        "rounds.sites": 1,
        "rounds.total": 1,
    }
    with serve(
        tmp_path,
        **{"disk.in_files": False, "algorithm.outer_optimizer.name": "sgd", "aggregation.upload_codec.name": "none"},
        **options,
    ) as server:
        with atoll.functional.Client(server.url, site="a", folder=tmp_path / "w") as client:
            assert client.next_round() == 1
            before = client.pull()
            client.submit({name: tensor + 1 for name, tensor in before.items()})
            assert client.next_round() is None
        assert server.wait(30)
        after = load_file(server.exports / "model.safetensors")
    # θ − (θ − (θ + 1)), in fp32
    assert torch.equal(after["w"], before["w"] - (before["w"] - (before["w"] + 1)))


@pytest.mark.covers("D12")
def test_a_run_in_memory_ends_with_its_server_and_says_so(tmp_path: Path) -> None:
    with serve(tmp_path, **{"disk.in_files": False}):
        pass
    with pytest.raises(ConfigError, match=r"a run ends with its server\. Begin a new one in another disk.state_dir"):
        serve(tmp_path, **{"disk.in_files": False}).start()
    with pytest.raises(ConfigError, match=r"disk\.in_files = False, this start says True"):
        serve(tmp_path).start()
    with pytest.raises(ConfigError, match="memory survives no power loss"):
        serve(tmp_path, **{"disk.in_files": False, "disk.durability": "power"})


@pytest.mark.covers("D12")
def test_the_variable_takes_the_usual_spellings() -> None:
    variable = "ATOLL_DISK__IN_FILES"
    for text in ("false", "False", "FALSE", "0", "no", "off", "n", "f"):
        assert not atoll.Settings.read(environ={variable: text}).disk.in_files, text
    for text in ("true", "True", "1", "yes", "on", "y", "t"):
        assert atoll.Settings.read(environ={variable: text}).disk.in_files, text
    with pytest.raises(ConfigError, match=f"{variable}: disk.in_files = 'perhaps'"):
        atoll.Settings.read(environ={variable: "perhaps"})
    assert atoll.Settings.read(environ={}).disk.in_files
