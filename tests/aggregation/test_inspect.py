"""What is seen of a part before it may count."""

import math
import os

import pytest
import torch
from blake3 import blake3
from pass_world import CODECS, MIXED, World

from atoll.aggregation.inspect import ELEMENTS, inspect_part
from atoll.aggregation.scratch import Scratch
from atoll.errors import StateCorrupt
from atoll.tensors.layout import update_layout
from atoll.tensors.schema import Schema, TensorSpec


def stats_of(world, fd):
    return [inspect_part(fd, world.update_layout, part, CODECS) for part in world.update_layout.parts]


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_digests_and_norm_of_a_good_update(tmp_path, codec):
    world = World(tmp_path, codec=codec)
    source = world.sources()[0]
    found = stats_of(world, source.fd)
    content = (tmp_path / "u0.0").read_bytes()
    expected = [blake3(content[part.start : part.stop]).digest() for part in world.update_layout.parts]
    assert [stats.digest for stats in found] == expected
    assert all(stats.bad is None for stats in found)
    squares = 0.0
    for spec in world.schema.tensors:
        if spec.group == "params":
            value = world.submitted(0, 0)[spec.name]
            wide = spec.dtype in ("F32", "F64")
            squares += float((value.bfloat16() if codec == "bf16" and wide else value).double().square().sum())
    assert math.fsum(stats.sumsq for stats in found) == pytest.approx(squares, rel=1e-12)


@pytest.mark.covers("F31")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["embed", "large", "scale", "exact", "half", "brain", "small.7", "mean", "mean16"])
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_one_value_that_is_not_finite_is_found_and_its_tensor_named(tmp_path, codec, name, bad):
    world = World(tmp_path, codec=codec)
    (segment,) = [segment for segment in world.update_layout.segments if segment.spec.name == name]
    values = world.submitted(0, 0)[name].reshape(-1)
    values[-1] = bad
    fd = world.sources()[0].fd
    encoded = torch.zeros(segment.nbytes, dtype=torch.uint8)
    CODECS[segment.codec].encode_(values, encoded, segment.spec.dtype)
    os.pwrite(fd, memoryview(encoded.numpy()), segment.offset)
    assert [stats.bad for stats in stats_of(world, fd) if stats.bad] == [f"{name} holds NaN or Inf"]


def test_finite_numbers_whose_squares_are_not_are_no_fault(tmp_path):
    world = World(tmp_path, schema=Schema.build([TensorSpec("w", "F64", (9,))]))
    fd = world.sources()[0].fd
    os.pwrite(fd, memoryview(torch.full((9,), 1e200, dtype=torch.float64).numpy()), 0)
    (stats,) = stats_of(world, fd)
    assert stats.bad is None
    assert stats.sumsq == math.inf  # and so above any limit on the norm


def test_a_part_that_is_not_all_there_is_an_error(tmp_path):
    world = World(tmp_path)
    fd = world.sources()[0].fd
    os.ftruncate(fd, 1000)
    with pytest.raises(StateCorrupt):
        stats_of(world, fd)


@pytest.mark.covers("D2")
def test_nothing_is_allocated_once_the_scratch_is_there(tmp_path, monkeypatch):
    schema = Schema.build([TensorSpec("w", "F32", (2 * ELEMENTS + 17,)), *MIXED.tensors])
    layout = update_layout(schema.tensors, lambda spec: CODECS["none"])
    fd = os.open(tmp_path / "u", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, layout.nbytes)
    scratch = Scratch(ELEMENTS)
    before = [inspect_part(fd, layout, part, CODECS, scratch) for part in layout.parts]

    def refuse(*args, **kwargs):
        raise AssertionError("a buffer was allocated")

    for factory in ("empty", "zeros", "tensor", "empty_like"):
        monkeypatch.setattr(torch, factory, refuse)
    assert [inspect_part(fd, layout, part, CODECS, scratch) for part in layout.parts] == before
