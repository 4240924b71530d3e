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

import atoll
from atoll.blobs import object_file
from atoll.blobs.payload_cut import MOST_INLINE_BYTES, ChunkSizes, Cut, cut_of
from atoll.objects import LazyTensor, Stream, register
from atoll.tensors.payload import pack
from atoll.transport.object_server import written

PART = 2**16
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


@pytest.mark.covers("P13", "T13")
@pytest.mark.parametrize(
    ("sizes", "streamed_bytes", "in_head"),
    [
        (ChunkSizes(PART, 2 * PART), 10 * PART + 24, frozenset()),
        (ChunkSizes(0, PART), 2 * PART, frozenset({0, 1, 3})),
        (ChunkSizes(PART, 0), 8 * PART + 24, frozenset({2})),
    ],
    ids=["streamed", "torch inline", "numpy inline"],
)
def test_a_stream_is_cut_as_a_torch_tensor_is(
    monkeypatch: pytest.MonkeyPatch, sizes: ChunkSizes, streamed_bytes: int, in_head: frozenset[int]
) -> None:
    """Two blobs of 4 parts (each is produced, so each travels), an array of 2, and 3 int64 of torch: 24 bytes."""
    packed = pack(tree())
    cut = cut_of(packed, sizes)
    assert cut == Cut(PART, in_head=in_head)
    draft = written(packed, cut, None)
    assert draft.manifest.cuts.nbytes - draft.manifest.cuts.head_bytes == streamed_bytes
    draft.close()
    monkeypatch.setenv("ATOLL_WORKFLOW__TENSOR_PART_BYTES", str(sizes.tensor))
    monkeypatch.setenv("ATOLL_WORKFLOW__ARRAY_PART_BYTES", str(sizes.np))
    ref = atoll.objects.publish(tree())
    assert same(atoll.objects.fetch(ref))
    assert same(atoll.objects.fetch(ref, to_disk=True) | {"a": ARRAY, "t": torch.arange(3)})


@pytest.mark.covers("P13", "T13")
def test_a_stream_that_is_too_large_to_go_inline_is_not_read_into_the_head() -> None:
    packed = pack([Blob(bytes(MOST_INLINE_BYTES))])
    assert cut_of(packed, ChunkSizes(0, 0)) == Cut(8 * 2**20, too_large=MOST_INLINE_BYTES)
    assert cut_of(packed, ChunkSizes(0, PART)).in_head == frozenset()


@pytest.mark.covers("T5", "T13")
def test_small_chunks_of_a_stream_are_written_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,622 chunks of 100 bytes and the head fit into one run of 2 MiB."""
    writes: list[int] = []
    write_at = object_file.write_at

    def note(fd: int, data: memoryview, offset: int) -> None:
        writes.append(len(data))
        write_at(fd, data, offset)

    monkeypatch.setattr(object_file, "write_at", note)
    draft = written(pack(Blob(BLOB)), Cut(PART), None)
    assert writes == [draft.manifest.cuts.nbytes]
    assert os.pread(draft.fd, len(BLOB), draft.manifest.cuts.head_bytes) == BLOB
    draft.close()


@pytest.mark.covers("T13")
@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("sizes", [(PART, PART), (0, PART)], ids=["streamed", "inline"])
def test_code_of_a_type_finds_the_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, sizes: tuple[int, int]
) -> None:
    """It is put off around small objects of Atoll's own; what a user's code leaves may be more."""
    monkeypatch.setenv("ATOLL_WORKFLOW__TENSOR_PART_BYTES", str(sizes[0]))
    monkeypatch.setenv("ATOLL_WORKFLOW__ARRAY_PART_BYTES", str(sizes[1]))
    collecting.clear()
    if not enabled:
        gc.disable()
    try:
        assert same(atoll.objects.fetch(atoll.objects.publish(tree())))
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert collecting == [enabled] * 6  # two blobs: produced, read and consumed
