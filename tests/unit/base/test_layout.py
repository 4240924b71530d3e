"""Layouts: parts cover a file exactly once, are cut at tiles, and a version's file opens as safetensors."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from encodings_of_layouts import Blocks, Raw
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from atoll.tensors.layout import (
    ALIGN_BYTES,
    TILE,
    Encoding,
    Layout,
    chunks,
    file_layout,
    safetensors_header,
    update_layout,
    version_header,
    version_layout,
)
from atoll.tensors.schema import ITEM_BYTES, Schema, TensorSpec

RAW, BLOCKS = Raw(), Blocks()


def encoding_of(spec: TensorSpec) -> Encoding:
    return BLOCKS if spec.is_float and spec.group == "params" else RAW


def specs_of(sizes: list[tuple[str, int, str]]) -> list[TensorSpec]:
    return [TensorSpec(f"t{i}", dtype, (numel,), group) for i, (dtype, numel, group) in enumerate(sizes)]


SIZES = st.one_of(
    st.integers(0, 3),
    st.integers(TILE - 1, TILE + 1),
    st.integers(0, 12 * TILE),
    st.integers(0, 12).map(lambda tiles: tiles * TILE),
)
SPECS = st.lists(
    st.tuples(st.sampled_from(["F32", "BF16", "I64", "U8"]), SIZES, st.sampled_from(["params", "buffers"])),
    max_size=8,
).map(specs_of)
PART_BYTES = st.one_of(st.integers(1, 4 * TILE), st.integers(4 * TILE, 64 * TILE), st.just(16 * TILE))


def layouts(specs: list[TensorSpec], part_bytes: int) -> list[Layout]:
    """An update's layout, and a version's."""
    return [update_layout(specs, encoding_of, part_bytes), version_layout(Schema.build(specs), part_bytes)]


@given(SPECS, PART_BYTES)
def test_parts_cover_every_byte_once_in_order(specs: list[TensorSpec], part_bytes: int) -> None:
    for layout in layouts(specs, part_bytes):
        assert [part.index for part in layout.parts] == list(range(len(layout.parts)))
        assert layout.parts[0].start == 0
        assert layout.parts[-1].stop == layout.nbytes
        for one, two in itertools.pairwise(layout.parts):
            assert one.stop == two.start
            assert one.nbytes > 0


@given(SPECS, PART_BYTES)
def test_a_part_has_at_most_its_bytes_or_holds_a_single_tile(specs: list[TensorSpec], part_bytes: int) -> None:
    for layout in layouts(specs, part_bytes):
        for part in layout.parts:
            tiles = sum(-(-piece.numel // TILE) for piece in part.pieces)
            assert part.nbytes <= part_bytes or tiles == 1
        for one, two in itertools.pairwise(layout.parts):
            assert one.nbytes + two.nbytes > part_bytes  # no two neighbours would have fitted into one


@given(SPECS, PART_BYTES)
def test_pieces_are_whole_tiles_and_lie_where_the_rate_says(specs: list[TensorSpec], part_bytes: int) -> None:
    for layout in layouts(specs, part_bytes):
        pieces = [piece for part in layout.parts for piece in part.pieces]
        for part in layout.parts:
            end = max(part.start, min(layout.header_bytes, part.stop))
            for piece in part.pieces:
                assert 0 <= piece.offset - end < ALIGN_BYTES  # nothing between pieces but padding
                end = piece.offset + piece.nbytes
            assert 0 <= part.stop - end < ALIGN_BYTES
        for segment in layout.segments:
            encoding = layout.encodings[segment.codec]
            at, offset = 0, segment.offset
            for piece in (piece for piece in pieces if piece.segment is segment):
                assert (piece.start, piece.offset) == (at, offset)
                assert piece.start % TILE == 0
                assert piece.stop % TILE == 0 or piece.stop == segment.numel
                assert piece.nbytes == encoding.encoded_bytes(piece.numel, segment.spec.dtype)
                at, offset = piece.stop, piece.offset + piece.nbytes
            assert (at, offset) == (segment.numel, segment.offset + segment.nbytes)


@given(SPECS, PART_BYTES, st.integers(1, 5))
def test_chunks_cut_every_piece_at_tiles(specs: list[TensorSpec], part_bytes: int, tiles: int) -> None:
    for layout in layouts(specs, part_bytes):
        for part in layout.parts:
            runs = list(chunks(part, tiles * TILE))
            assert all(0 < stop - start <= tiles * TILE and start % TILE == 0 for _, start, stop in runs)
            for piece in part.pieces:
                own = [(start, stop) for owner, start, stop in runs if owner is piece]
                elements = [element for start, stop in own for element in (start, stop)]
                assert elements[1:-1:2] == elements[2::2]
                assert not own or (own[0][0], own[-1][1]) == (piece.start, piece.stop)
                assert bool(own) == bool(piece.numel)


@given(SPECS)
def test_segments_of_an_update_are_aligned_and_those_of_a_file_have_no_gaps(specs: list[TensorSpec]) -> None:
    update, version = layouts(specs, 16 * TILE)
    assert all(segment.offset % ALIGN_BYTES == 0 for segment in update.segments)
    assert update.nbytes % ALIGN_BYTES == 0
    end = version.header_bytes
    for segment in version.segments:
        assert segment.offset == end
        assert segment.offset % segment.spec.item_bytes == 0
        end += segment.nbytes
    assert version.nbytes == end


def test_a_cut_worked_out_by_hand() -> None:
    # Rate of `blocks`: 260 bytes per 256 values, so 4,160 per tile.
    # a: 2.5 tiles = 40 blocks = 10,400 bytes, padded to 10,432; b: 16 bytes, padded to 64.
    # Parts of 9,000 bytes: two tiles of a (8,320); the rest of a with its padding (2,112) and b (64).
    specs = [TensorSpec("a", "F32", (2 * TILE + TILE // 2,)), TensorSpec("b", "I64", (2,), "buffers")]
    layout = update_layout(specs, encoding_of, 9000)
    assert [(part.start, part.stop) for part in layout.parts] == [(0, 8320), (8320, 10496)]
    found = [[(p.segment.spec.name, p.start, p.stop, p.offset, p.nbytes) for p in part.pieces] for part in layout.parts]
    assert found == [
        [("a", 0, 8192, 0, 8320)],
        [("a", 8192, 10240, 8320, 2080), ("b", 0, 2, 10432, 16)],
    ]
    assert layout.by_name["b"].offset == 10432
    assert layout.bytes_before(layout.by_name["a"], TILE) == 4160


def test_a_model_without_tensors_or_with_empty_ones_has_one_part() -> None:
    assert [part.nbytes for part in update_layout([], encoding_of).parts] == [0]
    empty = update_layout([TensorSpec("e", "F32", (3, 0))], encoding_of)
    assert [(part.nbytes, len(part.pieces)) for part in empty.parts] == [(0, 1)]


def test_a_version_is_a_file_that_safetensors_opens(tmp_path: Path) -> None:
    specs = [TensorSpec(f"every.{dtype}", dtype, (3, 5)) for dtype in ITEM_BYTES]
    specs += [
        TensorSpec('odd "名" \\ name', "F32", (2,)),
        TensorSpec("scalar", "I64", (), "buffers"),
        TensorSpec("empty", "BF16", (4, 0)),
        TensorSpec("large", "F32", (3, TILE)),
    ]
    schema = Schema.build(specs)
    layout = version_layout(schema, 4 * TILE)
    data = np.random.default_rng(0).integers(0, 2, layout.nbytes, dtype=np.uint8)  # 0 and 1: valid booleans, too
    header = version_header(schema)
    data[: len(header)] = np.frombuffer(header, np.uint8)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data.tobytes())

    assert layout.header_bytes == len(header)
    assert len(header) % ALIGN_BYTES == 0
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "atoll.schema": schema.digest}
        assert set(file.keys()) == {spec.name for spec in specs}
        for segment in layout.segments:
            tensor = file.get_tensor(segment.spec.name)
            assert file.get_slice(segment.spec.name).get_dtype() == segment.spec.dtype
            assert tuple(tensor.shape) == segment.spec.shape
            expected = data[segment.offset : segment.offset + segment.nbytes].tobytes()
            assert tensor.reshape(-1).view(_uint8()).numpy().tobytes() == expected


def _uint8() -> object:
    import torch

    return torch.uint8


def test_the_digest_changes_with_whatever_moves_a_byte() -> None:
    spec = TensorSpec("w", "F32", (8, 2))
    base = update_layout([spec], lambda _: RAW)
    others = [
        update_layout([dataclasses.replace(spec, name="v")], lambda _: RAW),
        update_layout([dataclasses.replace(spec, dtype="I32")], lambda _: RAW),
        update_layout([dataclasses.replace(spec, shape=(2, 8))], lambda _: RAW),
        update_layout([dataclasses.replace(spec, group="buffers")], lambda _: RAW),
        update_layout([spec], lambda _: Raw("copy")),
        update_layout([spec], lambda _: BLOCKS),
        update_layout([spec], lambda _: RAW, 2**16),
        update_layout([spec, dataclasses.replace(spec, name="v")], lambda _: RAW),
        file_layout([spec], b""),
        file_layout([spec], safetensors_header([spec], {})),
        file_layout([spec], safetensors_header([spec], {"x": "y" * 64})),
    ]
    # A file without a header is laid out as the raw update of one aligned tensor is: nothing lies elsewhere.
    assert [other.digest == base.digest for other in others] == [False] * 8 + [True] + [False] * 2
    assert len({other.digest for other in others}) == len(others)
    assert update_layout([spec], lambda _: RAW).digest == base.digest


def test_an_update_is_named_by_its_layout_and_its_parts_in_order() -> None:
    layout = update_layout([TensorSpec("w", "F32", (8,))], encoding_of)
    one, two = blake3(b"one").digest(), blake3(b"two").digest()
    assert layout.blob_id([one, two]) == blake3(bytes.fromhex(layout.digest) + one + two).hexdigest()
    assert layout.blob_id([two, one]) != layout.blob_id([one, two])


@pytest.mark.parametrize("tensors", [50, 5000])
def test_the_work_of_cutting_grows_with_tensors_and_parts_only(tensors: int) -> None:
    """Counted, not timed: calls of the codec's rate, for the same total in 50 and in 5,000 tensors."""
    calls = 0

    class Counting(Raw):
        def encoded_bytes(self, numel: int, dtype: str) -> int:
            nonlocal calls
            calls += 1
            return super().encoded_bytes(numel, dtype)

    specs = [TensorSpec(f"layer.{i}", "F32", (500_000_000 // tensors,)) for i in range(tensors)]
    layout = update_layout(specs, lambda _: Counting())
    assert sum(len(part.pieces) for part in layout.parts) <= tensors + len(layout.parts)
    assert len(layout.parts) <= 2 * -(-layout.nbytes // layout.part_bytes)
    # One call per tensor to lay it out. There are at most tensors + parts pieces; each costs at most 4 calls,
    # and so does the attempt that ends a part.
    assert calls <= tensors + 4 * (tensors + 2 * len(layout.parts))
