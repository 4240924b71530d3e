"""Payloads as a skeleton and tensors, heads of safetensors files, lazy tensors, and filters of answers."""

from __future__ import annotations

import gc
import json
import os
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.payloads import nested
from safetensors.torch import save, save_file
from torch import Tensor, nn

from atoll.blobs.object_file import write_object
from atoll.blobs.ways_to_send import Cut
from atoll.errors import BadRequest, UsageError
from atoll.filters import Filter, Outgoing
from atoll.tensors.lazy_tensors import Handle, LazyState, release, resolve
from atoll.tensors.payload import DEPTH, pack, unpack
from atoll.tensors.safetensors_header import MOST_HEAD_BYTES, Header, read_header
from atoll.worker.exchange.encode_update import AnswerFilters


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
def test_plain_values_are_unpacked_unchanged(payload: Any) -> None:
    """Plain values and their types are unchanged after they were packed, written as JSON and unpacked."""
    assert alike(there_and_back(payload), payload)


def test_packing_a_payload_copies_no_tensor() -> None:
    """Packing a payload copies no tensor, and parameters become tensors without gradients."""
    layer = nn.Linear(3, 2)
    packed = pack(layer.state_dict())
    assert {tensor.data_ptr() for tensor in packed.tensors} == {layer.weight.data_ptr(), layer.bias.data_ptr()}
    assert not any(tensor.requires_grad for tensor in pack([layer.weight]).tensors)


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
def test_a_malformed_payload_is_refused(skeleton: Any) -> None:
    """A payload whose description of its tree is malformed is refused as a bad request."""
    with pytest.raises(BadRequest):
        unpack(skeleton, [torch.ones(1)])


def test_any_object_may_replace_a_tensor() -> None:
    """When a payload is unpacked, any object may stand in the place of a tensor."""
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
def test_a_damaged_custom_object_is_always_refused(skeleton: Any) -> None:
    """A payload with a damaged description of a user's own object is refused, even if the receiver does not build the
    object.
    """
    with pytest.raises(BadRequest):
        unpack(skeleton, [torch.ones(1)], build=False)


def test_unpacking_without_building_needs_no_type() -> None:
    """A server that only looks at a payload builds no registered object and need not know its type."""
    assert unpack({"a": {"$": "registered", "type": "nobody.knows", "as": None}}, (), build=False) == {"a": None}


# -- heads of safetensors files from another machine


def parsed(content: bytes) -> Header:
    return read_header(lambda at, count: content[at : at + count], len(content), "the object of clinic-a")


def made(table: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.covers("D3")
def test_headers_by_safetensors_are_read() -> None:
    """The header of a file that safetensors has written is read with its metadata, dtypes, shapes and offsets."""
    content = save({"a": torch.ones(2, 3), "b": torch.tensor(3), "c": torch.empty(0)}, {"k": "v"})
    header = parsed(content)
    assert header.metadata == {"k": "v"}
    found = {spec.name: (spec.dtype, spec.shape, offset) for spec, offset in header.tensors}
    # fp64 and int64 go first in safetensors: b at 0, a at 8, the empty one where it likes
    assert found["b"] == ("I64", (), header.nbytes)
    assert found["a"] == ("F32", (2, 3), header.nbytes + 8)
    assert found["c"][:2] == ("F32", (0,))


@pytest.mark.covers("D3")
def test_a_safetensors_file_may_be_empty() -> None:
    """A safetensors file without tensors is valid."""
    assert parsed(made({})) == Header((), {}, 10)


BAD = {
    "empty": (b"", "too few"),
    "short": (b"1234567", "too few"),
    "no head": (bytes(8), "a header of 0 bytes"),
    "cut off": (made({"a": entry()}, length=500), "a header of 500 bytes, but has"),
    "oversized": (made({}, length=MOST_HEAD_BYTES + 1), "claims to have a header"),
    "not JSON": (made(b"{hello}"), "not JSON"),
    "not UTF-8": (made(b'{"\xff": 1}'), "not JSON"),
    "too deep": (made(b"[" * 50_000), "not JSON"),
    "a list": (made([1]), "not an object"),
    "twice": (made(b'{"a": {}, "a": {}}'), "'a' twice"),
    "twice within": (made(b'{"a": {"dtype": "F32", "dtype": "F32"}}'), "'dtype' twice"),
    "no entry": (made({"a": 1}), "'a' with exactly the keys dtype"),
    "too much": (made({"a": entry() | {"more": 1}}, bytes(4)), "with exactly the keys dtype"),
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
    "beyond the end": (made({"a": entry()}, bytes(3)), "3 bytes of tensors, but its header describes 4"),
    "more than it says": (made({"a": entry()}, bytes(5)), "5 bytes of tensors"),
}


@pytest.mark.covers("D3")
@pytest.mark.parametrize("name", BAD)
def test_an_invalid_safetensors_header_is_refused(name: str) -> None:
    """An invalid safetensors header is refused. The error has the name of the object and the mistake."""
    content, words = BAD[name]
    with pytest.raises(BadRequest, match=words) as caught:
        parsed(content)
    assert "clinic-a" in str(caught.value)


LONG = "x" * 100_000


@pytest.mark.covers("D3")
@pytest.mark.parametrize(
    "table", [{"a": entry(LONG)}, {LONG: entry("F33")}, {LONG: 1}, {"a": entry(shape=[1] * 100_000)}]
)
def test_an_error_about_a_header_is_short(table: dict[str, Any]) -> None:
    """The error about an invalid header is short, even if a name or a shape in the header is very long."""
    with pytest.raises(BadRequest) as caught:
        parsed(made(table, bytes(4)))
    assert len(str(caught.value)) < 2_000


@pytest.mark.covers("D3")
def test_too_long_headers_are_not_read() -> None:
    """If a file claims to have a header that is too long, only the 8 bytes with its length are read."""
    asked: list[int] = []

    def read(at: int, count: int) -> bytes:
        asked.append(count)
        return made({}, length=2**62)[at : at + count]

    with pytest.raises(BadRequest):
        read_header(read, 2**63, "it")
    assert asked == [8]


@pytest.mark.covers("D3")
@given(st.binary(max_size=200), st.integers(0, 300))
def test_any_bytes_raise_only_bad_request(data: bytes, at: int) -> None:
    """Any bytes are read as a valid header or raise `BadRequest`. They raise no other error."""
    good = made({"a": entry(), "b": entry("I64", [2], [4, 20])}, bytes(20))
    for content in (data, good[:at] + data + good[at + len(data) :], good[:at]):
        try:
            header = parsed(content)
        except BadRequest:
            continue
        assert header.nbytes + sum(spec.nbytes for spec, _ in header.tensors) == len(content)


# -- lazy tensors


TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int16), "e": torch.empty(0, 2)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "state.safetensors")
    return tmp_path / "state.safetensors"


def open_files(path: Path) -> int:
    """Descriptors of this process that name the file, even when it is unlinked."""
    names = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return sum(name.removesuffix(" (deleted)") == str(path) for name in names)


@pytest.mark.covers("D6")
def test_the_last_lazy_tensor_closes_the_file(path: Path) -> None:
    """A file stays open while a lazy tensor refers to it. The end of the last one closes the file."""
    state = LazyState.open(path)
    one, two = state.ref("w"), state.ref("b")
    del state
    gc.collect()
    assert torch.equal(one.resolve(), TENSORS["w"])
    del one
    assert open_files(path) == 1
    del two
    assert open_files(path) == 0


@pytest.mark.covers("D6")
def test_a_release_may_be_repeated(path: Path) -> None:
    """Releasing lazy tensors closes their file and may be repeated. Other values in the structure stay as they are."""
    state = LazyState.open(path)
    tree = {"a": [state.ref("w"), torch.ones(1), 3], "b": (state, None)}
    release(tree)
    release(tree)
    assert open_files(path) == 0
    for use in (state.ref("w").resolve, lambda: state["b"], lambda: resolve(tree)):
        with pytest.raises(UsageError, match="released"):
            use()
    release({"nothing": [1, "x"]})


@pytest.mark.covers("D6")
def test_a_release_waits_for_readers() -> None:
    """If lazy tensors are released during a read, their file is given back when the read is over."""
    entered, go_on, given_back = threading.Event(), threading.Event(), threading.Event()

    def read(_: int, memory: memoryview) -> None:
        entered.set()
        assert go_on.wait(10)
        assert not given_back.is_set()
        memory[:] = b"x" * len(memory)

    handle, memory = Handle(read, given_back.set), bytearray(3)
    reader = threading.Thread(target=handle.read, args=(0, memoryview(memory)))
    reader.start()
    assert entered.wait(10)
    handle.release()
    assert not given_back.is_set()
    go_on.set()
    reader.join()
    assert given_back.is_set()
    assert memory == b"xxx"


def test_encoded_lazy_tensors_are_decoded_at_loading(path: Path) -> None:
    """Encoded lazy tensors are decoded when they are loaded, as a whole or in runs."""
    # Three values in bf16 stand for fp32: 1.5, −2 and 0.
    from atoll.codecs import Bf16Codec
    from atoll.tensors.layout import Segment
    from atoll.tensors.schema import TensorSpec

    raw = torch.tensor([1.5, -2.0, 0.0], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()

    def read(offset: int, memory: memoryview) -> None:
        memory[:] = raw[offset : offset + len(memory)]

    segment = Segment(TensorSpec("w", "F32", (3, 1)), "bf16", 0, 6)
    handle = Handle(read, lambda: None)
    state = LazyState(handle, {"w": segment}, lambda s, t, seg: Bf16Codec().decode_(s, t, seg.spec.dtype))
    assert state["w"].tolist() == [[1.5], [-2.0], [0.0]]
    assert list(state) == ["w"]
    assert [run.tolist() for run in state.ref("w").runs(8)] == [[1.5, -2.0], [0.0]]


def test_an_invalid_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """If a file is not in the format of safetensors, opening it raises an error and leaves no file descriptor open."""
    path = tmp_path / "x"
    path.write_bytes(b"no safetensors here")
    with pytest.raises(BadRequest, match=r"x claims to have a header"):
        LazyState.open(path)
    assert open_files(path) == 0


@pytest.mark.covers("T8")
def test_answers_pass_a_filter_one_by_one() -> None:
    """Two answers of one site pass its filter one after the other."""
    # The filter divides each answer by the answer's own first value.
    meeting = threading.Barrier(2)

    class ByTheFirst(Filter):
        def begin(self, update: Outgoing) -> None:
            self.by = update.changes("w", 0, 1).item()
            with suppress(threading.BrokenBarrierError):  # the other does not come, as it should be
                meeting.wait(0.5)

        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            return values.div_(self.by)

    at_site = AnswerFilters([ByTheFirst()], "a")

    def taken(value: float) -> list[float]:
        with at_site.applied(pack({"w": torch.full((3,), value)}), "train") as mine, tempfile.TemporaryFile() as file:
            head_bytes = write_object(mine, file.fileno(), Cut(2**20)).cuts.head_bytes
            return np.frombuffer(os.pread(file.fileno(), 12, head_bytes), np.float32).tolist()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(taken, [2.0, 4.0])) == [[1.0] * 3] * 2
