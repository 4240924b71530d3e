"""What goes down in place of a version: committed with it, kept and dropped with it.

A version whose delta is lost or damaged is still a version: it is pulled whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blake3 import blake3

from atoll.store.file_slots import DELTA, JOURNAL, Slot, verify
from atoll.store.rows import DeltaRow, VersionRow
from atoll.store.tickets import Tickets

_COLUMNS = "fragment, version, slot, base_version, base_digest, digest, part_digests"


class Deltas(Tickets):
    """Part of `Store`."""

    def delta(self, fragment: int, version: int) -> DeltaRow | None:
        """What goes down of a version; None where it is pulled whole."""
        found = self.journal.row(f"SELECT {_COLUMNS} FROM deltas WHERE fragment = ? AND version = ?", fragment, version)
        return None if found is None else _to_delta(found)

    def insert_delta(self, row: VersionRow, slot: Slot, base: VersionRow, digest: str, parts: Sequence[bytes]) -> None:
        """What a draft has of a version goes down from `base`; inside the transaction that commits it."""
        self.journal.execute(
            f"INSERT INTO deltas ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?)",
            row.fragment,
            row.version,
            slot.number,
            base.version,
            base.digest,
            digest,
            b"".join(parts),
        )
        self.journal.after_commit(lambda: self.pool(DELTA, row.fragment).hold(slot, JOURNAL))

    def drop_delta(self, fragment: int, version: int) -> None:
        """Forget what goes down of a version, inside a transaction."""
        row = self.delta(fragment, version)
        if row is not None:
            pool = self.pool(DELTA, fragment)
            self.forget_delta(row)
            self.journal.after_commit(lambda: pool.drop(pool[row.slot], JOURNAL))

    def forget_delta(self, row: DeltaRow) -> None:
        """Remove its row alone."""
        self.journal.execute("DELETE FROM deltas WHERE fragment = ? AND version = ?", row.fragment, row.version)

    def recover_deltas(self, fragment: int) -> None:
        """At a start: keep those that are whole and whose version is kept."""
        shape = self.shapes_of(fragment).delta
        found = self.journal.rows(f"SELECT {_COLUMNS} FROM deltas WHERE fragment = ?", fragment)
        kept = {
            version for (version,) in self.journal.rows("SELECT version FROM versions WHERE fragment = ?", fragment)
        }
        with self.transaction():
            for values in found:
                row = _to_delta(values)
                slot = self.pool(DELTA, fragment).adopt(row.slot) if shape and row.version in kept else None
                if slot is None or shape is None or not verify(slot.fd, shape, row.part_digests):
                    self.forget_delta(row)


def split_digests(joined: bytes) -> tuple[bytes, ...]:
    return tuple(joined[start : start + blake3.digest_size] for start in range(0, len(joined), blake3.digest_size))


def _to_delta(row: tuple[Any, ...]) -> DeltaRow:
    values = dict(zip(_COLUMNS.split(", "), row, strict=True))
    return DeltaRow(**{**values, "part_digests": split_digests(values["part_digests"])})
