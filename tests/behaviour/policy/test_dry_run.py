"""`atoll worker --dry-run`: what would leave in a round is a file before anything of it leaves."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from kit.processes import atoll_worker
from kit.world import World
from policy_world import write_policy
from safetensors.torch import load_file

from atoll.errors import UsageError

FEDERATED = """
import atoll
with atoll.join(site="a", labels={"gpu": "none"}) as worker:
    for fl_round in worker:
        state = fl_round.state_dict()
        state["w"] += 3.0
        fl_round.submit(state, weight=5, metrics={"loss": 1.0, "secret": 2.0})
        print("went on")
"""
DILOCO = """
import atoll, torch
model = torch.nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with atoll.DiLoCo(model, optimizer) as loop:
    while not loop.finished:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
print("went on")
"""


def run_dry(world: World, folder: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    with atoll_worker(folder, world.url, script, "--dry-run", str(folder / "dry"), env=env) as process:
        out, errors = process.communicate(timeout=100)
        return subprocess.CompletedProcess([], process.returncode, out, errors)


@pytest.mark.slow
def test_dry_run_writes_the_update_and_sends_none(tmp_path: Path) -> None:
    """The update is clipped as the policy says, metrics, host and labels are cut, and the server gets no part of it."""
    policy = write_policy(
        tmp_path / "policy", '[tensors]\nmax_norm = 1.5\n[metadata]\nmetrics = ["loss"]\nhost_name = false\nlabels = []'
    )
    with World(tmp_path, {"w": torch.zeros(4)}, "a", rounds=1) as world:
        done = run_dry(world, tmp_path, FEDERATED, ATOLL_POLICY=str(policy))
        assert done.returncode == 0, done.stderr
        assert "went on" not in done.stdout
        assert world.version == 0
        assert world.status.workers[0].bytes_up == 0
    found = json.loads((tmp_path / "dry" / "update.json").read_text())
    assert found["message"]["metrics"] == {"loss": 1.0}
    assert found["message"]["weight"] == 5.0
    assert found["filters"] == ["NormClip(1.5, noise=0)"]
    update = load_file(tmp_path / "dry" / "update.safetensors")  # base − local: −3 four times has a norm of 6
    torch.testing.assert_close(update["w"], torch.full((4,), -0.75))
    sent = [json.loads(line) for line in (tmp_path / "dry" / "messages.jsonl").read_text().splitlines()]
    assert {each["path"] for each in sent} <= {"/v1/workers", "/v1/heartbeat", "/v1/tickets", "/v1/workers/leave"}
    assert {"host", "labels"}.isdisjoint(sent[0]["message"])
    assert sorted(path.name for path in (tmp_path / "dry").iterdir()) == [
        "messages.jsonl", "update.json", "update.safetensors"
    ]  # fmt: skip
    assert not (tmp_path / "workers").exists()
    assert "w       F32    [4]    none   16 B   1.5" in done.stdout


@pytest.mark.slow
def test_dry_run_of_diloco_ends_at_the_first_update(tmp_path: Path) -> None:
    """A dry run of a DiLoCo script ends when its first update is formed, and shows what would be sent.

    By hand: one step of SGD at a rate of 1 from zero moves each weight by −1; the update, base − local, is +1.
    """
    settings = {"algorithm": "diloco", "algorithm.outer_optimizer.lr": 1.0, "algorithm.outer_optimizer.momentum": 0.0}
    model = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    with World(tmp_path, model, "a", rounds=1, H=1, codec="none", **settings) as world:
        done = run_dry(world, tmp_path, DILOCO)
        assert done.returncode == 0, done.stderr
        assert world.version == 0
    assert load_file(tmp_path / "dry" / "update.safetensors")["weight"].tolist() == [[1.0, 1.0]]
    assert "went on" not in done.stdout


@pytest.mark.slow
def test_dry_run_needs_a_new_folder_and_an_update(tmp_path: Path) -> None:
    """A folder that exists is refused before the script starts; a script that sends nothing is an error."""
    with World(tmp_path, {"w": torch.zeros(1)}, "a", rounds=1) as world:
        idle = run_dry(world, tmp_path, "print('idle')")
        assert idle.returncode == UsageError.exit_code
        assert "ended without an update" in idle.stderr
        again = run_dry(world, tmp_path, "print('idle')")
        assert "exists already" in again.stderr
        assert "idle" not in again.stdout
