"""The two files of a worker: the base, from which it trains, and the outbox, with the update to send.

Both files are preallocated and rewritten in place. The operating system caches them, so the process itself needs
no second copy of the model in memory. Each file has a note: a small JSON file that says what the file contains and is
replaced atomically. The content of a file without a note is ignored.

    base.safetensors + base.json      the downloaded version of the global model; any safetensors reader opens it
    outbox.bin       + outbox.json    the encoded update for one ticket; kept until the next update is formed

A ticket is the server's permission to submit one update to one round. Each run has its own folder. `remove_earlier`
removes the folders of earlier runs.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from atoll.errors import AtollError, DiskFull, StateLocked, StoreError, VersionSkew
from atoll.format_text import number_of
from atoll.json_files import NoteDamaged, peek_note, read_note, write_note
from atoll.posix import (
    Descriptor,
    FolderTaken,
    Lock,
    folder_error,
    open_own,
    own_folder,
    read_at,
    require_no_pipes,
    take_folder,
    usable,
    write_at,
)
from atoll.protocol.messages import Complete, Report
from atoll.runtime import failpoint
from atoll.system_calls import allocate
from atoll.tensors.byte_runs import Move, read_pieces
from atoll.tensors.chunks import CHUNK_BYTES, bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import Layout, Part, Piece, Segment
from atoll.worker.log_lines import LOG, size


def name_of(name: str, fragment: int | None) -> str:
    """Return the file name `name` with the fragment's number added; unchanged if `fragment` is None (one fragment)."""
    return name if fragment is None else f"{name}-f{fragment}"


@dataclass(frozen=True)
class BaseNote:
    """The JSON note that says which version of the global model is in the base file.

    Attributes:
        complete: whether every byte of the version has been written.
        digest: digest of the version; empty if the file holds local values instead of a version.
        part_digests: BLAKE3 of each part, in hex.
    """

    run: str
    fragment: int
    version: int
    digest: str
    part_digests: list[str]
    complete: bool


@dataclass(frozen=True)
class OutboxNote:
    """The JSON note that describes the update in the outbox file. Only a complete update has a note.

    Attributes:
        part_digests: BLAKE3 of each part, in hex.
        report: what the site reports of the update; from the file, as JSON values.
        sent: whether the server has received the update and recorded it on disk.
        site: the site that formed the update.
        generation: the generation of the algorithm's state with which it was formed.
        policy: digest of the site's policy, the filters of which were applied; empty: the site had none.
        norm: L2 norm of its parameters, if the site has a policy.
        filters: the filters that were applied, as text.
    """

    run: str
    ticket: int
    fragment: int
    base_version: int
    base_digest: str
    layout_digest: str
    digest: str
    part_digests: list[str]
    report: Report
    round: int = 0
    sent: bool = False
    site: str = ""
    generation: int = 0
    policy: str = ""
    norm: float = 0.0
    filters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.report, dict):
            object.__setattr__(self, "report", Report(**self.report))
        object.__setattr__(self, "filters", tuple(self.filters))  # JSON has lists

    def complete(self, source: str | None = None) -> Complete:
        """Return the message that the update is complete.

        Args:
            source: in a swarm, a reference with which other workers download the update; else None.
        """
        facts, digest, base_digest = dict(self.report), self.digest, self.base_digest
        return Complete(**facts, digest=digest, base_digest=base_digest, generation=self.generation, source=source)


class TensorFile:
    """An open file that contains tensors. Several threads may read from it at the same time.

    Args:
        path: the file's path.
        descriptor: the file's descriptor; `close` closes it.
        nbytes: size of the file.

    Attributes:
        layout: offset and dtype of each tensor in the file; only set if the file contains a version of the global
            model.
    """

    layout: Layout

    def __init__(self, path: Path, descriptor: Descriptor, nbytes: int) -> None:
        self.path, self.nbytes, self._descriptor = path, nbytes, descriptor

    @property
    def fd(self) -> int:
        """The file's descriptor, as a number."""
        return self._descriptor.number

    def read_into(self, offset: int, target: memoryview) -> None:
        """Read bytes from the file into `target`, starting at byte `offset` of the file, until `target` is full.

        Raises:
            EOFError: the file ends before `target` is full.
        """
        try:
            read_at(self.fd, target, offset)
        except EOFError as error:
            raise EOFError(f"{self.path} is too short: {error}") from None

    def values(self, segment: Segment, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the unencoded tensor at `segment`, in new memory."""
        values = torch.empty(stop - start, dtype=torch_dtype(segment.spec.dtype), device="cpu")
        self.read_into(segment.offset + start * segment.spec.item_bytes, bytes_of(values))
        return values

    def read_pieces(self, moves: Iterable[Move]) -> None:
        """Read several ranges of the file, each into its own buffer. Neighbouring ranges are read by one system call.

        Args:
            moves: for each range, its offset in the file and the buffer to fill.

        Raises:
            EOFError: the file ends before a buffer is full.
        """
        try:
            read_pieces(self.fd, moves)
        except EOFError as error:
            raise EOFError(f"{self.path} is too short: {error}") from None

    def elements(self, piece: Piece, start: int, stop: int, scratch: memoryview, dtype: torch.dtype) -> Tensor:
        """Read elements [start, stop) of the tensor of `piece` into `scratch`. Return a tensor in that memory."""
        item = piece.segment.spec.item_bytes
        view = scratch[: (stop - start) * item]
        self.read_into(self.layout.by_name[piece.segment.spec.name].offset + start * item, view)
        return torch.frombuffer(view, dtype=dtype)

    def values_of(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the tensor `name` of the version in this file, in new memory."""
        return self.values(self.layout.by_name[name], start, stop)

    def close(self) -> None:
        """Close the file as soon as no thread is using its descriptor."""
        self._descriptor.close()


class ScratchFile(TensorFile):
    """A preallocated file of fixed size that is rewritten in place. Several threads may read and write it at once.

    Attributes:
        was_missing: whether the file was missing or had another size, and was therefore created again. An earlier
            note does not describe the new file.

    Args:
        path: the file's path.
        nbytes: size of the file.
        used: the ranges of the file for which disk space is allocated, as (offset, nbytes); None: the whole file.

    Raises:
        DiskFull: the file cannot be allocated.
        StoreError: the file cannot be opened, for example because it is a folder or a link.
    """

    def __init__(self, path: Path, nbytes: int, used: Iterable[tuple[int, int]] | None = None) -> None:
        with usable(path.parent):
            fd = open_own(path, os.O_RDWR | os.O_CREAT)
        super().__init__(path, Descriptor(fd), nbytes)
        self._one_writes = threading.Lock()  # the kernel serialises writes to a file; other writers would spin
        self._used = ((0, nbytes),) if used is None else tuple(used)
        self.was_missing = os.fstat(self.fd).st_size != nbytes
        if self.was_missing:
            try:
                self.zero()
            except DiskFull:
                self.close()
                path.unlink(missing_ok=True)
                raise

    def zero(self) -> None:
        """Set all bytes of the file to zero, without writing them.

        Raises:
            DiskFull: the file cannot be allocated.
            StoreError: this process may not write a file of this size.
        """
        try:
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, self.nbytes)
            for offset, count in self._used:
                if count:
                    allocate(self.fd, offset, count)
        except OSError as error:
            if error.errno == errno.EFBIG:
                raise StoreError(
                    f"{self.path} would have {self.nbytes} bytes, more than this process may write to a file.",
                    "Raise the limit of the shell: ulimit -f unlimited.",
                ) from error
            raise DiskFull(
                f"The disk of {self.path.parent} does not have {size(self.nbytes)} of free space ({error.strerror}).",
                "Free disk space, or set ATOLL_DIR to a folder on a larger disk.",
            ) from error

    def write(self, offset: int, data: memoryview) -> None:
        """Write `data` at byte `offset` of the file. Safe from any thread, even while another thread closes the file.

        Raises:
            StoreError: this machine's disk is full, or fails.
        """
        try:
            failpoint("worker.write")
            with self._descriptor.used() as fd, self._one_writes:
                write_at(fd, data, offset)
        except OSError as error:
            raise StoreError(
                f"{self.path} cannot be written ({error.strerror}).",
                "Check the disk, or set ATOLL_DIR to a folder on another disk.",
            ) from error

    def digest(self, part: Part) -> bytes:
        """Return the BLAKE3 digest of a part's bytes in the file."""
        hasher, scratch = blake3(), bytearray(CHUNK_BYTES)
        for offset in range(part.start, part.stop, CHUNK_BYTES):
            view = memoryview(scratch)[: min(CHUNK_BYTES, part.stop - offset)]
            self.read_into(offset, view)
            hasher.update(view)
        return hasher.digest()

    def content_digest(self) -> str:
        """Return a digest of the file's content, in hex.

        The digest is BLAKE3 over the offset and bytes of each chunk of `CHUNK_BYTES` that has a byte other than zero.
        So the holes of a sparse file, which are all zero, need not be read.
        """
        hasher, zeros = blake3(), bytes(CHUNK_BYTES)
        offset = 0
        while (offset := _data_from(self.fd, offset, self.nbytes)) < self.nbytes:
            offset -= offset % CHUNK_BYTES
            run = bytearray(min(CHUNK_BYTES, self.nbytes - offset))
            self.read_into(offset, memoryview(run))
            if not zeros.startswith(run):
                hasher.update(offset.to_bytes(8, "little"))
                hasher.update(run)
            offset += len(run)
        return hasher.hexdigest()


def _data_from(fd: int, offset: int, nbytes: int) -> int:
    """Return the offset of the first data at or after `offset` in a sparse file; `nbytes` if there is only a hole.

    If the file system cannot report holes, return `offset`.
    """
    if offset >= nbytes:
        return nbytes
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        return nbytes if error.errno == errno.ENXIO else offset


class PartsFile(ScratchFile):
    """A preallocated file, divided into parts. If the model is sharded, the parts of other ranks take no disk space.

    Args:
        path: the file's path.
        nbytes: size of the file, including the parts of other ranks.
        parts: the parts that this file holds.
        count: total number of parts over all ranks.
    """

    def __init__(self, path: Path, nbytes: int, parts: Sequence[Part], count: int) -> None:
        used = None if len(parts) == count else ((part.start, part.nbytes) for part in parts)
        super().__init__(path, nbytes, used)
        self._parts, self._count = parts, count

    def differing(self, digests: Sequence[str], among: Collection[Part] | None = None) -> list[Part]:
        """Return the parts that do not match the given digests.

        Args:
            digests: BLAKE3 in hex of the parts of all ranks, in order.
            among: the parts to check; None: all parts that this file holds.
        """
        looked_at = self._parts if among is None else among
        if len(digests) != self._count:  # the digests are for other parts: no part is known to match
            return list(looked_at)
        return [part for part in looked_at if self.digest(part).hex() != digests[part.index]]


class BaseFile(PartsFile):
    """The base file: the version of the global model from which a worker trains, byte for byte as at the server."""

    def __init__(self, folder: Path, layout: Layout, name: str = "base") -> None:
        super().__init__(folder / f"{name}.safetensors", layout.nbytes, layout.parts, len(layout.all_parts))
        self.layout, self.name = layout, name
        self._note_path = folder / f"{name}.json"
        if self.was_missing:
            self._note_path.unlink(missing_ok=True)
        self.note = read_note(self._note_path, BaseNote)
        self._is_verified = False  # whether this process has written or checked every byte of the note's version

    def digest_of(self, run: str) -> str:
        """Return the digest of the run's version in the file, by its note; empty if the file has no whole version."""
        note: BaseNote | None = self.note
        return note.digest if note is not None and note.complete and note.run == run else ""

    def holds(self, run: str, digest: str) -> bool:
        """Return whether the file holds every byte of the version with this digest.

        If an earlier process wrote the file, this process first checks all bytes, once. After a power loss, the note
        may be on disk although some bytes of the file are not. A failing disk may also have damaged some bytes.
        """
        note: BaseNote | None = self.note
        if note is None or not note.complete or (note.run, note.digest) != (run, digest):
            return False
        if not self._is_verified:
            wrong = self.differing(note.part_digests)
            if wrong:
                LOG.warning(
                    "%s: %d of %s differ from what was downloaded; downloading them again. Check the disk.",
                    self.path,
                    len(wrong),
                    number_of(len(self.layout.parts), "part"),
                )
                self._write_note(replace(note, complete=False))
                return False
            self._is_verified = True
        return True

    def begin(self, note: BaseNote) -> list[Part]:
        """Write the note for a version that is about to be downloaded. Return the parts that have to be downloaded.

        The result leaves out the parts that an interrupted download of the same version left in the file, if they match
        their digests.
        """
        resumed = self.note is not None and (self.note.run, self.note.digest) == (note.run, note.digest)
        wanted = self.differing(note.part_digests) if resumed else list(self.layout.parts)
        self._write_note(note)
        return wanted

    def finish(self) -> None:
        """Record in the note that every byte of the version has been written."""
        assert self.note is not None
        self._write_note(replace(self.note, complete=True))
        self._is_verified = True

    def begin_local(self) -> None:
        """Remove the version's digests from the note. Call this before local values are written over the version."""
        assert self.note is not None
        self._write_note(replace(self.note, digest="", part_digests=[]))

    def replace_with(self, other: BaseFile) -> None:
        """Replace this file and its note with `other` and its note, and close `other`. `other` must be complete."""
        assert other.note is not None
        os.replace(other.path, self.path)
        other._note_path.unlink(missing_ok=True)
        self._descriptor, other._descriptor = other._descriptor, self._descriptor
        other.close()
        self._is_verified = other._is_verified
        self._write_note(other.note)

    def _write_note(self, note: BaseNote) -> None:
        self.note = note
        write_note(self._note_path, note)


class Outbox(PartsFile):
    """The outbox file, which holds the update that was formed last. A server that has lost power may need it again.

    If the note names another site, the update is not sent, and the note stays on disk.
    """

    def __init__(self, folder: Path, layout: Layout, name: str = "outbox", site: str = "") -> None:
        super().__init__(folder / f"{name}.bin", layout.nbytes, layout.parts, len(layout.all_parts))
        self.layout, self.site = layout, site
        self._note_path = folder / f"{name}.json"
        self.note = read_note(self._note_path, OutboxNote)
        if self.note is not None and self.note.layout_digest != layout.digest:
            self.clear()
        elif self.note is not None and self.note.site != site:
            LOG.warning(
                "%s belongs to site %s and is not sent. Use a separate folder for each site.", self.path, self.note.site
            )
            self.note = None

    def is_damaged(self) -> bool:
        """Return whether the file's bytes differ from the digests in the note; false without a note.

        After a power loss, the note may be on disk although some bytes of the file are not: the operating system may
        write them later than the note.
        """
        return self.note is not None and bool(self.differing(self.note.part_digests))

    def begin(self, layout_digest: str) -> None:
        """Remove the note of the previous update. Call this before an update with the layout `layout_digest` is formed.

        Raises:
            VersionSkew: the layout that this worker has computed for the file has another digest.
        """
        if layout_digest != self.layout.digest:
            raise VersionSkew(
                "The server expects updates in another file layout than this worker writes.",
                "Install the same release of Atoll at the server and at this worker.",
            )
        self.clear()

    def seal(self, note: OutboxNote) -> None:
        """Write the note of an update that is complete. A restarted process can then send the update."""
        failpoint("outbox.seal")
        self.note = note
        write_note(self._note_path, note)
        failpoint("outbox.sealed")

    def mark_sent(self) -> None:
        """Record in the note that the server has the update. The update is kept in case the server loses power."""
        if self.note is not None:
            self.note = replace(self.note, sent=True)
            write_note(self._note_path, self.note)

    def clear(self) -> None:
        """Remove the note of the update, so that the update is not sent again."""
        self.note = None
        self._note_path.unlink(missing_ok=True)


class DiskFiles:
    """The base, the next base and the outbox: the files of one fragment of the model in a site's folder.

    Args:
        folder: the site's folder in the run; locked by the caller.
        version: layout of the base file.
        update: layout of the outbox.
        fragment: the fragment's number; None: the run has one fragment.
        site: the site's name.
    """

    def __init__(self, folder: Path, version: Layout, update: Layout, fragment: int | None, site: str) -> None:
        self.folder, self._name = folder, name_of("base-next", fragment)
        self.base = BaseFile(folder, version, name_of("base", fragment))
        self._next_base: BaseFile | None = None
        try:
            self.outbox = Outbox(folder, update, name_of("outbox", fragment), site)
        except BaseException:
            self.base.close()
            raise

    def change_layouts(self, version: Layout, update: Layout) -> None:
        """Replace the base file and the outbox by empty ones with other layouts.

        Args:
            version: layout of the base file.
            update: layout of the outbox.
        """
        self.close()
        self.base = BaseFile(self.folder, version, self.base.name)
        self.outbox = Outbox(self.folder, update, self.outbox.path.stem, self.outbox.site)

    def next_base(self) -> BaseFile:
        """Return the file `base-next`: a version is downloaded into it while the base file is still needed."""
        if self._next_base is None:
            self._next_base = BaseFile(self.folder, self.base.layout, self._name)
        return self._next_base

    def is_next_base(self, run: str, digest: str) -> bool:
        """Return whether this or an earlier process began to download the version with this digest into `base-next`."""
        note: BaseNote | None = read_note(self.folder / f"{self._name}.json", BaseNote)
        return note is not None and (note.run, note.digest) == (run, digest)

    def close_next_base(self) -> None:
        """Close the file `base-next`. It stays on disk."""
        if self._next_base is not None:
            self._next_base.close()
            self._next_base = None

    def move_up(self) -> None:
        """Replace the base file with the file `base-next`, which must be complete."""
        self.base.replace_with(self.next_base())
        self._next_base = None

    def close(self) -> None:
        """Close the files. They stay on disk."""
        self.base.close()
        self.close_next_base()
        self.outbox.close()


@contextmanager
def locked(folder: Path, site: str, within: Path | None = None) -> Iterator[None]:
    """Lock a worker's folder for the duration of the `with` block. Create the folder if it is missing.

    Args:
        folder: the folder.
        site: the site's name.
        within: the folder that the user has named, in which Atoll makes `folder` and those above it; by default the
            folder that contains `folder`.

    Raises:
        StateLocked: another process of the same site on this machine holds the lock.
        StoreError: the folder cannot be made, is a link, or contains a pipe, socket or device; or its lock file cannot
            be opened.
    """
    while (lock := _lock(folder, site, within or folder.parent)) is None:
        pass
    try:
        require_no_pipes(folder)
        yield
    finally:
        lock.close()


def _lock(folder: Path, site: str, within: Path) -> Lock | None:
    """Lock a folder, and return the lock; None if another process just removed the folder."""
    try:
        own_folder(folder, within)
    except OSError as error:
        raise folder_error(error, folder, "Set ATOLL_DIR to a folder that this user may write.") from error
    try:
        return take_folder(folder)
    except FileNotFoundError:
        return None
    except FolderTaken as holder:
        raise StateLocked(
            f"The site name {site!r} is in use: {holder} takes part under this name in the folder {str(folder)!r}.",
            "Use another site name, or end the other process.",
        ) from None
    except OSError as error:
        raise StoreError(
            f"{folder / 'lock'} cannot be opened ({error.strerror}).",
            "Make sure that it is a plain file that this user may write, or set ATOLL_DIR to another folder.",
        ) from error


# -- Removal of old files when a worker starts: those of earlier runs, and those of this run for another number of
# ranks.
#
# SITE/RUN/                       the files of a worker that is not sharded
# SITE/rank-R-of-N/RUN/           the files of rank R of N


_OURS = re.compile(
    r"lock|(base|base-next)(-f\d+)?\.(safetensors|json|tmp)|(outbox|delta)(-f\d+)?\.(bin|json|tmp)|"
    r"(algorithm|residual|kept|script)(-f\d+)?(-[0-3]\.bin|\.json|\.tmp)|held\.(json|tmp)|local\.safetensors|\.local\.safetensors\.tmp|"
    r"flower-state\.safetensors|"
    r"(version|state|spool)-\d+-\d+\.(safetensors|bin)"
)
"""Matches the name of every file that Atoll writes into a worker's folder."""

_RANK = re.compile(r"rank-(\d+)-of-(\d+)")


def folder_of(home: Path, run: str, share: tuple[int, int] | None) -> Path:
    """Return the folder of a worker's files in a run.

    Args:
        home: the site's folder.
        run: id of the run.
        share: (rank, number of ranks) if the model is sharded, because each rank has its own folder; else None.
    """
    return (home / f"rank-{share[0]}-of-{share[1]}" if share else home) / run


def remove_earlier(current: Path, site: str, share: tuple[int, int] | None = None) -> None:
    """Remove old folders of this site, and log how much was freed.

    Old folders are those of earlier runs, and those of any run with another number of ranks. A folder stays if a
    process has locked it, if it has an update that no server has confirmed, or if it holds a file that Atoll did not
    write. Symbolic links are not followed.

    Args:
        current: the folder in use, which stays.
        site: the site's name.
        share: (rank, number of ranks) if the model is sharded, else None. The rank decides which old folders to remove
            here, so that no two ranks remove the same one.
    """
    count = freed_bytes = 0
    for parent in (current.parent, *_other_divisions(current, share)):
        for folder in sorted(parent.iterdir()):
            if folder == current or folder.is_symlink() or not (folder / "lock").is_file():
                continue
            with suppress(AtollError, OSError), locked(folder, site):
                nbytes = _remove(folder)
                if nbytes is not None:
                    count, freed_bytes = count + 1, freed_bytes + nbytes
        with suppress(OSError):  # the folder is not empty
            if parent != current.parent and _RANK.fullmatch(parent.name):
                parent.rmdir()
    if count:
        runs = "an earlier run" if count == 1 else f"{count} earlier runs"
        LOG.info("%s: freed %s: removed the files of %s (all updates had been sent)", site, size(freed_bytes), runs)


def _other_divisions(current: Path, share: tuple[int, int] | None) -> Iterator[Path]:
    """Yield the folders that this rank has to remove: its share of the site's folders for another number of ranks."""
    home = current.parent.parent if share else current.parent
    rank, ranks = share or (0, 1)
    if share and rank == 0:
        yield home
    for path in sorted(home.iterdir()):
        match = _RANK.fullmatch(path.name)
        if match is None or path.is_symlink() or (share and int(match[2]) == ranks):
            continue
        owner = int(match[1])
        if owner == rank or (rank == 0 and owner >= ranks):
            yield path


def _remove(folder: Path) -> int | None:
    """Remove a folder that the caller has locked. Return the number of bytes freed; None if the folder has to stay."""
    try:
        notes: list[OutboxNote | None] = [peek_note(path, OutboxNote) for path in folder.glob("outbox*.json")]
    except NoteDamaged as error:
        LOG.warning(
            "The folder %s of an earlier run is kept, because its update may not have been sent yet: %s",
            folder,
            error,
        )
        return None
    if not all(note is not None and note.sent for note in notes):
        return None
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(fd) as entries:
            found = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
        if not all(map(_OURS.fullmatch, found)) or not all(stat.S_ISREG(each.st_mode) for each in found.values()):
            return None
        for name in sorted(found, key="lock".__eq__):  # `lock` last: on some systems this file is the folder's lock
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    folder.rmdir()
    return sum(each.st_size for each in found.values())
