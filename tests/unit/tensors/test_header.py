"""Heads of safetensors files from somebody else: what is right is read as safetensors reads it, the rest is refused."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from atoll.errors import BadRequest
from atoll.tensors.safetensors_header import MOST_BYTES, Header, read_header


def parsed(content: bytes) -> Header:
    return read_header(lambda at, count: content[at : at + count], len(content), "the object of clinic-a")


def made(table: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.covers("D3")
def test_what_safetensors_writes_is_read() -> None:
    content = save({"a": torch.ones(2, 3), "b": torch.tensor(3), "c": torch.empty(0)}, {"k": "v"})
    header = parsed(content)
    assert header.metadata == {"k": "v"}
    found = {spec.name: (spec.dtype, spec.shape, offset) for spec, offset in header.tensors}
    # fp64 and int64 go first in safetensors: b at 0, a at 8, the empty one where it likes
    assert found["b"] == ("I64", (), header.nbytes)
    assert found["a"] == ("F32", (2, 3), header.nbytes + 8)
    assert found["c"][:2] == ("F32", (0,))


@pytest.mark.covers("D3")
def test_a_file_without_tensors_is_one() -> None:
    assert parsed(made({})) == Header((), {}, 10)


BAD = {
    "empty": (b"", "too few"),
    "short": (b"1234567", "too few"),
    "no head": (bytes(8), "a header of 0 bytes"),
    "cut off": (made({"a": entry()}, length=500), "a header of 500 bytes, but has"),
    "oversized": (made({}, length=MOST_BYTES + 1), "claims to have a header"),
    "not JSON": (made(b"{hello}"), "not JSON"),
    "not UTF-8": (made(b'{"\xff": 1}'), "not JSON"),
    "too deep": (made(b"[" * 50_000), "not JSON"),
    "a list": (made([1]), "not an object"),
    "twice": (made(b'{"a": {}, "a": {}}'), "'a' twice"),
    "twice within": (made(b'{"a": {"dtype": "F32", "dtype": "F32"}}'), "'dtype' twice"),
    "no entry": (made({"a": 1}), "'a' without exactly dtype"),
    "too much": (made({"a": entry() | {"more": 1}}, bytes(4)), "without exactly dtype"),
    "metadata": (made({"__metadata__": {"a": 1}}), "__metadata__"),
    "dtype": (made({"a": entry("F33")}, bytes(4)), "'F33', which Atoll does not support"),
    "dtype is none": (made({"a": entry(None)}, bytes(4)), "None, which Atoll does not support"),
    "negative shape": (made({"a": entry(shape=[-1])}, bytes(4)), "shape"),
    "float shape": (made({"a": entry(shape=[1.0])}, bytes(4)), "shape"),
    "boolean shape": (made({"a": entry(shape=[True])}, bytes(4)), "shape"),
    "three offsets": (made({"a": entry(offsets=[0, 4, 4])}, bytes(4)), "invalid shape"),
    "size": (made({"a": entry(offsets=[0, 5])}, bytes(5)), "needs 4 bytes"),
    "huge": (made({"a": entry(shape=[2**40, 2**40])}, bytes(4)), "needs"),
    "backwards": (made({"a": entry(shape=[0], offsets=[4, 4])}, bytes(4)), "a gap"),
    "overlap": (made({"a": entry(), "b": entry()}, bytes(4)), "overlaps"),
    "gap": (made({"a": entry(), "b": entry(offsets=[8, 12])}, bytes(12)), "a gap"),
    "beyond the end": (made({"a": entry()}, bytes(3)), "3 bytes of data, but its header describes 4"),
    "more than it says": (made({"a": entry()}, bytes(5)), "5 bytes of data"),
}


@pytest.mark.covers("D3")
@pytest.mark.parametrize("name", BAD)
def test_what_is_no_head_is_refused_by_name(name: str) -> None:
    content, words = BAD[name]
    with pytest.raises(BadRequest, match=words) as caught:
        parsed(content)
    assert "clinic-a" in str(caught.value)


@pytest.mark.covers("D3")
def test_a_head_that_is_too_long_is_not_even_read() -> None:
    asked: list[int] = []

    def read(at: int, count: int) -> bytes:
        asked.append(count)
        return made({}, length=2**62)[at : at + count]

    with pytest.raises(BadRequest):
        read_header(read, 2**63, "it")
    assert asked == [8]


@pytest.mark.covers("D3")
@given(st.binary(max_size=200), st.integers(0, 300))
def test_no_bytes_raise_anything_else(data: bytes, at: int) -> None:
    good = made({"a": entry(), "b": entry("I64", [2], [4, 20])}, bytes(20))
    for content in (data, good[:at] + data + good[at + len(data) :], good[:at]):
        try:
            header = parsed(content)
        except BadRequest:
            continue
        assert header.nbytes + sum(spec.nbytes for spec, _ in header.tensors) == len(content)
