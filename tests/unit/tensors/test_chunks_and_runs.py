"""Runs of any tensor, in bounded copies; neighbouring pieces in few calls; names and ties of a model."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.models import Tied
from torch import Tensor, nn

from atoll.codecs import Bf16Codec, Codec, Int8Codec, NoneCodec
from atoll.errors import UsageError
from atoll.tensors import chunks
from atoll.tensors.arrays import as_tensor
from atoll.tensors.byte_runs import MOST_BUFFERS, MOST_RUN_BYTES, ByteRun, Move, RunTable, joined, read_pieces
from atoll.tensors.chunks import ROOM_BYTES, Scatter, assign_run_, bytes_of, run_of, runs_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import TILE, Layout, update_layout, version_header, version_layout
from atoll.tensors.module_tensors import fits, memory_of, named_tensors, schema_of
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec


def strided() -> st.SearchStrategy[Tensor]:
    """Tensors of up to four dimensions, many of them transposed or sliced."""

    @st.composite
    def build(draw: st.DrawFn) -> Tensor:
        shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=4))
        tensor = torch.arange(2 * int(torch.Size(shape).numel()), dtype=torch.float32)[::2].reshape(shape)
        if len(shape) > 1 and draw(st.booleans()):
            tensor = tensor.transpose(0, len(shape) - 1)
        if shape and tensor.shape[0] > 1 and draw(st.booleans()):
            tensor = tensor[1:]
        return tensor

    return build()


@given(strided(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_piece_of_a_tensor_is_a_flat_slice(tensor: Tensor, data: st.DataObject) -> None:
    """A piece of a tensor is a slice of its elements in row-major order, for reading and for writing."""
    start = data.draw(st.integers(0, tensor.numel()))
    stop = data.draw(st.integers(start, tensor.numel()))
    flat = tensor.contiguous().reshape(-1)
    assert torch.equal(run_of(tensor, start, stop), flat[start:stop])
    target = torch.zeros_like(tensor)  # keeps the strides
    assign_run_(target, start, flat[start:stop])
    expected = torch.zeros(tensor.numel())
    expected[start:stop] = flat[start:stop]
    assert torch.equal(target.reshape(-1), expected)


@given(strided())
@settings(max_examples=100, deadline=None)
def test_pieces_together_are_the_tensor(tensor: Tensor) -> None:
    """The pieces of a tensor together have all its bytes in row-major order, and all but the last are equally long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK_BYTES", 4 * 7)
        runs = [bytes(run) for run in runs_of(tensor)]
    assert b"".join(runs) == tensor.contiguous().numpy().tobytes()
    assert [len(run) for run in runs[:-1]] == [28] * (len(runs) - 1)


def test_one_stream_fills_every_tensor() -> None:
    """One stream of bytes fills tensors of every kind and keeps their strides."""
    source = {
        "wide": torch.arange(6, dtype=torch.float64).reshape(2, 3),
        "transposed": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
        "scalar": torch.tensor(7.5),
        "empty": torch.zeros(0, 4),
        "half": torch.arange(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "count": torch.tensor(3),
    }
    schema = schema_of(source)
    layout = version_layout(schema)
    stream = version_header(schema) + b"".join(
        bytes(bytes_of(run_of(source[spec.name], 0, spec.numel))) for spec in schema.tensors
    )
    assert len(stream) == layout.nbytes
    targets = {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    sink = Scatter(layout, targets)
    for offset in range(0, len(stream), 16):  # cut at borders of whole elements, not of tensors
        sink.write(offset, memoryview(stream)[offset : offset + 16])
    for name, tensor in source.items():
        assert torch.equal(targets[name], tensor), name
        assert targets[name].stride() == torch.zeros_like(tensor).stride()


def test_an_equal_start_does_not_tie_tensors() -> None:
    """Tensors that begin at the same place in memory are tied only if they have equal shapes, dtypes and strides."""
    row = torch.arange(12.0)
    tensors = {
        "row": row,
        "first": row[:6],
        "matrix": row.view(3, 4),
        "bits": row.view(torch.int32),
        "again": row[:12],
        "matrix again": row.view(3, 4),
        "empty": row[:0],
        "empty again": row[:0],
        "far": torch.empty(3, device="meta"),
    }
    tensors["far again"] = tensors["far"]
    schema = schema_of(tensors, values=False)
    aliases = dict(schema.aliases)
    assert aliases == {"again": "row", "matrix again": "matrix", "far again": "far"}
    assert [spec.name for spec in schema.tensors] == [name for name in tensors if name not in aliases]


def test_tied_tensors_are_sent_once() -> None:
    """A schema has tied tensors only once, with an alias. Its buffers are those of the module."""
    model = Tied()
    owners, aliases = named_tensors(model)
    assert aliases == {"head.weight": "embedding.weight"}
    assert owners["embedding.weight"].data_ptr() == model.embedding.weight.data_ptr()
    schema = schema_of(model)
    assert {spec.name for spec in schema.tensors if spec.group == BUFFERS} == dict(model.named_buffers()).keys()
    assert {spec.name for spec in schema.tensors} == model.state_dict().keys() - {"head.weight"}


def test_shared_memory_is_known_without_addresses() -> None:
    """On a device without memory addresses, tensors count as shared memory only if they really share it."""
    one, other = (torch.zeros(4, 3, device="meta") for _ in range(2))
    assert one.data_ptr() == other.data_ptr() == 0
    assert memory_of(one) != memory_of(other)
    assert memory_of(one) == memory_of(one.detach()) == memory_of(one.view(4, 3))
    assert memory_of(one[:2]) != memory_of(one[2:])


def test_a_mapping_recognises_its_buffers() -> None:
    """In a plain mapping, the running statistics of batch norm, integers and names that fit a given pattern count as
    buffers.
    """
    state = {
        "a.running_mean": torch.zeros(2),
        "a.weight": torch.zeros(2),
        "ema.x": torch.zeros(1),
        "n": torch.tensor(1),
    }
    groups = {spec.name: spec.group for spec in schema_of(state, ["ema.*"]).tensors}
    assert groups == {"a.running_mean": "buffers", "a.weight": "params", "ema.x": "buffers", "n": "buffers"}


def test_a_model_fits_only_its_own_schema() -> None:
    """A model fits a schema if names, dtypes, shapes, groups and ties agree. A mapping fits in any order, with groups
    and ties as the schema says.
    """
    model = Tied()
    schema = schema_of(model)
    fitting = fits(model, schema)
    assert list(fitting) == list(named_tensors(model)[0])
    assert fitting["embedding.weight"].data_ptr() == model.embedding.weight.data_ptr()
    assert fits(Tied().double(), schema) is None
    assert fits(nn.Sequential(Tied()), schema) is None
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.zeros(10, 4))
    assert fits(untied, schema) is None
    other_group = Tied()
    norm = other_group.body[1]
    norm.running_mean = nn.Parameter(norm._buffers.pop("running_mean"))
    assert fits(other_group, schema) is None
    # a mapping: groups and ties as the schema says, with and without the further names
    mapping = {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)) for spec in schema.tensors}
    for more in ({}, {"head.weight": torch.zeros(10, 4)}):
        fitting = fits({**mapping, **more}, schema)
        assert fitting is not None
        assert list(fitting) == list(mapping)
    assert fits({**mapping, "body.1.bias": torch.zeros(5)}, schema) is None
    assert fits({**mapping, "more": torch.zeros(4)}, schema) is None
    assert fits({name: mapping[name] for name in reversed(mapping)}, schema) is not None  # in another order


class Frozen(nn.Linear):
    """Says that its bias is no parameter."""

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, each) for name, each in super().named_parameters(*args, **options) if name != "bias")


def test_models_decide_which_tensors_are_parameters() -> None:
    """The parameters of a model are those that its `named_parameters` gives, and its other tensors are buffers. A model
    around it decides by itself, as in torch.
    """
    told, plain = Frozen(2, 3), nn.Linear(2, 3)
    assert {spec.name: spec.group for spec in schema_of(told).tensors} == {"weight": "params", "bias": "buffers"}
    assert fits(told, schema_of(told)) is not None
    assert fits(told, schema_of(plain)) is None
    asked = nn.Linear(2, 3)
    asked.named_parameters = lambda **_: iter([("weight", asked.weight)])
    assert fits(asked, schema_of(told)) is not None
    members = nn.Linear(2, 3)
    members._named_members = lambda *_, **__: iter([("weight", members.weight)])
    assert fits(members, schema_of(told)) is not None
    within = nn.Sequential(told)  # whose own word counts, as for torch
    assert {spec.group for spec in schema_of(within).tensors} == {"params"}
    assert fits(within, schema_of(within)) is not None


@pytest.mark.covers("P4")
@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.zeros(2, dtype=torch.complex32), "complex32"),
        (torch.nested.nested_tensor([torch.zeros(2)]), "nested"),
        ("text", "str"),
        (nn.LazyLinear(2).weight, "lazy tensor"),
    ],
)
def test_tensors_that_cannot_be_sent_are_refused(tensor: object, word: str) -> None:
    """A tensor that cannot be sent, for example a sparse one, is refused with its name and the reason."""
    with pytest.raises(UsageError, match=rf"'bad'.*{word}"):
        schema_of({"good": torch.zeros(1), "bad": tensor})


def test_large_tensors_are_received_in_place() -> None:
    """`Scatter` offers the memory of a large contiguous tensor to receive its bytes."""
    # All other bytes must be written. In fp32, `large` holds the bytes [0, 2 MiB) after the header, `odd` has 40 bytes,
    # and `turned` is not contiguous.
    n = 2**19
    targets = {"large": torch.zeros(n), "odd": torch.zeros(10), "turned": torch.zeros(1024, 512).t()}
    layout = version_layout(schema_of(targets))
    large, odd, turned = (layout.by_name[name].offset for name in ("large", "odd", "turned"))
    sink = Scatter(layout, targets)
    room = sink.room(large + 4, 2**20)
    assert len(room) == 2**20
    room[:4] = torch.tensor([3.0]).numpy().tobytes()
    assert targets["large"][1] == 3.0
    last = sink.room(large + 4 * n - ROOM_BYTES, 2**20)
    assert last is not None
    assert len(last) == ROOM_BYTES  # it ends with its tensor
    assert sink.room(large + 4 * n - ROOM_BYTES + 4, 2**20) is None  # too few
    assert sink.room(0, 2**20) is None  # the header
    assert sink.room(odd, 2**20) is None
    assert sink.room(turned, 2**20) is None


def test_a_cpu_model_does_not_query_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a model on the CPU, `torch.accelerator` is not called.

    torch 2.6 raises an error if the machine has no accelerator.
    """

    def none() -> None:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", none)
    assert strided_from_a_file() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_memory_that_cannot_be_pinned_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """If memory cannot be pinned, ordinary memory is used instead."""
    # Not every backend of torch can pin memory. Such a backend raises an error.
    monkeypatch.setattr(chunks, "_copies_from_pinned", lambda device: True)
    empty, asked = torch.empty, []

    def unable(*size: Any, pin_memory: bool = False, **more: Any) -> Tensor:
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("not supported")
        return empty(*size, **more)

    monkeypatch.setattr(torch, "empty", unable)
    assert strided_from_a_file() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert asked[-2:] == [True, False]


def strided_from_a_file() -> list[float]:
    """Two rows, placed into the transpose of three."""
    layout = version_layout(Schema.build([TensorSpec("w", "F32", (2, 3))]))
    target = torch.full((3, 2), -1.0).t()
    (segment,) = layout.segments
    Scatter(layout, {"w": target}).write(segment.offset, bytes_of(torch.arange(6.0)))
    return target.flatten().tolist()


def test_shareable_arrays_are_not_copied() -> None:
    """NumPy arrays whose memory torch can share become tensors without a copy."""
    array = np.zeros(3, dtype=np.float32)
    tensor = as_tensor("x", array)
    array[0] = 4.0
    assert tensor[0].item() == 4.0


# -- neighbouring pieces


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
def test_neighbouring_pieces_are_read_by_one_call(ranges: list[tuple[int, int]]) -> None:
    """Pieces of a file are read in their order, and neighbouring pieces by one call with a limited number of
    buffers.
    """
    reads = Reads()
    found, expected = read(ranges, reads)
    assert found == expected
    assert max(reads.buffers, default=0) <= MOST_BUFFERS < os.sysconf("SC_IOV_MAX")
    apart = sum(skipped > 0 for skipped, _ in ranges[1:]) + bool(ranges)
    assert len(reads.buffers) <= apart + len(ranges) // MOST_BUFFERS


def test_many_neighbouring_pieces_need_several_calls() -> None:
    """A long row of neighbouring pieces is read by several calls of limited size."""
    reads = Reads()
    found, expected = read([(0, MOST_RUN_BYTES // 2)] * 5 + [(0, 1)] * 2 * MOST_BUFFERS, reads)
    assert found == expected
    # two halves a call; the last half with 511 single bytes; 512; the last one
    assert reads.buffers == [2, 2, 512, 512, 1]


@given(st.lists(st.tuples(st.sampled_from([0, 3]), st.integers(1, 9)), min_size=1, max_size=20), st.integers(1, 5))
def test_a_read_that_ends_early_is_continued(ranges: list[tuple[int, int]], most: int) -> None:
    """If a read returns fewer bytes than requested, further calls read the rest."""
    found, expected = read(ranges, Reads(most))
    assert found == expected


def test_a_short_file_is_refused() -> None:
    """If a file ends before a requested piece does, reading raises `EOFError`."""
    with pytest.raises(EOFError, match="ends at byte 15"):
        read([(0, 10), (0, 6)], Reads(), cut=1)


@given(RANGES)
def test_joined_ranges_do_not_touch(ranges: list[tuple[int, int]]) -> None:
    """Joined ranges cover the same bytes as the given ranges, and no two of them touch each other."""
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


def decoded(run: ByteRun, data: bytes, *, piecewise: bool) -> list[torch.Tensor]:
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
def test_pieces_decoded_together_match_single_ones(specs: list[TensorSpec], codec: str, part_bytes: int) -> None:
    """Neighbouring pieces that are decoded by one call have the same bits as when each is decoded alone."""
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
def test_elements_are_found_in_versions_and_updates(specs: list[TensorSpec], codec: str) -> None:
    """Each range of a version's file and the matching range of an update have the same elements of the model."""
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


def test_tensors_are_decoded_into_one_buffer() -> None:
    """Several small tensors are decoded into one buffer, each at its own place, and the padding between them can be
    cleared.
    """
    # Three tensors have 5, 16 and 2 values in fp32. In an update, 44 and 0 bytes of padding are behind the first two.
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


def test_thousands_of_small_tensors_are_read_together() -> None:
    """5,000 small tensors are read in 10 groups, each of at most 512 tensors."""
    schema = Schema.build(TensorSpec(f"t{index}", "F32", (index % 60 + 1,)) for index in range(5_000))
    for layout in (version_layout(schema), layout_of(schema, "bf16", 2**24)):
        table = RunTable(layout, 2**18)
        assert sum(1 for part in layout.parts for _ in table.of(part)) == 10  # 512 at most each
