"""Local training → the bytes of an update, tile by tile into the outbox; and base → model after a missed round.

The pseudo-gradient of a parameter is `base − local` (architecture: §2), formed where the parameter is. Buffers travel
as raw values. Memory is a few fixed scratches, whatever the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from blake3 import blake3
from torch import Tensor
from torch.autograd.graph import increment_version

from atoll.codecs.base import Codec
from atoll.errors import UsageError
from atoll.tensors.alone import alone
from atoll.tensors.chunks import CHUNK_BYTES, CHUNK_ELEMENTS, Held, assign_run_, bytes_of, run_of, writable_bytes
from atoll.tensors.dtypes import accumulate_dtype, torch_dtype
from atoll.tensors.layout import ALIGN_BYTES, Part, chunks
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.schema import CONTROL, PARAMS
from atoll.worker.exchange.base_and_outbox import BaseFile, Outbox
from atoll.worker.exchange.filtering import Filtered
from atoll.worker.exchange.update_runs import MOST_TARGETS, Stretch, Stretches

if TYPE_CHECKING:
    from atoll.worker.exchange.residuals import Residuals
    from atoll.worker.exchange.zero_updates import Losses

Runs = Callable[[str, int, int], Tensor]
"""(name, start, stop) → those elements of a tensor, in a row, on the CPU."""


class Difference(Protocol):
    """Δc_i as `Runs`, which follows from the change of the model, and so from what filters have left of it."""

    def __call__(self, control: str, start: int, stop: int) -> Tensor: ...

    def behind(self, filtered: Filtered) -> Runs:
        """Δc_i of the change that leaves the site."""
        ...


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


def form_update(
    outbox: Outbox,
    base: BaseFile,
    tensors: Held,
    codecs: Mapping[str, Codec],
    on_part: Callable[[Part, bytes], None] | None = None,
    stretches: Stretches | None = None,
    control_difference: Runs | None = None,
    filtered: Filtered | None = None,
    residuals: Residuals | None = None,
    losses: Losses | None = None,
) -> Formed:
    """Write the update of `tensors` against `base` into the outbox.

    Args:
        outbox: its layout decides order, codec and place of everything.
        base: the version that was trained from.
        tensors: the model's own tensors, by name; not changed.
        codecs: by name, all that the layout uses.
        on_part: told of each part, with its BLAKE3, as soon as it is in the outbox.
        stretches: of these layouts and codecs; who forms more than one update keeps them.
        control_difference: Δc_i, where the layout has controls.
        filtered: what leaves in place of `tensors`, where the site has filters.
        residuals: what earlier updates have lost, where the codec has error feedback.
        losses: looks at what encoding leaves.

    Raises:
        UsageError: the layout has controls, and there is no difference of them.
    """
    if control_difference is None and any(each.spec.group == CONTROL for each in outbox.layout.segments):
        raise UsageError(
            "The run's algorithm keeps controls, and this update has no control_difference.",
            "Submit it: round.submit(model, control_difference=..., steps=...), in rounds of atoll.join; atoll.DiLoCo "
            "has no controls.",
        )
    stretches = stretches or Stretches(outbox.layout, base.layout, codecs)
    former = _Former(outbox, base, tensors, codecs, stretches, control_difference, filtered, residuals, losses)
    with torch.no_grad(), alone():
        digests = []
        for part in outbox.layout.parts:
            digests.append(former.part(part))
            if on_part is not None:
                on_part(part, digests[-1])
    return Formed(digests, outbox.layout.update_digest(digests), former.is_zero)


class _Former:
    """One update on its way into the outbox; the arguments are those of `form_update`."""

    def __init__(
        self,
        outbox: Outbox,
        base: BaseFile,
        tensors: Held,
        codecs: Mapping[str, Codec],
        stretches: Stretches,
        control_difference: Runs | None,
        filtered: Filtered | None,
        residuals: Residuals | None,
        losses: Losses | None,
    ) -> None:
        self.outbox, self.base, self.tensors, self.codecs, self.stretches = outbox, base, tensors, codecs, stretches
        self.control_difference, self.filtered, self.residuals = control_difference, filtered, residuals
        room = min(_BUFFER_BYTES, outbox.layout.nbytes) + ALIGN_BYTES
        self.buffer = torch.empty(room, dtype=torch.uint8, device="cpu")
        self.view = bytes_of(self.buffer)
        self.scratch = torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8, device="cpu")
        self.is_zero, self.losses = True, losses
        if losses is not None:
            losses.begin()

    def part(self, part: Part) -> bytes:
        """Encode one part; returns its BLAKE3."""
        hasher = blake3()
        begin = end = part.start  # file offsets of what the buffer holds
        for stretch in self.stretches.of(part):
            self._clear(end - begin, stretch.start - begin)  # alignment between segments
            if stretch.stop - begin > _BUFFER_BYTES:
                self._flush(hasher, begin, stretch.start)
                begin = stretch.start
            self._encode(stretch, self.buffer[stretch.start - begin : stretch.stop - begin])
            for low, high in stretch.gaps:
                self._clear(stretch.start - begin + low, stretch.start - begin + high)
            end = stretch.stop
        self._clear(end - begin, part.stop - begin)
        self._flush(hasher, begin, part.stop)
        return hasher.digest()

    def _encode(self, stretch: Stretch, target: Tensor) -> None:
        spec, codec = stretch.spec, self.codecs[stretch.codec]
        if spec.group == CONTROL:
            assert self.control_difference is not None  # as `form_update` has seen
            codec.encode_(self.control_difference(*stretch.runs[0]), target, spec.dtype)
            return
        if self.filtered is not None:
            self._encode_filtered(self.filtered, stretch, target)
            return
        runs = [run_of(self.tensors[name], start, stop) for name, start, stop in stretch.runs]
        if spec.group != PARAMS:
            codec.encode_(runs[0], target, spec.dtype)
            return
        dtype, wide, device = torch_dtype(spec.dtype), accumulate_dtype(spec.dtype), runs[0].device
        as_it_is = codec.raw and wide == dtype and device.type == "cpu"  # the difference is what travels
        memory = target if as_it_is else self.scratch[: stretch.numel * dtype.itemsize]
        self._read_base(stretch, bytes_of(memory))
        delta = memory.view(dtype).to(device, wide)
        for place, run in zip(_runs_in(delta, stretch), runs, strict=True):
            place.sub_(run.to(device, wide))
        self.is_zero = self.is_zero and _is_zero(delta)
        if not as_it_is:
            self._encode_delta(stretch, delta, target)

    def _encode_filtered(self, filtered: Filtered, stretch: Stretch, target: Tensor) -> None:
        spec, codec = stretch.spec, self.codecs[stretch.codec]
        if spec.group != PARAMS:
            codec.encode_(filtered.value(*stretch.runs[0]), target, spec.dtype)
            return
        delta = torch.zeros(stretch.numel, dtype=accumulate_dtype(spec.dtype), device="cpu")
        for place, run in zip(_runs_in(delta, stretch), stretch.runs, strict=True):
            place.copy_(filtered.change(*run))
        self.is_zero = self.is_zero and _is_zero(delta)
        self._encode_delta(stretch, delta, target)

    def _encode_delta(self, stretch: Stretch, delta: Tensor, target: Tensor) -> None:
        """Encode a pseudo-gradient; with error feedback what was lost before is added, and what is lost now kept."""
        spec, codec, residuals = stretch.spec, self.codecs[stretch.codec], self.residuals
        losses = self.losses if self.losses is not None and self.losses.wants(stretch.runs) else None
        if residuals is None or not codec.feedback:
            codec.encode_(delta, target, spec.dtype)
            if losses is not None:
                delta = delta.cpu()
                losses.see(stretch.runs, stretch.sizes, delta, self._decoded(codec, target, delta, spec.dtype))
            return
        delta = delta.cpu()
        places = _runs_in(delta, stretch)
        for place, run in zip(places, stretch.runs, strict=True):
            place.add_(residuals.read(*run))
        codec.encode_(delta, target, spec.dtype)
        decoded = self._decoded(codec, target, delta, spec.dtype)
        if losses is not None:
            losses.see(stretch.runs, stretch.sizes, delta, decoded)
        delta.sub_(decoded)
        for place, (name, start, _) in zip(places, stretch.runs, strict=True):
            residuals.write(name, start, place)

    @staticmethod
    def _decoded(codec: Codec, encoded: Tensor, like: Tensor, dtype: str) -> Tensor:
        decoded = torch.empty_like(like)
        codec.decode_(encoded, decoded, dtype)
        return decoded

    def _read_base(self, stretch: Stretch, view: memoryview) -> None:
        """Fill `view` with what the version has of a stretch, and zeros in the padding."""
        end = 0
        for low, high in stretch.places:
            view[end:low] = bytes(low - end)
            end = high
        self.base.read_scattered(stretch.base_offset, [view[low:high] for low, high in stretch.places])

    def _clear(self, low: int, high: int) -> None:
        self.view[low:high] = bytes(high - low)

    def _flush(self, hasher: blake3, begin: int, end: int) -> None:
        data = self.view[: end - begin]
        hasher.update(data)
        self.outbox.write(begin, data)


def _runs_in(delta: Tensor, stretch: Stretch) -> Sequence[Tensor]:
    """The runs of a stretch, without the padding; `torch.split`, which asks what it is given, takes twice as long."""
    return torch.split_with_sizes(delta, list(stretch.sizes))[::2]


def _is_zero(delta: Tensor) -> bool:
    """Whether all of it is; mostly the first elements say that it is not."""
    return not (bool(delta[:64].any()) or bool(delta.any()))


def _scratch() -> memoryview:
    """Memory for one chunk of any dtype, which nobody has to clear."""
    return bytes_of(torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8, device="cpu"))


def rebase_(tensors: Held, old: BaseFile, new: BaseFile) -> None:
    """w ← b_head + (w − b_base), in place: local progress is carried over to the version that others moved on to.

    Buffers take the new version's values.
    """
    scratch_old, scratch_new = (_scratch() for _ in range(2))
    with torch.no_grad(), alone():
        for part in new.layout.parts:
            for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                spec = piece.segment.spec
                if spec.name not in tensors:
                    continue
                dtype = torch_dtype(spec.dtype)
                head = new.elements(piece, start, stop, scratch_new, dtype)
                if spec.group == PARAMS:
                    wide = accumulate_dtype(spec.dtype)
                    base = old.elements(piece, start, stop, scratch_old, dtype)
                    local = run_of(tensors[spec.name], start, stop).cpu()
                    head = (head.to(wide) + (local.to(wide) - base.to(wide))).to(dtype)
                assign_run_(tensors[spec.name], start, head)


def merge_(tensors: Tensors, version: BaseFile, alpha: float) -> None:
    """w ← (1−α)·b + α·w, in place, of what a version has: 0 takes it as it is, 1 leaves what is local as it is.

    Integers and flags cannot be mixed: they take the version's values.
    """
    if alpha == 0:
        load_(tensors, version)
    if alpha in (0, 1):
        return
    scratch = _scratch()
    with torch.no_grad(), alone():
        for part in version.layout.parts:
            for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                spec, dtype = piece.segment.spec, torch_dtype(piece.segment.spec.dtype)
                values = version.elements(piece, start, stop, scratch, dtype)
                if spec.is_float:
                    wide, local = accumulate_dtype(spec.dtype), run_of(tensors[spec.name], start, stop)
                    values = values.to(local.device, wide).mul(1 - alpha).add_(local.to(wide), alpha=alpha)
                assign_run_(tensors[spec.name], start, values)


def advance_base_(base: BaseFile, outbox: Outbox, codecs: Mapping[str, Codec]) -> None:
    """base ← base − dec(update), in the base file: what was submitted, as the server decodes it."""
    scratch = _scratch()
    encoded = _scratch()
    with torch.no_grad(), alone():
        for part in outbox.layout.parts:
            for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                spec = piece.segment.spec
                if spec.group != PARAMS:
                    continue
                wide = accumulate_dtype(spec.dtype)
                values = base.elements(piece, start, stop, scratch, torch_dtype(spec.dtype))
                run = outbox.layout.piece(piece.segment, start, stop)
                outbox.read_into(run.offset, encoded[: run.nbytes])
                delta = torch.empty(stop - start, dtype=wide, device="cpu")
                source = torch.frombuffer(encoded, dtype=torch.uint8, count=run.nbytes)
                codecs[piece.segment.codec].decode_(source, delta, spec.dtype)
                values.copy_(values.to(wide) - delta)
                offset = base.layout.by_name[spec.name].offset + start * spec.item_bytes
                base.write(offset, scratch[: (stop - start) * spec.item_bytes])


def load_(tensors: Held, base: BaseFile) -> None:
    """Copy what the base file has of the tensors into them, in place: straight into those that lie as the file does."""
    scratch, straight = None, _Straight(base)
    with torch.no_grad():
        for part in base.layout.parts:
            for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                spec = piece.segment.spec
                if spec.name not in tensors:
                    continue
                tensor, dtype = tensors[spec.name], torch_dtype(spec.dtype)
                memory = writable_bytes(tensor) if isinstance(tensor, Tensor) and tensor.dtype == dtype else None
                if memory is None:
                    scratch = scratch or _scratch()
                    assign_run_(tensor, start, base.elements(piece, start, stop, scratch, dtype))
                    continue
                if start == 0:
                    increment_version(cast(Tensor, tensor))  # as `copy_` does: autograd sees that what it kept is gone
                low, high = start * spec.item_bytes, stop * spec.item_bytes
                straight.read(base.layout.by_name[spec.name].offset + low, memory[low:high])
        straight.end()


def store_(base: BaseFile, tensors: Tensors) -> None:
    """Copy the tensors into where they lie in the base file."""
    with torch.no_grad(), alone():
        for part in base.layout.parts:
            for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
                spec = piece.segment.spec
                if spec.name in tensors:
                    values = run_of(tensors[spec.name], start, stop).to("cpu", torch_dtype(spec.dtype))
                    base.write(base.layout.by_name[spec.name].offset + start * spec.item_bytes, bytes_of(values))


class _Straight:
    """Reads of a base file into where its bytes belong; neighbours in the file are read at once."""

    def __init__(self, base: BaseFile) -> None:
        self._base, self._targets = base, list[memoryview]()
        self._start = self._stop = 0

    def read(self, offset: int, target: memoryview) -> None:
        if offset != self._stop or self._stop - self._start > CHUNK_BYTES or len(self._targets) == MOST_TARGETS:
            self.end()
            self._start = self._stop = offset
        self._targets.append(target)
        self._stop += len(target)

    def end(self) -> None:
        """Read what was not read before."""
        if self._targets:
            self._base.read_scattered(self._start, self._targets)
            self._targets.clear()
