"""Payloads as a skeleton and tensors, and what is refused as one."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.errors import BadRequest
from atoll.tensors.payload import DEPTH, pack, unpack


def there_and_back(payload: Any) -> Any:
    """Through real JSON, and new memory for every tensor."""
    packed = pack(payload)
    return unpack(json.loads(json.dumps(packed.skeleton, allow_nan=False)), [t.clone() for t in packed.tensors])


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.none() | st.just("$"), inner, max_size=4)
    ),
    max_leaves=20,
)


def alike(one: object, two: object) -> bool:
    """Equal, and of the same types all the way down; 0.0 is not −0.0."""
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(alike, one, two))
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, two)) and all(map(alike, one.values(), two.values()))
    return repr(one) == repr(two)


@pytest.mark.covers("T1")
@given(plain)
def test_plain_values_come_back_as_they_were(payload: Any) -> None:
    assert alike(there_and_back(payload), payload)


def test_nothing_is_copied_and_parameters_arrive_as_tensors() -> None:
    layer = nn.Linear(3, 2)
    packed = pack(layer.state_dict())
    assert {tensor.data_ptr() for tensor in packed.tensors} == {layer.weight.data_ptr(), layer.bias.data_ptr()}
    assert not any(tensor.requires_grad for tensor in pack([layer.weight]).tensors)


def nested(levels: int) -> list[Any]:
    payload: list[Any] = []
    for _ in range(levels - 1):
        payload = [payload]
    return payload


@pytest.mark.parametrize(
    "skeleton",
    [
        {"$": "tensor", "index": 1},
        {"$": "tensor", "index": -1},
        {"$": "tensor", "index": True},
        {"$": "tensor", "index": 0, "more": 1},
        {"$": "tensor"},
        {"$": "object", "module": "os"},
        {"$": "bytes", "base64": "?"},
        {"$": "float", "value": "1.0"},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[1, 2], [1, 3]]},
        {"$": "dict", "items": [[[1], 2]]},
        {"$": "tuple", "items": 3},
        {"$": None},
        nested(DEPTH + 3),
        b"no JSON",
    ],
    ids=lambda skeleton: str(skeleton)[:40],
)
def test_a_skeleton_that_is_none_is_refused(skeleton: Any) -> None:
    with pytest.raises(BadRequest):
        unpack(skeleton, [torch.ones(1)])


def test_what_stands_for_a_tensor_may_be_anything() -> None:
    stand_ins = {0: "lazy 0", 1: "lazy 1"}
    packed = pack({"a": torch.ones(1), "b": np.ones(1)})
    assert unpack(packed.skeleton, stand_ins.__getitem__) == {"a": "lazy 0", "b": "lazy 1"}


@pytest.mark.covers("T13")
@pytest.mark.parametrize(
    "skeleton",
    [
        {"$": "stream", "index": 0},
        {"$": "registered", "type": "tests.short"},
        {"$": "registered", "type": 3, "as": None},
        {"$": "registered", "type": "tests.short", "as": {"$": "stream", "index": -1}},
        {"$": "registered", "type": "tests.short", "as": {"$": "stream", "index": 1}},
    ],
    ids=["stream alone", "nothing in it", "no name", "negative", "not there"],
)
def test_a_damaged_skeleton_is_refused_also_where_nothing_is_built(skeleton: Any) -> None:
    with pytest.raises(BadRequest):
        unpack(skeleton, [torch.ones(1)], build=False)


def test_nothing_is_built_at_a_server_that_only_looks() -> None:
    assert unpack({"a": {"$": "registered", "type": "nobody.knows", "as": None}}, (), build=False) == {"a": None}
