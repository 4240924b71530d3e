"""The contract suite of types registered with `atoll.objects.register`. To test your type, subclass the suite.

class TestFile(PayloadTypeContract):
    in_memory = False

    def make(self, folder, nbytes): ...
    def same(self, one, other): ...
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from atoll.blobs.object_file import Contents, Stored, write_object
from atoll.blobs.payload_cut import Cut
from atoll.posix import read_at
from atoll.tensors.custom_types import kind_of
from atoll.tensors.payload import pack

PART_BYTES = 2**20
LARGE_BYTES = 96 * 2**20
MORE_BYTES = 32 * 2**20
"""Allowed memory growth while sending or receiving a value of `LARGE_BYTES`, beyond the value itself."""


class PayloadTypeContract:
    """The tests that every registered type (its producer and its consumer) must pass. Override `make` and `same`.

    Attributes:
        in_memory: whether a value's data is in memory, as for a tensor. For a file it is not.
    """

    in_memory: ClassVar[bool] = True

    def make(self, folder: Path, nbytes: int) -> Any:
        """Return a value of about `nbytes` bytes: equal values for equal `nbytes`. Create files only in `folder`."""
        raise NotImplementedError

    def same(self, one: Any, other: Any) -> bool:
        """Return whether two values are bit-identical."""
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def _large_files_go(self, tmp_path: Path) -> Iterator[None]:
        yield
        shutil.rmtree(tmp_path)

    @pytest.mark.parametrize("nbytes", [0, 1000, 5_000_001])
    def test_it_arrives_as_it_was_sent(self, tmp_path: Path, nbytes: int) -> None:
        """Send a value of no bytes, of a few bytes, or of several parts, and compare the received value."""
        value = self.make(tmp_path, nbytes)
        arrived = there_and_back(value)
        assert type(arrived) is type(value)
        assert self.same(arrived, value)

    def test_values_differ(self, tmp_path: Path) -> None:
        """Check that `same` finds a difference; otherwise the other tests would prove nothing."""
        assert not self.same(self.make(tmp_path, 1000), self.make(tmp_path, 2000))

    def test_sending_does_not_change_it(self, tmp_path: Path) -> None:
        """Send a value, then compare it with an equal value that was not sent."""
        value = self.make(tmp_path, 1000)
        there_and_back(value)
        assert self.same(value, self.make(tmp_path, 1000))

    def test_it_can_be_sent_again_and_is_the_same_bytes(self, tmp_path: Path) -> None:
        """Check that sending a value twice gives the same bytes: an interrupted transfer starts again."""
        value = self.make(tmp_path, 100_000)
        assert _digest(value) == _digest(value)

    def test_it_lies_among_other_things_and_twice(self, tmp_path: Path) -> None:
        """Send values nested in dicts, lists and tuples, one of them in two places."""
        value, other = self.make(tmp_path, 1000), self.make(tmp_path, 70_000)
        tree = {"a": value, "b": [other, {"w": torch.arange(3)}, (value, None)]}
        arrived = there_and_back(tree)
        assert torch.equal(arrived["b"][1]["w"], torch.arange(3))
        assert arrived["b"][2][1] is None
        found = (arrived["a"], arrived["b"][2][0], arrived["b"][0])
        assert all(self.same(*pair) for pair in zip(found, (value, value, other), strict=True))

    def test_what_stands_for_it_is_small(self, tmp_path: Path) -> None:
        """Check that the data is in streams and tensors. The skeleton is kept in memory and must be small."""
        packed = pack(self.make(tmp_path, LARGE_BYTES))
        assert len(json.dumps(packed.skeleton)) < 2**16
        assert sum(part.nbytes for part in packed.tensors) >= LARGE_BYTES / 2

    def test_sending_it_takes_a_few_chunks_of_memory(self, tmp_path: Path) -> None:
        """Write a value of `LARGE_BYTES` to a file, and check that memory grows by less than `MORE_BYTES`."""
        value = self.make(tmp_path, LARGE_BYTES)
        with tempfile.TemporaryFile(dir=tmp_path) as file:
            assert peak_growth(lambda: write_object(pack(value), file.fileno(), Cut(PART_BYTES))) < MORE_BYTES

    def test_receiving_it_takes_a_few_chunks_beyond_the_value(self, tmp_path: Path) -> None:
        """Read a value of `LARGE_BYTES`. Memory may grow by `MORE_BYTES`, and by the value's size if `in_memory`."""
        stored, arrived = written(self.make(tmp_path, LARGE_BYTES)), []
        growth = peak_growth(lambda: arrived.append(stored.tree()))
        assert growth < MORE_BYTES + (LARGE_BYTES if self.in_memory else 0)

    def test_the_file_that_it_came_in_goes_with_it(self, tmp_path: Path) -> None:
        """Check that nothing refers to the stored file after the value is deleted."""
        stored = written(self.make(tmp_path, 1000))
        handle, arrived = weakref.ref(stored.handle), stored.tree()
        del stored, arrived
        gc.collect()
        assert handle() is None

    def test_it_is_registered(self, tmp_path: Path) -> None:
        """Check that the value's type is registered with `atoll.objects.register`."""
        assert kind_of(self.make(tmp_path, 1000)) is not None


def written(tree: Any) -> Stored:
    """Return a tree as a received object in a file."""
    with tempfile.TemporaryFile() as file:
        cuts = write_object(pack(tree), file.fileno(), Cut(PART_BYTES)).cuts
        fd = os.dup(file.fileno())
    contents = Contents.read(os.pread(fd, cuts.head_bytes, 0), cuts, "The value")
    return Stored(contents, lambda offset, memory: read_at(fd, memory, offset), lambda: os.close(fd))


def there_and_back(tree: Any) -> Any:
    """Return a tree after sending and receiving."""
    return written(tree).tree()


def peak_growth(work: Callable[[], Any]) -> int:
    """Return the peak memory of this process during `work`, minus its memory before, in bytes. Linux only."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak
    before = _kib("VmRSS")
    work()
    return (_kib("VmHWM") - before) * 1024


def _kib(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def _digest(value: Any) -> str:
    with tempfile.TemporaryFile() as file:
        return write_object(pack(value), file.fileno(), Cut(PART_BYTES)).id
