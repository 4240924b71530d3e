"""What the journal holds → what the round machine starts from."""

from __future__ import annotations

from atoll.rounds.early_stopping import Progress
from atoll.rounds.leases import Member
from atoll.rounds.machine import FragmentSnapshot, FrozenRound, OpenRound, Snapshot, Ticket
from atoll.store.journal_tables import Recovered


def snapshot_of(recovered: Recovered, progress: Progress) -> Snapshot:
    """The machine's snapshot; rows of rounds that are over are left to the machine to pass over."""
    fragments = []
    for _, head in sorted(recovered.heads.items()):
        mine = [row for row in recovered.rounds if row.fragment == head.fragment]
        now = [row for row in mine if row.base_version == head.version]
        frozen = next((FrozenRound(row.base_version, row.tickets) for row in now if row.state == "frozen"), None)
        open_ = next((OpenRound(row.base_version, row.expected) for row in now if row.state == "open"), None)
        started, lost = head.fragment in recovered.started, recovered.lost.get(head.fragment, 0)
        fragments.append(FragmentSnapshot(head.version, open_, frozen, started=started, lost=lost))
    return Snapshot(
        fragments=tuple(fragments),
        members=tuple(
            Member(row.site, row.lease, row.state == "alive", "" if row.state == "alive" else row.state)
            for row in recovered.members
        ),
        tickets=tuple(
            Ticket(
                row.ticket, row.site, row.fragment, row.base_version, row.state, row.reason or "", row.accepted_order
            )
            for row in recovered.tickets
        ),
        next_ticket=recovered.next_ticket,
        next_lease=recovered.next_lease,
        finished=recovered.finished,
        progress=progress,
    )
