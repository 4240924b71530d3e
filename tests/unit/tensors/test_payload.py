"""Payloads come back as they were sent; what cannot travel is named by its place."""

import json
import math
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from atoll.errors import BadRequest, UsageError
from atoll.tensors.chunks import bytes_of
from atoll.tensors.custom_types import Stream, register
from atoll.tensors.dtypes import NAMES
from atoll.tensors.payload import DEPTH, INT_BITS, pack, unpack


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


@pytest.mark.covers("T1")
@pytest.mark.parametrize("dtype", NAMES, ids=str)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    back = there_and_back({"a": [tensor.t(), torch.empty(0, 4, dtype=dtype), tensor[0, 1]]})
    expected = [tensor.t(), torch.empty(0, 4, dtype=dtype), tensor[0, 1]]
    for one, two in zip(back["a"], expected, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert bytes(bytes_of(one.contiguous())) == bytes(bytes_of(two.contiguous()))


@pytest.mark.covers("T1")
def test_several_tensor_subtrees_and_numpy_beside_torch() -> None:
    payload = {
        "model": OrderedDict(w=torch.ones(2, 2), b=np.arange(3, dtype=np.uint16)),
        "controls": {"w": (torch.zeros(2), None)},
        "deep": [{"x": [np.float32(1.5), np.float64(math.nan), True]}],
        3: math.inf,
        "raw": bytearray(b"\x00\xff"),
    }
    back = there_and_back(payload)
    assert list(back) == list(payload)
    assert torch.equal(back["model"]["w"], torch.ones(2, 2))
    assert back["model"]["b"].dtype == np.uint16
    assert back["model"]["b"].tolist() == [0, 1, 2]
    assert back["controls"]["w"][1] is None
    assert type(back["deep"][0]["x"][0]) is np.float32
    assert math.isnan(back["deep"][0]["x"][1])
    assert back[3] == math.inf
    assert back["raw"] == bytearray(b"\x00\xff")


@pytest.mark.covers("T1")
def test_a_tensor_that_occurs_twice_travels_once_and_is_one_again() -> None:
    tied, array = torch.ones(3), np.ones(3)
    packed = pack({"a": tied, "b": [tied.view(3), array, array], "c": torch.ones(3)})
    assert len(packed.tensors) == 3
    back = there_and_back({"a": tied, "b": [tied, array, array]})
    assert back["a"] is back["b"][0]
    assert back["b"][1] is back["b"][2]


@pytest.mark.covers("T1")
def test_a_negated_view_is_not_the_tensor_that_it_negates() -> None:
    """Both have the same address, dtype, shape and strides; torch negates when it reads."""
    waves = torch.tensor([1 + 2j, 3 - 4j])
    back = there_and_back([waves.imag, waves.conj().imag])
    assert [tensor.tolist() for tensor in back] == [[2.0, -4.0], [-2.0, 4.0]]


@pytest.mark.covers("T1")
def test_views_of_one_memory_that_differ_travel_apart() -> None:
    square = torch.arange(4.0).reshape(2, 2)
    back = there_and_back([square, square.t(), square.view(torch.int32), square[0]])
    assert [tensor.tolist() for tensor in (back[0], back[1], back[3])] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 1]]
    assert back[2].dtype == torch.int32


class Turned:
    """A type whose producer makes an array for every value, which nobody else holds."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values


@pytest.mark.covers("T1", "T13")
def test_arrays_that_live_only_while_they_are_taken_apart_are_not_taken_for_each_other() -> None:
    """Python gives a new object the id of one that is gone; these are copied, so that nothing else keeps them."""
    register(Turned, "test.turned", lambda value: value.values[::-1], Turned)
    back = there_and_back([Turned(np.array([number, -number])) for number in range(20)])
    assert [value.values.tolist() for value in back] == [[-number, number] for number in range(20)]


def test_nothing_is_copied_and_parameters_arrive_as_tensors() -> None:
    layer = nn.Linear(3, 2)
    packed = pack(layer.state_dict())
    assert {tensor.data_ptr() for tensor in packed.tensors} == {layer.weight.data_ptr(), layer.bias.data_ptr()}
    assert not any(tensor.requires_grad for tensor in pack([layer.weight]).tensors)


def test_arrays_that_torch_cannot_share_are_copied_with_their_values() -> None:
    array = np.arange(6, dtype=">i4").reshape(2, 3)[::-1]
    frozen = np.ones(2)
    frozen.flags.writeable = False
    back = there_and_back([array, frozen])
    assert back[0].tolist() == [[3, 4, 5], [0, 1, 2]]
    assert back[0].dtype == np.int32
    assert back[1].tolist() == [1.0, 1.0]


def cyclic() -> dict[str, Any]:
    payload: dict[str, Any] = {"inner": []}
    payload["inner"].append(payload)
    return payload


def nested(levels: int) -> list[Any]:
    payload: list[Any] = []
    for _ in range(levels - 1):
        payload = [payload]
    return payload


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"hooks": [None, lambda: 0]}, r"payload\['hooks'\]\[1\] is a function"),
        ({"log": sys.stdout}, r"payload\['log'\] is a "),
        (cyclic(), r"payload\['inner'\]\[0\] is payload again"),
        ({"a": {(1, 2): 3}}, r"payload\['a'\] has the key \(1, 2\)"),
        ({"a": Point(1, 2)}, r"payload\['a'\] is a Point"),
        ([{1, 2}], r"payload\[0\] is a set"),
        ({"a": 1j}, "complex"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.eye(2).to_sparse()}, "sparse"),
        ({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "qint8"),
        ({"a": torch.empty(2, device="meta")}, "meta"),
        ({"a": np.array(["x"])}, r"payload\['a'\] is an array of <U1"),
        ({"a": np.array([object()])}, "array of object"),
        ({"a": nn.Linear(1, 1)}, r"payload\['a'\] is a Linear"),
        (nested(DEPTH + 1), "levels deep"),
        ({"a": [2**INT_BITS]}, r"payload\['a'\]\[0\] is an integer of 14001 bits"),
        ({-(2**INT_BITS): 1}, "a key of payload is an integer"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, r"payload\['a'\] is a masked array"),
        ({"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, r"payload\['a'\] is a nested tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_travel_is_named_by_its_place(payload: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pack(payload)


def test_the_deepest_payload_that_may_be_sent_arrives() -> None:
    assert there_and_back(nested(DEPTH)) == nested(DEPTH)
    assert there_and_back([2**INT_BITS - 1, 1 - 2**INT_BITS]) == [2**INT_BITS - 1, 1 - 2**INT_BITS]


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
def test_a_stream_that_does_not_end_is_stopped_where_it_has_given_too_much() -> None:
    """Of 4 elements: two chunks of three are read, the first alone is handed on."""
    asked: list[int] = []

    def chunks() -> Iterator[bytes]:
        for number in range(100):
            asked.append(number)
            yield bytes(3)

    handed: list[int] = []
    with pytest.raises(UsageError, match=r"a stream gave more than the 4 bytes of torch.uint8\[4\]"):
        handed.extend(len(run) for run in Stream(torch.uint8, (4,), chunks).runs())
    assert (asked, handed) == ([0, 1], [3])


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
