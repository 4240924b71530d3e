"""numpy and other arrays against a torch model: what comes back is, bit for bit, what was given out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.client import Client
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.errors import SchemaMismatch, UsageError


class Mixed(nn.Module):
    """A weight and its tied twin, a bf16 weight, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.twin = self.wide
        self.small = nn.Parameter(torch.tensor([1.0, 1.0078125, -2.5], dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, Mixed(), rounds=2) as server:
        yield server


class Foreign:
    """An array of another library, as far as it can be seen: either protocol alone."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)


class ByArray(Foreign):
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.array


class ByDLPack(Foreign):
    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.covers("P16")
@pytest.mark.parametrize("wrap", [np.asarray, ByArray, ByDLPack], ids=["numpy", "__array__", "dlpack"])
def test_a_worker_receives_and_submits_arrays(server: atoll.Server, tmp_path: Path, wrap: Any) -> None:
    """wide + 1, count + 1, small doubled: each exact in its dtype, so the next version has exactly these."""
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        rounds = iter(worker)
        round_ = next(rounds)
        arrays = round_.state_dict(framework="numpy")
        assert {name: str(array.dtype) for name, array in arrays.items()} == {
            "wide": "float32",
            "twin": "float32",
            "small": "float32",  # numpy has no bf16; fp32 holds each of its values
            "count": "int64",
        }
        assert arrays["small"].tolist() == [1.0, 1.0078125, -2.5]
        wide = wrap(arrays["wide"] + np.float32(1.0))
        changed = {"wide": wide, "twin": wide, "small": wrap(arrays["small"] * 2), "count": wrap(arrays["count"] + 1)}
        round_.submit(changed)
        model = next(rounds).load_into(Mixed())
    assert model.wide.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert model.small.dtype == torch.bfloat16
    assert model.small.tolist() == [2.0, 2.015625, -5.0]
    assert model.count.item() == 8


@pytest.mark.covers("P16")
def test_arrays_and_tensors_give_the_same_bits(server: atoll.Server, tmp_path: Path) -> None:
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        round_ = next(iter(worker))
        arrays, tensors = round_.state_dict("numpy"), round_.state_dict()
    for name, array in arrays.items():
        assert torch.equal(torch.from_numpy(array).to(tensors[name].dtype), tensors[name])


@pytest.mark.covers("P16")
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("text", "'small' is a str: neither a tensor, nor an object with DLPack or __array__"),
        ([1.0, 2.0, 3.0], "'small' is a list: neither a tensor"),
        (np.array(["a", "b", "c"]), "'small' is an array of <U1, which Atoll cannot send"),
        (np.array([{}, {}, {}]), "'small' is an array of object, which Atoll cannot send"),
        (np.ma.masked_array([1.0, 2.0, 3.0], [True, False, False]), "'small' is a masked array"),
    ],
    ids=["str", "list", "texts", "objects", "masked"],
)
def test_what_is_no_array_is_refused_by_name(server: atoll.Server, tmp_path: Path, entry: Any, words: str) -> None:
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        round_ = next(iter(worker))
        state = round_.state_dict("numpy")
        with pytest.raises(UsageError, match=words):
            round_.submit({**state, "small": entry})
        round_.submit(state)


@pytest.mark.covers("P16")
def test_another_dtype_or_shape_is_refused_with_both_named(server: atoll.Server, tmp_path: Path) -> None:
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        round_ = next(iter(worker))
        state = round_.state_dict("numpy")
        for spoilt in (state["wide"].astype(np.float64), state["wide"][:1]):
            with pytest.raises(SchemaMismatch, match="wide"):
                round_.submit({**state, "wide": spoilt, "twin": spoilt})
        with pytest.raises(UsageError, match="'jax'"):
            round_.state_dict(framework="jax")
        round_.submit(state)


def test_a_client_pulls_and_submits_arrays(server: atoll.Server, tmp_path: Path) -> None:
    with Client(server.url, site="a", folder=tmp_path / "a") as client:
        client.next_round()
        state = client.pull(framework="numpy")
        state["wide"] += 1
        client.submit({name: value for name, value in state.items() if name != "twin"})
        client.next_round()
        assert client.pull()["twin"].tolist() == [[2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32)[::-1],
        np.arange(6, dtype=">f4"),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.broadcast_to(np.float32(2.0), (3,)),
        np.float32(5.0),
    ],
    ids=["reversed", "big-endian", "transposed", "read-only", "scalar"],
)
def test_arrays_of_every_make_keep_their_values(tmp_path: Path, array: Any, recwarn: pytest.WarningsRecorder) -> None:
    with plain_server(tmp_path, {"x": torch.zeros(array.shape)}, rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
            round_ = worker.next_round()
            round_.state_dict()
            round_.submit({"x": array})
            assert worker.next_round() is None
            assert worker.load_into({"x": torch.zeros(array.shape)})["x"].tolist() == array.tolist()
    assert [str(warning.message) for warning in recwarn] == []
