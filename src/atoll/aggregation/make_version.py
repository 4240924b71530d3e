"""One pass over a fragment: from accepted updates to the next version and its outer state, in fixed memory.

A part is one job of a pass: with fewer parts than threads some would be idle, and to reduce the updates of many sites
takes far longer than all that follows from it.

For every window of every part:

    g ← reduce(decode(u_1) … decode(u_k))          in promote(dtype, fp32), frozen order, weights normalised in fp64
    θ, s ← outer step of θ along g                 θ: the version's values, or their fp32 master in the state file
    write θ (cast to the version's dtype) and s, hash them on the way

Where versions go down by a codec, θ is the master in the state file, and the version is what workers then hold; see
`DeltaWriter`. Buffers take the mean of raw values, groups beside the model grow by the reduction, integers take the
maximum. The pass is a pure function of its inputs: neither the chunk size nor the number of threads changes a bit, and
after a crash it simply runs again. What it reads of the base is hashed, too: a disk that has changed a bit since it was
written is found out before anything follows from it. Memory is a few chunks per thread, whatever the model's size and
the number of updates. Files are read and written by position; fsync is the caller's.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch
from blake3 import blake3
from torch import Tensor

from atoll.aggregation.decode_updates import Updates, rows_at_once
from atoll.aggregation.jobs import run_jobs
from atoll.aggregation.outer_state import MASTER, RUNS, Column, region_digest, tail_region
from atoll.aggregation.scratch import Scratch, read_at
from atoll.aggregation.tables import Tables
from atoll.aggregation.values import PassInputs, PassOutputs, PassResult, UpdateSource
from atoll.aggregation.whole_tensors import Wholes, step_whole
from atoll.aggregation.windows import Window
from atoll.codecs.base import Codec
from atoll.codecs.version_difference import Downlink
from atoll.errors import RunFailed, StateCorrupt
from atoll.failpoints import failpoint
from atoll.outer_optimizers.torch_optimizer import OuterRule, State, Stepper
from atoll.posix import write_at
from atoll.reducers.base import Reducer
from atoll.reducers.means import Maximum, WeightedMean
from atoll.tensors.alone import stay_alone
from atoll.tensors.chunks import bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import ALIGN_BYTES, TILE, Part
from atoll.tensors.schema import FLOATS, PARAMS

# -- No version holds Inf or NaN: a step, or a sum, beyond what the dtype can hold ends the run before it is
# published.
#
# The initial model and every update are finite, so what is not finite came of the round's own arithmetic.


class Overflow(RunFailed):
    """The next version would hold a value that its dtype cannot."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "Begin a new run in another state_dir from that version (atoll export) with a lower outer_lr or "
            "outer_momentum, smaller updates (the filter norm_clip), or a model in bf16 or fp32. A server that is "
            "started on this state_dir again comes to the same.",
        )


def require_finite(window: Window, values: Tensor, base_fd: int) -> None:
    """Check what the next version is to have of a window.

    Args:
        values: [numel], in the version's dtype.
        base_fd: of the version before it, for the message.

    Raises:
        Overflow: one of them is Inf or NaN.
    """
    if window.dtype not in FLOATS:
        return
    wide = values.to(accumulate_dtype(window.dtype))
    if bool(torch.dot(wide, wide).isfinite()):  # as a sum of squares: one quick pass, which no Inf or NaN survives
        return
    bad = wide.isfinite().logical_not_().nonzero()
    if not len(bad):
        return
    at = int(bad[0])
    for extent in window.extents:
        if at < extent.numel:
            break
        at -= extent.numel
    spec, dtype = extent.spec, torch_dtype(window.dtype)
    before = torch.empty(1, dtype=dtype)
    read_at(base_fd, bytes_of(before), extent.segment.offset + (extent.start + at) * dtype.itemsize)
    raise Overflow(
        f"The round's result overflows {window.dtype}, which holds values up to {torch.finfo(dtype).max:g}: element "
        f"{extent.start + at} of {spec.name!r} would go from {float(before):g} to {float(wide[bad[0]]):g}. No version "
        "is published; the last one stays."
    )


# -- What goes down of the next version: encoded window by window, in the pass that makes it.
#
# θ' is stepped from the master, b is what the base holds; the difference is encoded, and b' = b + what it decodes to is
# what the version file gets. Codecs are fixed-rate and windows begin at tiles, so that each is encoded for itself.


class DeltaWriter:
    """One thread's: writes the parts of a delta, one at a time, through a buffer of fixed size.

    Args:
        downlink: its layout.
        fd: of the delta.
        scratch: of the thread.
    """

    def __init__(self, downlink: Downlink, fd: int, scratch: Scratch) -> None:
        self._downlink, self._fd = downlink, fd
        self._buffer = scratch.raw("delta", scratch.nbytes)
        self._hasher = blake3()
        self._part: Part
        self._begin = self._end = 0  # of what the buffer holds, in the delta

    def begin(self, index: int) -> None:
        """The part of this number comes next."""
        self._part, self._hasher = self._downlink.parts[index], blake3()
        self._begin = self._end = self._part.start

    def add(self, window: Window, values: Tensor, theta: Tensor | None) -> None:
        """Encode the next window of the part.

        Args:
            values: of the window [n]. Of parameters b, which becomes b'; else what the next version has.
            theta: θ' [n] of parameters, in the dtype of accumulation.
        """
        layout, at = self._downlink.layout, 0
        for extent in window.extents:
            piece = layout.piece(layout.by_name[extent.spec.name], extent.start, extent.stop)
            run, target = values[at : at + extent.numel], self._room(piece.offset, piece.nbytes)
            if theta is None:
                self._downlink.codecs[piece.segment.codec].encode_(run, target, extent.spec.dtype)
            else:
                self._downlink.encode_(piece.segment, theta[at : at + extent.numel], run, target)
            at += extent.numel

    def end(self) -> bytes:
        """The part is complete; returns its BLAKE3."""
        self._room(self._part.stop, 0)
        self._flush()
        return self._hasher.digest()

    def _room(self, offset: int, nbytes: int) -> Tensor:
        """Where bytes [offset, offset + nbytes) of the delta go; what is between them and the last ones is zero.

        Offsets in memory are as aligned as those in the file.
        """
        low = self._begin - self._begin % ALIGN_BYTES
        if offset + nbytes - low > len(self._buffer):
            self._flush()
            low = self._begin - self._begin % ALIGN_BYTES
            if offset + nbytes - low > len(self._buffer):  # a codec that makes more of few elements than they are
                self._buffer = torch.empty(offset + nbytes - low, dtype=torch.uint8)
        self._buffer[self._end - low : offset - low].zero_()
        self._end = offset + nbytes
        return self._buffer[offset - low : self._end - low]

    def _flush(self) -> None:
        shift = self._begin % ALIGN_BYTES
        data = bytes_of(self._buffer)[shift : shift + self._end - self._begin]
        self._hasher.update(data)
        failpoint("pass.delta")
        write_at(self._fd, data, self._begin)
        self._begin = self._end


MANY_UPDATES = 100
"""Fewer are reduced in about the time that it takes to hand a window from thread to thread."""
LEAST_ELEMENTS = 2**16
"""Of a window that is cut smaller to be shared: with shorter ones the calls take longer than what they do."""


def helpers_for(threads: int, parts: int, updates: int) -> int:
    """How many of a pass' threads reduce ahead, for each that has a part; 0 where every one has, or little to do.

    Where a reducer takes all rows together none is worth it, and each would need memory for as many rows.
    """
    helpers = threads // max(parts, 1)
    return helpers if helpers > 1 and updates >= MANY_UPDATES else 0


def elements_for(helpers: int, part_elements: int) -> int:
    """Of a window, so that each helper has one of the largest part; a quarter more, as a bias goes with its weight."""
    return max(LEAST_ELEMENTS, part_elements * 5 // (4 * helpers))


class Ahead:
    """The windows of one thread at a time, with what they were reduced to.

    Args:
        reduce_: brings the reduction of a window into a scratch; called by several threads, each with its own.
        scratch: of the thread itself, which reduces where it has no helpers.
        pool: the threads of helpers, shared.
        helpers: how many of them may work for this one; each needs memory.
        elements: of a scratch.
    """

    def __init__(
        self,
        reduce_: Callable[[Window, Scratch], None],
        scratch: Scratch,
        pool: Executor | None,
        helpers: int,
        elements: int,
    ) -> None:
        self._reduce, self._own, self._pool = reduce_, scratch, pool
        self._free = [Scratch(elements) for _ in range(helpers + 1)] if pool is not None else []

    def of(self, windows: Iterable[Window]) -> Iterator[tuple[Window, Scratch]]:
        """Each window in order, and the scratch that holds what it was reduced to until the next one is asked for.

        Raises:
            Exception: what reducing it has raised.
        """
        if self._pool is None:
            for window in windows:
                self._reduce(window, self._own)
                yield window, self._own
            return
        begun: deque[tuple[Window, Scratch, Future[None]]] = deque()
        coming = iter(windows)
        try:
            while self._begin(coming, begun, self._pool):
                window, scratch, reduced = begun.popleft()
                reduced.result()
                yield window, scratch
                self._free.append(scratch)
        finally:
            for _, _, reduced in begun:
                reduced.cancel()

    def _begin(
        self, coming: Iterator[Window], begun: deque[tuple[Window, Scratch, Future[None]]], pool: Executor
    ) -> bool:
        """Have as many windows reduced as there is memory for; whether any is left."""
        while self._free and (window := next(coming, None)) is not None:
            scratch = self._free.pop()
            begun.append((window, scratch, pool.submit(self._reduce, window, scratch)))
        return bool(begun)


__all__ = ["PassInputs", "PassOutputs", "PassResult", "UpdateSource", "run_pass"]

CHUNK_ELEMENTS = 2**18
"""1 MiB of fp32: what a window reads, reduces, steps and writes then stays in a core's cache."""

TOGETHER_ELEMENTS, ALL_TOGETHER_ELEMENTS = 2**17, 2**24
"""Of a row, and of all rows on all threads, where a reducer needs the rows of all updates together. With shorter rows
an operation is so short that the threads spend their time on handing the interpreter to each other; the second is at
most 64 MiB of fp32."""


def run_pass(
    inputs: PassInputs,
    outputs: PassOutputs,
    rule: OuterRule,
    reducers: Mapping[str, Reducer],
    codecs: Mapping[str, Codec],
    threads: int = 1,
    chunk_elements: int = CHUNK_ELEMENTS,
    on_progress: Callable[[int], None] | None = None,
    cancelled: threading.Event | None = None,
    tables: Tables | None = None,
) -> PassResult:
    """Write the next version and its outer state.

    Args:
        inputs: files and layouts to read.
        outputs: files to write.
        rule: the outer optimizer.
        reducers: by group, for floating point tensors.
        codecs: by name, every one that an update's layout names.
        threads: that do the work; the calling one waits, and those with a part that others reduce ahead for. torch's
            own threads are not used, nor their number changed.
        chunk_elements: of a window, at most; a multiple of 4,096.
        on_progress: told the bytes of the version done so far, from any thread, one at a time.
        cancelled: ends the pass early when it is set.
        tables: of these layouts, this rule and these codecs; who runs more than one pass keeps them.

    Raises:
        CancelledError: (concurrent.futures) `cancelled` was set; the outputs hold rubbish.
        Overflow: the next version would hold Inf or NaN; the outputs hold rubbish.
        StateCorrupt: an input ends early, or (`BaseDamaged`) the base is not what its digests say; the outputs hold
            rubbish.
        OSError: the disk is full, or fails.
        UsageError: no updates, or a weight that is not finite and above zero.
    """
    began = time.monotonic()
    tables = tables or Tables(rule.granularity, codecs, inputs.state_layout)
    parts, rows, threads = inputs.version_layout.parts, rows_at_once(inputs.updates, reducers), max(1, threads)
    helpers = helpers_for(threads, len(parts), len(inputs.updates)) if rows == 1 else 0
    if helpers:
        largest = max(sum(piece.numel for piece in part.pieces) for part in parts)
        chunk_elements = min(chunk_elements, elements_for(helpers, largest))
    if rows > 1:
        chunk_elements = min(chunk_elements, TOGETHER_ELEMENTS, ALL_TOGETHER_ELEMENTS // (rows * threads))
    tables.cut(max(chunk_elements // TILE, 1) * TILE, max(rows, 1))
    population = (inputs.population_weight, inputs.population_scale)
    updates = Updates(inputs.updates, reducers, Maximum(), codecs, tables.places, population)
    params = updates
    if inputs.reduced is not None:
        params = Updates([inputs.reduced], {PARAMS: WeightedMean()}, Maximum(), codecs, tables.places)
    work = _Pass(inputs, outputs, rule, updates, params, tables)
    work.on_progress = on_progress
    if rule.granularity == "tensor":
        run_jobs([None], 1, lambda: work.step_wholes, cancelled)
    if not helpers:
        run_jobs(parts, threads, work.member, cancelled)
        return work.finish(began)
    with ThreadPoolExecutor(helpers * len(parts), "atoll-ahead", stay_alone) as pool:
        work.pool, work.helpers = pool, helpers
        run_jobs(parts, len(parts), work.member, cancelled)
    return work.finish(began)


class _Pass:
    """What the threads of a pass share."""

    on_progress: Callable[[int], None] | None = None
    pool: ThreadPoolExecutor | None = None
    helpers = 0

    def __init__(
        self,
        inputs: PassInputs,
        outputs: PassOutputs,
        rule: OuterRule,
        updates: Updates,
        params: Updates,
        tables: Tables,
    ) -> None:
        self.inputs, self.outputs, self.rule, self.tables = inputs, outputs, rule, tables
        self.updates, self.params = updates, params
        self.wholes = Wholes(inputs.state_layout if rule.granularity == "chunk" else None, inputs.state_fd)
        parts = len(inputs.version_layout.parts)
        self.part_digests: list[bytes] = [b""] * parts
        self.state_digests: list[list[bytes]] = [[] for _ in range(parts)]
        self.delta_digests: list[bytes] = [b""] * parts
        self.base_digests: list[bytes] = [b""] * parts
        self.base_state_digests: list[list[bytes]] = [[] for _ in range(parts)]
        self.squares: list[float] = [0.0] * parts
        self._lock, self._done = threading.Lock(), 0

    def member(self) -> Callable[[Part], None]:
        return _Member(self).do_part

    def step_wholes(self, _job: None) -> None:
        scratch = Scratch(self.tables.scratch_elements)
        self.squares.append(step_whole(self.inputs, self.outputs, self.rule, self.params, self.tables, scratch))

    def updates_of(self, window: Window) -> Updates:
        return self.params if window.kind == "step" else self.updates

    def reduce_into(self, window: Window, scratch: Scratch) -> None:
        """Reduce a window, with zeros in the padding between its runs; of those that were stepped whole, nothing is."""
        if window.kind == "whole":
            return
        updates = self.updates_of(window)
        place, dtype = updates.place(window), accumulate_dtype(window.dtype)
        updates.reduce_(window, scratch.tensor("reduced", dtype, place.numel), scratch)
        view = scratch.view("reduced", place.numel * dtype.itemsize)
        for low, high in place.gaps:
            view[low * dtype.itemsize : high * dtype.itemsize] = bytes((high - low) * dtype.itemsize)

    def progress(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self.on_progress is not None:
                self.on_progress(self._done)

    def require_base(self) -> None:
        """Raise where what was read is not what it was when it was written."""
        inputs = self.inputs
        if inputs.base_digests is not None and tuple(self.base_digests) != inputs.base_digests:
            raise BaseDamaged("version")
        if inputs.base_state_digests and inputs.state_fd is not None and inputs.state_layout is not None:
            found = [digest for part in self.base_state_digests for digest in part]
            found.append(region_digest(inputs.state_fd, tail_region(inputs.state_layout), Scratch(TILE)))
            if tuple(found) != inputs.base_state_digests:
                raise BaseDamaged("outer state")

    def finish(self, began: float) -> PassResult:
        self.require_base()
        state_digests = [digest for part in self.state_digests for digest in part]
        if self.inputs.state_layout is not None and self.outputs.state_fd is not None:
            failpoint("pass.write")
            write_at(self.outputs.state_fd, memoryview(self.inputs.state_header), 0)
            self.wholes.write(self.outputs.state_fd)
            tail = tail_region(self.inputs.state_layout)
            state_digests.append(region_digest(self.outputs.state_fd, tail, Scratch(TILE)))
        return PassResult(
            part_digests=tuple(self.part_digests),
            state_digests=tuple(state_digests),
            digest=self.inputs.version_layout.update_digest(self.part_digests),
            grad_norm=math.sqrt(math.fsum(self.squares)) if all(map(math.isfinite, self.squares)) else math.inf,
            seconds=time.monotonic() - began,
            delta_digests=tuple(self.delta_digests) if self.outputs.delta_fd is not None else (),
        )


class BaseDamaged(StateCorrupt):
    """The disk has changed what the round starts from."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The {what} that the round starts from is not what was written: its disk has changed it.",
            "Look at the disk.",
        )


class _Member:
    """One thread of a pass: its scratch, those of its helpers, and its optimizer object."""

    def __init__(self, shared: _Pass) -> None:
        self._shared = shared
        elements = shared.tables.scratch_elements
        self._scratch = Scratch(elements)
        self._ahead = Ahead(shared.reduce_into, self._scratch, shared.pool, shared.helpers, elements)
        self._reduced = self._scratch  # where the reduction of the window at hand lies
        self._stepper: Stepper = shared.rule.stepper()
        self._delta: DeltaWriter | None = None
        if shared.inputs.downlink is not None and shared.outputs.delta_fd is not None:
            self._delta = DeltaWriter(shared.inputs.downlink, shared.outputs.delta_fd, self._scratch)

    def do_part(self, part: Part) -> None:
        """Write one part of the version and its runs of the state; hash both, and what was read of the base."""
        shared, hasher, base = self._shared, blake3(), blake3()
        columns: dict[Column, blake3] = {}
        before: dict[Column, blake3] = {}
        if self._delta is not None:
            self._delta.begin(part.index)
        first = part.pieces[0].offset if part.pieces else part.stop
        for at in range(part.start, first, self._scratch.nbytes):
            header = self._scratch.view("stored", min(self._scratch.nbytes, first - at))
            read_at(shared.inputs.base_fd, header, at)
            self._write(shared.outputs.version_fd, header, at)
            hasher.update(header)
            base.update(header)
        for window, reduced in self._ahead.of(shared.tables.windows.of(part)):
            failpoint("pass.chunk")
            self._reduced = reduced
            stored = self._scratch.view("stored", window.numel * torch_dtype(window.dtype).itemsize)
            read_at(shared.inputs.base_fd, stored, window.offset)
            base.update(stored)
            if window.kind == "whole" and self._delta is None:
                read_at(shared.outputs.version_fd, stored, window.offset)
            else:
                if window.kind == "whole":
                    self._go_down(window)
                elif window.kind == "step":
                    shared.squares[part.index] += self._step(window, before, columns)
                elif window.kind == "add":
                    self._add(window)
                else:
                    self._replace(window)
                self._write(shared.outputs.version_fd, stored, window.offset)
            values = self._scratch.tensor("stored", torch_dtype(window.dtype), window.numel)
            require_finite(window, values, shared.inputs.base_fd)
            hasher.update(stored)
        if self._delta is not None:
            shared.delta_digests[part.index] = self._delta.end()
        shared.part_digests[part.index] = hasher.digest()
        shared.state_digests[part.index] = [column.digest() for column in columns.values()]
        shared.base_digests[part.index] = base.digest()
        shared.base_state_digests[part.index] = [column.digest() for column in before.values()]
        shared.progress(part.nbytes)

    def _replace(self, window: Window) -> None:
        """Buffers: the reduction of raw values, cast to the version's dtype."""
        stored = self._scratch.tensor("stored", torch_dtype(window.dtype), window.numel)
        reduced, runs = self._reduction(window)
        if len(reduced) == len(stored):
            stored.copy_(reduced)
        else:
            for target, run in zip(torch.split(stored, window.sizes), runs, strict=True):
                target.copy_(run)
        if self._delta is not None:
            self._delta.add(window, stored, None)

    def _add(self, window: Window) -> None:
        """A group beside the model: v ← s·v + the reduction, where the group's reducer says s."""
        values = self._scratch.tensor("stored", torch_dtype(window.dtype), window.numel)
        _, runs = self._reduction(window)
        carry = self._shared.updates.carries[window.group]
        if carry != 1:
            values.mul_(carry)
        for target, run in zip(torch.split(values, window.sizes), runs, strict=True):
            target.add_(run)
        if self._delta is not None:
            self._delta.add(window, values, None)

    def _go_down(self, window: Window) -> None:
        """Parameters that were stepped as whole tensors: bring what the base has of them to what goes down."""
        shared, n = self._shared, window.numel
        assert self._delta is not None
        assert shared.outputs.state_fd is not None
        head = window.extents[0]
        entry = shared.tables.entries[head.spec.name][MASTER]
        dtype = torch_dtype(entry.spec.dtype)
        view = self._scratch.view(MASTER, n * dtype.itemsize)
        read_at(shared.outputs.state_fd, view, entry.offset + head.start * dtype.itemsize)
        values = self._scratch.tensor("stored", torch_dtype(window.dtype), n)
        self._delta.add(window, values, self._scratch.tensor(MASTER, dtype, n))

    def _step(self, window: Window, before_columns: dict[Column, blake3], columns: dict[Column, blake3]) -> float:
        """Parameters: one outer step along the reduced pseudo-gradient; returns its sum of squares.

        Args:
            before_columns: hashes of the state that is read. columns: of the one that is written.
        """
        shared, scratch = self._shared, self._scratch
        dtype, n = torch_dtype(window.dtype), window.numel
        kept = self._columns(window)
        values = scratch.tensor("stored", dtype, n)
        reduced, grads = self._reduction(window)
        squares = float(torch.dot(reduced, reduced))
        first_round = shared.inputs.state_layout is not None and shared.inputs.state_fd is None
        held: dict[str, Tensor] = {}
        for key, (column, offset, column_dtype) in kept.items():
            held[key] = scratch.tensor(f"state.{key}", column_dtype, n)
            if shared.inputs.state_fd is not None:
                view = scratch.view(f"state.{key}", n * column_dtype.itemsize)
                read_at(shared.inputs.state_fd, view, offset)
                before_columns.setdefault(column, blake3()).update(view)
        master = held.get(MASTER, values)
        if first_round and master is not values:
            master.copy_(values)
        split = {key: torch.split(column, window.sizes) for key, column in held.items() if key != MASTER}
        before = None if first_round else self._states(window, split)
        names = [extent.spec.name for extent in window.extents] if shared.rule.lrs else ()
        after = self._stepper.step_(torch.split(master, window.sizes), grads, before, names)
        self._keep(window, split, before, after)
        if self._delta is not None:
            self._delta.add(window, values, master)
        elif master is not values:
            values.copy_(master)
        if shared.outputs.state_fd is not None:
            for key, (column, offset, column_dtype) in kept.items():
                view = scratch.view(f"state.{key}", n * column_dtype.itemsize)
                self._write(shared.outputs.state_fd, view, offset)
                columns.setdefault(column, blake3()).update(view)
        return squares

    def _reduction(self, window: Window) -> tuple[Tensor, Sequence[Tensor]]:
        """What the window was reduced to, and the runs of it."""
        place = self._shared.updates_of(window).place(window)
        reduced = self._reduced.tensor("reduced", accumulate_dtype(window.dtype), place.numel)
        return reduced, torch.split(reduced, place.sizes)[::2]

    def _columns(self, window: Window) -> dict[str, tuple[Column, int, torch.dtype]]:
        """key → (column, offset of the window's first element in the state file, dtype), for what is cut in runs."""
        head = window.extents[0]
        return {
            key: (
                (key, segment.spec.dtype),
                segment.offset + head.start * segment.spec.item_bytes,
                torch_dtype(segment.spec.dtype),
            )
            for key, segment in self._shared.tables.entries.get(head.spec.name, {}).items()
            if segment.spec.group == RUNS
        }

    def _states(self, window: Window, split: Mapping[str, Sequence[Tensor]]) -> list[State]:
        wholes = self._shared.wholes
        return [
            {key: runs[index] for key, runs in split.items()} | wholes.clones(extent.spec.name)
            for index, extent in enumerate(window.extents)
        ]

    def _keep(
        self,
        window: Window,
        split: Mapping[str, Sequence[Tensor]],
        before: list[State] | None,
        after: list[State],
    ) -> None:
        """Bring what the step returned into the scratch, and the wholes (once per tensor) to the pass."""
        for index, extent in enumerate(window.extents):
            for key, value in after[index].items():
                if key in split:
                    if before is None or value is not before[index][key]:
                        split[key][index].copy_(value)
                elif extent.start == 0:
                    self._shared.wholes.set(extent.spec.name, key, value)

    @staticmethod
    def _write(fd: int, view: memoryview, offset: int) -> None:
        failpoint("pass.write")
        write_at(fd, view, offset)
