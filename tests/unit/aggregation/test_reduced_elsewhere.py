"""A pass whose `params` were reduced by somebody else: with the same mean, the same bits in everything."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from pass_world import MIXED, PART_BYTES, REDUCERS, World

from atoll.aggregation.make_version import ClosedRound
from atoll.aggregation.user_aggregator import result_layout, write_result
from atoll.reducers import Share
from atoll.tensors.dtypes import accumulate_dtype
from atoll.tensors.schema import Schema


def mean(world: World) -> dict[str, torch.Tensor]:
    """The weighted mean of what the sites submit, by the expression of the built-in one."""
    total = sum(world.weights)
    updates = [world.submitted(site, world.number) for site in range(len(world.weights))]
    result = {}
    for name in result_layout(world.schema, PART_BYTES).by_name:
        rows = [update[name] for update in updates]
        dtype = accumulate_dtype(world.version_layout.by_name[name].spec.dtype)
        result[name] = rows[0].to(dtype) * (world.weights[0] / total)
        for row, weight in zip(rows[1:], world.weights[1:], strict=True):
            result[name].add_(row.to(dtype), alpha=weight / total)
    return result


def close(world: World, own: bool, run_elements: int) -> ClosedRound:
    """Two rounds; with `own` the `params` come from a file that an aggregator wrote."""
    for _ in range(2):
        files, out = world.files(), world.out()
        if own:
            fd = world.open(f"r{world.number}")
            write_result(fd, result_layout(world.schema, PART_BYTES), mean(world), lambda: None)
            files = dataclasses.replace(files, reduced_fd=fd)
        frozen, reducers = world.frozen(population_weight=5.0), {**REDUCERS, "control": Share()}
        result = world.close(files, out, frozen, reducers=reducers, run_elements=run_elements)
        world.number += 1
        world.base, world.state_fd, world.result = out.version, out.state, result
    return result


@pytest.mark.covers("D7")
@pytest.mark.parametrize(
    ("target", "schema"),
    [("sgd", MIXED), ("adam", MIXED), (torch.optim.Adafactor, MIXED), ("sgd", MIXED.with_groups(["control"]))],
    ids=["sgd", "adam", "on-whole-tensors", "with-controls"],
)
def test_the_same_mean_gives_the_same_bits(tmp_path: Path, target: object, schema: Schema) -> None:
    worlds = []
    for name in ("own", "built-in"):
        folder = tmp_path / name
        folder.mkdir()
        options = {"lr": 0.01}
        worlds.append(World(folder, schema, target, options))
    own, built_in = close(worlds[0], True, 4096), close(worlds[1], False, 2**18)
    assert own.digest == built_in.digest
    assert own.state_digests == built_in.state_digests
    assert own.grad_norm == pytest.approx(built_in.grad_norm)
    assert worlds[0].file("v").read_bytes() == worlds[1].file("v").read_bytes()
