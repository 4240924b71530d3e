"""Download versions of the global model: whole, or as the difference from the version that the worker has.

Arriving parts are written into the base file and, at the same time, into the model's tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3

from atoll.codecs.version_difference import Downlink
from atoll.errors import DiskFull, Gone, PartCorrupt
from atoll.format_text import number_of, of_fragment
from atoll.json_files import read_note, write_note
from atoll.protocol import messages, routes
from atoll.protocol.messages import VersionRef
from atoll.runtime import failpoint, single_thread
from atoll.tensors.chunks import CHUNK_ELEMENTS, WIDEST_BYTES, Scatter, assign_run_, bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import Part, chunks
from atoll.tensors.module_tensors import Tensors
from atoll.transport.object_server import PartSource
from atoll.transport.part_transfer import Delivery, read_parts
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.base_and_outbox import BaseFile, BaseNote, DiskFiles, PartsFile, name_of
from atoll.worker.exchange.carrier import Carrier
from atoll.worker.log_lines import LOG, progress
from atoll.worker.session.session import Session

# -- Deltas: the encoded difference between two versions. A delta is downloaded into a file, then added to the base.
#
#     delta.bin + delta.json      the downloaded parts; an interrupted download resumes from them
#
# The base does not change before the whole delta is downloaded. While the delta is added, the base's note names the new
# version as incomplete. If the process is killed then, the next pull downloads all parts that differ from their digest.


@dataclass(frozen=True)
class DeltaNote:
    """The JSON note of a file with a delta: the encoded difference between two successive versions.

    Attributes:
        version: digest of the version that results when the delta is added to the previous version.
    """

    version: str


class DeltaFile(PartsFile):
    """The file of the last downloaded delta: the encoded difference between two successive versions of the model.

    Args:
        folder: the site's folder in the run; locked by the caller.
        downlink: layout and codecs of deltas.
        name: name of the file, without suffix.
    """

    def __init__(self, folder: Path, downlink: Downlink, name: str = "delta") -> None:
        super().__init__(folder / f"{name}.bin", downlink.layout.nbytes, downlink.parts, downlink.count)
        self.downlink = downlink
        self._note_path = folder / f"{name}.json"
        if self.was_missing:
            self._note_path.unlink(missing_ok=True)

    def begin(self, delta: messages.Delta, version: str) -> list[Part]:
        """Write the note for a delta that is about to be downloaded. Return the delta's parts that are still missing.

        Args:
            delta: the delta's description.
            version: digest of the version that results when the delta is added.
        """
        parts = [part for part in self.downlink.parts if part.nbytes]
        if read_note(self._note_path, DeltaNote) == DeltaNote(version):
            return self.differing(delta.part_digests, parts)
        write_note(self._note_path, DeltaNote(version))
        return parts


class DeltaAdder:
    """Adds one delta (the encoded difference between two versions) to a base file, with a fixed amount of memory.

    Args:
        file: the complete delta.
        source: the file of the version that the delta is added to.
        target: the file to write the resulting version into; it may be `source`.
        into: tensors that get the resulting version's values, too; None: only the file is written.
    """

    def __init__(self, file: DeltaFile, source: BaseFile, target: BaseFile, into: Tensors | None) -> None:
        self._file, self._source, self._target, self._into = file, source, target, into or {}
        self._memory = torch.empty(CHUNK_ELEMENTS * WIDEST_BYTES, dtype=torch.uint8)
        self._encoded = torch.empty(CHUNK_ELEMENTS * WIDEST_BYTES, dtype=torch.uint8)

    def apply(self, note: BaseNote) -> list[Part]:
        """Add the delta: write the resulting version, which `note` describes, into the target file and the tensors.

        Returns:
            The parts of the version that do not match the digests in `note`. For these parts, the tensors have wrong
            values, too.
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
        """Write one part of the resulting version, and return the part's BLAKE3 digest.

        Args:
            part: the part of the version.
            down: the part of the delta that has the same tensors.
        """
        hasher, scratch, downlink = blake3(), bytes_of(self._memory), self._file.downlink
        first = part.pieces[0].offset if part.pieces else part.stop
        for offset in range(part.start, first, len(scratch)):  # the file's header
            view = scratch[: first - offset]
            self._source.read_into(offset, view)
            self._put(offset, view, hasher)
        segments = {piece.segment.spec.name: piece.segment for piece in down.pieces}
        for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
            spec, segment = piece.segment.spec, segments[piece.segment.spec.name]
            below = downlink.layout.piece(segment, start, stop)
            values = self._source.elements(piece, start, stop, scratch, torch_dtype(spec.dtype))
            encoded = self._encoded[: below.nbytes]
            self._file.read_into(below.offset, bytes_of(encoded))
            downlink.advance_(segment, values, encoded)
            if spec.name in self._into and not spec.is_kept:
                assign_run_(self._into[spec.name], start, values)
            offset = self._target.layout.by_name[spec.name].offset + start * spec.item_bytes
            self._put(offset, scratch[: (stop - start) * spec.item_bytes], hasher)
        return hasher.digest()

    def _put(self, offset: int, data: memoryview, hasher: blake3) -> None:
        hasher.update(data)
        self._target.write(offset, data)


MOST_STEPS = 32
"""Maximum number of differences in a row that a site downloads in place of a whole version."""


class Patience(NamedTuple):
    """How often a download is retried after network errors.

    Either number can be None: then the download is retried for as long as `ATOLL_GIVE_UP_S` says.

    Attributes:
        before: number of retries while no value of the version has been loaded into the model.
        within: number of retries after that. It is often larger, since a model that has only a part of a version is
            hardly usable.
    """

    before: int | None = None
    within: int | None = None

    def into(self, model: object) -> Patience:
        """Return the numbers of retries for a download into `model`.

        If `model` is None, no value is ever loaded into a model, so both numbers are `before`.
        """
        return self if model is not None else Patience(self.before, self.before)


WAITS = Patience()
"""Retry for as long as `ATOLL_GIVE_UP_S` says, both before and after the first value is loaded."""


@dataclass(eq=False)
class Puller:
    """Downloads versions of one fragment of the model.

    Attributes:
        session: the worker's session, which sends heartbeats and makes calls to the server.
        carrier: downloads parts from where they are.
        files: the fragment's files.
        downlink: encodes a download as the difference from the previous version; None: versions are downloaded whole.
        number: the fragment's number; None: the run has one fragment.
    """

    session: Session
    carrier: Carrier
    files: DiskFiles
    downlink: Downlink | None
    number: int | None = None

    def __post_init__(self) -> None:
        self.fragment = self.number or 0

    def pull(self, version: VersionRef, into: Tensors | None, patience: Patience, *, to_next: bool = False) -> None:
        """Download a version into the base file, and load it into the tensors.

        Args:
            version: the version to download.
            into: the tensors to load; None: only the file is written.
            patience: the number of retries.
            to_next: whether to write the file `base-next` instead of the base file.

        Raises:
            Gone: the server no longer keeps the version; ask for the newest one. Some tensors may have the version's
                values.
            PartCorrupt: the server lists parts of another file, or a part arrived damaged several times.
            TRANSIENT: the last retry failed. If the download had begun, some tensors may have the version's values.
        """
        session, source, patience = self.session, self.files.base, patience.into(into)
        base = self.files.next_base() if to_next else source
        if base.holds(session.info.run, version.digest):
            if into is not None:
                apply_version.load_(into, base)
            return
        arrived = self._arrived(version)
        manifest = arrived[0] if arrived else self._manifest(version.number, version.digest, patience.before)
        base_note = source.note
        if base_note is not None and base_note.run == session.info.run and base_note.version > version.number:
            LOG.warning(
                "%s: the server went back from version %d to %d: its admin asked for that, or it was restored",
                session.site,
                base_note.version,
                version.number,
            )
        session.tell(state=f"pulling version {version.number}")
        missing = self._add_differences(manifest, base, source, into, patience)
        is_whole, model, resumed = missing is None, None, base.note is not None and base.note.digest == version.digest
        if missing is None:
            missing = base.begin(self._note(manifest))
            model = Scatter(base.layout, into) if into is not None and not resumed else None
        if arrived and is_whole:
            missing = self._write_arrived(arrived[1], manifest, base, missing, model)
        if missing:
            path = routes.VERSION_DATA.format(fragment=self.fragment, version=version.number, digest=version.digest)
            self._pull_parts(path, manifest.version, manifest.part_digests, base, missing, model, patience.within)
        failpoint("pull.done")
        base.finish()
        if into is not None and model is None and (missing or is_whole):
            apply_version.load_(into, base)

    def _arrived(self, version: VersionRef) -> tuple[messages.VersionManifest, memoryview] | None:
        """Return the manifest and the bytes of a version that came with its ticket; None if it did not."""
        arrived = self.session.arrived.pop(self.fragment, None)
        if arrived is None or (arrived[0].version, arrived[0].digest) != (version.number, version.digest):
            return None
        return self._require_manifest(arrived[0], version.number, version.digest), arrived[1]

    def _manifest(self, number: int, digest: str, retries: int | None) -> messages.VersionManifest:
        """Ask for the manifest of a version, and return it after `_require_manifest`."""
        ask = partial(self.session.manifest, self.fragment, number)
        return self._require_manifest(self.session.patiently(ask, retries, f"pull version {number}"), number, digest)

    def _require_manifest(
        self, manifest: messages.VersionManifest, number: int, digest: str
    ) -> messages.VersionManifest:
        """Check that a manifest lists the parts of the version with this number and digest, and return it."""
        if manifest.digest != digest or manifest.version != number:
            raise Gone(
                f"Version {number} at the server is not the version that the server announced before.",
                "Ask for the newest version again.",
            )
        manifest.require_digest(digest, self.files.base.layout, f"version {number}")
        return manifest

    def _note(self, manifest: messages.VersionManifest) -> BaseNote:
        run, fragment = self.session.info.run, self.fragment
        return BaseNote(run, fragment, manifest.version, manifest.digest, manifest.part_digests, complete=False)

    def _write_arrived(
        self,
        data: memoryview,
        manifest: messages.VersionManifest,
        base: BaseFile,
        missing: list[Part],
        model: Scatter | None,
    ) -> list[Part]:
        """Write parts of a version, which came with the ticket as bytes, into the base file.

        Args:
            data: the bytes of the version; empty if they did not come.
            manifest: describes the version.
            base: the base file.
            missing: the parts to write.
            model: copies the parts into the model's tensors, too; None: only the file is written.

        Returns:
            The parts that are still missing: all if `data` has another size, and else those that arrived damaged.
        """
        if len(data) != base.nbytes:
            return missing
        taken = set[int]()

        def read(run: memoryview, offset: int, part: Part) -> None:
            run[:] = data[offset : offset + len(run)]

        digests = [bytes.fromhex(text) for text in manifest.part_digests]
        count = self.session.counters.add
        delivery = Delivery(
            digests, [base], model, lambda nbytes: count(down=nbytes), lambda part: taken.add(part.index)
        )
        with contextlib.suppress(PartCorrupt):
            read_parts(missing, delivery, read, "Part {} arrived damaged.", "")
        return [part for part in missing if part.index not in taken]

    def _pull_parts(
        self,
        path: str,
        version: int,
        digests: Sequence[str],
        file: PartsFile,
        missing: Sequence[Part],
        model: Scatter | None,
        retries: int | None,
    ) -> None:
        """Download parts into a file. A retry asks only for the parts that have not arrived yet.

        The file's content does not show which parts have arrived: a part that is equal in the previous version is in
        the file already, but must still be loaded into the model. So this method remembers the arrived parts.

        Args:
            path: URL path of the version's or the difference's bytes.
            version: number of the version, for the log.
            digests: BLAKE3 in hex of all parts of the file, in order.
            file: the file to write.
            missing: the parts to download.
            model: copies arriving parts into the model's tensors, too; None: only the file is written.
            retries: retries after a network error; None: retry for as long as `ATOLL_GIVE_UP_S` says.
        """
        session, expected = self.session, [bytes.fromhex(text) for text in digests]
        arrived = set[int]()

        def pull(parts: PartSource, path: str) -> None:
            todo = [part for part in missing if part.index not in arrived]
            bar.resume()
            parts.pull(
                path, expected, todo, [file], into=model, on_bytes=bar.add, on_part=lambda part: arrived.add(part.index)
            )

        what = f"pulling version {version}{of_fragment(self.number)}"
        with progress(f"{session.site}: {what}", sum(part.nbytes for part in missing)) as bar:
            ask = partial(self.carrier.fetch, self.fragment, version, path, pull)
            session.patiently(ask, retries, f"pull version {version}")

    # -- as a difference

    def _add_differences(
        self,
        manifest: messages.VersionManifest,
        base: BaseFile,
        source: BaseFile,
        into: Tensors | None,
        patience: Patience,
    ) -> list[Part] | None:
        """Make a version from the older one in `source`: download each delta (difference) between the two, and add it.

        Args:
            manifest: describes the version: its parts and their digests.
            base: the file to write the version into.
            source: the file of the older version; it may be `base`.
            into: tensors that get the version's values, too; None: only the file is written.
            patience: the number of retries.

        Returns:
            The parts that do not match their digests afterwards; None if the version has to be downloaded whole.
        """
        if self.downlink is None or not (steps := self._steps(self.downlink, manifest, source, patience.before)):
            return None
        site, wrong, retries = self.session.site, list[Part](), patience.before
        try:
            file = DeltaFile(self.files.folder, self.downlink, name_of("delta", self.number))
        except DiskFull as error:
            LOG.warning("%s: version %d is downloaded in full, not as a difference: %s", site, manifest.version, error)
            return None
        try:
            for step, delta in steps:
                delta.require_digest(delta.digest, self.downlink.layout, f"the difference to version {step.version}")
                path = routes.DELTA_DATA.format(fragment=self.fragment, version=step.version, digest=delta.digest)
                missing = file.begin(delta, step.digest)
                self._pull_parts(path, step.version, delta.part_digests, file, missing, None, retries)
                is_last = step is manifest
                wrong = DeltaAdder(file, source, base, into if is_last else None).apply(self._note(step))
                if wrong:
                    LOG.warning(
                        "%s: after the downloaded difference was added, %d of %s of version %d are not as "
                        "expected; %s downloaded in full",
                        site,
                        len(wrong),
                        number_of(len(base.layout.parts), "part"),
                        step.version,
                        "they are" if is_last else f"version {manifest.version} is",
                    )
                if not is_last:
                    if wrong:
                        return None
                    base.finish()
                source, retries = base, patience.within
        except (Gone, PartCorrupt) as error:
            LOG.info("%s: version %d is downloaded in full, not as a difference: %s", site, manifest.version, error)
            return None
        finally:
            file.close()
        return wrong

    def _steps(
        self, downlink: Downlink, manifest: messages.VersionManifest, source: BaseFile, retries: int | None
    ) -> list[tuple[messages.VersionManifest, messages.Delta]]:
        """Return the versions that follow the one in `source`, up to that of `manifest`, each with its delta.

        A delta is the difference from the previous version. The list is empty if a delta is missing, or if all deltas
        together have at least as many bytes as the whole version, or are more than `MOST_STEPS`.
        """
        run, note, nbytes = self.session.info.run, source.note, 0
        steps = list[tuple[messages.VersionManifest, messages.Delta]]()
        if note is None or note.run != run or not note.complete or not note.digest:
            return []
        while True:
            delta = manifest.delta
            if delta is None:
                return []
            steps, nbytes = [(manifest, delta), *steps], nbytes + downlink.layout.nbytes
            if nbytes >= self.files.base.layout.nbytes or len(steps) > MOST_STEPS:
                return []
            if delta.base_digest == note.digest:
                return steps if source.holds(run, note.digest) else []
            if delta.base_version <= note.version:
                return []
            try:
                manifest = self._manifest(delta.base_version, delta.base_digest, retries)
            except (Gone, PartCorrupt):
                return []
