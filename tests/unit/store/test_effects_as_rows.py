"""What the round machine decides is in the journal afterwards, row by row, and a new start finds it there."""

from __future__ import annotations

from pathlib import Path

from store_world import begin, write_version

from atoll.rounds import events
from atoll.server.coordinator.ledger import record_in
from atoll.server.coordinator.roster import Presence


def test_effects_outlive_the_process(tmp_path: Path) -> None:
    """b left and came back late: the round that both began waits for a alone, whatever happens to the server."""
    store, _ = begin(tmp_path)
    write_version(store, 0)
    decided = [
        events.LeaseGranted("a", 1),
        events.LeaseGranted("b", 2),
        events.RoundOpened(0, 0, ("a", "b")),
        events.TicketIssued("a", 1, 0, 0, new=True),
        events.TicketIssued("b", 2, 0, 0, new=True),
        events.LeaseEnded("b", 2, "left", "Ctrl-C"),
        events.TicketsExpired((2,), "b left"),
        events.ExpectedChanged(0, 0, ("a",)),
        events.LeaseGranted("b", 3),
    ]
    record_in(store, {"b": Presence("b")}, decided)
    store.close()
    store, _ = begin(tmp_path)
    round_ = store.run_log.round(0, 0)
    assert round_ is not None
    assert (round_.state, round_.expected) == ("open", ("a",))
    assert {member.site: (member.lease, member.state) for member in store.run_log.members()} == {
        "a": (1, "alive"),
        "b": (3, "alive"),
    }
    assert [(row.ticket, row.state) for row in (store.tickets.get(1), store.tickets.get(2))] == [
        (1, "open"),
        (2, "expired"),
    ]
    store.close()
