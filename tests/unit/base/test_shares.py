"""Which rank sends what of a tensor: tiles, by whose rows they begin in; and parts that are never of two ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from encodings_of_layouts import Blocks, Raw
from hypothesis import given
from hypothesis import strategies as st

from atoll.tensors.layout import TILE, Layout, Piece, rows_of, tiles_of, update_layout, version_layout
from atoll.tensors.schema import Schema, TensorSpec

SHAPES = st.one_of(
    st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 300), st.sampled_from([1, 3, 97, 1024, 4096]))
)
SPECS = st.lists(
    st.tuples(SHAPES, st.sampled_from(["F64", "F32", "BF16"]), st.sampled_from(["params", "buffers"])),
    min_size=1,
    max_size=6,
).map(
    lambda found: (
        Schema.build(TensorSpec(f"t{i}", dtype, shape, group) for i, (shape, dtype, group) in enumerate(found)).tensors
    )
)


def layouts(specs: tuple[TensorSpec, ...], part_bytes: int, ranks: int) -> list[Layout]:
    update = update_layout(specs, lambda spec: Blocks() if spec.group == "params" else Raw(), part_bytes, ranks)
    return [update, version_layout(Schema(specs), part_bytes, ranks)]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rows_are_those_of_torch_chunk(rows: int, ranks: int) -> None:
    """FSDP2 divides dimension 0 as `torch.chunk` does; with fewer chunks than ranks, the last have nothing."""
    values = torch.arange(rows * 5).view(rows, 5)
    chunks = [each.reshape(-1).tolist() for each in torch.chunk(values, ranks)] if rows else []
    spec = TensorSpec("w", "F32", (rows, 5))
    for rank in range(ranks):
        start, stop = rows_of(spec, rank, ranks)
        assert values.reshape(-1)[start:stop].tolist() == (chunks[rank] if rank < len(chunks) else [])


def test_a_tile_belongs_to_the_rank_of_its_first_row() -> None:
    """301 rows of 97 are 29,197 elements, in 8 tiles; rank 0 has 151 rows, 14,647 elements, which end in tile 3."""
    spec = TensorSpec("w", "F32", (301, 97))
    assert [rows_of(spec, rank, 2) for rank in (0, 1)] == [(0, 14_647), (14_647, 29_197)]
    assert [tiles_of(spec, rank, 2) for rank in (0, 1)] == [(0, 4 * TILE), (4 * TILE, 29_197)]
    small = TensorSpec("b", "F32", (301,))  # one tile, which begins in the first row
    assert [tiles_of(small, rank, 2) for rank in (0, 1)] == [(0, 301), (301, 301)]
    buffer = dataclasses.replace(spec, group="buffers")
    assert [tiles_of(buffer, rank, 2) for rank in (0, 1)] == [(0, 29_197), (29_197, 29_197)]


@given(SPECS, st.integers(1, 5), st.sampled_from([2**14, 2**16, 2**24]))
def test_parts_cover_every_byte_once_and_are_of_one_rank(
    specs: tuple[TensorSpec, ...], ranks: int, part_bytes: int
) -> None:
    for layout in layouts(specs, part_bytes, ranks):
        end = 0
        for index, part in enumerate(layout.all_parts):
            assert (part.index, part.start) == (index, end)
            end = part.stop
            for piece in part.pieces:
                owned = tiles_of(piece.segment.spec, part.rank, ranks)
                assert piece.numel == 0 or owned[0] <= piece.start < piece.stop <= owned[1]
        assert end == layout.nbytes


@given(SPECS, st.integers(1, 5))
def test_the_shares_of_the_ranks_are_the_whole(specs: tuple[TensorSpec, ...], ranks: int) -> None:
    for layout in layouts(specs, 2**16, ranks):
        shares = [layout.of_rank(rank) for rank in range(ranks)]
        together = sorted((part for share in shares for part in share.parts), key=lambda part: part.index)
        assert together == list(layout.parts) == list(layout.all_parts)
        assert sum(share.own_nbytes for share in shares) == layout.nbytes == layout.own_nbytes
        assert {share.digest for share in shares} == {layout.digest}
        for share in shares:
            assert share.all_parts == layout.all_parts


@given(SPECS, st.sampled_from([2**14, 2**24]))
def test_cut_for_one_rank_a_layout_is_what_it_always_was(specs: tuple[TensorSpec, ...], part_bytes: int) -> None:
    """Runs that were begun before there were ranks go on."""
    for layout in layouts(specs, part_bytes, 1):
        bare = dataclasses.replace(layout, ranks=1)
        assert (layout.parts, layout.digest) == (bare.parts, bare.digest)
        assert all(part.rank == 0 for part in layout.parts)


def test_the_digest_says_for_how_many_ranks_a_layout_is_cut() -> None:
    specs = (TensorSpec("w", "F32", (300, 97)),)
    assert len({layouts(specs, 2**16, ranks)[0].digest for ranks in (1, 2, 3)}) == 3


def test_segments_and_bytes_are_the_same_for_any_number_of_ranks() -> None:
    """What a server decodes and reduces knows nothing of ranks."""
    specs = (TensorSpec("w", "F32", (300, 97)), TensorSpec("b", "F32", (300,)))

    def pieces(layout: Layout) -> list[Piece]:
        return [piece for part in layout.parts for piece in part.pieces]

    for one, three in zip(layouts(specs, 2**24, 1), layouts(specs, 2**24, 3), strict=True):
        assert (one.segments, one.nbytes) == (three.segments, three.nbytes)
        assert sum(piece.numel for piece in pieces(three)) == sum(piece.numel for piece in pieces(one))
