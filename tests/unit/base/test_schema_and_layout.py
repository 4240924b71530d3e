"""Schemas and layouts: order, digests, parts that cover a file exactly once, and the share of each rank."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from atoll.errors import SchemaMismatch, UsageError
from atoll.tensors.layout import (
    ALIGN_BYTES,
    TILE,
    Encoding,
    Layout,
    Piece,
    chunks,
    file_layout,
    rows_of,
    safetensors_header,
    tiles_of,
    update_layout,
    version_header,
    version_layout,
)
from atoll.tensors.schema import BUFFERS, ITEM_BYTES, Schema, TensorSpec

# -- schemas


ANY_SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.text(min_size=1, max_size=6),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
        group=st.sampled_from(["params", "buffers"]),
    ),
    max_size=8,
    unique_by=lambda spec: spec.name,
)


@given(ANY_SPECS)
def test_storage_order_is_widest_first(specs: list[TensorSpec]) -> None:
    """A schema puts tensors with larger elements first. Tensors with elements of equal size keep the model's order."""
    ordered = Schema.build(specs).tensors
    assert sorted(ordered, key=str) == sorted(specs, key=str)
    for one, two in itertools.pairwise(ordered):
        assert one.item_bytes > two.item_bytes or (
            one.item_bytes == two.item_bytes and specs.index(one) < specs.index(two)
        )


@given(ANY_SPECS, ANY_SPECS)
def test_schema_digests_are_unique(one: list[TensorSpec], two: list[TensorSpec]) -> None:
    """Two schemas have the same digest if and only if they are equal. A schema that is written as JSON is read back
    equal.
    """
    first, second = Schema.build(one), Schema.build(two)
    assert (first.digest == second.digest) == (first == second)
    assert Schema.from_json(first.to_json()) == first
    assert Schema.from_json(first.to_json()).digest == first.digest


def test_a_schema_digest_covers_its_canonical_json() -> None:
    """The digest of a schema is the BLAKE3 hash of its canonical JSON."""
    schema = Schema.build([TensorSpec("w", "F32", (2, 3))], {"v": "w"})
    text = b'{"aliases":[["v","w"]],"tensors":[["w","F32",[2,3],"params"]]}'
    assert schema.digest == blake3(text).hexdigest()


def test_scalars_and_empty_tensors_have_sizes() -> None:
    """The size of a schema counts a scalar as one element and an empty tensor as none."""
    # 6 · 4 bytes + 1 · 8 bytes + 0 · 2 bytes
    specs = [
        TensorSpec("w", "F32", (2, 3)),
        TensorSpec("n", "I64", (), BUFFERS),
        TensorSpec("e", "BF16", (4, 0)),
    ]
    schema = Schema.build(specs)
    assert [spec.numel for spec in schema.tensors] == [1, 6, 0]
    assert (schema.numel, schema.nbytes) == (7, 32)
    assert [spec.is_float for spec in schema.tensors] == [False, True, True]


def test_an_invalid_schema_is_refused() -> None:
    """A schema with an unsupported dtype, a repeated name or an unknown tied tensor is refused. The error names the
    tensor.
    """
    spec = TensorSpec("w", "F32", (1,))
    with pytest.raises(UsageError, match=r"'w' has the dtype C64, which Atoll does not support\. Use one of F64"):
        TensorSpec("w", "C64", (1,))
    with pytest.raises(UsageError, match="'w' occurs twice"):
        Schema.build([spec, spec])
    with pytest.raises(UsageError, match="'w' occurs twice"):
        Schema.build([spec], {"w": "w"})
    with pytest.raises(UsageError, match="'v' is tied to 'x', but there is no tensor 'x'"):
        Schema.build([spec], {"v": "x"})


BASE = [TensorSpec("a", "F32", (2,)), TensorSpec("b", "F32", (3,))]


B = "b F32[3] in params"
TIED: tuple[Any, ...] = (BASE, {"c": "a"})
DIFFERENCES: dict[str, tuple[Any, Any, str]] = {
    "further": ((BASE,), (BASE[:1],), f"worker clinic-a has {B}, but the server has no such tensor"),
    "missing": ((BASE[:1],), (BASE,), f"the server has {B}, but worker clinic-a has no such tensor"),
    "shape": (
        (BASE,),
        ([BASE[0], TensorSpec("b", "F32", (3, 1))],),
        f"worker clinic-a has {B}, but the server has b F32[3, 1] in params",
    ),
    "dtype": (
        (BASE,),
        ([BASE[0], TensorSpec("b", "BF16", (3,))],),
        f"worker clinic-a has {B}, but the server has b BF16[3] in params",
    ),
    "group": (
        (BASE,),
        ([BASE[0], TensorSpec("b", "F32", (3,), BUFFERS)],),
        f"worker clinic-a has {B}, but the server has b F32[3] in buffers",
    ),
    "a parameter before a buffer": (
        ([TensorSpec("a", "F32", (), BUFFERS), BASE[1]],),
        ([TensorSpec("a", "F32", (4,), BUFFERS), TensorSpec("b", "F32", (5,))],),
        f"worker clinic-a has {B}, but the server has b F32[5] in params",
    ),
    "a parameter there before a buffer here": (
        ([BASE[0], TensorSpec("c", "F32", (), BUFFERS)],),
        (BASE,),
        f"the server has {B}, but worker clinic-a has no such tensor",
    ),
    "a prefix here": (
        ([TensorSpec("module.a", "F32", (2,)), TensorSpec("module.b", "F32", (3,))],),
        (BASE,),
        "the names of worker clinic-a's tensors begin with 'module.', those of the server do not",
    ),
    "a prefix there": (
        (BASE,),
        ([TensorSpec("0.a", "F32", (2,)), TensorSpec("0.b", "F32", (3,))],),
        "the names of the server's tensors begin with '0.', those of worker clinic-a do not",
    ),
    "tied otherwise": (TIED, (BASE, {"c": "b"}), "only worker clinic-a ties c to a"),
    "two there": ((BASE[:1], {"b": "a"}), (BASE,), "worker clinic-a ties b to a, but the server has two tensors"),
    "two here": ((BASE,), (BASE[:1], {"b": "a"}), "the server ties b to a, but worker clinic-a has two tensors"),
}
"""Arguments of `Schema.build` for the worker's model, for the server's, and what is said."""


@pytest.mark.covers("X3")
@pytest.mark.parametrize("case", DIFFERENCES)
def test_different_models_show_their_difference(case: str) -> None:
    """If the models of a worker and the server differ, the error has both digests and the first difference."""
    mine, theirs, difference = DIFFERENCES[case]
    worker, server = Schema.build(*mine), Schema.build(*theirs)
    with pytest.raises(SchemaMismatch) as caught:
        worker.require_equal(server, mine="worker clinic-a", theirs="the server")
    assert caught.value.message == (
        f"The model of worker clinic-a (schema {worker.digest[:12]}) is not the model of the server "
        f"(schema {server.digest[:12]}): {difference}."
    )
    assert caught.value.remedy


def test_the_same_model_in_another_order_is_accepted() -> None:
    one, two = (Schema.build(specs, {"c": "a"}) for specs in (BASE, BASE[::-1]))
    one.require_equal(two, mine="worker clinic-a", theirs="the server")


@pytest.mark.parametrize(("mine", "theirs"), [(TIED, (BASE,)), ((BASE,), TIED)], ids=["here", "there"])
def test_a_missing_second_name_is_accepted(mine: Any, theirs: Any) -> None:
    """If only one side has a second name for a tensor, both models count as equal."""
    Schema.build(*mine).require_equal(Schema.build(*theirs), mine="worker clinic-a", theirs="the server")


# -- layouts


@dataclasses.dataclass(frozen=True)
class Raw:
    name: str = "none"
    elementwise: bool = True

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return numel * ITEM_BYTES[dtype]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """As int8 with a scale per 256 values: a rate that is not a whole number of bytes per element."""

    name: str = "blocks"
    elementwise: bool = False

    def encoded_bytes(self, numel: int, dtype: str) -> int:
        return -(-numel // 256) * (256 + 4)


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
def test_a_part_has_limited_size_or_one_tile(specs: list[TensorSpec], part_bytes: int) -> None:
    """A part has at most `part_bytes` bytes, or it has a single tile. No two neighbouring parts would fit into one."""
    for layout in layouts(specs, part_bytes):
        for part in layout.parts:
            tiles = sum(-(-piece.numel // TILE) for piece in part.pieces)
            assert part.nbytes <= part_bytes or tiles == 1
        for one, two in itertools.pairwise(layout.parts):
            assert one.nbytes + two.nbytes > part_bytes  # no two neighbours would have fitted into one


@given(SPECS, PART_BYTES)
def test_pieces_are_whole_tiles(specs: list[TensorSpec], part_bytes: int) -> None:
    """Each piece of a tensor has whole tiles, except at the tensor's end. Between pieces there is only padding, and
    their sizes follow the codec's rate.
    """
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
    """Chunks cut each piece at the borders of tiles. Together they cover each element once, in order."""
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
def test_updates_are_aligned_and_files_dense(specs: list[TensorSpec]) -> None:
    """The tensors of an update begin at aligned offsets. The tensors of a version's file follow each other without
    gaps.
    """
    update, version = layouts(specs, 16 * TILE)
    assert all(segment.offset % ALIGN_BYTES == 0 for segment in update.segments)
    assert update.nbytes % ALIGN_BYTES == 0
    end = version.header_bytes
    for segment in version.segments:
        assert segment.offset == end
        assert segment.offset % segment.spec.item_bytes == 0
        end += segment.nbytes
    assert version.nbytes == end


def test_a_layout_calculated_by_hand() -> None:
    # Rate of `blocks`: 260 bytes per 256 values, so 4,160 per tile.
    # a: 2.5 tiles = 40 blocks = 10,400 bytes, padded to 10,432; b: 16 bytes, padded to 64.
    # Parts of 9,000 bytes: two tiles of a (8,320); the rest of a with its padding (2,112) and b (64).
    """A layout has the parts, pieces and offsets that the comment calculates from the codec's rate."""
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


def test_empty_models_have_one_part() -> None:
    """The layout of a model without tensors, or with an empty tensor, has one part."""
    assert [part.nbytes for part in update_layout([], encoding_of).parts] == [0]
    empty = update_layout([TensorSpec("e", "F32", (3, 0))], encoding_of)
    assert [(part.nbytes, len(part.pieces)) for part in empty.parts] == [(0, 1)]


def test_safetensors_opens_the_file_of_a_version(tmp_path: Path) -> None:
    """safetensors opens the file of a version. Each tensor has its name, dtype, shape and bytes there."""
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
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == expected


def test_different_layouts_have_different_digests() -> None:
    """The digest of a layout changes with the name, dtype, shape, group or codec of a tensor, the size of parts and the
    header.
    """
    # A file without a header has the same digest as the raw update of one aligned tensor: the bytes have the same
    # places.
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


def test_an_update_id_covers_layout_and_parts() -> None:
    """The id of an update is the BLAKE3 hash of its layout's digest and its parts' digests in order."""
    layout = update_layout([TensorSpec("w", "F32", (8,))], encoding_of)
    one, two = blake3(b"one").digest(), blake3(b"two").digest()
    assert layout.blob_id([one, two]) == blake3(bytes.fromhex(layout.digest) + one + two).hexdigest()
    assert layout.blob_id([two, one]) != layout.blob_id([one, two])


@pytest.mark.parametrize("tensors", [50, 5000])
def test_layout_work_grows_with_tensors_and_parts(tensors: int) -> None:
    """The work of making a layout grows with the number of tensors and parts only."""
    # The test counts the calls of the codec's rate, for an equal number of elements in 50 and in 5,000 tensors.
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


# -- the share of each rank


SHAPES = st.one_of(
    st.just(()), st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 300), st.sampled_from([1, 3, 97, 1024, 4096]))
)
SHARED_SPECS = st.lists(
    st.tuples(SHAPES, st.sampled_from(["F64", "F32", "BF16"]), st.sampled_from(["params", "buffers"])),
    min_size=1,
    max_size=6,
).map(
    lambda found: (
        Schema.build(TensorSpec(f"t{i}", dtype, shape, group) for i, (shape, dtype, group) in enumerate(found)).tensors
    )
)


def layouts_of_ranks(specs: tuple[TensorSpec, ...], part_bytes: int, ranks: int) -> list[Layout]:
    update = update_layout(specs, lambda spec: Blocks() if spec.group == "params" else Raw(), part_bytes, ranks)
    return [update, version_layout(Schema(specs), part_bytes, ranks)]


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 7, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ranks_get_the_rows_of_torch_chunk(rows: int, ranks: int) -> None:
    """Each rank gets the rows that `torch.chunk` gives it, because FSDP2 divides dimension 0 so. With fewer chunks than
    ranks, the last ranks get no rows.
    """
    values = torch.arange(rows * 5).view(rows, 5)
    chunks = [each.reshape(-1).tolist() for each in torch.chunk(values, ranks)] if rows else []
    spec = TensorSpec("w", "F32", (rows, 5))
    for rank in range(ranks):
        start, stop = rows_of(spec, rank, ranks)
        assert values.reshape(-1)[start:stop].tolist() == (chunks[rank] if rank < len(chunks) else [])


def test_a_tile_belongs_to_its_first_rows_rank() -> None:
    """A tile belongs to the rank that has the row in which the tile begins."""
    # A buffer belongs to rank 0. 301 rows of 97 are 29,197 elements, in 8 tiles. Rank 0 has 151 rows, which are 14,647
    # elements and end in tile 3.
    spec = TensorSpec("w", "F32", (301, 97))
    assert [rows_of(spec, rank, 2) for rank in (0, 1)] == [(0, 14_647), (14_647, 29_197)]
    assert [tiles_of(spec, rank, 2) for rank in (0, 1)] == [(0, 4 * TILE), (4 * TILE, 29_197)]
    small = TensorSpec("b", "F32", (301,))  # one tile, which begins in the first row
    assert [tiles_of(small, rank, 2) for rank in (0, 1)] == [(0, 301), (301, 301)]
    buffer = dataclasses.replace(spec, group="buffers")
    assert [tiles_of(buffer, rank, 2) for rank in (0, 1)] == [(0, 29_197), (29_197, 29_197)]


@given(SHARED_SPECS, st.integers(1, 5), st.one_of(PART_BYTES, st.sampled_from([2**16, 2**24])))
def test_parts_cover_every_byte_once(specs: tuple[TensorSpec, ...], ranks: int, part_bytes: int) -> None:
    """The parts of a layout cover every byte once. Each part belongs to one rank."""
    for layout in layouts_of_ranks(specs, part_bytes, ranks):
        end = 0
        for index, part in enumerate(layout.all_parts):
            assert (part.index, part.start) == (index, end)
            end = part.stop
            for piece in part.pieces:
                owned = tiles_of(piece.segment.spec, part.rank, ranks)
                assert piece.numel == 0 or owned[0] <= piece.start < piece.stop <= owned[1]
        assert end == layout.nbytes
        assert all(part.nbytes > 0 for part in layout.all_parts[:-1])


@given(SHARED_SPECS, st.integers(1, 5))
def test_the_ranks_shares_make_the_whole_layout(specs: tuple[TensorSpec, ...], ranks: int) -> None:
    """The shares of all ranks have each part of the layout once, and all shares have the layout's digest."""
    for layout in layouts_of_ranks(specs, 2**16, ranks):
        shares = [layout.of_rank(rank) for rank in range(ranks)]
        together = sorted((part for share in shares for part in share.parts), key=lambda part: part.index)
        assert together == list(layout.parts) == list(layout.all_parts)
        assert sum(share.own_nbytes for share in shares) == layout.nbytes == layout.own_nbytes
        assert {share.digest for share in shares} == {layout.digest}
        for share in shares:
            assert share.all_parts == layout.all_parts


def test_a_layout_digest_depends_on_the_ranks() -> None:
    """The digest of a layout differs for different numbers of ranks."""
    specs = (TensorSpec("w", "F32", (300, 97)),)
    assert len({layouts_of_ranks(specs, 2**16, ranks)[0].digest for ranks in (1, 2, 3)}) == 3


def test_ranks_do_not_move_bytes() -> None:
    """The places and bytes of the tensors in a layout do not depend on the number of ranks.

    So a server decodes and reduces without knowing the ranks.
    """
    specs = (TensorSpec("w", "F32", (300, 97)), TensorSpec("b", "F32", (300,)))

    def pieces(layout: Layout) -> list[Piece]:
        return [piece for part in layout.parts for piece in part.pieces]

    for one, three in zip(layouts_of_ranks(specs, 2**24, 1), layouts_of_ranks(specs, 2**24, 3), strict=True):
        assert (one.segments, one.nbytes) == (three.segments, three.nbytes)
        assert sum(piece.numel for piece in pieces(three)) == sum(piece.numel for piece in pieces(one))
