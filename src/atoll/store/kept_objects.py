"""Published objects (tensors for others to download) that the server stores, in the state directory's `objects/`.

    objects/ID.part           the file while its parts arrive; removed by a restart, or if no more bytes arrive
    objects/ID.safetensors    the complete file; it never changes
    objects/ID.json           a note about the file: sizes, digests, expiry time; written last, and replaced atomically

The journal has no rows about objects. When an object expires, its files are removed and its event `Entry.removed` is
set, so that its running downloads stop.
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
from atoll.errors import BadRequest, Busy, Conflict, Gone, UsageError
from atoll.format_text import number_of
from atoll.posix import (
    Descriptor,
    file_error,
    no_sync,
    open_own,
    own_folder,
    read_own,
    replace_file,
    usable,
    write_at,
)
from atoll.tensors.reference import hash_of_secret, new_id, require_secret

LOG = logging.getLogger("atoll.server")

MOST_OBJECTS, MOST_OBJECTS_OF_ONE = 10_000, 2000
"""Maximum number of objects, in all and of one publisher."""
MOST_OPEN, MOST_OPEN_OF_ONE = 128, 16
"""Maximum number of objects that are uploaded at the same time. Each needs an open file descriptor."""
BLOCK_BYTES = 4096
"""A file takes whole blocks of this size on disk; an object has two files."""
HELD_S = 10 * 365 * 86400.0
"""Lifetime of the server's own objects, in seconds. It is so long that they do not expire."""


@dataclass(eq=False)
class Entry:
    """A published object at the server, complete or still arriving.

    Attributes:
        object: id of the object.
        sealed: hash of the object's secret. A process needs the secret to download or remove the object.
        cuts: sizes of the object and its parts.
        inline: whether the object's bytes are sent within its manifest.
        expires_at: expiry time in seconds since 1970.
        digests: part number → BLAKE3, for the parts that are on disk.
        file: the file while parts arrive; closed after that. None if the object was complete from the start.
        until_s: time of `time.monotonic` at which the object is removed if it is still arriving. Each byte moves it on,
            by as much as it may take.
        own: whether the object is the server's own, such as the payload of a task. Publishers cannot remove it. It has
            no note, so the server's next start removes it.
        counts: whether the object counts towards the store's `max_bytes`.
        payer: the site, or else the address, that has opened the object, and that its bytes count for.
        owner: the site that has opened the object with a credential of its own: no other may change or remove it. Empty
            if none has.
        key: what its publisher calls the object in every attempt to publish it; None: it tries once.
        removed: event that is set when the object is removed.
    """

    object: str
    sealed: str
    cuts: Cuts
    inline: bool
    expires_at: float
    digests: dict[int, bytes] = field(default_factory=dict)
    file: Descriptor | None = None
    until_s: float = 0.0
    own: bool = False
    counts: bool = True
    owner: str = ""
    payer: str = ""
    key: str | None = None
    removed: threading.Event = field(default_factory=threading.Event)

    @property
    def is_arriving(self) -> bool:
        """Whether parts may still be written."""
        return self.file is not None and self.file.number >= 0

    def close(self) -> None:
        """Close the file, so that no more bytes can be written. Idempotent."""
        if self.file is not None:
            self.file.close()

    @property
    def manifest(self) -> Manifest:
        """The object's manifest (sizes and digests of its parts). Only for an object with all parts on disk."""
        return Manifest.of_cuts(self.cuts, [self.digests[index] for index in range(self.cuts.count)])


class ObjectStore:
    """The published objects that one server stores.

    Call the methods from the event loop's thread, except those that say "Any thread may call it".

    Args:
        folder: folder for objects only; created when the first object needs it.
        max_bytes: maximum size of all objects together, except those that `make_own` has taken over.
        max_expires_s: maximum lifetime of an object in seconds.
        idle_timeout_s: an incomplete object is removed if no byte arrives for this many seconds, or hardly any.
        most_bytes_of_one: maximum size of the objects of one publisher on disk.
        least_bytes_per_s: bytes a second that have to arrive of an incomplete object, on average.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        max_expires_s: float,
        idle_timeout_s: float,
        least_bytes_per_s: float,
        most_bytes_of_one: int = 2**62,
    ) -> None:
        self.folder, self._max_bytes, self._max_expires_s = folder, max_bytes, max_expires_s
        self._most_bytes_of_one, self._least_bytes_per_s = most_bytes_of_one, least_bytes_per_s
        self._idle_timeout_s = idle_timeout_s
        self._objects: dict[str, Entry] = {}
        self._recover()

    # -- calls of a publisher

    def open(
        self, cuts: Cuts, *, inline: bool, expires_s: float, owner: str = "", payer: str = "", key: str | None = None
    ) -> tuple[Entry, str]:
        """Create an empty object. Its publisher sends the parts later.

        It replaces the object with the same key that the publisher has opened in an earlier attempt, if the answer
        was lost. Else each attempt would leave an object that counts as arriving until the idle timeout.

        Args:
            cuts: sizes of the object and its parts.
            inline: whether the object's bytes are sent within its manifest.
            expires_s: requested lifetime in seconds, reduced to `max_expires_s` if it is longer.
            owner, payer, key: as in `Entry`.

        Returns:
            The object and its secret. The store keeps only a hash of the secret.

        Raises:
            BadRequest: the object is larger than `max_bytes`.
            Busy: the store is full for now, or too many objects are being uploaded; of this publisher, or of all.
            DiskFull: the disk is full.
        """
        self.sweep()
        for earlier in [each for each in self._objects.values() if key and (each.key, each.payer) == (key, payer)]:
            if not earlier.own:
                self.drop(earlier)
        self._require_room_of(payer, cuts)
        if cuts.nbytes > self._max_bytes:
            raise BadRequest(
                f"The object has {cuts.nbytes} bytes, but this server keeps at most {self._max_bytes} bytes "
                "of objects.",
                "Publish it from your own process, or raise disk.objects_max_bytes at the server.",
            )
        taken = self._taken_bytes()
        arriving = sum(entry.is_arriving for entry in self._objects.values())
        if taken + cuts.nbytes > self._max_bytes or len(self._objects) >= MOST_OBJECTS or arriving >= MOST_OPEN:
            busy = Busy(
                f"The server keeps {len(self._objects)} objects with {taken} bytes ({arriving} objects are still "
                f"arriving), and cannot take another object of {cuts.nbytes} bytes now.",
                "Publish later, withdraw objects, or raise disk.objects_max_bytes at the server.",
            )
            busy.retry_after_s = 5.0
            raise busy
        secret = new_id()
        object_id, fd = self.draft()
        expires_at = time.time() + min(expires_s, self._max_expires_s)
        entry = Entry(object_id, hash_of_secret(secret), cuts, inline, expires_at, file=Descriptor(fd), owner=owner)
        entry.until_s, entry.payer, entry.key = time.monotonic() + self._idle_timeout_s, payer, key
        self._objects[entry.object] = entry
        return entry, secret

    def _require_room_of(self, payer: str, cuts: Cuts) -> None:
        """Raise an error if one publisher has too many objects, or too many bytes of them, for another one."""
        mine = [entry for entry in self._objects.values() if entry.payer == payer and entry.counts]
        arriving, nbytes = sum(entry.is_arriving for entry in mine), sum(_disk_bytes(entry.cuts) for entry in mine)
        if _disk_bytes(cuts) > self._most_bytes_of_one:
            raise BadRequest(
                f"The object has {cuts.nbytes} bytes, but this server keeps at most {self._most_bytes_of_one} bytes of "
                "one site.",
                "Publish it from your own process, or raise limits.site_object_bytes at the server.",
            )
        if (
            len(mine) >= MOST_OBJECTS_OF_ONE
            or arriving >= MOST_OPEN_OF_ONE
            or nbytes + _disk_bytes(cuts) > self._most_bytes_of_one
        ):
            busy = Busy(
                f"The server keeps {len(mine)} objects of {payer or 'this publisher'} with {nbytes} bytes on disk "
                f"({arriving} are still arriving), and cannot take another one of {cuts.nbytes} bytes now.",
                f"Publish later, or withdraw objects: one publisher has at most {MOST_OBJECTS_OF_ONE}, of which "
                f"{MOST_OPEN_OF_ONE} are arriving, and {self._most_bytes_of_one} bytes (limits.site_object_bytes).",
            )
            busy.retry_after_s = 5.0
            raise busy

    def write(self, entry: Entry, data: memoryview, offset: int) -> None:
        """Write bytes of an arriving object at `offset`. Any thread may call it.

        Raises:
            Gone: the object was removed, or is complete.
            DiskFull, StoreError: the write failed.
        """
        assert entry.file is not None
        try:
            with entry.file.used() as fd:  # during the write, the object may be removed
                write_at(fd, data, offset)
            later_s = entry.until_s + len(data) / self._least_bytes_per_s
            entry.until_s = min(later_s, time.monotonic() + self._idle_timeout_s)
        except UsageError:
            raise Gone(f"Object {entry.object[:8]} is complete, or was removed.", "Publish it again.") from None
        except OSError as error:
            raise file_error(error, self._path(entry, "part")) from error

    def complete(self, entry: Entry, digest: str) -> None:
        """Make an object downloadable, after all its parts have arrived. It then survives server restarts. Idempotent.

        Args:
            entry: the object.
            digest: the object's digest, as the publisher has computed it.

        Raises:
            Conflict: parts are missing, or the object that arrived has another digest than `digest`.
            DiskFull, StoreError: the note could not be written. The object is removed.
        """
        count = entry.cuts.count - len(entry.digests)
        if count:
            raise Conflict(
                f"Object {entry.object[:8]} lacks {count} of {number_of(entry.cuts.count, 'part')}.", "Send them first."
            )
        if entry.manifest.id != digest:
            raise Conflict(f"The parts of object {entry.object[:8]} do not match its digest.", "Publish it again.")
        if not entry.is_arriving:
            return
        note, temporary = self._path(entry, "json"), self._path(entry, "note")
        try:
            os.replace(self._path(entry, "part"), self._path(entry, "safetensors"))
            replace_file(note, [json_files.seal(_note(entry)).encode()], temporary=temporary, sync=no_sync)
        except OSError as error:
            self.drop(entry)  # without its note the object is useless
            raise file_error(error, note) from error
        entry.close()

    # -- the server's own objects

    def draft(self) -> tuple[str, int]:
        """Create the file of a new object. Any thread may call it.

        For an object of the server itself, write the file, then call `hold` or, after a failure, `discard`.

        Returns:
            The object's id, and a descriptor that the caller closes.

        Raises:
            DiskFull, StoreError: the file cannot be created.
        """
        object_id = new_id()
        path = self.folder / f"{object_id}.part"
        try:
            own_folder(self.folder, self.folder.parent)
            return object_id, open_own(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise file_error(error, error.filename or path) from error

    def discard(self, object_id: str) -> None:
        """Remove the file that `draft` created."""
        (self.folder / f"{object_id}.part").unlink(missing_ok=True)

    def hold(self, object_id: str, manifest: Manifest, *, inline: bool) -> tuple[Entry, str]:
        """Make a written file downloadable, as an object of the server's own, until `drop` or the server's next start.

        Args:
            object_id: id of the file, from `draft`.
            manifest: manifest of the written bytes.
            inline: whether the object's bytes are sent within its manifest.

        Returns:
            The object and its secret.

        Raises:
            Busy: the store is full.
            DiskFull, StoreError: the file cannot be renamed.
        """
        taken = self._taken_bytes()
        if taken + manifest.nbytes > self._max_bytes:
            raise Busy(
                f"The server keeps objects with {taken} bytes, and has no space for a payload of "
                f"{manifest.nbytes} bytes.",
                "Raise disk.objects_max_bytes at the server.",
            )
        secret = new_id()
        digests = dict(enumerate(manifest.part_digests))
        entry = Entry(object_id, hash_of_secret(secret), manifest.cuts, inline, time.time() + HELD_S, digests, own=True)
        try:
            os.replace(self._path(entry, "part"), self._path(entry, "safetensors"))
        except OSError as error:
            raise file_error(error, self._path(entry, "part")) from error
        self._objects[object_id] = entry
        return entry, secret

    def opened(self, object_id: str, secret: str) -> tuple[Entry, int, Path]:
        """Return a complete object with a descriptor of its file, which the caller closes, and with the file's path.

        Raises:
            Gone: the store does not have the object, or it has expired.
            AuthError: the secret is wrong.
            Conflict: parts are missing, or the object is the server's own.
        """
        entry = self.complete_one(object_id, secret)
        self._require_not_own(entry)
        return entry, self.reader(entry), self._path(entry, "safetensors")

    def make_own(self, object_id: str, secret: str) -> Entry:
        """Take over a complete object from its publisher. It stays until `drop` or the server's next start.

        The object no longer counts towards `max_bytes`.

        Raises:
            Gone: the store does not have the object, or it has expired.
            AuthError: the secret is wrong.
            Conflict: parts are missing, or the object is the server's own already.
        """
        entry = self.complete_one(object_id, secret)
        self._require_not_own(entry)
        self._path(entry, "json").unlink(missing_ok=True)
        entry.own, entry.counts, entry.expires_at = True, False, time.time() + HELD_S
        return entry

    def _require_not_own(self, entry: Entry) -> None:
        if entry.own:
            raise Conflict(f"Object {entry.object[:8]} belongs to the server.", "The server removes it after the task.")

    # -- calls of a process that has the reference

    def owners_of(self, object_id: str) -> list[str]:
        """Return the site that owns an object, alone in a list; an empty list if none does."""
        entry = self._objects.get(object_id)
        return [entry.owner] if entry is not None and entry.owner else []

    def find(self, object_id: str, secret: str) -> Entry:
        """Return an object, complete or still arriving, if the secret is right.

        Raises:
            Gone: the store does not have the object, or it has expired.
            AuthError: the secret is wrong.
        """
        entry = self._objects.get(object_id)
        if entry is not None and entry.expires_at <= time.time():
            self.drop(entry)
            entry = None
        if entry is None:
            raise Gone(
                f"The server does not have object {object_id[:8]}: it has expired, was withdrawn, or never existed.",
                "Publish it again. Pass a longer expires_s if it is fetched late.",
            )
        require_secret(secret, entry.sealed, object_id)
        return entry

    def complete_one(self, object_id: str, secret: str) -> Entry:
        """Return a complete object, if the secret is right.

        Raises:
            Gone: the store does not have the object, or it has expired.
            AuthError: the secret is wrong.
            Conflict: the object is still arriving.
        """
        entry = self.find(object_id, secret)
        if entry.is_arriving:
            raise Conflict(
                f"Object {object_id[:8]} is still being uploaded.",
                "Fetch it after publish() has returned the reference.",
            )
        return entry

    def inline_bytes(self, entry: Entry) -> bytes | None:
        """Return the bytes of a complete object if they are sent within its manifest, else None."""
        with usable(self.folder):
            return read_own(self._path(entry, "safetensors")) if entry.inline else None

    def reader(self, entry: Entry) -> int:
        """Return a descriptor of a complete object; the caller closes it."""
        with usable(self.folder):
            return open_own(self._path(entry, "safetensors"))

    def remove(self, object_id: str, secret: str) -> None:
        """Remove an object on request of its publisher.

        Raises:
            Gone: the store does not have the object, or it has expired.
            AuthError: the secret is wrong.
            Conflict: the object is the server's own.
        """
        entry = self.find(object_id, secret)
        self._require_not_own(entry)
        self.drop(entry)

    # -- time

    def sweep(self) -> None:
        """Remove expired objects, and incomplete ones of which hardly a byte has arrived for `idle_timeout_s`."""
        now, now_s = time.time(), time.monotonic()
        for entry in list(self._objects.values()):
            if entry.expires_at <= now or (entry.is_arriving and entry.until_s < now_s):
                LOG.debug("object %s is removed", entry.object[:8])
                self.drop(entry)

    def close(self) -> None:
        """Remove incomplete objects and the server's own objects. Complete objects of publishers stay on disk."""
        for entry in list(self._objects.values()):
            if entry.is_arriving or entry.own:
                self.drop(entry)

    def drop(self, entry: Entry) -> None:
        """Remove an object and its files, and set its event `removed`. Idempotent. If a file stays, log a warning."""
        entry.removed.set()
        self._objects.pop(entry.object, None)
        try:
            for kind in ("json", "safetensors", "part", "note"):  # the note first: after a kill, a start removes more
                self._path(entry, kind).unlink(missing_ok=True)
        except OSError as error:
            LOG.warning("Files of an object stay on disk: %s", file_error(error, error.filename or self.folder))
        entry.close()

    def _recover(self) -> None:
        """Load complete objects that have not expired, and remove all other files in the folder."""
        now, wanted = time.time(), set[str]()
        with usable(self.folder):
            if os.path.lexists(self.folder):
                own_folder(self.folder, self.folder.parent)  # before files are removed: it may be a link
            names = sorted(os.listdir(self.folder)) if self.folder.is_dir() else []
            for name in names:
                entry = _read_note(self.folder / name) if name.endswith(".json") else None
                if entry is not None and entry.expires_at > now and self._is_whole(entry):
                    self._objects[entry.object] = entry
                    wanted |= {name, self._path(entry, "safetensors").name}
            for name in set(names) - wanted:
                (self.folder / name).unlink(missing_ok=True)

    def _is_whole(self, entry: Entry) -> bool:
        path = self._path(entry, "safetensors")
        return path.is_file() and not path.is_symlink() and path.stat().st_size == entry.cuts.nbytes

    def _taken_bytes(self) -> int:
        return sum(entry.cuts.nbytes for entry in self._objects.values() if entry.counts)

    def _path(self, entry: Entry, kind: str) -> Path:
        return self.folder / f"{entry.object}.{kind}"


def _disk_bytes(cuts: Cuts) -> int:
    """Return how much an object takes on disk, with its note."""
    return -(-cuts.nbytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES


def _note(entry: Entry) -> dict[str, Any]:
    cuts = entry.cuts
    return {
        "object": entry.object,
        "sealed": entry.sealed,
        "cuts": [cuts.head_bytes, cuts.nbytes, cuts.part_bytes],
        "inline": entry.inline,
        "expires_at": entry.expires_at,
        "owner": entry.owner,
        "payer": entry.payer,
        "digests": [entry.digests[index].hex() for index in range(cuts.count)],
    }


def _read_note(path: Path) -> Entry | None:
    """Return the object that a note (a file `ID.json`) describes; None if the note is damaged or has a wrong name."""
    try:
        note: Mapping[str, Any] = json_files.unseal(read_own(path))
        entry = Entry(
            note["object"],
            note["sealed"],
            Cuts(*note["cuts"]),
            note["inline"],
            float(note["expires_at"]),
            {index: bytes.fromhex(digest) for index, digest in enumerate(note["digests"])},
            owner=note["owner"],
            payer=note.get("payer", ""),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning(
            "%s is damaged: %s. Its object is removed and must be published again. Check the disk.", path, error
        )
        return None
    return entry if path.name == f"{entry.object}.json" and len(entry.digests) == entry.cuts.count else None
