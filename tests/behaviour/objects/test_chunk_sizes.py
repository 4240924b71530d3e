"""The sizes of parts, for torch tensors and for NumPy arrays each, and the idle timeout: from every source the same
effect, and the same bits whatever they are.

The tree has 6 x 64 KiB of torch and 3 x 64 KiB of NumPy: 589,824 bytes. What an object's file has behind its head is
what is streamed; what is not is in the head.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.servers import new_server
from object_world import PART, differences

import atoll
from atoll import Settings
from atoll.blobs.manifest import Cuts
from atoll.blobs.object_file import pack_object, write_object
from atoll.blobs.payload_cut import MOST_INLINE_BYTES, ChunkSizes, Cut, cut_of
from atoll.config import variable_of
from atoll.errors import ConfigError, TransferStalled, UsageError
from atoll.protocol import messages, routes
from atoll.protocol import task_messages as tm
from atoll.store.kept_objects import Kept, ObjectStore
from atoll.tensors.lazy_tensors import LazyState, resolve
from atoll.transport.object_server import nameless

EIGHT = 8 * 2**20
TORCH, NUMPY = 6 * PART, 3 * PART
KEYS = ("workflow.tensor_part_bytes", "workflow.array_part_bytes")

CASES = {
    "default": (None, None, (EIGHT, TORCH + NUMPY, False)),
    "torch smaller": (PART, EIGHT, (PART, TORCH + NUMPY, False)),
    "numpy smaller": (EIGHT, PART, (PART, TORCH + NUMPY, False)),
    "torch inline": (0, PART, (PART, NUMPY, False)),
    "numpy inline": (2 * PART, 0, (2 * PART, TORCH, False)),
    "both inline": (0, 0, (EIGHT, TORCH + NUMPY, True)),
}
"""Torch's size, NumPy's; bytes of a part, bytes that are streamed (or would be), whether all comes in one answer."""


def tree() -> dict[str, Any]:
    array = np.arange(NUMPY // 4, dtype=np.int32).reshape(3, -1)
    return {"t": torch.arange(TORCH // 4, dtype=torch.float32), "a": array, "again": [array], "lr": 0.5}


def told(cuts: Cuts, inline: bool) -> tuple[int, int, bool]:
    return cuts.part_bytes, cuts.nbytes - cuts.head_bytes, inline


def options(torch_size: int | None, numpy_size: int | None) -> dict[str, int]:
    return {key: size for key, size in zip(KEYS, (torch_size, numpy_size), strict=True) if size is not None}


@contextmanager
def echoing(folder: Path, settings: Settings, came: dict[str, Any]) -> Iterator[atoll.Server]:
    """A server whose workflow sends the tree to site `a` and keeps what comes back."""

    def main(controller: Any) -> None:
        came["back"] = controller.send("a", "train", tree(), timeout_s=30).payload

    settings = settings.changed({"network.port": 0, "disk.state_dir": folder / "state"})
    with atoll.Server(workflow=main, settings=settings) as server:
        yield server


def both_ways(folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, bool]]:
    """How the payload of a task and its answer travel; they must be the same bits."""
    came: dict[str, Any] = {}
    found: list[tuple[int, int, bool]] = []
    take = ObjectStore.take

    def spy(store: ObjectStore, object_id: str, secret: str) -> tuple[Kept, int]:
        kept, fd = take(store, object_id, secret)
        found.append(told(kept.cuts, kept.inline))
        return kept, fd

    monkeypatch.setattr(ObjectStore, "take", spy)
    with echoing(folder, settings, came) as server:
        with atoll.tasks(server.url, "a") as worker:
            http = worker._session.http
            request = tm.TaskRequest(wait_s=20.0)
            task = http.post(routes.TASKS, request, tm.TaskReply, timeout_s=30.0).task
            assert task is not None
            assert task.body.object is not None
            http.secret = task.body.object.secret
            path = routes.OBJECT.format(object=task.body.object.object)
            manifest = http.get(path, messages.BlobManifest)
            http.secret = ""
            found.append(told(manifest.manifest().cuts, manifest.inline is not None))
            worker.task("train")(lambda payload: payload)
            worker.run()
        server.run()  # once the site has left: it would be waited for
    assert differences(tree(), came["back"]) == []
    assert came["back"]["a"] is came["back"]["again"][0]
    return found


@pytest.mark.covers("P13", "P2")
@pytest.mark.parametrize("case", CASES)
def test_a_task_and_its_answer_travel_as_is_set_and_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    torch_size, numpy_size, expected = CASES[case]
    settings = Settings.build(options(torch_size, numpy_size))
    assert both_ways(tmp_path, settings, monkeypatch) == [expected, expected]


@pytest.mark.covers("P13")
@pytest.mark.parametrize("source", ["file", "variable", "flag", "keyword"])
def test_every_source_has_the_same_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    given = {**options(0, PART), "network.idle_timeout_s": 7.5}
    path = tmp_path / "run.toml"
    path.write_text("".join(f"{key} = {value}\n" for key, value in given.items()) if source == "file" else "")
    environ = {variable_of(key): str(value) for key, value in given.items()} if source == "variable" else {}
    flags = {key: str(value) for key, value in given.items()} if source == "flag" else {}
    settings = new_server(**given).settings if source == "keyword" else Settings.read(path, flags, environ)
    seen: list[float] = []
    monkeypatch.setattr("atoll.worker.tasks.answer_tasks.fetch", _noting(seen, atoll.objects.fetch))
    assert both_ways(tmp_path, settings, monkeypatch) == [CASES["torch inline"][2]] * 2
    assert seen == [7.5]


def _noting(seen: list[float], fetch: Any) -> Any:
    def noted(ref: Any, **more: Any) -> Any:
        seen.append(more["idle_timeout_s"])
        return fetch(ref, **more)

    return noted


@pytest.mark.covers("P13")
def test_a_workers_own_environment_decides_for_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_WORKFLOW__TENSOR_PART_BYTES", "0")
    monkeypatch.setenv("ATOLL_WORKFLOW__ARRAY_PART_BYTES", str(PART))
    sent, answered = both_ways(tmp_path, Settings.build({}), monkeypatch)
    assert sent == CASES["default"][2]
    assert answered == CASES["torch inline"][2]


@pytest.mark.covers("P13", "P8")
@pytest.mark.parametrize("case", CASES)
def test_what_a_process_publishes_is_cut_as_its_environment_says(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    torch_size, numpy_size, expected = CASES[case]
    for key, size in options(torch_size, numpy_size).items():
        monkeypatch.setenv(variable_of(key), str(size))
    with atoll.objects.Publisher() as publisher:
        ref = publisher.publish(tree())
        served = publisher._host._objects[ref.object]
        assert told(served.manifest.cuts, served.inline) == expected
        assert differences(tree(), atoll.objects.fetch(ref)) == []
        chosen = publisher.publish(tree(), chunk_bytes=2 * PART)  # what is said counts more
        assert publisher._host._objects[chosen.object].manifest.cuts.part_bytes == 2 * PART


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


@pytest.mark.covers("P13", "P8", "P4")
@pytest.mark.parametrize(("torch_size", "numpy_size"), [(0, PART), (PART, 0)], ids=["torch", "numpy"])
def test_tensors_within_a_head_come_to_memory_to_disk_and_in_place(
    monkeypatch: pytest.MonkeyPatch, torch_size: int, numpy_size: int
) -> None:
    for key, size in options(torch_size, numpy_size).items():
        monkeypatch.setenv(variable_of(key), str(size))
    published = every_kind()
    ref = atoll.objects.publish(published)
    assert differences(published, atoll.objects.fetch(ref)) == []
    lazy = atoll.objects.fetch(ref, to_disk=True)
    assert isinstance(lazy, LazyState)
    as_torch = {key: torch.as_tensor(value) for key, value in published.items()}
    assert differences(as_torch, resolve(lazy)) == []
    target = {key: torch.zeros_like(value) for key, value in as_torch.items()}
    atoll.objects.fetch(ref, into=target)
    assert differences(as_torch, target) == []
    tree = atoll.objects.fetch(atoll.objects.publish([published]), to_disk=True)
    assert differences([as_torch], [{key: torch.as_tensor(each) for key, each in resolve(tree)[0].items()}]) == []


@pytest.mark.covers("P13", "T11")
def test_what_is_too_large_to_go_inline_is_streamed_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """15 MiB of tensors and what describes them are more than 15 MiB; 1,000 bytes less are not: 256 describe one of
    the two, and the text of the tree has less than 100 bytes."""
    large = {"w": torch.zeros(MOST_INLINE_BYTES, dtype=torch.uint8), "a": np.zeros(2)}
    packed = pack_object(large)
    assert cut_of(packed, ChunkSizes(0, PART)) == Cut(PART, too_large=MOST_INLINE_BYTES)
    assert cut_of(packed, ChunkSizes(0, 0)) == Cut(EIGHT, too_large=MOST_INLINE_BYTES + 16)
    fits = pack_object({"w": large["w"][:-1000], "a": large["a"]})
    assert cut_of(fits, ChunkSizes(0, PART)) == Cut(PART, in_head=frozenset({0}))
    monkeypatch.setenv("ATOLL_WORKFLOW__TENSOR_PART_BYTES", "0")
    with caplog.at_level(logging.WARNING, "atoll"):
        ref = atoll.objects.publish(large)
    assert f"{MOST_INLINE_BYTES} bytes of tensors are too many to travel inline: they are streamed" in caplog.text
    assert torch.equal(atoll.objects.fetch(ref)["w"], large["w"])


@pytest.mark.covers("P13")
def test_the_most_that_goes_inline_fits_into_one_answer() -> None:
    """10,000 tensors of 1 KiB are 9.8 MiB, what describes them (256 bytes each, and the tree's text) 3 MiB."""
    tensors = {f"{index:05}": torch.zeros(1024, dtype=torch.uint8) for index in range(10_000)}
    packed = pack_object(tensors)
    cut = cut_of(packed, ChunkSizes(0, 0))
    fd = nameless(None)
    with open(fd, "rb"):
        nbytes = write_object(packed, fd, cut).nbytes
    assert cut.inline
    assert nbytes <= routes.INLINE_BYTES


@pytest.mark.covers("P13", "X3")
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", ["-1", "1", "65535", "65600001", "16777280", "65568", "8 MiB", "1.5", ""])
def test_a_size_that_cannot_be_is_refused_by_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    variable = variable_of(key)
    with pytest.raises(ConfigError, match=rf"command line: {key} = "):
        Settings.read(None, {key: value}, {})
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=rf"{variable}: {key} = '{value}': .*\. {key}: "):
        atoll.objects.publish({})
    path = tmp_path / "run.toml"
    path.write_text(f"{key} = 65600\n")  # a multiple of 64, and no less than 64 KiB
    assert Settings.read(path, {}, {}).at(key) == 65_600


@pytest.mark.covers("P13", "X3")
def test_the_idle_timeout_comes_from_the_environment_and_a_wrong_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ref = atoll.objects.publish({})
    for wrong in (0, -1.0, float("nan"), "5", True):
        with pytest.raises(UsageError, match="idle_timeout_s is"):
            atoll.objects.fetch(ref, idle_timeout_s=wrong)
    monkeypatch.setenv("ATOLL_NETWORK__IDLE_TIMEOUT_S", "never")
    for call in (
        lambda: atoll.objects.fetch(ref),
        atoll.objects.Publisher,
        lambda: atoll.objects.publish({}, server="http://127.0.0.1:1"),
    ):
        with pytest.raises(ConfigError, match=r"ATOLL_NETWORK__IDLE_TIMEOUT_S: network\.idle_timeout_s = 'never'"):
            call()
    monkeypatch.setenv("ATOLL_NETWORK__IDLE_TIMEOUT_S", "0.2")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        gone = dataclasses.replace(ref, port=silent.getsockname()[1])
        with pytest.raises(TransferStalled, match=r"moved no byte for 0\.2 s"):
            atoll.objects.fetch(gone)
