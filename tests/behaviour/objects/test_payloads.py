"""Payloads come back as they were sent, also lazily and where tensors are empty; what cannot travel is named."""

from __future__ import annotations

import math
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import exported, serve
from kit.payloads import PART_SIZE_SETTINGS, calls_of, choose_part_sizes, manifest_of, nested, plain
from kit.servers import DEFAULT_OUTER_OPTIMIZER
from kit.workflows import run_workflow
from object_world import PART
from torch import nn

import atoll
from atoll import resolve
from atoll.errors import UsageError
from atoll.filters import Cast, NormClip
from atoll.objects import LazyTensor, Stream, register

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


@pytest.mark.covers("T1")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_arrive_unchanged(dtype: torch.dtype) -> None:
    """`fetch` returns tensors of every dtype with the bits that were published."""
    tensor = torch.arange(6).reshape(2, 3).to(dtype)
    payload = {"a": [tensor.t(), torch.empty(0, 4, dtype=dtype), tensor[0, 1]]}
    assert plain(there_and_back(payload)) == plain(payload)


@pytest.mark.covers("T1")
def test_a_mixed_payload_arrives_unchanged() -> None:
    """A payload with several subtrees of tensors, NumPy arrays, numbers and bytes arrives unchanged."""
    payload = {
        "model": OrderedDict(w=torch.ones(2, 2), b=np.arange(3, dtype=np.uint16)),
        "controls": {"w": (torch.zeros(2), None)},
        "deep": [{"x": [np.float32(1.5), True]}],
        3: math.inf,
        "raw": bytearray(b"\x00\xff"),
    }
    back = there_and_back(payload | {"nan": np.float64(math.nan)})
    assert math.isnan(back.pop("nan"))
    assert plain(back) == plain(payload)


@pytest.mark.covers("T1")
def test_a_shared_tensor_is_sent_once() -> None:
    """A tensor that occurs twice in a payload is sent once, and is one tensor again on arrival."""
    tied, array = torch.ones(3), np.ones(3)
    tree = {"a": tied, "b": [tied.view(3), array, array], "c": torch.ones(3)}
    manifest = manifest_of(atoll.objects.publish(tree))
    assert manifest["nbytes"] - manifest["head_bytes"] == 2 * 12 + 24
    back = there_and_back(tree)
    assert back["a"] is back["b"][0]
    assert back["b"][1] is back["b"][2]


@pytest.mark.covers("T1")
def test_a_negated_view_keeps_its_values() -> None:
    """A view that torch negates only when it is read (`torch._neg_view`) arrives with its negated values."""
    # Beside it is the tensor that it negates. Both have the same address, dtype, shape and strides.
    waves = torch.tensor([1 + 2j, 3 - 4j])
    back = there_and_back([waves.imag, waves.conj().imag])
    assert [tensor.tolist() for tensor in back] == [[2.0, -4.0], [-2.0, 4.0]]


@pytest.mark.covers("T1")
def test_different_views_of_one_memory_keep_their_values() -> None:
    """Views of one memory that differ in shape, strides or dtype arrive as separate tensors with their values."""
    square = torch.arange(4.0).reshape(2, 2)
    back = there_and_back([square, square.t(), square.view(torch.int32), square[0]])
    assert [tensor.tolist() for tensor in (back[0], back[1], back[3])] == [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [0, 1]]
    assert back[2].dtype == torch.int32


class Turned:
    """A type whose producer makes an array for every value; nothing else refers to it."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values


@pytest.mark.covers("T1", "T13")
def test_temporary_arrays_are_not_confused() -> None:
    """Temporary arrays of a user's own type arrive with their own values, though Python reuses the ids of deleted
    objects.
    """
    # The type's producer makes copies, which nothing else keeps alive.
    register(Turned, "test.turned", lambda value: value.values[::-1], Turned)
    back = there_and_back([Turned(np.array([number, -number])) for number in range(20)])
    assert [value.values.tolist() for value in back] == [[-number, number] for number in range(20)]


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    """NumPy arrays whose memory PyTorch cannot share arrive as copies with the same values."""
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


Point = namedtuple("Point", "x y")


@pytest.mark.covers("P4", "X3")
@pytest.mark.parametrize(
    ("payload", "words"),
    [
        ({"hooks": [None, lambda: 0]}, r"payload\['hooks'\]\[1\] is of type function"),
        ({"log": sys.stdout}, r"payload\['log'\] is of type "),
        (cyclic(), r"payload\['inner'\]\[0\] is payload again"),
        ({"a": {(1, 2): 3}}, r"payload\['a'\] has the key \(1, 2\)"),
        ({"a": Point(1, 2)}, r"payload\['a'\] is of type Point"),
        ([{1, 2}], r"payload\[0\] is of type set"),
        ({"a": 1j}, "complex"),
        ({"a": torch.ones(2, dtype=torch.complex64)}, "complex64"),
        ({"a": torch.eye(2).to_sparse()}, "sparse"),
        ({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "qint8"),
        ({"a": torch.empty(2, device="meta")}, "meta"),
        ({"a": np.array(["x"])}, r"payload\['a'\] is an array of <U1"),
        ({"a": np.array([object()])}, "array of object"),
        ({"a": nn.Linear(1, 1)}, r"payload\['a'\] is of type Linear"),
        (nested(DEPTH + 1), "levels deep"),
        ({"a": [2**INT_BITS]}, r"payload\['a'\]\[0\] is an integer of 14001 bits"),
        ({-(2**INT_BITS): 1}, "a key of payload is an integer"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, r"payload\['a'\] is a masked array"),
        ({"a": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])}, r"payload\['a'\] is a nested tensor"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_publish_names_the_place_of_an_unsupported_value(payload: Any, words: str) -> None:
    """If a payload contains a value that cannot be sent, the error of `publish` names the value's place in the
    payload.
    """
    with pytest.raises(UsageError, match=words):
        atoll.objects.publish(payload)


def test_the_deepest_allowed_payload_arrives() -> None:
    """A payload with the greatest allowed depth, and integers with the greatest allowed number of bits, arrive
    unchanged.
    """
    assert there_and_back(nested(DEPTH)) == nested(DEPTH)
    assert there_and_back([2**INT_BITS - 1, 1 - 2**INT_BITS]) == [2**INT_BITS - 1, 1 - 2**INT_BITS]


@pytest.mark.covers("T13")
def test_a_stream_that_gives_too_many_bytes_is_stopped() -> None:
    """A stream is stopped as soon as it has given more bytes than its declared shape needs."""
    # The stream is for 4 bytes. Two chunks of three bytes are read, and only the first chunk is passed on.
    asked: list[int] = []

    def chunks() -> Iterator[bytes]:
        for number in range(100):
            asked.append(number)
            yield bytes(3)

    handed: list[int] = []
    with pytest.raises(UsageError, match=r"a stream produced too many bytes, but torch.uint8\[4\] has 4 bytes"):
        handed.extend(len(run) for run in Stream(torch.uint8, (4,), chunks).runs())
    assert (asked, handed) == ([0, 1], [3])


# -- tensors without an element


SIZES = {
    "both streamed": (PART, PART),
    "torch inline": (0, PART),
    "numpy inline": (PART, 0),
    "both inline": (0, 0),
}
"""Bytes of a part of torch tensors, and of arrays; 0: inline."""

EMPTY_DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.bool)
SHAPES = ((0,), (0, 3), (3, 0), (2, 0, 4))


@dataclass
class Scan:
    """A registered type whose data is a stream."""

    pixels: torch.Tensor
    label: str = "scan"


register(
    Scan,
    "tests.scan",
    lambda scan: {
        "pixels": Stream(scan.pixels.dtype, tuple(scan.pixels.shape), lambda: [scan.pixels]),
        "l": scan.label,
    },
    lambda sent: Scan(sent["pixels"].resolve(), sent["l"]),
)


def torch_full() -> torch.Tensor:
    return torch.arange(40_000, dtype=torch.float32)


def numpy_full() -> Any:
    return np.arange(30_000, dtype=np.int64)


def every_kind() -> dict[str, Any]:
    return {
        "bf16": torch.arange(10, dtype=torch.float32).to(torch.bfloat16),
        "fp8": torch.arange(4, dtype=torch.float32).to(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
        "number": torch.tensor(1.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "across": torch.arange(6).reshape(2, 3).t(),
        "array": np.arange(12, dtype=np.int16).reshape(3, 4),
        "none": np.empty((0, 2)),
    }


def payloads() -> dict[str, Any]:
    """Empty ones alone, first, between others, last; flat and nested; of torch, of NumPy and of both."""
    empty, none = torch.empty(0, 3), np.empty((2, 0), np.float32)
    return {
        "torch alone": {"e": empty},
        "numpy alone": {"n": none},
        "both alone": {"e": empty, "n": none},
        "first": {"e": empty, "n": none, "w": torch_full(), "a": numpy_full()},
        "between": {"w": torch_full(), "e": empty, "n": none, "a": numpy_full()},
        "last": {"a": numpy_full(), "w": torch_full(), "n": none, "e": empty},
        "beside the other kind": {"e": empty, "a": numpy_full()},
        "beside the other kind, too": {"n": none, "w": torch_full()},
        "nested": [{"e": empty, "deep": (none, [empty, torch_full()], "text", None)}, numpy_full(), empty],
        "twice": {"e": empty, "again": empty, "w": torch_full()},
        "a tensor itself": empty,
        "an array itself": none,
        "every dtype": {
            f"{dtype} {shape}": torch.empty(shape, dtype=dtype) for dtype in EMPTY_DTYPES for shape in SHAPES
        },
        "every kind": every_kind(),
        "across": {"e": torch.empty(4, 0, 2).transpose(0, 2), "w": torch_full()},
    }


def streams() -> dict[str, Any]:
    return {
        "a stream": {"s": Scan(torch.empty(0, 5)), "w": torch_full(), "n": np.empty(0)},
        "a stream alone": [Scan(torch.empty(0))],
        "a stream beside another": [Scan(torch.empty(0)), Scan(torch_full()), numpy_full(), torch.empty(0)],
    }


def echoed(folder: Path, sent: dict[str, Any], settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """What comes back of payloads from a site that answers with what it was sent."""

    def workflow(controller: Any) -> dict[str, Any]:
        return {key: controller.send("a", "echo", payload, timeout_s=30).payload for key, payload in sent.items()}

    return run_workflow(folder, workflow, {"echo": lambda payload: payload}, **settings, **options)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("streamed", [True, False], ids=["a streamed task", "another task"])
def test_tasks_and_answers_carry_empty_tensors(tmp_path: Path, sizes: str, streamed: bool) -> None:
    """Tensors without elements arrive unchanged in tasks and in their answers."""
    sent = payloads() | streams()
    settings = dict(zip(PART_SIZE_SETTINGS, SIZES[sizes], strict=True)) | {
        "workflow.streamed_tasks": ("echo",) if streamed else ()
    }
    assert plain(echoed(tmp_path, sent, settings)) == plain(sent)


@pytest.mark.covers("P13", "P8", "P4")
@pytest.mark.parametrize("sizes", SIZES)
def test_empty_tensors_can_be_fetched_in_every_way(monkeypatch: pytest.MonkeyPatch, sizes: str, tmp_path: Path) -> None:
    """Tensors without elements can be fetched into memory, onto disk, lazily, and into existing tensors."""
    choose_part_sizes(monkeypatch, *SIZES[sizes])
    with atoll.objects.Publisher() as publisher:
        for key, payload in (payloads() | streams()).items():
            ref = publisher.publish(payload)
            assert plain(atoll.objects.fetch(ref)) == plain(payload), key
        for key, payload in payloads().items():
            ref = publisher.publish(payload)
            lazily = resolve(atoll.objects.fetch(ref, to_disk=tmp_path))
            assert plain(tensors_only(lazily)) == plain(tensors_only(payload)), key
            if isinstance(payload, dict):
                target = {name: filled(value) for name, value in payload.items()}
                if "again" in target:
                    target["again"] = target["e"]
                atoll.objects.fetch(ref, into=target)
                assert plain(target) == plain(payload), key


def replaced(tree: Any, kinds: Any, change: Callable[[Any], Any]) -> Any:
    """A payload whose tensors or arrays of these kinds are changed."""
    if isinstance(tree, dict):
        return {key: replaced(value, kinds, change) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [replaced(value, kinds, change) for value in tree]
    return change(tree) if isinstance(tree, kinds) else tree


def tensors_only(tree: Any) -> Any:
    """What lies on disk is given as torch tensors."""
    return replaced(tree, np.ndarray, torch.as_tensor)


def filled(value: Any) -> Any:
    return np.full_like(value, 7) if isinstance(value, np.ndarray) else torch.zeros_like(value)


def test_filters_pass_empty_tensors_on(tmp_path: Path) -> None:
    """Filters of the server and of the site pass tensors without elements on.

    The filters run at the server before the task, at the site before its answer, and at the server after the answer.
    """
    sent = payloads()
    settings = {"workflow.streamed_tasks": ("echo",), PART_SIZE_SETTINGS[0]: 0}
    chains = {key: {"a": [NormClip(1e9), Cast("bf16")]} for key in ("data_filters", "filters")}
    came = echoed(tmp_path, sent, settings, options={"a": {"filters": [NormClip(1e9)]}}, **chains)
    assert [key for key in sent if described(sent[key]) != described(came[key])] == []


def described(tree: Any) -> Any:
    """A payload with kinds, dtypes and shapes in place of its tensors and arrays."""
    return replaced(tree, torch.Tensor | np.ndarray, lambda each: (type(each), each.dtype, tuple(each.shape)))


class Sparse(nn.Module):
    """A model with empty parameters and buffers first, between others and last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(0))
        self.w = nn.Parameter(torch.zeros(70, 80))
        self.between = nn.Parameter(torch.empty(3, 0))
        self.narrow = nn.Parameter(torch.empty(0, dtype=torch.bfloat16))
        self.v = nn.Parameter(torch.zeros(5))
        self.register_buffer("none", torch.empty(0, 2))
        self.register_buffer("counts", torch.empty(0, dtype=torch.int64))
        self.last = nn.Parameter(torch.empty(2, 0, 2))


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregation.upload_codec.name": "none"},
        {
            "aggregation.upload_codec.name": "bf16",
            "aggregation.download_codec.name": "int8",
            "algorithm.name": "fedadam",
        },
        {"aggregation.upload_codec.name": "int8", "aggregation.reducer.name": "median"},
        {"aggregation.upload_codec.name": "topk", "algorithm.name": "scaffold"},
        {"aggregation.upload_codec.name": "int4", "aggregation.aggregator.path": "first.py:first"},
    ],
    ids=["none", "way down", "median", "scaffold", "aggregator"],
)
def test_models_with_empty_tensors_train(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A model with empty parameters and buffers trains with various codecs, reducers and algorithms, and keeps its
    shapes.
    """
    options: dict[str, Any] = DEFAULT_OUTER_OPTIMIZER | {"rounds.sites": 1, "rounds.total": 2} | settings
    if "aggregation.aggregator.path" in settings:
        (tmp_path / "first.py").write_text("def first(updates):\n    return updates[0].tensors\n")
        options["aggregation.aggregator.path"] = f"{tmp_path}/first.py:first"
    else:
        options["filters"] = {"a": [NormClip(1e9)]}
    with serve(tmp_path, Sparse(), **options) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "workers", filters=[NormClip(1e9)]) as worker:
            for fl_round in worker:
                model = fl_round.load_into(Sparse())
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
                with fl_round.correct(model, optimizer):
                    for parameter in model.parameters():
                        parameter.grad = torch.ones_like(parameter)
                    optimizer.step()
                fl_round.submit(model)
        server.run()
    result = exported(tmp_path)
    assert described(result) == described({name: value.detach() for name, value in Sparse().state_dict().items()})
    assert bool(result["v"].all())


# -- lazy tensors


TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int16), "e": torch.empty(0, 2)}


@pytest.fixture
def state(tmp_path: Path) -> Any:
    """TENSORS, on disk."""
    return atoll.objects.fetch(atoll.objects.publish(TENSORS), to_disk=tmp_path)


@pytest.fixture
def reads(state: Any) -> Iterator[list[int]]:
    """Bytes of each read of a file since the state has come."""
    with calls_of("preadv") as found:
        yield found


@pytest.mark.covers("D5", "D15")
def test_a_lazy_state_loads_tensors_on_access(state: Any, reads: list[int]) -> None:
    """A lazy state is a mapping from names to tensors. It reads a tensor from disk only on access."""
    assert set(state) == {"w", "b", "e"}
    assert len(state) == 3
    assert "w" in state
    assert "x" not in state
    refs = {name: state.ref(name) for name in state}
    assert (refs["w"].shape, refs["w"].dtype, refs["w"].numel()) == ((2, 3), torch.float32, 6)
    assert reads == []
    assert torch.equal(state["w"], TENSORS["w"])
    assert reads == [24]
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in state.items())
    with pytest.raises(KeyError):
        state["x"]


@pytest.mark.covers("D5")
def test_a_loaded_tensor_outlives_its_lazy_tensor(state: Any) -> None:
    """A tensor that was loaded from a lazy tensor stays usable after the lazy tensor is released."""
    # The lazy tensor itself is small, and is not a `torch.Tensor`.
    lazy = state.ref("w")
    assert not isinstance(lazy, torch.Tensor)
    assert sys.getsizeof(lazy) <= 100
    assert not hasattr(lazy, "__dict__")
    tensor = lazy.resolve()
    assert tensor.data_ptr() != lazy.resolve().data_ptr()
    lazy.release()
    assert torch.equal(tensor, TENSORS["w"])


@pytest.mark.covers("D15")
def test_resolving_a_tree_loads_each_tensor_once(state: Any, reads: list[int]) -> None:
    """`resolve` loads each lazy tensor of a tree once, even if it occurs twice, and leaves other values as they are."""
    given = torch.ones(1)
    tree: Any = {"model": state, "again": [state.ref("w"), given, ("x", state.ref("b"))]}
    loaded = resolve(tree)
    assert sorted(reads) == [4, 24]  # w and b; nothing is read of e
    assert loaded["again"][0] is loaded["model"]["w"]
    assert loaded["again"][1] is given
    assert loaded["again"][2][0] == "x"
    assert torch.equal(loaded["again"][2][1], TENSORS["b"])
    assert not any(isinstance(value, LazyTensor) for value in loaded["model"].values())


def test_lazy_values_cannot_be_pickled(state: Any) -> None:
    for value in (state, state.ref("w")):
        with pytest.raises(UsageError, match="pickled"):
            value.__reduce_ex__(4)  # what a pickler begins with


@pytest.mark.covers("T13")
def test_lazy_tensors_are_read_in_pieces(state: Any) -> None:
    """A lazy tensor can be read in pieces of limited size, until it is released."""
    # `w` has 6 elements of 4 bytes. Runs of 9 bytes have 2 elements, and runs of 3 bytes still have 1.
    for most_bytes, counts in ((9, [2, 2, 2]), (16, [4, 2]), (3, [1] * 6), (2**20, [6])):
        runs = list(state.ref("w").runs(most_bytes))
        assert [run.numel() for run in runs] == counts
        assert torch.equal(torch.cat(runs), TENSORS["w"].flatten())
    assert list(state.ref("e").runs()) == []
    lazy = state.ref("b")
    lazy.release()
    with pytest.raises(UsageError, match="released"):
        next(lazy.runs())
