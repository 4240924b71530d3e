"""What is seen of a part before it may count, in whatever pieces its bytes arrive."""

import math
import os
import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from blake3 import blake3
from pass_world import CODECS, MIXED, World, values

from atoll.aggregation import check_arriving_parts
from atoll.aggregation.check_arriving_parts import ELEMENTS, ROW, Inspection
from atoll.errors import BadRequest, StoreError
from atoll.tensors.layout import update_layout
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec

LARGE = Schema.build([TensorSpec("w", "F32", (3 * ELEMENTS + 17,)), *MIXED.tensors])
"""Of several spans, when a part may have 16 MiB."""


def feed(inspector, data):
    """Give it these bytes; returns how many it took."""
    left = memoryview(data)

    def fill(room):
        nonlocal left
        count = min(len(room), len(left))
        room[:count] = left[:count]
        left = left[count:]
        return count

    inspector.take(fill)
    return len(data) - len(left)


def raw(spec):
    return CODECS["none"]


def no_write(span):
    pass


def look_at(inspection, part, content, size=4096, write=no_write):
    """Feed one part of an update in pieces of `size` bytes."""
    with inspection.begin(part, write) as inspector:
        for start in range(part.start, part.stop, size):
            feed(inspector, memoryview(content)[start : min(start + size, part.stop)])
        return inspector.stats()


def stats_of(layout, content, size=4096):
    inspection = Inspection(layout, CODECS)
    return [look_at(inspection, part, content, size) for part in layout.parts]


def content_of(world):
    return bytearray(os.pread(world.files().updates[0].fd, world.update_layout.nbytes, 0))


def encode(content, segment, numbers):
    encoded = torch.zeros(segment.nbytes, dtype=torch.uint8)
    CODECS[segment.codec].encode_(numbers, encoded, segment.spec.dtype)
    content[segment.offset : segment.offset + segment.nbytes] = encoded.numpy().tobytes()


def large():
    """An update of `LARGE`: its layout, its one part, its bytes."""
    layout = update_layout(LARGE.tensors, raw)
    (part,) = layout.parts
    content = bytearray(layout.nbytes)
    for segment in layout.segments:
        encode(content, segment, values(segment.spec, 1).reshape(-1))
    return layout, part, content


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_digests_and_norm_of_a_good_update(tmp_path, codec):
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


def test_the_pieces_in_which_bytes_arrive_change_nothing():
    layout, part, content = large()
    seen = []
    for size in (999, 4096, 2**20, 2**20 + 1, layout.nbytes):
        spans: list[bytes] = []
        stats = look_at(Inspection(layout, CODECS), part, content, size, lambda span, to=spans: to.append(bytes(span)))
        assert len(spans) > 2
        assert b"".join(spans) == content
        seen.append(stats)
    assert all(stats == seen[0] for stats in seen)
    assert seen[0].digest == blake3(content).digest()


def test_a_span_that_was_begun_is_filled_before_others_are_looked_at_where_they_lie():
    layout, part, content = large()
    data = memoryview(content)
    with Inspection(layout, CODECS).begin(part, no_write) as inspector:
        assert feed(inspector, data[:999]) == 999
        assert inspector.take_from(data[999:]) == 0
        first = inspector._spans[0].stop
        assert feed(inspector, data[999:first]) == first - 999
        assert inspector.take_from(data[first:]) == layout.nbytes - first
        assert inspector.stats() == look_at(Inspection(layout, CODECS), part, content)


@pytest.mark.parametrize("size", [999, 5 * 2**19, 3 * 2**20, 2**30])
def test_bytes_that_are_looked_at_where_they_lie_are_the_same(size):
    layout, part, content = large()
    inspection, spans, there = Inspection(layout, CODECS), [], 0
    with inspection.begin(part, lambda span: spans.append(bytes(span))) as inspector:
        assert all(span.stop - span.start > 999 for span in inspector._spans[:-1])
        for start in range(0, layout.nbytes, size):
            data = memoryview(content)[start : start + size]
            taken = inspector.take_from(data)
            assert taken + feed(inspector, data[taken:]) == len(data)
            there += taken
        assert inspector.complete
        stats = inspector.stats()
    assert inspection._lent == 0
    # all bytes at once are nothing but whole spans, of at most 2 MiB; 999 never are one, but for the last
    assert there == layout.nbytes if size == 2**30 else there < layout.nbytes
    assert there <= 999 if size == 999 else there > 2**20
    assert b"".join(spans) == content
    assert stats == look_at(Inspection(layout, CODECS), part, content)


@pytest.mark.covers("F31")
def test_what_is_not_finite_where_it_lies_is_named():
    layout, part, content = large()
    encode(content, layout.by_name["scale"], torch.tensor([math.nan]))
    with Inspection(layout, CODECS).begin(part, no_write) as inspector:
        assert inspector.take_from(memoryview(content)) == layout.nbytes
        assert inspector.stats().bad == "scale holds NaN or Inf"
    with pytest.raises(StoreError, match="no longer received"):
        inspector.take_from(memoryview(content))


def test_one_byte_at_a_time(tmp_path):
    world = World(tmp_path, schema=Schema.build([TensorSpec("w", "F32", (9,)), TensorSpec("v", "F64", (2,))]))
    content = content_of(world)
    assert stats_of(world.update_layout, content, 1) == stats_of(world.update_layout, content, len(content))


@pytest.mark.covers("F31")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["embed", "large", "scale", "exact", "half", "brain", "small.7", "mean", "mean16"])
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_one_value_that_is_not_finite_is_found_and_its_tensor_named(tmp_path, codec, name, bad):
    world = World(tmp_path, codec=codec)
    segment = world.update_layout.by_name[name]
    submitted = world.submitted(0, 0)[name].reshape(-1)
    submitted[-1] = bad
    content = content_of(world)
    encode(content, segment, submitted)
    found = stats_of(world.update_layout, content)
    told = "holds NaN or Inf" if math.isnan(bad) else "holds Inf: an overflow"
    assert [stats.bad.startswith(f"{name} {told}") for stats in found if stats.bad] == [True]


@pytest.mark.covers("F31")
@pytest.mark.parametrize("place", [0, 2, 4])
def test_among_neighbours_that_are_looked_at_as_one_the_right_one_is_named(place):
    layout = update_layout([TensorSpec(f"w{index}", "F32", (5,)) for index in range(5)], raw)
    (part,) = layout.parts
    inspection = Inspection(layout, CODECS)
    content = bytearray(layout.nbytes)
    encode(content, layout.segments[place], torch.tensor([1.0, 2.0, 3.0, 4.0, math.nan]))
    assert look_at(inspection, part, content).bad == f"w{place} holds NaN or Inf"


@pytest.mark.covers("F31")
@pytest.mark.parametrize("codec", ["none", "bf16"])
@pytest.mark.parametrize("bad", [b"\xff\xff\xff\xff", b"\x00\x00\x80\x7f"])  # NaN; +Inf, also to bfloat16
def test_what_is_not_finite_in_the_padding_is_nobodys(codec, bad):
    """Guards against a sum of squares that is NaN for it: no limit on the norm is below NaN, no journal takes it."""
    layout = update_layout([TensorSpec(f"w{index}", "F32", (5,)) for index in range(3)], lambda spec: CODECS[codec])
    (part,) = layout.parts
    content = bytearray(layout.nbytes)
    for segment in layout.segments:
        encode(content, segment, torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0]))
        end = segment.offset + segment.nbytes
        content[end : end + 4] = bad
    stats = look_at(Inspection(layout, CODECS), part, content)
    assert stats.bad is None
    assert stats.sumsq == 3 * 25.0
    assert stats.digest == blake3(content).digest()


def test_accepts_finite_numbers_with_squares_that_overflow():
    layout = update_layout([TensorSpec(name, "F64", (9,)) for name in ("v", "w")], raw)
    content = bytearray(layout.nbytes)
    encode(content, layout.segments[1], torch.full((9,), 1e200, dtype=torch.float64))
    (stats,) = stats_of(layout, content)
    assert stats.bad is None
    assert stats.sumsq == math.inf  # and so above any limit on the norm


@pytest.mark.parametrize("size", [2.0**100, 2.0**-70, 2.0**-40])
def test_squares_that_fp32_has_no_room_for_are_added_in_fp64(size):
    """(2^100)² is above fp32's largest number, (2^-70)² below its smallest, and a million of (2^-40)² above both."""
    numel = 2 * ELEMENTS
    layout = update_layout([TensorSpec("w", "F32", (numel,))], raw)
    content = bytearray(layout.nbytes)
    encode(content, layout.segments[0], torch.full((numel,), size))
    (stats,) = stats_of(layout, content)
    assert (stats.sumsq, stats.bad) == (pytest.approx(numel * size**2, rel=1e-6), None)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("numel", [1, ROW - 1, ROW, ROW + 1, ELEMENTS + ROW + 3])
def test_the_norm_counts_every_element_once(dtype, numel):
    layout = update_layout([TensorSpec("w", dtype, (numel,))], raw)
    content = bytearray(layout.nbytes)
    encode(content, layout.segments[0], torch.full((numel,), 3.0))
    assert math.fsum(stats.sumsq for stats in stats_of(layout, content)) == pytest.approx(9.0 * numel, rel=1e-6)


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


def test_looks_at_no_element_across_a_border_of_the_alignment():
    codecs = {"three": ThreeBytes()}
    layout = update_layout([TensorSpec(f"w{index}", "F32", (5,)) for index in range(4)], lambda spec: codecs["three"])
    content = bytearray(layout.nbytes)
    for segment in layout.segments:
        encoded = torch.zeros(15, dtype=torch.uint8)
        codecs["three"].encode_(torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0]), encoded, "F32")
        content[segment.offset : segment.offset + 15] = encoded.numpy().tobytes()
    stats = look_at(Inspection(layout, codecs), layout.parts[0], content)
    assert (stats.sumsq, stats.bad) == (4 * 25.0, None)


def test_buffers_do_not_count_in_the_norm():
    layout = update_layout([TensorSpec("w", "F32", (1,)), TensorSpec("mean", "F32", (1,), BUFFERS)], raw)
    content = bytearray(layout.nbytes)
    encode(content, layout.segments[0], torch.tensor([3.0]))
    encode(content, layout.segments[1], torch.tensor([1000.0]))
    (stats,) = stats_of(layout, content)
    assert stats.sumsq == 9.0


def test_a_part_that_is_not_all_there_is_an_error(tmp_path):
    world = World(tmp_path)
    part, content = world.update_layout.parts[0], content_of(world)
    with Inspection(world.update_layout, CODECS).begin(part, no_write) as inspector:
        feed(inspector, content[: part.nbytes - 1])
        with pytest.raises(BadRequest, match="Part 0 is not all there"):
            inspector.stats()


def test_it_takes_no_more_bytes_than_the_part_has(tmp_path):
    world = World(tmp_path)
    part, content = world.update_layout.parts[0], content_of(world)
    written = []
    with Inspection(world.update_layout, CODECS).begin(part, lambda span: written.append(bytes(span))) as inspector:
        assert feed(inspector, content[: part.nbytes] + b"behind") == part.nbytes
        assert inspector.complete
        assert feed(inspector, b"more") == 0
    assert b"".join(written) == content[: part.nbytes]


def test_an_error_of_the_file_reaches_the_feeding_thread(tmp_path):
    def full(span):
        raise OSError(28, "No space left on device")

    world = World(tmp_path)
    part, content = world.update_layout.parts[0], content_of(world)
    with Inspection(world.update_layout, CODECS).begin(part, full) as inspector, pytest.raises(OSError, match="space"):
        feed(inspector, content[: part.nbytes])


@pytest.mark.covers("D2")
def test_nothing_is_allocated_once_the_scratch_is_there(monkeypatch):
    layout = update_layout(LARGE.tensors, raw)
    content = bytes(layout.nbytes)
    inspection = Inspection(layout, CODECS)
    before = [look_at(inspection, part, content) for part in layout.parts]

    def refuse(*args, **kwargs):
        raise AssertionError("a buffer was allocated")

    for factory in ("empty", "zeros", "tensor", "empty_like"):
        monkeypatch.setattr(torch, factory, refuse)
    assert [look_at(inspection, part, content) for part in layout.parts] == before


def test_memory_that_a_thread_still_writes_from_is_not_given_to_another_part():
    """A request is cancelled while a pool thread writes its bytes; they must not become another request's."""
    layout = update_layout([TensorSpec("w", "F32", (1000,))], raw)
    (part,) = layout.parts
    inspection = Inspection(layout, CODECS)
    one, two = b"\x01" * part.nbytes, b"\x02" * part.nbytes
    inside, go_on, seen = threading.Event(), threading.Event(), []

    def slow(span):
        inside.set()
        go_on.wait(10)
        seen.append(bytes(span))

    with inspection.begin(part, slow) as inspector:
        thread = threading.Thread(target=feed, args=(inspector, one))
        thread.start()
        assert inside.wait(10)
    look_at(inspection, part, two)
    go_on.set()
    thread.join()
    assert seen == [one]
    assert inspector.stats().digest == blake3(one).digest()


class File:
    """Takes the runs of a part in order, and has them read back."""

    def __init__(self, part, limit=None):
        self.start, self.content, self.limit = part.start, bytearray(), limit

    def write(self, run):
        if self.limit is not None and len(self.content) + len(run) > self.limit:
            raise OSError(28, "No space left on device")
        self.content += run

    def read(self, room, offset):
        room[:] = self.content[offset - self.start :][: len(room)]


@pytest.mark.covers("D1")
def test_parts_that_arrive_at_once_share_a_bounded_number_of_scratches(monkeypatch):
    """200 parts that have all begun and stand still in a span, which then go on in turns of a few bytes."""
    made = []

    class Counted(check_arriving_parts.Scratch):
        def __init__(self, elements):
            made.append(self)
            super().__init__(elements)

    layout = update_layout(LARGE.tensors, raw)
    part = layout.parts[0]
    content = (np.arange(layout.nbytes) % 50).astype("u1").tobytes()  # finite in every dtype
    expected = look_at(Inspection(layout, CODECS), part, content)
    monkeypatch.setattr(check_arriving_parts, "Scratch", Counted)
    monkeypatch.setattr(check_arriving_parts, "HELD", 5)
    inspection = Inspection(layout, CODECS)
    files = [File(part) for _ in range(200)]
    looks = [inspection.begin(part, file.write, file.read) for file in files]
    for start in range(part.start, part.stop, 700_001):
        for look in looks:
            feed(look, content[start : min(start + 700_001, part.stop)])
    assert [look.stats() for look in looks] == [expected] * 200
    assert all(file.content == content[: part.nbytes] for file in files)
    assert len(made) <= 5 + 1 + 1  # held, this thread's turn, and what it decodes into


def test_memory_is_given_back_by_parts_that_are_left_or_fail_in_a_span(monkeypatch):
    monkeypatch.setattr(check_arriving_parts, "HELD", 3)
    monkeypatch.setattr(check_arriving_parts, "FREE", 2)
    layout = update_layout(LARGE.tensors, raw)
    part = layout.parts[0]
    inspection = Inspection(layout, CODECS)
    for _ in range(3):
        looks = [inspection.begin(part, file.write, file.read) for file in (File(part) for _ in range(10))]
        for look in looks * 2:
            feed(look, bytes(100))
        for look in looks:
            look.__exit__()
        file = File(part, limit=50)
        with inspection.begin(part, file.write, file.read) as look, pytest.raises(OSError, match="space"):
            feed(look, bytes(part.nbytes))
        assert inspection._lent == 0
        assert len(inspection._free) == 2


def test_a_thread_that_is_left_alone_with_a_part_gives_its_memory_back():
    layout = update_layout([TensorSpec("w", "F32", (1000,))], raw)
    inspection = Inspection(layout, CODECS)
    inside, go_on = threading.Event(), threading.Event()

    def slow(room):
        inside.set()
        go_on.wait(10)
        return 0

    with inspection.begin(layout.parts[0], no_write) as inspector:
        feed(inspector, b"\1" * 100)
        thread = threading.Thread(target=inspector.take, args=(slow,))
        thread.start()
        assert inside.wait(10)
    assert inspection._lent == 1
    go_on.set()
    thread.join()
    assert inspection._lent == 0


def test_refuses_bytes_after_the_end():
    layout = update_layout([TensorSpec("w", "F32", (1000,))], raw)
    (part,) = layout.parts
    with Inspection(layout, CODECS).begin(part, no_write) as inspector:
        feed(inspector, b"\1" * 100)
    with pytest.raises(StoreError, match="no longer received"):
        feed(inspector, b"\1")
