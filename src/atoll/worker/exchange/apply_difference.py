"""What comes down in place of a version: received into a file, then added to the base, part by part.

    delta.bin + delta.json      what was received; a pull that broke off goes on where it was

Nothing of the base changes before all of a delta is here. From then on its note names the version that it becomes, as
not complete: a process that is killed in between leaves a base of which each part has its own digest, or is pulled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from atoll.codecs.version_difference import Downlink
from atoll.failpoints import failpoint
from atoll.protocol import messages
from atoll.tensors.alone import alone
from atoll.tensors.chunks import CHUNK_ELEMENTS, assign_run_, bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import ALIGN_BYTES, Part, Piece
from atoll.tensors.module_tensors import Tensors
from atoll.worker.exchange.base_and_outbox import BaseFile, BaseNote, PartsFile
from atoll.worker.json_notes import read_note, write_note

_WIDEST_BYTES = 8


@dataclass(frozen=True)
class DeltaNote:
    """Of which version the file holds what makes it, or some of its parts."""

    version: str


class DeltaFile(PartsFile):
    """The delta that was received last.

    Args:
        folder: of the site in the run; locked by the caller.
        downlink: its layout.
        name: of the file.
    """

    def __init__(self, folder: Path, downlink: Downlink, name: str = "delta") -> None:
        super().__init__(folder / f"{name}.bin", downlink.layout.nbytes, downlink.parts, downlink.count)
        self.downlink = downlink
        self._note_path = folder / f"{name}.json"

    def begin(self, delta: messages.Delta, version: str) -> list[Part]:
        """Say which delta is about to come, and the version's digest; returns the parts that are not there already."""
        parts = [part for part in self.downlink.parts if part.nbytes]
        note: DeltaNote | None = read_note(self._note_path, DeltaNote)
        if note is not None and note.version == version and not self.is_new:
            return self.differing(delta.part_digests, parts)
        self._note_path.unlink(missing_ok=True)
        write_note(self._note_path, DeltaNote(version))
        return parts


@dataclass(frozen=True)
class _Batch:
    """Runs of tensors that follow one another in the version and in the delta, with what the delta has of each."""

    offset: int
    pieces: list[tuple[Piece, Piece]]

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece, _ in self.pieces)


def apply_(file: DeltaFile, source: BaseFile, target: BaseFile, note: BaseNote, into: Tensors | None) -> list[Part]:
    """Bring `target` from the version in `source` to the next one, and on the way into the tensors.

    Args:
        file: has all of the delta.
        source, target: may be the same file.
        note: of the version that comes of it.
        into: set to the version's values, whatever they have.

    Returns:
        The parts that are not what their digests say; the tensors have what came of them.
    """
    target.begin(note)
    adder, wrong = _Adder(file, source, target, into), list[Part]()
    with torch.no_grad(), alone():
        for part, down in zip(target.layout.parts, file.downlink.parts, strict=True):
            if adder.part(part, down).hex() != note.part_digests[part.index]:
                wrong.append(part)
            failpoint("delta.part")
    return wrong


class _Adder:
    """Fixed scratch, whatever the model's size."""

    def __init__(self, file: DeltaFile, source: BaseFile, target: BaseFile, into: Tensors | None) -> None:
        self._file, self._source, self._target, self._into = file, source, target, into or {}
        self._held = torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8)
        self._encoded = torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8)

    def part(self, part: Part, down: Part) -> bytes:
        """Write one part of the version; returns its BLAKE3."""
        hasher = blake3()
        first = part.pieces[0].offset if part.pieces else part.stop
        view = bytes_of(self._held)
        for at in range(part.start, first, len(view)):
            self._copy(view[: min(len(view), first - at)], at, hasher)
        for batch in self._batches(part, down):
            held = self._held[: batch.nbytes]
            self._source.read_into(batch.offset, bytes_of(held))
            self._add(batch, held)
            hasher.update(bytes_of(held))
            self._target.write(batch.offset, bytes_of(held))
        return hasher.digest()

    def _copy(self, view: memoryview, offset: int, hasher: blake3) -> None:
        self._source.read_into(offset, view)
        hasher.update(view)
        if self._target is not self._source:
            self._target.write(offset, view)

    def _batches(self, part: Part, down: Part) -> Iterator[_Batch]:
        layout = self._file.downlink.layout
        held: list[tuple[Piece, Piece]] = []
        room = CHUNK_ELEMENTS
        for piece, below in zip(part.pieces, down.pieces, strict=True):
            item = piece.segment.spec.item_bytes
            for start in range(piece.start, piece.stop, CHUNK_ELEMENTS):
                stop = min(start + CHUNK_ELEMENTS, piece.stop)
                offset = piece.offset + (start - piece.start) * item
                run = Piece(piece.segment, start, stop, offset, (stop - start) * item)
                if held and run.numel > room:
                    yield _Batch(held[0][0].offset, held)
                    held, room = [], CHUNK_ELEMENTS
                held.append((run, layout.piece(below.segment, start, stop)))
                room -= run.numel
        if held:
            yield _Batch(held[0][0].offset, held)

    def _add(self, batch: _Batch, held: Tensor) -> None:
        low, last = batch.pieces[0][1].offset, batch.pieces[-1][1]
        shift = low % ALIGN_BYTES  # offsets in memory are as aligned as those in the file
        nbytes = shift + last.offset + last.nbytes - low
        if nbytes > len(self._encoded):
            self._encoded = torch.empty(nbytes, dtype=torch.uint8)
        self._file.read_into(low, bytes_of(self._encoded)[shift:nbytes])
        for run, below in batch.pieces:
            begin, at = run.offset - batch.offset, below.offset - low + shift
            values = held[begin : begin + run.nbytes].view(torch_dtype(run.segment.spec.dtype))
            self._file.downlink.advance_(below.segment, values, self._encoded[at : at + below.nbytes])
            name = run.segment.spec.name
            if name in self._into:
                assign_run_(self._into[name], run.start, values)
