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
from harness.processes import Nursery, free_port
from kit import diloco, flip_bit
from kit.processes import export_model
from streaming_world import Sites, build, copied, equal, expected, require_close, serve, versions
from torch import nn

from atoll.errors import ConfigError


@pytest.mark.covers("L8", "L11")
def test_the_split_is_saved_and_a_restart_goes_on_in_the_middle_of_a_cycle(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sites": 2, "K": 3, "H": 9, "tau": 1, "alpha": 0.25, "rounds": 2}
    options |= {"network.port": free_port()}
    right = expected(["a", "b"], fragments=3, sync_every=9, tau=1, alpha=0.25, rounds=2)
    server = serve(tmp_path, **options).start()
    restarted = threading.Event()
    at_the_step = threading.Barrier(3)

    def during(site: str, step: int) -> None:
        if step == 7:  # after fragments 0 and 1 of the first cycle
            at_the_step.wait(30)
            assert restarted.wait(30)

    workers = Sites(server.url, tmp_path, ["a", "b"], steps=100, during=during)
    at_the_step.wait(30)
    assert versions(server) == [1, 1, 0]
    server.stop()
    for other in ({"K": 2, "H": 8}, {"K": 1, "tau": 0, "alpha": 0.0}):
        with pytest.raises(ConfigError, match=rf"diloco\.num_fragments = 3, but this start sets {other['K']}"):
            serve(tmp_path, **options | other).start()
    restarted.set()
    with serve(tmp_path, **options) as server:
        workers.join()
        require_close(workers.traces, right)
        server.run()


@pytest.mark.covers("L8")
def test_what_people_open_is_the_whole_model(nursery: Nursery, tmp_path: Path) -> None:
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
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with serve(tmp_path, start, K=3, H=3, rounds=2, codec="bf16", **{"disk.export_every": 1}) as server:
        with diloco(server, tmp_path, "a", model, optimizer) as loop:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().sum().backward()
                optimizer.step()
            assert loop.finished
            assert export_model(nursery, tmp_path, "served.safetensors", "--server", server.url) == 2
            state = safetensors.torch.load_file(server.save_state(tmp_path / "state.safetensors"))
        result = copied(model)
        server.run()
    exports = server.exports
    assert export_model(nursery, tmp_path, "kept.safetensors", "--dir", "state") == 2
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
    with serve(tmp_path, K=2, H=2, rounds=2, codec="int8") as server:
        Sites(server.url, tmp_path, ["a"], steps=10).join()
        run = server.status().run
    names = {path.name for path in (tmp_path / "workers/a" / run).iterdir()}
    kept = {"base": (".safetensors", ".json"), "outbox": (".bin", ".json"), "residual": ("-0.bin", "-1.bin", ".json")}
    assert {f"{name}-f{number}{rest}" for number in (0, 1) for name in kept for rest in kept[name]} <= names
    with serve(tmp_path / "next", K=2, H=2, rounds=1) as other:
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
    persistor = {"path": f"{tmp_path}/my_store.py:Store", "folder": str(tmp_path)}
    settings = {"disk.export_every": 1, "model.persistor": persistor}
    with serve(tmp_path, K=3, H=3, rounds=2, **settings) as server:
        Sites(server.url, tmp_path, ["a"], steps=10).join()
        server.run()
    saved = [safetensors.torch.load_file(tmp_path / f"{version}.safetensors") for version in range(3)]
    assert equal(saved[0], copied(build()))
    assert equal(saved[2], safetensors.torch.load_file(server.exports / "model.safetensors"))
    assert equal(saved[1], safetensors.torch.load_file(server.exports / "model-000001.safetensors"))


@pytest.mark.covers("L11", "F12")
def test_one_fragment_falls_back_alone_and_is_served_from_the_outboxes(tmp_path: Path) -> None:
    """The head of fragment 1 is damaged while the server is down; the numbers go on as if nothing had been."""
    options: dict[str, Any] = {"sites": 2, "K": 2, "H": 4, "tau": 1, "alpha": 0.5, "rounds": 3}
    options |= {"network.port": free_port()}
    right = expected(["a", "b"], fragments=2, sync_every=4, tau=1, alpha=0.5, rounds=3)
    server = serve(tmp_path, **options).start()
    restarted, at_the_step = threading.Event(), threading.Barrier(3)

    def during(site: str, step: int) -> None:
        if step == 5:  # fragment 1 has just been merged, its second version is not yet begun
            at_the_step.wait(30)
            assert restarted.wait(30)

    workers = Sites(server.url, tmp_path, ["a", "b"], steps=100, during=during)
    at_the_step.wait(30)
    assert versions(server) == [1, 1]
    server.stop()
    with sqlite3.connect(tmp_path / "state/journal.sqlite") as journal:
        (slot,) = journal.execute("SELECT slot FROM versions WHERE fragment = 1 AND version = 1").fetchone()
    path = tmp_path / f"state/slots/version-1-{slot}.safetensors"
    flip_bit(path, -1)
    with serve(tmp_path, **options) as server:
        assert versions(server) == [1, 0]
        restarted.set()
        workers.join()
        server.run()
    assert len(workers.traces["a"]) >= len(right["a"])
    result = safetensors.torch.load_file(server.exports / "model.safetensors")
    last = right["a"][-1]
    assert max(float((result[name] - value).abs().max()) for name, value in last.items()) <= 1e-12
