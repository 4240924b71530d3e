"""Types of a user's own between a workflow and its sites, and behind references; and what goes wrong with them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import Nursery
from kit.workflows import play_as_processes

import atoll
from atoll.errors import BadRequest, UsageError
from atoll.objects import LazyTensor, Stream, register
from atoll.testing.contracts import MORE_BYTES, peak_growth

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from own_types import File, Quantised
from typed_process import Torn, Word

SCRIPT = Path(__file__).with_name("typed_process.py")
FORTY_MIB = 40 * 2**20


def play(
    nursery: Nursery, folder: Path, main: Callable[[Any], None], stream_tasks: tuple[str, ...] = ("echo",)
) -> None:
    """Run a workflow with the site a; nothing of it is left."""
    play_as_processes(nursery, SCRIPT, folder, main, "a", **{"workflow.streamed_tasks": stream_tasks})


def file_of(folder: Path, nbytes: int) -> Any:
    path = folder / "some.bin"
    path.write_bytes(bytes(range(256)) * (nbytes // 256))
    return File(path)


@pytest.mark.covers("T13")
@pytest.mark.parametrize("stream", [(), ("echo",)], ids=["inline", "streamed"])
def test_they_come_back_from_a_site_as_they_were_sent(
    nursery: Nursery, tmp_path: Path, stream: tuple[str, ...]
) -> None:
    came: dict[str, Any] = {}
    file, matrix = file_of(tmp_path, 3 * 2**20), Quantised.of(torch.arange(12.0).reshape(3, 4))

    def main(controller: Any) -> None:
        tree = {"file": file, "list": [matrix, torch.arange(3), (Word("hello"), 0.5)]}
        came.update(controller.send("a", "echo", tree, timeout_s=60).payload)
        came["word"] = controller.send("a", "echo", {"only": Word("no tensors")}, timeout_s=60).payload

    play(nursery, tmp_path, main, stream)
    assert came["file"].path != file.path
    assert came["file"].path.read_bytes() == file.path.read_bytes()
    back, numbers, rest = came["list"]
    assert torch.equal(back.codes, matrix.codes)
    assert torch.equal(back.scale, matrix.scale)
    assert torch.equal(numbers, torch.arange(3))
    assert rest == (Word("hello"), 0.5)
    assert came["word"] == {"only": Word("no tensors")}


class Unknown:
    """Known at the server alone."""


register(Unknown, "tests.server_only", lambda _: {"w": torch.ones(2)}, lambda _: Unknown())


@pytest.mark.covers("T13")
def test_a_type_that_the_other_side_does_not_know_is_named_with_the_remedy(nursery: Nursery, tmp_path: Path) -> None:
    """The site answers with the error, and goes on. At the server the result says it when it is asked for."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        came["site"] = controller.send("a", "echo", {"x": [Unknown()]}, timeout_s=60).error
        result = controller.send("a", "give", "local", timeout_s=60)
        assert result.ok
        with pytest.raises(BadRequest) as caught:
            result.payload  # noqa: B018
        came["server"] = str(caught.value)
        came["after"] = controller.send("a", "echo", 1, timeout_s=60).payload

    play(nursery, tmp_path, main)
    assert "payload['x'][0] has the type 'tests.server_only', which is not registered in this process" in came["site"]
    assert "registered are: examples.file, examples.quantised, tests." in came["site"]
    assert "Call atoll.objects.register(…, 'tests.server_only', …) in this process, too" in came["site"]
    assert came["server"].startswith("payload['it'] has the type 'tests.site_only', which is not registered in this")
    assert came["after"] == 1


@pytest.mark.covers("T13", "T7")
def test_a_stream_that_fails_is_the_answer_of_its_site_and_the_sender_s_own_error(
    nursery: Nursery, tmp_path: Path
) -> None:
    """Short says 3 elements of 2 bytes, and gives 2: 4 bytes, less than 6."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        came["torn"] = controller.send("a", "give", "torn", timeout_s=60).error
        came["short"] = controller.send("a", "give", "short", timeout_s=60).error
        with pytest.raises(UsageError, match=r"payload\[0\] \(as tests.torn\)\['data'\] could not be read: OSError"):
            controller.send("a", "echo", [Torn()], timeout_s=60)
        came["after"] = controller.send("a", "echo", 1, timeout_s=60).payload

    play(nursery, tmp_path, main)
    assert "payload['it'] (as tests.torn)['data'] could not be read: OSError: the disk is gone." in came["torn"]
    assert "payload['it'] (as tests.short) produced 4 bytes, less than the 6 bytes of torch.int16[3]." in came["short"]
    assert came["after"] == 1


@pytest.mark.covers("T13", "P1")
def test_they_travel_behind_references_in_bounded_memory(tmp_path: Path) -> None:
    file, arrived = file_of(tmp_path, FORTY_MIB), []
    with atoll.objects.Publisher() as publisher:
        refs: list[Any] = []
        assert peak_growth(lambda: refs.append(publisher.publish({"file": file, "w": torch.ones(3)}))) < MORE_BYTES
        assert peak_growth(lambda: arrived.append(atoll.objects.fetch(refs[0]))) < MORE_BYTES
        lazy = atoll.objects.fetch(refs[0], to_disk=True)
    assert arrived[0]["file"].path.read_bytes() == file.path.read_bytes()
    assert torch.equal(arrived[0]["w"], torch.ones(3))
    assert lazy["file"].path.read_bytes() == file.path.read_bytes()
    assert isinstance(lazy["w"], LazyTensor)


# -- registering


class Thing:
    pass


@pytest.mark.covers("T13")
def test_what_cannot_be_registered_is_refused() -> None:
    register(Thing, "tests.thing", lambda _: None, lambda _: Thing())
    register(Thing, "tests.thing", lambda _: 1, lambda sent: ["newer", sent])  # once more: the newer one holds
    assert atoll.objects.fetch(atoll.objects.publish(Thing())) == ["newer", 1]
    for type_, name, what in (
        (dict, "tests.dict", "'dict' cannot be registered"),
        (torch.Tensor, "tests.tensor", "'Tensor' cannot be registered"),
        (Thing, "tests.other", "already registered as 'tests.thing'"),
        (Word, "tests.thing", "is already used by"),
        (Thing, "a name", "is not a valid name of a type"),
    ):
        with pytest.raises(UsageError, match=what):
            register(type_, name, lambda _: None, lambda _: None)


class Loop:
    pass


class Bad:
    pass


@pytest.mark.covers("T13")
def test_a_producer_or_consumer_that_fails_and_a_stream_alone_are_named_by_their_place() -> None:
    register(Loop, "tests.loop", lambda loop: {"again": loop}, lambda _: Loop())
    register(Bad, "tests.bad", lambda bad: {"f": open}, lambda sent: sent["missing"])
    with pytest.raises(UsageError, match=r"payload\['a'\] \(as tests.loop\)\['again'\] is payload\['a'\] again"):
        atoll.objects.publish({"a": Loop()})
    with pytest.raises(UsageError, match=r"payload \(as tests.bad\)\['f'\] is a builtin_function_or_method"):
        atoll.objects.publish(Bad())
    register(Bad, "tests.bad", lambda bad: {}, lambda sent: sent["missing"])
    with pytest.raises(BadRequest, match=r"payload\[0\]: the consumer of 'tests.bad' failed: KeyError: 'missing'"):
        atoll.objects.fetch(atoll.objects.publish([Bad()]))
    with pytest.raises(UsageError, match="payload is a Stream, which Atoll cannot send"):
        atoll.objects.publish(Stream(torch.uint8, (1,), lambda: [b"a"]))
    with pytest.raises(UsageError, match="is a Missing, which Atoll cannot send"):
        atoll.objects.publish([Missing()])


class Missing:
    pass


@pytest.mark.covers("T13")
@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([b"abc"], "a chunk of 3 bytes, which is not a multiple of 2"),
        ([torch.zeros(3)], "a chunk of torch.float32, but its dtype is torch.int16"),
        ([torch.zeros(3, dtype=torch.int16)] * 2, "produced more than the 6 bytes"),
        ([], "produced 0 bytes, less than the 6 bytes"),
    ],
    ids=["half an element", "dtype", "more", "less"],
)
def test_a_stream_is_held_to_what_it_says(chunks: list[Any], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        list(Stream(torch.int16, (3,), lambda: chunks).runs())
