"""Neighbouring pieces are read, encoded and decoded by few calls, with the bytes that each of them alone would give."""

from __future__ import annotations

import itertools
import os
import tempfile
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.codecs import Bf16Codec, Codec, Int8Codec, NoneCodec
from atoll.tensors.byte_runs import MOST_BUFFERS, MOST_BYTES, Move, Run, RunTable, joined, read_pieces
from atoll.tensors.chunks import bytes_of
from atoll.tensors.layout import TILE, Layout, update_layout, version_layout
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec

CODECS: dict[str, Codec] = {"none": NoneCodec(), "bf16": Bf16Codec(), "int8": Int8Codec()}
RANGES = st.lists(st.tuples(st.sampled_from([0, 0, 0, 1, 70]), st.integers(0, 40)), max_size=1_300)
"""(bytes that are left out before a piece, bytes of the piece)"""


class Reads:
    """Stands for `preadv`: counts the buffers of each call, and gives at most `most` bytes of the first one."""

    def __init__(self, most: int | None = None) -> None:
        self.buffers: list[int] = []
        self._most, self._preadv = most, os.preadv

    def __call__(self, fd: int, views: list[memoryview], offset: int) -> int:
        self.buffers.append(len(views))
        return self._preadv(fd, views if self._most is None else [views[0][: self._most]], offset)


def read(ranges: list[tuple[int, int]], reads: Reads, cut: int = 0) -> tuple[list[bytes], list[bytes]]:
    """What was read of a file of pseudo-random bytes, and what lies there; `cut` bytes of its end are missing."""
    pieces, offset = [], 0
    for skipped, nbytes in ranges:
        pieces.append((offset + skipped, nbytes))
        offset += skipped + nbytes
    content = (
        torch.randint(0, 256, (offset,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        .numpy()
        .tobytes()
    )
    with tempfile.TemporaryFile() as file, mock.patch("os.preadv", reads):
        os.pwrite(file.fileno(), content[: offset - cut], 0)
        moves: list[Move] = [(at, memoryview(bytearray(nbytes))) for at, nbytes in pieces]
        read_pieces(file.fileno(), iter(moves))
    return [bytes(memory) for _, memory in moves], [content[at : at + nbytes] for at, nbytes in pieces]


@given(RANGES)
def test_pieces_are_read_as_they_lie_and_neighbours_by_one_call(ranges: list[tuple[int, int]]) -> None:
    reads = Reads()
    found, expected = read(ranges, reads)
    assert found == expected
    assert max(reads.buffers, default=0) <= MOST_BUFFERS < os.sysconf("SC_IOV_MAX")
    apart = sum(skipped > 0 for skipped, _ in ranges[1:]) + bool(ranges)
    assert len(reads.buffers) <= apart + len(ranges) // MOST_BUFFERS


def test_a_long_row_of_pieces_is_read_in_calls_of_bounded_size() -> None:
    reads = Reads()
    found, expected = read([(0, MOST_BYTES // 2)] * 5 + [(0, 1)] * 2 * MOST_BUFFERS, reads)
    assert found == expected
    # two halves a call; the last half with 511 single bytes; 512; the last one
    assert reads.buffers == [2, 2, 512, 512, 1]


@given(st.lists(st.tuples(st.sampled_from([0, 3]), st.integers(1, 9)), min_size=1, max_size=20), st.integers(1, 5))
def test_a_read_that_ends_early_is_continued(ranges: list[tuple[int, int]], most: int) -> None:
    found, expected = read(ranges, Reads(most))
    assert found == expected


def test_a_file_that_ends_before_a_piece_is_refused() -> None:
    with pytest.raises(EOFError, match="ends at byte 15"):
        read([(0, 10), (0, 6)], Reads(), cut=1)


@given(RANGES)
def test_joined_ranges_cover_the_same_bytes_and_none_touches_the_next(ranges: list[tuple[int, int]]) -> None:
    offset, given_ranges = 0, []
    for skipped, nbytes in ranges:
        given_ranges.append((offset + skipped, nbytes))
        offset += skipped + nbytes
    found = joined(given_ranges)
    covered = [[byte for at, size in each for byte in range(at, at + size)] for each in (given_ranges, found)]
    assert covered[0] == covered[1]
    assert all(sum(one) < two[0] for one, two in itertools.pairwise(found))


SPECS = st.lists(
    st.tuples(
        st.sampled_from(["F32", "F32", "BF16", "I64"]),
        st.one_of(st.integers(0, 70), st.integers(0, 3 * TILE)),
        st.sampled_from(["params", "params", BUFFERS]),
    ),
    max_size=80,
).map(lambda sizes: [TensorSpec(f"t{i}", dtype, (n,), group) for i, (dtype, n, group) in enumerate(sizes)])


def layout_of(schema: Schema, codec: str, part_bytes: int) -> Layout:
    def encoding(spec: TensorSpec) -> Codec:
        return CODECS[codec if spec.group == "params" else "none"]

    return update_layout(schema.tensors, encoding, part_bytes)


def decoded(run: Run, data: bytes, *, piecewise: bool) -> list[torch.Tensor]:
    """The elements of each piece of a run, of the file's bytes."""
    codec, encoded = CODECS[run.codec], torch.frombuffer(bytearray(data[run.start : run.stop]), dtype=torch.uint8)
    values = torch.zeros(run.numel, dtype=torch.float64)
    if not piecewise:
        codec.decode_(encoded, values, run.spec.dtype)
        return [piece.clone() for piece in run.split(values)]
    for target, part in zip(run.split(values), run.encoded(encoded), strict=True):
        codec.decode_(part, target, run.spec.dtype)
    return [piece.clone() for piece in run.split(values)]


@settings(max_examples=40)
@given(SPECS, st.sampled_from(sorted(CODECS)), st.sampled_from([2**12, 2**14, 2**24]))
def test_a_run_decoded_by_one_call_has_the_bits_of_its_pieces(
    specs: list[TensorSpec], codec: str, part_bytes: int
) -> None:
    schema = Schema.build(specs)
    layout = layout_of(schema, codec, part_bytes)
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(0, 120, (layout.nbytes,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    table = RunTable(layout, 2 * TILE)
    for part in layout.parts:
        runs = list(table.of(part))
        assert runs == list(table.of(part))  # as kept
        pieces = [piece for run in runs for piece in run.pieces]
        assert sum(piece.numel for piece in pieces) == sum(piece.numel for piece in part.pieces)
        ends = [(piece.offset, piece.offset + piece.nbytes) for piece in pieces]
        assert all(one[1] <= two[0] for one, two in itertools.pairwise(ends))
        for run in runs:
            assert run.numel <= 2 * TILE
            assert len(run.pieces) <= MOST_BUFFERS
            assert {(p.segment.spec.dtype, p.segment.spec.group, p.segment.codec) for p in run.pieces} == {
                (run.spec.dtype, run.spec.group, run.codec)
            }
            if run.is_whole:
                for one, two in zip(
                    decoded(run, data, piecewise=False), decoded(run, data, piecewise=True), strict=True
                ):
                    assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))


@settings(max_examples=40)
@given(SPECS, st.sampled_from(sorted(CODECS)))
def test_runs_of_a_version_find_the_same_elements_in_an_update(specs: list[TensorSpec], codec: str) -> None:
    schema = Schema.build(specs)
    version, update = version_layout(schema, 2**14), RunTable(layout_of(schema, codec, 2**13), 2**18)
    for part in version.parts:
        for run in RunTable(version, 2 * TILE).of(part):
            found = update.counterpart(run)
            assert [(p.segment.spec, p.start, p.stop) for p in found.pieces] == [
                (p.segment.spec, p.start, p.stop) for p in run.pieces
            ]
            assert found is update.counterpart(run) or len(run.pieces) == 1
            assert [len(view) for view in found.split(torch.zeros(found.numel))] == [p.numel for p in run.pieces]


def test_views_and_padding_are_where_the_elements_of_a_run_lie() -> None:
    """Three tensors of 5, 16 and 2 fp32 values; in an update 44 and 0 bytes of padding are behind the first two."""
    schema = Schema.build([TensorSpec(name, "F32", (size,)) for name, size in (("a", 5), ("b", 16), ("c", 2))])
    layout = layout_of(schema, "none", 2**20)
    (run,) = RunTable(layout, TILE).of(layout.parts[0])
    assert (run.numel, run.sizes, run.item_bytes) == (16 + 16 + 2, [5, 11, 16, 0, 2, 0], 4)
    memory = torch.arange(34, dtype=torch.int16)
    views = [(piece.segment.spec.name, bytes(view)) for piece, view in run.views(bytes_of(memory), 2)]
    starts = {"a": (0, 5), "b": (16, 32), "c": (32, 34)}
    assert views == [(name, bytes(bytes_of(memory[low:high]))) for name, (low, high) in starts.items()]
    run.clear_padding(bytes_of(memory), 2)
    assert memory.tolist() == [0, 1, 2, 3, 4, *[0] * 11, *range(16, 34)]


def test_thousands_of_small_tensors_are_a_few_runs() -> None:
    schema = Schema.build(TensorSpec(f"t{index}", "F32", (index % 60 + 1,)) for index in range(5_000))
    for layout in (version_layout(schema), layout_of(schema, "bf16", 2**24)):
        table = RunTable(layout, 2**18)
        assert sum(1 for part in layout.parts for _ in table.of(part)) == 10  # 512 at most each
