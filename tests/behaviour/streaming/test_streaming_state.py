"""What streaming runs leave on disk and go on from: the split, whole models, files of each fragment."""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from harness.processes import free_port
from streaming_world import Sites, build, copied, equal, expected, require_close, serve
from torch import nn

import atoll
from atoll.cli.export import from_directory, from_server
from atoll.errors import ConfigError


@pytest.mark.covers("L8", "L11")
def test_the_split_is_saved_and_a_restart_goes_on_in_the_middle_of_a_cycle(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "rounds.sites": 2,
        "diloco.num_fragments": 3,
        "diloco.sync_every": 9,
        "diloco.fragment_sync_delay": 1,
        "diloco.fragment_update_alpha": 0.25,
    }
    right = expected(["a", "b"], fragments=3, sync_every=9, tau=1, alpha=0.25, rounds=2)
    port = free_port()
    server = serve(tmp_path, rounds=2, **{"network.port": port}, **options).start()
    restarted = threading.Event()
    at_the_step = threading.Barrier(3)

    def during(site: str, step: int) -> None:
        if step == 7:  # after fragments 0 and 1 of the first cycle
            at_the_step.wait(30)
            assert restarted.wait(30)

    workers = Sites(server.url, tmp_path, ["a", "b"], steps=100, during=during)
    at_the_step.wait(30)
    assert [fragment.version for fragment in server.status().fragments] == [1, 1, 0]
    server.stop()
    with pytest.raises(ConfigError, match=r"diloco\.num_fragments = 3, this start says 2"):
        serve(
            tmp_path,
            rounds=2,
            **{"network.port": port},
            **options | {"diloco.num_fragments": 2, "diloco.sync_every": 8},
        ).start()
    with pytest.raises(ConfigError, match=r"diloco\.num_fragments = 3, this start says 1"):
        serve(tmp_path, rounds=2, H=9, **{"network.port": port}).start()
    server = serve(tmp_path, rounds=2, **{"network.port": port}, **options)
    restarted.set()
    with server:
        workers.join()
        require_close(workers.traces, right)
        server.run()


@pytest.mark.covers("L8")
def test_what_people_open_is_the_whole_model(tmp_path: Path) -> None:
    """Exports, the state, a persistor's tensors and `atoll export` put the heads of all fragments together."""
    torch.manual_seed(1)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4, bias=False)
            self.again = nn.Linear(4, 4, bias=False)
            self.again.weight = self.last.weight

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.again(self.last(self.norm(self.first(inputs))))
            return out

    start = Tied()
    server = serve(tmp_path, start, K=3, H=3, rounds=2, codec="bf16", **{"disk.export_every": 1})
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with server:
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as diloco:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().sum().backward()
                optimizer.step()
            assert diloco.finished
            assert from_server(server.url, tmp_path / "served.safetensors") == 2
            state = safetensors.torch.load_file(server.save_state(tmp_path / "state.safetensors"))
        result = copied(model)
        server.run()
    exports = server.exports
    assert from_directory(tmp_path / "state", tmp_path / "kept.safetensors") == 2
    for path in (exports / "model.safetensors", tmp_path / "served.safetensors", tmp_path / "kept.safetensors"):
        assert equal(safetensors.torch.load_file(path), result), path
        Tied().load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert equal(state, result)
    assert result["norm.num_batches_tracked"] == 5  # its fragment was due after two and after five steps
    assert sorted(path.name for path in exports.glob("model-*")) == [
        "model-000001.safetensors",
        "model-000002.safetensors",
    ]
    first = safetensors.torch.load_file(exports / "model-000001.safetensors")
    assert not any(torch.equal(first[name], result[name]) for name in ("first.weight", "norm.weight", "last.weight"))
    lines = [json.loads(line) for line in (exports / "metrics.jsonl").read_text().splitlines()]
    assert [(line["round"], line["fragment"]) for line in lines] == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)]


@pytest.mark.covers("L16")
def test_error_feedback_is_kept_for_each_fragment(tmp_path: Path) -> None:
    server = serve(tmp_path, K=2, H=2, rounds=2, codec="int8")
    with server:
        workers = Sites(server.url, tmp_path, ["a"], steps=10)
        workers.join()
        run = server.status().run
    names = {path.name for path in (tmp_path / "workers/a" / run).iterdir()}
    for fragment in (0, 1):
        assert {
            f"{name}-f{fragment}{rest}"
            for name, rest in [
                ("base", ".safetensors"),
                ("base", ".json"),
                ("outbox", ".bin"),
                ("outbox", ".json"),
                ("residual", "-0.bin"),
                ("residual", "-1.bin"),
                ("residual", ".json"),
            ]
        } <= names
    other = serve(tmp_path / "next", K=2, H=2, rounds=1)
    with other:
        Sites(other.url, tmp_path, ["a"], steps=10).join()
    assert not (tmp_path / "workers/a" / run).exists(), "the files of an earlier run go, whatever fragments it had"


@pytest.mark.covers("L8")
def test_a_persistor_gets_the_whole_model(tmp_path: Path) -> None:
    (tmp_path / "my_store.py").write_text(
        "import safetensors.torch\n"
        "class Store:\n"
        "    def __init__(self, folder):\n"
        "        self.folder = folder\n"
        "    def save(self, state, info):\n"
        "        path = f'{self.folder}/{info[\"version\"]}.safetensors'\n"
        "        safetensors.torch.save_file(state, path)\n"
    )
    server = serve(
        tmp_path,
        K=3,
        H=3,
        rounds=2,
        **{
            "disk.export_every": 1,
            "model.persistor.path": f"{tmp_path}/my_store.py:Store",
            "model.persistor.folder": str(tmp_path),
        },
    )
    with server:
        workers = Sites(server.url, tmp_path, ["a"], steps=10)
        workers.join()
        server.run()
    saved = [safetensors.torch.load_file(tmp_path / f"{version}.safetensors") for version in range(3)]
    assert equal(saved[0], copied(build()))
    assert equal(saved[2], safetensors.torch.load_file(server.exports / "model.safetensors"))
    assert equal(saved[1], safetensors.torch.load_file(server.exports / "model-000001.safetensors"))


@pytest.mark.covers("L11", "F12")
def test_one_fragment_falls_back_alone_and_is_served_from_the_outboxes(tmp_path: Path) -> None:
    """The head of fragment 1 is damaged while the server is down; the numbers go on as if nothing had been."""
    options: dict[str, Any] = {
        "rounds.sites": 2,
        "diloco.num_fragments": 2,
        "diloco.sync_every": 4,
        "diloco.fragment_sync_delay": 1,
        "diloco.fragment_update_alpha": 0.5,
    }
    right = expected(["a", "b"], fragments=2, sync_every=4, tau=1, alpha=0.5, rounds=3)
    port = free_port()
    server = serve(tmp_path, rounds=3, **{"network.port": port}, **options).start()
    restarted, at_the_step = threading.Event(), threading.Barrier(3)

    def during(site: str, step: int) -> None:
        if step == 5:  # fragment 1 has just been merged, its second version is not yet begun
            at_the_step.wait(30)
            assert restarted.wait(30)

    workers = Sites(server.url, tmp_path, ["a", "b"], steps=100, during=during)
    at_the_step.wait(30)
    assert [fragment.version for fragment in server.status().fragments] == [1, 1]
    server.stop()
    with sqlite3.connect(tmp_path / "state/journal.sqlite") as journal:
        (slot,) = journal.execute("SELECT slot FROM versions WHERE fragment = 1 AND version = 1").fetchone()
    path = tmp_path / f"state/slots/version-1-{slot}.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    server = serve(tmp_path, rounds=3, **{"network.port": port}, **options).start()
    assert [fragment.version for fragment in server.status().fragments] == [1, 0]
    restarted.set()
    try:
        workers.join()
        server.run()
    finally:
        server.stop()
    assert len(workers.traces["a"]) >= len(right["a"])
    result = safetensors.torch.load_file(server.exports / "model.safetensors")
    last = right["a"][-1]
    assert max(float((result[name] - value).abs().max()) for name, value in last.items()) <= 1e-12
