"""Objects that the server keeps for others: a safetensors file and a note each, in `objects/` of the state directory.

    objects/ID.part           while its parts arrive; removed by a restart, and when no more bytes come
    objects/ID.safetensors    complete; never changes
    objects/ID.json           its note: sizes, digests, when it expires; written last, and replaced atomically

They are no part of the run: no journal row refers to them. An object that expires is unlinked; `Kept.gone` tells a
request that still sends it to stop.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll import json_files
from atoll.blobs.manifest import Cuts, Manifest
from atoll.errors import BadRequest, Busy, Conflict, Gone
from atoll.posix import write_at
from atoll.store.file_slots import disk_error
from atoll.tensors.reference import new_id, require_secret, seal

LOG = logging.getLogger("atoll.server")

MOST_OBJECTS = 10_000
MOST_OPEN = 64
"""Objects that may arrive at a time; each has a descriptor."""
HELD_S = 10 * 365 * 86400.0
"""An object of the server's own does not expire."""


@dataclass(eq=False)
class Kept:
    """An object.

    Attributes:
        expires_at: seconds since 1970.
        digests: of the parts that are on disk, by number.
        fd: while parts arrive; −1 once it is complete.
        touched_s: monotonic time of its last byte.
        held: by the server itself, which alone ends it; it has no note, so a start removes it.
        counts: towards the bytes that all together may have.
        gone: set when it is no longer kept.
    """

    object: str
    sealed: str
    cuts: Cuts
    inline: bool
    expires_at: float
    digests: dict[int, bytes] = field(default_factory=dict)
    fd: int = -1
    touched_s: float = 0.0
    held: bool = False
    counts: bool = True
    gone: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Take no more bytes. Idempotent."""
        with self.lock:
            fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    @property
    def manifest(self) -> Manifest:
        """Of the whole; all parts must be there."""
        return Manifest.of_cuts(self.cuts, [self.digests[index] for index in range(self.cuts.count)])


class ObjectStore:
    """The objects of one server. All calls come from its event loop; bytes are written by its pool.

    Args:
        folder: for objects alone; made when it is needed.
        max_bytes: of all together.
        max_expires_s: the longest time that an object is kept.
        idle_timeout_s: an incomplete object of which no byte has come for so long is given up.
    """

    def __init__(self, folder: Path, *, max_bytes: int, max_expires_s: float, idle_timeout_s: float) -> None:
        self.folder, self._max_bytes, self._max_expires_s = folder, max_bytes, max_expires_s
        self._idle_timeout_s = idle_timeout_s
        self._kept: dict[str, Kept] = {}
        self._recover()

    # -- what a publisher does

    def open(self, cuts: Cuts, *, inline: bool, expires_s: float) -> tuple[Kept, str]:
        """Make room for an object.

        Returns:
            The object, and its secret, which the store does not keep.

        Raises:
            BadRequest: it is larger than the limit. Busy: there is no room now. DiskFull: the disk has no room.
        """
        self.sweep()
        if cuts.nbytes > self._max_bytes:
            raise BadRequest(
                f"The object has {cuts.nbytes} bytes, this server keeps at most {self._max_bytes} of objects.",
                "Publish it from your own process, or raise disk.objects_max_bytes at the server.",
            )
        taken = self._taken_bytes()
        arriving = sum(kept.fd >= 0 for kept in self._kept.values())
        if taken + cuts.nbytes > self._max_bytes or len(self._kept) >= MOST_OBJECTS or arriving >= MOST_OPEN:
            busy = Busy(
                f"The server keeps {len(self._kept)} objects of {taken} bytes ({arriving} of them arrive), and has no "
                f"room for {cuts.nbytes} more.",
                "Publish later, withdraw what is not needed, or raise disk.objects_max_bytes at the server.",
            )
            busy.retry_after_s = 5.0
            raise busy
        secret = new_id()
        object_id, fd = self.draft()
        expires_at = time.time() + min(expires_s, self._max_expires_s)
        kept = Kept(object_id, seal(secret), cuts, inline, expires_at, fd=fd, touched_s=time.monotonic())
        self._kept[kept.object] = kept
        return kept, secret

    def write(self, kept: Kept, data: memoryview, offset: int) -> None:
        """Write bytes of an object that arrives; from any thread.

        Raises:
            Gone: it is not kept any more.
            DiskFull, StoreError: the disk's.
        """
        try:
            with kept.lock:
                if kept.fd < 0:
                    raise Gone(f"Object {kept.object[:8]} takes no more bytes.", "Publish it again.")
                fd = os.dup(kept.fd)  # the object may end meanwhile, and its descriptor be reused
            try:
                write_at(fd, data, offset)
            finally:
                os.close(fd)
        except OSError as error:
            raise disk_error(error, self._path(kept, "part")) from error

    def complete(self, kept: Kept, digest: str) -> None:
        """Let an object be read once all its parts are there, also after a restart. Idempotent.

        Raises:
            Conflict: parts are missing, or make up another digest.
            DiskFull, StoreError: its note could not be written.
        """
        missing = kept.cuts.count - len(kept.digests)
        if missing:
            raise Conflict(f"Object {kept.object[:8]} lacks {missing} of {kept.cuts.count} parts.", "Send them first.")
        if kept.manifest.id != digest:
            raise Conflict(f"The parts of object {kept.object[:8]} do not make up its digest.", "Publish it again.")
        if kept.fd < 0:
            return
        note, temporary = self._path(kept, "json"), self._path(kept, "note")
        try:
            os.replace(self._path(kept, "part"), self._path(kept, "safetensors"))
            temporary.write_text(json_files.seal(_note(kept)), encoding="utf-8")
            os.replace(temporary, note)
        except OSError as error:
            self.drop(kept)  # without its note it is of no use
            raise disk_error(error, note) from error
        kept.close()

    # -- what the server itself publishes, and takes

    def draft(self) -> tuple[str, int]:
        """Make a file for an object of the server's own, from any thread; it ends with `hold` or `discard`.

        Returns:
            The object's id, and a descriptor that the caller closes.

        Raises:
            DiskFull, StoreError: the disk's.
        """
        object_id = new_id()
        path = self.folder / f"{object_id}.part"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            return object_id, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise disk_error(error, path) from error

    def discard(self, object_id: str) -> None:
        """Remove a draft."""
        (self.folder / f"{object_id}.part").unlink(missing_ok=True)

    def hold(self, object_id: str, manifest: Manifest, *, inline: bool) -> tuple[Kept, str]:
        """Let a draft that is written be read, until `drop` or the next start; returns it and its secret.

        Raises:
            Busy: there is no room. DiskFull, StoreError: the disk's.
        """
        taken = self._taken_bytes()
        if taken + manifest.nbytes > self._max_bytes:
            raise Busy(
                f"The server keeps objects of {taken} bytes, and has no room for a payload of {manifest.nbytes}.",
                "Raise disk.objects_max_bytes at the server.",
            )
        secret = new_id()
        digests = dict(enumerate(manifest.part_digests))
        kept = Kept(object_id, seal(secret), manifest.cuts, inline, time.time() + HELD_S, digests, held=True)
        try:
            os.replace(self._path(kept, "part"), self._path(kept, "safetensors"))
        except OSError as error:
            raise disk_error(error, self._path(kept, "part")) from error
        self._kept[object_id] = kept
        return kept, secret

    def take(self, object_id: str, secret: str) -> tuple[Kept, int]:
        """Hand a complete object over to the caller: it cannot be found any more, its bytes end with the descriptor.

        Raises:
            Gone, AuthError, Conflict: as `complete_one`.
        """
        kept = self.complete_one(object_id, secret)
        self._require_not_held(kept)
        fd = self.reader(kept)
        self.drop(kept)
        return kept, fd

    def make_own(self, object_id: str, secret: str) -> Kept:
        """Make a complete object the server's own: it stays until `drop`, or until the next start.

        It counts no more towards `max_bytes`, so that objects that come after it find room.

        Raises:
            Gone, AuthError, Conflict: as `complete_one`.
        """
        kept = self.complete_one(object_id, secret)
        self._require_not_held(kept)
        self._path(kept, "json").unlink(missing_ok=True)
        kept.held, kept.counts, kept.expires_at = True, False, time.time() + HELD_S
        return kept

    def _require_not_held(self, kept: Kept) -> None:
        if kept.held:
            raise Conflict(f"Object {kept.object[:8]} is the server's own.", "It ends with its task.")

    # -- what a holder of the reference may do

    def find(self, object_id: str, secret: str) -> Kept:
        """Return an object, if the secret is right.

        Raises:
            Gone: it is not kept here, or no longer. AuthError: the secret is wrong.
        """
        kept = self._kept.get(object_id)
        if kept is not None and kept.expires_at <= time.time():
            self.drop(kept)
            kept = None
        if kept is None:
            raise Gone(
                f"Object {object_id[:8]} is not kept here: it has expired, was withdrawn, or never was.",
                "Publish it again, with a longer expires_s if it is fetched late.",
            )
        require_secret(secret, kept.sealed, object_id)
        return kept

    def complete_one(self, object_id: str, secret: str) -> Kept:
        """As `find`, of an object that is complete.

        Raises:
            Conflict: parts are missing.
        """
        kept = self.find(object_id, secret)
        if kept.fd >= 0:
            raise Conflict(
                f"Object {object_id[:8]} has not arrived yet.", "Fetch it once its publisher has the reference."
            )
        return kept

    def inline_bytes(self, kept: Kept) -> bytes | None:
        """Return the bytes of a complete object, where they travel within its manifest."""
        return self._path(kept, "safetensors").read_bytes() if kept.inline else None

    def reader(self, kept: Kept) -> int:
        """Return a descriptor of a complete object; the caller closes it."""
        return os.open(self._path(kept, "safetensors"), os.O_RDONLY | os.O_CLOEXEC)

    def remove(self, object_id: str, secret: str) -> None:
        """Remove an object."""
        kept = self.find(object_id, secret)
        self._require_not_held(kept)
        self.drop(kept)

    # -- time

    def sweep(self) -> None:
        """Remove objects that have expired, and incomplete ones that no longer arrive."""
        now, now_s = time.time(), time.monotonic()
        for kept in list(self._kept.values()):
            if kept.expires_at <= now or (kept.fd >= 0 and kept.touched_s + self._idle_timeout_s < now_s):
                LOG.debug("object %s is removed", kept.object[:8])
                self.drop(kept)

    def close(self) -> None:
        """Drop incomplete objects and those of the server itself; complete ones stay for the next start."""
        for kept in list(self._kept.values()):
            if kept.fd >= 0 or kept.held:
                self.drop(kept)

    def drop(self, kept: Kept) -> None:
        """End an object. Idempotent."""
        kept.gone.set()
        self._kept.pop(kept.object, None)
        for kind in ("json", "safetensors", "part", "note"):  # the note first: without it the rest is swept at a start
            self._path(kept, kind).unlink(missing_ok=True)
        kept.close()

    def _recover(self) -> None:
        """Take up objects that are complete and have not expired; remove everything else in the folder."""
        now, wanted = time.time(), set[str]()
        names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
        for name in names:
            kept = _read_note(self.folder / name) if name.endswith(".json") else None
            if kept is not None and kept.expires_at > now and self._is_whole(kept):
                self._kept[kept.object] = kept
                wanted |= {name, self._path(kept, "safetensors").name}
        for name in set(names) - wanted:
            (self.folder / name).unlink(missing_ok=True)

    def _is_whole(self, kept: Kept) -> bool:
        path = self._path(kept, "safetensors")
        return path.is_file() and path.stat().st_size == kept.cuts.nbytes

    def _taken_bytes(self) -> int:
        return sum(kept.cuts.nbytes for kept in self._kept.values() if kept.counts)

    def _path(self, kept: Kept, kind: str) -> Path:
        return self.folder / f"{kept.object}.{kind}"


def _note(kept: Kept) -> dict[str, Any]:
    cuts = kept.cuts
    return {
        "object": kept.object,
        "sealed": kept.sealed,
        "cuts": [cuts.head_bytes, cuts.nbytes, cuts.part_bytes],
        "inline": kept.inline,
        "expires_at": kept.expires_at,
        "digests": [kept.digests[index].hex() for index in range(cuts.count)],
    }


def _read_note(path: Path) -> Kept | None:
    """Read a note; None if it is damaged, or of another object."""
    try:
        note: Mapping[str, Any] = json_files.unseal(path.read_bytes())
        kept = Kept(
            note["object"],
            note["sealed"],
            Cuts(*note["cuts"]),
            note["inline"],
            float(note["expires_at"]),
            {index: bytes.fromhex(digest) for index, digest in enumerate(note["digests"])},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning(
            "%s is damaged: %s. Its object is removed, and has to be published again. Look at the disk.", path, error
        )
        return None
    return kept if path.name == f"{kept.object}.json" and len(kept.digests) == kept.cuts.count else None
