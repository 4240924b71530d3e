"""What comes to disk: loaded when it is asked for, and small until then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import atoll
from atoll import resolve
from atoll.errors import UsageError
from atoll.objects import LazyTensor

TENSORS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2], dtype=torch.int16), "e": torch.empty(0, 2)}


@pytest.fixture
def state(tmp_path: Path) -> Any:
    """TENSORS, on disk."""
    return atoll.objects.fetch(atoll.objects.publish(TENSORS), to_disk=tmp_path)


@pytest.fixture
def reads(state: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a file since the state has come."""
    found: list[int] = []
    preadv = os.preadv

    def noted(fd: int, buffers: Any, offset: int) -> int:
        found.append(preadv(fd, buffers, offset))
        return found[-1]

    monkeypatch.setattr(os, "preadv", noted)
    return found


@pytest.mark.covers("D5", "D15")
def test_it_is_a_mapping_that_loads_on_access_only(state: Any, reads: list[int]) -> None:
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
def test_a_lazy_tensor_is_small_and_no_tensor_and_what_it_gives_outlives_the_file(state: Any) -> None:
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
    given = torch.ones(1)
    tree: Any = {"model": state, "again": [state.ref("w"), given, ("x", state.ref("b"))]}
    loaded = resolve(tree)
    assert sorted(reads) == [4, 24]  # w and b; nothing is read of e
    assert loaded["again"][0] is loaded["model"]["w"]
    assert loaded["again"][1] is given
    assert loaded["again"][2][0] == "x"
    assert torch.equal(loaded["again"][2][1], TENSORS["b"])
    assert not any(isinstance(value, LazyTensor) for value in loaded["model"].values())


def test_lazy_values_are_not_pickled(state: Any) -> None:
    for value in (state, state.ref("w")):
        with pytest.raises(UsageError, match="pickled"):
            value.__reduce_ex__(4)  # what a pickler begins with


@pytest.mark.covers("T13")
def test_a_lazy_tensor_is_read_in_runs_of_new_memory(state: Any) -> None:
    """w has 6 elements of 4 bytes: runs of 9 bytes hold 2, those of 3 bytes 1 all the same."""
    for most_bytes, counts in ((9, [2, 2, 2]), (16, [4, 2]), (3, [1] * 6), (2**20, [6])):
        runs = list(state.ref("w").runs(most_bytes))
        assert [run.numel() for run in runs] == counts
        assert torch.equal(torch.cat(runs), TENSORS["w"].flatten())
    assert list(state.ref("e").runs()) == []
    lazy = state.ref("b")
    lazy.release()
    with pytest.raises(UsageError, match="released"):
        next(lazy.runs())
