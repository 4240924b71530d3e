"""What is seen of a part before it may count, in whatever pieces its bytes arrive."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from blake3 import blake3
from pass_world import CODECS, MIXED, OPENED, World, values

from atoll.aggregation.check_arriving_parts import ELEMENTS, ROW, RUN_BYTES, Inspection, PartChecker, norm_of
from atoll.errors import StateCorrupt
from atoll.tensors.layout import update_layout
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec

LARGE = Schema.build([TensorSpec("w", "F32", (3 * ELEMENTS + 17,)), *MIXED.tensors])
"""Of several runs, when a part may have 16 MiB."""


def file_of(content=b""):
    """A file with this content."""
    fd = os.memfd_create("update")
    OPENED.append(fd)
    os.pwrite(fd, content, 0)
    return fd


def stats_of(layout, content, codecs=CODECS):
    """What is seen of each part of an update that has arrived."""
    inspection, fd = Inspection(layout, codecs), file_of(content)
    return [inspection.check(part, fd, blake3(content[part.start : part.stop]).digest()) for part in layout.parts]


def arrive(inspection, part, content, sizes, write=None):
    """Have a part arrive in pieces of these sizes, one piece whenever it is asked for more; return it, and its runs."""
    fd, runs, at = file_of(), [], part.start

    def written(run):
        os.pwrite(fd, run, part.start + sum(map(len, runs)))
        runs.append(bytes(run))

    def fill(room):
        nonlocal at
        count = min(len(room), next(sizes), part.stop - at)
        room[:count] = content[at : at + count]
        at += count
        return count

    arriving = PartChecker(inspection, part, write or written, fd)
    while not arriving.complete:
        arriving.take(fill)
    return arriving.stats, runs


def content_of(world):
    return bytearray(os.pread(world.files().updates[0].fd, world.update_layout.nbytes, 0))


def encode(content, segment, numbers):
    encoded = torch.zeros(segment.nbytes, dtype=torch.uint8)
    CODECS[segment.codec].encode_(numbers, encoded, segment.spec.dtype)
    content[segment.offset : segment.offset + segment.nbytes] = encoded.numpy().tobytes()


def filled(specs, *numbers, codec="none"):
    """The layout of an update, and its bytes; of each tensor the numbers, 1-D."""
    layout = update_layout(specs, lambda spec: CODECS[codec])
    content = bytearray(layout.nbytes)
    for segment, given in zip(layout.segments, numbers, strict=True):
        encode(content, segment, given)
    return layout, content


@pytest.mark.covers("D1", "D2")
@pytest.mark.parametrize("sizes", [[999], [4096, 0], [RUN_BYTES - 1, 0, 2], [RUN_BYTES + 1], [2**30]])
def test_inspection_is_independent_of_arriving_pieces(monkeypatch, sizes):
    """The check of an arriving part gives the same result however the part is cut into network packets, and allocates
    no buffer for them.
    """
    layout, content = filled(LARGE.tensors, *(values(spec, 1).reshape(-1) for spec in LARGE.tensors))
    (part,), inspection = layout.parts, Inspection(layout, CODECS)
    (expected,) = stats_of(layout, content)

    def refuse(*args, **kwargs):
        raise AssertionError("a buffer was allocated")

    for factory in ("empty", "zeros", "tensor", "empty_like"):
        monkeypatch.setattr(torch, factory, refuse)

    def forever() -> Iterator[int]:
        while True:
            yield from sizes

    stats, runs = arrive(inspection, part, content, forever())
    assert b"".join(runs) == content
    assert max(map(len, runs)) <= RUN_BYTES
    assert stats == expected
    assert stats.digest == blake3(content).digest()


def test_inspection_stops_at_the_parts_end(tmp_path):
    """The inspection of a part takes no bytes behind the end of the part."""
    world = World(tmp_path)
    part, content = world.update_layout.parts[0], content_of(world)
    stats, runs = arrive(Inspection(world.update_layout, CODECS), part, content + b"behind", itertools.repeat(2**30))
    assert b"".join(runs) == content[: part.nbytes]
    assert stats == stats_of(world.update_layout, content)[0]


def test_a_write_error_reaches_the_inspecting_thread(tmp_path):
    """If writing a part to its file fails, the thread that checks the part ends with this error."""

    def full(run):
        raise OSError(28, "No space left on device")

    world = World(tmp_path)
    part, content = world.update_layout.parts[0], content_of(world)
    with pytest.raises(OSError, match="space"):
        arrive(Inspection(world.update_layout, CODECS), part, content, iter([2**30]), full)


def test_a_file_shorter_than_its_part_is_refused():
    """If a file ends before its part does, the inspection raises `StateCorrupt`."""
    layout, content = filled([TensorSpec("w", "F32", (9,))], torch.ones(9))
    with pytest.raises(StateCorrupt, match="ends before"):
        stats_of(layout, content[:35])


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_good_update_has_right_digests_and_norm(tmp_path, codec):
    """The inspection of a good update gives the digest of each part and the norm of the parameters. It reports no bad
    value.
    """
    world = World(tmp_path, codec=codec)
    content = content_of(world)
    found = stats_of(world.update_layout, content)
    expected = [blake3(content[part.start : part.stop]).digest() for part in world.update_layout.parts]
    assert [stats.digest for stats in found] == expected
    assert all(stats.bad is None for stats in found)
    squares = 0.0
    for spec in world.schema.tensors:
        if spec.group == "params":
            value = world.submitted(0, 0)[spec.name]
            sent = value.bfloat16() if codec == "bf16" and spec.is_float else value
            squares += float(sent.double().square().sum())
    assert math.fsum(stats.sumsq for stats in found) == pytest.approx(squares, rel=1e-6)


@pytest.mark.covers("F31")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["embed", "large", "scale", "exact", "half", "brain", "small.7", "mean", "mean16"])
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_value_that_is_not_finite_is_found(tmp_path, codec, name, bad):
    """If one value of an update is NaN or infinite, the inspection names the value's tensor."""
    world = World(tmp_path, codec=codec)
    segment = world.update_layout.by_name[name]
    submitted = world.submitted(0, 0)[name].reshape(-1)
    submitted[-1] = bad
    content = content_of(world)
    encode(content, segment, submitted)
    found = stats_of(world.update_layout, content)
    told = "contains NaN or Inf" if math.isnan(bad) else "contains Inf: a value"
    assert [stats.bad.startswith(f"{name} {told}") for stats in found if stats.bad] == [True]


@pytest.mark.covers("F31")
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_nan_among_neighbours_names_its_tensor(place):
    """If neighbouring tensors are inspected together and one contains NaN, the inspection names this tensor."""
    numbers = [torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan if index == place else 5.0]) for index in range(5)]
    (stats,) = stats_of(*filled([TensorSpec(f"w{index}", "F32", (5,)) for index in range(5)], *numbers))
    assert stats.bad == f"w{place} contains NaN or Inf"


@pytest.mark.covers("F31")
@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("bad", [b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f"])  # NaN; +Inf, also to bfloat16
def test_padding_that_is_not_finite_is_ignored(codec, bad):
    """NaN or infinity in the padding between tensors is not reported and does not change the sum of squares.

    A sum of squares that is NaN would break no limit on the norm.
    """
    numbers = torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0])
    layout, content = filled([TensorSpec(f"w{index}", "F32", (5,)) for index in range(3)], *[numbers] * 3, codec=codec)
    for segment in layout.segments:
        end = segment.offset + segment.nbytes
        content[end : end + 4] = bad
    (stats,) = stats_of(layout, content)
    assert stats.bad is None
    assert stats.sumsq == 3 * 25.0


def test_finite_numbers_with_overflowing_squares_are_accepted():
    """The inspection accepts finite numbers with squares that overflow. Their sum of squares is infinite, which is
    above any limit on the norm.
    """
    specs = [TensorSpec(name, "F64", (9,)) for name in ("v", "w")]
    (stats,) = stats_of(*filled(specs, *(torch.full((9,), size, dtype=torch.float64) for size in (0.0, 1e200))))
    assert stats.bad is None
    assert stats.sumsq == math.inf  # and so above any limit on the norm


@pytest.mark.parametrize("size", [2.0**100, 2.0**-70, 2.0**-40])
def test_very_large_and_small_squares_are_summed(size):
    """The sum of squares is right for numbers with squares that fp32 cannot hold, because it is added in fp64."""
    # (2^100)² is above the largest number of fp32, and (2^-70)² is below its smallest.
    numel = 2 * ELEMENTS
    (stats,) = stats_of(*filled([TensorSpec("w", "F32", (numel,))], torch.full((numel,), size)))
    assert (stats.sumsq, stats.bad) == (pytest.approx(numel * size**2, rel=1e-6), None)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("numel", [1, ROW - 1, ROW, ROW + 1, ELEMENTS + ROW + 3])
def test_the_norm_counts_every_element_once(dtype, numel):
    found = stats_of(*filled([TensorSpec("w", dtype, (numel,))], torch.full((numel,), 3.0)))
    assert math.fsum(stats.sumsq for stats in found) == pytest.approx(9.0 * numel, rel=1e-6)


@dataclass(frozen=True)
class ThreeBytes:
    """The upper three bytes of an fp32: 64 is no multiple of it."""

    name: str = "three"
    elementwise: bool = True
    raw: bool = False

    def encoded_bytes(self, numel, dtype):
        return 3 * numel

    def encode_(self, source, target, dtype):
        target.view(-1, 3).copy_(source.view(torch.uint8).view(-1, 4)[:, 1:])

    def decode_(self, source, target, dtype):
        wide = torch.zeros(len(target), 4, dtype=torch.uint8)
        wide[:, 1:] = source.view(-1, 3)
        target.copy_(wide.view(torch.float32).view(-1))


def test_inspection_respects_alignment_borders():
    """With a codec of 3 bytes per element, the inspection reads no element across the border between two aligned
    tensors.
    """
    codecs = {"three": ThreeBytes()}
    layout = update_layout([TensorSpec(f"w{index}", "F32", (5,)) for index in range(4)], lambda spec: codecs["three"])
    content = bytearray(layout.nbytes)
    for segment in layout.segments:
        encoded = torch.zeros(15, dtype=torch.uint8)
        codecs["three"].encode_(torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0]), encoded, "F32")
        content[segment.offset : segment.offset + 15] = encoded.numpy().tobytes()
    (stats,) = stats_of(layout, content, codecs)
    assert (stats.sumsq, stats.bad) == (4 * 25.0, None)


def test_buffers_do_not_count_in_the_norm():
    specs = [TensorSpec("w", "F32", (1,)), TensorSpec("mean", "F32", (1,), BUFFERS)]
    (stats,) = stats_of(*filled(specs, torch.tensor([3.0]), torch.tensor([1000.0])))
    assert stats.sumsq == 9.0


@pytest.mark.covers("F31", "X10")
@pytest.mark.parametrize(
    ("rule", "value", "bad"),
    [
        ("max", math.inf, None),
        ("max", math.nan, "best contains NaN or Inf"),
        ("first", math.nan, None),
        ("sum", math.inf, "best contains Inf: a value may be too large for F32 or its codec"),
    ],
)
def test_only_copied_buffers_may_contain_nan(rule, value, bad):
    """Only a buffer that keeps one site's value may contain NaN. A maximum may be infinite, and a sum must be
    finite.
    """
    spec = TensorSpec("best", "F32", (2,), f"{BUFFERS}.{rule}")
    (stats,) = stats_of(*filled([spec], torch.tensor([1.0, value])))
    assert stats.bad == bad


def test_a_norm_that_overflows_is_infinite():
    assert norm_of([9.0, 16.0]) == 5.0
    assert norm_of([1e308] * 3) == norm_of([math.inf, 1.0]) == math.inf
