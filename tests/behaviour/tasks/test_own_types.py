"""Types of a user's own: the contract suite, the sizes of parts, and between a workflow and its sites."""

from __future__ import annotations

import gc
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from harness.processes import Nursery
from kit.payloads import calls_of, choose_part_sizes, manifest_of, plain
from kit.processes import command
from kit.workflows import run_workflow_as_processes
from torch import Tensor

import atoll
from atoll.errors import BadRequest, UsageError
from atoll.objects import LazyTensor, Stream, register
from atoll.testing.contracts import PayloadTypeContract

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from own_types import File, Quantised
from typed_process import Torn, Word

pytestmark = pytest.mark.covers("T13")

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_types.py"
BLOCK = 2**20


def write_pattern(path: Path, nbytes: int) -> Path:
    """Write so many bytes, which repeat only after 251 of them: a run that is lost or swapped shows."""
    whole = bytes(range(251)) * (BLOCK // 251 + 2)
    with path.open("wb") as file:
        file.writelines(whole[start % 251 :][: min(BLOCK, nbytes - start)] for start in range(0, nbytes, BLOCK))
    return path


class TestFile(PayloadTypeContract):
    in_memory = False

    def make(self, folder: Path, nbytes: int) -> Any:
        return File(write_pattern(folder / f"{nbytes}.bin", nbytes))

    def same(self, one: Any, other: Any) -> bool:
        return one.path.name == other.path.name and one.path.read_bytes() == other.path.read_bytes()


class TestQuantised(PayloadTypeContract):
    def make(self, folder: Path, nbytes: int) -> Any:
        codes = torch.arange(-125, 126, dtype=torch.int8).repeat(-(-nbytes // 251))[:nbytes].reshape(1, nbytes)
        return Quantised(codes, torch.tensor([0.1]))

    def same(self, one: Any, other: Any) -> bool:
        return torch.equal(one.codes, other.codes) and torch.equal(one.scale, other.scale)


class Scaled(torch.Tensor):
    """A subclass of Tensor with a word of its own."""

    unit: str


def scaled(tensor: Tensor, unit: str) -> Scaled:
    value = tensor.as_subclass(Scaled)
    value.unit = unit
    return value


register(
    Scaled,
    "tests.scaled",
    lambda value: {"values": value.as_subclass(Tensor), "unit": value.unit},
    lambda sent: scaled(sent["values"], sent["unit"]),
)


class TestScaled(PayloadTypeContract):
    def make(self, folder: Path, nbytes: int) -> Any:
        return scaled(torch.arange(nbytes // 2, dtype=torch.int16), "mm")

    def same(self, one: Any, other: Any) -> bool:
        return one.unit == other.unit and torch.equal(one.as_subclass(Tensor), other.as_subclass(Tensor))


# -- planted faults


@dataclass
class Blob:
    """Bytes on disk, as `File`, with a word beside them."""

    path: Path
    word: str


KEPT: list[Any] = []
RUNS: dict[Path, Iterator[bytes]] = {}
ARRIVED_IN = [Path()]
"""The folder of the test that runs."""


def chunks_of(blob: Blob) -> Iterator[bytes]:
    with blob.path.open("rb") as file:
        while run := file.read(BLOCK):
            yield run


def stream(blob: Blob, chunks: Callable[[], Any] | None = None) -> dict[str, Any]:
    nbytes = blob.path.stat().st_size
    return {"word": blob.word, "bytes": Stream(torch.uint8, (nbytes,), chunks or (lambda: chunks_of(blob)))}


def stream_once(blob: Blob) -> dict[str, Any]:
    return stream(blob, lambda: RUNS.setdefault(blob.path, chunks_of(blob)))


def stream_whole(blob: Blob) -> dict[str, Any]:
    return stream(blob, lambda: [blob.path.read_bytes()])


def in_the_text(blob: Blob) -> dict[str, Any]:
    return {"word": blob.word, "bytes": blob.path.read_bytes()}


def stream_and_change(blob: Blob) -> dict[str, Any]:
    sent = stream(blob)
    blob.word = "sent"
    return sent


def rebuild(sent: dict[str, Any], runs: Iterable[Tensor] | None = None) -> Blob:
    path = ARRIVED_IN[0] / f"{len(list(ARRIVED_IN[0].iterdir()))}.arrived"
    with path.open("wb") as file:
        for run in runs or sent["bytes"].runs():
            file.write(run.numpy())
    return Blob(path, sent["word"])


def rebuild_at_once(sent: dict[str, Any]) -> Blob:
    return rebuild(sent, [sent["bytes"].resolve()])


def rebuild_without_word(sent: dict[str, Any]) -> Blob:
    return Blob(rebuild(sent).path, "")


def rebuild_and_keep(sent: dict[str, Any]) -> Blob:
    KEPT.append(sent)
    return rebuild(sent)


class BlobContract(PayloadTypeContract):
    in_memory: ClassVar[bool] = False

    def make(self, folder: Path, nbytes: int) -> Any:
        ARRIVED_IN[0] = folder
        return Blob(write_pattern(folder / f"{nbytes}.blob", nbytes), "hello")

    def same(self, one: Any, other: Any) -> bool:
        return one.word == other.word and one.path.read_bytes() == other.path.read_bytes()


class Alike(BlobContract):
    def same(self, one: Any, other: Any) -> bool:
        return True


CONTRACT = [name.removeprefix("test_") for name in dir(PayloadTypeContract) if name.startswith("test_")]


def fails(suite: PayloadTypeContract, folder: Path, name: str) -> bool:
    """Whether this test of the contract fails; without the beginning of its name."""
    given = {"nbytes": 5_000_001} if "arrives_as" in name else {}
    place = folder / name
    place.mkdir()
    test = getattr(suite, f"test_{name}")
    try:
        test(tmp_path=place, **given)
    except Exception:
        return True
    finally:
        shutil.rmtree(place)
    return False


@pytest.mark.parametrize(
    ("suite", "produce", "consume", "fault"),
    [
        pytest.param(BlobContract, stream, rebuild, "", id="none"),
        pytest.param(BlobContract, stream, rebuild_without_word, "it_arrives_as_it_was_sent", id="something is lost"),
        pytest.param(BlobContract, stream_once, rebuild, "it_can_be_sent_again_and_is_the_same_bytes", id="once only"),
        pytest.param(BlobContract, stream_and_change, rebuild, "sending_does_not_change_it", id="changed"),
        pytest.param(BlobContract, stream_whole, rebuild, "sending_it_takes_a_few_chunks_of_memory", id="read whole"),
        pytest.param(BlobContract, in_the_text, rebuild, "what_stands_for_it_is_small", id="in the text"),
        pytest.param(
            BlobContract, stream, rebuild_at_once, "receiving_it_takes_a_few_chunks_beyond_the_value", id="loaded whole"
        ),
        pytest.param(BlobContract, stream, rebuild_and_keep, "the_file_that_it_came_in_goes_with_it", id="hoarded"),
        pytest.param(Alike, stream, rebuild, "values_differ", id="all are the same"),
    ],
)
def test_the_contract_finds_each_fault_in_a_type(
    tmp_path: Path,
    suite: type[PayloadTypeContract],
    produce: Callable[[Blob], Any],
    consume: Callable[[Any], Blob],
    fault: str,
) -> None:
    """The contract test for own payload types finds each fault: a type with a fault fails the test for it. A type
    without a fault passes all.
    """
    register(Blob, "tests.blob", produce, consume)
    KEPT.clear()
    RUNS.clear()
    found = [name for name in ([fault] if fault else CONTRACT) if fails(suite(), tmp_path, name)]
    KEPT.clear()
    assert found == ([fault] if fault else [])


@pytest.mark.slow
def test_the_example_of_own_types_runs(nursery: Nursery, tmp_path: Path) -> None:
    done = command(nursery, tmp_path, program=str(EXAMPLE))
    assert done.returncode == 0, done.stderr[-3000:]
    size, first, sums = done.stdout.splitlines()
    assert size.startswith("training.log: ")
    assert first.startswith("step 0: norm ")
    assert sums == "the dense matrix has the same bits: True"


# -- under the sizes of parts
#
# A blob of 4 x 64 KiB is a stream of 100 bytes a chunk; beside it are 2 x 64 KiB of NumPy.


PART = 2**16
MOST_INLINE_BYTES = 15 * 2**20
BLOB = bytes(range(256)) * (4 * PART // 256)
ARRAY = np.arange(2 * PART // 4, dtype=np.int32)

collecting: list[bool] = []
"""Whether Python looked for cycles, each time that code of the type ran."""


@dataclass
class CutBlob:
    data: bytes


def produce(blob: CutBlob) -> Stream:
    def chunks() -> Iterator[bytes]:
        collecting.append(gc.isenabled())
        for start in range(0, len(blob.data), 100):
            yield blob.data[start : start + 100]

    collecting.append(gc.isenabled())
    return Stream(torch.uint8, (len(blob.data),), chunks)


def consume(sent: Any) -> CutBlob:
    assert isinstance(sent, LazyTensor)
    collecting.append(gc.isenabled())
    return CutBlob(b"".join(run.numpy().tobytes() for run in sent.runs(PART)))


register(CutBlob, "tests.cut_blob", produce, consume)


def tree() -> dict[str, Any]:
    blob = CutBlob(BLOB)
    return {"blob": blob, "again": [blob], "a": ARRAY, "t": torch.arange(3)}


def streamed_bytes(ref: atoll.TensorRef) -> int:
    """What of an object is not in its head."""
    manifest = manifest_of(ref)
    assert not manifest["inline"]
    return int(manifest["nbytes"] - manifest["head_bytes"])


@pytest.mark.covers("P13")
@pytest.mark.parametrize(
    ("sizes", "streamed"),
    [((PART, 2 * PART), 10 * PART + 24), ((0, PART), 2 * PART), ((PART, 0), 8 * PART + 24)],
    ids=["streamed", "torch inline", "numpy inline"],
)
def test_streams_are_cut_like_tensors(monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], streamed: int) -> None:
    """The stream of an own type is cut into parts like a torch tensor, and arrives unchanged."""
    # There are two blobs of 4 parts, an array of 2 parts, and 3 int64 values of torch, which are 24 bytes.
    choose_part_sizes(monkeypatch, *sizes)
    ref = atoll.objects.publish(tree())
    assert streamed_bytes(ref) == streamed
    assert plain(atoll.objects.fetch(ref)) == plain(tree())
    lazy = atoll.objects.fetch(ref, to_disk=True)
    assert [lazy["blob"], *lazy["again"]] == [CutBlob(BLOB)] * 2


@pytest.mark.covers("P13")
@pytest.mark.parametrize("arrays", [0, PART])
def test_large_streams_are_not_sent_inline(monkeypatch: pytest.MonkeyPatch, arrays: int) -> None:
    """A stream that is too large for the head of an object is sent as parts."""
    choose_part_sizes(monkeypatch, 0, arrays)
    assert streamed_bytes(atoll.objects.publish([CutBlob(bytes(MOST_INLINE_BYTES))])) == MOST_INLINE_BYTES


@pytest.mark.covers("T5")
def test_small_chunks_are_written_in_one_call() -> None:
    """Many small chunks of a stream are written to disk with one call."""
    # 2,622 chunks of 100 bytes and the head fit into one run of 2 MiB.
    with calls_of("pwrite") as writes:
        ref = atoll.objects.publish(CutBlob(BLOB), chunk_bytes=PART)
    (nbytes,) = writes
    assert nbytes > streamed_bytes(ref) == len(BLOB)
    assert atoll.objects.fetch(ref) == CutBlob(BLOB)


@pytest.mark.parametrize("enabled", [True, False], ids=["on", "off"])
@pytest.mark.parametrize("sizes", [(PART, PART), (0, PART)], ids=["streamed", "inline"])
def test_own_types_see_the_garbage_collector_unchanged(
    monkeypatch: pytest.MonkeyPatch, enabled: bool, sizes: tuple[int, int]
) -> None:
    """Atoll delays Python's garbage collector around its own small objects."""
    # A user's producer and consumer find it as it was, on or off. A user's code may leave more objects behind.
    choose_part_sizes(monkeypatch, *sizes)
    collecting.clear()
    if not enabled:
        gc.disable()
    try:
        assert plain(atoll.objects.fetch(atoll.objects.publish(tree()))) == plain(tree())
        assert gc.isenabled() is enabled
    finally:
        gc.enable()
    assert collecting == [enabled] * 6  # two blobs: produced, read and consumed


# -- between a workflow and its sites


SCRIPT = Path(__file__).with_name("typed_process.py")
STREAMED: dict[str, Any] = {"workflow.streamed_tasks": ("echo",)}


@pytest.mark.parametrize("stream", [(), ("echo",)], ids=["inline", "streamed"])
def test_own_types_come_back_unchanged(nursery: Nursery, tmp_path: Path, stream: tuple[str, ...]) -> None:
    """Values of own types that a server sends come back from the site unchanged."""
    file, matrix = File(write_pattern(tmp_path / "some.bin", 3 * 2**20)), Quantised.of(torch.arange(12.0).reshape(3, 4))
    sent = ({"file": file, "list": [matrix, torch.arange(3), (Word("hello"), 0.5)]}, {"only": Word("no tensors")})

    def workflow(controller: Any) -> Any:
        return [controller.send("a", "echo", tree, timeout_s=60).payload for tree in sent]

    (came, word), _ = run_workflow_as_processes(
        nursery, SCRIPT, tmp_path, workflow, "a", **{"workflow.streamed_tasks": stream}
    )
    assert came["file"].path != file.path
    assert came["file"].path.read_bytes() == file.path.read_bytes()
    back, numbers, rest = came["list"]
    assert torch.equal(back.codes, matrix.codes)
    assert torch.equal(back.scale, matrix.scale)
    assert torch.equal(numbers, torch.arange(3))
    assert rest == (Word("hello"), 0.5)
    assert word == {"only": Word("no tensors")}


class Unknown:
    """Known at the server alone."""


register(Unknown, "tests.server_only", lambda _: {"w": torch.ones(2)}, lambda _: Unknown())


def test_an_unregistered_type_gives_an_error(nursery: Nursery, tmp_path: Path) -> None:
    """If a process lacks a registration for a type that it receives, the error has the type's name and says how to
    register it.
    """
    # The site answers with this error and goes on. At the server, the error comes when the result is asked for.

    def workflow(controller: Any) -> tuple[str, str, Any]:
        site = controller.send("a", "echo", {"x": [Unknown()]}, timeout_s=60).error
        result = controller.send("a", "give", "local", timeout_s=60)
        assert result.ok
        with pytest.raises(BadRequest) as caught:
            result.payload  # noqa: B018
        return site, str(caught.value), controller.send("a", "echo", 1, timeout_s=60).payload

    (site, server, after), _ = run_workflow_as_processes(nursery, SCRIPT, tmp_path, workflow, "a", **STREAMED)
    assert "payload['x'][0] has the type 'tests.server_only', which is not registered in this process" in site
    assert "registered types: examples.file, examples.quantised, tests." in site
    assert "Call atoll.objects.register(…, 'tests.server_only', …) in this process, too" in site
    assert server.startswith("payload['it'] has the type 'tests.site_only', which is not registered in this")
    assert after == 1


@pytest.mark.covers("T7")
def test_a_failing_stream_is_reported(nursery: Nursery, tmp_path: Path) -> None:
    """If a stream fails at the site, the error is the site's answer."""
    # If it fails at the server, the sender raises it. The type Short claims 3 elements of 2 bytes and gives 2, that is
    # 4 bytes of 6.

    def workflow(controller: Any) -> tuple[str, str, Any]:
        torn, short = (controller.send("a", "give", name, timeout_s=60).error for name in ("torn", "short"))
        with pytest.raises(UsageError, match=r"payload\[0\] \(as tests.torn\)\['data'\] could not be read: OSError"):
            controller.send("a", "echo", [Torn()], timeout_s=60)
        return torn, short, controller.send("a", "echo", 1, timeout_s=60).payload

    (torn, short, after), _ = run_workflow_as_processes(nursery, SCRIPT, tmp_path, workflow, "a", **STREAMED)
    assert "payload['it'] (as tests.torn)['data'] could not be read: OSError: the disk is gone." in torn
    assert "payload['it'] (as tests.short) produced only 4 bytes, but torch.int16[3] has 6 bytes." in short
    assert after == 1


# -- registering


class Thing:
    pass


def test_the_last_registration_counts() -> None:
    """If a type is registered twice, the last registration counts."""
    register(Thing, "tests.thing", lambda _: None, lambda _: Thing())
    register(Thing, "tests.thing", lambda _: 1, lambda sent: ["newer", sent])
    assert atoll.objects.fetch(atoll.objects.publish(Thing())) == ["newer", 1]


@pytest.mark.parametrize(
    ("type_", "name", "words"),
    [
        (dict, "tests.dict", "'dict' cannot be registered"),
        (torch.Tensor, "tests.tensor", "'Tensor' cannot be registered"),
        (Quantised, "tests.other", "already registered as 'examples.quantised'"),
        (Thing, "examples.quantised", "is already used by"),
        (Thing, "a name", "is not a valid type name"),
    ],
)
def test_an_impossible_registration_is_refused(type_: type, name: str, words: str) -> None:
    """Types that Atoll sends itself, invalid type names, and types or names that are registered already, cannot be
    registered.
    """
    with pytest.raises(UsageError, match=words):
        register(type_, name, lambda _: None, lambda _: None)


class Loop:
    pass


class Bad:
    pass


def test_faults_of_own_types_show_their_place() -> None:
    """If the producer or consumer of an own type fails, or a payload has a bare stream, the error shows the place in
    the payload.
    """
    register(Loop, "tests.loop", lambda loop: {"again": loop}, lambda _: Loop())
    register(Bad, "tests.bad", lambda bad: {"f": open}, lambda sent: sent["missing"])
    with pytest.raises(UsageError, match=r"payload\['a'\] \(as tests.loop\)\['again'\] is payload\['a'\] again"):
        atoll.objects.publish({"a": Loop()})
    with pytest.raises(UsageError, match=r"payload \(as tests.bad\)\['f'\] is of type builtin_function_or_method"):
        atoll.objects.publish(Bad())
    register(Bad, "tests.bad", lambda bad: {}, lambda sent: sent["missing"])
    with pytest.raises(BadRequest, match=r"payload\[0\]: the consumer of 'tests.bad' failed: KeyError: 'missing'"):
        atoll.objects.fetch(atoll.objects.publish([Bad()]))
    with pytest.raises(UsageError, match="payload is of type Stream, which Atoll cannot send"):
        atoll.objects.publish(Stream(torch.uint8, (1,), lambda: [b"a"]))
    with pytest.raises(UsageError, match="is of type Missing, which Atoll cannot send"):
        atoll.objects.publish([Missing()])


class Missing:
    pass


@pytest.mark.parametrize(
    ("chunks", "what"),
    [
        ([b"abc"], "a chunk of 3 bytes, not whole elements of 2 bytes"),
        ([torch.zeros(3)], "a chunk of torch.float32, but the stream's dtype is torch.int16"),
        ([torch.zeros(3, dtype=torch.int16)] * 2, "produced too many bytes, but"),
        ([], "produced only 0 bytes, but"),
    ],
    ids=["half an element", "dtype", "more", "less"],
)
def test_a_stream_must_keep_its_declared_size(chunks: list[Any], what: str) -> None:
    """If a stream's chunks do not have its declared number of elements and dtype, reading it raises."""
    with pytest.raises(UsageError, match=what):
        list(Stream(torch.int16, (3,), lambda: chunks).runs())
