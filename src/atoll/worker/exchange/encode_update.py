"""Local training → the bytes of an update, tile by tile into the outbox.

The pseudo-gradient of a parameter is `base − local`, formed where the parameter is. Buffers travel
as raw values. Memory is a few fixed scratches, whatever the model's size.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from atoll.algorithms.base import Runs
from atoll.codecs.base import Codec
from atoll.errors import UsageError
from atoll.filters.base import About, BadFilter, ByTask, Chain, Filter, filtered, for_tasks
from atoll.runtime import single_thread
from atoll.tensors.byte_runs import Run, RunTable
from atoll.tensors.chunks import CHUNK_ELEMENTS, AnyTensors, bytes_of, run_of
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import ALIGN_BYTES, Part, Piece
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.payload import Packed
from atoll.tensors.schema import PARAMS, Schema, name_beside
from atoll.worker.exchange.base_and_outbox import OutboxFile, VersionFile
from atoll.worker.log_lines import LOG, told

if TYPE_CHECKING:
    from atoll.worker.exchange.local_state import Residuals


# -- A site's filters, between the model and the outbox, or between an answer to a task and its file: each run passes
# through all of them, in their order.


T = TypeVar("T")


class Filtered:
    """The change of a model as it leaves the site.

    Args:
        filters: in their order.
        base: the version that was trained from.
        tensors: the model's own, by name; not changed.
        about: the update's metadata.
        model: names of all tensors of the model, where the update is of one fragment of it.

    Raises:
        UsageError: what a filter's `begin` raised, naming the filter.
    """

    def __init__(
        self, filters: Sequence[Filter], base: VersionFile, tensors: Tensors, about: About, model: Collection[str] = ()
    ) -> None:
        self._base, self._tensors = base, tensors
        specs = {each.spec.name: each.spec for each in base.layout.segments if not each.spec.is_beside}
        raw = partial(change_of, base, tensors)  # no method: a cycle would hold the model until the collector runs
        self._chain = _told(lambda: Chain(filters, specs, about, raw, model=model))

    def sends(self, name: str) -> bool:
        """Whether every filter keeps this tensor."""
        return self._chain.sends(name)

    def change(self, name: str, start: int, stop: int) -> Tensor:
        """Return version − local [stop − start] of a float tensor, behind every filter; zeros if one does not keep it.

        Raises:
            UsageError: a filter does not keep to its contract; it and the tensor are named.
        """
        return _told(partial(self._chain.change, name, start, stop))

    def moved(self, name: str, start: int, stop: int) -> Tensor | None:
        """As `change`; None where a filter does not keep the tensor."""
        return self.change(name, start, stop) if self.sends(name) else None

    def value(self, name: str, start: int, stop: int) -> Tensor:
        """What a buffer [stop − start] is said to have become."""
        if not self.sends(name):
            return self._base.values_of(name, start, stop)
        local = run_of(self._tensors[name], start, stop).cpu()
        if not self._chain.specs[name].is_float:
            return local
        taken = _told(partial(self._chain.taken, name, start, stop))
        return taken.add_(local)  # its own value, to the bit, where no filter changed it


def change_of(base: VersionFile, tensors: AnyTensors, name: str, start: int, stop: int) -> Tensor:
    """Return version − local of a parameter as it was trained, in new memory."""
    wide = accumulate_dtype(base.layout.by_name[name].spec.dtype)
    values = base.values_of(name, start, stop).to(wide)
    return values.sub_(run_of(tensors[name], start, stop).to("cpu", wide))


class AnswerFilters:
    """What the answers of a site pass through.

    Raises:
        UsageError: one is no filter.
    """

    def __init__(self, given: ByTask, site: str) -> None:
        self._entries, self._site = for_tasks(given), site
        self._lock = threading.Lock()  # filters keep state from the beginning of an answer to its end

    @contextmanager
    def behind(self, packed: Packed, task: str) -> Iterator[Packed]:
        """An answer as it is to travel; it is written within.

        Raises:
            UsageError: a filter failed, here or while it is written; filter, site, task and tensor are named.
        """
        filters = [each for each, tasks in self._entries if not tasks or task in tasks]
        with self._lock:
            what = f"The answer of site {self._site} to task {task!r} is not sent"
            yield filtered(packed, filters, About(self._site, task=task), what)


def _told(call: Callable[[], T]) -> T:
    try:
        return call()
    except BadFilter as error:
        if error.raised:
            raise UsageError(
                f"The filter {error}. The update is not completed.",
                "Its traceback is above. Mend the filter, and start this site again.",
            ) from error.__cause__
        raise UsageError(
            f"The filter {error}.",
            "A filter returns as many elements as it was given, of the same dtype; this update does not count.",
        ) from None


# -- Told, not silent: an update of which nothing is left once it is encoded, and one that was nothing from the start.
#
# What a codec with error feedback loses comes later, so there a tensor is lost only where nothing of it arrives, update
# after update; without, where more than `MOST` of its norm is gone. Most tensors are looked at in their first run only:
# as soon as something of one arrives, it is not lost.


MOST = 0.99
"""Share of a tensor's norm that may be lost."""
PATIENCE = 3
"""Updates in a row that bring nothing of a tensor, before a user of a codec with error feedback is told."""
NAMED = 5


def _names(run: Run) -> list[str]:
    return [piece.segment.spec.name for piece in run.pieces]


class Losses:
    """Of one site in one run, while one process takes part.

    Attributes:
        site: that the updates are of; simulated sites of one process take turns.
        warnings: what the user should know at this moment; the server shows it.

    Args:
        site: that the updates are of.
        codec: by which `params` travel.
        schema: of the run.
    """

    def __init__(self, site: str, codec: Codec, schema: Schema) -> None:
        self.site, self._codec = site, codec
        self._narrow = sorted({spec.dtype for spec in schema.tensors if spec.dtype in ("BF16", "F16")})
        self._arrives: set[str] = set()
        self._lost: dict[str, list[float]] = {}  # name → [Σ lost², Σ sent²] of the runs that were looked at
        self._in_a_row: dict[str, int] = {}
        self._told_zero = self._told_lost = ""

    @property
    def warnings(self) -> list[str]:
        """What is said of the latest update if it was zero, and of lost tensors, which stays once it was said."""
        return [told(text) for text in (self._told_zero, self._told_lost) if text]

    def begin(self) -> None:
        """An update is about to be formed."""
        self._arrives.clear()
        self._lost.clear()

    def wants(self, run: Run) -> bool:
        """Whether it is still to be seen what arrives of one of its tensors."""
        return not self._codec.raw and any(name not in self._arrives for name in _names(run))

    def see(self, run: Run, delta: Tensor, decoded: Tensor) -> None:
        """Look at what becomes of a run.

        Args:
            run: of n elements.
            delta: [n], what is to be sent of it.
            decoded: [n], what arrives.
        """
        names = _names(run)
        alone = len(names) == 1
        if alone and self._codec.feedback and bool(decoded.any()):
            self._arrives.add(names[0])
            return
        if not alone and int(torch.count_nonzero(delta)) == int(torch.count_nonzero(decoded)):
            self._arrives.update(names)  # of small tensors, no element has become zero
            return
        for name, sent, came in zip(names, run.split(delta), run.split(decoded), strict=True):
            whole, lost = (float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in (sent, sent - came))
            if whole == 0 or not math.isfinite(lost):  # infinite is too large, not too small: the server refuses it
                continue
            if bool(came.any()) if self._codec.feedback else not lost > MOST * whole:
                self._arrives.add(name)
            else:
                sums = self._lost.setdefault(name, [0.0, 0.0])
                sums[0], sums[1] = sums[0] + lost**2, sums[1] + whole**2

    def end(self, is_zero: bool, steps: int, filters: bool) -> None:
        """The update is formed: say what there is to say, of lost tensors once.

        Args:
            is_zero: whether the pseudo-gradient was nothing, before it was encoded.
            steps: local steps behind it; 0 where they are not counted.
            filters: whether it has passed through filters before.
        """
        self._told_zero = self._zero(steps, filters) if is_zero else ""
        if is_zero:
            LOG.warning("%s: %s", self.site, self._told_zero)
        lost = {name: sums for name, sums in self._lost.items() if name not in self._arrives}
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in lost}
        patience = PATIENCE if self._codec.feedback else 1
        silent = {name: sums for name, sums in lost.items() if self._in_a_row[name] >= patience}
        if silent and not self._told_lost:
            self._told_lost = self._few(silent, len(self._arrives | lost.keys()), patience)
            LOG.warning("%s: %s", self.site, self._told_lost)

    def _zero(self, steps: int, filters: bool) -> str:
        text = f"the pseudo-gradient is all zero{f' after {steps} steps' if steps else ''}"
        if filters:
            text += " behind this site's filters"
        text += ". Does the optimizer hold this model's parameters, and is its learning rate above zero?"
        if self._narrow:
            text += (
                f" Weights in {' and '.join(self._narrow)} stay as they are under steps of less than about 1/256 "
                "(F16: 1/2048) of them: train in fp32, with autocast where speed is needed."
            )
        return text

    def _few(self, lost: dict[str, list[float]], changed: int, patience: int) -> str:
        names = ", ".join(list(lost)[:NAMED]) + (f" and {len(lost) - NAMED} more" if len(lost) > NAMED else "")
        gone, whole = (math.fsum(sums[index] for sums in lost.values()) for index in (0, 1))
        share = math.sqrt(gone / whole) if 0 < whole < math.inf else 1.0
        rounds = f", {patience} times in a row" if patience > 1 else ""
        return (
            f"as {self._codec.name}, {len(lost)} of the {changed} tensors that training has changed lose "
            f"{100 * share:.3g} % of their change on the way{rounds}: {names}. It is too small for what the codec can "
            "write. Take more local steps, or a larger learning rate; or set aggregation.upload_codec.name = 'none'."
        )


_BUFFER_BYTES = CHUNK_ELEMENTS * 8
"""Encoded, hashed and written at a time: one run of the widest dtype."""
_WIDEST_BYTES = 8
"""Of one element, in any dtype."""


@dataclass(frozen=True)
class Formed:
    """What is in the outbox: the digests that name it, and whether the pseudo-gradient was zero everywhere."""

    part_digests: list[bytes]
    digest: str
    is_zero: bool


@dataclass
class UpdateFormer:
    """Writes one update of `tensors` against `base` into the outbox.

    Attributes:
        outbox: its layout decides order, codec and place of everything.
        base: the version that was trained from.
        tensors: the model's own tensors, by name; not changed.
        codecs: by name, all that the layout uses.
        runs: of the outbox's layout, at most `CHUNK_ELEMENTS` each; kept from one update to the next.
        beside: what the update carries for each group beside the model, by the parameter's name.
        filtered: what leaves in place of `tensors`, where the site has filters.
        residuals: what earlier updates have lost, where the codec has error feedback.
        losses: looks at what encoding leaves.
        is_zero: whether the pseudo-gradient was zero everywhere so far.
    """

    outbox: OutboxFile
    base: VersionFile
    tensors: AnyTensors
    codecs: Mapping[str, Codec]
    runs: RunTable
    beside: Mapping[str, Runs] = field(default_factory=dict)
    filtered: Filtered | None = None
    residuals: Residuals | None = None
    losses: Losses | None = None
    is_zero: bool = True

    def form(self, on_part: Callable[[Part, bytes], None] | None = None) -> Formed:
        """Write all of it.

        Args:
            on_part: told of each part, with its BLAKE3, as soon as it is in the outbox.

        Raises:
            UsageError: the layout has a group beside the model, and nothing is given for it.
        """
        layout = self.outbox.layout
        lacking = {each.spec.group for each in layout.segments if each.spec.is_beside} - set(self.beside)
        if lacking:
            raise UsageError(
                f"The run's algorithm keeps {sorted(lacking)} beside the model, and this update carries none of it.",
                "Submit it: fl_round.submit(model, groups=..., steps=...), in rounds of atoll.join; atoll.DiLoCo has "
                "no such groups.",
            )
        room = min(_BUFFER_BYTES, layout.nbytes) + ALIGN_BYTES
        self.buffer = torch.empty(room, dtype=torch.uint8, device="cpu")
        self.view = bytes_of(self.buffer)
        self.scratch = torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8, device="cpu")
        if self.losses is not None:
            self.losses.begin()
        digests = []
        with torch.no_grad(), single_thread():
            for part in layout.parts:
                digests.append(self.part(part))
                if on_part is not None:
                    on_part(part, digests[-1])
        return Formed(digests, layout.blob_id(digests), self.is_zero)

    def part(self, part: Part) -> bytes:
        """Encode one part; returns its BLAKE3."""
        hasher = blake3()
        begin = end = part.start  # file offsets of what the buffer holds
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

    def _encode(self, run: Run, target: Tensor) -> None:
        spec, codec = run.spec, self.codecs[run.codec]
        if spec.group != PARAMS:
            for piece, encoded in zip(run.pieces, run.encoded(target), strict=True):
                codec.encode_(self._value(piece), encoded, spec.dtype)
            return
        wide = accumulate_dtype(spec.dtype)
        if self.filtered is not None:
            delta = torch.zeros(run.numel, dtype=wide, device="cpu")
            for place, piece in zip(run.split(delta), run.pieces, strict=True):
                place.copy_(self.filtered.change(piece.segment.spec.name, piece.start, piece.stop))
            self.is_zero = self.is_zero and _is_zero(delta)
            self._encode_delta(run, delta, target)
            return
        values = [run_of(self.tensors[piece.segment.spec.name], piece.start, piece.stop) for piece in run.pieces]
        dtype, device = torch_dtype(spec.dtype), values[0].device
        as_it_is = codec.raw and wide == dtype and device.type == "cpu"  # the difference is what travels
        memory = target if as_it_is else self.scratch[: run.numel * dtype.itemsize]
        self._read_base(run, bytes_of(memory))
        delta = memory.view(dtype).to(device, wide)
        for place, local in zip(run.split(delta), values, strict=True):
            place.sub_(local.to(device, wide))
        self.is_zero = self.is_zero and _is_zero(delta)
        if not as_it_is:
            self._encode_delta(run, delta, target)

    def _value(self, piece: Piece) -> Tensor:
        """What travels of a tensor that is no parameter."""
        spec = piece.segment.spec
        if spec.is_beside:
            parameter = spec.name.removeprefix(name_beside(spec.group, ""))
            return self.beside[spec.group](parameter, piece.start, piece.stop)
        if self.filtered is not None:
            return self.filtered.value(spec.name, piece.start, piece.stop)
        return run_of(self.tensors[spec.name], piece.start, piece.stop)

    def _encode_delta(self, run: Run, delta: Tensor, target: Tensor) -> None:
        """Encode a pseudo-gradient; with error feedback what was lost before is added, and what is lost now kept."""
        spec, codec, residuals = run.spec, self.codecs[run.codec], self.residuals
        losses = self.losses if self.losses is not None and self.losses.wants(run) else None
        if residuals is None or not codec.feedback:
            codec.encode_(delta, target, spec.dtype)
            if losses is not None:
                delta = delta.cpu()
                losses.see(run, delta, self._decoded(codec, target, delta, spec.dtype))
            return
        delta = delta.cpu()
        places = run.split(delta)
        for place, piece in zip(places, run.pieces, strict=True):
            place.add_(residuals.read(piece.segment.spec.name, piece.start, piece.stop))
        codec.encode_(delta, target, spec.dtype)
        decoded = self._decoded(codec, target, delta, spec.dtype)
        if losses is not None:
            losses.see(run, delta, decoded)
        delta.sub_(decoded)
        for place, piece in zip(places, run.pieces, strict=True):
            residuals.write(piece.segment.spec.name, piece.start, place)

    @staticmethod
    def _decoded(codec: Codec, encoded: Tensor, like: Tensor, dtype: str) -> Tensor:
        decoded = torch.empty_like(like)
        codec.decode_(encoded, decoded, dtype)
        return decoded

    def _read_base(self, run: Run, view: memoryview) -> None:
        """Fill `view` with what the version has of a run, and zeros in the padding."""
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


def _is_zero(delta: Tensor) -> bool:
    """Whether all of it is; mostly the first elements say that it is not."""
    return not (bool(delta[:64].any()) or bool(delta.any()))
