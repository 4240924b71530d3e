"""How a model is cut into fragments."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.protocol import messages
from atoll.tensors.fragments import Split, cut, split, split_of
from atoll.tensors.module_tensors import schema_of
from atoll.tensors.schema import PARAMS, Schema, TensorSpec

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=9)


@pytest.mark.covers("L8")
@given(SIZES, st.data())
def test_the_largest_run_is_as_small_as_neighbours_allow(sizes: list[int], data: st.DataObject) -> None:
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
def test_every_tensor_is_in_one_fragment_and_neighbours_stay_together(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    schema = Schema.build([TensorSpec(f"{index}.weight", "F32", (size,)) for index, size in enumerate(sizes)])
    made = split(schema, count)
    assert made == split(schema, count)
    assert made.count == len(made.schemas) == count
    assert list(made.places) == sorted(made.places)
    together = [spec for each in made.schemas for spec in each.tensors]
    assert together == list(schema.tensors)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False))
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.covers("L8")
def test_a_split_comes_back_from_the_journal_and_from_the_wire_as_it_was() -> None:
    made = split(schema_of(Tied()), 3)
    assert split_of(made.schema.to_json() | {"fragments": list(made.places)}) == made
    assert messages.SchemaMessage.of(made).to_split() == made
    whole = Split.whole(made.schema)
    assert split_of(made.schema.to_json()) == messages.SchemaMessage.of(whole).to_split() == whole
    assert whole.schemas[0] is whole.schema


def test_the_dtype_does_not_matter_for_where_a_module_goes() -> None:
    torch.manual_seed(0)
    single, double = (
        split(schema_of(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(dtype)), 2)
        for dtype in (torch.float32, torch.float64)
    )
    assert [[spec.name for spec in part.tensors if spec.group == PARAMS] for part in single.schemas] == [
        [spec.name for spec in part.tensors if spec.group == PARAMS] for part in double.schemas
    ]
