"""Decode and reduce the updates of a round, one range of elements at a time. A reducer gets one row for each update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from atoll import posix
from atoll.codecs.base import Codec
from atoll.errors import StateCorrupt
from atoll.reducers import with_rules
from atoll.reducers.base import Reducer, RoundFacts
from atoll.reducers.means import Maximum
from atoll.tensors.byte_runs import ByteRun, RunTable
from atoll.tensors.chunks import Scratch, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import Segment
from atoll.tensors.schema import BUFFERS, FLAGS, PARAMS


class Updates:
    """The updates that count in a round. `reduce` combines any range of their elements.

    Args:
        fds: descriptors of the updates' files, in the order in which they are reduced.
        runs: byte runs of the updates' layout.
        codecs: name → codec.
        reducers: group → reducer of its floats. For other dtypes in the group `buffers`, the maximum is taken.
        facts: weights, norms and steps of the updates.
        scales: for each update, a factor for the weight of its `params`.

    Attributes:
        flags: names of the buffers with the rule `flags` of which all values in all updates are 0 or 1. They take the
            value of the first update.
        carries: group → factor by which the previous value is multiplied before the reduction is added. Used only for
            groups of extra tensors that an algorithm adds to the model.
    """

    def __init__(
        self,
        fds: Sequence[int],
        runs: RunTable,
        codecs: Mapping[str, Codec],
        reducers: Mapping[str, Reducer],
        facts: RoundFacts,
        scales: Sequence[float],
    ) -> None:
        self._fds, self._runs, self._codecs, reducers = fds, runs, codecs, with_rules(reducers)
        self._reducers, self._integers = reducers, Maximum()
        self._weights = {group: reducer.weigh(facts) for group, reducer in reducers.items()}
        self.carries = {group: reducer.carry(facts) for group, reducer in reducers.items()}
        if any(scale != 1 for scale in scales):
            self._weights[PARAMS] = [w * scale for w, scale in zip(self._weights[PARAMS], scales, strict=True)]
        self._unweighted = self._integers.weigh(facts)
        self.flags: frozenset[str] = frozenset()

    def reduce(self, run: ByteRun, scratch: Scratch) -> tuple[Tensor, Sequence[Tensor]]:
        """Reduce the elements of one byte run over all updates.

        Args:
            run: the elements, as a byte run of a version.
            scratch: memory that holds the result, until the next call with this memory overwrites it.

        Returns:
            The reduced elements, [n], in the accumulation dtype (at least fp32); and a view of them for each piece
            (tensor) of the run. If the update's layout has padding, n is larger than the run; padding elements are 0.
        """
        spec, encoded_run = run.spec, self._runs.counterpart(run)
        dtype, n = accumulate_dtype(spec.dtype), encoded_run.numel
        reducer: Reducer = self._integers
        weights = self._unweighted
        if spec.is_float or (spec.is_buffer and spec.group != BUFFERS):
            reducer, weights = self._reducers[spec.group], self._weights[spec.group]
        out = scratch.tensor("reduced", dtype, n)
        if reducer.needs_all:
            rows = scratch.tensor("rows", dtype, len(self._fds) * n).view(-1, n)
            for fd, row in zip(self._fds, rows, strict=True):
                self._decode_(fd, encoded_run, scratch, row)
            reducer.reduce_(rows, weights, out)
        else:
            row = scratch.tensor("row", dtype, n)
            reducer.reduce_((self._decode_(fd, encoded_run, scratch, row) for fd in self._fds), weights, out)
        if any(piece.segment.spec.name in self.flags for piece in encoded_run.pieces):
            row = self._decode_(self._fds[0], encoded_run, scratch, scratch.tensor("row", dtype, n))
            for piece, first, into in zip(
                encoded_run.pieces, encoded_run.split(row), encoded_run.split(out), strict=True
            ):
                if piece.segment.spec.name in self.flags:
                    into.copy_(first)
        # A site may have sent anything there, and `out` as a whole is squared for the norm.
        encoded_run.clear_padding(scratch.view("reduced", n * dtype.itemsize), dtype.itemsize)
        return out, encoded_run.split(out)

    def hold(self, segment: Segment, runs: RunTable, scratch: Scratch, holds: Callable[[Tensor], bool]) -> bool:
        """Return whether a tensor's elements fulfil a condition in every update, read a range of elements at a time.

        Args:
            segment: the tensor in a version.
            runs: byte runs of the version.
            scratch: memory for `runs.max_elements` elements.
            holds: whether a range of elements fulfils the condition.
        """
        size, numel = runs.max_elements, segment.spec.numel
        for start in range(0, numel, size):
            encoded_run = self._runs.counterpart(runs.run(segment, start, min(start + size, numel)))
            row = scratch.tensor("row", accumulate_dtype(segment.spec.dtype), encoded_run.numel)
            for fd in self._fds:
                if not all(map(holds, encoded_run.split(self._decode_(fd, encoded_run, scratch, row)))):
                    return False
        return True

    def find_flags(self, runs: RunTable) -> None:
        """Find `flags`. A buffer has one rule for all its elements, so this comes before any of them is reduced.

        Args:
            runs: byte runs of the version.
        """
        found = [segment for segment in runs.layout.segments if segment.spec.group == FLAGS]
        if found:
            scratch = Scratch(runs.max_elements)
            self.flags = frozenset(each.spec.name for each in found if self.hold(each, runs, scratch, _are_flags))

    def _decode_(self, fd: int, run: ByteRun, scratch: Scratch, row: Tensor) -> Tensor:
        """Decode one update's elements of a byte run into `row`, [n], and return `row`."""
        dtype, codec, nbytes = run.spec.dtype, self._codecs[run.codec], run.stop - run.start
        if run.is_whole and codec.raw and torch_dtype(dtype) == row.dtype:
            read_at(fd, bytes_of(row), run.start)
            return row
        read_at(fd, scratch.view("encoded", nbytes), run.start)
        encoded = scratch.raw("encoded", nbytes)
        if run.is_whole:
            codec.decode_(encoded, row, dtype)
            return row
        for piece, source, target in zip(run.pieces, run.encoded(encoded), run.split(row), strict=True):
            self._codecs[piece.segment.codec].decode_(source, target, dtype)
        return row


def _are_flags(values: Tensor) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def rows_at_once(updates: int, reducers: Mapping[str, Reducer]) -> int:
    """Return how many decoded updates are in memory at once: all if a reducer needs them together, otherwise one."""
    return max(updates, 1) if any(reducer.needs_all for reducer in reducers.values()) else 1


def read_at(fd: int, target: memoryview, offset: int) -> None:
    """Fill `target` with the bytes of a file from `offset` on.

    Raises:
        StateCorrupt: the file ends before `target` is full.
    """
    try:
        posix.read_at(fd, target, offset)
    except EOFError:
        raise StateCorrupt(
            f"A file that the round needs ends before byte {offset + len(target)}.",
            "Another program or a disk error has truncated it: check the disk.",
        ) from None
