"""A round of the journal that is open again: its tickets take an update once more, and the audit log says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_world import accept, audited, begin, first, play_round, send_part, submit, update_of

from atoll.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return first(tmp_path)


@pytest.mark.covers("P10")
def test_a_frozen_round_and_its_tickets_are_open_again(store: Store, tmp_path: Path) -> None:
    tickets = play_round(store, 0, commit=False)
    store.tickets.reopen(0, 0, tickets, "it has gone")
    assert [store.tickets.get(ticket).state for ticket in tickets] == ["open", "open"]
    assert [store.tickets.get(ticket).digest for ticket in tickets] == [None, None]
    (row,) = store.run_log.rounds()
    assert (row.state, row.tickets) == ("open", ())
    assert audited(store)[-1].what == "reopened"
    store.close()
    again, _ = begin(tmp_path)  # a restart finds it so
    assert again.run_log.rounds()[0].state == "open"
    for ticket, site in zip(tickets, ("a", "b"), strict=True):
        for part in (0, 1):
            send_part(again, ticket, part, update_of(site, 0))
        accept(again, ticket, update_of(site, 0))
    again.run_log.freeze(0, 0, tickets)
    assert again.run_log.rounds()[0].state == "frozen"


@pytest.mark.covers("P10")
def test_another_update_may_come_under_a_ticket_that_is_open_again(store: Store) -> None:
    store.run_log.open_round(0, 0, ("a", "b"))
    submit(store, 1, "a", 0)
    store.tickets.reopen(0, 0, (1,), "it has gone")
    for part in (0, 1):
        send_part(store, 1, part, update_of("z", 0))
    assert accept(store, 1, update_of("z", 0)).state == "accepted"


@pytest.mark.covers("P10")
def test_the_same_again_and_what_has_counted_change_nothing(store: Store) -> None:
    tickets = play_round(store, 0)
    store.tickets.reopen(0, 0, tickets, "it has gone")
    assert [store.tickets.get(ticket).state for ticket in tickets] == ["counted", "counted"]
