"""Types of a user's own under the sizes of parts: a stream counts as a torch tensor, in parts or within the head.

A blob of 4 x 64 KiB is a stream of 100 bytes a chunk; beside it are 2 x 64 KiB of NumPy.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from kit.requests import send

import atoll
from atoll.objects import LazyTensor, Stream, register

PART = 2**16
MOST_INLINE_BYTES = 15 * 2**20
BLOB = bytes(range(256)) * (4 * PART // 256)
ARRAY = np.arange(2 * PART // 4, dtype=np.int32)

collecting: list[bool] = []
"""Whether Python looked for cycles, each time that code of the type ran."""


@dataclass
class Blob:
    data: bytes


def produce(blob: Blob) -> Stream:
    def chunks() -> Iterator[bytes]:
        collecting.append(gc.isenabled())
        for start in range(0, len(blob.data), 100):
            yield blob.data[start : start + 100]

    collecting.append(gc.isenabled())
    return Stream(torch.uint8, (len(blob.data),), chunks)


def consume(sent: Any) -> Blob:
    assert isinstance(sent, LazyTensor)
    collecting.append(gc.isenabled())
    return Blob(b"".join(run.numpy().tobytes() for run in sent.runs(PART)))


register(Blob, "tests.cut_blob", produce, consume)


def tree() -> dict[str, Any]:
    blob = Blob(BLOB)
    return {"blob": blob, "again": [blob], "a": ARRAY, "t": torch.arange(3)}


def same(arrived: Any) -> bool:
    blobs = arrived["blob"] == arrived["again"][0] == Blob(BLOB)
    array = arrived["a"].dtype == ARRAY.dtype and np.array_equal(arrived["a"], ARRAY)
    return blobs and array and torch.equal(arrived["t"], torch.arange(3))


def choose(monkeypatch: pytest.MonkeyPatch, tensors: int, arrays: int) -> None:
    """The sizes of a part; 0: inline."""
    monkeypatch.setenv("ATOLL_WORKFLOW__TENSOR_PART_BYTES", str(tensors))
    monkeypatch.setenv("ATOLL_WORKFLOW__ARRAY_PART_BYTES", str(arrays))


def streamed_bytes(ref: atoll.TensorRef) -> int:
    """What of an object is not in its head."""
    manifest = send(ref.server, "GET", f"/v1/objects/{ref.object}", secret=ref.secret)[1]
    assert not manifest["inline"]
    return int(manifest["nbytes"] - manifest["head_bytes"])


@pytest.mark.covers("P13", "T13")
@pytest.mark.parametrize(
    ("sizes", "streamed"),
    [((PART, 2 * PART), 10 * PART + 24), ((0, PART), 2 * PART), ((PART, 0), 8 * PART + 24)],
    ids=["streamed", "torch inline", "numpy inline"],
)
def test_a_stream_is_cut_as_a_torch_tensor_is(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], streamed: int
) -> None:
    """Two blobs of 4 parts (each is produced, so each travels), an array of 2, and 3 int64 of torch: 24 bytes."""
    choose(monkeypatch, *sizes)
    ref = atoll.objects.publish(tree())
    assert streamed_bytes(ref) == streamed
    assert same(atoll.objects.fetch(ref))
    assert same(atoll.objects.fetch(ref, to_disk=True) | {"a": ARRAY, "t": torch.arange(3)})


@pytest.mark.covers("P13", "T13")
@pytest.mark.parametrize("arrays", [0, PART])
def test_a_stream_that_is_too_large_to_go_inline_is_not_read_into_the_head(
    monkeypatch: pytest.MonkeyPatch, arrays: int
) -> None:
    choose(monkeypatch, 0, arrays)
    assert streamed_bytes(atoll.objects.publish([Blob(bytes(MOST_INLINE_BYTES))])) == MOST_INLINE_BYTES


@pytest.mark.covers("T5", "T13")
def test_small_chunks_of_a_stream_are_written_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,622 chunks of 100 bytes and the head fit into one run of 2 MiB."""
    writes: list[int] = []
    pwrite = os.pwrite

    def note(fd: int, data: memoryview, offset: int) -> int:
        writes.append(len(data))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", note)
    ref = atoll.objects.publish(Blob(BLOB), chunk_bytes=PART)
    assert len(writes) == 1
    assert writes[0] > streamed_bytes(ref) == len(BLOB)
    assert atoll.objects.fetch(ref) == Blob(BLOB)


@pytest.mark.covers("T13")
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("sizes", [(PART, PART), (0, PART)], ids=["streamed", "inline"])
def test_code_of_a_type_finds_the_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, sizes: tuple[int, int]
) -> None:
    """It is put off around small objects of Atoll's own; what a user's code leaves may be more."""
    choose(monkeypatch, *sizes)
    collecting.clear()
    if not enabled:
        gc.disable()
    try:
        assert same(atoll.objects.fetch(atoll.objects.publish(tree())))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert collecting == [enabled] * 6  # two blobs: produced, read and consumed
