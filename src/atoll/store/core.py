"""What every room of the store shares: the directory, the journal and its lock, the pools of slots."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import ConfigError, UsageError
from atoll.runtime import failpoint
from atoll.store.file_slots import DELTA, SPOOL, STATE, VERSION, FileShape, FragmentShapes, SlotPool
from atoll.store.journal import Durability, Journal

if TYPE_CHECKING:
    from atoll.store.journal_tables import TicketRow
    from atoll.store.update_spool import Spool
    from atoll.store.versions import PinnedVersion

STATE_SLOTS = 4
"""Of the head, the version before, `durable_version` and the one being written."""


class Core:
    """The base of the store's parts; `Store` is made of them."""

    def __init__(
        self, directory: Path, journal: Journal, durability: Durability, keep_versions: int, max_pins: int
    ) -> None:
        self.directory = directory
        self.slots_directory = directory / "slots"
        self.journal = journal
        self.lock = journal.lock
        self.durability: Durability = durability
        self.keep_versions = keep_versions
        self.max_pins = max_pins
        self.wanted: Callable[[int], Collection[int]] = lambda fragment: ()  # versions that somebody is going to pull
        self.in_memory = False
        self.pools: dict[tuple[str, int], SlotPool] = {}
        self.spools: dict[int, Spool] = {}
        self.live_tickets: dict[int, TicketRow] = {}  # as the journal has them: each is asked for several times
        self.live_as_of = journal.undone
        self.pins: list[PinnedVersion] = []  # oldest first
        self._shapes: tuple[FragmentShapes, ...] = ()

    def transaction(self, *, flat: bool = False) -> AbstractContextManager[None]:
        """Make several changes one: all of them survive a kill, or none; `flat` as for `Journal.transaction`."""
        return self.journal.transaction(flat=flat)

    def shape(self, fragments: Sequence[FragmentShapes]) -> None:
        """Tell the sizes of the run's files; before `recover`, on every start.

        Raises:
            ConfigError: the run in this directory was begun with files of other sizes or headers.
        """
        self._shapes = tuple(fragments)
        told = {(f, kind): shape for f, shapes in enumerate(fragments) for kind, shape in shapes.by_kind().items()}
        rows = self.journal.rows("SELECT fragment, kind, nbytes, header_digest FROM shapes ORDER BY fragment, kind")
        known = {(fragment, kind): (nbytes, header) for fragment, kind, nbytes, header in rows}
        if not known:
            with self.transaction():
                for (fragment, kind), shape in told.items():
                    self.journal.execute(
                        "INSERT INTO shapes (fragment, kind, nbytes, header_digest) VALUES (?, ?, ?, ?)",
                        fragment,
                        kind,
                        shape.nbytes,
                        shape.header_digest,
                    )
                for fragment in range(len(fragments)):
                    self.journal.execute("INSERT INTO heads (fragment) VALUES (?)", fragment)
        else:
            self._compare(known, {key: (shape.nbytes, shape.header_digest) for key, shape in told.items()})
        self.pools = {
            (kind, fragment): self._new_pool(kind, fragment, shape) for (fragment, kind), shape in told.items()
        }

    def _compare(
        self, known: dict[tuple[int, str], tuple[int, bytes]], told: dict[tuple[int, str], tuple[int, bytes]]
    ) -> None:
        for fragment, kind in sorted(known.keys() | told.keys()):
            before, after = known.get((fragment, kind)), told.get((fragment, kind))
            if before != after:
                sizes = [f"{value[0]} bytes" if value else "none" for value in (before, after)]
                raise ConfigError(
                    f"The run in {self.directory} was begun with another model, codec or outer optimizer: its {kind} "
                    f"files of fragment {fragment} have {sizes[0]}, these settings need {sizes[1]}"
                    f"{', with other tensors' if sizes[0] == sizes[1] else ''}.",
                    "Go on with the settings it was begun with, or give this run another state_dir.",
                )

    def _new_pool(self, kind: str, fragment: int, shape: FileShape) -> SlotPool:
        versions = self.keep_versions + self.max_pins + 1
        most = {VERSION: versions, DELTA: versions, STATE: STATE_SLOTS, SPOOL: None}[kind]
        return SlotPool(self.slots_directory, kind, fragment, shape, self.lock, most, self.in_memory)

    def pool(self, kind: str, fragment: int) -> SlotPool:
        """The slots of a kind.

        Raises:
            UsageError: there is no such fragment, or `shape` was not called.
        """
        if (kind, fragment) not in self.pools:
            raise UsageError(
                f"The store has no {kind} files of fragment {fragment}.", "Call shape() and recover() first."
            )
        return self.pools[kind, fragment]

    def shapes_of(self, fragment: int) -> FragmentShapes:
        return self._shapes[fragment]

    def holds(self) -> dict[str, dict[str, int]]:
        """Every slot's file name → who holds it (journal, writer, pull, reader) → how often."""
        return {name: who for pool in self.pools.values() for name, who in pool.holds().items()}

    def free_bytes(self) -> int:
        """What the disk of the state directory has left for this user, or this machine's memory, in bytes."""
        if self.in_memory:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        info = os.statvfs(self.directory)
        return info.f_bavail * info.f_frsize

    def sync(self, fd: int, what: str) -> None:
        """fsync, of a file or a folder.

        Raises:
            SyncFailed: for good; no later call of the store succeeds.
        """
        try:
            failpoint("fsync")
            os.fsync(fd)
        except OSError as error:
            raise self.journal.sync_failed(what, error) from error

    def sync_folder(self, folder: Path) -> None:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sync(fd, str(folder))
        finally:
            os.close(fd)
