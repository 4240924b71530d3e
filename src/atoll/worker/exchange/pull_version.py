"""How a version of the model comes to a worker: whole, or as what makes it of the version that the worker has.

Part by part into its base file, and on the way into its tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from blake3 import blake3

from atoll.codecs.version_difference import Downlink
from atoll.errors import UNPULLED, Busy, DiskFull, Gone, PartCorrupt
from atoll.json_files import read_note, write_note
from atoll.protocol import messages, routes
from atoll.protocol.messages import VersionRef
from atoll.runtime import failpoint, single_thread
from atoll.tensors.chunks import CHUNK_ELEMENTS, Scatter, assign_run_, bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import Part, chunks
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.reference import TensorRef
from atoll.transport.object_server import Ranges
from atoll.transport.part_transfer import HttpTransfer
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


class DeltaAdder:
    """Brings a base file from one version to the next one; with fixed scratch, whatever the model's size.

    Args:
        file: has all of the delta.
        source, target: may be the same file.
        into: set to the version's values, whatever they have.
    """

    def __init__(self, file: DeltaFile, source: BaseFile, target: BaseFile, into: Tensors | None) -> None:
        self._file, self._source, self._target, self._into = file, source, target, into or {}
        self._memory = torch.empty(CHUNK_ELEMENTS * _WIDEST_BYTES, dtype=torch.uint8)
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
                if self._part(part, down).hex() != note.part_digests[part.index]:
                    wrong.append(part)
                failpoint("delta.part")
        return wrong

    def _part(self, part: Part, down: Part) -> bytes:
        """Write one part of the version, its tensors back to back; return its BLAKE3."""
        hasher, scratch, downlink = blake3(), bytes_of(self._memory), self._file.downlink
        first = part.pieces[0].offset if part.pieces else part.stop
        for at in range(part.start, first, len(scratch)):  # the file's header
            view = scratch[: first - at]
            self._source.read_into(at, view)
            self._put(at, view, hasher)
        segments = {piece.segment.spec.name: piece.segment for piece in down.pieces}
        for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
            spec, segment = piece.segment.spec, segments[piece.segment.spec.name]
            below = downlink.layout.piece(segment, start, stop)
            values = self._source.elements(piece, start, stop, scratch, torch_dtype(spec.dtype))
            encoded = self._encoded[: below.nbytes]
            self._file.read_into(below.offset, bytes_of(encoded))
            downlink.advance_(segment, values, encoded)
            if spec.name in self._into:
                assign_run_(self._into[spec.name], start, values)
            at = self._target.layout.by_name[spec.name].offset + start * spec.item_bytes
            self._put(at, scratch[: (stop - start) * spec.item_bytes], hasher)
        return hasher.digest()

    def _put(self, offset: int, data: memoryview, hasher: blake3) -> None:
        hasher.update(data)
        self._target.write(offset, data)


QUIET_S, LOOK_S = 5.0, 0.1
"""How long it is waited for a worker of a swarm that has a version before it is said, and between two looks."""


class Sources(Protocol):
    """In a swarm: the workers that have a version."""

    def in_order(self, sources: Sequence[str]) -> Sequence[str]:
        """Return the references in the order in which they are tried."""

    def connected(self, text: str, idle_timeout_s: float) -> AbstractContextManager[tuple[TensorRef, Ranges]]:
        """Reach the worker that a reference names."""


class Patience(NamedTuple):
    """Attempts at a pull after the first one; None: as long as ATOLL_GIVE_UP_S says.

    Attributes:
        before: any byte has moved into the model.
        within: from then on: half a version is no model.
    """

    before: int | None = None
    within: int | None = None

    def into(self, model: object) -> Patience:
        """Return that of a pull that moves nothing into the model, where there is none."""
        return self if model is not None else Patience(self.before, self.before)


WAITS = Patience()


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
        self.fragment = self.number or 0

    def pull(self, version: VersionRef, into: Tensors | None, patience: Patience, *, beside: bool = False) -> None:
        """Bring a version into the base file, and on its way into the tensors.

        Args:
            beside: into the file beside the base instead.

        Raises:
            Gone: the server no longer keeps it; ask for the head. The tensors may hold a part of it.
            TRANSIENT: the attempts are over; the tensors may hold a part of the version, where `patience.within` ends.
        """
        session, source, patience = self.session, self.files.base, patience.into(into)
        base = self.files.beside() if beside else source
        if base.holds(session.info.run, version.digest):
            if into is not None:
                apply_version.load_(into, base)
            return
        manifest = self._manifest(version.number, patience.before)
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
        wanted = self._add_differences(manifest, base, source, into, patience)
        is_whole, model, resumed = wanted is None, None, base.note is not None and base.note.digest == version.digest
        if wanted is None:
            wanted = base.begin(self._note(manifest))
            model = Scatter(base.layout, into) if into is not None and not resumed else None
        if wanted:
            path = routes.VERSION_DATA.format(fragment=self.fragment, version=version.number, digest=version.digest)
            self._bring(path, manifest.version, manifest.part_digests, base, wanted, model, patience.within)
        failpoint("pull.done")
        base.finish()
        if into is not None and model is None and (wanted or is_whole):
            apply_version.load_(into, base)

    def _manifest(self, number: int, retries: int | None) -> messages.Manifest:
        ask = partial(self.session.channel.manifest, self.fragment, number)
        return self.session.patiently(ask, retries, f"pull version {number}")

    def _note(self, manifest: messages.Manifest) -> BaseNote:
        run, fragment = self.session.info.run, self.fragment
        return BaseNote(run, fragment, manifest.version, manifest.digest, manifest.part_digests, complete=False)

    def _bring(
        self,
        path: str,
        version: int,
        digests: Sequence[str],
        file: PartsFile,
        wanted: Sequence[Part],
        model: Scatter | None,
        retries: int | None,
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

        of = "" if self.number is None else f" of fragment {self.number}"
        with progress(f"{session.site}: pulling version {version}{of}", sum(part.nbytes for part in wanted)) as bar:
            session.patiently(fetch, retries, f"pull version {version}")

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

    # -- as a difference

    def _add_differences(
        self,
        manifest: messages.Manifest,
        base: BaseFile,
        source: BaseFile,
        into: Tensors | None,
        patience: Patience,
    ) -> list[Part] | None:
        """Make the version of the one that `source` has, over those between.

        Returns:
            The parts that did not come out right; None where the version is to be pulled whole.
        """
        if self.downlink is None or not (steps := self._steps(self.downlink, manifest, source, patience.before)):
            return None
        site, wrong, retries = self.session.site, list[Part](), patience.before
        try:
            file = DeltaFile(self.files.folder, self.downlink, name_of("delta", self.number))
        except DiskFull as error:
            LOG.warning("%s: version %d is pulled whole: %s", site, manifest.version, error)
            return None
        try:
            for step, delta in steps:
                path = routes.DELTA_DATA.format(fragment=self.fragment, version=step.version, digest=delta.digest)
                missing = file.begin(delta, step.digest)
                self._bring(path, step.version, delta.part_digests, file, missing, None, retries)
                is_last = step is manifest
                wrong = DeltaAdder(file, source, base, into if is_last else None).apply(self._note(step))
                if wrong:
                    LOG.warning(
                        "%s: %d of %d parts of version %d did not come of what went down, and are pulled whole",
                        site,
                        len(wrong),
                        len(base.layout.parts),
                        step.version,
                    )
                if not is_last:
                    if wrong:
                        return None
                    base.finish()
                source, retries = base, patience.within
        except (Gone, PartCorrupt) as error:
            LOG.info("%s: version %d is pulled whole: %s", site, manifest.version, error)
            return None
        finally:
            file.close()
        return wrong

    def _steps(
        self, downlink: Downlink, manifest: messages.Manifest, source: BaseFile, retries: int | None
    ) -> list[tuple[messages.Manifest, messages.Delta]]:
        """Return the versions from that in `source` to this one, each with what makes it; none where whole is less."""
        run, note, nbytes = self.session.info.run, source.note, 0
        steps = list[tuple[messages.Manifest, messages.Delta]]()
        if note is None or note.run != run or not note.complete or not note.digest:
            return []
        while True:
            delta = manifest.delta
            if delta is None or delta.layout_digest != downlink.layout.digest:
                return []
            steps, nbytes = [(manifest, delta), *steps], nbytes + delta.nbytes
            if nbytes >= self.files.base.layout.nbytes:
                return []
            if delta.base_digest == note.digest:
                return steps if source.holds(run, note.digest) else []
            if delta.base_version <= note.version:
                return []
            try:
                manifest = self._manifest(delta.base_version, retries)
            except Gone:
                return []
            if manifest.digest != delta.base_digest:
                return []
