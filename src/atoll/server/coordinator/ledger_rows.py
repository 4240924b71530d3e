"""What the round machine decided, as rows of the journal; what became of a ticket."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence

from atoll.protocol import messages
from atoll.rounds import events as fx
from atoll.server.coordinator.roster import Presence
from atoll.store.journal_tables import TicketRow
from atoll.store.store import Store


def staleness(head: int, version: int, lost: Sequence[int]) -> int:
    """Rounds between a version and the head; `lost` are numbers below the head that no round led to."""
    return max(0, head - version - sum(number > version for number in lost))


def outcome_of(store: Store, row: TicketRow) -> messages.Outcome:
    """What became of a ticket, for its worker."""
    behind = 0
    if row.version is not None and row.version > row.base_version + 1:
        behind = staleness(row.version - 1, row.base_version, store.run_log.lost_versions(row.fragment))
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


# -- What the round machine decided, as rows of the journal.


def write(
    effect: fx.Effect, store: Store, roster: MutableMapping[str, Presence], *, keep_weights: bool = False
) -> None:
    """Write the row of one effect; inside the caller's transaction.

    Args:
        keep_weights: whether a site keeps its first weight (`RunLog.freeze`).
    """
    match effect:
        case fx.LeaseGranted(site, lease):
            presence = roster.setdefault(site, Presence(site))
            store.run_log.put_member(
                site,
                lease,
                process=presence.holder,
                host=presence.host,
                labels_json=json.dumps(presence.labels),
            )
        case fx.LeaseEnded(site, lease, why, detail):
            store.run_log.end_member(site, lease, why, detail)
        case fx.RoundOpened(fragment, base_version, expected):
            store.run_log.open_round(fragment, base_version, expected)
        case fx.ExpectedChanged(fragment, base_version, expected):
            store.run_log.set_expected(fragment, base_version, expected)
        case fx.TicketIssued(site, ticket, fragment, base_version, new):
            if new:
                store.tickets.issue(ticket, site, fragment, base_version)
        case fx.TicketsExpired(tickets, reason):
            store.tickets.expire(tickets, reason)
        case fx.RoundReopened(fragment, base_version, tickets, reason):
            store.tickets.reopen(fragment, base_version, tickets, reason)
        case fx.RoundClosed(fragment, base_version, tickets):
            store.run_log.freeze(fragment, base_version, tickets, keep_weights=keep_weights)
        case fx.RunFinished():
            store.run_log.finish()
        case _:
            pass
