"""Types of a user's own in payloads: both shipped examples pass the contract suite, and planted faults do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from atoll.objects import Stream, register
from atoll.testing.contracts import PayloadTypeContract

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))
from own_types import File, Quantised

EXAMPLE = Path(__file__).parents[3] / "examples" / "own_types.py"
BLOCK = 2**20


def pattern(nbytes: int) -> Iterator[bytes]:
    """So many bytes, which repeat only after 251 of them: a run that is lost or swapped shows."""
    whole = bytes(range(251)) * (BLOCK // 251 + 2)
    for start in range(0, nbytes, BLOCK):
        yield whole[start % 251 :][: min(BLOCK, nbytes - start)]


def content(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.covers("T13")
class TestFile(PayloadTypeContract):
    in_memory = False

    def make(self, folder: Path, nbytes: int) -> Any:
        path = folder / f"{nbytes}.bin"
        with path.open("wb") as file:
            file.writelines(pattern(nbytes))
        return File(path)

    def same(self, one: Any, other: Any) -> bool:
        return one.path.name == other.path.name and content(one.path) == content(other.path)


@pytest.mark.covers("T13")
class TestQuantised(PayloadTypeContract):
    def make(self, folder: Path, nbytes: int) -> Any:
        codes = torch.arange(max(nbytes, 1)).remainder(251).sub(125).to(torch.int8)[:nbytes].reshape(1, nbytes)
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


@pytest.mark.covers("T13")
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


def chunked(blob: Blob) -> Iterator[bytes]:
    with blob.path.open("rb") as file:
        while run := file.read(BLOCK):
            yield run


def stream(blob: Blob, chunks: Callable[[], Any]) -> dict[str, Any]:
    return {"word": blob.word, "bytes": Stream(torch.uint8, (blob.path.stat().st_size,), chunks)}


def right(blob: Blob) -> dict[str, Any]:
    return stream(blob, lambda: chunked(blob))


def once(blob: Blob) -> dict[str, Any]:
    runs = _ONCE.setdefault(str(blob.path), chunked(blob))
    return stream(blob, lambda: runs)


_ONCE: dict[str, Iterator[bytes]] = {}


def whole(blob: Blob) -> dict[str, Any]:
    return stream(blob, lambda: [blob.path.read_bytes()])


def in_the_text(blob: Blob) -> dict[str, Any]:
    return {"word": blob.word, "bytes": blob.path.read_bytes()}


def changed(blob: Blob) -> dict[str, Any]:
    sent = right(blob)
    blob.word = "sent"
    return sent


def rebuilt(sent: dict[str, Any]) -> Blob:
    path = Path(KEPT_IN[0]) / f"{len(list(Path(KEPT_IN[0]).iterdir()))}.arrived"
    with path.open("wb") as file:
        for run in sent["bytes"].runs():
            file.write(run.numpy())
    return Blob(path, sent["word"])


KEPT_IN = [""]


def rebuilt_at_once(sent: dict[str, Any]) -> Blob:
    path = Path(KEPT_IN[0]) / "whole.arrived"
    path.write_bytes(sent["bytes"].resolve().numpy())
    return Blob(path, sent["word"])


def without_word(sent: dict[str, Any]) -> Blob:
    return Blob(rebuilt(sent).path, "")


def hoarded(sent: dict[str, Any]) -> Blob:
    KEPT.append(sent)
    return rebuilt(sent)


class BlobContract(PayloadTypeContract):
    in_memory: ClassVar[bool] = False

    def make(self, folder: Path, nbytes: int) -> Any:
        KEPT_IN[0] = str(folder)
        path = folder / f"{nbytes}.blob"
        with path.open("wb") as file:
            file.writelines(pattern(nbytes))
        return Blob(path, "hello")

    def same(self, one: Any, other: Any) -> bool:
        return one.word == other.word and content(one.path) == content(other.path)


class Alike(BlobContract):
    def same(self, one: Any, other: Any) -> bool:
        return True


CONTRACT = [name for name in dir(PayloadTypeContract) if name.startswith("test_")]


def failed(suite: PayloadTypeContract, folder: Path) -> set[str]:
    """Which tests of the contract fail, without the beginnings of their names."""
    found = set()
    for name in CONTRACT:
        given = {"nbytes": 5_000_001} if "arrives_as" in name else {}
        place = folder / name
        place.mkdir()
        try:
            getattr(suite, name)(tmp_path=place, **given)
        except Exception:
            found.add(name.removeprefix("test_"))
        finally:
            shutil.rmtree(place)
    return found


@pytest.mark.covers("T13")
@pytest.mark.parametrize(
    ("suite", "produce", "consume", "expected"),
    [
        pytest.param(BlobContract, right, rebuilt, "", id="none"),
        pytest.param(BlobContract, right, without_word, "it_arrives_as_it_was_sent", id="something is lost"),
        pytest.param(BlobContract, once, rebuilt, "it_can_be_sent_again_and_is_the_same_bytes", id="once only"),
        pytest.param(BlobContract, changed, rebuilt, "sending_does_not_change_it", id="changed"),
        pytest.param(BlobContract, whole, rebuilt, "sending_it_takes_a_few_chunks_of_memory", id="read whole"),
        pytest.param(BlobContract, in_the_text, rebuilt, "what_stands_for_it_is_small", id="in the text"),
        pytest.param(
            BlobContract, right, rebuilt_at_once, "receiving_it_takes_a_few_chunks_beyond_the_value", id="loaded whole"
        ),
        pytest.param(BlobContract, right, hoarded, "the_file_that_it_came_in_goes_with_it", id="hoarded"),
        pytest.param(Alike, right, rebuilt, "values_differ", id="all are the same"),
    ],
)
def test_a_planted_fault_fails_the_contract(
    tmp_path: Path,
    suite: type[PayloadTypeContract],
    produce: Callable[[Blob], Any],
    consume: Callable[[Any], Blob],
    expected: str,
) -> None:
    register(Blob, "tests.blob", produce, consume)
    KEPT.clear()
    _ONCE.clear()
    found = failed(suite(), tmp_path)
    KEPT.clear()
    assert (expected in found) if expected else found == set()


@pytest.mark.slow
@pytest.mark.covers("T13")
def test_the_example_runs(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE], cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    size, first, sums = done.stdout.splitlines()
    assert size.startswith("training.log: ")
    assert first.startswith("step 0: norm ")
    assert sums == "the dense matrix has the same bits: True"
