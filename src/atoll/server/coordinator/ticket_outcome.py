"""What became of a ticket, and how far behind its update was."""

from __future__ import annotations

from collections.abc import Sequence

from atoll.protocol import messages
from atoll.store.rows import TicketRow
from atoll.store.store import Store


def staleness(head: int, version: int, lost: Sequence[int]) -> int:
    """Rounds between a version and the head; `lost` are numbers below the head that no round led to."""
    return max(0, head - version - sum(number > version for number in lost))


def outcome_of(store: Store, row: TicketRow) -> messages.Outcome:
    """What became of a ticket, for its worker."""
    behind = 0
    if row.version is not None and row.version > row.base_version + 1:
        behind = staleness(row.version - 1, row.base_version, store.lost_versions(row.fragment))
    return messages.Outcome.model_validate(
        {
            "ticket": row.ticket,
            "state": row.state,
            "base_version": row.base_version,
            "version": row.version,
            "digest": row.digest or "",
            "staleness": behind,
            "reason": row.reason or "",
        }
    )
