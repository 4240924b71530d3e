"""Make the next version of a fragment from a closed round, in one pass over the files and in fixed memory.

The pass also writes the outer state, the state of the outer optimizer after this version. Each part of the version is
made by one thread. For every byte run of the part (a range of elements, see `tensors/byte_runs`), the thread does this:

    g ← reduce(dec(u_1) … dec(u_k))      u_i: the updates, ordered by site; dec: decode with the codec, in at least
                                         fp32; the weights of the k updates are normalised in fp64
    θ, s ← outer step of θ along g       θ: the version's values, or their fp32 master in the state file; s: the state
    write θ and s                        θ is cast to the version's dtype; both are hashed while they are written

    kind    tensors of a version                                 next value
    step    parameters                                           θ
    whole   parameters of optimizers that need whole tensors     θ, stepped before the parts (`step_whole_tensors`)
    reduce  buffers                                              the reduction of their values, by their rule
    add     the algorithm's own groups; buffers of rule `sum`    scale · value + the reduction; the algorithm's values
                                                                 count as zero where its state begins anew
    keep    tensors that each site keeps for itself              the value

A parameter that no site trains stays as it is, whatever the outer optimizer does (`aggregation/untrained_parameters`).

If versions are downloaded through a codec C, θ is the master in the state file. The version then holds the values that
workers have after decoding, b' = b + dec(C(θ − b)); see `codecs/version_difference`.

The result depends on the inputs alone, not on the size of byte runs or the number of threads. After a crash the pass
runs again. The base is hashed while it is read, so that a changed bit on disk is found before the version is committed.
The pass does not fsync the files; its caller does.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from blake3 import blake3
from torch import Tensor

from atoll.aggregation.check_arriving_parts import norm_of, require_finite
from atoll.aggregation.decode_updates import Updates, read_at, rows_at_once
from atoll.aggregation.outer_state import WHOLES, Column, tail_region
from atoll.aggregation.plan import AggregationPlan, FragmentPlan
from atoll.aggregation.untrained_parameters import untrained
from atoll.blobs.model_file import MASTER
from atoll.codecs.version_difference import DifferenceWriter
from atoll.errors import StateCorrupt
from atoll.outer_optimizers.torch_optimizer import OuterRule, OuterState
from atoll.posix import write_at
from atoll.protocol.values import FrozenRound
from atoll.reducers.base import RoundFacts
from atoll.reducers.means import WeightedMean
from atoll.runtime import failpoint, run_jobs
from atoll.store.file_slots import region_digest
from atoll.store.versions import VersionDigests
from atoll.tensors.byte_runs import ByteRun, joined
from atoll.tensors.chunks import Scratch, add_, bytes_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import TILE, Layout, Part, Segment
from atoll.tensors.schema import PARAMS, TensorSpec

RUN_ELEMENTS = 2**18
"""Maximum number of elements in a byte run: 1 MiB of fp32, so that the data of a run stays in a core's cache."""

ROW_ELEMENTS, ALL_ROWS_ELEMENTS = 2**17, 2**24
"""Limits for reducers such as the median, which need the elements of all updates at once (one row for each update):
maximum elements of one row, and of all rows of all threads together (64 MiB of fp32). With shorter rows, threads would
spend their time waiting for the GIL."""


@dataclass(frozen=True)
class UpdateInput:
    """The file of an encoded update: as the site sent it, or as the server's filters have changed it.

    Attributes:
        fd: descriptor of the file.
        norm: L2 norm of the `params` in the file; None: use the norm in the update's record.
    """

    fd: int
    norm: float | None = None


@dataclass(frozen=True)
class RoundFiles:
    """The open input files of a pass.

    Attributes:
        base_fd: file of the base, the version that the round starts from.
        state_fd: file of the base's outer state (the state of the outer optimizer); None in the first round.
        updates: ticket → file of its update.
        base_digests: expected `part_digests` of the base; None: do not check.
        base_state_digests: expected `state_digests` of the base; None: do not check.
        reduced_fd: file with the pseudo-gradient of `params` from a user's aggregator; None without an aggregator. If
            given, the updates are used only for the other groups of tensors.
    """

    base_fd: int
    state_fd: int | None
    updates: Mapping[int, UpdateInput]
    base_digests: tuple[bytes, ...] | None = None
    base_state_digests: tuple[bytes, ...] | None = None
    reduced_fd: int | None = None


@dataclass(frozen=True)
class NextFiles:
    """Descriptors of a pass's output files: the next version, its outer state, its difference from the base (delta).

    Each file has at least the size of its layout, and nothing else reads or writes it during the pass. None means that
    the file is not needed.
    """

    version: int
    state: int | None = None
    delta: int | None = None


@dataclass(frozen=True, kw_only=True)
class ClosedRound(VersionDigests):
    """Result of a pass: digests of the written files, the gradient norm and the time.

    `outer_state.version_regions`, `outer_state.state_regions` and `Downlink.parts` give the bytes that each digest
    covers.

    Attributes:
        grad_norm: L2 norm of the reduced pseudo-gradient, precise to six digits; infinite on overflow. For display.
        seconds: wall time of the pass.
    """

    grad_norm: float
    seconds: float


class BaseDamaged(StateCorrupt):
    """Raised if the file of the base or of its outer state has other digests than when it was written."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"The {what} that the round starts from is damaged: its digest differs.",
            "Check the disk.",
        )


def make_version(
    plan: AggregationPlan,
    frozen: FrozenRound,
    files: RoundFiles,
    out: NextFiles,
    cancelled: threading.Event | None = None,
    *,
    on_progress: Callable[[int], None] | None = None,
    run_elements: int = RUN_ELEMENTS,
) -> ClosedRound:
    """Reduce a round's updates in their order, take the outer step, and write the next version of a fragment.

    Args:
        plan: layouts, codecs, reducers, outer optimizer and number of threads. torch's own threads are not used, and
            their number is not changed.
        frozen: record of the round: fragment, and updates with their weights.
        files: the input files.
        out: the output files. After an error their content is undefined.
        cancelled: event that ends the pass early.
        on_progress: callback with the number of bytes of the version that are written so far. It is called from several
            threads, but never by two at the same time.
        run_elements: maximum number of elements in a byte run; a multiple of 4,096.

    Raises:
        CancelledError: (concurrent.futures) `cancelled` was set.
        Overflow: the next version would contain Inf or NaN.
        StateCorrupt: an input file ends early, or the base does not match its digests (`BaseDamaged`).
        OSError: the disk is full, or fails.
        UsageError: there are no updates, or a weight is not finite or not positive.
    """
    began = time.monotonic()
    work = _Pass(plan, frozen, files, out, on_progress)
    rows = rows_at_once(len(frozen.updates), plan.reducers)
    if rows > 1:
        run_elements = min(run_elements, ROW_ELEMENTS, ALL_ROWS_ELEMENTS // (rows * plan.threads))
    work.planned.version_runs.limit(max(run_elements // TILE, 1) * TILE)
    run_jobs([None], 1, lambda: work.look_ahead, cancelled)
    if plan.rule.granularity == "tensor":
        run_jobs([None], 1, lambda: work.step_whole, cancelled)
    run_jobs(work.planned.version.parts, plan.threads, lambda: _Thread(work, rows).make_part, cancelled)
    return work.finish(began)


_File = tuple[str, Column | None]
"""A file of the pass, or a column of one: ("base", "version" or "delta", None), ("base state" or "state", column)."""

Kind = Literal["step", "whole", "reduce", "add", "keep"]


def kind_of(spec: TensorSpec, granularity: str) -> Kind:
    """Return how the next value of a tensor is computed: a kind from the table in this module's docstring.

    Args:
        spec: the tensor.
        granularity: `OuterRule.granularity`: whether the outer optimizer can step a tensor in pieces ("chunk"), or
            needs it whole ("tensor").
    """
    if spec.is_kept:
        return "keep"
    if spec.is_extra or (spec.is_buffer and spec.rule == "sum"):
        return "add"
    if spec.group != PARAMS or not spec.is_float:
        return "reduce"
    return "step" if granularity == "chunk" else "whole"


class _Pass:
    """What the threads of one pass share: inputs, outputs and digests."""

    def __init__(
        self,
        plan: AggregationPlan,
        frozen: FrozenRound,
        files: RoundFiles,
        out: NextFiles,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.files, self.out, self.rule, self.from_zero = files, out, plan.rule, frozen.from_zero
        self.planned: FragmentPlan = plan.fragments[frozen.fragment]
        accepted = [(update, files.updates[update.ticket]) for update in frozen.updates]
        facts = RoundFacts(
            [update.weight for update in frozen.updates],
            [update.norm if file.norm is None else file.norm for update, file in accepted],
            [update.steps for update in frozen.updates],
            frozen.population_weight,
            frozen.population_scale,
        )
        scales = [update.scale for update in frozen.updates]
        runs = self.planned.update_runs
        self.updates = Updates([file.fd for _, file in accepted], runs, plan.codecs, plan.reducers, facts, scales)
        self.params = self.updates
        if files.reduced_fd is not None:
            single = RoundFacts([1.0], [0.0], [1])
            mean, runs = {PARAMS: WeightedMean()}, self.planned.reduced_runs
            self.params = Updates([files.reduced_fd], runs, plan.codecs, mean, single, [1.0])
        state = self.planned.state_layout
        self.whole = WholeState(state if plan.rule.granularity == "chunk" else None, files.state_fd)
        self.is_first = state is not None and files.state_fd is None
        parts = len(self.planned.version.parts)
        self.squares = [0.0] * parts
        self.digests: list[dict[_File, bytes]] = [{} for _ in range(parts)]
        self._on_progress, self._lock, self._done = on_progress, threading.Lock(), 0
        self.untrained: frozenset[str] = frozenset()

    def look_ahead(self, _job: None) -> None:
        """Find what depends on whole tensors: the parameters that no site trains, and the buffers that are flags."""
        self.updates.find_flags(self.planned.version_runs)
        planned, state_fd = self.planned, self.files.state_fd
        self.untrained = untrained(self.rule, planned.version_runs, self.params, planned.entries, state_fd)

    def step_whole(self, _job: None) -> None:
        self.squares.append(
            step_whole_tensors(
                self.planned,
                self.rule,
                self.params,
                (self.files.base_fd, self.files.state_fd),
                (self.out.version, self.out.state),
                self.untrained,
            )
        )

    def progress(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            if self._on_progress is not None:
                self._on_progress(self._done)

    def finish(self, began: float) -> ClosedRound:
        out, state = self.out, self.planned.state
        self._require_base()
        state_digests = self._digests("state")
        if state is not None and out.state is not None:
            header, layout = state
            failpoint("pass.write")
            write_at(out.state, memoryview(header), 0)
            self.whole.write(out.state)
            state_digests += (region_digest(out.state, tail_region(layout)),)
        part_digests, delta_digests, downlink = self._digests("version"), self._digests("delta"), self.planned.downlink
        return ClosedRound(
            part_digests=part_digests,
            state_digests=state_digests,
            digest=self.planned.version.blob_id(part_digests),
            grad_norm=norm_of(self.squares),
            seconds=time.monotonic() - began,
            delta_digest=downlink.digest(delta_digests) if downlink else "",
            delta_digests=delta_digests,
        )

    def _digests(self, file: str) -> tuple[bytes, ...]:
        """Return the digests of a file, in the order of the parts.

        An outer state has one digest for each part and column; a column is one kind of state, such as the momentum.

        Args:
            file: kind of file: "base", "base state", "version", "state" or "delta".
        """
        return tuple(digest for part in self.digests for key, digest in part.items() if key[0] == file)

    def _require_base(self) -> None:
        """Check that the base version and its outer state have their expected digests.

        Raises:
            BaseDamaged: a digest differs.
        """
        files, state = self.files, self.planned.state_layout
        if files.base_digests is not None and self._digests("base") != files.base_digests:
            raise BaseDamaged("version")
        if files.base_state_digests and files.state_fd is not None and state is not None:
            tail = region_digest(files.state_fd, tail_region(state))
            if (*self._digests("base state"), tail) != files.base_state_digests:
                raise BaseDamaged("outer state")


class _Thread:
    """A thread that makes parts of the next version. It has its own buffers and its own outer optimizer object."""

    def __init__(self, work: _Pass, rows: int) -> None:
        self._work, self._stepper = work, work.rule.stepper()
        self._scratch = Scratch(work.planned.version_runs.max_elements * rows)
        self._hashes: defaultdict[_File, blake3]
        self._delta = None
        if work.planned.downlink is not None and work.out.delta is not None:
            self._delta = DifferenceWriter(work.planned.downlink, work.out.delta, self._scratch)

    def make_part(self, part: Part) -> None:
        """Write one part of the version, and the outer state and the delta of the same elements.

        Hash the written bytes.
        """
        work, scratch, runs = self._work, self._scratch, self._work.planned.version_runs
        self._hashes = defaultdict(blake3, {("base", None): blake3(), ("version", None): blake3()})
        if self._delta is not None:
            self._delta.begin(part)
        self._copy_header(part)
        for run in runs.of(part):
            failpoint("pass.chunk")
            stored = scratch.view("stored", run.stop - run.start)
            read_at(work.files.base_fd, stored, run.start)
            self._hashes["base", None].update(stored)
            values, theta = scratch.tensor("stored", torch_dtype(run.spec.dtype), run.numel), None
            kind = kind_of(run.spec, work.rule.granularity)
            if kind == "step":
                theta = self._step(run, values, part)
            elif kind == "whole":
                theta = self._stepped(run, stored)
            elif kind != "keep":
                self._reduce_(run, kind, values)
            if self._delta is not None:
                self._delta.add(run, values, theta)
            elif theta is not None and theta is not values:
                values.copy_(theta)
            if kind != "whole" or self._delta is not None:
                self._write(work.out.version, stored, run.start)
            require_finite(run, values, work.files.base_fd)
            self._hashes["version", None].update(stored)
        work.digests[part.index] = {file: hasher.digest() for file, hasher in self._hashes.items()}
        if self._delta is not None:
            work.digests[part.index]["delta", None] = self._delta.end()
        work.progress(part.nbytes)

    def _copy_header(self, part: Part) -> None:
        """If the part has bytes of the header, copy them from the base: all versions have the same header."""
        files, nbytes = self._work.files, self._scratch.nbytes
        first = part.pieces[0].offset if part.pieces else part.stop
        for offset in range(part.start, first, nbytes):
            header = self._scratch.view("stored", min(nbytes, first - offset))
            read_at(files.base_fd, header, offset)
            self._write(self._work.out.version, header, offset)
            self._hashes["base", None].update(header)
            self._hashes["version", None].update(header)

    def _reduce_(self, run: ByteRun, kind: Kind, values: Tensor) -> None:
        """Compute the next values of tensors that are not parameters: v ← g, or for kind `add`, v ← scale · v + g.

        g is the reduction of the updates' values.

        Args:
            run: the byte run, a range of elements that is processed at once.
            kind: kind of its tensors.
            values: values v of the base, [n]; overwritten.
        """
        updates = self._work.updates
        g, pieces = updates.reduce(run, self._scratch)
        if kind == "add":
            scale = updates.carries[run.spec.group]
            if run.spec.is_extra and self._work.from_zero:
                values.zero_()
            elif scale != 1:
                values.mul_(scale)
            for value, piece in zip(run.split(values), pieces, strict=True):
                add_(value, piece)
        elif len(g) == len(values):
            values.copy_(g)
        else:
            for value, piece in zip(run.split(values), pieces, strict=True):
                value.copy_(piece)

    def _step(self, run: ByteRun, values: Tensor, part: Part) -> Tensor:
        """Do the outer step for a byte run of parameters, write the outer state, and return the new parameters.

        Args:
            run: the byte run, a range of elements that is processed at once.
            values: values of the base, [n]. If the outer state has no fp32 masters of them, they are stepped in place.
            part: part of the version that the run belongs to.

        Returns:
            The parameters after the step, [n], in the accumulation dtype (at least fp32).
        """
        work, state = self._work, self._work.planned.columns(run)
        g, gradients = work.params.reduce(run, self._scratch)
        work.squares[part.index] += float(torch.dot(g, g))
        s = {key: self._scratch.tensor(f"state.{key}", dtype, run.numel) for key, (_, _, dtype) in state.items()}
        if work.files.state_fd is not None:
            for key, (column, offset, dtype) in state.items():
                view = self._scratch.view(f"state.{key}", run.numel * dtype.itemsize)
                read_at(work.files.state_fd, view, offset)
                self._hashes["base state", column].update(view)
        theta = s.pop(MASTER, values)
        if work.is_first and theta is not values:
            theta.copy_(values)
        split = {key: run.split(column) for key, column in s.items()}
        names = [piece.segment.spec.name for piece in run.pieces]
        before: list[OuterState] | None = None
        if not work.is_first:
            before = [
                {key: pieces[index] for key, pieces in split.items()} | work.whole.clones(name)
                for index, name in enumerate(names)
            ]
        # One by one, not as one vector: torch's fused steps round the last elements of a tensor, which fill no vector
        # register, differently from the others (docs/decisions/0037).
        parameters = run.split(theta)
        with _unmoved(parameters, names, work.untrained):
            after = self._stepper.step_(parameters, gradients, before, names if work.rule.lrs else ())
        for index, piece in enumerate(run.pieces):
            for key, value in after[index].items():
                if key in split:
                    if before is None or value is not before[index][key]:  # else it was changed in place
                        split[key][index].copy_(value)
                elif piece.start == 0:  # a value of the whole tensor (`step`) is taken from its first byte run only
                    work.whole.set(names[index], key, value)
        if work.out.state is not None:
            for key, (column, offset, dtype) in state.items():
                view = self._scratch.view(f"state.{key}", run.numel * dtype.itemsize)
                self._write(work.out.state, view, offset)
                self._hashes["state", column].update(view)
        return theta

    def _stepped(self, run: ByteRun, stored: memoryview) -> Tensor | None:
        """Read the elements of a byte run from the files that `step_whole_tensors` has written before.

        Args:
            run: the byte run, a range of elements that is processed at once.
            stored: bytes of the base. If the pass writes no delta, they are overwritten with the next version's bytes.

        Returns:
            If the pass writes a delta, the fp32 masters of the parameters after the step, [n]; else None.
        """
        work = self._work
        if self._delta is None:
            read_at(work.out.version, stored, run.start)
            return None
        assert work.out.state is not None
        head = run.pieces[0]
        entry = work.planned.entries[head.segment.spec.name][MASTER]
        dtype = torch_dtype(entry.spec.dtype)
        view = self._scratch.view(MASTER, run.numel * dtype.itemsize)
        read_at(work.out.state, view, entry.offset + head.start * dtype.itemsize)
        return self._scratch.tensor(MASTER, dtype, run.numel)

    @staticmethod
    def _write(fd: int, view: memoryview, offset: int) -> None:
        failpoint("pass.write")
        write_at(fd, view, offset)


# -- outer state with one value per tensor, and optimizers that need whole tensors


class WholeState:
    """The optimizer state that has one value per tensor, such as `step`, before and after a round. Kept in memory.

    Args:
        layout: layout of the state file; None if there is no state file, or if the optimizer steps whole tensors.
        fd: the state file from before the round; None in the first round.
    """

    def __init__(self, layout: Layout | None, fd: int | None) -> None:
        segments = [segment for segment in layout.segments if segment.spec.group == WHOLES] if layout else []
        self._before: dict[str, OuterState] = {}
        self._after: dict[str, OuterState] = {}
        self._ranges: list[tuple[int, Tensor]] = []
        for low, nbytes in joined((segment.offset, segment.nbytes) for segment in segments):
            old, new = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
            if fd is not None:
                read_at(fd, bytes_of(old), low)
                new.copy_(old)
            self._ranges.append((low, new))
            for segment in segments:
                if low <= segment.offset < low + nbytes:
                    tensor, _, key = segment.spec.name.rpartition(".")
                    span = slice(segment.offset - low, segment.offset - low + segment.nbytes)
                    dtype, shape = torch_dtype(segment.spec.dtype), segment.spec.shape
                    self._before.setdefault(tensor, {})[key] = old[span].view(dtype).view(shape)
                    self._after.setdefault(tensor, {})[key] = new[span].view(dtype).view(shape)

    def clones(self, tensor: str) -> OuterState:
        """Return a copy of a tensor's optimizer state before the round: key (such as `step`) → value."""
        return {key: value.clone() for key, value in self._before.get(tensor, {}).items()}

    def set(self, tensor: str, key: str, value: Tensor) -> None:
        """Keep a new value of a tensor's optimizer state in memory, until `write` writes it.

        Args:
            tensor: name of the tensor.
            key: name of the value in the optimizer's state of this tensor, such as `step`.
            value: the new value.
        """
        self._after[tensor][key].copy_(value)

    def write(self, fd: int) -> None:
        """Write the new values of all tensors to the state file of the next version."""
        for offset, values in self._ranges:
            write_at(fd, bytes_of(values), offset)


@contextmanager
def _unmoved(parameters: Sequence[Tensor], names: Sequence[str], untrained: Collection[str]) -> Iterator[None]:
    """During a step, replace the values of the parameters that no site trains by zeros.

    So a weight decay neither moves them nor leaves a trace in their outer state.
    """
    kept = [(each, each.clone()) for each, name in zip(parameters, names, strict=True) if name in untrained]
    for parameter, _ in kept:
        parameter.zero_()
    yield
    for parameter, values in kept:
        parameter.copy_(values)


def step_whole_tensors(
    planned: FragmentPlan,
    rule: OuterRule,
    updates: Updates,
    base: tuple[int, int | None],
    out: tuple[int, int | None],
    untrained: Collection[str] = (),
) -> float:
    """Do the outer step for every parameter of a version, one whole tensor at a time, and write the results.

    The results are the parameters and the outer state. If versions are downloaded through a codec, only the outer state
    is written; it contains the parameters in full precision (masters), from which the version is made later.

    Args:
        planned: layouts of the fragment.
        rule: the outer optimizer.
        updates: the updates of the round.
        base: files to read: the base version and its outer state, or None if there is no state.
        out: files to write: the next version and its outer state, or None if there is no state.
        untrained: names of the parameters that do not move, because no site trains them.

    Returns:
        The sum of squares of the reduced pseudo-gradient.
    """
    runs, stepper, squares = planned.version_runs, rule.stepper(), 0.0
    scratch = Scratch(runs.max_elements)
    for segment in planned.version.segments:
        spec = segment.spec
        if not (spec.numel and spec.is_stepped):
            continue
        failpoint("pass.chunk")
        values, state = _read(base[0], segment), planned.entries.get(spec.name, {})
        before = None if base[1] is None else {key: _read(base[1], entry) for key, entry in state.items()}
        theta = before.pop(MASTER) if before and MASTER in before else values.to(accumulate_dtype(spec.dtype))
        g = torch.empty(spec.numel, dtype=theta.dtype)
        for start in range(0, spec.numel, runs.max_elements):
            stop = min(start + runs.max_elements, spec.numel)
            g[start:stop].copy_(updates.reduce(runs.run(segment, start, stop), scratch)[0])
        squares += float(torch.dot(g, g))
        states = None if before is None else [before]
        with _unmoved([theta], [spec.name], untrained):
            (after,) = stepper.step_([theta], [g.view(spec.shape)], states, [spec.name])
        failpoint("pass.write")
        if planned.downlink is None:  # otherwise `make_version` makes the version from the masters, part by part
            _write(out[0], segment, values.copy_(theta))
        for key, entry in state.items():
            assert out[1] is not None
            _write(out[1], entry, theta if key == MASTER else after[key])
    return squares


def _read(fd: int, segment: Segment) -> Tensor:
    stored = torch.empty(segment.nbytes, dtype=torch.uint8)
    read_at(fd, bytes_of(stored), segment.offset)
    return stored.view(torch_dtype(segment.spec.dtype)).view(segment.spec.shape)


def _write(fd: int, segment: Segment, value: Tensor) -> None:
    write_at(fd, bytes_of(value.contiguous()), segment.offset)
