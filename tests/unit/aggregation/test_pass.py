"""The pass that makes a version: against the same rounds on whole tensors, and against itself in other chunks."""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import specification as spec
import torch
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pass_world import (
    DOWN,
    MEAN,
    MIXED,
    OPENED,
    PART_BYTES,
    REDUCERS,
    UP,
    World,
    close_opened,
    specified,
    values,
)
from safetensors import safe_open

from atoll.aggregation.make_version import ClosedRound, NextFiles
from atoll.aggregation.outer_state import is_whole, state_layout, state_regions, version_regions
from atoll.aggregation.user_aggregator import result_layout, write_result
from atoll.errors import StateCorrupt, UsageError
from atoll.outer_optimizers import DelayedNesterov, build_outer
from atoll.reducers import Share, build_reducers
from atoll.registry import OwnName
from atoll.store.file_slots import region_digest
from atoll.tensors.chunks import Scratch
from atoll.tensors.dtypes import accumulate_dtype
from atoll.tensors.layout import ALIGN_BYTES, TILE, version_layout
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec, extra_name


def of_torch(target: object, kind: type[torch.optim.Optimizer], **options: Any) -> tuple[object, dict, spec.Outer]:
    return target, options, spec.of_torch(kind, **options)


OUTERS = {
    "plain": of_torch("sgd", torch.optim.SGD, lr=1.0),
    "momentum": of_torch("sgd", torch.optim.SGD, lr=0.7, momentum=0.9),
    "nesterov": of_torch("sgd", torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
    "adam": of_torch("adam", torch.optim.Adam, lr=0.01),
    "adamw": of_torch("adamw", torch.optim.AdamW, lr=0.01),
    "adagrad": of_torch("adagrad", torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "rmsprop": of_torch("rmsprop", torch.optim.RMSprop, lr=0.01, momentum=0.5),
    "nadam": of_torch(torch.optim.NAdam, torch.optim.NAdam),
    "rprop": of_torch(torch.optim.Rprop, torch.optim.Rprop),
    "adafactor": of_torch(torch.optim.Adafactor, torch.optim.Adafactor, lr=0.1),
    "yogi": ("yogi", {"lr": 0.02}, spec.yogi(lr=0.02)),
    "delayed": (DelayedNesterov, {"lr": 0.7, "momentum": 0.9, "delay": 2}, spec.delayed_nesterov(0.7, 0.9, 2)),
}
"""Outer optimizer, its options, and the same by the specification."""
REDUCED = {
    "mean": ({}, MEAN),
    "normalised_mean": ({}, spec.Reducer(spec.fednova)),
    "median": ({}, spec.Reducer(combine=spec.median, of_buffers=True)),
    "trimmed_mean": ({"trim": 0.3}, spec.Reducer(combine=spec.trimmed_mean(0.3), of_buffers=True)),
    "clipped_mean": ({}, spec.Reducer(spec.clipped())),
}
"""Reducer → its options, and the same by the specification."""


def tensors_of(path):
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict


def same(one, two):
    one, two = (t.contiguous().reshape(-1).view(torch.uint8) for t in (one, two))
    return torch.equal(one, two)


def compare(world: World, fragment: spec.Fragment, scales: Sequence[float] = (), **how: Any) -> None:
    """Make three versions, each by the pass and by the specification."""
    for number in range(3):
        before, updates = fragment.W, world.updates()
        fragment.close(updates, stale=scales)
        after = fragment.W
        population = {"population_weight": after, "population_scale": (before or after) / after} if after else {}
        world.round(frozen=world.frozen(list(map(spec.norm_of, updates)), scales, **population), **how)
        written = tensors_of(world.file("v"))
        expected = fragment.b | {extra_name("control", name): c for name, c in fragment.c.items()}
        assert written.keys() == expected.keys()
        assert not [
            (number, name) for name, x in written.items() if not same(x, expected[name].to(x.dtype).view(x.shape))
        ]


@pytest.mark.covers("L1")
@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("outer", OUTERS)
def test_the_aggregation_pass_matches_its_specification(tmp_path, outer, codec):
    """The aggregation pass gives the bits of the specification for the version, the outer state and the master
    weights.
    """
    target, options, specified_outer = OUTERS[outer]
    world = World(tmp_path, target=target, options=options, codec=codec)
    fragment = specified(world, specified_outer)
    compare(world, fragment, run_elements=2 * TILE, threads=2)
    if world.state is None:
        return
    kept = tensors_of(world.file("s"))
    for each in world.schema.tensors:
        if not (each.is_stepped and each.numel):
            continue
        theta = fragment.theta[each.name]
        optimizer = fragment.state[each.name].get("optimizer")
        for key, expected in optimizer.state[theta].items() if optimizer else ():
            if expected is not None:
                assert same(kept[f"{each.name}.{key}"], expected), (each.name, key)
        if each.item_bytes < 4:
            assert same(kept[f"{each.name}.master"], theta)


@st.composite
def drawn(draw: Any) -> tuple[dict[str, Any], dict[str, Any], str, str, list[float]]:
    """Arguments of a world with odd tensors, how its versions are made, outer optimizer, reducer, staleness."""

    def one(values: Any) -> Any:
        return draw(st.sampled_from(tuple(values)))

    kinds = [("F32", "params")] * 4 + [(dtype, "params") for dtype in ("F64", "BF16", "F16", "F8_E4M3")]
    kinds += [("F32", BUFFERS), ("F64", BUFFERS), ("BF16", BUFFERS), ("F32", f"{BUFFERS}.first"), ("I64", BUFFERS)]
    kinds += [("F32", f"{BUFFERS}.sum"), ("F32", f"{BUFFERS}.max"), ("F32", f"{BUFFERS}.flags")]
    sizes = (1, 1, 2, 3, 5, 7, 15, 17, 31, 33, 63, 65, 255, 257, 4095, 4097, 20_001)
    tensors = draw(st.lists(st.tuples(st.sampled_from(kinds), st.sampled_from(sizes)), min_size=2, max_size=12))
    schema = Schema.build(
        TensorSpec(f"t{index}", dtype, (numel,), group) for index, ((dtype, group), numel) in enumerate(tensors)
    )
    outer, reducer = one(OUTERS), one(REDUCED)
    if reducer == "mean" and one((False, True)):
        schema = schema.with_groups(["control"])
    target, options, _ = OUTERS[outer]
    weights = tuple(draw(st.lists(st.sampled_from((1.0, 1.0, 2.5, 0.3, 7.0)), min_size=1, max_size=6)))
    world = {"schema": schema, "target": target, "options": options, "weights": weights, "codec": one(UP)}
    world |= {"down": one(("", *DOWN)), "part_bytes": one((2**16, 2**24))}
    how = {"run_elements": TILE * one((1, 2, 3, 64)), "threads": one((1, 2, 3))}
    scales = [one((1.0, 2**-0.5)) for _ in weights] if one((False, True)) else []
    return world, how, outer, reducer, scales


def compare_drawn(case: tuple[dict[str, Any], dict[str, Any], str, str, list[float]]) -> None:
    arguments, how, outer, name, scales = case
    options, reducer = REDUCED[name]
    own = {group: OwnName(its) for group, its in (("params", "mean"), (BUFFERS, "mean"), ("control", "share"))}
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), **arguments)
        reducers = build_reducers(own, OwnName(name), options)
        try:
            compare(world, specified(world, OUTERS[outer][2], reducer), scales, reducers=reducers, **how)
        finally:
            close_opened()


@pytest.mark.covers("D8", "V1")
@settings(max_examples=30, derandomize=True, suppress_health_check=list(HealthCheck), deadline=None)
@given(drawn())
def test_results_are_independent_of_neighbours_and_threads(case) -> None:
    """Each tensor, of any size, gets the bits of the specification, whatever its neighbours, chunks and threads. The
    specification computes each tensor alone.
    """
    compare_drawn(case)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=500, suppress_health_check=list(HealthCheck), deadline=None)
@given(drawn())
def test_many_drawn_cases_match_the_specification(case) -> None:
    """In many drawn cases, each tensor gets the bits of the specification, whatever its neighbours, chunks and
    threads.
    """
    compare_drawn(case)


@pytest.mark.parametrize("target", ["sgd", "adam", torch.optim.Adafactor])
def test_chunks_and_threads_do_not_change_results(tmp_path, target):
    """The digests of two rounds do not depend on the size of chunks or the number of threads."""
    results = []
    for chunk, threads in ((TILE, 1), (3 * TILE, 3), (2**20, 2), (2**20, 1)):
        world = World(tmp_path / f"{chunk}-{threads}", target=target, options={"lr": 0.1})
        done = [world.round(run_elements=chunk, threads=threads) for _ in range(2)]
        results.append([(result.digest, result.part_digests, result.state_digests) for result in done])
    assert all(result == results[0] for result in results)


class Unmoved(World):
    """No site trains three of the tensors, nor the first row of the embedding."""

    def submitted(self, site, number):
        submitted = super().submitted(site, number)
        for name in ("large", "half", "small.3"):
            submitted[name].zero_()
        submitted["embed"][0] = 0
        return submitted


@pytest.mark.covers("L15")
@pytest.mark.parametrize(
    ("target", "options"),
    [("adamw", {"lr": 0.1}), ("sgd", {"lr": 1.0, "weight_decay": 0.1}), (torch.optim.Adafactor, {"weight_decay": 0.1})],
    ids=["state", "no state", "whole"],
)
def test_untrained_parameters_do_not_move(tmp_path, target, options):
    """Tensors that no site has changed keep their values, even if the outer optimizer has weight decay.

    If a part of a tensor is trained, the whole tensor decays.
    """
    ways = []
    for folder, run_elements in (("a", TILE), ("b", 16 * TILE)):
        world = Unmoved(tmp_path / folder, target=target, options=options)
        for _ in range(3):
            world.round(run_elements=run_elements, threads=2)
        ways.append(tensors_of(world.file("v")))
        for name in ("large", "half", "small.3"):
            spec = next(spec for spec in MIXED.tensors if spec.name == name)
            assert same(ways[-1][name], values(spec, 0)), name
        first = next(spec for spec in MIXED.tensors if spec.name == "embed")
        assert not (ways[-1]["embed"][0] == values(first, 0)[0]).any()  # its tensor is trained, so all of it decays
    assert all(same(ways[0][name], ways[1][name]) for name in ways[0])


def test_the_pass_overwrites_half_written_output(tmp_path):
    """If a pass has left half-written files, the next pass writes over them and gives the digests of an undisturbed
    pass.
    """
    world = World(tmp_path)
    first = world.round()
    out = NextFiles(world.base, world.state_fd)
    for fd in (out.version, out.state):
        os.pwrite(fd, b"\xff" * 70_000, 1234)
    world.number, world.state_fd, world.result = 0, None, None
    world.base = world.open("v0")
    again = world.close(out=out)
    assert (again.digest, again.state_digests) == (first.digest, first.state_digests)


@pytest.mark.covers("F41")
@pytest.mark.parametrize("target", ["sgd", "adam", torch.optim.Adafactor])
def test_a_base_changed_on_disk_is_refused(tmp_path, target):
    """If a bit of the stored version or outer state has changed on disk, the aggregation refuses it as damaged."""
    world = World(tmp_path, target=target, options={"lr": 0.1})
    world.round()
    regions = [(world.base, region, "version") for region in version_regions(world.version_layout)]
    if world.state is not None:
        states = state_regions(world.version_layout, world.state[1])
        regions += [(world.state_fd, region, "outer state") for region in states]
    files = world.files()
    for fd, region, what in regions:
        at, nbytes = region[-1]
        (was,) = os.pread(fd, 1, at + nbytes - 1)
        os.pwrite(fd, bytes([was ^ 1]), at + nbytes - 1)
        with pytest.raises(StateCorrupt, match=f"The {what} that the round starts from is damaged"):
            world.close(files, threads=2)
        os.pwrite(fd, bytes([was]), at + nbytes - 1)
    world.close(files, threads=2)


@pytest.mark.parametrize("target", ["sgd", "adam", torch.optim.Adafactor])
def test_digests_match_the_bytes_on_disk(tmp_path, target):
    """The digests of the version and of the outer state match the bytes on disk. Their regions cover every byte
    once.
    """
    world = World(tmp_path, target=target, options={"lr": 0.1})
    for _ in range(2):
        result = world.round(threads=2, run_elements=2 * TILE)
    files = [(world.file("v"), version_regions(world.version_layout), result.part_digests)]
    if world.state is not None:
        regions = state_regions(world.version_layout, world.state[1])
        files.append((world.file("s"), regions, result.state_digests))
    for path, regions, digests in files:
        content = path.read_bytes()
        covered = []
        for region, digest in zip(regions, digests, strict=True):
            assert blake3(b"".join(content[at : at + size] for at, size in region)).digest() == digest
            covered += region
        covered.sort()
        assert covered[0][0] == 0
        assert sum(covered[-1]) == len(content)
        assert all(sum(one) == two[0] for one, two in pairwise(covered))  # every byte once


@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("target", ["sgd", "adam", torch.optim.Adafactor])
def test_reused_plans_do_not_change_results(tmp_path, target, codec):
    """Rounds that reuse the plan of the earlier rounds give the same results as rounds with a new plan each."""
    results = []
    for name in ("kept", "new"):
        world = World(tmp_path / name, target=target, options={"lr": 0.1}, codec=codec)
        done = []
        for chunk in (8, 8, 2, 8):  # other runs in the third round; a fourth as the first two
            done.append(world.round(run_elements=chunk * TILE, threads=2))
            if name == "new":
                world.planned = world.plan_of_fragment()
        results.append([(result.digest, result.state_digests, result.grad_norm) for result in done])
    assert results[0] == results[1]


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_padding_of_updates_does_not_change_results(tmp_path, codec):
    """The padding of an update, filled with zeros or with 0xff, changes neither the version nor the state nor the
    norm.
    """
    results = []
    for filler in (b"\0", b"\xff"):
        world = World(tmp_path / filler.hex(), codec=codec)
        files, layout = world.files(), world.update_layout
        for file in files.updates.values():
            ends = [segment.offset for segment in layout.segments[1:]] + [layout.nbytes]
            for segment, end in zip(layout.segments, ends, strict=True):
                at = segment.offset + segment.nbytes
                os.pwrite(file.fd, filler * (end - at), at)
        result = world.close(files)
        results.append((result.digest, result.state_digests, result.grad_norm))
    assert results[0] == results[1]
    assert math.isfinite(results[0][2])


def test_an_outer_rule_without_state_keeps_no_file(tmp_path):
    """If the outer optimizer has no state, the aggregation writes no file for it."""
    world = World(tmp_path, schema=Schema.build([TensorSpec("w", "F32", (9000,))]), options={"lr": 1.0})
    assert world.state is None
    assert world.round().state_digests == ()


def test_the_gradient_norm_of_a_single_site(tmp_path):
    # One site, weight 1: the reduced pseudo-gradient is what it submitted.
    """The reported norm of the gradient is that of the parameters that a single site submitted.

    With one site, the reduced pseudo-gradient is what this site submitted.
    """
    world = World(tmp_path, weights=(3.0,))
    submitted = world.submitted(0, 0)
    squares = sum(float(submitted[s.name].double().square().sum()) for s in world.schema.tensors if s.group == "params")
    assert world.round().grad_norm == pytest.approx(squares**0.5, rel=1e-5)


def test_progress_rises_to_the_bytes_of_the_version(tmp_path):
    """A pass reports its progress as a rising number of bytes, up to the size of the version."""
    world, seen = World(tmp_path), []
    world.round(threads=2, on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == world.version_layout.nbytes


def test_a_cancelled_pass_ends_early(tmp_path):
    """If a pass is cancelled when its first part is done, it ends with `CancelledError` and makes no other part."""
    world, cancelled = World(tmp_path), threading.Event()
    seen = []

    def stop_after_one(done):
        seen.append(done)
        cancelled.set()

    with pytest.raises(CancelledError):
        world.round(on_progress=stop_after_one, cancelled=cancelled)
    assert seen == [world.version_layout.parts[0].nbytes]


@pytest.mark.covers("F41")
def test_a_truncated_base_is_refused(tmp_path):
    """If the file of the version is too short, the aggregation ends with an error instead of reading zeros."""
    world = World(tmp_path)
    os.truncate(world.folder / "v0", 2**16)
    with pytest.raises(StateCorrupt, match="ends before byte"):
        world.round(threads=2)


def test_a_round_without_updates_is_refused(tmp_path):
    world = World(tmp_path, weights=())
    with pytest.raises(UsageError):
        world.round()


def test_a_pass_keeps_torchs_number_of_threads(tmp_path):
    """A pass does not change torch's number of threads in the calling program, neither in the calling thread nor in new
    ones.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        World(tmp_path).round(threads=2)
        default = []
        probe = threading.Thread(target=lambda: default.append(torch.get_num_threads()))
        probe.start()
        probe.join()
        assert (torch.get_num_threads(), default) == (3, [3])
    finally:
        torch.set_num_threads(before)


@pytest.mark.covers("D1")
def test_memory_is_independent_of_models_and_updates(tmp_path, monkeypatch):
    """A pass asks torch for buffers of the same total size with 3 or 12 updates, and with 1 or 8 tensors."""
    asked = []
    empty = torch.empty

    def counting(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        asked.append(tensor.numel() * tensor.element_size())
        return tensor

    totals = []
    for sites, tensors in ((3, 1), (12, 1), (3, 8)):
        schema = Schema.build(TensorSpec(f"w{index}", "F32", (50_000,)) for index in range(tensors))
        world = World(tmp_path / f"{sites}-{tensors}", schema=schema, weights=(1.0,) * sites)
        world.round(run_elements=TILE)  # later rounds: the first lets torch create the state
        files, out = world.files(), world.out()
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", counting)
            asked.clear()
            world.close(files, out, run_elements=TILE)
        totals.append(sum(asked))
    assert totals[0] == totals[1] == totals[2] <= 10 * TILE * 8


@pytest.mark.covers("D1")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_pass_frees_its_memory_at_once(tmp_path, threads):
    """A pass frees its buffers at its end, without Python's garbage collector."""
    world = World(tmp_path)
    gc.collect()
    before = sum(type(each) is Scratch for each in gc.get_objects())
    gc.disable()
    try:
        world.round(threads=threads, run_elements=TILE)
        after = sum(type(each) is Scratch for each in gc.get_objects())
    finally:
        gc.enable()
    assert after == before


@pytest.mark.parametrize("shape", [(), (3,)])
def test_a_changed_byte_in_outer_state_is_found(shape: tuple[int, ...]) -> None:
    """If a byte of the outer state has changed on disk, `is_whole` returns false.

    If the tensors are scalars only, the file does not tell which entries are cut with the version's parts.
    """
    specs = [TensorSpec("a", "BF16", shape), TensorSpec("b", "BF16", shape)]
    version, made = version_layout(Schema.build(specs)), state_layout(specs, build_outer(OwnName("adam"), {"lr": 0.1}))
    assert made is not None
    header, layout = made
    fd = os.memfd_create("state")
    OPENED.append(fd)
    os.pwrite(fd, header.ljust(layout.nbytes, b"\1"), 0)
    digests = [region_digest(fd, region) for region in state_regions(version, layout)]
    assert is_whole(fd, version, digests, in_chunks=True)
    os.pwrite(fd, b"\2", layout.nbytes - 1)
    assert not is_whole(fd, version, digests, in_chunks=True)


# -- what goes down in place of a version


@pytest.mark.covers("L16")
@pytest.mark.parametrize("down", DOWN)
@pytest.mark.parametrize("outer", ["momentum", "plain", "adafactor"])
def test_versions_with_a_download_codec_match_the_specification(tmp_path, outer: str, down: str) -> None:
    """With a download codec, the version that a pass makes has the bits of the specification."""
    target, options, specified_outer = OUTERS[outer]
    world = World(tmp_path, target=target, options=options, down=down)
    compare(world, specified(world, specified_outer), run_elements=4096, threads=2)


@pytest.mark.parametrize("down", DOWN)
def test_chunks_and_threads_do_not_change_files(tmp_path, down: str) -> None:
    """A pass with a download codec writes equal files for any size of chunks and any number of threads. The digests of
    the difference cover all its bytes.
    """
    contents = []
    for index, how in enumerate([{"run_elements": 4096}, {"threads": 3}, {"run_elements": 8192, "threads": 2}]):
        world = World(tmp_path / str(index), down=down)
        for _ in range(2):
            result = world.round(**how)
        contents.append([world.file(kind).read_bytes() for kind in "vsd"])
        delta = contents[-1][2]
        parts = world.downlink.parts
        assert [blake3(delta[part.start : part.stop]).digest() for part in parts] == list(result.delta_digests)
        assert (parts[0].start, parts[-1].stop) == (0, len(delta))
    assert contents[0] == contents[1] == contents[2]


def test_parts_of_a_difference_match_version_parts(tmp_path) -> None:
    """Each part of the difference between two versions has the same pieces of tensors as the matching part of the
    version.
    """
    world = World(tmp_path, down="int8")
    assert len(world.downlink.parts) == len(world.version_layout.parts) > 3
    end = 0
    for down, part in zip(world.downlink.parts, world.version_layout.parts, strict=True):
        assert down.start == end
        end = down.stop
        assert [(piece.segment.spec.name, piece.start, piece.stop) for piece in down.pieces] == [
            (piece.segment.spec.name, piece.start, piece.stop) for piece in part.pieces
        ]
        assert all(piece.offset % 4 == 0 for piece in down.pieces)
    assert end == world.downlink.layout.nbytes
    assert end % ALIGN_BYTES == 0


# -- updates that were reduced elsewhere


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
def test_a_users_mean_matches_the_built_in_mean(tmp_path: Path, target: object, schema: Schema) -> None:
    """If a user's aggregator computes the same mean as the built-in reducer, the resulting version has
    the same bits.
    """
    worlds = []
    for name in ("own", "built-in"):
        options = {"lr": 0.01}
        worlds.append(World(tmp_path / name, schema, target, options))
    own, built_in = close(worlds[0], True, 4096), close(worlds[1], False, 2**18)
    assert own.digest == built_in.digest
    assert own.state_digests == built_in.state_digests
    assert own.grad_norm == pytest.approx(built_in.grad_norm)
    assert worlds[0].file("v").read_bytes() == worlds[1].file("v").read_bytes()
