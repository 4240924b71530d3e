"""Sharded workers in asynchronous runs: only the ranks of a worker wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
from harness.processes import Nursery
from sharded_world import World, expected, require_close, rows, told


@pytest.mark.covers("L3", "L5")
def test_a_single_sharded_worker_is_what_it_is_in_a_synchronous_run(nursery: Nursery, tmp_path: Path) -> None:
    """With one worker and a buffer of one, every update is applied to the version that it was formed against."""
    with World(nursery, tmp_path, H=2, rounds=3, sites=1, **{"async.enabled": True}) as world:
        world.ended(world.site("a"))
    require_close(tmp_path, expected("a", sync_every=2, rounds=3))


@pytest.mark.covers("F9")
def test_its_server_is_killed_after_it_took_an_update(nursery: Nursery, tmp_path: Path) -> None:
    lives = ("accept.after=kill@2",)
    with World(nursery, tmp_path, lives, H=2, rounds=3, sites=1, **{"async.enabled": True}) as world:
        world.ended(world.site("a"))
        assert world.server.deaths == 1
    require_close(tmp_path, expected("a", sync_every=2, rounds=3))


@pytest.mark.covers("L5")
def test_sharded_and_whole_workers_end_with_the_runs_model(nursery: Nursery, tmp_path: Path) -> None:
    """They overtake each other as they like; the run is over after eight updates, and both have what came of them."""
    with World(nursery, tmp_path, H=2, rounds=8, sites=2, codec="int8", **{"async.enabled": True}) as world:
        world.ended(world.site("a"), world.site("b", ranks=1, sharded=""))
    model = safetensors.torch.load_file(tmp_path / "state/exports/model.safetensors")
    for site, ranks in (("a", 2), ("b", 1)):
        said = [told(tmp_path, site, rank) for rank in range(ranks)]
        assert len({each["step"] for each in said}) == 1
        for rank in range(ranks):
            mine = safetensors.torch.load_file(tmp_path / f"{site}-{rank}.safetensors")
            last = said[rank]["step"] - 1
            for name in ("wide.weight", "down.weight", "last.bias", "gain"):
                want = model[name] if name == "gain" else rows(model[name], rank, ranks)
                assert mine[f"{last}/{name}"].equal(want), (site, rank, name)
