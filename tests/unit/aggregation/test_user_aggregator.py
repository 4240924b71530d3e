"""What an aggregator may be, and what it may give: each mistake by itself, without a server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.aggregation.user_aggregator import Accumulated, BadResult, load, result_layout, write_result
from atoll.errors import ConfigError
from atoll.registry import OwnName
from atoll.tensors.schema import BUFFERS, Schema, TensorSpec
from atoll.testing.contracts import CodecContract

SCHEMA = Schema(
    (
        TensorSpec("v", "BF16", (3,)),
        TensorSpec("w", "F32", (2, 2)),
        TensorSpec("mean", "F32", (1,), BUFFERS),
        TensorSpec("atoll.control.w", "F32", (2, 2), "control"),
    )
)
GOOD = {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "v": torch.full((3,), 1.0009765625)}
"""1 + 2⁻¹⁰ is no bf16."""


def written(given: object) -> tuple[dict[str, Tensor], int]:
    """What is in the file afterwards, and how often there was progress."""
    layout, steps = result_layout(SCHEMA, 2**16), list[int]()
    with tempfile.TemporaryFile() as file:
        file.truncate(layout.nbytes)
        write_result(file.fileno(), layout, given, lambda: steps.append(1))
        data = bytearray(file.read())
    found = {}
    for name, segment in layout.by_name.items():
        raw = torch.frombuffer(data, dtype=torch.uint8)[segment.offset : segment.offset + segment.nbytes]
        found[name] = raw.view(torch.float32).view(segment.spec.shape)
    return found, len(steps)


@pytest.mark.covers("D7")
@pytest.mark.parametrize("form", ["mapping", "pairs"])
def test_an_aggregators_result_is_not_rounded(form: str) -> None:
    """The result of an aggregator is stored without rounding. It has the parameters only, as a mapping or as pairs."""
    tensors, steps = written(GOOD if form == "mapping" else iter(GOOD.items()))
    assert tensors.keys() == {"v", "w"}
    assert all(torch.equal(tensors[name], GOOD[name]) for name in GOOD)
    assert steps == 2


@pytest.mark.covers("D7")
def test_aggregators_may_return_any_strides() -> None:
    """An aggregator may return a tensor with any strides, and in the dtype of the model instead of fp32."""
    tensors, _ = written({"v": torch.ones(3, dtype=torch.bfloat16), "w": GOOD["w"].t()})
    assert torch.equal(tensors["v"], torch.ones(3))
    assert torch.equal(tensors["w"], torch.tensor([[1.0, 3.0], [2.0, 4.0]]))


def twice() -> Iterator[tuple[str, Tensor]]:
    yield "w", GOOD["w"]
    yield "w", GOOD["w"]


BAD: list[Any] = [
    pytest.param(None, "returned None, not (name, tensor) pairs", id="none"),
    pytest.param(3, "returned an object of type int, not", id="no-pairs"),
    pytest.param([GOOD["w"]], "returned an object of type Tensor instead of a (name, tensor) pair", id="tensors-only"),
    pytest.param({"ww": GOOD["w"]}, "returned 'ww', which is not a parameter (Did you mean 'w'?)", id="unknown"),
    pytest.param({"mean": torch.ones(1)}, "returned 'mean', which is not a parameter", id="a-buffer"),
    pytest.param(twice(), "returned 'w' twice", id="twice"),
    pytest.param({"w": GOOD["w"]}, "left out 'v' (1 of 2 are missing)", id="left-out"),
    pytest.param({"w": torch.ones(4)}, "returned 'w' in the shape [4], not [2, 2]", id="shape"),
    pytest.param({"w": GOOD["w"].to_sparse()}, "returned 'w' as a tensor that is not dense", id="sparse"),
    pytest.param({"w": GOOD["w"].to("meta")}, "not dense or has no values", id="meta"),
    pytest.param({"w": GOOD["w"].double()}, "returned 'w' as F64, but must return F32", id="dtype"),
    pytest.param(
        {"v": torch.ones(3, dtype=torch.float16)}, "returned 'v' as F16, but must return BF16 or F32", id="half"
    ),
    pytest.param({"w": [[1.0, 2.0], [3.0, 4.0]]}, "returned an object of type list for 'w', not a tensor", id="list"),
    pytest.param({"w": torch.full((2, 2), torch.nan)}, "returned NaN or Inf in 'w'", id="nan"),
]


@pytest.mark.covers("D7")
@pytest.mark.parametrize(("given", "words"), BAD)
def test_an_unusable_aggregator_result_is_refused(given: object, words: str) -> None:
    """If an aggregator returns an unusable result, the error says what is wrong."""
    with pytest.raises(BadResult) as raised:
        written(given)
    assert words in str(raised.value)


MINE = """
NUMBER = 1
class Half:
    def accept(self, update): ...
    def aggregate(self): ...
class Whole:
    def __init__(self, n=0): self.n = n
    def aggregate(self, updates): return {"n": self.n, "count": len(updates)}
class Incremental(Whole):
    def accept(self, update): ...
    def aggregate(self): return {"n": self.n}
    def reset(self): ...
READY = Whole(7)
def function(updates, n=0): return {"n": n, "count": len(updates)}
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "aggregators_of_mine.py"
    path.write_text(MINE)
    return path


@pytest.mark.covers("D7", "D13")
@pytest.mark.parametrize(
    ("name", "options", "gives"),
    [
        ("Whole", {"n": 2}, {"n": 2, "count": 0}),
        ("READY", {}, {"n": 7, "count": 0}),
        ("function", {"n": 3}, {"n": 3, "count": 0}),
        ("Incremental", {"n": 4}, {"n": 4}),
    ],
)
def test_aggregators_have_several_forms(mine: Path, name: str, options: dict[str, Any], gives: dict[str, int]) -> None:
    """An aggregator may be a class, an object, a function, or a class that takes the updates one by one."""
    loaded = load(OwnName(f"{mine}:{name}"), options)
    assert loaded.aggregate() == gives
    assert loaded.incremental == (name == "Incremental")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("missing", {}, "has no 'missing'"),
        ("Half", {}, "has a method accept, but no reset"),
        ("Whole", {"m": 1}, "Write its keyword arguments next to the path in aggregation.aggregator"),
        ("READY", {"n": 1}, "is an object, not a class"),
        ("NUMBER", {}, "is of type int, which has no method aggregate"),
    ],
)
def test_an_invalid_aggregator_is_refused(mine: Path, name: str, options: dict[str, Any], words: str) -> None:
    """If a path leads to no usable aggregator, or the options do not fit it, the error says what is wrong."""
    with pytest.raises(ConfigError, match=words):
        load(OwnName(f"{mine}:{name}"), options)


def test_a_missing_aggregator_file_is_reported(tmp_path: Path) -> None:
    """If the file of an aggregator does not exist, the error shows the file's whole path."""
    with pytest.raises(ConfigError, match=r"There is no file '.*nowhere.py'. In a run file, a path is relative"):
        load(OwnName(f"{tmp_path / 'nowhere.py'}:x"), {})
    with pytest.raises(ConfigError, match=f"There is no file '{Path.cwd()}/nowhere.py'. In a run file"):
        load(OwnName("nowhere.py:x"), {})


class TestAccumulated(CodecContract):
    codec = Accumulated()
    relative_error = 0.0
