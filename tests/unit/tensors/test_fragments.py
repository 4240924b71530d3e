"""How a model is cut into fragments, and how ranks exchange the tails of their shards."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.models import Tied
from torch import Tensor, nn
from torch.distributed.tensor import Shard as ByRows

from atoll.protocol import messages
from atoll.tensors.fragments import Split, cut, split, split_of
from atoll.tensors.fsdp_shards import Shard, Shards
from atoll.tensors.layout import TILE, rows_of, tiles_of
from atoll.tensors.module_tensors import schema_of
from atoll.tensors.schema import PARAMS, Schema, TensorSpec

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=9)


@pytest.mark.covers("L8")
@given(SIZES, st.data())
def test_the_largest_fragment_is_as_small_as_possible(sizes: list[int], data: st.DataObject) -> None:
    """If neighbouring tensors stay together, the largest fragment is as small as possible. No fragment is empty."""
    count = data.draw(st.integers(1, len(sizes)))
    ends = cut(sizes, count)
    assert len(ends) == count
    assert ends[-1] == len(sizes)
    starts = [0, *ends[:-1]]
    assert all(start < end for start, end in zip(starts, ends, strict=True)), "no run is empty"
    largest = max(sum(sizes[start:end]) for start, end in zip(starts, ends, strict=True))

    def of(inner: tuple[int, ...]) -> int:
        borders = [0, *inner, len(sizes)]
        return max(sum(sizes[low:high]) for low, high in itertools.pairwise(borders))

    assert largest == min(of(inner) for inner in itertools.combinations(range(1, len(sizes)), count - 1))


@pytest.mark.covers("L8")
@given(SIZES, st.data())
def test_every_tensor_has_one_fragment(sizes: list[int], data: st.DataObject) -> None:
    """Each tensor is in exactly one fragment, and neighbours stay together. A model is always split in the same way."""
    count = data.draw(st.integers(1, len(sizes)))
    schema = Schema.build([TensorSpec(f"{index}.weight", "F32", (size,)) for index, size in enumerate(sizes)])
    made = split(schema, count)
    assert made == split(schema, count)
    assert made.count == len(made.schemas) == count
    assert list(made.places) == sorted(made.places)
    together = [spec for each in made.schemas for spec in each.tensors]
    assert together == list(schema.tensors)


@pytest.mark.covers("L8")
def test_a_split_is_stored_and_sent_unchanged() -> None:
    """The split of a model into fragments is unchanged after it was stored in the journal or sent in a message."""
    made = split(schema_of(Tied()), 3)
    assert split_of(made.schema.to_json() | {"fragments": list(made.places)}) == made
    assert messages.SchemaMessage.of(made).to_split() == made
    whole = Split.whole(made.schema)
    assert split_of(made.schema.to_json()) == messages.SchemaMessage.of(whole).to_split() == whole
    assert whole.schemas[0] is whole.schema


def test_a_modules_fragment_ignores_its_dtype() -> None:
    """A module's parameters are in one fragment, whether the model has fp32 or fp64."""
    torch.manual_seed(0)
    single, double = (
        split(schema_of(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(dtype)), 2)
        for dtype in (torch.float32, torch.float64)
    )
    assert [[spec.name for spec in part.tensors if spec.group == PARAMS] for part in single.schemas] == [
        [spec.name for spec in part.tensors if spec.group == PARAMS] for part in double.schemas
    ]


# -- tails between ranks
#
# Ranks are threads here, and what they exchange goes through a table; over processes see tests/behaviour/sharded.


DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16}
SHAPES = st.one_of(
    st.tuples(st.integers(1, 40)), st.tuples(st.integers(1, 30), st.sampled_from([1, 3, 97, 700, 4096, 5000]))
)
FOUND = st.lists(st.tuples(SHAPES, st.sampled_from(sorted(DTYPES)), st.booleans()), min_size=1, max_size=5)


class Rows:
    """What `Shards` looks at of a DTensor."""

    def __init__(self, values: Tensor, spec: TensorSpec, rank: int, ranks: int) -> None:
        start, stop = rows_of(spec, rank, ranks)
        self.placements = (ByRows(0),)
        self.device_mesh = SimpleNamespace(ndim=1, shape=(ranks,), mesh=torch.arange(ranks))
        self.local = values.reshape(-1)[start:stop].clone()

    def to_local(self) -> Tensor:
        return self.local


class Table:
    """Where threads that are ranks leave what is for the others."""

    def __init__(self, ranks: int) -> None:
        self._barrier, self._left = threading.Barrier(ranks, timeout=30), dict[Any, Any]()
        self.most_bytes = 0

    def swap(self, rank: int, outgoing: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        self._left |= {(rank, to): each for to, each in enumerate(outgoing)}
        self._barrier.wait()
        came = [self._left[source, rank] for source in range(len(sizes))]
        assert [each.numel() for each in came] == list(sizes)
        self.most_bytes = max(self.most_bytes, sum(each.numel() for each in came))
        self._barrier.wait()
        return came

    def spread(self, rank: int, values: Tensor, source: int) -> Tensor:
        if rank == source:
            self._left["spread"] = values.clone()
        self._barrier.wait()
        found: Tensor = self._left["spread"].clone()
        self._barrier.wait()
        return found


@settings(max_examples=60)
@given(FOUND, st.integers(1, 6))
def test_ranks_exchange_rows_up_to_codec_blocks(found: list[tuple[tuple[int, ...], str, bool]], ranks: int) -> None:
    """Ranks exchange the ends of their shards so that each has whole blocks to encode, and get the
    changed values back.
    """
    schema = Schema.build(TensorSpec(f"t{i}", dtype, shape) for i, (shape, dtype, _) in enumerate(found))
    sharded = {f"t{i}": each for i, (_, _, each) in enumerate(found)}
    before, after = (
        {spec.name: torch.randn(spec.shape).to(DTYPES[spec.dtype]) for spec in schema.tensors} for _ in range(2)
    )
    table = Table(ranks)

    def work(rank: int) -> None:
        tensors = {
            spec.name: Rows(before[spec.name], spec, rank, ranks) if sharded[spec.name] else before[spec.name].clone()
            for spec in schema.tensors
        }
        shards = Shards(schema, cast(dict[str, Tensor], tensors), rank, ranks)
        shards.gather_(lambda outgoing, sizes: table.swap(rank, outgoing, sizes))
        for spec in schema.tensors:
            held, (first, end) = shards[spec.name], tiles_of(spec, rank, ranks)
            if isinstance(held, Shard):
                assert held.tail.numel() < TILE
                assert first == end or held.run(first, end).equal(before[spec.name].reshape(-1)[first:end])
                if first < end:
                    held.assign_(first, after[spec.name].reshape(-1)[first:end])
            else:
                held.reshape(-1)[first:end] = after[spec.name].reshape(-1)[first:end]
        shards.scatter_(
            lambda outgoing, sizes: table.swap(rank, outgoing, sizes),
            lambda values, source: table.spread(rank, values, source),
        )
        for spec in schema.tensors:
            start, stop = rows_of(spec, rank, ranks) if sharded[spec.name] else (0, spec.numel)
            assert shards.locals[spec.name].reshape(-1).equal(after[spec.name].reshape(-1)[start:stop])

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(work, range(ranks)))
    assert table.most_bytes < TILE * sum(spec.item_bytes for spec in schema.tensors)
