"""What does not go with sharded models is refused by name, at every rank, with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.servers import new_server
from safetensors.torch import load_file
from sharded_world import ShardedRun, build
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import atoll
from atoll import Settings
from atoll.errors import ConfigError, UsageError
from atoll.transport.egress_log import NAME, read_log


@pytest.mark.covers("P4", "X3")
@pytest.mark.parametrize(
    ("ranks", "how", "what"),
    [
        (
            3,
            {},
            "is sharded over 3 ranks, but the run 'atoll' has ranks = 2. Start the server with --set model.ranks=3",
        ),
        (2, {"sharded": "columns"}, "wide.weight has the placements ('S(1)',) over a mesh of (2,) ranks"),
        (4, {"sharded": "hybrid"}, "over a mesh of (2, 2) ranks, but the worker has 4 ranks"),
        (2, {"sharded": "replicated"}, "wide.weight has the placements ('R',) over a mesh of (2,) ranks"),
        (2, {"otherwise": "publish"}, "payload['wide.weight'] is of type DTensor, which Atoll cannot send."),
        (1, {"otherwise": "join"}, "is a sharded tensor (DTensor), which is not allowed here. Train sharded models"),
        (2, {"filters": True}, "filters need whole tensors, and this model is sharded over ranks (FSDP2)."),
    ],
    ids=["another-number", "columns", "hybrid", "replicated", "published", "federated", "filters"],
)
def test_all_ranks_get_the_error(nursery: Nursery, tmp_path: Path, ranks: int, how: dict[str, Any], what: str) -> None:
    """If a sharded model does not fit the run, or uses what Atoll does not support, every rank ends with the same
    error.
    """
    run: dict[str, Any] = {"H": 2, "model.ranks": 4 if ranks == 4 else 2}
    if how.get("otherwise") == "join":  # a loop over rounds, which a DiLoCo run refuses whatever the model
        run = {"algorithm.name": "fedavg"}
    with ShardedRun(nursery, tmp_path, rounds=1, sites=1, **run) as served:
        for each in served.site("a", ranks=ranks, **how):
            assert each.wait(60) == UsageError.exit_code
            assert what in " ".join(each.output().split()), each.output()


@pytest.mark.covers("P4")
def test_fsdp1_is_refused() -> None:
    """A DiLoCo loop refuses a model wrapped with FSDP1 and recommends its successor."""
    # The test makes the wrapper without its initialisation, which needs an accelerator.
    model = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(model)
    with pytest.raises(
        UsageError, match=r"\(FSDP1\), which Atoll does not support\. Shard it with torch.distributed.fsdp"
    ):
        atoll.DiLoCo(nn.Sequential(model), torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"diloco.num_fragments": 2, "diloco.sync_every": 4}, "diloco.num_fragments is 2, but model.ranks is 2"),
        ({"diloco.fragment_sync_delay": 1}, "diloco.fragment_sync_delay is 1, but model.ranks is 2"),
        ({"diloco.fragment_update_alpha": 0.5}, "diloco.fragment_update_alpha is 0.5, but model.ranks is 2"),
        ({"workflow.function": "flow.py:main"}, "workflow.function is 'flow.py:main', but model.ranks is 2"),
    ],
)
def test_settings_incompatible_with_ranks_are_refused(more: dict[str, Any], what: str) -> None:
    """If `model.ranks` is 2, settings for fragments and for own workflows are refused."""
    with pytest.raises(ConfigError, match=r"Leave .* out, or set model.ranks = 1") as raised:
        Settings.build({"model.ranks": 2} | more)
    assert what in str(raised.value)


def test_scaffold_is_refused_with_several_ranks(tmp_path: Path) -> None:
    """A SCAFFOLD run with `model.ranks` 2 is refused, because SCAFFOLD's controls cannot be sharded."""
    with pytest.raises(ConfigError, match=r"ranks is 2, but algorithm\.name is 'scaffold'.*cannot be sharded"):
        atoll.Server(
            nn.Linear(2, 2),
            settings={
                "rounds.total": 0,
                "algorithm.name": "scaffold",
                "model.ranks": 2,
                "network.port": 0,
                "disk.state_dir": tmp_path,
            },
        ).start()


def test_a_run_keeps_its_number_of_ranks(tmp_path: Path) -> None:
    """A restart with another value of `model.ranks` is refused."""
    settings: dict[str, Any] = {"network.port": 0, "disk.state_dir": tmp_path, "disk.min_free_bytes": 0}
    new_server(nn.Linear(2, 2), **{"model.ranks": 2}, **settings).start().stop()
    for ranks in (1, 3):
        with pytest.raises(ConfigError, match=f"has model.ranks = 2, but this start sets {ranks}"):
            new_server(nn.Linear(2, 2), **{"model.ranks": ranks}, **settings).start()


@pytest.mark.slow
def test_policy_holds_for_sharded_models(nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded model is refused at every rank if the policy clips the norm; rules by names hold for all shards. The
    parts of all ranks are in one log.
    """
    policy = tmp_path / "config" / "atoll" / "policy.toml"
    policy.parent.mkdir(parents=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    policy.write_text('[log]\nfolder = "log"\n[tensors]\nmax_norm = 1.0\n')
    with ShardedRun(nursery, tmp_path, H=2, rounds=1, sites=1) as served:
        for each in served.site("a"):
            assert each.wait(60) == ConfigError.exit_code
            assert "policy.toml:4, tensors.max_norm" in " ".join(each.output().split())
        dropped = ["wide.*", "gain"]  # one over both ranks, with its border within a tile, and one that is not sharded
        policy.write_text(f'[log]\nfolder = "log"\n[tensors]\nallow = ["[dlms]*"]\ndrop = {json.dumps(dropped)}\n')
        served.ended(served.site("a"))
    result, initial = load_file(tmp_path / "state" / "exports" / "model.safetensors"), build().state_dict()
    same = {name for name, value in result.items() if torch.equal(value, initial[name])}
    assert same == {"wide.weight", "wide.bias", "gain"}
    entries = list(read_log(policy.parent / "log" / NAME))
    (update,) = (each.detail for each in entries if each.what == "update")
    parts = [each.detail for each in entries if each.what == "part"]
    assert len(parts) >= 2  # of each rank
    assert update["filters"] == ["Allowed(allow=['[dlms]*'], drop=['wide.*', 'gain'])"]
    assert sum(each["bytes"] for each in parts) == update["bytes"]
    assert [each.detail["state"] for each in entries if each.what == "receipt"][-1] == "counted"
