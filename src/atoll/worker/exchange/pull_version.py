"""How a version of the model comes to a worker: whole, or as what makes it of the version that the worker has.

Part by part into its base file, and on the way into its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor

from atoll.codecs.version_difference import Downlink
from atoll.errors import UNPULLED, Busy, DiskFull, Gone, PartCorrupt
from atoll.json_files import read_note, write_note
from atoll.protocol import messages, routes
from atoll.protocol.values import VersionRef
from atoll.runtime import failpoint, single_thread
from atoll.tensors.chunks import CHUNK_ELEMENTS, Scatter, assign_run_, bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import ALIGN_BYTES, Part, Piece
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.reference import TensorRef
from atoll.transport.object_server import Ranges
from atoll.transport.resumable_transfer import HttpTransfer
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.base_and_outbox import BaseFile, BaseNote, DiskFiles, PartsFile, name_of
from atoll.worker.log_lines import LOG, progress
from atoll.worker.session.session import Session

# -- What comes down in place of a version: received into a file, then added to the base, part by part.
#
#     delta.bin + delta.json      what was received; a pull that broke off goes on where it was
#
# Nothing of the base changes before all of a delta is here. From then on its note names the version that it becomes, as
# not complete: a process that is killed in between leaves a base of which each part has its own digest, or is pulled.


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


class DeltaAdder:
    """Brings a base file from one version to the next one; with fixed scratch, whatever the model's size.

    Args:
        file: has all of the delta.
        source, target: may be the same file.
        into: set to the version's values, whatever they have.
    """

    def __init__(self, file: DeltaFile, source: BaseFile, target: BaseFile, into: Tensors | None) -> None:
        self._file, self._source, self._target, self._into = file, source, target, into or {}
        self._held = torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8)
        self._encoded = torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8)

    def apply(self, note: BaseNote) -> list[Part]:
        """Write the version that the note is of.

        Returns:
            The parts that are not what their digests say; the tensors have what came of them.
        """
        self._target.begin(note)
        wrong = list[Part]()
        with torch.no_grad(), single_thread():
            for part, down in zip(self._target.layout.parts, self._file.downlink.parts, strict=True):
                if self.part(part, down).hex() != note.part_digests[part.index]:
                    wrong.append(part)
                failpoint("delta.part")
        return wrong

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


QUIET_S, LOOK_S = 5.0, 0.1
"""How long it is waited for a worker of a swarm that has a version before it is said, and between two looks."""


class Sources(Protocol):
    """In a swarm: the workers that have a version."""

    def in_order(self, sources: Sequence[str]) -> Sequence[str]:
        """Return the references in the order in which they are tried."""

    def connected(self, text: str, idle_timeout_s: float) -> AbstractContextManager[tuple[TensorRef, Ranges]]:
        """Reach the worker that a reference names."""


@dataclass(eq=False)
class Puller:
    """Brings versions of one fragment to this process.

    Attributes:
        transfer: over which connections.
        files: of the fragment.
        downlink: how differences come down; None: versions come whole.
        number: of the fragment; None: the run has one.
        sources: in a swarm: where versions are pulled from.
    """

    session: Session
    transfer: HttpTransfer
    files: DiskFiles
    downlink: Downlink | None
    number: int | None = None
    sources: Sources | None = None

    def __post_init__(self) -> None:
        self.fragment, self._delta_name = self.number or 0, name_of("delta", self.number)
        self._named = "" if self.number is None else f" of fragment {self.number}"

    def pull(
        self,
        version: VersionRef,
        into: Tensors | None,
        *,
        beside: bool = False,
        max_retries: int | None = None,
        waits: bool = True,
    ) -> None:
        """Bring a version into the base file, and on its way into the tensors.

        Args:
            beside: into the file beside the base instead.
            max_retries: attempts with a lost server.
            waits: whether it is waited for, whatever `max_retries`, once bytes have moved into the tensors: half a
                version is no model.

        Raises:
            Gone: the server no longer keeps it; ask for the head. The tensors may hold a part of it.
            TRANSIENT: the attempts are over; without `waits` the tensors may hold a part of the version.
        """
        session, source = self.session, self.files.base
        base = self.files.beside() if beside else source
        if base.holds(session.info.run, version.digest):
            if into is not None:
                apply_version.load_(into, base)
            return
        manifest = self._manifest(version.number, max_retries)
        if manifest.digest != version.digest:
            raise Gone(f"Version {version.number} is no longer the one that was offered.", "Ask for the head again.")
        held = source.note
        if held is not None and held.run == session.info.run and held.version > version.number:
            LOG.warning(
                "%s: the server went back from version %d to %d: restored, or fell back after a power loss",
                session.site,
                held.version,
                version.number,
            )
        session.tell(state=f"pulling version {version.number}")
        patience = None if into is not None and waits else max_retries
        wrong = self._go_down(manifest, base, source, into, max_retries, patience)
        if wrong is None:
            self._pull_whole(manifest, base, into, patience)
        elif wrong:
            self._pull_parts(manifest, base, wrong, None, patience)
        failpoint("pull.done")
        base.finish()
        if wrong and into is not None:
            apply_version.load_(into, base)

    def _manifest(self, number: int, max_retries: int | None) -> messages.Manifest:
        ask = partial(self.session.channel.manifest, self.fragment, number)
        return self.session.patiently(ask, max_retries, f"pull version {number}")

    # -- whole

    def _pull_whole(
        self, manifest: messages.Manifest, base: BaseFile, into: Tensors | None, max_retries: int | None
    ) -> None:
        held = base.note
        resumed = held is not None and held.digest == manifest.digest
        wanted = base.begin(self._note(manifest))
        fresh = into is not None and not resumed
        model = Scatter(base.layout, into) if into is not None and fresh else None
        self._pull_parts(manifest, base, wanted, model, max_retries)
        if into is not None and not fresh:
            apply_version.load_(into, base)

    def _pull_parts(
        self,
        manifest: messages.Manifest,
        base: BaseFile,
        wanted: Sequence[Part],
        model: Scatter | None,
        max_retries: int | None,
    ) -> None:
        path = routes.VERSION_DATA.format(fragment=self.fragment, version=manifest.version, digest=manifest.digest)
        self._bring(path, manifest.version, manifest.part_digests, base, wanted, model, max_retries)

    def _bring(
        self,
        path: str,
        version: int,
        digests: Sequence[str],
        file: PartsFile,
        wanted: Sequence[Part],
        model: Scatter | None,
        max_retries: int | None,
    ) -> None:
        """Pull parts into a file. Where the connection breaks, only what has not arrived yet is asked for again.

        What has arrived is remembered, not looked up in the file: a part may be there since it was the same in the
        version before, and the model has not got it.

        Args:
            path: where they are.
            version: that they make, for people.
            digests: of all parts of the file.
            model: gets them on the way.
        """
        session, expected = self.session, [bytes.fromhex(text) for text in digests]
        arrived = set[int]()

        def pull(parts: Ranges, at: str) -> None:
            todo = [part for part in wanted if part.index not in arrived]
            bar.resume()
            parts.pull(
                at, expected, todo, [file], into=model, on_bytes=bar.add, on_part=lambda part: arrived.add(part.index)
            )

        def fetch() -> None:
            if self.sources is None:
                pull(self.transfer, path)
            else:
                self._from_workers(self.sources, version, pull)

        of = f"{session.site}: pulling version {version}{self._named}"
        with progress(of, sum(part.nbytes for part in wanted)) as bar:
            session.patiently(fetch, max_retries, f"pull version {version}")

    def _from_workers(self, peers: Sources, version: int, pull: Callable[[Ranges, str], None]) -> None:
        """In a swarm: pull from one worker after the other that has a version; from this one, where it does.

        Raises:
            Busy: none of them can give it at this moment. Gone: the server says that it is no longer kept.
        """
        session, until_s = self.session, time.monotonic() + QUIET_S
        ask = partial(session.channel.manifest, self.fragment, version)
        while not (sources := ask().sources) and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            session.on_wait()
        why = "none that is here has it."
        for source in peers.in_order(sources):
            try:
                with peers.connected(source, session.info.idle_timeout_s) as (ref, parts):
                    return pull(parts, routes.OBJECT_DATA.format(object=ref.object))
            except UNPULLED as error:  # it may have let go of it at this moment, or have ended
                why = error.message
                LOG.info("%s: version %d is asked of another worker: %s", session.site, version, why)
        raise Busy(
            f"No worker can give version {version} at this moment: {why}", "It goes on when one is back that has it."
        )

    def _note(self, manifest: messages.Manifest) -> BaseNote:
        run, fragment = self.session.info.run, self.fragment
        return BaseNote(run, fragment, manifest.version, manifest.digest, manifest.part_digests, complete=False)

    # -- as a difference

    def _go_down(
        self,
        manifest: messages.Manifest,
        base: BaseFile,
        source: BaseFile,
        into: Tensors | None,
        max_retries: int | None,
        patience: int | None,
    ) -> list[Part] | None:
        """Make the version of the one that `source` has, over those between.

        Args:
            patience: attempts once `base` has changed.

        Returns:
            The parts that did not come out right; None where the version is to be pulled whole.
        """
        if self.downlink is None or not (steps := self._steps(manifest, source, max_retries)):
            return None
        site, wrong = self.session.site, list[Part]()
        try:
            file = DeltaFile(self.files.folder, self.downlink, self._delta_name)
        except DiskFull as error:
            LOG.warning("%s: version %d is pulled whole: %s", site, manifest.version, error)
            return None
        try:
            for number, step in enumerate(steps, 1):
                if number > 1:
                    base.finish()
                last = number == len(steps)
                self._receive(step, file, max_retries if number == 1 else patience)
                wrong = DeltaAdder(file, source, base, into if last else None).apply(self._note(step))
                if wrong:
                    LOG.warning(
                        "%s: %d of %d parts of version %d did not come of what went down, and are pulled whole",
                        site,
                        len(wrong),
                        len(base.layout.parts),
                        step.version,
                    )
                    if not last:
                        return None
                source = base
        except (Gone, PartCorrupt) as error:
            LOG.info("%s: version %d is pulled whole: %s", site, manifest.version, error)
            return None
        finally:
            file.close()
        return wrong

    def _steps(self, manifest: messages.Manifest, source: BaseFile, max_retries: int | None) -> list[messages.Manifest]:
        """The versions from that in `source` to this one, each with what it is made by; none where whole is less."""
        assert self.downlink is not None
        run, note = self.session.info.run, source.note
        if note is None or note.run != run or not note.complete or not note.digest:
            return []
        steps, nbytes = list[messages.Manifest](), 0
        while True:
            delta = manifest.delta
            if delta is None or delta.layout_digest != self.downlink.layout.digest:
                return []
            steps, nbytes = [manifest, *steps], nbytes + delta.nbytes
            if nbytes >= self.files.base.layout.nbytes:
                return []
            if delta.base_digest == note.digest:
                return steps if source.holds(run, note.digest) else []
            if delta.base_version <= note.version:
                return []
            try:
                manifest = self._manifest(delta.base_version, max_retries)
            except Gone:
                return []
            if manifest.digest != delta.base_digest:
                return []

    def _receive(self, manifest: messages.Manifest, file: DeltaFile, max_retries: int | None) -> None:
        """Have all of what a version is made by in the file.

        Raises:
            Gone: the server no longer keeps it. PartCorrupt: its disk damaged it.
        """
        delta = manifest.delta
        assert delta is not None  # `_steps` gives none without
        path = routes.DELTA_DATA.format(fragment=self.fragment, version=manifest.version, digest=delta.digest)
        wanted = file.begin(delta, manifest.digest)
        self._bring(path, manifest.version, delta.part_digests, file, wanted, None, max_retries)
