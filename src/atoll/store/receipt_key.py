"""The key with which a server signs the receipts of updates: the file `receipts.key` in the state directory.

A server writes it at its first start, with mode 0600. Its public half is in the run's description, and sites remember
it: keep the file with the state directory, and a copy of it where the backups are.
"""

from __future__ import annotations

import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.errors import StateCorrupt
from atoll.posix import keep_file, read_secret
from atoll.protocol.messages import SignedReceipt
from atoll.protocol.receipts import public_hex, signed_receipt
from atoll.store.journal_tables import TicketRow

NAME = "receipts.key"


class ReceiptKey:
    """Signs the receipts of a run.

    Args:
        directory: the state directory, locked by the caller.

    Attributes:
        public: the public half of the key, in hex.

    Raises:
        StoreError: the file cannot be read or written, or belongs to another user.
        StateCorrupt: it is damaged. It is not written again, because sites remember the key.
    """

    def __init__(self, directory: Path) -> None:
        self._key = _kept(directory / NAME)
        self.public = public_hex(self._key)

    def receipt_of(self, run: str, row: TicketRow) -> SignedReceipt:
        """Return the receipt of an accepted or counted update."""
        is_counted = row.state == "counted" and row.version is not None
        return signed_receipt(
            self._key,
            run=run,
            site=row.site,
            ticket=row.ticket,
            fragment=row.fragment,
            base_version=row.base_version,
            digest=row.digest,
            weight=row.report.weight,
            steps=row.report.steps,
            metrics=dict(row.report.metrics),
            state="counted" if is_counted else "accepted",
            version=row.version if is_counted else 0,
        )


def _kept(path: Path) -> Ed25519PrivateKey:
    try:
        text = read_secret(path, "Restore the state directory from a backup.").decode("latin-1").strip()
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise StateCorrupt(
                f"{path}, the key of the run's receipts, is damaged.",
                "Restore it from a backup. Without it, remove the file: sites then have to accept another key.",
            )
        return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text))
    except FileNotFoundError:
        key = Ed25519PrivateKey.generate()
    keep_file(path, f"{key.private_bytes_raw().hex()}\n".encode())
    return key
