"""Lazy tensors: loaded when asked for, alive as long as one of them is, gone with the last."""

import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from atoll.errors import BadRequest, UsageError
from atoll.tensors.lazy_tensors import Handle, LazyState, release, resolve

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
def test_the_last_of_them_takes_the_file_along(path: Path) -> None:
    state = LazyState.open(path, remove=True)
    one, two = state.ref("w"), state.ref("b")
    del state
    gc.collect()
    assert torch.equal(one.resolve(), TENSORS["w"])
    del one
    assert path.exists()
    assert open_files(path) == 1
    del two
    assert not path.exists()
    assert open_files(path) == 0


@pytest.mark.covers("D6")
def test_an_explicit_release_may_be_repeated_and_leaves_what_is_not_lazy(path: Path) -> None:
    state = LazyState.open(path, remove=True)
    tree = {"a": [state.ref("w"), torch.ones(1), 3], "b": (state, None)}
    release(tree)
    release(tree)
    assert not path.exists()
    assert open_files(path) == 0
    for use in (state.ref("w").resolve, lambda: state["b"], lambda: resolve(tree)):
        with pytest.raises(UsageError, match="released"):
            use()
    release({"nothing": [1, "x"]})


@pytest.mark.covers("D6")
def test_a_release_waits_for_readers() -> None:
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


def test_encoded_tensors_are_decoded_when_they_are_loaded(path: Path) -> None:
    """Three bf16 values that stand for fp32: 1.5, −2, 0."""
    from atoll.codecs import Bf16Codec
    from atoll.tensors.layout import Segment
    from atoll.tensors.schema import TensorSpec

    raw = torch.tensor([1.5, -2.0, 0.0], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()

    def read(offset: int, memory: memoryview) -> None:
        memory[:] = raw[offset : offset + len(memory)]

    segment = Segment(TensorSpec("w", "F32", (3, 1)), "bf16", 0, 6)
    handle = Handle(read, lambda: None)
    state = LazyState(handle, {"w": segment}, lambda s, t, seg: Bf16Codec().decode_(s, t, seg.spec.dtype), {"v": "w"})
    assert state["w"].tolist() == [[1.5], [-2.0], [0.0]]
    assert list(state) == ["w", "v"]
    assert torch.equal(state["v"], state["w"])
    assert [run.tolist() for run in state.ref("w").runs(8)] == [[1.5, -2.0], [0.0]]


def test_a_file_that_is_none_leaves_no_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"no safetensors here")
    with pytest.raises(BadRequest, match=r"x claims to have a header"):
        LazyState.open(path)
    assert open_files(path) == 0
