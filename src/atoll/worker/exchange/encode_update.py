"""Encode the result of local training as an update, and write it piece by piece into the outbox file.

For each parameter, the update contains the pseudo-gradient `base − local`, computed on the parameter's device. The
model's buffers (`nn.Module.buffers()`) are sent as they are; those with the rule `sum` as local − base. This needs a
few blocks of memory of fixed size, whatever the model's size.

The sections of this file, in order: a site's filters (`Filtered`, `AnswerFilters`), warnings about updates that are
zero (`UpdateWarnings`), the encoding itself (`UpdateFormer`), and one fragment at one site (`LocalFragment`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from blake3 import blake3
from torch import Tensor, nn

from atoll.algorithms.base import ChangeReader, ElementReader, LocalRule
from atoll.codecs import build_codecs, encoded_layout
from atoll.codecs.base import Codec
from atoll.codecs.version_difference import Downlink
from atoll.errors import SchemaMismatch, UsageError
from atoll.filters.base import About, BadFilter, ByTask, Chain, Filter, filtered, for_tasks
from atoll.format_text import number_of
from atoll.protocol import messages
from atoll.protocol.messages import Report, Ticket
from atoll.runtime import single_thread
from atoll.tensors.byte_runs import ByteRun, RunTable
from atoll.tensors.chunks import CHUNK_ELEMENTS, WIDEST_BYTES, AnyTensors, bytes_of, moved, run_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import ALIGN_BYTES, Layout, Part, Piece, version_layout
from atoll.tensors.module_tensors import Tensors, put_, state_of
from atoll.tensors.payload import Packed
from atoll.tensors.schema import FIRST, PARAMS, Schema, extra_name
from atoll.worker.exchange.base_and_outbox import TensorFile, name_of
from atoll.worker.exchange.local_state import AlgorithmState, KeptTensors, LocalState, Owner, Residuals
from atoll.worker.exchange.script_state import ScriptState
from atoll.worker.log_lines import LOG, error_text

Shapes = Mapping[str, tuple[int, ...]]
"""Name of a tensor → its shape."""

# -- A site's filters: between the model and the outbox, or between an answer to a task and its file. Each range of
# elements passes through all filters in their order.


T = TypeVar("T")


class Filtered:
    """The values of one update after the site's filters, which may change or drop values before they leave the site.

    Args:
        filters: the filters, in the order in which they are applied.
        base: the version that the site trained from.
        tensors: the model's own tensors, by name; not changed.
        about: the information about the update that filters get: site, round, weight, steps and metrics.
        model: names of all tensors of the model, if the update contains only one of the model's fragments; else empty.

    Raises:
        UsageError: a filter's `begin` failed; the message names the filter.
    """

    def __init__(
        self,
        filters: Sequence[Filter],
        base: TensorFile,
        tensors: AnyTensors,
        about: About,
        model: Collection[str] = (),
    ) -> None:
        self._base, self._tensors = base, tensors
        sent = [each.spec for each in base.layout.segments if not each.spec.is_extra and not each.spec.is_kept]
        specs = {spec.name: spec for spec in sent}
        raw = partial(change_of, base, tensors)  # a bound method would make a reference cycle that keeps the model
        self._chain = _as_usage_error(lambda: Chain(filters, specs, about, raw, model=model))

    def sends(self, name: str) -> bool:
        """Return whether this tensor is sent, because every filter keeps it."""
        return self._chain.sends(name)

    def change(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a float tensor's base − local after the filters; zeros if a filter drops it.

        Raises:
            UsageError: a filter breaks its contract; the message names the filter and the tensor.
        """
        return _as_usage_error(partial(self._chain.change, name, start, stop))

    def change_or_none(self, name: str, start: int, stop: int) -> Tensor | None:
        """Return what `change` returns; None if a filter drops the tensor."""
        return self.change(name, start, stop) if self.sends(name) else None

    def value(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a buffer after the filters; the base's elements if a filter drops it.

        Raises:
            UsageError: a filter breaks its contract; the message names the filter and the tensor.
        """
        if not self.sends(name):
            return self._base.values_of(name, start, stop)
        local = run_of(self._tensors[name], start, stop).cpu()
        if not self._chain.specs[name].is_float:
            return local
        removed = _as_usage_error(partial(self._chain.removed, name, start, stop))
        return removed.add_(local)  # bit-identical to `local` if no filter changed the value


def change_of(base: TensorFile, tensors: AnyTensors, name: str, start: int, stop: int) -> Tensor:
    """Return base − local before any filter, for elements [start, stop) of a tensor, as a new CPU tensor.

    A buffer may contain Inf. There, the change is 0, so that filters can compute with it.
    """
    spec = base.layout.by_name[name].spec
    wide = accumulate_dtype(spec.dtype)
    values = base.values_of(name, start, stop).to(wide).sub_(run_of(tensors[name], start, stop).to("cpu", wide))
    return values.nan_to_num_(0, 0, 0) if spec.is_buffer else values


class AnswerFilters:
    """The filters that are applied to a site's answers to tasks before they are sent.

    Args:
        filters: the filters for all tasks, or a mapping from task name to filters.
        site: the site's name.

    Raises:
        UsageError: an entry of `filters` is not a filter.
    """

    def __init__(self, filters: ByTask, site: str) -> None:
        self._entries, self._site = for_tasks(filters), site
        self._lock = threading.Lock()  # filters keep state from the beginning of an answer to its end

    @contextmanager
    def applied(self, packed: Packed, task: str) -> Iterator[Packed]:
        """Yield an answer with the filters for `task` applied. A tensor is filtered when the `with` block reads it.

        Args:
            packed: the answer before the filters.
            task: the task's name.

        Raises:
            UsageError: a filter failed, perhaps only while the block reads a tensor. The message names filter, site,
                task and tensor.
        """
        filters = [each for each, tasks in self._entries if not tasks or task in tasks]
        with self._lock:
            what = f"The answer of site {self._site} to task {task!r} was not sent"
            yield filtered(packed, filters, About(self._site, task=task), what)


def _as_usage_error(call: Callable[[], T]) -> T:
    try:
        return call()
    except BadFilter as error:
        if error.raised:
            raise UsageError(
                f"The filter {error}. The update was not sent.",
                "Correct the filter (its traceback is above), and start this site again.",
            ) from error.__cause__
        raise UsageError(
            f"The filter {error}.",
            "The update was not sent. The filter must return as many elements as it gets, in the same dtype.",
        ) from None


# -- Warnings about updates that are zero, or that become zero when they are encoded.


MOST = 0.99
"""Share of the norm of an update's change that encoding may lose without a warning."""
PATIENCE = 3
"""With error feedback: a warning is logged once this many updates in a row have lost their whole change."""


class UpdateWarnings:
    """Warns about updates without a change, and if encoding loses the change. One object is told of all updates.

    Error feedback sends later what encoding loses, so then an update counts as lost only if nothing of it arrives.

    Attributes:
        site: the site's name; in a simulation, the name of the site that the process is now training.

    Args:
        site: the site's name.
        codec: the codec of the parameters.
        schema: the run's schema: names, shapes and dtypes of the model's tensors.
    """

    def __init__(self, site: str, codec: Codec, schema: Schema) -> None:
        self.site, self._codec = site, codec
        self._narrow = sorted({spec.dtype for spec in schema.tensors if spec.dtype in ("BF16", "F16")})
        self._lost_in_a_row = 0
        self._told_lost = ""

    def about(self, is_zero: bool, steps: int, *, filters: bool, lost: float = 0.0) -> list[str]:
        """Log a warning if an update is all zero; also, once per process, if encoding has lost it.

        Args:
            is_zero: whether the pseudo-gradient was all zero before it was encoded.
            steps: number of local steps in the update; 0 if not known.
            filters: whether the pseudo-gradient passed through filters.
            lost: the share of the norm of the update's change that encoding lost.

        Returns:
            The current warnings, to be shown in the server's status. A warning about an all-zero update lasts until the
            next update. A warning about lost changes stays.
        """
        told_zero = self._zero(steps, filters) if is_zero else ""
        if told_zero:
            LOG.warning("%s: %s", self.site, told_zero)
        self._lost_in_a_row = self._lost_in_a_row + 1 if lost >= most_lost(self._codec) else 0
        if not self._told_lost and self._lost_in_a_row == (PATIENCE if self._codec.feedback else 1):
            self._told_lost = self._lost(lost)
            LOG.warning("%s: %s", self.site, self._told_lost)
        return [error_text(text) for text in (told_zero, self._told_lost) if text]

    def _zero(self, steps: int, filters: bool) -> str:
        text = f"the update is all zero{' after ' + number_of(steps, 'step') if steps else ''}"
        if filters:
            text += " (with this site's filters applied)"
        text += ". Check that the optimizer has this model's parameters, and a learning rate above zero."
        if self._narrow:
            text += (
                f" {' and '.join(self._narrow)} weights do not change if a step is smaller than about 1/256 "
                "(F16: 1/2048) of the weight: train in fp32, with autocast for speed."
            )
        return text

    def _lost(self, lost: float) -> str:
        rounds = f", {PATIENCE} times in a row" if self._codec.feedback else ""
        return (
            f"encoding as {self._codec.name} loses {100 * lost:.3g} % of the change that training made{rounds}. The "
            "change is too small for this codec. Use more local steps or a larger learning rate, or set "
            "aggregation.upload_codec.name = 'none'."
        )


def most_lost(codec: Codec) -> float:
    """Return the share of the norm of an update's change from which on the change counts as lost."""
    return 1.0 if codec.feedback else MOST


_BUFFER_BYTES = CHUNK_ELEMENTS * WIDEST_BYTES
"""Bytes that are encoded, hashed and written at a time: a chunk of the widest dtype."""


@dataclass(frozen=True)
class Formed:
    """The result of forming an update.

    Attributes:
        part_digests: the BLAKE3 digests of the update's parts.
        digest: the update's digest.
        is_zero: whether its pseudo-gradient was zero everywhere.
        lost: the share of the norm of the parameters' change that encoding lost, over what was checked: the whole
            update, or its beginning if enough of that arrives.
        norm: L2 norm of the parameters' change, after the filters, if the former measures it; else 0.
    """

    part_digests: list[bytes]
    digest: str
    is_zero: bool
    lost: float
    norm: float = 0.0


class UpdateTarget(Protocol):
    """The file that an update is written to: a worker's outbox; in a simulation, the server's file for the update."""

    layout: Layout

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at byte `offset` of the update. The calls come in ascending order of `offset`."""


@dataclass
class UpdateFormer:
    """Encodes one update, from `tensors` and `base`, into the outbox.

    Attributes:
        outbox: the file to write to. Its layout decides the order, codec and place of each tensor.
        base: the version that the site trained from.
        tensors: the model's own tensors, by name; not changed.
        codecs: all codecs that the layout uses, by name.
        runs: the division of every update into byte runs. A byte run has at most `CHUNK_ELEMENTS` elements,
            which are encoded together.
        extra: for each group of tensors that the algorithm sends in addition to the model, such as SCAFFOLD's control
            variates, a function that returns the values for a parameter.
        filtered: the filtered values that are sent in place of `tensors`; None: the site has no filters.
        residuals: the encoding errors of earlier updates, which are added to this one; None: the codec has no error
            feedback.
        is_zero: whether the pseudo-gradient was zero everywhere so far.
        sent, lost: norms of the change of the parameters checked so far, and of what encoding lost of it. Checking ends
            as soon as enough arrives.
        measures: whether to measure `norm`.
        norm: L2 norm of the pseudo-gradient so far.
    """

    outbox: UpdateTarget
    base: TensorFile
    tensors: AnyTensors
    codecs: Mapping[str, Codec]
    runs: RunTable
    extra: Mapping[str, ElementReader] = field(default_factory=dict)
    filtered: Filtered | None = None
    residuals: Residuals | None = None
    is_zero: bool = True
    sent: float = 0.0
    lost: float = 0.0
    measures: bool = False
    norm: float = 0.0

    def form(self, on_part: Callable[[Part, bytes], None] | None = None) -> Formed:
        """Encode the whole update into the outbox.

        Args:
            on_part: called with each part and its BLAKE3 digest as soon as the part is in the outbox.

        Raises:
            UsageError: the algorithm sends a group of tensors in addition to the model, and `extra` lacks this group.
        """
        layout = self.outbox.layout
        lacking = {each.spec.group for each in layout.segments if each.spec.is_extra} - set(self.extra)
        if lacking:
            raise UsageError(
                f"The run's algorithm needs the tensor groups {sorted(lacking)} in each update, besides the model; "
                "this update does not have them.",
                "Use atoll.join and fl_round.submit(model, groups=..., steps=...); atoll.DiLoCo cannot send "
                "these groups.",
            )
        room = min(_BUFFER_BYTES, layout.nbytes) + ALIGN_BYTES
        self.buffer = torch.empty(room, dtype=torch.uint8, device="cpu")
        self.view = bytes_of(self.buffer)
        self.scratch = torch.empty(_BUFFER_BYTES, dtype=torch.uint8, device="cpu")
        digests = []
        with torch.no_grad(), single_thread():
            for part in layout.parts:
                digests.append(self.part(part))
                if on_part is not None:
                    on_part(part, digests[-1])
        lost = self.lost / self.sent if self.sent else 0.0
        return Formed(digests, layout.blob_id(digests), self.is_zero, lost, self.norm)

    def part(self, part: Part) -> bytes:
        """Encode one part of the update into the outbox, and return the part's BLAKE3 digest."""
        hasher = blake3()
        begin = end = part.start  # the buffer holds the bytes from `begin` to `end` of the file
        for run in self.runs.of(part):
            self._clear(end - begin, run.start - begin)  # alignment between segments
            if run.stop - begin > _BUFFER_BYTES:
                self._flush(hasher, begin, run.start)
                begin = run.start
            self._encode(run, self.buffer[run.start - begin : run.stop - begin])
            run.clear_padding(self.view[run.start - begin : run.stop - begin], run.item_bytes)
            end = run.stop
        self._clear(end - begin, part.stop - begin)
        self._flush(hasher, begin, part.stop)
        return hasher.digest()

    def _encode(self, run: ByteRun, target: Tensor) -> None:
        spec, codec = run.spec, self.codecs[run.codec]
        if spec.group != PARAMS:
            for piece, encoded in zip(run.pieces, run.encoded(target), strict=True):
                codec.encode_(self._value(piece), encoded, spec.dtype)
            return
        wide = accumulate_dtype(spec.dtype)
        if self.filtered is not None:
            delta = torch.zeros(run.numel, dtype=wide, device="cpu")
            for piece_values, piece in zip(run.split(delta), run.pieces, strict=True):
                piece_values.copy_(self.filtered.change(piece.segment.spec.name, piece.start, piece.stop))
            self._look_at(delta)
            self._encode_delta(run, delta, target)
            return
        values = [run_of(self.tensors[piece.segment.spec.name], piece.start, piece.stop) for piece in run.pieces]
        dtype, device = torch_dtype(spec.dtype), values[0].device
        as_it_is = codec.raw and wide == dtype and device.type == "cpu"  # the difference is sent unencoded
        memory = target if as_it_is else self.scratch[: run.numel * dtype.itemsize]
        self._read_base(run, bytes_of(memory))
        delta = memory.view(dtype).to(device, wide)
        for piece_values, local in zip(run.split(delta), values, strict=True):
            piece_values.sub_(local.to(device, wide))
        self._look_at(delta)
        if not as_it_is:
            self._encode_delta(run, delta, target)

    def _look_at(self, delta: Tensor) -> None:
        self.is_zero = self.is_zero and _is_zero(delta)
        if self.measures and math.isfinite(norm := _norm(delta)):  # the server refuses values that are not finite
            self.norm = math.hypot(self.norm, norm)

    def _value(self, piece: Piece) -> Tensor:
        """Return the values to send for a piece of a buffer, or of a tensor that the algorithm adds to the model."""
        spec = piece.segment.spec
        if spec.is_extra:
            parameter = spec.name.removeprefix(extra_name(spec.group, ""))
            return self.extra[spec.group](parameter, piece.start, piece.stop)
        if self.filtered is not None:
            value = self.filtered.value(spec.name, piece.start, piece.stop)
        else:
            value = run_of(self.tensors[spec.name], piece.start, piece.stop)
        if spec.rule != "sum":
            return value
        base = self.base.values_of(spec.name, piece.start, piece.stop)
        return moved(base, value.cpu(), accumulate_dtype(spec.dtype))

    def _encode_delta(self, run: ByteRun, delta: Tensor, target: Tensor) -> None:
        """Encode the change `delta` into `target`.

        With error feedback, first add the encoding error of earlier updates to `delta`, then store the new error.
        """
        spec, codec = run.spec, self.codecs[run.codec]
        residuals = self.residuals if codec.feedback else None
        if residuals is not None:
            delta = delta.cpu()
            for piece_values, piece in zip(run.split(delta), run.pieces, strict=True):
                piece_values.add_(residuals.read(piece.segment.spec.name, piece.start, piece.stop))
        codec.encode_(delta, target, spec.dtype)
        checked = not codec.raw and self.lost >= most_lost(codec) * self.sent
        if not checked and residuals is None:
            return
        decoded = torch.empty_like(delta, device="cpu")
        codec.decode_(target, decoded, spec.dtype)
        error = delta.cpu()
        sent = _norm(error) if checked else 0.0
        error.sub_(decoded)
        if checked and math.isfinite(lost := _norm(error)):  # the server refuses values that are not finite
            self.sent, self.lost = math.hypot(self.sent, sent), math.hypot(self.lost, lost)
        if residuals is not None:
            for piece_values, piece in zip(run.split(error), run.pieces, strict=True):
                residuals.write(piece.segment.spec.name, piece.start, piece_values)

    def _read_base(self, run: ByteRun, view: memoryview) -> None:
        """Read the base's values for the pieces of a byte run into `view`. Set the padding between pieces to zero."""
        item_bytes, segments = run.spec.item_bytes, self.base.layout.by_name
        run.clear_padding(view, item_bytes)
        self.base.read_pieces(
            (segments[piece.segment.spec.name].offset + piece.start * item_bytes, memory)
            for piece, memory in run.views(view, item_bytes)
        )

    def _clear(self, low: int, high: int) -> None:
        self.view[low:high] = bytes(high - low)

    def _flush(self, hasher: blake3, begin: int, end: int) -> None:
        data = self.view[: end - begin]
        hasher.update(data)
        self.outbox.write(begin, data)


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _is_zero(delta: Tensor) -> bool:
    """Return whether all elements are zero. Check 64 elements first: usually one of them is not zero."""
    return not (bool(delta[:64].any()) or bool(delta.any()))


# -- One fragment at one site: base, local state and the forming of updates, for workers and simulated sites alike.


@dataclass(frozen=True)
class Layouts:
    """The file layouts and codecs for one fragment of the model: for its versions and its updates.

    Attributes:
        schema: the fragment's schema.
        version: layout of a version; if the model is sharded, only the parts of one rank.
        update: layout of an update; if the model is sharded, only the parts of one rank.
        codec: the codec of parameters.
        codecs: all codecs that `update` uses, by name.
        runs: the division of an update into byte runs; the elements of a byte run are encoded together.
        downlink: encodes a download as the difference from the previous version; None: versions are downloaded whole.
    """

    schema: Schema
    version: Layout
    update: Layout
    codec: Codec
    codecs: Mapping[str, Codec]
    runs: RunTable
    downlink: Downlink | None

    @classmethod
    def of(cls, info: messages.RunInfo, schema: Schema, rank: int | None = None) -> Layouts:
        """Return the layouts and codecs of a fragment, computed from the description of the run.

        Args:
            info: the run's description.
            schema: the fragment's schema.
            rank: the rank of this process, to select its parts of a sharded model; None: all parts.
        """
        codecs = build_codecs(info.codec, info.codec_options)
        version = version_layout(schema, info.part_bytes, info.ranks)
        update = encoded_layout(schema, info.codec.text, codecs, info.part_bytes, info.ranks)
        if rank is not None:
            version, update = version.of_rank(rank), update.of_rank(rank)
        downlink = Downlink.of(version, info.downlink_codec, info.downlink_codec_options)
        runs = RunTable(update, CHUNK_ELEMENTS)
        return cls(schema, version, update, codecs[info.codec.text], codecs, runs, downlink)


Finish = Callable[[ChangeReader], Mapping[str, ElementReader]]
"""A function: takes the model's change, and returns the update's values for each group that the algorithm adds.

It also writes the new values of the state that the algorithm keeps at the site.
"""


SMALL_BYTES = 2**20
"""Largest size of a buffer with the rule `first` that is loaded by a copy although its shape is that of the run."""


@dataclass(eq=False)
class LocalFragment:
    """One fragment of the model at one site, without a connection: forms updates from the base and the local tensors.

    The fragment is the whole model, unless the run synchronises the model in several fragments.

    Attributes:
        site: the site's name.
        info: the run's description.
        layouts: layouts and codecs of the fragment.
        base: the file of the version that the site trains from.
        outcome_of: returns the state of a ticket's update: accepted, counted, refused, sat out or expired.
        warnings: warns about updates that are zero, or become zero when encoded.
        rule: the algorithm's correction of local training; None: no correction.
        number: the fragment's number; None: the run has one fragment.
        model: names of all tensors of the model if the run has several fragments, else empty.
        filters: the filters that are applied to each update before it is sent.
        residuals: the encoding errors of earlier updates; None: the codec has no error feedback.
        algorithm_state: the tensors that the algorithm keeps at the site, such as SCAFFOLD's control variate; None: it
            keeps none.
        kept: the tensors that the site keeps for itself; None: it sends all tensors.
        script: what the site's script keeps (`worker.state`); None: of a fragment, or a loop that counts local steps.
        decided: names of the buffers that got their shapes from the run's first update while this worker took part.
        state: all files of the site's local state: those of `residuals`, `algorithm_state`, `kept` and
            `script`.
        measures: whether to measure the norm of each update.
        from_zero: whether the algorithm's tensors in the base count as zero, because its state begins anew there.
    """

    site: str
    info: messages.RunInfo
    layouts: Layouts
    base: TensorFile
    outcome_of: Callable[[int], messages.Outcome]
    warnings: UpdateWarnings
    rule: LocalRule | None = None
    number: int | None = None
    model: Collection[str] = ()
    filters: Sequence[Filter] = ()
    residuals: Residuals | None = field(init=False, default=None)
    algorithm_state: AlgorithmState | None = field(init=False, default=None)
    kept: KeptTensors | None = field(init=False, default=None)
    script: ScriptState | None = field(init=False, default=None)
    decided: frozenset[str] = frozenset()
    measures: bool = False
    state: LocalState = field(init=False)
    from_zero: bool = field(init=False, default=False)
    _place: tuple[Path, ExitStack, bool] = field(init=False)

    def open_state(self, folder: Path, opened: ExitStack, *, sparse: bool = False) -> None:
        """Open the files of the site's local state: encoding errors, the algorithm's own state, and kept tensors.

        What the run does not need has no files.

        Args:
            folder: the site's folder in the run; locked by the caller.
            opened: the exit stack that later closes the files.
            sparse: whether this folder holds only one rank's share of a sharded model.
        """
        owner, schema = Owner(self.site, self.info.run), self.layouts.schema
        if self.number is None and self.rule is not None and self.rule.state_groups:
            self.algorithm_state = AlgorithmState(folder, schema, self.rule.state_groups, owner)
            opened.callback(self.algorithm_state.close)
        if schema.kept:
            self.kept = KeptTensors(folder, schema.kept, name_of("kept", self.number), owner)
            opened.callback(self.kept.close)
        if self.number is None and not self.info.sync_every:
            self.script = ScriptState(folder, owner)
        self._place = folder, opened, sparse
        self._open_residuals()

    def use_layouts(self, info: messages.RunInfo, layouts: Layouts) -> None:
        """Form the next updates with other layouts. What codecs with feedback have lost stays for the next of them.

        Args:
            info: the run's description.
            layouts: the layouts.
        """
        self.info, self.layouts = info, layouts
        self.warnings = UpdateWarnings(self.site, layouts.codec, layouts.schema)
        self._open_residuals()

    def _open_residuals(self) -> None:
        folder, opened, sparse = self._place
        if not self.layouts.codec.feedback:
            self.residuals = None
        elif self.residuals is None:
            owner, name = Owner(self.site, self.info.run), name_of("residual", self.number)
            self.residuals = Residuals(folder, self.layouts.schema, name, owner=owner, sparse=sparse)
            opened.callback(self.residuals.close)
        self.state = LocalState(self.outcome_of, self.residuals, self.algorithm_state, self.kept, script=self.script)

    def follow(self, ticket: Ticket, counted: messages.Counted | None) -> bool:
        """Bring the algorithm's state at this site to the one with which an update for this ticket is formed.

        Args:
            ticket: the ticket.
            counted: the site's last counted update; None: the algorithm keeps no state at sites.

        Returns:
            Whether the state fits to the ticket. If not, ask for a ticket again (see `AlgorithmState.follow`).

        Raises:
            ConfigError: the site has lost this state (see `AlgorithmState.follow`).
        """
        self.from_zero = ticket.from_zero
        return counted is None or self.algorithm_state is None or self.algorithm_state.follow(counted)

    def of_version(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor of the version as the algorithm sees it: flat, in new memory."""
        values = self.base.values_of(name, start, stop)
        return values.zero_() if self.from_zero and self.base.layout.by_name[name].spec.is_extra else values

    def load_kept_(self, model: nn.Module | Tensors) -> None:
        """Give a model the tensors that this site keeps for itself, as its last counted update left them.

        Before that, they are those of the initial model. A tensor that has another shape there stays as it is.

        Args:
            model: the model, into which a version was loaded; a module, or a dict name → tensor.
        """
        if self.kept is None:
            return
        self.kept.adopt_if_counted(self.outcome_of)
        values = self.kept.values()
        own = state_of(model) if isinstance(model, nn.Module) else model
        for spec in self.layouts.schema.tensors:
            if spec.is_kept and spec.name not in values and getattr(own.get(spec.name), "shape", None) == spec.shape:
                values[spec.name] = self.base.values_of(spec.name, 0, spec.numel).view(spec.shape)
        put_(model, values)

    def changed_shapes(self, tensors: AnyTensors) -> Shapes:
        """Return name → shape of the model's buffers with the rule `first` that have another shape than the run's."""
        found: dict[str, tuple[int, ...]] = {}
        for spec in self.layouts.schema.tensors:
            tensor = tensors[spec.name] if spec.group == FIRST and spec.name in tensors else None
            if isinstance(tensor, Tensor) and tensor.shape != spec.shape:
                found[spec.name] = tuple(tensor.shape)
        return found

    def to_fill(self, tensors: Tensors, version: int) -> dict[str, Tensor]:
        """Return the tensors into which to load a version, by name: those of the model, but others for some buffers.

        A buffer with the rule `first` may have another shape in the run. Torch's observers resize theirs in place,
        which fails once Python has had a view of their memory. So such buffers are loaded into new tensors, which
        `put_first_` copies. In version 0, those that got their shapes from the run's first update have no values: they
        are left out.

        Args:
            tensors: the model's own tensors, by name.
            version: number of the version.
        """
        changed, found = self.changed_shapes(tensors), dict(tensors)
        for spec in self.layouts.schema.tensors:
            if spec.group != FIRST or spec.name not in tensors:
                continue
            if version == 0 and (spec.name in changed or spec.name in self.decided):
                del found[spec.name]
            elif spec.name in changed or spec.nbytes <= SMALL_BYTES:
                if spec.name in changed and tensors[spec.name].numel():
                    text = "%s: the buffer %s gets the shape %s of the run, in place of %s"
                    LOG.info(text, self.site, spec.name, list(spec.shape), list(changed[spec.name]))
                found[spec.name] = tensors[spec.name].new_zeros(spec.shape)
        return found

    def put_first_(self, model: nn.Module | Tensors, loaded: Tensors) -> None:
        """Give a model the loaded buffers with the rule `first`.

        Args:
            model: the model; a module, or a dict name → tensor.
            loaded: the tensors that were loaded, from `to_fill`.
        """
        put_(model, {name: loaded[name].clone() for name in self.layouts.schema.first & loaded.keys()})

    @property
    def parameter_shapes(self) -> Shapes:
        """The shapes of the fragment's parameters: parameter name → shape."""
        return {spec.name: spec.shape for spec in self.layouts.schema.tensors if spec.group == PARAMS}

    @property
    def groups(self) -> Mapping[str, Shapes]:
        """The groups of tensors that the algorithm adds to the global model: group name → parameter name → shape."""
        groups = sorted({spec.group for spec in self.layouts.schema.tensors if spec.is_extra})
        return dict.fromkeys(groups, self.parameter_shapes) if groups else {}

    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return a group of tensors that the algorithm adds to the global model: parameter name → new tensor."""
        return _read(group, self.groups.get(group, {}), self.of_version)

    def own_state(self, group: str) -> dict[str, Tensor]:
        """Return a group of tensors that the algorithm keeps at this site: parameter name → new tensor."""
        if self.algorithm_state is None or self.rule is None or group not in self.rule.state_groups:
            return {}
        return _read(group, self.parameter_shapes, self.algorithm_state.read)

    def filtered(self, ticket: Ticket, tensors: AnyTensors, report: Report) -> Filtered | None:
        """Return the values of an update after the site's filters were applied; None if the site has no filters.

        Args:
            ticket: the ticket under which the update is going to be submitted.
            tensors: the model's own tensors, by name; of a sharded model those of this rank.
            report: what the site reports of the update.
        """
        if not self.filters:
            return None
        round_, version, fragment = ticket.round, ticket.base.number, self.number or 0
        weight, steps, metrics = report.weight, report.steps, dict(report.metrics)
        about = About(self.site, round_, version, weight, steps, metrics, fragment=fragment)
        return Filtered(self.filters, self.base, tensors, about, self.model)

    def form(
        self,
        target: UpdateTarget,
        ticket: Ticket,
        tensors: AnyTensors,
        *,
        filtered: Filtered | None = None,
        finish: Finish | None = None,
        on_part: Callable[[Part, bytes], None] | None = None,
    ) -> Formed:
        """Write the update for a ticket, and the local state that becomes current if the server counts the update.

        When this method returns, the local state's note names the update, but the caller still has to write the
        outbox's note (`Outbox.seal`). If the process is killed in between, the next process forms the update again
        under the same ticket.

        Args:
            target: the file to write the update to.
            ticket: the ticket under which the update is going to be submitted.
            tensors: the model's own tensors, by name.
            filtered: the result of the method `filtered`; None: the site has no filters.
            finish: computes the groups of tensors that the algorithm sends in addition to the model; None: no such
                groups.
            on_part: called with each part and its BLAKE3 digest as soon as the part is written.
        """
        if changed := self.changed_shapes(tensors):
            name = min(changed)
            raise SchemaMismatch(
                f"Worker {self.site} has the buffer {name!r} with the shape {list(changed[name])}, but the run has "
                f"{list(self.base.layout.by_name[name].spec.shape)}.",
                f'Let each site keep its own: start a new run with model.buffers = {{"{name}" = "keep"}}.',
            )
        self.state.begin(ticket.id)
        if self.kept is not None:
            self.kept.keep(tensors)
        if self.script is not None:
            self.script.keep()
        if self.residuals is not None:
            self.residuals.follow(ticket.base.number, self.site)
        read_change = filtered.change_or_none if filtered is not None else partial(change_of, self.base, tensors)
        with torch.no_grad():
            extra = finish(read_change) if finish is not None else {}
        codecs, runs = self.layouts.codecs, self.layouts.runs
        former = UpdateFormer(target, self.base, tensors, codecs, runs, extra, filtered, self.residuals)
        former.measures = self.measures
        formed = former.form(on_part)
        whole = target.layout.rank is None
        self.state.belongs_to(ticket.id, ticket.base.number, formed.digest if whole else "")
        return formed

    def warnings_about(self, formed: Formed, steps: int) -> list[str]:
        """Log warnings about an update that was formed. Return them, to be shown in the server's status.

        Args:
            formed: the update.
            steps: the number of local steps in the update.
        """
        return self.warnings.about(formed.is_zero, steps, filters=bool(self.filters), lost=formed.lost)


def _read(group: str, shapes: Shapes, read: ElementReader) -> dict[str, Tensor]:
    return {name: read(extra_name(group, name), 0, math.prod(shape)).reshape(shape) for name, shape in shapes.items()}
