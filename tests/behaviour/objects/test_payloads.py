"""Payloads come back as they were sent; what cannot travel is named by its place."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from object_world import manifest_of
from torch import nn

import atoll
from atoll.errors import UsageError
from atoll.objects import Stream, register

DEPTH = 100
INT_BITS = 14_000
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
    *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
]


def there_and_back(payload: Any) -> Any:
    """What another process would get of it."""
    ref = atoll.objects.publish(payload)
    try:
        return atoll.objects.fetch(ref)
    finally:
        atoll.objects.withdraw(ref)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.covers("T1")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_travels(dtype: torch.dtype) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    back = there_and_back({"a": [tensor.t(), torch.empty(0, 4, dtype=dtype), tensor[0, 1]]})
    expected = [tensor.t(), torch.empty(0, 4, dtype=dtype), tensor[0, 1]]
    for one, two in zip(back["a"], expected, strict=True):
        assert (one.dtype, one.shape) == (two.dtype, two.shape)
        assert bytes_of(one) == bytes_of(two)


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
    tree = {"a": tied, "b": [tied.view(3), array, array], "c": torch.ones(3)}
    manifest = manifest_of(atoll.objects.publish(tree))
    assert manifest["nbytes"] - manifest["head_bytes"] == 2 * 12 + 24
    back = there_and_back(tree)
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
    """A type whose producer makes an array for every value; nothing else refers to it."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values


@pytest.mark.covers("T1", "T13")
def test_arrays_that_live_only_while_they_are_taken_apart_are_not_taken_for_each_other() -> None:
    """Python gives a new object the id of one that is gone; these are copied, so that nothing else keeps them."""
    register(Turned, "test.turned", lambda value: value.values[::-1], Turned)
    back = there_and_back([Turned(np.array([number, -number])) for number in range(20)])
    assert [value.values.tolist() for value in back] == [[-number, number] for number in range(20)]


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


@pytest.mark.covers("P4", "X3")
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
        atoll.objects.publish(payload)


def test_the_deepest_payload_that_may_be_sent_arrives() -> None:
    assert there_and_back(nested(DEPTH)) == nested(DEPTH)
    assert there_and_back([2**INT_BITS - 1, 1 - 2**INT_BITS]) == [2**INT_BITS - 1, 1 - 2**INT_BITS]


@pytest.mark.covers("T13")
def test_a_stream_that_does_not_end_is_stopped_where_it_has_given_too_much() -> None:
    """Of 4 elements: two chunks of three are read, the first alone is handed on."""
    asked: list[int] = []

    def chunks() -> Iterator[bytes]:
        for number in range(100):
            asked.append(number)
            yield bytes(3)

    handed: list[int] = []
    with pytest.raises(UsageError, match=r"a stream produced more than the 4 bytes of torch.uint8\[4\]"):
        handed.extend(len(run) for run in Stream(torch.uint8, (4,), chunks).runs())
    assert (asked, handed) == ([0, 1], [3])
