"""Types of a user's own under the sizes of parts: a stream counts as a torch tensor, in parts or within the head.

A blob of 4 x 64 KiB is a stream of 100 bytes a chunk; beside it are 2 x 64 KiB of NumPy.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import wait_until

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


def pulled_ahead(ahead: Any) -> bool:
    return ahead._next is not None and ahead._next.stored.done() and ahead._next.stored.result() is not None


@pytest.mark.covers("P13", "T13", "T2")
@pytest.mark.parametrize("request_task_tensors", [True, False], ids=["asked", "ahead"])
@pytest.mark.parametrize("sizes", [(0, PART), (PART, 0)], ids=["torch inline", "numpy inline"])
def test_tensors_of_a_head_arrive_with_tasks_ahead_of_them_and_with_answers(
    tmp_path: Path, request_task_tensors: bool, sizes: tuple[int, int]
) -> None:
    """Two tasks are open for the site; told so, it pulls the second while it has the first in hand."""
    came: list[Any] = []

    def main(controller: Any) -> None:
        with ThreadPoolExecutor(2) as pool:
            sent = [pool.submit(controller.send, "a", "train", tree(), timeout_s=60) for _ in range(2)]
            came.extend(future.result().payload for future in sent)

    kept = tmp_path / "state" / "objects"
    torch_bytes, numpy_bytes = sizes
    with atoll.Server(
        workflow=main,
        settings={
            "disk.state_dir": tmp_path / "state",
            "network.port": 0,
            "workflow.tensor_part_bytes": torch_bytes,
            "workflow.array_part_bytes": numpy_bytes,
        },
    ) as server:
        with atoll.tasks(server.url, "a", request_task_tensors=request_task_tensors) as worker:
            for number, task in enumerate(worker.tasks()):
                if number == 0:
                    wait_until(lambda: len(list(kept.glob("*"))) == 2, "both tasks at the server")
                    if not request_task_tensors:
                        wait_until(lambda: pulled_ahead(worker._answering._ahead), "the second task's tensors")
                assert same(task.payload)
                task.answer(task.payload)
        server.run()
    assert len(came) == 2
    assert all(same(each) for each in came)


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
