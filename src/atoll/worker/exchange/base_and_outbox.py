"""A worker's two files: the base it trains from and the outbox it sends from.

Both have the size of the model, are preallocated and rewritten in place, and live in the page cache: anonymous
memory holds no second copy of the model. Beside each lies a small JSON note, replaced atomically, that says what is
in it; a file without its note is scrap.

    base.safetensors + base.json      the version that was pulled; opens with safetensors
    outbox.bin       + outbox.json    the encoded update of one ticket; kept until the next one is formed

They lie in a folder for each run; `remove_earlier` removes those of runs that the site has left.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor

from atoll.errors import AtollError, DiskFull, StateLocked, StoreError, VersionSkew
from atoll.json_files import NoteDamaged, peek_note, read_note, write_note
from atoll.posix import Descriptor, FolderTaken, read_at, take_folder, write_at
from atoll.runtime import failpoint
from atoll.tensors.byte_runs import Move, read_pieces
from atoll.tensors.chunks import CHUNK_BYTES, bytes_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import Layout, Part, Piece, Segment
from atoll.worker.log_lines import LOG, size


def name_of(name: str, fragment: int | None) -> str:
    """Return the name of a fragment's file; `name` itself if the run has one fragment."""
    return name if fragment is None else f"{name}-f{fragment}"


@dataclass(frozen=True)
class BaseNote:
    """Which version the base file holds, or is about to hold."""

    run: str
    fragment: int
    version: int
    digest: str
    part_digests: list[str]
    complete: bool


@dataclass(frozen=True)
class OutboxNote:
    """The update in the outbox: complete when the note exists. `sent` when the server has it in its journal.

    `site` is the one that formed it; empty in a note of an earlier Atoll.
    """

    run: str
    ticket: int
    fragment: int
    base_version: int
    base_digest: str
    layout_digest: str
    digest: str
    part_digests: list[str]
    weight: float
    steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    round: int = 0
    sent: bool = False
    site: str = ""


class VersionFile(Protocol):
    """A version of one fragment, to be read."""

    layout: Layout
    note: BaseNote | None

    def holds(self, run: str, digest: str) -> bool:
        """Return whether this version is here, every byte."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the file's byte `offset` on."""

    def read_pieces(self, moves: Iterable[Move]) -> None:
        """Fill each memory from its byte of the file; neighbours in the file by one call."""

    def elements(self, piece: Piece, start: int, stop: int, scratch: memoryview, dtype: torch.dtype) -> Tensor:
        """Return elements [start, stop) of a piece's tensor, in `scratch`."""

    def values_of(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of a tensor, in new memory."""

    def begin_local(self) -> None:
        """The file is about to hold something that is no version: no digest names it any more."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`."""


class OutboxFile(Protocol):
    """The update that was formed last; `note` says which, once all of it is there."""

    layout: Layout
    note: OutboxNote | None
    path: Path
    nbytes: int

    @property
    def fd(self) -> int:
        """The open file's descriptor number; not the caller's to close."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`."""

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the file's byte `offset` on."""

    def begin(self, layout_digest: str) -> None:
        """Forget what is there: an update of this layout is about to be formed."""

    def seal(self, note: OutboxNote) -> None:
        """The update is complete: from here on it survives this process."""

    def mark_sent(self) -> None:
        """The server has it."""

    def clear(self) -> None:
        """The update can never count, or not again: the file may be rewritten."""

    def is_damaged(self) -> bool:
        """Return whether it is not what its note says."""


class ExchangeFiles(Protocol):
    """The files of one fragment at a site."""

    @property
    def base(self) -> VersionFile:
        """The version that is trained from."""

    @property
    def outbox(self) -> OutboxFile:
        """The update that was formed last."""

    def beside(self) -> VersionFile:
        """Open the file for a version that is to take the place of the base."""

    def is_beside(self, run: str, digest: str) -> bool:
        """Return whether a pull of this version into that file has begun, by whichever process."""

    def drop_beside(self) -> None:
        """Close that file."""

    def move_up(self) -> None:
        """Let that file, which must be complete, take the place of the base."""


class TensorFile:
    """An open file of tensors, read at offsets by many threads.

    Args:
        descriptor: of the file; closed with this object.

    Attributes:
        layout: of the tensors in it, in files of versions.
    """

    layout: Layout

    def __init__(self, path: Path, descriptor: Descriptor, nbytes: int) -> None:
        self.path, self.nbytes, self._descriptor = path, nbytes, descriptor

    @property
    def fd(self) -> int:
        """The descriptor's number."""
        return self._descriptor.number

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the file's byte `offset` on.

        Raises:
            EOFError: the file ends before.
        """
        try:
            read_at(self.fd, target, offset)
        except EOFError as error:
            raise EOFError(f"{self.path}: {error}") from None

    def values(self, segment: Segment, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the tensor that lies at `segment` of the file as it is, in new memory."""
        values = torch.empty(stop - start, dtype=torch_dtype(segment.spec.dtype), device="cpu")
        self.read_into(segment.offset + start * segment.spec.item_bytes, bytes_of(values))
        return values

    def read_pieces(self, moves: Iterable[Move]) -> None:
        """Fill each memory from its byte of the file; neighbours in the file by one call.

        Raises:
            EOFError: the file ends before.
        """
        try:
            read_pieces(self.fd, moves)
        except EOFError as error:
            raise EOFError(f"{self.path}: {error}") from None

    def elements(self, piece: Piece, start: int, stop: int, scratch: memoryview, dtype: torch.dtype) -> Tensor:
        """Elements [start, stop) of a piece's tensor, in `scratch`."""
        item = piece.segment.spec.item_bytes
        view = scratch[: (stop - start) * item]
        self.read_into(self.layout.by_name[piece.segment.spec.name].offset + start * item, view)
        return torch.frombuffer(view, dtype=dtype)

    def values_of(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of a tensor of the version, in new memory."""
        return self.values(self.layout.by_name[name], start, stop)

    def close(self) -> None:
        """Close the file, once nothing uses it any more."""
        self._descriptor.close()


class ScratchFile(TensorFile):
    """A preallocated file of fixed size that is rewritten in place, read and written at offsets by many threads.

    Attributes:
        is_new: it was not there, or had another size: whatever a note says of it, it holds zeros.

    Args:
        used: (offset, nbytes) of what is going to be written, which has to find room; by default all.
    """

    def __init__(self, path: Path, nbytes: int, used: Iterable[tuple[int, int]] | None = None) -> None:
        super().__init__(path, Descriptor(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)), nbytes)
        self._one_writes = threading.Lock()  # the kernel lets one write at a time, and lets the others spin
        try:
            self.is_new = os.fstat(self.fd).st_size != nbytes
            if self.is_new:
                os.ftruncate(self.fd, 0)
                os.ftruncate(self.fd, nbytes)
                for offset, count in ((0, nbytes),) if used is None else used:
                    if count:
                        os.posix_fallocate(self.fd, offset, count)
        except OSError as error:
            self.close()
            path.unlink(missing_ok=True)
            raise DiskFull(
                f"{path.parent} has no room for {nbytes / 1e9:.2f} GB ({error.strerror}).",
                "Free some disk, or set ATOLL_DIR to a folder with more.",
            ) from error

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of `data`; from any thread, even while another one closes the file.

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
                "Look at the disk, or set ATOLL_DIR to a folder on another one.",
            ) from error

    def digest(self, part: Part) -> bytes:
        """BLAKE3 of a part as it lies on disk."""
        hasher, scratch = blake3(), bytearray(CHUNK_BYTES)
        for offset in range(part.start, part.stop, CHUNK_BYTES):
            view = memoryview(scratch)[: min(CHUNK_BYTES, part.stop - offset)]
            self.read_into(offset, view)
            hasher.update(view)
        return hasher.digest()

    def content_digest(self) -> str:
        """BLAKE3 in hex of all runs of 2 MiB that are not zeros, each with its place: holes need not be read."""
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
    """Where from here on something was written; `nbytes` where nothing was. Some systems do not tell: here, then."""
    if offset >= nbytes:
        return nbytes
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        return nbytes if error.errno == errno.ENXIO else offset


class PartsFile(ScratchFile):
    """One that is cut into parts; where those of one rank are all that it holds, it has holes.

    Args:
        parts: that it holds.
        count: of all parts, those of other ranks included.
    """

    def __init__(self, path: Path, nbytes: int, parts: Sequence[Part], count: int) -> None:
        used = None if len(parts) == count else ((part.start, part.nbytes) for part in parts)
        super().__init__(path, nbytes, used)
        self._parts, self._count = parts, count

    def differing(self, digests: Sequence[str], among: Collection[Part] | None = None) -> list[Part]:
        """The parts with bytes of another digest.

        Args:
            digests: in hex, of all parts in order, those of other ranks included.
            among: the parts to look at; by default all that are ours.
        """
        looked_at = self._parts if among is None else among
        if len(digests) != self._count:  # of another cut: none can be told to be right
            return list(looked_at)
        return [part for part in looked_at if self.digest(part).hex() != digests[part.index]]


class BaseFile(PartsFile):
    """The version that a worker trains from, byte for byte as the server has it."""

    def __init__(self, folder: Path, layout: Layout, name: str = "base") -> None:
        super().__init__(folder / f"{name}.safetensors", layout.nbytes, layout.parts, len(layout.all_parts))
        self.layout, self.name = layout, name
        self._note_path = folder / f"{name}.json"
        if self.is_new:
            self._note_path.unlink(missing_ok=True)
        self.note = read_note(self._note_path, BaseNote)
        self._seen = False  # whether the bytes of a complete note are known to be in the file

    def holds(self, run: str, digest: str) -> bool:
        """Whether this version is here, every byte; what an earlier process left is read once before it is believed.

        Its note survives what the bytes may not: they are written behind, and a disk may damage them.
        """
        note: BaseNote | None = self.note
        if note is None or not note.complete or (note.run, note.digest) != (run, digest):
            return False
        if not self._seen:
            wrong = self.differing(note.part_digests)
            if wrong:
                LOG.warning(
                    "%s: %d of %d parts are not what was pulled, and are pulled again. Look at the disk.",
                    self.path,
                    len(wrong),
                    len(self.layout.parts),
                )
                self._write_note(replace(note, complete=False))
                return False
            self._seen = True
        return True

    def begin(self, note: BaseNote) -> list[Part]:
        """Say which version is about to be written; returns the parts that are not there already.

        A pull that broke off left parts of the same version behind: what still has its digest is kept.
        """
        resumed = self.note is not None and (self.note.run, self.note.digest) == (note.run, note.digest)
        wanted = self.differing(note.part_digests) if resumed else list(self.layout.parts)
        self._write_note(note)
        return wanted

    def finish(self) -> None:
        """The version is complete."""
        assert self.note is not None
        self._write_note(replace(self.note, complete=True))
        self._seen = True

    def begin_local(self) -> None:
        """The file is about to hold something that is no version: no digest names it any more."""
        assert self.note is not None
        self._write_note(replace(self.note, digest="", part_digests=[]))

    def replace_with(self, other: BaseFile) -> None:
        """Become `other`, which must be complete: its file and note take the place of these."""
        assert other.note is not None
        os.replace(other.path, self.path)
        other._note_path.unlink(missing_ok=True)
        self._descriptor, other._descriptor = other._descriptor, self._descriptor
        other.close()
        self._seen = other._seen
        self._write_note(other.note)

    def _write_note(self, note: BaseNote) -> None:
        self.note = note
        write_note(self._note_path, note)


class Outbox(PartsFile):
    """The update that a worker has formed and must be able to send until what it counts in is durable."""

    def __init__(self, folder: Path, layout: Layout, name: str = "outbox", site: str = "") -> None:
        super().__init__(folder / f"{name}.bin", layout.nbytes, layout.parts, len(layout.all_parts))
        self.layout = layout
        self._note_path = folder / f"{name}.json"
        self.note = read_note(self._note_path, OutboxNote)
        if self.note is not None and self.note.layout_digest != layout.digest:
            self.clear()
        elif self.note is not None and site and self.note.site not in ("", site):
            LOG.warning("%s is of site %s: it is not sent. Bring each site its own folder.", self.path, self.note.site)
            self.note = None

    def is_damaged(self) -> bool:
        """Whether it is not what its note says. The note survives what the bytes may not: they are written behind."""
        return self.note is not None and bool(self.differing(self.note.part_digests))

    def begin(self, layout_digest: str) -> None:
        """An update of this layout is about to be formed: what is in the file counts no more.

        Raises:
            VersionSkew: the file is laid out in another way.
        """
        if layout_digest != self.layout.digest:
            raise VersionSkew(
                "The server lays the update out in another way than this worker.",
                "Upgrade Atoll to the same version on both sides.",
            )
        self.clear()

    def seal(self, note: OutboxNote) -> None:
        """The update is complete: from here on it survives this process."""
        failpoint("outbox.seal")
        self.note = note
        write_note(self._note_path, note)
        failpoint("outbox.sealed")

    def mark_sent(self) -> None:
        """The server has it; kept, since a server that lost power may ask for it again."""
        if self.note is not None:
            self.note = replace(self.note, sent=True)
            write_note(self._note_path, self.note)

    def clear(self) -> None:
        """The update can never count, or not again: the file may be rewritten."""
        self.note = None
        self._note_path.unlink(missing_ok=True)


class DiskFiles:
    """The files of one fragment in a site's folder, as `ExchangeFiles`.

    Args:
        folder: of the site in the run; locked by the caller.
        version, update: layouts of what lies in them.
        fragment: its number; None: the run has one.
    """

    def __init__(self, folder: Path, version: Layout, update: Layout, fragment: int | None, site: str) -> None:
        self.folder, self._name = folder, name_of("base-next", fragment)
        self.base = BaseFile(folder, version, name_of("base", fragment))
        self._beside: BaseFile | None = None
        try:
            self.outbox = Outbox(folder, update, name_of("outbox", fragment), site)
        except BaseException:
            self.base.close()
            raise

    def beside(self) -> BaseFile:
        """Open the file for a version that is to take the place of the base."""
        if self._beside is None:
            self._beside = BaseFile(self.folder, self.base.layout, self._name)
        return self._beside

    def is_beside(self, run: str, digest: str) -> bool:
        """Return whether a pull of this version into that file has begun, by whichever process."""
        note: BaseNote | None = read_note(self.folder / f"{self._name}.json", BaseNote)
        return note is not None and (note.run, note.digest) == (run, digest)

    def drop_beside(self) -> None:
        """Close that file."""
        if self._beside is not None:
            self._beside.close()
            self._beside = None

    def move_up(self) -> None:
        """Let that file, which must be complete, take the place of the base."""
        self.base.replace_with(self.beside())
        self._beside = None

    def close(self) -> None:
        """Close the files; what is in them stays."""
        self.base.close()
        self.drop_beside()
        self.outbox.close()


@contextmanager
def locked(folder: Path, site: str) -> Iterator[None]:
    """Own a worker's folder.

    Raises:
        StateLocked: another process of the same site runs on this machine.
    """
    fd = None
    while fd is None:
        fd = _lock(folder, site)
    try:
        yield
    finally:
        os.close(fd)


def _lock(folder: Path, site: str) -> int | None:
    """The lock, held; None where the folder was removed at that moment (`remove_earlier`), to be tried again."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        return take_folder(folder)
    except FileNotFoundError:
        return None
    except FolderTaken as holder:
        raise StateLocked(
            f"The site {site!r} is taken: {holder} takes part as it, with the folder {str(folder)!r}.",
            "Give this one another site name, or end the other.",
        ) from None
    except OSError as error:
        raise StoreError(
            f"{folder / 'lock'} cannot be opened ({error.strerror}).",
            "It has to be a plain file that this user may write; remove what is there, or set ATOLL_DIR elsewhere.",
        ) from error


# -- What earlier runs of a site have left on its disk, and this one under another number of ranks: removed at a
# start.
#
# SITE/RUN/                       the files of a worker that is not sharded
# SITE/rank-R-of-N/RUN/           those of rank R of N


_OURS = re.compile(
    r"lock|(base|base-next)(-f\d+)?\.(safetensors|json|tmp)|(outbox|delta)(-f\d+)?\.(bin|json|tmp)|"
    r"(algorithm|residual)(-f\d+)?(-[01]\.bin|\.json|\.tmp)|held\.(json|tmp)|local\.safetensors|\.local\.safetensors\.tmp|"
    r"(version|state|spool)-\d+-\d+\.(safetensors|bin)"
)
"""Names of the files in a worker's folder."""

_RANK = re.compile(r"rank-(\d+)-of-(\d+)")


def folder_of(home: Path, run: str, share: tuple[int, int] | None) -> Path:
    """Of a worker's files.

    Args:
        home: the site's folder.
        share: rank and number of ranks, where the model is sharded: this rank's files are its own.
    """
    return (home / f"rank-{share[0]}-of-{share[1]}" if share else home) / run


def remove_earlier(current: Path, site: str, share: tuple[int, int] | None = None) -> None:
    """Remove what nothing refers to any more beside the folder `current`, and say so.

    That is what earlier runs have left, and other numbers of ranks, in this run, too: their shares of a base or an
    update are of no use to this division. A folder stays that a process has locked, or with an update in its outbox
    that no server has acknowledged, or that holds anything else than a worker's files. No link is followed: what lies
    elsewhere was put there.

    Args:
        share: as for `folder_of`; each rank removes other folders than the others.
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
        with suppress(OSError):  # there is more in it
            if parent != current.parent and _RANK.fullmatch(parent.name):
                parent.rmdir()
    if count:
        runs = "an earlier run" if count == 1 else f"{count} earlier runs"
        LOG.info("%s: removed the files of %s, %s: every update in them was sent", site, runs, size(freed_bytes))


def _other_divisions(current: Path, share: tuple[int, int] | None) -> Iterator[Path]:
    """Where the site has files of other numbers of ranks, as far as this rank is to look after them."""
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
    """Remove a folder that is locked by the caller; returns its bytes, None where it has to stay."""
    try:
        notes: list[OutboxNote | None] = [peek_note(path, OutboxNote) for path in folder.glob("outbox*.json")]
    except NoteDamaged as error:
        LOG.warning(
            "%s stays: the note of its outbox is damaged (%s), and may be of an update not sent.", folder, error
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
        for name in sorted(found, key="lock".__eq__):  # last: it is the lock where folders cannot be locked
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    folder.rmdir()
    return sum(each.st_size for each in found.values())
